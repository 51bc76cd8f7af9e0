"""Batched leaf layers: each computes its layer for T networks at once.

Inputs and outputs have one axis for the channels of all networks, T*C: images (B, T*C, H, W), tokens (B, N, T*C). In
memory the batch is innermost and the channels outermost. So every linear map is one batched matrix product
(T, C', C) x (T, C, P) on views, normalisation over channels runs along contiguous rows, and the depthwise convolution
is a batched matrix product as well (`kernels/pytorch.py`).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope.errors import UsageError
from weightscope.networks.layers import Attention, DropPath, LayerNorm2d, SpatialMean, SumLinear, TokenPool
from weightscope.networks.vit import ConvolutionalAttention, GatedAttention
from weightscope.training.kernels import functions, pytorch
from weightscope.training.kernels.functions import Kernels, Pair


class BatchedLayer(nn.Module):
    """A leaf layer of T networks."""

    kernels: Kernels = "torch"

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self._layer: list[Any] = [layer]  # in a list, so that it is not registered as a child
        self.count: int = count
        self.leaves: dict[str, Tensor] = {}

    @property
    def layer(self) -> Any:
        """The layer of one network."""
        return self._layer[0]

    @property
    def pair(self) -> Pair:
        """Weight and bias (T, ...); zeros where a linear map has no bias."""
        weight = self.leaves["weight"]
        return weight, self.leaves.get("bias", weight.new_zeros(weight.shape[:2]))

    def affine(self, weight: Tensor, rows: Tensor) -> Tensor:
        """`weight @ rows + bias`, (G, C', C) x (G, C, P) with G a multiple of T."""
        bias, weight = self.leaves.get("bias"), weight.to(rows.dtype)
        if bias is None:
            return torch.bmm(weight, rows)
        return torch.baddbmm(bias.to(rows.dtype).reshape(len(rows), -1, 1), weight, rows)


def rows_of(x: Tensor, count: int) -> Tensor:
    """(B, ..., T*C) -> (T, C, P), P the positions with the batch innermost; a view."""
    inner = x.permute(x.ndim - 1, *range(1, x.ndim - 1), 0)
    return inner.reshape(count, x.shape[-1] // count, -1)


def unrows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `rows_of`: (T, C', P) -> (B, ..., T*C') with the positions of `like`."""
    inner = rows.reshape(-1, *like.shape[1:-1], like.shape[0])
    return inner.permute(inner.ndim - 1, *range(1, inner.ndim - 1), 0)


class Elementwise(BatchedLayer):
    """An elementwise layer, applied in memory order: kernels are ten times slower if two layouts meet."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        if getattr(layer, "inplace", False):
            layer = copy.copy(layer)
            layer.inplace = False  # type: ignore[assignment]  # nn.Module declares attributes as tensors
        super().__init__(layer, count)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., T*C) to (B, ..., T*C')."""
        order = sorted(range(x.ndim), key=lambda axis: (x.stride(axis), x.shape[axis]), reverse=True)
        inverse = sorted(range(x.ndim), key=order.__getitem__)
        return self.layer(x.permute(order).contiguous()).permute(inverse)


class _PerChannel(BatchedLayer):
    """Pooling and flattening of images, which mix no channels of two networks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _SpatialMean(BatchedLayer):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 3, 0).flatten(1, 2).mean(1).t()


class _TokenPool(BatchedLayer):
    def forward(self, x: Tensor) -> Tensor:
        inner = x.permute(2, 1, 0)
        return (inner[:, 0] if self.layer.first else inner.mean(1)).t()


class BatchedDropPath(BatchedLayer):
    """Stochastic depth of tokens (B, ..., T*C)."""

    draws: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop the branches of some images of some networks."""
        if self.draws is None or not self.training:
            return x
        factors = self.layer.factors(self.draws, x.dtype)[:, None, None]  # (T, 1, 1, B)
        rows = rows_of(x, self.count)
        return unrows((rows.view(*rows.shape[:2], -1, len(x)) * factors).view_as(rows), x)


class _Linear(BatchedLayer):
    def forward(self, x: Tensor) -> Tensor:
        return unrows(self.affine(self.leaves["weight"], rows_of(x, self.count)), x)


class _SumLinear(BatchedLayer):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.leaves["weight"] + self.leaves["sum_weight"][:, :, None]  # W + b 1_p 1_n^T
        return unrows(self.affine(weight, rows_of(x, self.count)), x)


class Normalisation(BatchedLayer):
    """LayerNorm over the last axis, LayerNorm2d over the channel axis, BatchNorm2d over everything else."""

    after_gelu: bool = False

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__(layer, count)
        self.calibrating = 0  # an attribute from the start, or a compiled step is compiled again after an evaluation
        if getattr(layer, "weight", None) is None or getattr(layer, "bias", None) is None:
            raise UsageError(f"{layer}: the batched version needs a weight and a bias")
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
            raise UsageError(f"{layer}: the batched version normalises over one axis")
        if isinstance(layer, nn.BatchNorm2d) and not layer.track_running_stats:
            raise UsageError(f"{layer}: the batched version needs running statistics")

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Normalise (B, ..., T*C); `more`, of x's shape, is added to the result."""
        image = isinstance(self.layer, LayerNorm2d | nn.BatchNorm2d)
        last = x.permute(0, 2, 3, 1) if image else x
        added = None if more is None else rows_of(more.permute(0, 2, 3, 1) if image else more, self.count)
        y = unrows(self._of_rows(rows_of(last, self.count), added), last)
        return y.permute(0, 3, 1, 2) if image else y

    def _of_rows(self, rows: Tensor, more: Tensor | None) -> Tensor:
        eps = self.layer.eps
        if not isinstance(self.layer, nn.BatchNorm2d):
            y = functions.layer_norm(rows, self.pair, eps, kernels=self.kernels)
        elif self.after_gelu and self.training and not self.calibrating:
            return functions.gelu_batch_norm(rows, self.pair, eps, more)
        else:
            y = self._batch_norm(F.gelu(rows) if self.after_gelu else rows)
        return y if more is None else y + more

    def _batch_norm(self, rows: Tensor) -> Tensor:
        if self.training:
            self._observe(rows)
            return pytorch.Normalise.apply(rows, *self.pair, 2, self.layer.eps)
        weight, bias = self.pair
        scale = weight * torch.rsqrt(self.leaves["running_var"] + self.layer.eps)
        shift = bias - self.leaves["running_mean"] * scale
        return torch.addcmul(shift[:, :, None].to(rows.dtype), rows, scale[:, :, None].to(rows.dtype))

    @torch.no_grad()
    def _observe(self, rows: Tensor) -> None:
        """Add one calibration batch to the equally weighted mean of the batch statistics."""
        if not self.calibrating:
            return
        variance, mean = torch.var_mean(rows if rows.dtype == torch.float64 else rows.float(), dim=2)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            self.leaves[name].lerp_(value.to(self.leaves[name].dtype), 1 / self.calibrating)
        self.calibrating += 1


class Conv2d(BatchedLayer):
    """Depthwise convolutions that keep the size and patches have fast forms; all others are a product over taps."""

    def __init__(self, layer: nn.Conv2d, count: int) -> None:
        super().__init__(layer, count)
        if layer.padding_mode != "zeros":
            raise UsageError(f"{layer}: the batched version pads with zeros")
        k, s, d = layer.kernel_size, layer.stride, layer.dilation
        if layer.padding == "same":
            total = [e * (n - 1) for e, n in zip(d, k, strict=True)]
            before, after = [n // 2 for n in total], [n - n // 2 for n in total]
        else:
            before = after = [0, 0] if isinstance(layer.padding, str) else list(layer.padding)
        self.padding = before[1], after[1], before[0], after[0]  # as F.pad takes it: left, right, top, bottom
        odd = all(2 * b == e * (n - 1) and n % 2 for b, e, n in zip(before, d, k, strict=True))
        even = layer.padding == "same" and d == (1, 1)  # computed as the next odd size, see `filters_of`
        square = k[0] == k[1]
        depthwise = layer.groups == layer.in_channels == layer.out_channels
        self.depthwise: bool = depthwise and s == (1, 1) and (odd or even) and square and d[0] == d[1]
        self.patches: bool = layer.groups == 1 and square and k == s and d == (1, 1) and not any(self.padding)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images (B, T*C, H, W)."""
        if self.depthwise:
            return self._depthwise(x)
        return self._patches(x) if self.patches else self._taps(x)

    def _depthwise(self, x: Tensor) -> Tensor:
        weight, bias = filters_of(self.leaves["weight"], self.leaves.get("bias"))
        inner, dilation = x.permute(1, 2, 3, 0), self.layer.dilation[0]
        y = functions.depthwise_conv2d(inner, weight, bias, dilation=dilation, kernels=self.kernels)
        return y.permute(3, 0, 1, 2)

    def _patches(self, x: Tensor) -> Tensor:
        weight = self.leaves["weight"]
        batch, channels, height, width = x.shape
        p = weight.shape[-1]
        h, w = height // p, width // p
        inner = x.permute(1, 2, 3, 0)[:, : h * p, : w * p]
        cut = inner.reshape(self.count, channels // self.count, h, p, w, p, batch).permute(0, 1, 3, 5, 2, 4, 6)
        rows = cut.reshape(self.count, -1, h * w * batch)
        y = self.affine(weight.reshape(self.count, weight.shape[1], -1), rows)
        return y.view(-1, h, w, batch).permute(3, 0, 1, 2)

    def _taps(self, x: Tensor) -> Tensor:
        """The pixels under each tap as a matrix (T*g, C/g*k*k, P), multiplied by the kernels of T networks, g groups.

        Slices rather than `F.conv2d`, whose gradients on a GPU are not deterministic.
        """
        weight, groups = self.leaves["weight"], self.count * self.layer.groups
        (kh, kw), (sh, sw), (dh, dw) = self.layer.kernel_size, self.layer.stride, self.layer.dilation
        inner = F.pad(x.permute(1, 2, 3, 0), (0, 0, *self.padding))  # (T*C, H, W, B)
        h, w = (inner.shape[1] - dh * (kh - 1) - 1) // sh + 1, (inner.shape[2] - dw * (kw - 1) - 1) // sw + 1
        taps = [
            inner[:, i * dh : i * dh + sh * (h - 1) + 1 : sh, j * dw : j * dw + sw * (w - 1) + 1 : sw]
            for i in range(kh)
            for j in range(kw)
        ]
        rows = torch.stack(taps, 1).reshape(groups, -1, h * w * len(x))
        y = self.affine(weight.reshape(groups, -1, rows.shape[1]), rows)
        return y.view(-1, h, w, len(x)).permute(3, 0, 1, 2)


class _Attention(BatchedLayer):
    """Multi-head self-attention; its two linear maps are batched layers of their own."""

    def __init__(self, layer: Attention, count: int) -> None:
        super().__init__(layer, count)
        self.qkv, self.proj = layer.qkv, layer.proj  # `BatchedNetworks` replaces them by batched layers

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.layer.heads
        qkv = self.qkv(x).permute(2, 1, 0).reshape(self.count, 3, heads, -1, tokens, batch)
        return self.proj(self.mixed(qkv).reshape(-1, tokens, batch).permute(2, 1, 0))

    def mixed(self, qkv: Tensor) -> Tensor:
        """`softmax(Q K^T / sqrt(k)) V` of every head: (T, 3, H, k, N, B) to (T, H, k, N, B)."""
        return functions.attention(qkv, kernels=self.kernels)


class _PositionalAttention(_Attention):
    """Attention with terms that depend on positions only, which all images of a batch share."""

    def mixed(self, qkv: Tensor) -> Tensor:
        terms = self.layer.terms(self.leaves)  # of weights in float32; each (T, H, N, N or 1)
        logits, kept, added = (None if term is None else term.to(qkv.dtype) for term in terms)
        y = super().mixed(qkv) if logits is None else _biased(qkv, logits)
        y = y if kept is None else y * kept.transpose(2, 3)[..., None]
        return y if added is None else y + torch.einsum("thij,thkjb->thkib", added, qkv[:, 2])


def _biased(qkv: Tensor, logits: Tensor) -> Tensor:
    """`softmax(Q K^T / sqrt(k) + logits) V`, written out: attention kernels add up gradients of logits in any order."""
    q, k, v = qkv.permute(1, 0, 2, 5, 4, 3).unbind(0)  # each (T, H, B, N, k)
    maps = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + logits[:, :, None], -1)
    return (maps @ v).permute(0, 1, 4, 3, 2).contiguous()


def filters_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
    """Reshape (T, C, 1, k, k) to (T*C, k, k) and (T, C) to (T*C,).

    Even filters, whose padding is torch's "same", get a row and a column of zeros before the others: the offsets
    -(k/2 - 1) to k/2 are those of the next odd filter without its first.
    """
    if weight.shape[-1] % 2 == 0:
        weight = F.pad(weight, (1, 0, 1, 0))
    return weight.reshape(-1, *weight.shape[-2:]), None if bias is None else bias.reshape(-1)


BATCHED_LAYERS: dict[type[nn.Module], Callable[[Any, int], BatchedLayer]] = {
    nn.Linear: _Linear,
    nn.Conv2d: Conv2d,
    nn.LayerNorm: Normalisation,
    LayerNorm2d: Normalisation,
    nn.BatchNorm2d: Normalisation,
    Attention: _Attention,
    DropPath: BatchedDropPath,
    SumLinear: _SumLinear,
    GatedAttention: _PositionalAttention,
    ConvolutionalAttention: _PositionalAttention,
    SpatialMean: _SpatialMean,
    TokenPool: _TokenPool,
    **dict.fromkeys((nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten), _PerChannel),
    **dict.fromkeys((nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU), Elementwise),
    **dict.fromkeys((nn.Mish, nn.Hardswish, nn.Hardtanh, nn.Softplus, nn.Sigmoid, nn.Tanh), Elementwise),
}
"""Layer type -> its batched version; a layer of any other type can only be trained with `training.engine = "loop"`."""
