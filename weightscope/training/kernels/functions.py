"""Differentiable functions of the training step, and the choice of the backend that computes them.

Each function makes one pass over memory where separate operations make a dozen: of a block's MLP only the input is kept
for the backward pass, and everything else is recomputed. Backends:

- "torch" (`pytorch.py`): any device and type; torch's operations, with which the others are compared.
- "c" (`c/`): CPU; activations and weights of one type, float32 or float64.
- "triton" (`triton/`): GPU; activations bfloat16 or float32, weights and their gradients float32.

Compiled functions are differentiable once. All raise ValueError if shapes or types do not match, and UsageError if the
backend is not available (no C compiler, no Triton).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weightscope.errors import UsageError
from weightscope.training.kernels import c, pytorch

Pair = tuple[Tensor, Tensor]  # weight and bias
Kernels = Literal["torch", "c", "triton"]


def backend(kernels: Kernels) -> ModuleType:
    """The module that implements "c" or "triton".

    Raises:
        UsageError: if Triton is not installed.
    """
    if kernels == "c":
        return c
    if kernels == "torch":
        raise ValueError("expected kernels 'c' or 'triton', found 'torch', which has no compiled functions")
    try:
        import weightscope.training.kernels.triton as triton  # only here: most machines have no Triton
    except ModuleNotFoundError as error:
        raise UsageError(
            f"kernels = 'compiled' need Triton on a GPU: {error}; `pip install triton` (part of torch for CUDA on "
            "Linux), or use kernels = 'torch'"
        ) from error
    return triton


Call = tuple[str, Any, dict[str, Any]]  # name, positional and keyword arguments without `kernels`
_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls of this module's functions within the block, which torch computes whatever `kernels` they name.

    In the arguments, {"shape": [...]} takes the place of tensors and lists that of tuples.
    """
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def _shapes(args: Any) -> Any:
    if isinstance(args, Tensor):
        return {"shape": list(args.shape)}
    return [_shapes(item) for item in args] if isinstance(args, tuple) else args


def _recordable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def call(*args: Any, kernels: Kernels = "torch", **options: Any) -> Tensor:
        calls = _recorded.get()
        if calls is not None and kernels != "torch":
            calls.append((function.__name__, _shapes(args), options))
            kernels = "torch"
        return function(*args, kernels=kernels, **options)

    return call


@_recordable
def depthwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dilation: int = 1, kernels: Kernels = "torch"
) -> Tensor:
    """Stride-1 depthwise convolution with zero padding that keeps the size.

    Equal to `F.conv2d(x, weight, bias, padding=dilation * (k - 1) // 2, dilation=dilation, groups=C)`.

    Args:
        x: (C, H, W, B), contiguous for speed; C counts the channels of all networks.
        weight: (C, k, k), k odd.
        bias: (C,) or None.
        dilation: the distance between taps, in pixels.
        kernels: the backend.

    Returns:
        (C, H, W, B).
    """
    _check_filters(x, weight, bias)
    if kernels == "torch":
        y = pytorch.depthwise_conv2d(x, weight, dilation=dilation)
        return y if bias is None else y + bias[:, None, None, None]
    if bias is None:
        bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    return _DepthwiseConv2d.apply(backend(kernels), x, weight, bias, dilation)


@_recordable
def norm_mlp(x: Tensor, norm: Pair, fc1: Pair, fc2: Pair, eps: float, *, kernels: Kernels) -> Tensor:
    """`fc2(gelu(fc1(norm(x))))` of T networks, where norm is LayerNorm over the channels.

    Args:
        x: (T, c, P), P positions.
        norm: gain and shift, (T, c) each.
        fc1: weight (T, m, c) and bias (T, m).
        fc2: weight (T, c, m) and bias (T, c).
        eps: added to the variance.
        kernels: the backend.

    Returns:
        (T, c, P).
    """
    _check_mlp((x.shape[0], x.shape[1]), norm, fc1, fc2, eps)
    _check_norm(x, norm)
    if kernels == "torch":
        return pytorch.norm_mlp(x, norm, fc1, fc2, eps)
    return _NormMlp.apply(backend(kernels), x, *norm, *fc1, *fc2, eps)


