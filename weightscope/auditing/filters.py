"""Expectations of the initialisers of depthwise filters: a covariance for each layer, or fixed patterns."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from weightscope._util.checks import choice
from weightscope.anatomy import DepthwisePart, NamedTensors, depthwise
from weightscope.auditing.intervals import (
    CUBE_ROOT,
    LEVEL,
    UNTOUCHED,
    Interval,
    Row,
    Simulated,
    chi_squared,
    error_in,
    powers,
)
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS, Check, each
from weightscope.init import INITIALISERS, convolution

_KINDS = ("depthwise convolutions",)
Spectrum = tuple[np.ndarray, np.ndarray]
"""Eigenvalues, none negative, and eigenvectors of an expected covariance."""


@EXPECTATIONS.register(
    "conv_covariance", reads=_KINDS, square=True, variants=tuple({"preset": name} for name in convolution.PRESETS)
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
    """Checks of every layer's filters against `N(0, scale^2 conv_covariance(k, sigma(depth)))`."""
    curve = convolution.settings(preset, sigma0, v, a)
    choice("schedule", schedule, ("depth", "sawtooth"))
    found = depthwise(source, strict=None)
    square = [part for part in found if part.square] if not strict else []
    parts = convolution.checked_filters(square or found, convolution.BUMP)
    sigmas = dict(zip(parts, map(curve, convolution.relative_depths(parts, schedule)), strict=True))

    def rows(part: DepthwisePart) -> list[Row]:
        given = {"sigma0": float(sigmas[part]), "v": 0.0, "a": 0.0, "scale": scale, "psd": psd}
        return _covariance_rows(part, "conv_covariance", given)

    return each("conv_covariance", "filters", parts, rows)


@EXPECTATIONS.register("random_filters", reads=_KINDS)
def random_filters_checks(source: NamedTensors, *, distribution: str, gain: float) -> list[Check]:
    """Checks of independent entries with variance `gain^2 / (kh kw)` in every depthwise layer."""

    def rows(part: DepthwisePart) -> list[Row]:
        x = part.read().cpu().double() * math.sqrt(math.prod(part.kernel)) / gain
        known: list[Row] = []
        if distribution == "uniform":
            known = [("largest", float(x.abs().max()), (0.0, math.sqrt(3) * 1.01))]
        elif distribution == "absolute":
            known = [("smallest", float(x.min()), (0.0, math.inf))]
        return _covariance_rows(part, "random_filters", {"distribution": distribution, "gain": gain}) + known

    return each("random_filters", "filters", depthwise(source, strict=None), rows)


def _covariance_rows(part: DepthwisePart, name: str, parameters: Mapping[str, Any]) -> list[Row]:
    """Statistics of a layer's filters with their intervals and powers; those do not depend on the scale."""
    x = part.read().cpu().double().reshape(part.channels, -1).numpy()  # (C, k^2)
    if parameters.get("distribution") == "absolute":  # which random signs make normal again
        x = x * np.random.default_rng(0).choice((-1.0, 1.0), x.shape)
        parameters = {**parameters, "distribution": "normal"}
    if bad := int(x.size - np.isfinite(x).sum()):
        return [("NaN or infinite", float(bad), (0.0, 0.0))]
    spectrum, drawn = _draws(name, tuple(parameters.items()), part.kernel, part.channels, _precision(x))
    found = covariance_statistics(x, spectrum)
    limits = _limits(part.channels, found, drawn)
    return [(what, found[what], interval, drawn.power(what, interval)) for what, interval in limits.items()]


def covariance_statistics(x: np.ndarray, spectrum: Spectrum) -> dict[str, float]:
    """Statistics of filters (C, k^2), compared with an expected covariance.

    The filters are whitened by it, `y = S^(-1/2) E^T f`. The coordinates of a correct layer are then independent
    standard normal, so that energies are chi-squared and an error is found in any direction, even one of little
    variance.

    - distance: `||F^T F / C - Sigma||_F / ||Sigma||_F`;
    - energy: mean square of the whitened coordinates, 1;
    - strongest, weakest: the whitened direction with the most and the least energy;
    - correlation: `||Y^T Y / C - I||_F / sqrt(r)`, the correlations between whitened coordinates;
    - mean: squared norm of the whitened mean, times C / r;
    - outside: share of the energy in directions of zero expected variance;
    - rank, rest: r, and the share that rounding may put into these directions (not checked).
    """
    values, vectors = spectrum
    channels, total = len(x), float(values.sum())
    # The rounding errors of the data type are in every direction, also in those of zero variance.
    rounding = (torch.finfo(_precision(x)).eps ** 2 / 12) * float(np.mean(x**2))
    inside = values > min(100 * max(rounding, 1e-14 * total), 0.5 * values.max())
    y = (x @ vectors)[:, inside] / np.sqrt(values[inside] + rounding)  # (C, r)
    r = y.shape[1]
    energies = np.mean(y**2, axis=0)  # (r,)
    expected = (vectors * values) @ vectors.T
    return {
        "distance": float(np.linalg.norm(x.T @ x / channels - expected) / np.linalg.norm(expected)),
        "energy": float(energies.mean()),
        "strongest": float(energies.max()),
        "weakest": float(energies.min()),
        "correlation": float(np.linalg.norm(y.T @ y / channels - np.eye(r))) / math.sqrt(r),
        "mean": channels * float(np.sum(y.mean(0) ** 2)) / r,
        "outside": float(np.mean(np.sum((x @ vectors[:, ~inside]) ** 2, axis=1))) / total,
        "rank": r,
        "rest": 10 * (float(values[~inside].sum()) + rounding * (len(values) - r)) / total,
    }


