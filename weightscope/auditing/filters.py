"""Expectations of the initialisers of depthwise filters: a covariance for each layer, or fixed patterns."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from weightscope._util.checks import choice, positive
from weightscope.anatomy import NamedTensors, depthwise
from weightscope.auditing.intervals import (
    LEVEL,
    UNTOUCHED,
    Interval,
    chi_squared,
    error_in,
    normal,
    outside,
    outside_of,
    predicted,
    skewed_limit,
)
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.init.convolution import (
    BUMP,
    PRESETS,
    checked_filters,
    conv_covariance,
    covariance_root,
    relative_depths,
    settings,
)

_DRAWS = 48
_WRONG_DRAWS = 12  # of each error whose detection is estimated
_KINDS = ("depthwise convolutions",)


@EXPECTATIONS.register(
    "conv_covariance", reads=_KINDS, square=True, variants=tuple({"preset": name} for name in PRESETS)
)
def conv_covariance_checks(
    source: NamedTensors,
    *,
    sigma0: float | None,
    v: float | None,
    a: float | None,
    preset: str | None,
    scale: float,
    psd: str,
    schedule: str,
    strict: bool,
) -> list[Check]:
    """Checks of every layer's filters against `N(0, scale^2 conv_covariance(k, sigma(depth)))`.

    The filters are whitened by the expected covariance, `y = S^(-1/2) E^T f`. The coordinates of a correct layer are
    then independent standard normal, so that energies are chi-squared and an error is found in any direction, even
    one of little variance.

    Raises:
        AnatomyError: if there is no depthwise convolution.
        UsageError: if the filters or the parameters do not fit the construction.
    """
    curve = settings(preset, sigma0, v, a)
    positive("scale", scale)
    choice("psd", psd, ("abs", "clip"))
    choice("schedule", schedule, ("depth", "sawtooth"))
    found = depthwise(source)
    square = [part for part in found if part.square] if not strict else []
    parts = checked_filters(square or found, BUMP)
    checks: list[Check] = []
    for part, depth in zip(parts, relative_depths(parts, schedule), strict=True):
        k = part.kernel[0]
        filters = part.read().cpu().double().reshape(part.channels, -1).numpy()  # (C, k^2)
        rows = _finite(filters)
        if not rows:
            power = _covariance_powers(k, curve(depth), psd, part.channels)
            measured = covariance_statistics(filters, k, curve(depth), psd, scale)
            rows = [(what, value, limits, power.get(what, {})) for what, value, limits in measured]
        checks += checks_of("conv_covariance", "filters", part.layer, None, part.name, rows)
    return checks


def covariance_statistics(
    x: np.ndarray, k: int, sigma: float, psd: str, scale: float = 1.0
) -> list[tuple[str, float, Interval]]:
    """Statistics of filters (C, k^2) and their expected intervals.

    - distance: `||F^T F / C - Sigma||_F / ||Sigma||_F`;
    - energy: mean square of the whitened coordinates, 1;
    - strongest, weakest: the whitened direction with the most and the least energy;
    - correlation: `||Y^T Y / C - I||_F / sqrt(r)`, the correlations between whitened coordinates;
    - mean: squared norm of the whitened mean, times C / r;
    - outside: share of the energy in directions of zero expected variance.
    """
    values, vectors = _spectrum(k, sigma, psd)
    values = scale**2 * values
    channels, total = len(x), float(values.sum())
    # The rounding errors of the data type are in every direction, also in those of zero variance.
    rounding = (_precision(x) ** 2 / 12) * float(np.mean(x**2))
    inside = values > 100 * max(rounding, 1e-14 * total)
    if not inside.any():  # entries so large that what is expected is below their rounding errors
        edge = math.sqrt(float(values.max())) * normal(0.0, 1.0, level=LEVEL / x.size)[1]
        return [("largest", float(np.abs(x).max()), (0.0, edge * math.sqrt(len(values))))]
    y = (x @ vectors)[:, inside] / np.sqrt(values[inside] + rounding)  # (C, r)
    r = y.shape[1]
    energies = np.mean(y**2, axis=0)  # (r,)
    single = chi_squared(channels, level=LEVEL / r)
    sample, sigma_matrix = x.T @ x / channels, (vectors * values) @ vectors.T
    norm = float(np.linalg.norm(sigma_matrix))
    distances, correlations = _null(k, sigma, psd, channels), _white_null(channels, r)
    outside = float(np.mean(np.sum((x @ vectors[:, ~inside]) ** 2, axis=1))) / total if r < len(values) else 0.0
    rest = 10 * (float(values[~inside].sum()) + rounding * (len(values) - r)) / total
    return [
        ("distance", float(np.linalg.norm(sample - sigma_matrix)) / norm, (0.0, skewed_limit(distances) + 0.01)),
        ("energy", float(energies.mean()), chi_squared(channels * r, slack=1e-3)),
        ("strongest", float(energies.max()), (0.0, single[1] + 1e-3)),
        ("weakest", float(energies.min()), (single[0] - 1e-3, math.inf)),
        ("correlation", _correlation(y), predicted(correlations, slack=1e-3)),
        ("mean", channels * float(np.sum(y.mean(0) ** 2)) / r, chi_squared(r)),
        ("outside", outside, (0.0, rest)),
    ]


def _finite(x: np.ndarray) -> list[Row]:
    """A failed check on the number of entries that are NaN or infinite; none if all are finite."""
    bad = int(x.size - np.isfinite(x).sum())
    return [("NaN or infinite", float(bad), (0.0, 0.0))] if bad else []


@lru_cache(maxsize=512)
def _covariance_powers(k: int, sigma: float, psd: str, channels: int) -> dict[str, dict[str, float]]:
    """Statistic -> error -> probability that the check fails, from simulated filters with the error.

    Untouched filters have independent uniform entries, here with the total variance that is expected, which is the
    hardest to tell. The scale of the initialiser does not matter.
    """
    rng = np.random.default_rng(1)
    values, _ = _spectrum(k, sigma, psd)
    edge = math.sqrt(3 * float(values.mean()))

    def drawn(variance: float, factor: float) -> np.ndarray:
        other, vectors = _spectrum(k, variance, psd)
        return rng.standard_normal((channels, k * k)) @ (vectors * np.sqrt(other)).T * factor

    wrong: dict[str, Callable[[], np.ndarray]] = {
        UNTOUCHED: lambda: rng.uniform(-edge, edge, (channels, k * k)),
        error_in("sigma"): lambda: drawn(1.2 * sigma, 1.0),
        error_in("scale"): lambda: drawn(sigma, 1.2),
    }
    out: dict[str, dict[str, float]] = {}
    for error, draw in wrong.items():
        found = [
            covariance_statistics(draw().astype(np.float32).astype(float), k, sigma, psd) for _ in range(_WRONG_DRAWS)
        ]
        for rows in zip(*found, strict=True):
            out.setdefault(rows[0][0], {})[error] = outside_of(rows[0][2], [row[1] for row in rows])
    return out


def _correlation(y: np.ndarray) -> float:
    channels, r = y.shape
    return float(np.linalg.norm(y.T @ y / channels - np.eye(r))) / math.sqrt(r)


def _precision(x: np.ndarray) -> float:
    """The relative spacing of the narrowest type that holds every number: weights may have been stored in it."""
    tensor = torch.from_numpy(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(tensor.to(dtype).double(), tensor):
            return torch.finfo(dtype).eps
    return torch.finfo(torch.float64).eps


@lru_cache(maxsize=512)
def _spectrum(k: int, sigma: float, psd: str) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, none negative, and eigenvectors of the expected covariance."""
    root = covariance_root(conv_covariance(k, sigma), psd)
    values, vectors = np.linalg.eigh(root @ root.T)
    return np.maximum(values, 0), vectors


