"""Statistics of depthwise filters: of whitened coordinates where a covariance is given, of fixed patterns."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from weightscope._util.checks import choice
from weightscope.anatomy import DepthwisePart, NamedTensors, depthwise
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS, error_in
from weightscope.auditing.runs import Statistic
from weightscope.init import convolution

_KINDS = ("depthwise convolutions",)
_LEAST = 1e-4  # of the mean expected variance: in directions of less, rounding in half precision would be seen


def _sigma_and_scale(p: dict[str, Any]) -> dict[str, dict[str, Any]]:
    curve = convolution.settings(p["preset"], p["sigma0"], p["v"], p["a"])
    larger = {name: 1.2 * getattr(curve, name) for name in ("sigma0", "v", "a")}
    return {
        error_in("sigma"): p | larger | {"preset": None},
        error_in("scale"): p | {"scale": 1.2 * p["scale"]},
    }


@EXPECTATIONS.register(
    "conv_covariance",
    reads=_KINDS,
    square=True,
    variants=tuple({"preset": name} for name in convolution.PRESETS),
    errors=_sigma_and_scale,
)
def conv_covariance_statistics(source: NamedTensors, **p: Any) -> Iterator[Statistic]:
    """Statistics of every layer's filters, whitened by `scale^2 conv_covariance(k, sigma(depth))`."""
    curve = convolution.settings(p["preset"], p["sigma0"], p["v"], p["a"])
    choice("schedule", p["schedule"], ("depth", "sawtooth"))
    found = depthwise(source, strict=None)
    square = [part for part in found if part.square] if not p["strict"] else []
    parts = convolution.checked_filters(square or found, convolution.BUMP)
    for part, depth in zip(parts, convolution.relative_depths(parts, p["schedule"]), strict=True):
        yield from _whitened(part, *_axes(part.kernel[0], float(curve(depth)), p["scale"], p["psd"]))


@lru_cache(maxsize=256)
def _axes(k: int, sigma: float, scale: float, psd: str) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (k^2,) and eigenvectors (k^2, k^2) of the covariance of filters."""
    root = convolution.covariance_root(scale**2 * convolution.conv_covariance(k, sigma), psd)
    values, vectors = np.linalg.eigh(root @ root.T)
    return values, vectors


@EXPECTATIONS.register("random_filters", reads=_KINDS, errors=("gain",))
def random_filters_statistics(source: NamedTensors, *, gain: float) -> Iterator[Statistic]:
    """Statistics of independent entries with variance `gain^2 / (kh kw)` in every depthwise layer."""
    for part in depthwise(source, strict=None):
        size = math.prod(part.kernel)
        yield from _whitened(part, np.full(size, gain**2 / size), np.eye(size))
        x = part.read().cpu().double()
        shape = _like(part)
        kurtosis = float(x.pow(4).mean() / x.square().mean().square())
        yield Statistic("filters", part.layer, None, part.name, "kurtosis", kurtosis, "kurtosis", shape)
        negative = float((x < 0).double().mean())
        yield Statistic("filters", part.layer, None, part.name, "negative share", negative, like=shape)


def _like(part: DepthwisePart) -> tuple[int, ...]:
    return part.channels, *part.kernel


def _whitened(part: DepthwisePart, values: np.ndarray, vectors: np.ndarray) -> Iterator[Statistic]:
    """Statistics of filters whitened by an expected covariance, `y = S^(-1/2) E^T f`.

    r directions are used, those of at least 1e-4 of the mean variance. The coordinates of a correct layer are
    uncorrelated and of variance 1, so that an error is found in any direction, even one of little variance.

    - energy: mean square of the whitened coordinates, 1;
    - unevenness: variance over directions of the cube root of the mean square;
    - correlation: `||Y^T Y / C - I||_F^2 / r` without the diagonal;
    - mean: squared norm of the whitened mean, times C / r;
    - outside: the energy in the other directions, over the expected one in all.
    """
    x = part.read().cpu().double().flatten(1).numpy()  # (C, k^2)
    inside = values > _LEAST * values.mean()
    with np.errstate(invalid="ignore"):  # of numbers that are not finite, which fail
        along = x @ vectors
        y = along[:, inside] / np.sqrt(values[inside])  # (C, r)
        c, r = y.shape
        second = y.T @ y / c
        energies = second.diagonal()  # (r,)
        found = {
            "energy": energies.mean(),
            "unevenness": np.cbrt(energies).var(),
            "correlation": (np.square(second).sum() - np.square(energies).sum()) / r,
            "mean": c * np.mean(y.mean(0) ** 2),
        }
        if not inside.all():
            found["outside"] = np.mean(np.sum(along[:, ~inside] ** 2, axis=1)) / values.sum()
    for what, value in found.items():
        outside = what == "outside"
        scale, slack = ("identity", 1e-4) if outside else ("variance", 0.0)
        side = "above" if outside else "both"
        like = (_like(part), r, round(float(values[~inside].sum() / values.sum()), 12) if outside else 0)
        yield Statistic("filters", part.layer, None, part.name, what, float(value), scale, like, slack=slack, side=side)


def _larger(source: NamedTensors) -> None:
    for part in depthwise(source, strict=None):
        part.write(1.2 * part.read())


@EXPECTATIONS.register(
    "impulse_filters",
    reads=_KINDS,
    variants=({}, {"sign": "random"}),
    errors={error_in("the impulses"): _larger},
)
def impulse_filters_statistics(source: NamedTensors, *, filter_size: int | None, sign: str) -> Iterator[Statistic]:
    """Statistics of filters with one pixel of 1, or of random sign, and the others 0, with pixels used evenly.

    Pixels may be used evenly, or drawn independently for each channel (impulse paper, section 3).
    """
    for part in depthwise(source, strict=None):
        x = part.read().cpu().flatten(1)
        taps = convolution.central_pixels(part, filter_size)
        uses = part.channels / len(taps)
        size = x.abs()
        found = {
            "largest entry": (farthest(size.amax(1), 1.0), 0.0, "both"),
            "sum": (farthest(size.sum(1), 1.0), 0.0, "both"),
            "central sum": (farthest((size if sign == "random" else x)[:, taps].sum(1), 1.0), 0.0, "both"),
            "uses of a pixel": (float((size[:, taps] > 0.5).sum(0).max()), 2 + 4 * math.sqrt(uses), "above"),
        }
        if sign == "random":
            found["positive filters"] = (_positive(x), 0.0, "both")
        for what, (value, slack, side) in found.items():
            like = _like(part)
            yield Statistic("filters", part.layer, None, part.name, what, value, like=like, slack=slack, side=side)


def _positive(filters: torch.Tensor) -> float:
    """The share of filters (C, f^2) with a positive sum."""
    return float((filters.sum(1) > 0).double().mean())


@EXPECTATIONS.register("box_filters", reads=_KINDS, variants=({}, {"sign": "random"}), errors=("value",))
def box_filters_statistics(source: NamedTensors, *, value: float, sign: str) -> Iterator[Statistic]:
    """The entry farthest from the value, times one sign for the whole filter if signs are random, and the signs."""
    for part in depthwise(source, strict=None):
        x, expected, like = part.read().cpu().flatten(1), value, _like(part)
        if sign == "random":
            positive = _positive(x)
            yield Statistic("filters", part.layer, None, part.name, "positive filters", positive, like=like)
            x, expected = x * x.sum(1, keepdim=True).sign(), abs(value)
        yield Statistic("filters", part.layer, None, part.name, "entry", farthest(x, expected), like=like)
