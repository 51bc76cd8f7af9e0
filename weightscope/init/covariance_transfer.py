"""Depthwise filters drawn from the covariances of a trained network's filters, whatever the two shapes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weightscope._util.checks import choice, count, flag
from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.errors import DataError, UsageError
from weightscope.init._common import M, cpu_generator
from weightscope.init.convolution import checked_filters, draw_filters, relative_depths
from weightscope.statistics.resizing import at_depth, resized_covariance, resized_mean

SCHEDULES = ("depth", "stage")
_ROUNDING = 1e-9  # negative eigenvalues below this share are rounding errors


@dataclass(frozen=True, eq=False)
class FilterLaw:
    """The filters of one depthwise layer as samples of a distribution (thesis Eq. 3.3).

    Attributes:
        name: path of the layer.
        stage: its stage, from 0.
        depth: relative depth among all depthwise layers, in [0, 1].
        kernel: k.
        count: C, number of filters.
        mean: (k, k) float64.
        covariance: (k*k, k*k) float64, divisor C - 1, of rank C - 1 at most.
    """

    name: str
    stage: int
    depth: float
    kernel: int
    count: int
    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True)
class TransferOptions:
    """The named parameters of `covariance_transfer_`, checked.

    Raises:
        UsageError: if one cannot be meant.
    """

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


def filter_laws(source: Any) -> list[FilterLaw]:
    """Mean and covariance of the filters of every depthwise layer of a source, in depth order.

    Args:
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.

    Raises:
        AnatomyError: if it has no depthwise convolution.
        UsageError: if filters are one-dimensional, not square or of even size.
        DataError: if a weight is not finite.

    Example:
        >>> [law.kernel for law in filter_laws("efficientnet-lite0.pth")][:4]
        [3, 3, 3, 5]
    """
    parts = checked_filters(depthwise(source), "covariances are carried over for pictures only")
    depths = relative_depths(parts, "depth")
    return [_law(part, depth) for part, depth in zip(parts, depths, strict=True)]


def _law(part: DepthwisePart, depth: float) -> FilterLaw:
    from weightscope.statistics.slices import slice_moments  # SciPy, which takes a second to import

    k = part.kernel[0]
    found = slice_moments(part.read().cpu().numpy().reshape(part.channels, -1), keep=k * k)
    if found.excluded:
        raise DataError(
            f"`{part.name}`: {found.excluded} of {part.channels} filters hold NaN or infinity; "
            "a covariance needs a network that did not diverge"
        )
    assert found.covariance is not None  # kept, whatever its size
    return FilterLaw(part.name, part.stage, depth, k, found.n, found.mean.reshape(k, k), found.covariance)


def target_laws(
    parts: list[DepthwisePart], laws: list[FilterLaw], options: TransferOptions
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean (k, k) and covariance (k*k, k*k) from which each of a module's layers is drawn.

    Raises:
        UsageError: if the stages do not correspond, or no layer of the source has the wanted kernel.
    """
    chosen = [law for law in laws if options.kernel in (None, law.kernel)]
    if not chosen:
        there = ", ".join(str(k) for k in sorted({law.kernel for law in laws}))
        raise UsageError(
            f"kernel: no layer of the source has {options.kernel} x {options.kernel} filters, found {there}"
        )
    if options.schedule == "stage":
        groups, depths, own = _by_stage(parts, laws, chosen)
    else:
        groups, depths = [chosen] * len(parts), relative_depths(parts, "depth")
        own = {law.name: law.depth for law in laws}
    cache: dict[tuple[str, int], np.ndarray] = {}
    out = []
    for part, group, depth in zip(parts, groups, depths, strict=True):
        size, places = part.kernel[0], [own[law.name] for law in group]
        for law in group:
            if (law.name, size) not in cache:
                cache[law.name, size] = resized_covariance(law.covariance, law.kernel, size)
        covariance = at_depth(places, [cache[law.name, size] for law in group], depth)
        if options.kronecker:
            covariance = _factored(part.name, covariance)
        mean = at_depth(places, [resized_mean(law.mean, law.kernel, size) for law in group], depth)
        out.append((mean if options.means else np.zeros_like(mean), covariance))
    return out