@lru_cache(maxsize=512)
def _null(k: int, sigma: float, psd: str, channels: int) -> tuple[float, ...]:
    """Distances between sample and expected covariance in simulated correct layers."""
    values, _ = _spectrum(k, sigma, psd)
    expected, rng = np.diag(values), np.random.default_rng(0)
    norm = float(np.linalg.norm(expected))
    out = []
    for _ in range(_DRAWS):
        y = rng.standard_normal((channels, len(values))) * np.sqrt(values)
        out.append(float(np.linalg.norm(y.T @ y / channels - expected)) / norm)
    return tuple(out)


@lru_cache(maxsize=512)
def _white_null(channels: int, r: int) -> tuple[float, ...]:
    rng = np.random.default_rng(0)
    return tuple(_correlation(rng.standard_normal((channels, r))) for _ in range(_DRAWS))


@EXPECTATIONS.register("random_filters", reads=_KINDS)
def random_filters_checks(source: NamedTensors, *, distribution: str, gain: float) -> list[Check]:
    """Checks of independent entries with variance `gain^2 / (kh kw)` in every depthwise layer."""
    choice("distribution", distribution, ("normal", "uniform"))
    fourth = 3.0 if distribution == "normal" else 1.8
    checks = []
    for part in depthwise(source):
        size = math.prod(part.kernel)
        x = part.read().cpu().double().reshape(part.channels, -1) * (math.sqrt(size) / gain)
        n, sd = x.numel(), math.sqrt((fourth - 1) / x.numel())
        limits = normal(1.0, sd, slack=2e-3)
        default = 1 / (3 * gain**2)  # of torch's U(-1/k, 1/k), over the expected variance
        power = {
            UNTOUCHED: outside(limits, default, default * math.sqrt(0.8 / n)),
            error_in("gain"): outside(limits, 1.44, 1.44 * sd),
        }
        rows: list[Row] = _finite(x.numpy()) or [
            ("variance", float(x.square().mean()), limits, power),
            ("mean", float(x.mean()), normal(0.0, 1 / math.sqrt(n))),
            ("correlation", _correlation(x.numpy()), predicted(_white_null(part.channels, size), slack=0.02)),
        ]
        if distribution == "uniform":
            rows.append(("largest", float(x.abs().max()), (0.0, math.sqrt(3) * 1.01)))
        checks += checks_of("random_filters", "filters", part.layer, None, part.name, rows)
    return checks


