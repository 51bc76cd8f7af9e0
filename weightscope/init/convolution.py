"""Depthwise filters drawn from a closed-form covariance that widens with depth."""

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from weightscope._util.checks import choice, count, number, positive
from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.anatomy.convolution import listed
from weightscope.errors import UsageError
from weightscope.init.base import INITIALISERS, M, cpu_generator, normal
from weightscope.statistics.filters import Schedule, conv_covariance, covariance_root, relative_depths

# Published settings: thesis B.1 (CIFAR with 2x2 patches, ImageNet) and Fig. A.4 (CIFAR with 1x1 patches).
PRESETS: dict[str, Schedule] = {
    "cifar-patch1": Schedule(0.16, 0.32, 2.88),
    "cifar-patch2": Schedule(0.08, 0.37, 2.9),
    "imagenet-frozen": Schedule(0.15, 0.5, 0.25),
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
        raise UsageError(f"conv_covariance_: missing {', '.join(missing)}, or preset, one of {', '.join(PRESETS)}")
    return Schedule(**{name: number(name, value) for name, value in given.items()})


def checked_filters(parts: list[DepthwisePart], why: str, strict: bool = True) -> list[DepthwisePart]:
    """The parts that have two-dimensional, square filters of odd size."""
    odd = [part for part in parts if not part.square]
    if odd and (strict or len(odd) == len(parts)):
        step = "" if len(odd) == len(parts) else f"; strict=False uses the {len(parts) - len(odd)} other layers"
        raise UsageError(f"`{odd[0].name}`: expected {odd[0].expected_square}; {why}{step}")
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
    generator: torch.Generator | None = None,
) -> M:
    """Draw every depthwise filter from `N(0, scale^2 conv_covariance(k, sigma(d)))`, with sigma growing with depth.

        sigma(d) = sigma0 + v d + a d^2 / 2,   d = i / (D - 1)  for layer i of D  (0 if D = 1)

    Args:
        module: changed in place: the weights of its depthwise convolutions, nothing else.
        sigma0: variance of the bumps in the first layer.
        v: its slope over the relative depth.
        a: its curvature.
        preset: published values of the three: "cifar-patch1", "cifar-patch2", "imagenet-frozen", "imagenet-thawed".
        scale: factor on every filter, > 0; 1 as published.
        psd: "abs" or "clip", see `covariance_root`.
        schedule: "depth", or "sawtooth" to restart the schedule in every stage, for networks that downsample
            (thesis Fig. B.5, of which only the caption is available).
        strict: whether filters that cannot be read, or are not square, are an error; if not, a warning lists them and
            they stay as they are.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no depthwise convolution.
        UsageError: if an argument is invalid, sigma is not positive at some layer, or a filter is
            one-dimensional, not square or of even size.

    Source: thesis section 3.1.2, Eq. 3.10-3.11, Fig. A.4 and B.1.

    Example:
        >>> conv_covariance_(convnext, sigma0=0.15, v=0.25, a=1.0, generator=torch.Generator().manual_seed(0))
    """
    curve = settings(preset, sigma0, v, a)
    positive("scale", scale)
    choice("psd", psd, ("abs", "clip"))
    choice("schedule", schedule, ("depth", "sawtooth"))
    parts = checked_filters(depthwise(module, strict=strict, caller="conv_covariance_"), BUMP, strict)
    for part, d in zip(parts, relative_depths(parts, schedule), strict=True):
        if curve(d) <= 0:
            raise UsageError(f"sigma: expected > 0 at every depth, found {curve(d):g} at `{part.name}` (depth {d:g})")
    for part, d in zip(parts, relative_depths(parts, schedule), strict=True):
        covariance = scale**2 * conv_covariance(part.kernel[0], curve(d))
        part.write(draw_filters(part.channels, covariance, psd, generator))
    return module


def draw_filters(channels: int, covariance: np.ndarray, psd: str, generator: torch.Generator | None) -> Tensor:
    """Filters (channels, k, k) from N(0, covariance), covariance (k*k, k*k); float32, drawn in float64."""
    root = torch.from_numpy(covariance_root(covariance, psd))
    k = math.isqrt(len(covariance))
    draws = normal(channels, k * k, generator=generator, dtype=torch.float64) @ root.T
    return draws.float().reshape(channels, k, k)


