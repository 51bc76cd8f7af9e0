"""Many networks of one architecture as one module.

`StackedNetworks` holds T networks as a matrix (T, D) of weights in `WeightSpec` order and runs them together.
The plain module's own forward code runs unchanged on *folded* activations, whose channel axis holds T networks
times C channels: images (B, T*C, H, W), tokens (B, N, T*C). Only the leaf layers, which mix channels, are
exchanged for stacked twins; residual additions, non-linearities and pooling do not see the difference.

In memory the batch is innermost and the channels outermost. So every linear map is one batched matrix product
(T, C', C) x (T, C, P) on views, normalisation over channels runs along contiguous rows, and the depthwise
convolution is a batched matrix product as well (`depthwise.py`). Nothing of one network enters another: a
network that diverges keeps its NaN to itself.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope.errors import UsageError
from weightscope.networks.convmixer import Residual
from weightscope.networks.convnext import ConvNeXtBlock
from weightscope.networks.layers import Attention, LayerNorm2d, Mlp, SpatialMean, TokenPool
from weightscope.networks.vit import Block
from weightscope.spec import WeightSpec
from weightscope.train import compiled
from weightscope.train.depthwise import depthwise_conv2d


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


class _Stacked(nn.Module):
    """A leaf layer of T networks. `weight` and `bias` are bound to views (T, ...) of the weight matrix."""

    kernels: Literal["torch", "c", "triton"] = "torch"
    """Whose: torch's, or one of the two sets behind `compiled.py`."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = [layer], count  # in a list: not a child, only its settings are read
        self.leaves: dict[str, Tensor] = {}

    def leaf(self, name: str, dtype: torch.dtype) -> Tensor | None:
        value = self.leaves.get(name)
        return None if value is None else value.to(dtype)


