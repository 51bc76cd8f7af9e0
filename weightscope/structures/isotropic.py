"""Isotropic: independent entries, one variance for each tensor, which is what standard initialisers are."""

from typing import Self

import numpy as np

from weightscope.spec import WeightSpec
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import checked_data, fit_mean, require_variation


class Isotropic(AffineGaussian):
    """w_j ~ N(mean_j, v) independently, with one v for each tensor, by maximum likelihood.

    Example:
        >>> Isotropic.fit(population.weights("*fc1.weight"), population.spec.select("*fc1.weight"))
    """

    name = "isotropic"
    summary = "independent entries, one variance for each tensor"

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D)."""
        rows = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(rows, spec)
        deviations, variance = np.mean((rows - mean) ** 2, axis=0), np.empty(spec.size)
        for part in spec.slices.values():
            variance[part] = deviations[part].mean() if part.stop > part.start else 0.0
        require_variation(variance, "entries")
        return cls(spec, mean, variance, None, parameters + len(spec), {"mean": kinds})
