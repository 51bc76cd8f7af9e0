"""Differentiable functions of the training step, computed by torch or by compiled C.

Each function makes one pass over memory where separate operations make a dozen: of a block's MLP only the input is kept
for the backward pass, and everything else is recomputed. Kernels:

- "torch" (`pytorch.py`): any device and type; torch's operations, with which the others are compared.
- "c" (`c/`, compiled by `build.py`): CPU; the activations' type, float32 or float64, to which weights are converted.
- "inductor": torch's operations, which the engine hands to `torch.compile`; here the same as "torch".

Compiled functions are differentiable once. They read memory by the shapes of their arguments, which are those of a
network that has run by torch's operations (`network_check.py`). UsageError if there is no C compiler.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weightscope.training.kernels import pytorch
from weightscope.training.kernels.build import library

Pair = tuple[Tensor, Tensor]  # weight and bias
Block = tuple[Pair, ...]  # of a ConvNeXt: conv, norm, fc1, fc2; of a transformer: norm1, qkv, proj, norm2, fc1, fc2
Kernels = Literal["torch", "c", "inductor"]


def by_kernels(function: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """A part of the training step; for "inductor" what `torch.compile` makes of it, on a GPU as a CUDA graph."""
    if kernels != "inductor":
        return function
    # torch's limit of 8 would leave further recipes of a process uncompiled
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 200)
    # deterministic, and never for any size: the same sums in every process
    options: dict[str, Any] = {"triton.cudagraphs": True, "deterministic": True}
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def depthwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dilation: int = 1, kernels: Kernels = "torch"
) -> Tensor:
    """Stride-1 depthwise convolution with zero padding that keeps the size.

    Equal to `F.conv2d(x, weight, bias, padding=dilation * (k - 1) // 2, dilation=dilation, groups=C)`.
    """
    if kernels == "c":
        bias = torch.zeros(len(weight)) if bias is None else bias
        return _compiled(_depthwise, _depthwise_backward, x, weight, bias, dilation=dilation)
    weight = weight.to(x.dtype)
    y = pytorch.DepthwiseConv2d.apply(x, weight, dilation)
    return y if bias is None else y + bias.to(x.dtype)[:, None, None, None]


def norm_mlp(x: Tensor, norm: Pair, fc1: Pair, fc2: Pair, eps: float) -> Tensor:
    """`fc2(gelu(fc1(norm(x))))` of T networks, where norm is LayerNorm over the channels; in C."""
    return _compiled(_mlp, _mlp_backward, x, *norm, *fc1, *fc2, eps=eps)


def convnext_blocks(x: Tensor, blocks: tuple[Block, ...], eps: float) -> Tensor:
    """`x + fc2(gelu(fc1(norm(conv(x)))))`, the block of T ConvNeXts without layer scale, several times."""
    weights = [weight for block in blocks for pair in block for weight in pair]
    return _compiled(_blocks, _blocks_backward, x, *weights, eps=eps, keep=torch.is_grad_enabled())


def transformer_blocks(x: Tensor, blocks: tuple[Block, ...], heads: int, eps: float) -> Tensor:
    """The blocks of T transformers, `x + proj(attention(qkv(norm1(x))))` and `x + fc2(gelu(fc1(norm2(x))))`; in C.

    x is (T*c, N, B); the weights of each of the six layers have a first axis of T.
    """
    weights = [weight for block in blocks for pair in block for weight in pair]
    return _compiled(
        _transformer, _transformer_backward, x, *weights, heads=heads, eps=eps, keep=torch.is_grad_enabled()
    )


def convmixer_mixing(x: Tensor, filters: Pair, norm: Pair, eps: float, *, dilation: int = 1) -> Tensor:
    """`x + batch_norm(gelu(conv(x)))`, the spatial mixing of ConvMixers, with the statistics of the batch; in C."""
    return _compiled(_mixing, _mixing_backward, x, *filters, *norm, dilation=dilation, eps=eps)


def layer_norm(x: Tensor, norm: Pair, eps: float, *, kernels: Kernels) -> Tensor:
    """LayerNorm of x (T, c, P) over the channels, gain and shift (T, c) each."""
    if kernels == "c":
        return _compiled(_norm, _norm_backward, x, *norm, eps=eps)
    return pytorch.Normalise.apply(x, *norm, 1, eps)


def gelu_batch_norm(x: Tensor, norm: Pair, eps: float, more: Tensor | None = None) -> Tensor:
    """`more + batch_norm(gelu(x))` with the statistics of x (T, c, P) over its positions; in C."""
    return _compiled(_gelu_norm, _gelu_norm_backward, x, *norm, more, eps=eps)


def attention(qkv: Tensor, *, kernels: Kernels) -> Tensor:
    """`softmax(q^T k / sqrt(d)) v` of each head and image, of queries, keys and values (T, 3, H, d, N, B)."""
    if kernels == "c":
        return _compiled(_attention, _attention_backward, qkv)
    return pytorch.attention(qkv)


def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`selective_scan` of T networks with inputs u = delta x, and a <= 0; in C."""
    values = tuple(value.contiguous() for value in (u, delta, a, b, c))
    (y,) = _filled("scan_forward", values, [u], (*u.shape, a.shape[-1]))
    return y


