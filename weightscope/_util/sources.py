"""Kinds of sources: populations, artifacts, trained networks."""

from pathlib import Path

POPULATION_FILE = "population.json"


def is_population(source: object) -> bool:
    """Whether a path denotes a population: it ends in .pop, existing or not, or contains a manifest."""
    if not isinstance(source, str | Path) or "://" in str(source):
        return False
    path = Path(source)
    return path.suffix == ".pop" or (path / POPULATION_FILE).exists()