@INITIALISERS.register("random_filters", source="impulse paper, Proposition 1", needs="depthwise convolutions")
def random_filters_(
    module: M,
    *,
    distribution: str = "normal",
    gain: float = 1.0,
    strict: bool = True,
    generator: torch.Generator | None = None,
) -> M:
    """Draw independent entries in every depthwise filter: `F ~ N(0, gain^2 / (kh kw))`, or uniform, same variance.

    With at least k^2 channels the filters span all filters, so that frozen ones perform as well as trained ones.

    Args:
        module: changed in place: the weights of its depthwise convolutions, of any shape.
        distribution: "normal" or "uniform".
        gain: > 0.
        strict: whether tensors that look like depthwise filters and cannot be read are an error; if not, a warning.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no depthwise convolution.
        UsageError: if an argument is invalid.

    Source: impulse paper, Proposition 1 and section 5.6.

    Example:
        >>> random_filters_(convmixer, generator=torch.Generator().manual_seed(0))
    """
    choice("distribution", distribution, ("normal", "uniform"))
    positive("gain", gain)
    for part in depthwise(module, strict=strict, caller="random_filters_"):
        shape = (part.channels, *part.kernel)
        draws = normal(*shape, generator=generator)
        if distribution == "uniform":
            draws = (torch.special.ndtr(draws) * 2 - 1) * math.sqrt(3)
        part.write(draws * (gain / math.sqrt(math.prod(part.kernel))))
    return module


@INITIALISERS.register("impulse_filters", source="impulse paper, section 5.6", needs="depthwise convolutions")
def impulse_filters_(
    module: M,
    *,
    filter_size: int | None = None,
    order: str = "random",
    strict: bool = True,
    generator: torch.Generator | None = None,
) -> M:
    """Set one pixel of every depthwise filter to 1 and the others to 0.

    The pixels are distributed evenly: each is used by floor or ceil(C / f^2) of a layer's C channels.

    Args:
        module: changed in place: the weights of its depthwise convolutions.
        filter_size: f; the impulses are in the central f x f pixels. None for the whole filter.
        order: "random", or "given": pixel c mod f^2 (row by row) for channel c.
        strict: whether tensors that look like depthwise filters and cannot be read are an error; if not, a warning.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no depthwise convolution.
        UsageError: if an argument is invalid, or a filter is smaller than filter_size or of the other parity.

    Source: impulse paper, section 5.6.

    Example:
        >>> impulse_filters_(convmixer, filter_size=3, generator=torch.Generator().manual_seed(0))
    """
    choice("order", order, ("random", "given"))
    if filter_size is not None:
        count("filter_size", filter_size)
    cpu_generator(generator)
    for part in depthwise(module, strict=strict, caller="impulse_filters_"):
        pixels = _central(part, filter_size)
        channels = torch.arange(part.channels)
        if order == "random":
            pixels = pixels[torch.randperm(len(pixels), generator=generator)]
            channels = channels[torch.randperm(part.channels, generator=generator)]
        taps = pixels[channels % len(pixels)]
        filters = torch.zeros(part.channels, math.prod(part.kernel)).scatter_(1, taps[:, None], 1.0)
        part.write(filters.reshape(part.channels, *part.kernel))
    return module


def _central(part: DepthwisePart, filter_size: int | None) -> Tensor:
    """Flat indices of the central pixels of a part's filters, row by row."""
    kh, kw = part.kernel
    sizes = [n if filter_size is None or (n == 1 and part.ndim == 1) else filter_size for n in (kh, kw)]
    if any(f > n or (n - f) % 2 for f, n in zip(sizes, (kh, kw), strict=True)):
        raise UsageError(f"`{part.name}`: filters of {kh} x {kw} have no central {sizes[0]} x {sizes[1]} pixels")
    rows, columns = (torch.arange((n - f) // 2, (n + f) // 2) for f, n in zip(sizes, (kh, kw), strict=True))
    return (rows[:, None] * kw + columns).reshape(-1)


@INITIALISERS.register("box_filters", source="impulse paper, section 5.6", needs="depthwise convolutions")
def box_filters_(module: M, *, value: float = 1.0, strict: bool = True, generator: torch.Generator | None = None) -> M:
    """Set every entry of every depthwise filter to `value`: average pooling up to a factor, a control of rank one.

    Args:
        module: changed in place: the weights of its depthwise convolutions.
        value: 1 as published.
        strict: whether tensors that look like depthwise filters and cannot be read are an error; if not, a warning.
        generator: not used.

    Raises:
        AnatomyError: if the module has no depthwise convolution.
        UsageError: if value is not a finite number.

    Source: impulse paper, section 5.6.

    Example:
        >>> box_filters_(convmixer)
    """
    number("value", value)
    for part in depthwise(module, strict=strict, caller="box_filters_"):
        part.write(torch.full((part.channels, *part.kernel), value))
    return module
