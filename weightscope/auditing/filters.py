"""Expectations of the initialisers of depthwise filters: a covariance for each layer, or fixed patterns."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import DepthwisePart, NamedTensors, depthwise
from weightscope.auditing.intervals import (
    LEVEL,
    UNTOUCHED,
    Interval,
    Row,
    error_in,
    interval,
    mean_square,
    predicted,
    row,
)
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS, Check, each
from weightscope.init import convolution

_KINDS = ("depthwise convolutions",)
_LEAST = 1e-4  # of the mean expected variance: in directions of less, rounding in half precision would be seen


@EXPECTATIONS.register(
    "conv_covariance", reads=_KINDS, square=True, variants=tuple({"preset": name} for name in convolution.PRESETS)
)
def conv_covariance_checks(source: NamedTensors, **p: Any) -> list[Check]:
    """Checks of every layer's filters against `N(0, scale^2 conv_covariance(k, sigma(depth)))`."""
    curve = convolution.settings(p["preset"], p["sigma0"], p["v"], p["a"])
    choice("schedule", p["schedule"], ("depth", "sawtooth"))
    found = depthwise(source, strict=None)
    square = [part for part in found if part.square] if not p["strict"] else []
    parts = convolution.checked_filters(square or found, convolution.BUMP)
    sigmas = dict(zip(parts, map(curve, convolution.relative_depths(parts, p["schedule"])), strict=True))

    def covariance(k: int, sigma: float, factor: float = 1.0) -> np.ndarray:
        root = convolution.covariance_root((factor * p["scale"]) ** 2 * convolution.conv_covariance(k, sigma), p["psd"])
        return root @ root.T

    def rows(part: DepthwisePart) -> list[Row]:
        k, sigma = part.kernel[0], float(sigmas[part])
        expected = covariance(k, sigma)
        # Of independent entries, those of the same total variance are the hardest to tell.
        wrong = {UNTOUCHED: np.eye(k**2) * expected.trace() / k**2, error_in("sigma"): covariance(k, 1.2 * sigma)}
        wrong[error_in("scale")] = covariance(k, sigma, 1.2)
        return _covariance_rows(part.read(), expected, wrong)

    return each("conv_covariance", "filters", parts, rows)


@EXPECTATIONS.register("random_filters", reads=_KINDS)
def random_filters_checks(source: NamedTensors, *, distribution: str, gain: float) -> list[Check]:
    """Checks of independent entries with variance `gain^2 / (kh kw)` in every depthwise layer."""

    def rows(part: DepthwisePart) -> list[Row]:
        x, size = part.read().cpu(), math.prod(part.kernel)
        known: list[Row] = []
        if distribution == "uniform":
            known = [row("largest", float(x.abs().max()) * math.sqrt(size) / gain, (0.0, math.sqrt(3) * 1.01))]
        elif distribution == "absolute":
            known = [row("smallest", float(x.min()), (0.0, math.inf))]
            signs = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(0))
            x = x * (2 * signs - 1)  # normal again
        expected, default = np.eye(size) * gain**2 / size, np.eye(size) / (3 * size)  # of U(-1, 1) / k
        return _covariance_rows(x, expected, {UNTOUCHED: default, error_in("gain"): 1.44 * expected}) + known

    return each("random_filters", "filters", depthwise(source, strict=None), rows)


def _covariance_rows(filters: Tensor, covariance: np.ndarray, wrong: Mapping[str, np.ndarray]) -> list[Row]:
    """Checks of filters (C, kh, kw) by an expected covariance, and powers for those of other covariances.

    The filters are whitened, `y = S^(-1/2) E^T f`, in the r directions that have at least 1e-4 of the mean
    variance. The coordinates of a correct layer are then independent standard normal, so that energies are chi-squared
    and an error is found in any direction, even one of little variance.

    - energy: mean square of the whitened coordinates, 1;
    - strongest, weakest: the whitened direction with the most and the least energy;
    - correlation: `||Y^T Y / C - I||_F / sqrt(r)`, the correlations between whitened coordinates;
    - mean: squared norm of the whitened mean, times C / r;
    - outside: the energy in the other directions, over the expected one in all.
    """
    x = filters.cpu().double().flatten(1).numpy()  # (C, k^2)
    if bad := int(x.size - np.isfinite(x).sum()):
        return [row("NaN or infinite", float(bad), 0.0)]
    values, vectors = np.linalg.eigh(covariance)
    inside = values > _LEAST * values.mean()
    c, r, total, g = len(x), int(inside.sum()), values.sum(), np.random.default_rng(0)

    def measured(x: np.ndarray) -> dict[str, float]:
        y = (x @ vectors)[:, inside] / np.sqrt(values[inside])  # (C, r)
        energies = np.mean(y**2, axis=0)  # (r,)
        return {
            "energy": float(energies.mean()),
            "strongest": float(energies.max()),
            "weakest": float(energies.min()),
            "correlation": _correlation(y),
            "mean": c * float(np.mean(y.mean(0) ** 2)),
            "outside": float(np.mean(np.sum((x @ vectors[:, ~inside]) ** 2, axis=1)) / total),
        }

    def drawn(error: str, covariance: np.ndarray) -> list[dict[str, float]]:
        values, vectors = np.linalg.eigh(covariance)
        root, edge = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T, math.sqrt(3)
        draws = (g.uniform(-edge, edge, x.shape) if error == UNTOUCHED else g.normal(size=x.shape) for _ in range(32))
        return [measured(z @ root) for z in draws]

    low, high = interval(mean_square(c), 1e-3, LEVEL / r)
    limits = {
        "energy": interval(mean_square(c * r), 1e-3),
        "strongest": (0.0, high),
        "weakest": (low, math.inf),
        "correlation": _correlations(c, r),
        "mean": interval(mean_square(r)),
        "outside": (0.0, 10 * (1e-5 + float(values[~inside].clip(0).sum() / total))),
    }
    found, errors = measured(x), {error: drawn(error, other) for error, other in wrong.items()}
    return [
        row(s, found[s], limits[s], {e: predicted([draw[s] for draw in draws]) for e, draws in errors.items()})
        for s in limits
    ]


