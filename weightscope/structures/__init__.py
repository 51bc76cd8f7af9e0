"""Fitted distributions over weight vectors, one per file, with one small contract (`Structure`)."""

from weightscope.errors import UsageError
from weightscope.structures.base import Structure
from weightscope.structures.dense import Dense
from weightscope.structures.diagonal import Diagonal
from weightscope.structures.group_means import GroupMeans
from weightscope.structures.isotropic import Isotropic
from weightscope.structures.kronecker import Kronecker
from weightscope.structures.low_rank import LowRank

__all__ = ["STRUCTURES", "Dense", "Diagonal", "GroupMeans", "Isotropic", "Kronecker", "LowRank", "Structure", "named"]

# From few parameters to many.
STRUCTURES: dict[str, type[Structure]] = {
    "isotropic": Isotropic,
    "group_means": GroupMeans,
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "low_rank": LowRank,
    "dense": Dense,
}


def named(name: str) -> type[Structure]:
    """The structure of that name.

    Raises:
        UsageError: if there is none; lists the names.
    """
    if name not in STRUCTURES:
        raise UsageError(f"no structure {name!r}; there are {', '.join(STRUCTURES)}")
    return STRUCTURES[name]
