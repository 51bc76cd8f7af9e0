"""Stacked twins of the leaf layers: each does its work for T networks at once.

They take and give *folded* activations, whose channel axis holds T networks times C channels: images (B, T*C, H, W),
tokens (B, N, T*C). In memory the batch is innermost and the channels outermost. So every linear map is one batched
matrix product (T, C', C) x (T, C, P) on views, normalisation over channels runs along contiguous rows, and the
depthwise convolution is a batched matrix product as well (`depthwise.py`).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope.errors import UsageError
from weightscope.networks.layers import Attention, LayerNorm2d, SpatialMean, TokenPool
from weightscope.training.kernels import functions
from weightscope.training.kernels.pytorch import depthwise_conv2d


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias along `dim` of (T, C, P), in one pass each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dim: int, eps: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        centred = wide - wide.mean(dim, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim, keepdim=True) + eps)
        normal = centred.mul_(scale).to(x.dtype)
        ctx.save_for_backward(normal, scale, weight)
        ctx.dim = dim
        return torch.addcmul(bias[:, :, None].to(x.dtype), normal, weight[:, :, None].to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        product = grad * normal
        grad_weight, grad_bias = product.sum(2, dtype=weight.dtype), grad.sum(2, dtype=weight.dtype)
        g = grad * weight[:, :, None].to(grad.dtype)
        along = product.mul_(weight[:, :, None].to(grad.dtype)).mean(ctx.dim, keepdim=True)
        g.sub_(g.mean(ctx.dim, keepdim=True)).addcmul_(normal, along, value=-1)
        return g.mul_(scale.to(g.dtype)), grad_weight, grad_bias, None, None


class Stacked(nn.Module):
    """A leaf layer of T networks. `weight` and `bias` are bound to views (T, ...) of the weight matrix."""

    kernels: Literal["torch", "c", "triton"] = "torch"
    """Whose: torch's, or one of the two sets behind `functions.py`."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = [layer], count  # in a list: not a child, only its settings are read
        self.leaves: dict[str, Tensor] = {}

    def leaf(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A tensor of the T networks in the activations' type; None where the layer has none of this name."""
        value = self.leaves.get(name)
        return None if value is None else value.to(dtype)


def rows_of(x: Tensor, count: int) -> Tensor:
    """(B, ..., T*C) -> (T, C, P), P the positions with the batch innermost; a view for folded activations."""
    inner = x.permute(x.ndim - 1, *range(1, x.ndim - 1), 0)
    return inner.reshape(count, x.shape[-1] // count, -1)


def unrows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `rows_of`: (T, C', P) -> (B, ..., T*C') with the positions of `like`."""
    inner = rows.reshape(-1, *like.shape[1:-1], like.shape[0])
    return inner.permute(inner.ndim - 1, *range(1, inner.ndim - 1), 0)


class Elementwise(Stacked):
    """Applied to the activations as they lie in memory: kernels that meet two layouts are ten times slower."""

    def forward(self, x: Tensor) -> Tensor:
        """Map folded activations of any shape."""
        order = sorted(range(x.ndim), key=lambda axis: (x.stride(axis), x.shape[axis]), reverse=True)
        inverse = sorted(range(x.ndim), key=order.__getitem__)
        return self.layer[0](x.permute(order).contiguous()).permute(inverse)


class _SpatialMean(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 3, 0).flatten(1, 2).mean(1).t()


class _TokenPool(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        inner = x.permute(2, 1, 0)
        return (inner[:, 0] if self.layer[0].first else inner.mean(1)).t()


class _Linear(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.leaf("weight", x.dtype), self.leaf("bias", x.dtype)
        rows = rows_of(x, self.count)
        y = torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias[:, :, None], weight, rows)
        return unrows(y, x)


class Normalisation(Stacked):
    """LayerNorm over the last axis, LayerNorm2d over the channel axis, BatchNorm2d over everything else.

    `more`, of x's shape, is added to the value.
    """

    after_gelu = False
    """Whether the GELU before a BatchNorm is part of it."""

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Normalise folded activations, and add `more`."""
        image = isinstance(self.layer[0], LayerNorm2d | nn.BatchNorm2d)
        last = x.permute(0, 2, 3, 1) if image else x
        added = None if more is None else rows_of(more.permute(0, 2, 3, 1) if image else more, self.count)
        y = unrows(self._of_rows(rows_of(last, self.count), added), last)
        return y.permute(0, 3, 1, 2) if image else y

    def _of_rows(self, rows: Tensor, more: Tensor | None) -> Tensor:
        layer, pair = self.layer[0], weight_and_bias(self)
        batch = isinstance(layer, nn.BatchNorm2d)
        if self.after_gelu and self.training and not self.calibrating:
            return functions.gelu_batch_norm(rows, pair, layer.eps, more)
        if self.kernels == "triton" and not batch:
            y = functions.layer_norm(rows, pair, layer.eps)
        elif not batch:
            y = _Normalise.apply(rows, *pair, 1, layer.eps)
        else:
            rows = F.gelu(rows) if self.after_gelu else rows
            if self.training:
                self._observe(rows)
                y = _Normalise.apply(rows, *pair, 2, layer.eps)
            else:
                scale = pair[0] * torch.rsqrt(self.leaves["running_var"] + layer.eps)
                shift = pair[1] - self.leaves["running_mean"] * scale
                y = torch.addcmul(shift[:, :, None].to(rows.dtype), rows, scale[:, :, None].to(rows.dtype))
        return y if more is None else y + more

    calibrating = 0
    """The number of the calibration batch, counted from 1; 0 while training."""

    @torch.no_grad()
    def _observe(self, rows: Tensor) -> None:
        """Add one calibration batch to the equally weighted mean of the batch statistics."""
        if not self.calibrating:
            return
        variance, mean = torch.var_mean(rows if rows.dtype == torch.float64 else rows.float(), dim=2)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            self.leaves[name].lerp_(value.to(self.leaves[name].dtype), 1 / self.calibrating)


class _Conv2d(Stacked):
    def __init__(self, layer: nn.Conv2d, count: int) -> None:
        super().__init__(layer, count)
        k, s, d = layer.kernel_size, layer.stride, layer.dilation
        same = layer.padding == "same" or layer.padding == tuple(e * (n - 1) // 2 for e, n in zip(d, k, strict=True))
        self.depthwise = layer.groups == layer.in_channels == layer.out_channels
        patches = layer.groups == 1 and k == s and d == (1, 1) and layer.padding in ((0, 0), "valid", "same")
        if self.depthwise:
            supported = same and s == (1, 1) and k[0] == k[1] and k[0] % 2 == 1 and d[0] == d[1]
        else:
            supported = patches and (layer.padding != "same" or k == (1, 1))
        if not supported or layer.padding_mode != "zeros":
            raise UsageError(
                f"cannot stack {layer}: depthwise convolutions must have stride 1, odd square kernels and 'same' "
                "padding, other convolutions a stride equal to the kernel and no padding"
            )

    def forward(self, x: Tensor) -> Tensor:
        return self._depthwise(x) if self.depthwise else self._patches(x)

    def _depthwise(self, x: Tensor) -> Tensor:
        leaves = self.leaves["weight"], self.leaves.get("bias")
        weight, bias = filters_of(*given(leaves, x, self.kernels))
        options = {"dilation": self.layer[0].dilation[0], "kernels": self.kernels}
        return depthwise_conv2d(x.permute(1, 2, 3, 0), weight, bias, **options).permute(3, 0, 1, 2)

    def _patches(self, x: Tensor) -> Tensor:
        weight, bias = self.leaf("weight", x.dtype), self.leaf("bias", x.dtype)
        batch, channels, height, width = x.shape
        p = weight.shape[-1]
        h, w = height // p, width // p
        inner = x.permute(1, 2, 3, 0)[:, : h * p, : w * p]
        cut = inner.reshape(self.count, channels // self.count, h, p, w, p, batch).permute(0, 1, 3, 5, 2, 4, 6)
        rows = cut.reshape(self.count, -1, h * w * batch)
        flat = weight.reshape(self.count, weight.shape[1], -1)
        y = torch.bmm(flat, rows) if bias is None else torch.baddbmm(bias[:, :, None], flat, rows)
        return y.view(-1, h, w, batch).permute(3, 0, 1, 2)


class _Attention(Stacked):
    """Multi-head self-attention; the two linear maps are stacked leaves of their own."""

    def __init__(self, layer: Attention, count: int) -> None:
        super().__init__(layer, count)
        self.qkv, self.proj = layer.qkv, layer.proj  # replaced by their stacked twins later

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.layer[0].heads
        qkv = self.qkv(x).permute(2, 1, 0).reshape(self.count, 3, heads, -1, tokens, batch)
        q, k, v = qkv.permute(1, 0, 2, 5, 4, 3).contiguous().unbind(0)  # each (T, H, B, N, k)
        with _repeatable_attention(x.device):
            y = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        y = y.reshape(self.count, heads, batch, tokens, -1).permute(0, 1, 4, 3, 2).contiguous()  # (T, H, k, N, B)
        return self.proj(y.view(-1, tokens, batch).permute(2, 1, 0))


def _repeatable_attention(device: torch.device) -> AbstractContextManager[None]:
    """Attention without cuDNN's on a GPU: its backward pass is not deterministic and was seen to give NaN in bfloat16.

    What is left adds in a fixed order up to 256 tokens.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def given(leaves: Iterable[Tensor | None], x: Tensor, kernels: str) -> tuple[Any, ...]:
    """Weights as the kernels take them: those of Triton as they are, all others in the activations' type."""
    return tuple(leaf if leaf is None or kernels == "triton" else leaf.to(x.dtype) for leaf in leaves)


def filters_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
    """(T, C, 1, k, k) and (T, C) with networks and channels as one axis."""
    return weight.reshape(-1, *weight.shape[-2:]), None if bias is None else bias.reshape(-1)


def weight_and_bias(layer: Stacked) -> tuple[Tensor, Tensor]:
    """Both tensors (T, ...) as they are."""
    return layer.leaves["weight"], layer.leaves["bias"]


TWINS: dict[type[nn.Module], Callable[[Any, int], Stacked]] = {
    nn.Linear: _Linear,
    nn.Conv2d: _Conv2d,
    nn.LayerNorm: Normalisation,
    LayerNorm2d: Normalisation,
    nn.BatchNorm2d: Normalisation,
    Attention: _Attention,
    SpatialMean: _SpatialMean,
    TokenPool: _TokenPool,
    nn.GELU: Elementwise,
    nn.ReLU: Elementwise,
    nn.SiLU: Elementwise,
    nn.Tanh: Elementwise,
}
