"""Covariances within one network: filters, rows, columns and patches as samples, layer by layer."""

from typing import Any, NamedTuple

import numpy as np

from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.statistics.slices import SliceMoments, slice_moments


class FilterCovariance(NamedTuple):
    """The filters of one depthwise layer as samples (thesis Eq. 3.3).

    Attributes:
        name: path of the convolution.
        stage: its stage, from 0.
        kernel: (kh, kw).
        mean: (P,) float64, P = kh kw, in the order kw i + j.
        covariance: (P, P) float64, divisor count - 1.
        count: filters that count.
        excluded: filters left out because a weight is not finite.
    """

    name: str
    stage: int
    kernel: tuple[int, int]
    mean: np.ndarray
    covariance: np.ndarray
    count: int
    excluded: int


def filter_covariances(source: Any, config: Any = None) -> list[FilterCovariance]:
    """Mean and covariance of the filters of every depthwise layer, in depth order (thesis Eq. 3.3).

    Args:
        source: a path, `hf://org/name`, a `Checkpoint`, an `nn.Module`, or a mapping of tensors.
        config: hints for a mapping, as in `weightscope.anatomy`.

    Raises:
        AnatomyError: if there is no depthwise convolution; lists what there is.
        DataError: if the source cannot be read, or a layer has fewer than 2 finite filters.

    Example:
        >>> [row.covariance.shape for row in filter_covariances("efficientnet-lite0.pth")][:2]
        [(9, 9), (9, 9)]
    """
    return [_filters(part) for part in depthwise(opened(source), config)]


def _filters(part: DepthwisePart) -> FilterCovariance:
    found: SliceMoments = slice_moments(part.read().cpu().numpy().reshape(part.channels, -1), keep=1 << 30)
    covariance = found.covariance
    assert covariance is not None  # every size is kept
    return FilterCovariance(part.name, part.stage, part.kernel, found.mean, covariance, found.n, found.excluded)


def opened(source: Any) -> Any:
    """What `weightscope.anatomy` reads: a `Checkpoint` for a path or an address, anything else as it is."""
    from pathlib import Path

    if isinstance(source, str | Path):
        from weightscope.checkpoint import Checkpoint

        return Checkpoint(source)
    return source
