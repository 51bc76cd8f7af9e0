"""Blocks of a depthwise convolution and the MLP behind it, as in ConvNeXts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from weightscope.anatomy import convolution, mlp
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.tensors import NamedTensors
from weightscope.errors import UsageError


@dataclass(frozen=True, eq=False)
class FilterMLP:
    """One depthwise convolution with filters of odd side, and the plain MLP of its block, from C channels to C.

    Attributes:
        layer: number of the block, from 0.
        filters: the convolution.
        mlp: the MLP.
    """

    layer: int
    filters: DepthwisePart
    mlp: MLPPart

    @property
    def name(self) -> str:
        """The path of the convolution."""
        return self.filters.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the tensors that `write_centres` touches."""
        return self.filters.parameters

    def diagonal(self) -> Tensor:
        """diag(W2 W1), (C,), float64: what the MLP, without its activation, does to each channel itself."""
        return torch.einsum("cp,pc->c", self.mlp.read("fc2").double(), self.mlp.read("fc1").double())

    def centres(self) -> Tensor:
        """A copy of the central pixels of the filters, (C,), float32 or better."""
        return self.filters.read()[self._centre()]

    def write_centres(self, value: Tensor) -> None:
        """Write the central pixels (C,) in place; the exact inverse of `centres`."""
        filters = self.filters.read()
        filters[self._centre()] = value.to(filters)
        self.filters.write(filters)

    def _centre(self) -> tuple[slice, int, int]:
        height, width = self.filters.kernel
        if height % 2 == 0 or width % 2 == 0:
            raise UsageError(f"`{self.name}`: expected filters of odd side, found {height} x {width}")
        return slice(None), height // 2, width // 2


def find(tensors: NamedTensors) -> list[FilterMLP]:
    """All such blocks, in depth order; a convolution belongs to the one MLP in its own block, by their paths."""
    plain = [part for part in mlp.find(tensors) if part.kind == "plain"]
    out: list[FilterMLP] = []
    for filters in convolution.find(tensors):
        inside = [part for part in plain if _one_block(filters.name, part.name)]
        if len(inside) == 1 and filters.channels == inside[0].width == inside[0].shape("fc2")[0]:
            out.append(FilterMLP(len(out), filters, inside[0]))
    return out


def _one_block(filters: str, other: str) -> bool:
    block = filters.rpartition(".")[0]
    return block == other or other.startswith(f"{block}." if block else "") or block.startswith(f"{other}.")
