"""Populations on disk: the only part of weightscope that imports h5py."""

from weightscope.population.exporting import export
from weightscope.population.members import opened
from weightscope.population.reading import Population, population_in, recipe_of

__all__ = ["Population", "export", "opened", "population_in", "recipe_of"]
