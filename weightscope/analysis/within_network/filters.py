"""The distribution of the filters of every depthwise layer of a network."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.errors import DataError, UsageError
from weightscope.statistics.filters import FilterDistribution
from weightscope.statistics.slices import slice_moments

_DEAD = 1e-3  # norm relative to the largest; weight decay takes a filter without gradient far below it


def filter_distributions(source: Any, config: Mapping[str, Any] | None = None) -> list[FilterDistribution]:
    """Mean and covariance of the filters of every depthwise layer, in depth order (thesis Eq. 3.3).

    A filter is counted as dead if its norm is below a thousandth of the largest of its layer, or of what is typical of
    the network's layers (the median of their largest).

    Args:
        source: a path, `hf://org/name`, a `Checkpoint`, an `nn.Module`, or a mapping of tensors.
        config: hints for a mapping, as in `weightscope.anatomy`.

    Raises:
        AnatomyError: if there is no depthwise convolution; lists the layers found.
        UsageError: if filters are one-dimensional, not square or of even size.
        DataError: if the source cannot be read, or a weight is not finite.

    Example:
        >>> [found.kernel for found in filter_distributions("efficientnet-lite0.pth")][:4]
        [3, 3, 3, 5]
    """
    parts = [(part, part.read().cpu().numpy().reshape(part.channels, -1)) for part in depthwise(source, config)]
    norms = [np.linalg.norm(filters.astype(np.float64), axis=1) for _, filters in parts]
    typical = float(np.median([norm.max() for norm in norms]))
    found = [_distribution(part, filters) for part, filters in parts]
    dead = [int((norm <= _DEAD * max(norm.max(), typical)).sum()) for norm in norms]
    return [replace(layer, dead=count) for layer, count in zip(found, dead, strict=True)]


def _distribution(part: DepthwisePart, filters: np.ndarray) -> FilterDistribution:
    kh, kw = part.kernel
    if part.ndim != 2:
        raise UsageError(f"`{part.name}`: expected two-dimensional filters, found {part.ndim}-D of size {kw}")
    if kh != kw or kh % 2 == 0:
        raise UsageError(f"`{part.name}`: expected square filters of odd size, found {kh} x {kw}")
    try:
        found = slice_moments(filters, keep=kh * kw)
    except DataError as error:
        raise DataError(f"`{part.name}`: {error}") from None
    if found.excluded:
        raise DataError(
            f"`{part.name}`: {found.excluded} of {part.channels} filters hold NaN or infinity; "
            "a covariance needs a network that did not diverge"
        )
    assert found.covariance is not None  # every size is kept
    return FilterDistribution(
        name=part.name,
        stage=part.stage,
        depth=part.layer / max(1, part.depth - 1),
        kernel=kh,
        count=found.n,
        mean=found.mean.reshape(kh, kh),
        covariance=found.covariance,
    )
