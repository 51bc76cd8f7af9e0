"""What a path given on the command line or in Python is: a population, an artifact, or a trained network."""

from pathlib import Path

POPULATION_FILE = "population.json"


def is_population(source: object) -> bool:
    """Whether a path is meant as a population, even if nothing is there yet: it ends in .pop or holds its manifest."""
    if not isinstance(source, str | Path) or "://" in str(source):
        return False
    path = Path(source)
    return path.suffix == ".pop" or (path / POPULATION_FILE).exists()
