"""The distribution of the filters of every depthwise layer of a network."""

from collections.abc import Mapping
from typing import Any

from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.errors import DataError, UsageError
from weightscope.statistics.filters import FilterDistribution
from weightscope.statistics.slices import slice_moments


def filter_distributions(source: Any, config: Mapping[str, Any] | None = None) -> list[FilterDistribution]:
    """Mean and covariance of the filters of every depthwise layer, in depth order (thesis Eq. 3.3).

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
    return [_distribution(part) for part in depthwise(source, config)]


def _distribution(part: DepthwisePart) -> FilterDistribution:
    kh, kw = part.kernel
    if part.ndim != 2:
        raise UsageError(f"`{part.name}`: expected two-dimensional filters, found {part.ndim}-D of size {kw}")
    if kh != kw or kh % 2 == 0:
        raise UsageError(f"`{part.name}`: expected square filters of odd size, found {kh} x {kw}")
    try:
        found = slice_moments(part.read().cpu().numpy().reshape(part.channels, -1), keep=kh * kw)
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
