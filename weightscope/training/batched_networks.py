"""Many networks of one architecture as one module.

`StackedNetworks` holds T networks as a matrix (T, D) of weights in `WeightSpec` order and runs them together.
The plain module's own forward code runs unchanged on *folded* activations, whose channel axis holds T networks
times C channels: images (B, T*C, H, W), tokens (B, N, T*C). Only the leaf layers, which mix channels, are
exchanged for stacked twins; residual additions, non-linearities and pooling do not see the difference.

`twins.py` says how they lie in memory. Nothing of one network enters another: a network that diverges keeps its NaN to
itself.
"""

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from weightscope.errors import UsageError
from weightscope.networks.convmixer import Residual
from weightscope.networks.convnext import ConvNeXtBlock
from weightscope.networks.layers import Mlp
from weightscope.networks.vit import Block
from weightscope.spec import WeightSpec
from weightscope.training.batched_layers import (
    TWINS,
    Elementwise,
    Normalisation,
    filters_of,
    given,
    rows_of,
    unrows,
    weight_and_bias,
)
from weightscope.training.kernels import functions


class _NormMlp(nn.Module):
    """LayerNorm and the MLP after it as one compiled function; the norm itself becomes the identity."""

    def __init__(self, norm: Normalisation, mlp: Mlp) -> None:
        super().__init__()
        self.weights = tuple(weight_and_bias(layer) for layer in (norm, mlp.fc1, mlp.fc2))
        self.count, self.eps, self.kernels = norm.count, norm.layer[0].eps, norm.kernels

    def forward(self, x: Tensor) -> Tensor:
        weights = (given(pair, x, self.kernels) for pair in self.weights)
        return unrows(functions.norm_mlp(rows_of(x, self.count), *weights, self.eps, kernels=self.kernels), x)


class _ConvNeXtBlock(_NormMlp):
    """A whole block as one compiled function."""

    def __init__(self, block: ConvNeXtBlock, gamma: Tensor | None) -> None:
        super().__init__(block.norm, block.mlp)
        self.filters, self.gamma = weight_and_bias(block.conv_dw), gamma

    def forward(self, x: Tensor) -> Tensor:
        filters, norm, first, second = (given(pair, x, self.kernels) for pair in (self.filters, *self.weights))
        if self.gamma is not None:  # gamma (W2 a + b2) = (gamma W2) a + gamma b2
            gamma = self.gamma.to(second[0].dtype)
            second = second[0] * gamma[:, :, None], second[1] * gamma
        inner = x.permute(1, 2, 3, 0)
        y = functions.convnext_block(inner, filters_of(*filters), norm, first, second, self.eps, kernels=self.kernels)
        return y.permute(3, 0, 1, 2)


class _NormResidual(nn.Module):
    """`x -> fn(x) + x` where the last layer of `fn` is a normalisation that adds."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.norm = layers[:-1], layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x), x)


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
        kernels: "torch"; or "c" (float32 or float64 on a CPU) or "triton" (on a GPU) for those of `functions.py`.

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
        twin = TWINS.get(type(module))
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
                batch_norm = isinstance(layer, Normalisation) and isinstance(layer.layer[0], nn.BatchNorm2d)
                if batch_norm and isinstance(before, Elementwise) and isinstance(before.layer[0], nn.GELU):
                    stacked[k], layer.after_gelu = nn.Identity(), True
        if isinstance(module, Residual) and isinstance(stacked.fn, nn.Sequential):
            last = stacked.fn[-1]
            if isinstance(last, Normalisation) and last.after_gelu:
                return _NormResidual(stacked.fn)
        return stacked

    def _fits(self, mlp: Mlp) -> bool:
        hidden, channels = mlp.fc1.leaves["weight"].shape[1:]
        return self.kernels == "c" or functions.backend("triton").fits(channels, hidden)

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
        layers = [m for m in self.modules() if isinstance(m, Normalisation) and "running_mean" in m.leaves]
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