def _limits(channels: int, found: Mapping[str, float], drawn: Simulated) -> dict[str, Interval]:
    """The intervals of `covariance_statistics`; those of distance and correlation from draws of the initialiser."""
    r = int(found["rank"])
    low, high = chi_squared(channels, level=LEVEL / r)
    return {
        "distance": (0.0, drawn.interval("distance", via=CUBE_ROOT, slack=0.01)[1]),
        "energy": chi_squared(channels * r, slack=1e-3),
        "strongest": (0.0, high + 1e-3),
        "weakest": (low - 1e-3, math.inf),
        "correlation": drawn.interval("correlation", slack=1e-3),
        "mean": chi_squared(r),
        "outside": (0.0, found["rest"]),
    }


def _precision(x: np.ndarray) -> torch.dtype:
    """The narrowest type that holds every number: weights may have been stored in it."""
    tensor = torch.from_numpy(x)
    fitting = (d for d in (torch.bfloat16, torch.float16, torch.float32) if torch.equal(tensor.to(d).double(), tensor))
    return next(fitting, torch.float64)


@lru_cache(maxsize=512)
def _draws(
    name: str, parameters: tuple[tuple[str, Any], ...], kernel: tuple[int, int], channels: int, dtype: torch.dtype
) -> tuple[Spectrum, Simulated]:
    """The expected spectrum, and statistics of a layer after an initialiser, after it with errors, and before it."""
    given, size = dict(parameters), math.prod(kernel)
    if name == "conv_covariance":
        covariance = given["scale"] ** 2 * convolution.conv_covariance(kernel[0], given["sigma0"])
        root = convolution.covariance_root(covariance, given["psd"])
        values, vectors = np.linalg.eigh(root @ root.T)
        numbers: tuple[str, ...] = ("sigma0", "scale")
        edge = math.sqrt(3 * float(np.maximum(values, 0).mean()))  # the expected total variance is the hardest to tell
    else:
        values, vectors = np.full(size, given["gain"] ** 2 / size), np.eye(size)
        numbers = ("gain",)
        edge = 1 / math.sqrt(size)  # of torch's default entries
    wrong = {error_in(name.removesuffix("0")): {name: 1.2 * given[name]} for name in numbers}
    spectrum = np.maximum(values, 0), vectors
    layer = nn.Conv2d(channels, channels, kernel, groups=channels, bias=False, dtype=dtype)
    g, init = torch.Generator().manual_seed(0), INITIALISERS[name]

    def drawn(changes: dict[str, Any] | None) -> dict[str, float]:
        if changes is None:
            layer.weight.detach().uniform_(-edge, edge, generator=g)
        else:
            init(layer, **(given | changes), generator=g)
        return covariance_statistics(layer.weight.detach().double().flatten(1).numpy(), spectrum)

    return spectrum, Simulated.of(drawn, {}, {UNTOUCHED: None, **wrong})


@EXPECTATIONS.register("impulse_filters", reads=_KINDS, variants=({}, {"sign": "random"}))
def impulse_filters_checks(source: NamedTensors, *, filter_size: int | None, sign: str) -> list[Check]:
    """Checks that every filter has one pixel of 1, or of random sign, and the others 0, with pixels used evenly."""
    one = (1.0, 1.0)

    def rows(part: DepthwisePart) -> list[Row]:
        x = part.read().cpu().flatten(1)
        signs: list[Row] = []
        if sign == "random":
            low, high = (float(stats.binom.ppf(q, part.channels, 0.5)) for q in (LEVEL / 2, 1 - LEVEL / 2))
            signs, x = [("positive impulses", float((x.sum(1) > 0).sum()), (low, high))], x.abs()
        central = x[:, convolution.central_pixels(part, filter_size)]
        taps = central.shape[1]
        # Pixels may be used evenly or drawn independently for each channel (impulse paper, section 3).
        most = max(float(stats.binom.isf(LEVEL / taps, part.channels, 1 / taps)), math.ceil(part.channels / taps))
        edge = 1 / math.sqrt(math.prod(part.kernel))  # torch's default entries are within +-edge
        return [
            ("largest entry", farthest(x.amax(1), 1.0), one, powers(one, edge, {"the impulses": 1.2})),
            ("sum", farthest(x.abs().sum(1), 1.0), one),
            ("central sum", farthest(central.sum(1), 1.0), one),
            ("uses of a pixel", float((central > 0.5).sum(0).max()), (0.0, most)),
            *signs,
        ]

    return each("impulse_filters", "filters", depthwise(source, strict=None), rows)


@EXPECTATIONS.register("box_filters", reads=_KINDS)
def box_filters_checks(source: NamedTensors, *, value: float) -> list[Check]:
    """Checks that every entry of every filter is the value."""
    low, high = limits = value - 0.004 * abs(value), value + 0.004 * abs(value)  # half precision

    def rows(part: DepthwisePart) -> list[Row]:
        x = part.read().cpu()
        edge = 1 / math.sqrt(math.prod(part.kernel))  # torch's default entries are uniform within +-edge
        within = max(0.0, min(edge, high) - max(-edge, low)) / (2 * edge)
        power = powers(limits, None, {"value": 1.2 * value} if value else {})
        return [("entry", farthest(x, value), limits, {UNTOUCHED: 1 - within ** x.numel(), **power})]

    return each("box_filters", "filters", depthwise(source, strict=None), rows)
