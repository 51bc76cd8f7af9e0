"""The distribution of the filters of every depthwise layer of a network."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from weightscope.anatomy import DepthwisePart, depthwise
from weightscope.anatomy.convolution import listed
from weightscope.errors import DataError, UsageError
from weightscope.statistics.filters import FilterDistribution
from weightscope.statistics.slices import slice_moments

_DEAD = 1e-3  # norm relative to the largest; weight decay takes a filter without gradient far below it


def filter_distributions(
    source: Any, config: Mapping[str, Any] | None = None, *, strict: bool = True
) -> list[FilterDistribution]:
    """Mean and covariance of the filters of every depthwise layer, in depth order (thesis Eq. 3.3).

    A filter is counted as dead if its norm is below a thousandth of the largest of its layer, or of what is typical of
    the network's layers (the median of their largest).

    Args:
        source: a path, `hf://org/name`, a `Checkpoint`, an `nn.Module`, or a mapping of tensors.
        config: hints for a mapping, as in `weightscope.anatomy`.
        strict: whether a layer whose filters are one-dimensional, not square or of even size is an error; if not, it
            is left out, and a warning lists it.

    Raises:
        AnatomyError: if there is no depthwise convolution; lists the layers found.
        UsageError: if a layer has other filters (strict), or all have.
        DataError: if the source cannot be read, or a weight is not finite.

    Example:
        >>> [found.kernel for found in filter_distributions("efficientnet-lite0.pth")][:4]
        [3, 3, 3, 5]
    """
    found, others = square_and_others(source, config)
    if others and strict:
        raise UsageError(f"expected square filters of odd size in every layer, found {listed(others)}")
    if others:
        warnings.warn(f"left out, not square: {listed(others)}", stacklevel=2)
    return found


def square_and_others(
    source: Any, config: Mapping[str, Any] | None = None
) -> tuple[list[FilterDistribution], list[DepthwisePart]]:
    """The distributions of the layers with square filters of odd size, and the other layers.

    Raises:
        AnatomyError: if there is no depthwise convolution.
        UsageError: if no layer has square filters of odd size.
        DataError: if the source cannot be read, or a weight is not finite.
    """
    parts = depthwise(source, config)
    square = [(part, part.read().cpu().numpy().reshape(part.channels, -1)) for part in parts if part.square]
    if not square:
        raise UsageError(f"`{parts[0].name}`: expected {parts[0].expected_square}")
    found = [_distribution(part, filters) for part, filters in square]
    norms = [np.linalg.norm(filters.astype(np.float64), axis=1) for _, filters in square]
    typical = float(np.median([norm.max() for norm in norms]))
    dead = [int((norm <= _DEAD * max(norm.max(), typical)).sum()) for norm in norms]
    counted = [replace(layer, dead=count) for layer, count in zip(found, dead, strict=True)]
    return counted, [part for part in parts if not part.square]


def _distribution(part: DepthwisePart, filters: np.ndarray) -> FilterDistribution:
    kh, kw = part.kernel
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
