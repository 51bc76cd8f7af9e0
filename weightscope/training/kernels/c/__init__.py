"""Kernels for a CPU: calls into the C sources of this folder, which `build.py` compiles on first use.

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


def blocks(x: Tensor, weights: list[Tensor], eps: float, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Several `x + mlp(conv(x))` of x (T c, H, W, B), and what the backward pass needs if `keep`.

    `weights` are weight and bias of the convolution, the norm, fc1 and fc2 of each block.
    """
    sizes = _block_sizes(x, weights)
    kept = x.new_empty(2 * sizes[0] * x.numel()) if keep else None
    y = torch.empty_like(x)
    _call("blocks_forward", (x, weights, kept, y), (*sizes, float(eps)))
    return y, kept


def blocks_backward(grad: Tensor, weights: list[Tensor], kept: Tensor, eps: float) -> list[Tensor]:
    """Gradients of the input and of all weights."""
    found, of_weights = torch.empty_like(grad), [torch.empty_like(weight) for weight in weights]
    _call("blocks_backward", (grad, weights, kept, found, of_weights), (*_block_sizes(grad, weights), float(eps)))
    return [found, *of_weights]


def mixing(x: Tensor, weights: list[Tensor], dilation: int, eps: float) -> tuple[Tensor, ...]:
    """`x + norm(gelu(conv(x)))` of x (C, H, W, B), normalised over H, W and B; then conv(x), and mean and factor (C,).

    `weights` are weight and bias of the convolution and gain and shift of the norm, (C,) each.
    """
    inner, y = torch.empty_like(x), torch.empty_like(x)
    mean, factor = x.new_empty(len(x)), x.new_empty(len(x))
    sizes = *x.shape, weights[0].shape[-1], dilation
    _call("mixing_forward", (x, *weights, inner, y, mean, factor), (*sizes, float(eps)))
    return y, inner, mean, factor


def mixing_backward(
    x: Tensor, weight: Tensor, inner: Tensor, gain: Tensor, moments: tuple[Tensor, Tensor], grad: Tensor, dilation: int
) -> list[Tensor]:
    """Gradients of the input, of filters and their biases, of gain and shift."""
    found = [torch.empty_like(x), torch.empty_like(weight), *(torch.empty_like(gain) for _ in range(3))]
    _call("mixing_backward", (x, weight, inner, gain, *moments, grad, *found), (*x.shape, weight.shape[-1], dilation))
    return found


def norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm of x (T, c, P) over c."""
    y = torch.empty_like(x)
    _call("norm_forward", (x, gain, shift, y), (*x.shape, float(eps)))
    return y


def norm_backward(x: Tensor, gain: Tensor, grad: Tensor, eps: float) -> list[Tensor]:
    """Gradients of input, gain and shift."""
    found = [torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)]
    _call("norm_backward", (x, gain, grad, *found), (*x.shape, float(eps)))
    return found


def gelu_norm(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """GELU, then normalisation over P, of x (T, c, P), plus `more`; and mean and factor, (T, c) each."""
    y, mean, factor = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
    _call("gelu_norm_forward", (x, gain, shift, more, y, mean, factor), (gain.numel(), x.shape[2], float(eps)))
    return y, mean, factor


def gelu_norm_backward(x: Tensor, gain: Tensor, mean: Tensor, factor: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of input, gain and shift."""
    found = [torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)]
    _call("gelu_norm_backward", (x, gain, mean, factor, grad, *found), (gain.numel(), x.shape[2]))
    return found


def attention(qkv: Tensor) -> Tensor:
    """Softmax attention of queries, keys and values (T, 3, H, k, N, B): (T, H, k, N, B)."""
    t, _, h, k, n, b = qkv.shape
    y = qkv.new_empty(t, h, k, n, b)
    _call("attention_forward", (qkv, y), (t, h, k, n, b))
    return y


def attention_backward(qkv: Tensor, grad: Tensor) -> Tensor:
    """The gradient of queries, keys and values."""
    found = torch.empty_like(qkv)
    t, _, h, k, n, b = qkv.shape
    _call("attention_backward", (qkv, grad, found), (t, h, k, n, b))
    return found


def adamw(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    trained: Tensor,
    rates: tuple[Tensor, Tensor],
    clip: Tensor,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of `BatchedAdamW` in place; the arguments are those of `kernels.triton.adamw`."""
    tensors = (weights, gradient, *moments, trained.to(weights.dtype), *rates, clip, scalars)
    _call("adamw_step", tensors, (*weights.shape, *map(float, betas), float(eps)))


def _block_sizes(x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """Blocks, T, c, m, H, W, B, k."""
    networks, m, c = weights[4].shape
    return len(weights) // 8, networks, c, m, *x.shape[1:], weights[0].shape[-1]


def _sizes(x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """T, c, m, P."""
    return x.shape[0], x.shape[1], weights[2].shape[1], x.shape[2]


def _call(name: str, tensors: tuple[Tensor | list[Tensor] | None, ...], numbers: tuple[Any, ...]) -> None:
    """Call a function of the library with tensors, lists of tensors (as arrays of pointers), and numbers."""
    lists = (item if isinstance(item, list) else [item] for item in tensors)
    given = [tensor for several in lists for tensor in several if tensor is not None]
    kinds = {(str(tensor.dtype), tensor.device.type, tensor.is_contiguous()) for tensor in given}
    if kinds not in ({("torch.float32", "cpu", True)}, {("torch.float64", "cpu", True)}):
        raise ValueError(
            f"{name}: expected contiguous tensors of one type, float32 or float64, on the CPU, found {kinds}"
        )
    pointers = [_pointers(item) if isinstance(item, list) else _pointer(item) for item in tensors]
    values = [ctypes.c_double(n) if isinstance(n, float) else ctypes.c_long(n) for n in numbers]
    if getattr(library("float" if given[0].dtype == torch.float32 else "double"), name)(*pointers, *values):
        raise MemoryError(f"{name}: cannot allocate the workspace")


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _pointers(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
