"""Shared by the initialisers: random numbers drawn on the CPU, and writing weights in place."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from weightscope._util.names import matching
from weightscope.anatomy.matrices import fans, matrices
from weightscope.errors import DataError, UsageError

M = TypeVar("M", bound=nn.Module)


class Initialiser(Protocol):
    """A function that sets weights of a module in place and returns the module."""

    def __call__(self, module: nn.Module, *, generator: torch.Generator | None = None) -> nn.Module: ...


def cpu_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator, checked to be a CPU generator.

    Numbers are drawn on the CPU and copied, so that a seed gives the same weights on any device.

    Raises:
        UsageError: for a generator of another device, or another object.
    """
    if generator is None:
        return None
    if not isinstance(generator, torch.Generator):
        raise UsageError(f"generator: expected a torch.Generator or None, found {type(generator).__name__}")
    if generator.device.type != "cpu":
        raise UsageError(f"generator: expected a CPU generator (torch.Generator()), found one on {generator.device}")
    return generator


def normal(*shape: int, generator: torch.Generator | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers on the CPU."""
    return torch.randn(*shape, generator=cpu_generator(generator), dtype=dtype)


def uniform(*shape: int, bound: float, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in [-bound, bound) on the CPU, float32."""
    return torch.rand(*shape, generator=cpu_generator(generator)).mul_(2 * bound).sub_(bound)


def frame(*shape: int, generator: torch.Generator | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal columns, uniform (Haar) among all such frames, (..., rows, columns) with columns <= rows.

    QR of a Gaussian matrix, with the signs that make it unique (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(normal(*shape, generator=generator, dtype=dtype))
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(dtype)
    return q * signs.unsqueeze(-2)


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a parameter in place, cast to its data type and device.

    Raises:
        DataError: if the parameter is on the meta device, where copying would do nothing.
    """
    if tensor.is_meta:
        raise DataError("the module is on the meta device and has no values; materialise it first")
    tensor.copy_(value.to(device=tensor.device, dtype=tensor.dtype))


def each_matrix(
    module: M, select: str, fill: Callable[[Tensor], Tensor], bias: Callable[[Tensor, int], Tensor | None]
) -> M:
    """Fill every selected weight, matrix by matrix, and its bias.

    Args:
        module: changed in place.
        select: shell patterns of weight names, comma-separated.
        fill: a matrix (out, in, ...) -> its new values.
        bias: (old bias, fan in) -> its new values, or None to keep it.

    Raises:
        AnatomyError: if the module has no linear or convolutional layer.
        UsageError: if a pattern matches none of their weights.
    """
    found = matrices(module)
    wanted = set(matching(select, (matrix.name for matrix in found)))
    for matrix in found:
        if matrix.name not in wanted:
            continue
        blocks = matrix.split(matrix.weight)
        for block in blocks:
            put(block, fill(block))
        if matrix.bias is not None and (new := bias(matrix.bias, fans(blocks[0])[0])) is not None:
            put(matrix.bias.detach(), new)
    return module
