"""The distribution of the filters of one depthwise layer: their mean and covariance."""

from dataclasses import dataclass

import numpy as np

from weightscope.errors import DataError


@dataclass(frozen=True, eq=False)
class FilterDistribution:
    """Mean and covariance of the filters of one depthwise layer, each filter one sample.

        mean = sum_c F_c / C,   covariance = sum_c vec(F_c - mean) vec(F_c - mean)^T / (C - 1)

    `vec` is in row-major order: pixel (i, j) is coordinate k i + j.

    Attributes:
        name: path of the layer.
        stage: number of its stage, from 0.
        depth: relative depth among all depthwise layers of the network, in [0, 1].
        kernel: k, the side of the square filters.
        count: C, number of filters.
        mean: (k, k) float64.
        covariance: (k*k, k*k) float64, of rank C - 1 at most.
        dead: number of filters whose norm is negligible; mean and covariance include them.

    Raises:
        DataError: if the shape of an array does not follow from k.

    Source: thesis Eq. 3.3.
    """

    name: str
    stage: int
    depth: float
    kernel: int
    count: int
    mean: np.ndarray
    covariance: np.ndarray
    dead: int = 0

    @property
    def usable(self) -> bool:
        """Whether at least two filters are alive; otherwise the covariance says nothing about filters."""
        return self.count - self.dead >= 2

    def __post_init__(self) -> None:
        k = self.kernel
        for what, array, shape in (("mean", self.mean, (k, k)), ("covariance", self.covariance, (k * k, k * k))):
            if array.shape != shape:
                raise DataError(f"`{self.name}`: expected a {what} of shape {shape}, found {array.shape}")
