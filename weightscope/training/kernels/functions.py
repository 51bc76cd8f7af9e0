"""What a training step spends its time on, as kernels of our own: convolutions, norms, and LayerNorm with the MLP.

One pass over memory takes the place of the dozen that separate operations make: of a block's MLP only the input is kept
for the backward pass, and all that lies between is computed again. Two sets of kernels stand behind the functions here,
which are differentiable once:

- "c" (`on_cpu.py`, `kernels.c`) on a CPU; activations and weights are of one type, float32 or float64.
- "triton" (`on_gpu/`) on a GPU; activations bfloat16 or float32, weights and their gradients float32.
"""

import importlib
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weightscope.errors import UsageError

Pair = tuple[Tensor, Tensor]  # weight and bias
Kernels = Literal["c", "triton"]


def backend(kernels: Kernels) -> ModuleType:
    """The module of one set of kernels.

    Raises:
        UsageError: if Triton is wanted and not installed.
    """
    if kernels == "c":
        return importlib.import_module("weightscope.training.kernels.c")
    try:
        return importlib.import_module("weightscope.training.kernels.triton")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"kernels = 'compiled' need Triton on a GPU, and {error}; install it (torch for CUDA on Linux brings it "
            "along) or use kernels = 'torch'"
        ) from error


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, *, dilation: int = 1, kernels: Kernels = "c") -> Tensor:
    """What `weightscope.training.kernels.pytorch.depthwise_conv2d` calls: x (C, H, W, B), weight (C, k, k), bias (C,).

    Raises:
        ValueError: if a kernel is not square and odd, shapes do not fit, or types differ.
        UsageError: if there is no C compiler, or no Triton.
    """
    _check_filters(x, weight, bias)
    return _DepthwiseConv2d.apply(backend(kernels), x, weight, bias, dilation)


def norm_mlp(x: Tensor, norm: Pair, first: Pair, second: Pair, eps: float, *, kernels: Kernels = "c") -> Tensor:
    """`W2 gelu(W1 norm(x) + b1) + b2` of T networks, norm being LayerNorm over the channels.

    Args:
        x: (T, c, P), P positions.
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.
        kernels: "c" or "triton".

    Returns:
        (T, c, P).

    Raises:
        ValueError: if shapes do not fit, or types differ.
        UsageError: if there is no C compiler, or no Triton.
    """
    _check_mlp((x.shape[0], x.shape[1]), norm, first, second, eps)
    return _NormMlp.apply(backend(kernels), x, *norm, *first, *second, eps)


def convnext_block(
    x: Tensor, filters: Pair, norm: Pair, first: Pair, second: Pair, eps: float, *, kernels: Kernels = "c"
) -> Tensor:
    """`x + W2 gelu(W1 norm(conv(x)) + b1) + b2`, the block of T ConvNeXts without their layer scale.

    Args:
        x: (T c, H, W, B).
        filters: weight (T c, k, k) and bias (T c,).
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.
        kernels: "c" or "triton".

    Raises:
        ValueError: if a kernel is not square and odd, shapes do not fit, or types differ.
        UsageError: if there is no C compiler, or no Triton.
    """
    networks = len(norm[0])
    _check_filters(x, *filters)
    _check_mlp((networks, len(x) // networks), norm, first, second, eps)
    return _ConvNeXtBlock.apply(backend(kernels), x, *filters, *norm, *first, *second, eps)


def layer_norm(x: Tensor, norm: Pair, eps: float) -> Tensor:
    """LayerNorm of x (T, c, P) over the channels, gain and shift (T, c) each; by Triton."""
    return _LayerNorm.apply(backend("triton"), x, *norm, eps)


def gelu_batch_norm(x: Tensor, norm: Pair, eps: float, more: Tensor | None = None) -> Tensor:
    """`more + batch_norm(gelu(x))`, the norm over the positions of x (T, c, P) with its own statistics; by Triton.

    Args:
        x: (T, c, P).
        norm: gain and shift, (T, c) each.
        eps: added to the variance.
        more: (T, c, P), the residual.
    """
    return _GeluBatchNorm.apply(backend("triton"), x, *norm, eps, more)


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
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.kernels, ctx.dilation = kernels, dilation
        return kernels.convolve(x, weight, bias.contiguous(), dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.kernels.convolve_backward(*ctx.saved_tensors, grad.contiguous(), ctx.dilation), None


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, *rest: Any) -> Tensor:
        x, *weights = (value.contiguous() for value in (x, *rest[:-1]))
        ctx.save_for_backward(x, *weights)
        ctx.kernels, ctx.eps = kernels, rest[-1]
        return kernels.mlp(x, weights, ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return None, *ctx.kernels.mlp_backward(x, weights, grad.contiguous(), ctx.eps), None


class _ConvNeXtBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        x, weight, *weights = (value.contiguous() for value in (x, weight, *rest[:-1]))
        networks = len(weights[0])
        inner = kernels.convolve(x, weight, bias.contiguous(), 1).view(networks, len(x) // networks, -1)
        ctx.save_for_backward(x, weight, inner, *weights)
        ctx.kernels, ctx.eps = kernels, rest[-1]
        return kernels.mlp(inner, weights, ctx.eps, x.view_as(inner)).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        middle, *of_mlp = ctx.kernels.mlp_backward(inner, weights, grad.view_as(inner), ctx.eps)
        return None, *ctx.kernels.convolve_backward(x, weight, middle.view_as(x), 1, grad), *of_mlp, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        x, gain, shift = (value.contiguous() for value in (x, gain, shift))
        ctx.save_for_backward(x, gain)
        ctx.kernels, ctx.eps = kernels, eps
        return kernels.norm(x, gain, shift, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.kernels.norm_backward(*ctx.saved_tensors, grad.contiguous(), ctx.eps), None


class _GeluBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, x: Tensor, gain: Tensor, shift: Tensor, eps: float, more: Tensor | None
    ) -> Tensor:
        x, gain, shift = (value.contiguous() for value in (x, gain, shift))
        y, *moments = kernels.gelu_norm(x, gain, shift, eps, None if more is None else more.contiguous())
        ctx.save_for_backward(x, gain, *moments)
        ctx.kernels, ctx.more = kernels, more is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        found = ctx.kernels.gelu_norm_backward(*ctx.saved_tensors, grad)
        return None, *found, None, grad if ctx.more else None
