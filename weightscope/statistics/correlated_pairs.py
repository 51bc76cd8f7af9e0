"""Which tensors of a network are correlated: tests of the pairs of an exchangeable covariance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import atanh, copysign, inf, sqrt, tanh

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from weightscope.statistics.exchangeable import TypeCovariance


@dataclass(frozen=True)
class Pair:
    """Two views that share a type, and how they go together.

    Attributes:
        groups: of the type.
        a: name of one view.
        b: name of the other.
        correlation: signed for one copy each, otherwise the largest canonical one.
        ci95: 95 % interval of the true one; of a canonical one conservative, and the estimate, which chance increases,
            may be above it.
        z: `correlation` in standard errors for one copy each; otherwise the normal quantile of p.
        p: two-sided, adjusted for the number of pairs of all types (Holm 1979).
        signed: whether each view has one copy.
    """

    groups: tuple[str, ...]
    a: str
    b: str
    correlation: float
    ci95: tuple[float, float]
    z: float
    p: float
    signed: bool


def correlated_pairs(covariances: Sequence[TypeCovariance]) -> list[Pair]:
    """Every pair of views with a shared type, tested; the empty type, which has N samples only, is left out.

    One copy each: Fisher's transformation of the correlation, with the standard error over N networks where it is
    known, compared with Student's t of N - 1 degrees of freedom, and 1 / sqrt(samples) otherwise. Several copies: the
    largest canonical correlation with Bartlett's chi-squared test of Wilks' lambda; samples are divided by the type's
    design effect, the median squared ratio of the two standard errors of its single copies, where that exceeds one.
    Its interval inverts the noncentral chi-squared distribution of the same statistic.
    """
    out = []
    for found in covariances:
        if not found.kind.groups:
            continue
        samples = found.samples / max(1.0, design_effect(found))
        blocks = {view.name: found.kind.slices[view.name] for view in found.kind.views}
        # A test of p against q copies needs more samples than p + q; larger views are not whitened for nothing.
        testable = [name for name, part in blocks.items() if part.stop - part.start < samples - 3]
        white = {name: _whitened(found.covariance[blocks[name], blocks[name]]) for name in testable}
        for a, b in combinations(testable, 2):
            block = found.covariance[blocks[a], blocks[b]]
            if block.size == 1:
                pair = _single(found, blocks[a].start, blocks[b].start)
            else:
                pair = _canonical(block, white[a], white[b], samples)
            if pair is not None:
                correlation, interval, z, p = pair
                out.append(Pair(found.kind.groups, a, b, correlation, interval, z, p, block.size == 1))
    order = np.argsort([pair.p for pair in out], kind="stable")
    running, adjusted = 0.0, {}
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(out) - rank) * out[i].p))
        adjusted[int(i)] = running
    pairs = [replace(pair, p=adjusted[i]) for i, pair in enumerate(out)]
    return sorted(pairs, key=lambda pair: -abs(pair.z))


def design_effect(found: TypeCovariance) -> float:
    """The median squared ratio of standard errors over networks to those of independent samples; 1 where unknown."""
    upper = np.triu(np.isfinite(found.errors), 1)
    if not upper.any():
        return 1.0
    independent = (1 - found.correlation()[upper] ** 2) / sqrt(max(found.samples, 1))
    return float(np.median((found.errors[upper] / independent) ** 2))


_Tested = tuple[float, tuple[float, float], float, float]


def _single(found: TypeCovariance, i: int, j: int) -> _Tested | None:
    scale = sqrt(found.covariance[i, i] * found.covariance[j, j])
    if not scale > 0 or found.samples < 4:
        return None
    r = float(np.clip(found.covariance[i, j] / scale, -1, 1))
    known = np.isfinite(found.errors[i, j])
    error = found.errors[i, j] if known else (1 - r**2) / sqrt(found.samples - 3)
    null = stats.t(found.networks - 1) if known else stats.norm
    if abs(r) > 1 - 1e-12:
        return r, (r, r), copysign(inf, r), 0.0
    step = error / (1 - r**2)  # of atanh r
    centre = atanh(r)
    z = centre / step if step > 0 else copysign(inf, r)
    half = float(null.isf(0.025)) * step
    return r, (tanh(centre - half), tanh(centre + half)), z, float(2 * null.sf(abs(z)))


def _canonical(block: np.ndarray, left: np.ndarray, right: np.ndarray, samples: float) -> _Tested | None:
    p, q = left.shape[1], right.shape[1]
    if not p or not q or samples <= p + q + 2:
        return None
    values = np.linalg.svd(left.T @ block @ right, compute_uv=False).clip(0, 1 - 1e-12)
    weight = samples - (p + q + 3) / 2
    statistic = -weight * float(np.log1p(-(values**2)).sum())
    log_p = float(stats.chi2.logsf(statistic, p * q))
    z = float(stats.norm.isf(np.exp(log_p) / 2)) if log_p > -600 else sqrt(-2 * log_p)
    low, high = (noncentrality / weight for noncentrality in _noncentralities(statistic, p * q))
    # -sum log(1 - rho^2) of all canonical correlations is at least that of the largest, at most min(p, q) times it
    interval = sqrt(-np.expm1(-low / min(p, q))), sqrt(-np.expm1(-high))
    return float(values[0]), interval, z, float(np.exp(log_p))


def _noncentralities(statistic: float, freedom: int) -> tuple[float, float]:
    """The 95 % interval of the noncentrality of a chi-squared statistic: those that make it neither small nor large."""

    def solved(level: float) -> float:
        if stats.chi2.cdf(statistic, freedom) <= level:
            return 0.0
        # the mean is freedom + noncentrality, the variance 2 (freedom + 2 noncentrality)
        most = statistic + 20 * sqrt(freedom + 2 * statistic) + 100
        return float(brentq(lambda x: stats.ncx2.cdf(statistic, freedom, x) - level, 0.0, most))

    return solved(0.975), solved(0.025)


def _whitened(block: np.ndarray) -> np.ndarray:
    """V / sqrt(eigenvalues) of a covariance, without directions that do not vary."""
    values, vectors = np.linalg.eigh(block)
    kept = values > max(values.max(initial=0.0), 0.0) * 1e-10
    return vectors[:, kept] / np.sqrt(values[kept])
