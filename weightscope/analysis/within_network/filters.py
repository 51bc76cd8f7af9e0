"""The covariance of the filters of every depthwise layer, for those who build on it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from weightscope.analysis.within_network.parts import opened
from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.errors import DataError
from weightscope.statistics.slices import slice_moments


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


def filter_covariances(source: Any, config: Mapping[str, Any] | None = None) -> list[FilterCovariance]:
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
    samples = part.read().cpu().numpy().reshape(part.channels, -1)
    try:
        found = slice_moments(samples, keep=samples.shape[1])
    except DataError as error:
        raise DataError(f"`{part.name}`: {error}") from None
    assert found.covariance is not None  # every size is kept
    return FilterCovariance(part.name, part.stage, part.kernel, found.mean, found.covariance, found.n, found.excluded)
