"""Depthwise filters drawn from a covariance, in closed form or a trained network's, and simple filters as controls."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.checks import choice, count, number, positive
from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.anatomy.convolution import listed
from weightscope.errors import DataError, UsageError
from weightscope.init.base import INITIALISERS, Generator, M, integers, normal, permutation
from weightscope.statistics.filters import (
    Schedule,
    at_depth,
    conv_covariance,
    covariance_root,
    relative_depths,
    resized_covariance,
    resized_mean,
)

if TYPE_CHECKING:
    from weightscope.fits.filters import FilterDistribution, FilterFit  # SciPy: a second to import

# Thesis B.1 (CIFAR: 2x2 patches, and "approximately doubled" for 1x1), Fig. A.4, and Tables B.1 to B.8 (ImageNet).
PRESETS: dict[str, Schedule] = {
    "cifar-patch1": Schedule(0.16, 0.74, 5.8),
    "cifar-patch2": Schedule(0.08, 0.37, 2.9),
    "figure-a4": Schedule(0.16, 0.32, 2.88),
    "imagenet-frozen": Schedule(0.15, 0.5, 0.25),
    "imagenet-middle": Schedule(0.15, 0.3, 0.5),
    "imagenet-thawed": Schedule(0.15, 0.25, 1.0),
}
BUMP = "the covariance is a bump around a centre pixel of an image"


def settings(preset: str | None, sigma0: float | None, v: float | None, a: float | None) -> Schedule:
    """The schedule of a preset, or of three numbers."""
    given = {"sigma0": sigma0, "v": v, "a": a}
    if preset is not None:
        choice("preset", preset, PRESETS)
        both = [name for name, value in given.items() if value is not None]
        if both:
            raise UsageError(f"preset: {preset!r} sets sigma0, v and a; leave out {', '.join(both)}")
        return PRESETS[preset]
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UsageError(f"conv_covariance: missing {', '.join(missing)}, or preset, one of {', '.join(PRESETS)}")
    return Schedule(**{name: number(name, value) for name, value in given.items()})


def checked_filters(parts: list[DepthwisePart], why: str, strict: bool = True) -> list[DepthwisePart]:
    """The parts that have two-dimensional, square filters of odd size."""
    odd = [part for part in parts if not part.square]
    if odd and (strict or len(odd) == len(parts)):
        step = "" if len(odd) == len(parts) else f"; strict=False uses the {len(parts) - len(odd)} other layers"
        raise UsageError(f"expected square filters of odd size, found {listed(odd)}; {why}{step}")
    if odd:
        warnings.warn(f"left as they are, not square: {listed(odd)}", stacklevel=4)
    return [part for part in parts if part.square]


@INITIALISERS.register("conv_covariance", source="thesis 3.1.2", needs="depthwise convolutions")
def conv_covariance_(
    module: M,
    *,
    sigma0: float | None = None,
    v: float | None = None,
    a: float | None = None,
    preset: str | None = None,
    scale: float = 1.0,
    psd: str = "abs",
    schedule: str = "depth",
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Draw every depthwise filter from `N(0, scale^2 conv_covariance(k, sigma(d)))`, with sigma growing with depth.

        sigma(d) = sigma0 + v d + a d^2 / 2,   d = i / (D - 1)  for layer i of D  (0 if D = 1)

    Args:
        sigma0: variance of the bumps in the first layer.
        v: its slope over the relative depth.
        a: its curvature.
        preset: published values of the three: "cifar-patch1", "cifar-patch2", "figure-a4" (the code's example),
            "imagenet-frozen", "imagenet-middle", "imagenet-thawed".
        scale: factor on every filter, > 0; 1 as published.
        psd: "abs" or "clip", see `covariance_root`.
        schedule: "depth", or "sawtooth" to restart the schedule in every stage, for networks that downsample
            (thesis Fig. B.5, of which only the caption is available).

    Raises:
        UsageError: if sigma is not positive at some layer, or a filter is one-dimensional, not square or of even size.

    Source: thesis section 3.1.2, Eq. 3.10-3.11, Fig. A.4 and B.1.

    Example:
        >>> conv_covariance_(convnext, sigma0=0.15, v=0.25, a=1.0, generator=torch.Generator().manual_seed(0))
    """
    curve = settings(preset, sigma0, v, a)
    positive("scale", scale)
    choice("psd", psd, ("abs", "clip"))
    choice("schedule", schedule, ("depth", "sawtooth"))
    parts = checked_filters(depthwise(module, strict=strict, caller="conv_covariance_"), BUMP, strict)
    depths = relative_depths(parts, schedule)
    for part, d in zip(parts, depths, strict=True):
        if curve(d) <= 0:
            raise UsageError(f"sigma: expected > 0 at every depth, found {curve(d):g} at `{part.name}` (depth {d:g})")
    for part, d in zip(parts, depths, strict=True):
        covariance = scale**2 * conv_covariance(part.kernel[0], curve(d))
        part.write(draw_filters(part.channels, covariance, psd, generator))
    return module