@EXPECTATIONS.register("impulse_filters", reads=_KINDS)
def impulse_filters_checks(source: NamedTensors, *, filter_size: int | None) -> list[Check]:
    """Checks that every filter has one pixel of 1 and the others 0, with the central pixels used evenly."""
    checks = []
    for part in depthwise(source):
        x = part.read().cpu()
        flat = x.reshape(part.channels, -1)
        sizes = [n if filter_size is None or (n == 1 and part.ndim == 1) else filter_size for n in part.kernel]
        margins = [(n - f) // 2 for n, f in zip(part.kernel, sizes, strict=True)]
        central = x[:, margins[0] : margins[0] + sizes[0], margins[1] : margins[1] + sizes[1]]
        taps = math.prod(sizes)
        counts = (central > 0.5).reshape(part.channels, -1).sum(0)
        # Pixels may be used evenly or drawn independently for each channel (impulse paper, section 3).
        most = float(stats.binom.isf(LEVEL / taps, part.channels, 1 / taps))
        one = (1.0, 1.0)
        edge = 1 / math.sqrt(math.prod(part.kernel))  # torch's default entries are within +-edge
        power = {UNTOUCHED: outside(one, edge, 0.0), error_in("the impulses"): outside(one, 1.2, 0.0)}
        rows: list[tuple[str, Tensor, Interval]] = [
            ("largest entry", flat.amax(1), one),
            ("sum", flat.abs().sum(1), one),
            ("central sum", central.reshape(part.channels, -1).sum(1), one),
            ("uses of a pixel", counts.float(), (0.0, max(most, math.ceil(part.channels / taps)))),
        ]
        worst: list[Row] = [
            (name, _worst(found, limits), limits, power if name == "largest entry" else {})
            for name, found, limits in rows
        ]
        checks += checks_of("impulse_filters", "filters", part.layer, None, part.name, worst)
    return checks


@EXPECTATIONS.register("box_filters", reads=_KINDS)
def box_filters_checks(source: NamedTensors, *, value: float) -> list[Check]:
    """Checks that every entry of every filter is the value."""
    checks = []
    for part in depthwise(source):
        slack = abs(value) * 0.004  # half precision
        limits = (value - slack, value + slack)
        x = part.read().cpu()
        edge = 1 / math.sqrt(math.prod(part.kernel))  # torch's default entries are uniform within +-edge
        within = max(0.0, min(edge, limits[1]) - max(-edge, limits[0])) / (2 * edge)
        power = {UNTOUCHED: 1 - within ** x.numel()}
        if value:
            power[error_in("value")] = outside(limits, 1.2 * value, 0.0)
        rows: list[Row] = [("entry", _worst(x, limits), limits, power)]
        checks += checks_of("box_filters", "filters", part.layer, None, part.name, rows)
    return checks


def _worst(found: Tensor, limits: Interval) -> float:
    """The entry farthest outside the limits, or the mean if all are inside."""
    outside = torch.maximum(limits[0] - found, found - limits[1])
    return float(found.flatten()[outside.argmax()]) if bool((outside > 0).any()) else float(found.mean())
