"""Isotropic: independent entries, one variance for each tensor, as in standard initialisers."""

from typing import Self

import numpy as np

from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import STRUCTURES, EntryAccumulator, choose_mean, require_variation


@STRUCTURES.register("isotropic", source="maximum likelihood")
class Isotropic(AffineGaussian):
    """w_j ~ N(mean_j, v) independently, with one v for each tensor, by maximum likelihood.

    Example:
        >>> Isotropic.fit(population.weights("*fc1.weight"), population.spec.select("*fc1.weight"))
    """

    name = "isotropic"
    needs_samples = False

    @classmethod
    def accumulator(cls, spec: WeightSpec) -> EntryAccumulator[Self]:
        """Accumulates mean and variance of each entry."""
        return EntryAccumulator(spec, cls.from_moments)

    @classmethod
    def from_moments(cls, moments: EntryMoments, spec: WeightSpec) -> Self:
        """Fit from the entries' moments."""
        mean, parameters, kinds = choose_mean(moments, spec)
        deviations, variance = moments.mean_square(mean), np.empty(spec.size)
        for part in spec.slices.values():
            variance[part] = deviations[part].mean() if part.stop > part.start else 0.0
        require_variation(variance, "entries")
        return cls(spec, mean, variance, None, parameters + len(spec), {"mean": kinds})
