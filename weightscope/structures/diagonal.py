"""Diagonal: independent entries, each with its own variance."""

from typing import Self

import numpy as np

from weightscope.spec import WeightSpec
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import checked_data, fit_mean, require_variation


class Diagonal(AffineGaussian):
    """w_j ~ N(mean_j, v_j) independently, by maximum likelihood."""

    name = "diagonal"
    summary = "independent entries, each with its own variance"

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D)."""
        rows = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(rows, spec)
        variance = np.mean((rows - mean) ** 2, axis=0)
        require_variation(variance, "entries")
        return cls(spec, mean, variance, None, parameters + spec.size, {"mean": kinds})
