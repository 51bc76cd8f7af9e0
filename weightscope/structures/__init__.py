"""Fitted distributions over weight vectors, one per file, with one contract (`Structure`)."""

from weightscope.structures.base import STRUCTURES, Accumulator, Structure, structure_class, structure_reference

# In order of registration, from few parameters to many: `fit` tries them in this order, and of equally good ones
# takes the first.
# isort: off
from weightscope.structures.isotropic import Isotropic
from weightscope.structures.group_means import GroupMeans
from weightscope.structures.diagonal import Diagonal
from weightscope.structures.kronecker import Kronecker
from weightscope.structures.tensor_normal import TensorNormal
from weightscope.structures.low_rank import LowRank
from weightscope.structures.dense import Dense
from weightscope.structures.exchangeable import Exchangeable
# isort: on

__all__ = [
    "STRUCTURES",
    "Accumulator",
    "Dense",
    "Diagonal",
    "Exchangeable",
    "GroupMeans",
    "Isotropic",
    "Kronecker",
    "LowRank",
    "Structure",
    "TensorNormal",
    "structure_class",
    "structure_reference",
]