def draw_filters(channels: int, covariance: np.ndarray, psd: str, generator: Generator) -> Tensor:
    """Filters (channels, k, k) from N(0, covariance), covariance (k*k, k*k); float32, drawn in float64."""
    root = torch.from_numpy(covariance_root(covariance, psd))
    k = math.isqrt(len(covariance))
    draws = normal(channels, k * k, generator=generator, dtype=torch.float64) @ root.T
    return draws.float().reshape(channels, k, k)


@INITIALISERS.register("random_filters", source="impulse paper, Proposition 1", needs="depthwise convolutions")
def random_filters_(
    module: M, *, distribution: str = "normal", gain: float = 1.0, strict: bool = True, generator: Generator = None
) -> M:
    """Draw independent entries in every depthwise filter: `F ~ N(0, gain^2 / (kh kw))`, or uniform, same variance.

    f^2 independent filters span all f x f filters: by Proposition 1 the channel mixing then reaches, but for
    activations, whatever trained filters could if D >= k f^2, k the rank of the input.

    Args:
        distribution: "normal", "uniform", or "absolute" for the absolute values of normal entries, which are a control
            of the sign.
        gain: > 0.

    Source: impulse paper, Proposition 1 and section 5.6.

    Example:
        >>> random_filters_(convmixer, generator=torch.Generator().manual_seed(0))
    """
    choice("distribution", distribution, ("normal", "uniform", "absolute"))
    positive("gain", gain)
    for part in depthwise(module, strict=strict, caller="random_filters_"):
        shape = (part.channels, *part.kernel)
        draws = normal(*shape, generator=generator)
        if distribution == "uniform":
            draws = (torch.special.ndtr(draws) * 2 - 1) * math.sqrt(3)
        elif distribution == "absolute":
            draws = draws.abs()
        part.write(draws * (gain / math.sqrt(math.prod(part.kernel))))
    return module


