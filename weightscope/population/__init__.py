"""Populations on disk: the only part of weightscope that imports h5py."""

from weightscope.population.exporting import export
from weightscope.population.reading import (
    Population,
    WeightSource,
    member_of,
    open_network,
    open_source,
    population_in,
    recipe_of,
)

__all__ = [
    "Population",
    "WeightSource",
    "export",
    "member_of",
    "open_network",
    "open_source",
    "population_in",
    "recipe_of",
]