def _by_stage(
    parts: list[DepthwisePart], laws: list[FilterLaw], chosen: list[FilterLaw]
) -> tuple[list[list[FilterLaw]], list[float], dict[str, float]]:
    """The source's layers of each part's stage, the parts' depths within their stages, and the source's."""
    mine, theirs = (list(dict.fromkeys(x.stage for x in xs)) for xs in (parts, laws))
    if len(mine) != len(theirs):
        raise UsageError(
            f"schedule: 'stage' needs as many stages on both sides, found {len(theirs)} in the source and {len(mine)} "
            "in the module; use 'depth'"
        )
    groups = {stage: [law for law in chosen if law.stage == other] for stage, other in zip(mine, theirs, strict=True)}
    if empty := [stage for stage in mine if not groups[stage]]:
        raise UsageError(f"kernel: no layer of stage {empty[0]} of the source has that size; use schedule 'depth'")
    own = dict(zip((law.name for law in laws), relative_depths(laws, "sawtooth"), strict=True))
    return [groups[part.stage] for part in parts], relative_depths(parts, "sawtooth"), own


def _factored(name: str, covariance: np.ndarray) -> np.ndarray:
    from weightscope.statistics.kronecker.sums import kronecker_sum

    if not covariance.any():
        return covariance
    fit = kronecker_sum(covariance, same=True)
    if not fit.terms:
        raise DataError(f"`{name}`: its covariance has no part A (x) A; leave kronecker out")
    return fit.matrix()


def covariance_transfer_(
    module: M,
    source: Any,
    *,
    kronecker: bool = False,
    means: bool = False,
    schedule: str = "depth",
    kernel: int | None = None,
    psd: str = "abs",
    generator: torch.Generator | None = None,
) -> M:
    """Draw every depthwise filter from `N(mu, Sigma)` of a trained network's filters, whatever the two shapes.

        Sigma_i = Cov[vec(F_i1), ..., vec(F_iC)],   F'_ij ~ N(mu_i, Sigma_i)

    Width: any number of filters is drawn. Depth: `Sigma` is interpolated linearly over the relative depth i / (D - 1),
    and before the source's first layer and after its last it is theirs. Kernel size: each block is padded with its
    mean or clipped, then blocks are interpolated (`resized_covariance`); a source with several kernel sizes has every
    layer brought to the target's size before the interpolation over depth. Patch size and family do not matter.

    Nothing is shrunk: from C <= k^2 filters comes a covariance of rank C - 1, and the new filters lie in the span of
    the old ones (about their mean). Resized covariances are not positive semi-definite, see `psd`.

    Args:
        module: changed in place: the weights of its depthwise convolutions, nothing else.
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.
        kronecker: replace each wanted covariance by the nearest `A (x) A` (after resizing and interpolation).
        means: add the mean filter, resized and interpolated alike; otherwise the mean is zero.
        schedule: "depth", or "stage": layers of a stage from the source's same stage, over the relative depth in it.
        kernel: take only the source's layers with filters of this size, at their own depths; None for all.
        psd: "abs" or "clip", see `covariance_root`; makes no difference where no kernel is resized.
        generator: of the CPU; None for torch's global one.

    Raises:
        AnatomyError: if the module or the source has no depthwise convolution.
        UsageError: if an argument cannot be meant, or filters are one-dimensional, not square or of even size.
        DataError: if a weight of the source is not finite, or it cannot be read.

    Source: thesis section 3.1.1, Eq. 3.3-3.4, and its "Covariance transfer across width, depth, patch size, and
        kernel size".

    Example:
        >>> covariance_transfer_(convnext, "efficientnet-lite0.pth", kernel=5)
    """
    options = TransferOptions(kronecker, means, schedule, kernel, psd)
    transfer_distributions(module, filter_laws(source), options, generator)
    return module


def transfer_distributions(
    module: nn.Module, laws: list[FilterLaw], options: TransferOptions, generator: torch.Generator | None
) -> dict[str, float]:
    """Draw a module's depthwise filters from a source's covariances; errors as `covariance_transfer_`.

    Returns:
        Layer -> the share of negative eigenvalues in the sum of absolute ones, of each covariance that was resized or
        factored and is therefore not positive semi-definite.
    """
    parts = checked_filters(depthwise(module), "covariances are carried over for pictures only")
    cpu_generator(generator)
    wanted = target_laws(parts, laws, options)
    used = {law.kernel for law in laws if options.kernel in (None, law.kernel)}
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
