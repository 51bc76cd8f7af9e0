"""`fit_init`: an initialiser from trained weights, of a population or of one network."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weightscope._util.plugins import underscored
from weightscope._util.sources import is_population
from weightscope.artifacts.network_fit import NetworkFit
from weightscope.artifacts.population_fit import PopulationFit
from weightscope.errors import UsageError
from weightscope.fitting.network import NETWORK_FITS, fit_network
from weightscope.fitting.population import fit
from weightscope.population import Population
from weightscope.structures import STRUCTURES


def fit_init(
    source: str | Path | Population, structure: Any = "auto", *, options: dict[str, Any] | None = None, **settings: Any
) -> PopulationFit | NetworkFit:
    """Fit an initialiser to a population (`fit`) or to one network (`fit_network`), depending on the source.

    Args:
        source: a population or its folder, or a checkpoint: a file, a model folder, `hf://org/name`.
        structure: of a population: "auto", a name in `weightscope.structures.STRUCTURES`, or a `Structure` subclass;
            of one network: "filters", "conv_schedule", "identity_product", or a function. Also
            `"package.module:name"` of either.
        options: of the structure.
        settings: of `fit` for a population: `select`, `joint`, `holdout`, `seed`.

    Raises:
        UsageError: if the structure is for the other kind of source, or `settings` are given for one network.
        DataError: as `fit` and `fit_network`.

    Example:
        >>> fit_init("efficientnet-lite0.pth", "filters", options={"kernel": 5}).save("filters.safetensors")
    """
    name = underscored(structure) if isinstance(structure, str) else None
    if isinstance(source, Population) or is_population(source):
        if name in NETWORK_FITS:
            known = ", ".join(("auto", *STRUCTURES))
            raise UsageError(f"structure: {name!r} is fitted to one network, and {source} is a population: {known}")
        population = source if isinstance(source, Population) else Population(source)
        return fit(population, structure=structure, options=options, **settings)
    if name == "auto" or name in STRUCTURES or isinstance(structure, type):
        known = ", ".join(NETWORK_FITS)
        shown = name or structure.__name__
        raise UsageError(f"structure: {shown!r} is fitted to a population, and {source} is one network: {known}")
    if settings:
        raise UsageError(f"{', '.join(settings)}: for populations; {structure} of one network takes options only")
    return fit_network(str(source), structure, **(options or {}))


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `name=value` texts into a dictionary; values in JSON (a number, true) are decoded.

    Raises:
        UsageError: if a text has no "=", or a name is repeated.

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
