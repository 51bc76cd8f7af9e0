"""Weights, whatever holds them: a population, a checkpoint, a module, a state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weightscope._util.sources import is_population, population_member
from weightscope.errors import DataError
from weightscope.population.reading import Population, population_in

if TYPE_CHECKING:
    from torch import nn

WeightSource: TypeAlias = "str | Path | Population | nn.Module | Mapping[str, Any]"
"""What `open_source` and `open_network` take: a path of a population or a checkpoint, `"PATH.pop::k"`, `hf://org/name`,
a `Population`, a `Checkpoint`, a module, or a state dict."""


def open_source(source: Any, *, partial: bool = False) -> Any:
    """Open weights; whatever is open already is returned as it is.

    Args:
        source: a `WeightSource`.
        partial: open a population although it is incomplete.

    Returns:
        A `Population` for the folder of one; else as `open_network`.

    Raises:
        UsageError: if there is no such population, or no network k in it.
        DataError: if the source cannot be read.

    Example:
        >>> open_source("digits.pop")
        <Population: digits.pop: 256 networks (convnext, digits), D=27018>
    """
    if isinstance(source, Population):
        return source
    return population_in(source, partial=partial) if is_population(source) else open_network(source)


def open_network(source: Any) -> Any:
    """Open one network; whatever is open already is returned as it is.

    Args:
        source: a `WeightSource`; of a population, one of its networks: `"PATH.pop::k"`. The population may be
            incomplete.

    Returns:
        A module for a network of a population, a `Checkpoint` for another path, or the given module or mapping.

    Raises:
        UsageError: if the population has no network k.
        DataError: if it cannot be read, or is a whole population or the artifact of an initialiser.

    Example:
        >>> open_network("digits.pop::3")
    """
    if isinstance(source, Population):
        raise DataError(f"{source.path}: expected one network, found a population; give population.network(k)")
    if (member := population_member(source)) is not None:
        import torch  # which other uses of a population do not need

        with torch.random.fork_rng(devices=[]):  # building the network draws
            return Population(member[0], partial=True).network(member[1])
    if isinstance(source, str | Path):
        from weightscope.checkpoint import open_checkpoint

        return open_checkpoint(source)
    return source
