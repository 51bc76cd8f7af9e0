"""Reading and writing rows of tensors, cast to and from the data types in which they are stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from weightscope.anatomy.tensors import NamedTensors
from weightscope.errors import DataError, SpecError


def exact_float(tensor: Tensor) -> Tensor:
    """A copy in float32, or in the tensor's own data type if that is wider."""
    wide = tensor.is_floating_point() and tensor.element_size() >= 4
    return tensor.to(tensor.dtype if wide else torch.float32, copy=True)


Rows = slice | Tensor | None
"""Rows of a matrix: a slice, an index tensor, or None for all."""


@dataclass(frozen=True)
class Slot:
    """Rows of a matrix in a tensor.

    Attributes:
        name: of the tensor.
        rows: of the (out, in) matrix.
        transposed: whether the tensor stores (in, out), as transformers' Conv1D does.
        vector: whether the tensor is a vector (a bias), read as it is.
    """

    name: str
    rows: Rows = None
    transposed: bool = False
    vector: bool = False

    def size(self, tensors: NamedTensors) -> tuple[int, int]:
        """(rows, columns) of the (out, in) matrix, without reading it."""
        shape = tensors.shape(self.name)
        rows, columns = (shape[1], shape[0]) if self.transposed else shape[:2]
        if self.rows is None:
            return rows, columns
        return len(range(rows)[self.rows]) if isinstance(self.rows, slice) else len(self.rows), columns

    def _view(self, tensors: NamedTensors) -> Tensor:
        tensor = tensors.get(self.name)
        if self.vector:
            return tensor
        return tensor.T if self.transposed else tensor.flatten(1)

    def read(self, tensors: NamedTensors) -> Tensor:
        """A copy of the rows, (rows, columns) or (rows,), float32 or better."""
        view = self._view(tensors)
        return exact_float(view if self.rows is None else view[self.rows])

    @torch.no_grad()
    def write(self, tensors: NamedTensors, value: Tensor) -> None:
        """Write rows in place, cast to the tensor's data type and device.

        Raises:
            SpecError: if the shape differs from that of `read`.
            DataError: if the model cannot be written, or a finite number overflows in the tensor's data type.
        """
        tensors.writable(self.name)
        view = self._view(tensors)
        rows = slice(None) if self.rows is None else self.rows
        expected = tuple(view[rows].shape)
        if tuple(value.shape) != expected:
            raise SpecError(f"`{self.name}`: expected values of shape {expected}, found {tuple(value.shape)}")
        view[rows] = _cast(self.name, value, view)


class InSlots:
    """A part whose matrices and biases are slots, by name: "q" or "fc1"."""

    _weights: dict[str, Slot]
    _biases: dict[str, Slot]

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The names of the tensors that each matrix reads and writes: matrix -> names."""
        return {part: (slot.name,) for part, slot in self._weights.items()}

    @property
    def bias_parameters(self) -> dict[str, tuple[str, ...]]:
        """The names of the bias tensors, for the matrices that have one."""
        return {part: (slot.name,) for part, slot in self._biases.items()}


@torch.no_grad()
def put(tensors: NamedTensors, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Write a whole tensor in place, given in the shape that its view has.

    Raises:
        SpecError: if the value's shape is not `shape`.
        DataError: if the model cannot be written, or a finite number overflows in the tensor's data type.
    """
    if tuple(value.shape) != tuple(shape):
        raise SpecError(f"`{name}`: expected values of shape {tuple(shape)}, found {tuple(value.shape)}")
    tensors.writable(name)
    target = tensors.get(name)
    target.copy_(_cast(name, value, target).reshape(target.shape))


def _cast(name: str, value: Tensor, target: Tensor) -> Tensor:
    cast = value.detach().to(device=target.device, dtype=target.dtype)
    if cast.dtype != value.dtype and bool((cast.isinf() & value.to(cast.device).isfinite()).any()):
        raise DataError(f"`{name}`: the values overflow in {target.dtype}; use a wider type or a smaller scale")
    return cast