@INITIALISERS.register("impulse_filters", source="impulse paper, section 5.6", needs="depthwise convolutions")
def impulse_filters_(
    module: M,
    *,
    filter_size: int | None = None,
    order: str = "random",
    sign: str = "positive",
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Set one pixel of every depthwise filter to 1, or to 1 or -1, and the others to 0.

    The pixels are distributed evenly: each is used by floor or ceil(C / f^2) of a layer's C channels. A GELU behind an
    impulse of 1 drops the negative half of its channel, behind -1 the positive half.

    Args:
        filter_size: f; the impulses are in the central f x f pixels. None for the whole filter.
        order: "random", or "given": pixel c mod f^2 (row by row) for channel c.
        sign: "positive" as published, or "random", 1 or -1 with equal probability.

    Raises:
        UsageError: if a filter is smaller than filter_size or of the other parity.

    Source: impulse paper, section 5.6.

    Example:
        >>> impulse_filters_(convmixer, filter_size=3, generator=torch.Generator().manual_seed(0))
    """
    choice("order", order, ("random", "given"))
    choice("sign", sign, ("positive", "random"))
    if filter_size is not None:
        count("filter_size", filter_size)
    for part in depthwise(module, strict=strict, caller="impulse_filters_"):
        pixels = central_pixels(part, filter_size)
        channels = torch.arange(part.channels)
        if order == "random":
            pixels = pixels[permutation(len(pixels), generator)]
            channels = channels[permutation(part.channels, generator)]
        taps = pixels[channels % len(pixels)]
        filters = torch.zeros(part.channels, math.prod(part.kernel)).scatter_(1, taps[:, None], 1.0)
        part.write(_signed(filters, sign, generator).reshape(part.channels, *part.kernel))
    return module


def _signed(filters: Tensor, sign: str, generator: Generator) -> Tensor:
    """Filters (C, f^2), each times 1 or -1 with equal probability if the sign is "random"."""
    return filters * (integers(2, (len(filters), 1), generator) * 2 - 1) if sign == "random" else filters


def central_pixels(part: DepthwisePart, filter_size: int | None) -> Tensor:
    """Flat indices of the central pixels of a part's filters, row by row."""
    kh, kw = part.kernel
    sizes = [n if filter_size is None or (n == 1 and part.ndim == 1) else filter_size for n in (kh, kw)]
    if any(f > n or (n - f) % 2 for f, n in zip(sizes, (kh, kw), strict=True)):
        raise UsageError(f"`{part.name}`: filters of {kh} x {kw} have no central {sizes[0]} x {sizes[1]} pixels")
    rows, columns = (torch.arange((n - f) // 2, (n + f) // 2) for f, n in zip(sizes, (kh, kw), strict=True))
    return (rows[:, None] * kw + columns).reshape(-1)


@INITIALISERS.register("box_filters", source="impulse paper, section 5.6", needs="depthwise convolutions")
def box_filters_(
    module: M, *, value: float = 1.0, sign: str = "positive", strict: bool = True, generator: Generator = None
) -> M:
    """Set every entry of every depthwise filter to `value`: average pooling up to a factor.

    Args:
        value: 1 as published; 1 / f gives filters of f x f the energy (sum of squares) of an impulse.
        sign: "positive" as published, or "random", 1 or -1 for each filter with equal probability.

    Source: impulse paper, section 5.6.

    Example:
        >>> box_filters_(convmixer, value=1 / 3, sign="random", generator=torch.Generator().manual_seed(0))
    """
    value = number("value", value)
    choice("sign", sign, ("positive", "random"))
    for part in depthwise(module, strict=strict, caller="box_filters_"):
        filters = torch.full((part.channels, math.prod(part.kernel)), value)
        part.write(_signed(filters, sign, generator).reshape(part.channels, *part.kernel))
    return module


# --- from a trained network's covariances, between any two shapes -----------------------------------------------------


_ROUNDING = 1e-9  # a smaller share of negative eigenvalues is rounding error


def target_distributions(parts: list[DepthwisePart], fit: "FilterFit") -> list[tuple[np.ndarray, np.ndarray]]:
    """The mean (k, k) and covariance (k*k, k*k) to draw from for each layer; layers of dead filters are not used."""
    from weightscope.statistics.kronecker import nearest_kronecker  # SciPy

    source, chosen = fit.layers, list(fit.usable_layers())
    if fit.schedule == "stage":
        groups, depths, own = _by_stage(parts, source, chosen)
    else:
        groups, depths = [chosen] * len(parts), relative_depths(parts, "depth")
        own = {layer.name: layer.depth for layer in source}
    cache: dict[tuple[str, int], np.ndarray] = {}
    out = []
    for part, group, depth in zip(parts, groups, depths, strict=True):
        size, known = part.kernel[0], [own[layer.name] for layer in group]
        for layer in group:
            if (layer.name, size) not in cache:
                cache[layer.name, size] = resized_covariance(layer.covariance, layer.kernel, size)
        covariance = at_depth(known, [cache[layer.name, size] for layer in group], depth)
        if fit.kronecker and covariance.any():
            nearest = nearest_kronecker(covariance, same=True)
            if not nearest.explained:
                raise DataError(f"`{part.name}`: its covariance has no component A (x) A; leave out kronecker")
            covariance = np.kron(nearest.rows, nearest.columns)
        mean = at_depth(known, [resized_mean(layer.mean, size) for layer in group], depth)
        out.append((mean if fit.means else np.zeros_like(mean), covariance))
    return out


def _by_stage(
    parts: list[DepthwisePart], source: "Sequence[FilterDistribution]", chosen: "list[FilterDistribution]"
) -> tuple["list[list[FilterDistribution]]", list[float], dict[str, float]]:
    """The source's layers in each part's stage, the parts' depths within their stages, and the source's by name."""
    mine, theirs = (list(dict.fromkeys(x.stage for x in xs)) for xs in (parts, source))
    if len(mine) != len(theirs):
        raise UsageError(
            f"schedule: 'stage' needs equal numbers of stages, found {len(theirs)} in the source and {len(mine)} in "
            "the module; use schedule='depth'"
        )
    groups = {
        stage: [layer for layer in chosen if layer.stage == other] for stage, other in zip(mine, theirs, strict=True)
    }
    if empty := [stage for stage in mine if not groups[stage]]:
        raise UsageError(f"kernel: no layer in stage {empty[0]} of the source has that size; use schedule='depth'")
    own = dict(zip((layer.name for layer in source), relative_depths(source, "sawtooth"), strict=True))
    return [groups[part.stage] for part in parts], relative_depths(parts, "sawtooth"), own


@INITIALISERS.register("covariance_transfer", source="thesis 3.1.1", needs="depthwise convolutions")
def covariance_transfer_(
    module: M,
    source: Any,
    *,
    kronecker: bool = False,
    means: bool = False,
    schedule: str = "depth",
    kernel: int | None = None,
    psd: str = "abs",
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Draw every depthwise filter from `N(mu, Sigma)` of a trained network's filters, between any two shapes.

        Sigma_i = Cov[vec(F_i1), ..., vec(F_iC)],   F'_ij ~ N(mu_i, Sigma_i)

    Depth: `Sigma` is interpolated linearly over the relative depth i / (D - 1) and constant outside of the source's
    layers. Kernel size: each block is padded with its mean or clipped, then the blocks are interpolated
    (`resized_covariance`), for every layer of the source before the interpolation over depth. Covariances are not
    shrunk: C <= k^2 filters give rank C - 1. Resized ones are not positive semi-definite, see `psd`.

    Args:
        kronecker: replace each covariance by the nearest `A (x) A`, after resizing and interpolation.
        means: add the mean filter, resized and interpolated in the same way; otherwise the mean is zero.
        schedule: "depth" over the whole network, or "stage": from the source's same stage, over the depth within it.
        kernel: use only the source's layers with filters of this size, at their own depths; None for all.
        psd: "abs" or "clip", see `covariance_root`; only matters if kernels are resized.

    Raises:
        UsageError: if filters are one-dimensional, not square or of even size.
        DataError: if a weight of the source is not finite.

    Source: thesis section 3.1.1, Eq. 3.3-3.4, "Covariance transfer across width, depth, patch size, and kernel size".

    Example:
        >>> covariance_transfer_(convnext, "efficientnet-lite0.pth", kernel=5)
    """
    from weightscope.fits.filters import filter_distributions, filter_fit

    layers = filter_distributions(source, strict=strict)
    fit = filter_fit(layers, kronecker=kronecker, means=means, schedule=schedule, kernel=kernel, psd=psd)
    draw_transferred(module, fit, generator, strict=strict)
    return module


def draw_transferred(
    module: nn.Module, fit: "FilterFit", generator: Generator, *, strict: bool = True
) -> dict[str, float]:
    """Draw a module's filters from a fit's; layer -> share of negative eigenvalues, where there are some."""
    parts: list[DepthwisePart] = depthwise(module, strict=strict, caller="covariance_transfer_")
    parts = checked_filters(parts, "covariances are transferred for images only", strict)
    wanted = target_distributions(parts, fit)
    used = {layer.kernel for layer in fit.layers if fit.kernel in (None, layer.kernel)}
    negative = {}
    for part, (mean, covariance) in zip(parts, wanted, strict=True):
        filters = draw_filters(part.channels, covariance, fit.psd, generator)
        part.write(filters + torch.from_numpy(mean).float() if fit.means else filters)
        if fit.kronecker or used != {part.kernel[0]}:
            values = np.linalg.eigvalsh(covariance)
            share = float(-values[values < 0].sum() / max(np.abs(values).sum(), np.finfo(float).tiny))
            if share > _ROUNDING:
                negative[part.name] = share
    return negative
