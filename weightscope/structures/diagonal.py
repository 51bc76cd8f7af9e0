"""Diagonal: independent entries, each with its own variance."""

from typing import Self

from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import STRUCTURES, EntryAccumulator, choose_mean, require_variation


@STRUCTURES.register("diagonal", source="maximum likelihood")
class Diagonal(AffineGaussian):
    """w_j ~ N(mean_j, v_j) independently, by maximum likelihood."""

    name = "diagonal"
    needs_samples = False

    @classmethod
    def accumulator(cls, spec: WeightSpec) -> EntryAccumulator[Self]:
        """Accumulates mean and variance of each entry."""
        return EntryAccumulator(spec, cls.from_moments)

    @classmethod
    def from_moments(cls, moments: EntryMoments, spec: WeightSpec) -> Self:
        """Fit from the entries' moments."""
        mean, parameters, kinds = choose_mean(moments, spec)
        variance = moments.mean_square(mean)
        require_variation(variance, "entries")
        return cls(spec, mean, variance, None, parameters + spec.size, {"mean": kinds})