def scan_backward(grad: Tensor, *values: Tensor) -> list[Tensor]:
    """The gradients of what `scan` takes, given that of its result."""
    values = tuple(value.contiguous() for value in values)
    return _filled("scan_backward", (*values, grad.contiguous()), values, (*grad.shape, values[2].shape[-1]))


def adamw(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    decayed: Tensor,
    rates: tuple[Tensor, Tensor],
    clip: Tensor,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of `BatchedAdamW` in place, in C."""
    tensors = (weights, gradient, *moments, decayed.to(weights.dtype), *rates, clip, scalars)
    _call("adamw_step", tensors, (*weights.shape, *map(float, betas), float(eps)))


class _Compiled(torch.autograd.Function):
    """A function in C; `forward(*tensors, **options)` also returns what `backward(grad, *kept, **options)` needs."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        y, kept = forward(*(None if tensor is None else tensor.contiguous() for tensor in tensors), **options)
        ctx.save_for_backward(*kept)
        ctx.backward_in_c, ctx.options = backward, options
        found: Tensor = y
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.backward_in_c(grad.contiguous(), *ctx.saved_tensors, **ctx.options)
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *(g if needed else None for g, needed in zip(found, wanted, strict=True))


def _compiled(forward: Any, backward: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
    converted = (None if weight is None else weight.to(x.dtype) for weight in weights)
    found: Tensor = _Compiled.apply(forward, backward, options, x, *converted)
    return found


_spare: list[Tensor] = []  # what blocks kept in an earlier step: each page of new memory costs a fault


def _kept(count: int, like: Tensor) -> Tensor:
    """Memory for what blocks keep for the backward pass, which gives it back."""
    found = _spare.pop() if _spare else like.new_empty(count)
    if found.numel() != count or found.dtype != like.dtype:
        return like.new_empty(count)
    torch.autograd.graph.increment_version(found)  # so that a graph that still needs it raises an error
    return found


# What follows calls the C functions; see their sources for the shapes.


def _filled(name: str, inputs: tuple[Any, ...], like: Sequence[Tensor], numbers: tuple[Any, ...]) -> list[Tensor]:
    """New tensors of the shapes of `like`, which a function in C fills."""
    found = [torch.empty_like(tensor) for tensor in like]
    _call(name, (*inputs, *found), numbers)
    return found


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor, *, dilation: int) -> Any:
    (y,) = _filled("depthwise_forward", (x, weight, bias), [x], (*x.shape, weight.shape[-1], dilation))
    return y, (x, weight)


def _depthwise_backward(grad: Tensor, x: Tensor, weight: Tensor, *, dilation: int) -> list[Tensor]:
    like, sizes = [x, weight, weight[:, 0, 0]], (*x.shape, weight.shape[-1], dilation)
    return _filled("depthwise_backward", (x, weight, grad, None), like, sizes)


def _mlp(x: Tensor, *weights: Tensor, eps: float) -> Any:
    (y,) = _filled("mlp_forward", (x, *weights, None), [x], (*_mlp_sizes(x, weights), eps))
    return y, (x, *weights)


def _mlp_backward(grad: Tensor, x: Tensor, *weights: Tensor, eps: float) -> list[Tensor]:
    inputs = x, *weights[:-1], grad, None
    return _filled("mlp_backward", inputs, [x, *weights], (*_mlp_sizes(x, weights), eps))


def _mlp_sizes(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[int, ...]:
    """T, groups of positions, c, m, P."""
    return x.shape[0], 1, x.shape[1], weights[2].shape[1], x.shape[2]


def _blocks(x: Tensor, *weights: Tensor, eps: float, keep: bool) -> Any:
    sizes = _block_sizes(x, weights)
    kept = _kept(2 * sizes[0] * x.numel(), x) if keep else None
    (y,) = _filled("blocks_forward", (x, weights, kept), [x], (*sizes, eps))
    return y, (kept, *weights)


def _blocks_backward(grad: Tensor, kept: Tensor, *weights: Tensor, eps: float, keep: bool) -> list[Tensor]:
    found, of_weights = torch.empty_like(grad), tuple(torch.empty_like(weight) for weight in weights)
    _call("blocks_backward", (grad, weights, kept, found, of_weights), (*_block_sizes(grad, weights), eps))
    _spare[:] = [kept]
    return [found, *of_weights]


def _block_sizes(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Blocks, T, c, m, H, W, B, k."""
    networks, m, c = weights[4].shape
    return len(weights) // 8, networks, c, m, *x.shape[1:], weights[0].shape[-1]


def _transformer(x: Tensor, *weights: Tensor, heads: int, eps: float, keep: bool) -> Any:
    sizes = _transformer_sizes(x, weights, heads)
    images = _library(x).transformer_images(*sizes[-2:])
    kept = _kept(3 * sizes[0] * len(x) * x.shape[1] * images, x) if keep else None
    (y,) = _filled("transformer_forward", (x, weights, kept), [x], (*sizes, eps))
    return y, (kept, *weights)


def _transformer_backward(
    grad: Tensor, kept: Tensor, *weights: Tensor, heads: int, eps: float, keep: bool
) -> list[Tensor]:
    found, of_weights = torch.empty_like(grad), tuple(torch.empty_like(weight) for weight in weights)
    sizes = _transformer_sizes(grad, weights, heads)
    _call("transformer_backward", (grad, weights, kept, found, of_weights), (*sizes, eps))
    _spare[:] = [kept]
    return [found, *of_weights]


def _transformer_sizes(x: Tensor, weights: tuple[Tensor, ...], heads: int) -> tuple[int, ...]:
    """Blocks, T, c, m, H, N, B."""
    networks, m, c = weights[8].shape
    return len(weights) // 12, networks, c, m, heads, *x.shape[1:]


def _mixing(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, *, dilation: int, eps: float) -> Any:
    sizes = (*x.shape, weight.shape[-1], dilation, eps)
    inner, y, *moments = _filled("mixing_forward", (x, weight, bias, gain, shift), [x, x, gain, gain], sizes)
    return y, (x, weight, inner, gain, *moments)


def _mixing_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inner: Tensor, *norm: Tensor, dilation: int, eps: float
) -> list[Tensor]:
    like, sizes = [x, weight, *[norm[0]] * 3], (*x.shape, weight.shape[-1], dilation)
    return _filled("mixing_backward", (x, weight, inner, *norm, grad), like, sizes)


def _norm(x: Tensor, gain: Tensor, shift: Tensor, *, eps: float) -> Any:
    return *_filled("norm_forward", (x, gain, shift), [x], (*x.shape, eps)), (x, gain)


def _norm_backward(grad: Tensor, x: Tensor, gain: Tensor, *, eps: float) -> list[Tensor]:
    return _filled("norm_backward", (x, gain, grad), [x, gain, gain], (*x.shape, eps))


def _gelu_norm(x: Tensor, gain: Tensor, shift: Tensor, more: Tensor | None, *, eps: float) -> Any:
    sizes = gain.numel(), x.shape[2], eps
    y, *moments = _filled("gelu_norm_forward", (x, gain, shift, more), [x, gain, gain], sizes)
    return y, (x, gain, *moments)


def _gelu_norm_backward(grad: Tensor, x: Tensor, gain: Tensor, *moments: Tensor, eps: float) -> list[Tensor]:
    inputs, sizes = (x, gain, *moments, grad), (gain.numel(), x.shape[2])
    return [*_filled("gelu_norm_backward", inputs, [x, gain, gain], sizes), grad]  # the last one is the residual's


def _attention(qkv: Tensor) -> Any:
    t, _, *sizes = qkv.shape
    return *_filled("attention_forward", (qkv,), [qkv[:, 0]], (t, *sizes)), (qkv,)


def _attention_backward(grad: Tensor, qkv: Tensor) -> list[Tensor]:
    t, _, *sizes = qkv.shape
    return _filled("attention_backward", (qkv, grad), [qkv], (t, *sizes))


def _call(name: str, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """Call a function of the library with tensors, tuples of tensors (as arrays of pointers), and numbers."""
    parts = (item if isinstance(item, tuple) else (item,) for item in tensors)
    given = [tensor for several in parts for tensor in several if tensor is not None]
    kinds = {(str(tensor.dtype), tensor.device.type, tensor.is_contiguous()) for tensor in given}
    if kinds not in ({("torch.float32", "cpu", True)}, {("torch.float64", "cpu", True)}):
        raise ValueError(
            f"{name}: expected contiguous tensors of one type, float32 or float64, on the CPU, found {kinds}"
        )
    values = [ctypes.c_double(n) if isinstance(n, float) else ctypes.c_long(n) for n in numbers]
    function = getattr(_library(given[0]), name)
    if function(*map(_pointer, tensors), *values):
        raise MemoryError(f"{name}: cannot allocate the workspace")


def _library(like: Tensor) -> ctypes.CDLL:
    return library("float" if like.dtype == torch.float32 else "double")[0]


def _pointer(item: Any) -> Any:
    if isinstance(item, tuple):
        return (ctypes.c_void_p * len(item))(*(tensor.data_ptr() for tensor in item))
    return ctypes.c_void_p(None if item is None else item.data_ptr())
