"""What a training step on a CPU spends its time on, in C: depthwise convolutions, and LayerNorm with the MLP after it.

One pass over memory takes the place of the dozen that separate operations make: of a block's MLP only the input is kept
for the backward pass, and all that lies between is computed again in the cache. The functions take float32 and float64,
one type at a time, and are differentiable once. `kernels.c` is compiled by `building.py` when it is first needed.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weightscope.train.building import library

Pair = tuple[Tensor, Tensor]  # weight and bias


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, *, dilation: int = 1) -> Tensor:
    """As `weightscope.train.depthwise.depthwise_conv2d`: x (C, H, W, B), weight (C, k, k), bias (C,).

    Raises:
        ValueError: if a kernel is not square and odd, shapes do not fit, or types differ.
        UsageError: if there is no C compiler.
    """
    _check_filters(x, weight, bias)
    return _DepthwiseConv2d.apply(x, weight, bias, dilation)


def norm_mlp(x: Tensor, norm: Pair, first: Pair, second: Pair, eps: float) -> Tensor:
    """`W2 gelu(W1 norm(x) + b1) + b2` of T networks, norm being LayerNorm over the channels.

    Args:
        x: (T, c, P), P positions.
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.

    Returns:
        (T, c, P).

    Raises:
        ValueError: if shapes do not fit, or types differ.
        UsageError: if there is no C compiler.
    """
    _check_mlp((x.shape[0], x.shape[1]), norm, first, second, eps)
    return _NormMlp.apply(x, *norm, *first, *second, eps)


def convnext_block(x: Tensor, filters: Pair, norm: Pair, first: Pair, second: Pair, eps: float) -> Tensor:
    """`x + W2 gelu(W1 norm(conv(x)) + b1) + b2`, the block of T ConvNeXts without their layer scale.

    Args:
        x: (T c, H, W, B).
        filters: weight (T c, k, k) and bias (T c,).
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.

    Raises:
        ValueError: if a kernel is not square and odd, shapes do not fit, or types differ.
        UsageError: if there is no C compiler.
    """
    networks = len(norm[0])
    _check_filters(x, *filters)
    _check_mlp((networks, len(x) // networks), norm, first, second, eps)
    return _ConvNeXtBlock.apply(x, *filters, *norm, *first, *second, eps)


def _check_filters(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    channels, k = x.shape[0], weight.shape[-1]
    if x.ndim != 4 or weight.shape != (channels, k, k) or k % 2 == 0 or bias.shape != (channels,):
        raise ValueError(
            f"expected images (C, H, W, B), odd square kernels (C, k, k) and biases (C,), found {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        )


def _check_mlp(sizes: tuple[int, int], norm: Pair, first: Pair, second: Pair, eps: float) -> None:
    (t, c), m = sizes, first[0].shape[1]
    expected = [(t, c), (t, c), (t, m, c), (t, m), (t, c, m), (t, c)]
    found = [tuple(value.shape) for value in (*norm, *first, *second)]
    if expected != found or not eps > 0:
        raise ValueError(f"expected weights of shapes {expected} and a positive eps, found {found} and {eps}")


class _DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.dilation = dilation
        return _convolve(x, weight, bias, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_convolve_backward(*ctx.saved_tensors, grad.contiguous(), ctx.dilation), None


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        x, *weights = (value.contiguous() for value in (x, *rest[:-1]))
        ctx.save_for_backward(x, *weights)
        ctx.eps = rest[-1]
        return _mlp(x, weights, ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return *_mlp_backward(x, weights, grad.contiguous(), ctx.eps), None


class _ConvNeXtBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        x, weight, *weights = (value.contiguous() for value in (x, weight, *rest[:-1]))
        networks = len(weights[0])
        inner = _convolve(x, weight, bias, 1).view(networks, len(x) // networks, -1)
        ctx.save_for_backward(x, weight, inner, *weights)
        ctx.eps = rest[-1]
        return _mlp(inner, weights, ctx.eps, x.view_as(inner)).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        middle, *of_mlp = _mlp_backward(inner, weights, grad.view_as(inner), ctx.eps)
        return *_convolve_backward(x, weight, middle.view_as(x), 1, grad), *of_mlp, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    y = torch.empty_like(x)
    _call("depthwise_forward", (x, weight, bias.contiguous(), y), (*x.shape, weight.shape[-1], dilation))
    return y


def _convolve_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilation: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of input, filters and bias; `more` is added to the first."""
    found = torch.empty_like(x), torch.empty_like(weight), x.new_empty(len(x))
    _call("depthwise_backward", (x, weight, grad, more, *found), (*x.shape, weight.shape[-1], dilation))
    return found


def _mlp(x: Tensor, weights: list[Tensor], eps: float, more: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x)
    _call("mlp_forward", (x, *weights, more, y), (*_sizes(x, weights), float(eps)))
    return y


def _mlp_backward(x: Tensor, weights: list[Tensor], grad: Tensor, eps: float) -> list[Tensor]:
    """Derivatives of the input and of the six weights."""
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
        raise MemoryError(f"{name}: no memory for the workspace")
