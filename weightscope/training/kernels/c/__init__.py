"""Kernels for a CPU: calls into `kernels.c`, which `build.py` compiles on first use.

They take contiguous tensors of one type, float32 or float64; `functions.py` makes them differentiable.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from weightscope.training.kernels.c.build import library


def convolve(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """The depthwise convolution of x (C, H, W, B) with weight (C, k, k) and bias (C,)."""
    y = torch.empty_like(x)
    _call("depthwise_forward", (x, weight, bias, y), (*x.shape, weight.shape[-1], dilation))
    return y


def convolve_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilation: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, filters and bias; `more` is added to the first."""
    found = torch.empty_like(x), torch.empty_like(weight), x.new_empty(len(x))
    _call("depthwise_backward", (x, weight, grad, more, *found), (*x.shape, weight.shape[-1], dilation))
    return found


def mlp(x: Tensor, weights: list[Tensor], eps: float, more: Tensor | None = None) -> Tensor:
    """`more + fc2(gelu(fc1(norm(x))))` of x (T, c, P); `weights` are weight and bias of norm, fc1 and fc2."""
    y = torch.empty_like(x)
    _call("mlp_forward", (x, *weights, more, y), (*_sizes(x, weights), float(eps)))
    return y


def mlp_backward(x: Tensor, weights: list[Tensor], grad: Tensor, eps: float) -> list[Tensor]:
    """Gradients of the input and of the six weights."""
    found = [torch.empty_like(value) for value in (x, *weights)]
    _call("mlp_backward", (x, *weights[:-1], grad, *found), (*_sizes(x, weights), float(eps)))
    return found


def _sizes(x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """T, c, m, P."""
    return x.shape[0], x.shape[1], weights[2].shape[1], x.shape[2]


def _call(name: str, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
    given = [tensor for tensor in tensors if tensor is not None]
    kinds = {(str(tensor.dtype), tensor.device.type, tensor.is_contiguous()) for tensor in given}
    if kinds not in ({("torch.float32", "cpu", True)}, {("torch.float64", "cpu", True)}):
        raise ValueError(
            f"{name}: expected contiguous tensors of one type, float32 or float64, on the CPU, found {kinds}"
        )
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    values = [ctypes.c_double(n) if isinstance(n, float) else ctypes.c_long(n) for n in numbers]
    if getattr(library("float" if given[0].dtype == torch.float32 else "double"), name)(*pointers, *values):
        raise MemoryError(f"{name}: cannot allocate the workspace")
