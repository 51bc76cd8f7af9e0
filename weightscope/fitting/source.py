"""`fit_init`: an initialiser from trained weights, of a population or of one network."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weightscope.artifacts.network_fit import Portable
from weightscope.artifacts.population_fit import FitResult
from weightscope.errors import UsageError
from weightscope.fitting.network import STRUCTURES as NETWORK
from weightscope.fitting.network import fit_network
from weightscope.fitting.population import fit
from weightscope.population import Population
from weightscope.structures import STRUCTURES as POPULATION


def fit_init(
    source: str | Path, structure: str = "auto", *, options: dict[str, Any] | None = None, **settings: Any
) -> FitResult | Portable:
    """Fit an initialiser to a population (`fit`) or to one network (`fit_network`), whichever the source is.

    Args:
        source: the folder of a population, or a checkpoint: a file, a model folder, `hf://org/name`.
        structure: of a population: "auto" or a name in `weightscope.structures.STRUCTURES`; of one network:
            "filters", "conv-schedule" or "identity-product".
        options: of the structure.
        settings: of `fit` for a population: `select`, `joint`, `holdout`, `seed`.

    Raises:
        UsageError: if the structure is one of the other kind of source, or `settings` are given for one network.
        DataError: as `fit` and `fit_network`.

    Example:
        >>> fit_init("efficientnet-lite0.pth", "filters", options={"kernel": 5}).save("filters.safetensors")
    """
    path = Path(source)
    if path.suffix == ".pop" or (path / "population.json").exists():
        if structure in NETWORK:
            there = ", ".join(("auto", *POPULATION))
            raise UsageError(
                f"structure: {structure!r} is fitted to one network, and {source} is a population: {there}"
            )
        return fit(Population(path), structure=structure, options=options, **settings)
    if structure not in NETWORK:
        why = "is fitted to a population" if structure in ("auto", *POPULATION) else "does not exist"
        raise UsageError(f"structure: {structure!r} {why}, and {source} is one network: {', '.join(NETWORK)}")
    if settings:
        raise UsageError(f"{', '.join(settings)}: for populations; {structure} of one network takes options only")
    return fit_network(str(source), structure, **(options or {}))


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """`name=value` texts as a dictionary; a value that is JSON (a number, true) is read as such.

    Raises:
        UsageError: if a text has no "=", or a name comes twice.

    Example:
        >>> parsed_options(["rank=8", "schedule=stage"])
        {'rank': 8, 'schedule': 'stage'}
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in out:
            raise UsageError(f"option: expected name=value, each name once, found {text!r}")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