Block = tuple[Pair, Pair, Pair, Pair]  # of the convolution, the norm, fc1 and fc2


@_recordable
def convnext_blocks(x: Tensor, blocks: tuple[Block, ...], eps: float, *, kernels: Kernels) -> Tensor:
    """`x + fc2(gelu(fc1(norm(conv(x)))))`, the block of T ConvNeXts without layer scale, several times.

    Args:
        x: (T c, H, W, B).
        blocks: of each block the convolution's weight (T c, k, k) and bias (T c,), the norm's gain and shift, (T, c)
            each, fc1's weight (T, m, c) and bias (T, m), and fc2's weight (T, c, m) and bias (T, c).
        eps: added to the variance.
        kernels: the backend.

    Returns:
        (T c, H, W, B).
    """
    for filters, norm, fc1, fc2 in blocks:
        _check_filters(x, *filters)
        _check_mlp((len(norm[0]), fc1[0].shape[-1]), norm, fc1, fc2, eps)
        if norm[0].numel() != len(x):
            raise ValueError(f"expected as many channels as norms have entries, found {len(x)} and {norm[0].numel()}")
    if kernels == "c":
        if len({(block[0][0].shape, block[2][0].shape) for block in blocks}) != 1:
            raise ValueError("expected blocks of equal sizes")
        weights = [weight for block in blocks for pair in block for weight in pair]
        return _ConvNeXtBlocks.apply(backend(kernels), x, eps, torch.is_grad_enabled(), *weights)
    for filters, norm, fc1, fc2 in blocks:
        if kernels == "torch":
            inner = depthwise_conv2d(x, *filters).view(len(norm[0]), len(x) // len(norm[0]), -1)
            x = x + pytorch.norm_mlp(inner, norm, fc1, fc2, eps).view_as(x)
        else:
            x = _ConvNeXtBlock.apply(backend(kernels), x, *filters, *norm, *fc1, *fc2, eps)
    return x


@_recordable
def convmixer_mixing(
    x: Tensor, filters: Pair, norm: Pair, eps: float, *, dilation: int = 1, kernels: Kernels = "torch"
) -> Tensor:
    """`x + batch_norm(gelu(conv(x)))`, the spatial mixing of ConvMixers, with the statistics of the batch.

    Args:
        x: (C, H, W, B); C counts the channels of all networks.
        filters: weight (C, k, k) and bias (C,).
        norm: gain and shift, (C,) each.
        eps: added to the variance.
        dilation: the distance between taps, in pixels.
        kernels: the backend, "torch" or "c".

    Returns:
        (C, H, W, B).
    """
    _check_filters(x, *filters)
    _check_norm(x.flatten(1)[None], (norm[0][None], norm[1][None]))
    if kernels == "torch":
        inner = depthwise_conv2d(x, *filters, dilation=dilation).reshape(1, len(x), -1)
        return gelu_batch_norm(
            inner, (norm[0][None], norm[1][None]), eps, x.reshape(inner.shape), kernels="torch"
        ).view_as(x)
    return _ConvMixerMixing.apply(backend(kernels), x, *filters, *norm, dilation, eps)


@_recordable
def layer_norm(x: Tensor, norm: Pair, eps: float, *, kernels: Kernels) -> Tensor:
    """LayerNorm of x (T, c, P) over the channels, gain and shift (T, c) each."""
    _check_norm(x, norm)
    if kernels == "torch":
        return pytorch.normalise(x, norm, 1, eps)
    return _LayerNorm.apply(backend(kernels), x, *norm, eps)


@_recordable
def gelu_batch_norm(x: Tensor, norm: Pair, eps: float, more: Tensor | None = None, *, kernels: Kernels) -> Tensor:
    """`more + batch_norm(gelu(x))` with the statistics of x (T, c, P) over its positions.

    Args:
        x: (T, c, P).
        norm: gain and shift, (T, c) each.
        eps: added to the variance.
        more: (T, c, P), the residual.
        kernels: the backend.
    """
    _check_norm(x, norm, more)
    if kernels == "torch":
        y = pytorch.normalise(F.gelu(x), norm, 2, eps)
        return y if more is None else y + more
    return _GeluBatchNorm.apply(backend(kernels), x, *norm, eps, more)


@_recordable
def attention(qkv: Tensor, *, kernels: Kernels) -> Tensor:
    """`softmax(q^T k / sqrt(d)) v` of each head and image; torch's and C only.

    Args:
        qkv: queries, keys and values (T, 3, H, d, N, B), d the width of a head, N tokens.
        kernels: the backend.

    Returns:
        (T, H, d, N, B).
    """
    if qkv.ndim != 6 or qkv.shape[1] != 3:
        raise ValueError(f"expected queries, keys and values (T, 3, H, d, N, B), found {tuple(qkv.shape)}")
    if kernels == "torch":
        q, k, v = qkv.permute(1, 0, 2, 5, 4, 3).unbind(0)  # each (T, H, B, N, d)
        return F.scaled_dot_product_attention(q, k, v).permute(0, 1, 4, 3, 2)
    return _Attention.apply(backend(kernels), qkv)


def _check_filters(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    channels, k = x.shape[0], weight.shape[-1]
    sound = x.ndim == 4 and weight.shape == (channels, k, k) and k % 2 == 1
    if not sound or (bias is not None and bias.shape != (channels,)):
        raise ValueError(
            f"expected images (C, H, W, B), odd square kernels (C, k, k) and biases (C,), found {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )


def _check_norm(x: Tensor, norm: Pair, more: Tensor | None = None) -> None:
    found = [tuple(value.shape) for value in (x, *norm, *([] if more is None else [more]))]
    if x.ndim != 3 or found != [found[0], found[0][:2], found[0][:2], found[0]][: len(found)]:
        raise ValueError(f"expected x (T, c, P), gain and shift (T, c) and a residual (T, c, P), found {found}")


def _check_mlp(sizes: tuple[int, int], norm: Pair, fc1: Pair, fc2: Pair, eps: float) -> None:
    (t, c), m = sizes, fc1[0].shape[1]
    expected = [(t, c), (t, c), (t, m, c), (t, m), (t, c, m), (t, c)]
    found = [tuple(value.shape) for value in (*norm, *fc1, *fc2)]
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


class _ConvNeXtBlocks(torch.autograd.Function):
    """All blocks of equal sizes, for kernels that take several at once (C)."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, eps: float, keep: bool, *rest: Tensor) -> Tensor:
        x, *weights = (value.contiguous() for value in (x, *rest))
        y, kept = kernels.blocks(x, weights, eps, keep=keep)
        ctx.save_for_backward(kept, *weights)
        ctx.kernels, ctx.eps = kernels, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors
        grad_x, *of_weights = ctx.kernels.blocks_backward(grad.contiguous(), weights, kept, ctx.eps)
        return None, grad_x, None, None, *of_weights


class _ConvNeXtBlock(torch.autograd.Function):
    """One block, for kernels that take one at a time (Triton)."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        x, weight, bias, *weights = (value.contiguous() for value in (x, weight, bias, *rest[:-1]))
        inner, y = kernels.block(x, [weight, bias], weights, rest[-1])
        ctx.save_for_backward(x, weight, inner, *weights)
        ctx.kernels, ctx.eps = kernels, rest[-1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, *weights = ctx.saved_tensors
        return None, *ctx.kernels.block_backward(x, weight, inner, weights, grad.contiguous(), ctx.eps), None


class _ConvMixerMixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, *rest: Any) -> Tensor:
        x, *weights = (value.contiguous() for value in rest[:5])
        y, inner, *moments = kernels.mixing(x, weights, *rest[5:])
        ctx.save_for_backward(x, weights[0], inner, weights[2], *moments)
        ctx.kernels, ctx.dilation = kernels, rest[5]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, gain, *moments = ctx.saved_tensors
        found = ctx.kernels.mixing_backward(x, weight, inner, gain, moments, grad.contiguous(), ctx.dilation)
        return None, *found, None, None


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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, qkv: Tensor) -> Tensor:
        qkv = qkv.contiguous()
        ctx.save_for_backward(qkv)
        ctx.kernels = kernels
        return kernels.attention(qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernels.attention_backward(*ctx.saved_tensors, grad.contiguous())