def _rows(x: Tensor, count: int) -> Tensor:
    """(B, ..., T*C) -> (T, C, P), P the positions with the batch innermost; a view for folded activations."""
    inner = x.permute(x.ndim - 1, *range(1, x.ndim - 1), 0)
    return inner.reshape(count, x.shape[-1] // count, -1)


def _unrows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_rows`: (T, C', P) -> (B, ..., T*C') with the positions of `like`."""
    inner = rows.reshape(-1, *like.shape[1:-1], like.shape[0])
    return inner.permute(inner.ndim - 1, *range(1, inner.ndim - 1), 0)


class _Elementwise(_Stacked):
    """Applied to the activations as they lie in memory: kernels that meet two layouts are ten times slower."""

    def forward(self, x: Tensor) -> Tensor:
        order = sorted(range(x.ndim), key=lambda axis: (x.stride(axis), x.shape[axis]), reverse=True)
        inverse = sorted(range(x.ndim), key=order.__getitem__)
        return self.layer[0](x.permute(order).contiguous()).permute(inverse)


class _SpatialMean(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 3, 0).flatten(1, 2).mean(1).t()


class _TokenPool(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        inner = x.permute(2, 1, 0)
        return (inner[:, 0] if self.layer[0].first else inner.mean(1)).t()


class _Linear(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.leaf("weight", x.dtype), self.leaf("bias", x.dtype)
        rows = _rows(x, self.count)
        y = torch.bmm(weight, rows) if bias is None else torch.baddbmm(bias[:, :, None], weight, rows)
        return _unrows(y, x)


class _Normalisation(_Stacked):
    """LayerNorm over the last axis, LayerNorm2d over the channel axis, BatchNorm2d over everything else.

    `more`, of x's shape, is added to the value.
    """

    after_gelu = False
    """Whether the GELU before a BatchNorm is part of it."""

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        image = isinstance(self.layer[0], LayerNorm2d | nn.BatchNorm2d)
        last = x.permute(0, 2, 3, 1) if image else x
        added = None if more is None else _rows(more.permute(0, 2, 3, 1) if image else more, self.count)
        y = _unrows(self._of_rows(_rows(last, self.count), added), last)
        return y.permute(0, 3, 1, 2) if image else y

    def _of_rows(self, rows: Tensor, more: Tensor | None) -> Tensor:
        layer, pair = self.layer[0], _weight_and_bias(self)
        batch = isinstance(layer, nn.BatchNorm2d)
        if self.after_gelu and self.training and not self.calibrating:
            return compiled.gelu_batch_norm(rows, pair, layer.eps, more)
        if self.kernels == "triton" and not batch:
            y = compiled.layer_norm(rows, pair, layer.eps)
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


class _Conv2d(_Stacked):
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
        weight, bias = self.leaves["weight"], self.leaves.get("bias")
        if self.kernels != "triton":
            weight, bias = self.leaf("weight", x.dtype), self.leaf("bias", x.dtype)
        weight, bias = weight.reshape(-1, *weight.shape[-2:]), None if bias is None else bias.reshape(-1)
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


class _Attention(_Stacked):
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


class _NormMlp(nn.Module):
    """LayerNorm and the MLP after it as one compiled function; the norm itself becomes the identity."""

    def __init__(self, norm: _Normalisation, mlp: Mlp) -> None:
        super().__init__()
        self.weights = tuple(_weight_and_bias(layer) for layer in (norm, mlp.fc1, mlp.fc2))
        self.count, self.eps, self.kernels = norm.count, norm.layer[0].eps, norm.kernels

    def forward(self, x: Tensor) -> Tensor:
        weights = (_given(pair, x, self.kernels) for pair in self.weights)
        return _unrows(compiled.norm_mlp(_rows(x, self.count), *weights, self.eps, kernels=self.kernels), x)


class _ConvNeXtBlock(_NormMlp):
    """A whole block as one compiled function."""

    def __init__(self, block: ConvNeXtBlock, gamma: Tensor | None) -> None:
        super().__init__(block.norm, block.mlp)
        self.filters, self.gamma = _weight_and_bias(block.conv_dw), gamma

    def forward(self, x: Tensor) -> Tensor:
        filters, norm, first, second = (_given(pair, x, self.kernels) for pair in (self.filters, *self.weights))
        if self.gamma is not None:  # gamma (W2 a + b2) = (gamma W2) a + gamma b2
            gamma = self.gamma.to(second[0].dtype)
            second = second[0] * gamma[:, :, None], second[1] * gamma
        inner = x.permute(1, 2, 3, 0)
        y = compiled.convnext_block(inner, _filters(filters), norm, first, second, self.eps, kernels=self.kernels)
        return y.permute(3, 0, 1, 2)


class _NormResidual(nn.Module):
    """`x -> fn(x) + x` where the last layer of `fn` is a normalisation that adds."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.norm = layers[:-1], layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x), x)


def _given(pair: compiled.Pair, x: Tensor, kernels: str) -> compiled.Pair:
    """Weight and bias as the kernels take them: those in C of the activations' type, those of Triton as they are."""
    return pair if kernels == "triton" else (pair[0].to(x.dtype), pair[1].to(x.dtype))


def _filters(pair: compiled.Pair) -> compiled.Pair:
    """(T, C, 1, k, k) and (T, C) with networks and channels as one axis."""
    return pair[0].reshape(-1, *pair[0].shape[-2:]), pair[1].reshape(-1)


def _weight_and_bias(layer: _Stacked) -> tuple[Tensor, Tensor]:
    return layer.leaves["weight"], layer.leaves["bias"]


_TWINS: dict[type[nn.Module], Callable[[Any, int], _Stacked]] = {
    nn.Linear: _Linear,
    nn.Conv2d: _Conv2d,
    nn.LayerNorm: _Normalisation,
    LayerNorm2d: _Normalisation,
    nn.BatchNorm2d: _Normalisation,
    Attention: _Attention,
    SpatialMean: _SpatialMean,
    TokenPool: _TokenPool,
    nn.GELU: _Elementwise,
    nn.ReLU: _Elementwise,
    nn.SiLU: _Elementwise,
    nn.Tanh: _Elementwise,
}
_UNCHANGED = (nn.Identity, nn.Sequential, nn.ModuleList)


class StackedNetworks(nn.Module):
    """T networks of one architecture, trained and evaluated as one module.

    Attributes:
        weights: (T, D) float32, one row for each network in the order of `spec`; parameters are views of it.
        gradient: (T, D) float32, filled by `backward`; zero where nothing is trained.
        spec: the `WeightSpec` of one network.

    Args:
        template: the plain module; its weights are not used.
        count: T.
        device: where the networks live.
        kernels: "torch"; or "c" (float32 or float64 on a CPU) or "triton" (on a GPU) for those of `compiled.py`.

    Raises:
        UsageError: if the module holds a layer that has no stacked twin; names it. If the kernels are not for the
            device.
    """

    def __init__(
        self, template: nn.Module, count: int, device: torch.device | str = "cpu", *, kernels: str = "torch"
    ) -> None:
        super().__init__()
        if kernels not in ("torch", "c", "triton") or (kernels == "c" and torch.device(device).type != "cpu"):
            raise UsageError(f"kernels: expected 'torch', 'c' on a CPU or 'triton', found {kernels!r} on {device}")
        self.kernels = kernels
        self.spec, self.count = WeightSpec.of(template), count
        self.weights = torch.zeros(count, self.spec.size, device=device)
        self.gradient = torch.zeros_like(self.weights)
        self.leaves: dict[str, Tensor] = {}
        for name, view in self.spec.unpack(self.weights).items():
            leaf = view.detach()
            if self.spec[name].role == "parameter":
                leaf.requires_grad_()
            self.leaves[name] = leaf
        self.network = self._stack(copy.deepcopy(template), "")

    def _stack(self, module: nn.Module, path: str) -> nn.Module:
        twin = _TWINS.get(type(module))
        if twin is not None:
            stacked = twin(module, self.count)
            stacked.kernels = self.kernels
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            stacked.leaves = {name: self.leaves[path + name] for name, value in own if value.is_floating_point()}
        elif type(module).__module__.startswith("torch.nn") and not isinstance(module, _UNCHANGED):
            raise UsageError(f"cannot stack `{path.rstrip('.')}`, a {type(module).__name__}: it has no stacked twin")
        else:
            stacked = module
            self._fold_own_parameters(module, path)
        for name, child in module.named_children():
            setattr(stacked, name, self._stack(child, f"{path}{name}."))
        return stacked if self.kernels == "torch" else self._fused(module, stacked, path)

    def _fused(self, module: nn.Module, stacked: nn.Module, path: str) -> nn.Module:
        """What takes the place of several stacked layers where one kernel does their work."""
        if isinstance(module, ConvNeXtBlock) and self._fits(stacked.mlp):
            return _ConvNeXtBlock(stacked, self.leaves.get(f"{path}gamma"))
        if isinstance(module, Block) and self._fits(stacked.mlp):
            stacked.mlp, stacked.norm2 = _NormMlp(stacked.norm2, stacked.mlp), nn.Identity()
        if isinstance(module, nn.Sequential) and self.kernels == "triton":
            for k, (before, layer) in enumerate(pairwise(stacked)):
                batch_norm = isinstance(layer, _Normalisation) and isinstance(layer.layer[0], nn.BatchNorm2d)
                if batch_norm and isinstance(before, _Elementwise) and isinstance(before.layer[0], nn.GELU):
                    stacked[k], layer.after_gelu = nn.Identity(), True
        if isinstance(module, Residual) and isinstance(stacked.fn, nn.Sequential):
            last = stacked.fn[-1]
            if isinstance(last, _Normalisation) and last.after_gelu:
                return _NormResidual(stacked.fn)
        return stacked

    def _fits(self, mlp: Mlp) -> bool:
        hidden, channels = mlp.fc1.leaves["weight"].shape[1:]
        return self.kernels == "c" or compiled.backend("triton").fits(channels, hidden)

    def _fold_own_parameters(self, module: nn.Module, path: str) -> None:
        """Parameters that a container uses itself, (..., C), become (..., T*C) just before its forward."""
        own = {name: self.leaves[path + name] for name, _ in module.named_parameters(recurse=False)}
        if not own:
            return
        for name in own:
            del module._parameters[name]

        def fold(container: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for name, leaf in own.items():
                value = leaf.movedim(0, -2).to(inputs[0].dtype)
                container.__dict__[name] = value.reshape(*value.shape[:-2], -1)

        def unfold(container: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for name in own:  # so that no step's graph outlives it
                del container.__dict__[name]

        module.register_forward_pre_hook(fold)
        module.register_forward_hook(unfold, always_call=True)

    def freeze(self, names: tuple[str, ...]) -> None:
        """Stop computing gradients of these tensors."""
        for name in names:
            self.leaves[name].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (T, B, classes) of images (T, B, C, H, W), or of (B, C, H, W) shared by all networks."""
        if images.ndim == 4:
            images = images.expand(self.count, *images.shape)
        return self.of_folded(images.permute(0, 2, 3, 4, 1).reshape(-1, *images.shape[3:], images.shape[1]))

    def of_folded(self, images: Tensor) -> Tensor:
        """Logits (T, B, classes) of images (T*C, H, W, B), as they lie in memory."""
        logits = self.network(images.permute(3, 0, 1, 2))  # (B, T*K)
        return logits.reshape(len(logits), self.count, -1).transpose(0, 1)

    def backward(self, loss: Tensor) -> None:
        """Set `gradient` to the derivative of a scalar, usually the sum of the T networks' losses."""
        trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        views = self.spec.unpack(self.gradient)
        torch._foreach_copy_([views[name] for name in trained], torch.autograd.grad(loss, list(trained.values())))

    def calibrate(self, batches: list[Tensor]) -> None:
        """Set the running statistics of every BatchNorm to the mean of the batches' statistics."""
        layers = [m for m in self.modules() if isinstance(m, _Normalisation) and "running_mean" in m.leaves]
        if not layers:
            return
        self.train()
        for number, batch in enumerate(batches, 1):
            for layer in layers:
                layer.calibrating = number
            with torch.no_grad():
                self(batch)
        for layer in layers:
            layer.calibrating = 0
