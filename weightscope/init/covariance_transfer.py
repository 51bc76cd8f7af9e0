"""Depthwise filters drawn from the covariances of a trained network's filters, between any two shapes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weightscope._util.checks import choice, count, flag
from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.errors import DataError, UsageError
from weightscope.init.base import INITIALISERS, M, cpu_generator
from weightscope.init.convolution import checked_filters, draw_filters, relative_depths
from weightscope.statistics.filters import FilterDistribution, at_depth, resized_covariance, resized_mean

SCHEDULES = ("depth", "stage")
_ROUNDING = 1e-9  # a smaller share of negative eigenvalues is rounding error


@dataclass(frozen=True)
class TransferOptions:
    """The named parameters of `covariance_transfer_`, checked."""

    kronecker: bool = False
    means: bool = False
    schedule: str = "depth"
    kernel: int | None = None
    psd: str = "abs"

    def __post_init__(self) -> None:
        flag("kronecker", self.kronecker)
        flag("means", self.means)
        choice("schedule", self.schedule, SCHEDULES)
        choice("psd", self.psd, ("abs", "clip"))
        if self.kernel is not None:
            count("kernel", self.kernel)


def target_distributions(
    parts: list[DepthwisePart], source: list[FilterDistribution], options: TransferOptions
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The mean (k, k) and covariance (k*k, k*k) of the filters to draw for each of a module's layers.

    Layers of the source whose filters are dead are not used.
    """
    chosen = [layer for layer in source if options.kernel in (None, layer.kernel) and layer.usable]
    if not chosen:
        sizes = ", ".join(str(k) for k in sorted({layer.kernel for layer in source if layer.usable}))
        wanted = (
            "filters that are not dead" if options.kernel is None else f"{options.kernel} x {options.kernel} filters"
        )
        raise UsageError(f"kernel: no layer of the source has {wanted}, found sizes {sizes or 'of dead filters'}")
    if options.schedule == "stage":
        groups, depths, own = _by_stage(parts, source, chosen)
    else:
        groups, depths = [chosen] * len(parts), relative_depths(parts, "depth")
        own = {layer.name: layer.depth for layer in source}
    cache: dict[tuple[str, int], np.ndarray] = {}
    out = []
    for part, group, depth in zip(parts, groups, depths, strict=True):
        size, places = part.kernel[0], [own[layer.name] for layer in group]
        for layer in group:
            if (layer.name, size) not in cache:
                cache[layer.name, size] = resized_covariance(layer.covariance, layer.kernel, size)
        covariance = at_depth(places, [cache[layer.name, size] for layer in group], depth)
        if options.kronecker:
            covariance = _factored(part.name, covariance)
        mean = at_depth(places, [resized_mean(layer.mean, layer.kernel, size) for layer in group], depth)
        out.append((mean if options.means else np.zeros_like(mean), covariance))
    return out


def _by_stage(
    parts: list[DepthwisePart], source: list[FilterDistribution], chosen: list[FilterDistribution]
) -> tuple[list[list[FilterDistribution]], list[float], dict[str, float]]:
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


def _factored(name: str, covariance: np.ndarray) -> np.ndarray:
    """The nearest `A (x) A` to a covariance."""
    from weightscope.statistics.kronecker import kronecker_sum

    if not covariance.any():
        return covariance
    fit = kronecker_sum(covariance, same=True)
    if not fit.terms:
        raise DataError(f"`{name}`: its covariance has no component A (x) A; leave out kronecker")
    return fit.matrix()


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
    generator: torch.Generator | None = None,
) -> M:
    """Draw every depthwise filter from `N(mu, Sigma)` of a trained network's filters, between any two shapes.

        Sigma_i = Cov[vec(F_i1), ..., vec(F_iC)],   F'_ij ~ N(mu_i, Sigma_i)

    Width: any number of filters is drawn. Depth: `Sigma` is interpolated linearly over the relative depth i / (D - 1)
    and constant before the source's first layer and after its last. Kernel size: each block is padded with its mean or
    clipped, then the blocks are interpolated (`resized_covariance`); a source with several kernel sizes has every layer
    resized to the target's kernel before the interpolation over depth. Patch size and family are irrelevant.

    Covariances are not shrunk: C <= k^2 filters give a covariance of rank C - 1, so that the new filters are in the
    span of the old ones (about their mean). Resized covariances are not positive semi-definite, see `psd`.

    Args:
        module: changed in place: the weights of its depthwise convolutions, nothing else.
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.
        kronecker: replace each covariance by the nearest `A (x) A`, after resizing and interpolation.
        means: add the mean filter, resized and interpolated in the same way; otherwise the mean is zero.
        schedule: "depth" over the whole network, or "stage": from the source's same stage, over the depth within it.
        kernel: use only the source's layers with filters of this size, at their own depths; None for all. Layers whose
            filters are dead (see `filter_distributions`) are never used.
        psd: "abs" or "clip", see `covariance_root`; only matters if kernels are resized.
        strict: whether filters of the module or the source that cannot be read, or are not square, are an error; if
            not, a warning lists them, and those of the module stay as they are.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module or the source has no depthwise convolution.
        UsageError: if an argument is invalid, or filters are one-dimensional, not square or of even size.
        DataError: if a weight of the source is not finite, or the source cannot be read.

    Source: thesis section 3.1.1, Eq. 3.3-3.4, and its "Covariance transfer across width, depth, patch size, and
        kernel size".

    Example:
        >>> covariance_transfer_(convnext, "efficientnet-lite0.pth", kernel=5)
    """
    from weightscope.fits.filters import filter_distributions  # SciPy: a second to import

    options = TransferOptions(kronecker, means, schedule, kernel, psd)
    transfer_distributions(module, filter_distributions(source, strict=strict), options, generator, strict=strict)
    return module


def transfer_distributions(
    module: nn.Module,
    source: list[FilterDistribution],
    options: TransferOptions,
    generator: torch.Generator | None,
    *,
    strict: bool = True,
) -> dict[str, float]:
    """Draw a module's depthwise filters from the distributions of a source's; errors as in `covariance_transfer_`.

    Returns:
        Layer -> sum of its covariance's negative eigenvalues over the sum of absolute ones, for the layers whose
        resized or factored covariance is not positive semi-definite.
    """
    parts: list[DepthwisePart] = depthwise(module, strict=strict, caller="covariance_transfer_")
    parts = checked_filters(parts, "covariances are transferred for images only", strict)
    cpu_generator(generator)
    wanted = target_distributions(parts, source, options)
    used = {layer.kernel for layer in source if options.kernel in (None, layer.kernel)}
    negative = {}
    for part, (mean, covariance) in zip(parts, wanted, strict=True):
        filters = draw_filters(part.channels, covariance, options.psd, generator)
        part.write(filters + torch.from_numpy(mean).float() if options.means else filters)
        if options.kronecker or used != {part.kernel[0]}:
            values = np.linalg.eigvalsh(covariance)
            share = float(-values[values < 0].sum() / max(np.abs(values).sum(), np.finfo(float).tiny))
            if share > _ROUNDING:
                negative[part.name] = share
    return negative
