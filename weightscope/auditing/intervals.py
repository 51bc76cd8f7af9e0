"""Intervals that contain a statistic of a correct initialisation with probability 1 - `LEVEL`.

If a statistic's distribution is known (chi-squared energies, means of many entries), the interval has its quantiles.
Otherwise (statistics of a product's best low-rank approximation) the correct construction is simulated at the same
shape, or at the same ratio of a smaller width, and the interval is a t prediction interval of the draws.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import stats

# Per check. A report of 5,000 checks (36 heads have about 300) then has a false-alarm rate below 0.5 %.
LEVEL = 1e-6

Interval = tuple[float, float]


def normal(mean: float, sd: float, *, level: float = LEVEL, slack: float = 0.0) -> Interval:
    """`mean +- z sd`, z the two-sided normal quantile of `level`, wider by `slack` on each side."""
    half = float(stats.norm.isf(level / 2)) * sd + slack
    return mean - half, mean + half


def chi_squared(dof: float, *, level: float = LEVEL, slack: float = 0.0) -> Interval:
    """Two-sided interval of a chi-squared variable over its degrees of freedom."""
    low, high = stats.chi2.ppf(level / 2, dof) / dof, stats.chi2.isf(level / 2, dof) / dof
    return float(low) - slack, float(high) + slack


def f_ratio(over: float, under: float, *, level: float = LEVEL) -> Interval:
    """Two-sided interval of Fisher's F with (over, under) degrees of freedom."""
    return float(stats.f.ppf(level / 2, over, under)), float(stats.f.isf(level / 2, over, under))


def predicted(draws: Sequence[float], *, shrink: float = 1.0, slack: float = 0.0, level: float = LEVEL) -> Interval:
    """Prediction interval of one more draw, given draws of a simulated null.

    Args:
        draws: n statistics of the correct construction.
        shrink: standard deviation at the audited size over that at the simulated size.
        slack: added on each side, for rounding and for the difference in mean of the simulated size.
        level: probability of a draw outside.
    """
    n = len(draws)
    mean = sum(draws) / n
    sd = math.sqrt(sum((x - mean) ** 2 for x in draws) / (n - 1))
    half = float(stats.t.isf(level / 2, n - 1)) * sd * math.sqrt(shrink**2 + 1 / n) + slack
    return mean - half, mean + half


def skewed_limit(draws: Sequence[float], *, level: float = LEVEL) -> float:
    """Upper limit for one more draw of a positive, skewed statistic: a gamma quantile with the draws' moments.

    The standard deviation is increased by 30 %, which covers its own sampling error at 48 draws.
    """
    mean = sum(draws) / len(draws)
    sd = 1.3 * math.sqrt(sum((x - mean) ** 2 for x in draws) / (len(draws) - 1))
    return float(stats.gamma.isf(level, (mean / sd) ** 2, scale=sd**2 / mean))


def correlation(rho: float, sizes: Sequence[int], *, level: float = LEVEL, slack: float = 0.0) -> Interval:
    """Interval of `pooled_correlation` of x with `rho x / s_x + sqrt(1 - rho^2) y / s_y`, x and y independent.

    The deviations s are the sample's, so that a sample correlation r of x and y becomes exactly
    (rho + q r) / sqrt(1 + 2 rho q r) with q = sqrt(1 - rho^2), and r has a known distribution: t of n - 2 degrees of
    freedom. Its Fisher transform is averaged over samples, and taken to be normal with the exact mean and variance.

    Args:
        rho: what was asked for; 0 for independent samples.
        sizes: n of each sample; those of 4 or fewer have no weight.
        level: probability outside.
        slack: added on each side.
    """
    low, high = normal(*_pooled_moments(rho, sizes), level=level)
    return math.tanh(low) - slack, math.tanh(high) + slack


def outside_correlation(limits: Interval, rho: float, sizes: Sequence[int]) -> float:
    """`outside` for the `pooled_correlation` of samples that were given the correlation rho, as in `correlation`."""
    low, high = map(float, _fisher(np.asarray(limits)))
    return outside((low, high), *_pooled_moments(rho, sizes))


def pooled_correlation(correlations: Sequence[float], sizes: Sequence[int]) -> float:
    """The tanh of the mean of atanh(r) over samples, weighted by n - 3; samples of 4 or fewer have no weight."""
    return math.tanh(float(_shares(sizes) @ _fisher(np.asarray(correlations))))


def _pooled_moments(rho: float, sizes: Sequence[int]) -> tuple[float, float]:
    """Mean and standard deviation of the Fisher transform of a pooled correlation."""
    share = _shares(sizes)
    moments = np.array([_transformed(rho, n) if n > 4 else (0.0, 0.0) for n in sizes])
    return float(share @ moments[:, 0]), math.sqrt(share**2 @ moments[:, 1])


def _shares(sizes: Sequence[int]) -> np.ndarray:
    weights = np.array([n - 3.0 if n > 4 else 0.0 for n in sizes])
    return weights / weights.sum()


def _fisher(r: np.ndarray) -> np.ndarray:
    return np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))


@lru_cache(maxsize=512)
def _transformed(rho: float, n: int) -> tuple[float, float]:
    """Mean and variance of atanh((rho + q r) / sqrt(1 + 2 rho q r)), by the quantiles of r."""
    t = stats.t.ppf((np.arange(4_000) + 0.5) / 4_000, n - 2)
    r, q = t / np.sqrt(n - 2 + t**2), math.sqrt(1 - rho**2)
    z = _fisher((rho + q * r) / np.sqrt(1 + 2 * rho * q * r))
    return float(z.mean()), float(z.var())


# An error is decided if an audit finds it with this probability. Below, its verdict is "undecidable".
DECIDED = 0.99
UNTOUCHED = "an untouched network"


def outside(limits: Interval, mean: float, sd: float, dof: float = math.inf) -> float:
    """The power of a check: the probability that a normal statistic of a wrong network is outside the interval.

    P(x < low) + P(x > high),   x ~ N(mean, sd^2), or mean + sd t with `dof` degrees;   0 or 1 for sd = 0
    """
    low, high = limits
    if sd <= 0 or not math.isfinite(sd):
        return float(not low <= mean <= high)
    return float(stats.t.cdf((low - mean) / sd, dof) + stats.t.sf((high - mean) / sd, dof))


def outside_of(limits: Interval, draws: Sequence[float], *, shrink: float = 1.0, factor: float = 1.0) -> float:
    """The power of a check by n simulated wrong networks: the probability that one more is outside the interval.

    x ~ mean + sd sqrt(1 + 1/n) t_(n-1),   the predictive distribution of a normal statistic

    Args:
        limits: of the check.
        draws: n statistics of the wrong construction.
        shrink: as in `predicted`.
        factor: on every draw.
    """
    n = len(draws)
    mean = sum(draws) / n
    sd = math.sqrt(sum((x - mean) ** 2 for x in draws) / (n - 1)) * shrink * math.sqrt(1 + 1 / n)
    return outside(limits, mean * factor, sd * factor, dof=n - 1)


def error_in(parameter: str) -> str:
    """The name of the error by which every parameter of an initialiser is off in the powers of audits."""
    return f"a 20 % error in {parameter}"
