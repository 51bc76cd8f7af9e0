"""One network of a population as a source of trained weights."""

from typing import Any

from weightscope._util.sources import population_member
from weightscope.population.reading import Population


def opened(source: Any) -> Any:
    """Network k of a population as a module, for `"PATH.pop::k"`; the `Checkpoint` of another path; others as they are.

    Networks of a population that is not complete can be opened, too.

    Raises:
        DataError: if it cannot be read.
        UsageError: if there is no network k.

    Example:
        >>> opened("digits.pop::3")
    """
    import torch  # which other uses of a population do not need

    from weightscope.anatomy import opened as opened_model

    if (member := population_member(source)) is None:
        return opened_model(source)
    with torch.random.fork_rng(devices=[]):  # building the network draws
        return Population(member[0], partial=True).network(member[1])
