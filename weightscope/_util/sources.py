"""Kinds of sources: populations, their members, artifacts, trained networks."""

import re
from pathlib import Path

from weightscope.errors import UsageError

POPULATION_FILE = "population.json"
ARTIFACT_KEY = "weightscope"  # in the metadata of a safetensors file: it holds a fitted initialiser


def is_population(source: object) -> bool:
    """Whether a path denotes a population: it ends in .pop, existing or not, or contains a manifest."""
    if not isinstance(source, str | Path) or "://" in str(source):
        return False
    path = Path(source)
    return path.suffix == ".pop" or (path / POPULATION_FILE).exists()


def population_member(source: object) -> tuple[Path, int] | None:
    """`(PATH, k)` of the text `"PATH::k"`, network k of the population in folder PATH; None for anything else.

    Raises:
        UsageError: if what follows the colons is not an index.

    Example:
        >>> population_member("digits.pop::3")
        (PosixPath('digits.pop'), 3)
    """
    path, colons, index = str(source).rpartition("::") if isinstance(source, str | Path) else ("", "", "")
    if not colons or not is_population(path):
        return None
    if not re.fullmatch(r"[0-9]{1,9}", index):
        raise UsageError(f"{source}: expected PATH::k with the index k of a network, counted from 0, found {index!r}")
    return Path(path), int(index)