def _correlation(y: np.ndarray) -> float:
    c, r = y.shape
    return float(np.linalg.norm(y.T @ y / c - np.eye(r))) / math.sqrt(r)


@lru_cache(maxsize=256)
def _correlations(c: int, r: int) -> Interval:
    """The interval of the correlation of standard normal samples (C, r): its logarithm is nearer to normal."""
    g = np.random.default_rng(0)
    low, high = interval(predicted(np.log([_correlation(g.standard_normal((c, r))) for _ in range(400)])))
    return math.exp(low), math.exp(high)


@EXPECTATIONS.register("impulse_filters", reads=_KINDS, variants=({}, {"sign": "random"}))
def impulse_filters_checks(source: NamedTensors, *, filter_size: int | None, sign: str) -> list[Check]:
    """Checks that every filter has one pixel of 1, or of random sign, and the others 0, with pixels used evenly."""

    def rows(part: DepthwisePart) -> list[Row]:
        x = part.read().cpu().flatten(1)
        signs: list[Row] = []
        if sign == "random":
            signs, x = [_positive(x)], x.abs()
        central = x[:, convolution.central_pixels(part, filter_size)]
        taps = central.shape[1]
        # Pixels may be used evenly or drawn independently for each channel (impulse paper, section 3).
        most = max(float(stats.binom.isf(LEVEL / taps, part.channels, 1 / taps)), math.ceil(part.channels / taps))
        edge = 1 / math.sqrt(math.prod(part.kernel))  # torch's default entries are within +-edge
        return [
            row("largest entry", farthest(x.amax(1), 1.0), 1.0, {UNTOUCHED: edge, error_in("the impulses"): 1.2}),
            row("sum", farthest(x.abs().sum(1), 1.0), 1.0),
            row("central sum", farthest(central.sum(1), 1.0), 1.0),
            row("uses of a pixel", float((central > 0.5).sum(0).max()), (0.0, most)),
            *signs,
        ]

    return each("impulse_filters", "filters", depthwise(source, strict=None), rows)


def _positive(filters: Tensor) -> Row:
    """The number of filters (C, f^2) with a positive sum, of random signs."""
    return row("positive filters", float((filters.sum(1) > 0).sum()), stats.binom(len(filters), 0.5))


@EXPECTATIONS.register("box_filters", reads=_KINDS, variants=({}, {"sign": "random"}))
def box_filters_checks(source: NamedTensors, *, value: float, sign: str) -> list[Check]:
    """Checks that every entry of a filter is the value, times one sign for the whole filter if signs are random."""

    def rows(part: DepthwisePart) -> list[Row]:
        x, expected, signs = part.read().cpu().flatten(1), value, list[Row]()
        if sign == "random" and value:
            signs, x, expected = [_positive(x)], x * x.sum(1, keepdim=True).sign(), abs(value)
        slack, edge = 0.004 * abs(value), 1 / math.sqrt(math.prod(part.kernel))  # half precision; torch's defaults
        within = stats.uniform(-edge, 2 * edge).cdf([expected - slack, expected + slack])
        wrong = {error_in("value"): 1.2 * expected} if value else {}
        what, found, limits, power = row("entry", farthest(x, expected), expected, wrong, slack)
        return [(what, found, limits, power | {UNTOUCHED: 1 - float(within[1] - within[0]) ** x.numel()}), *signs]

    return each("box_filters", "filters", depthwise(source, strict=None), rows)
