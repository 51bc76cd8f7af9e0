"""The seam `Networks`: T networks of one architecture, trained and evaluated as one module.

`networks_for` chooses among three forms with one interface:

- `BatchedNetworks`, for images: the networks' channels side by side, with the layers of `batched_layers.py`;
- `StackedNetworks`, for sequences: `torch.vmap` over the rows of the weight matrix;
- `LoopNetworks`, for any module (`training.engine = "loop"`): one network after the other.

Networks do not interact: one that diverges does not affect the others.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.torch_random import seeded
from weightscope.errors import UsageError
from weightscope.networks.convmixer import Residual
from weightscope.networks.convnext import ConvNeXtBlock
from weightscope.networks.layers import Attention, DropPath
from weightscope.networks.sequences import MambaMixer, TokenEmbedding
from weightscope.networks.vit import Block
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.batched_layers import (
    BATCHED_LAYERS,
    BatchedDropPath,
    BatchedLayer,
    Conv2d,
    Elementwise,
    Normalisation,
    filters_of,
    rows_of,
    unrows,
)
from weightscope.training.kernels import functions
from weightscope.training.kernels.functions import Kernels, Pair

Device = torch.device | str
USE_LOOP = 'use training.engine = "loop", which trains any network, one at a time'


class Networks(nn.Module):
    """T networks of one architecture; the weights of the template are not used."""

    kernels: Kernels = "torch"
    drop_paths: int = 0  # L, how many DropPath layers one network has
    input_axes: int = 1  # of one input, `Task.input_axes`; inputs of each network have two more, T and B

    def __init__(self, template: nn.Module, count: int, device: Device = "cpu") -> None:
        super().__init__()
        self.count: int = count
        self.spec = WeightSpec.of(template)
        self.weights = torch.zeros(count, self.spec.size, device=device)  # (T, D), rows in the order of `spec`
        self.gradient = torch.zeros_like(self.weights)  # (T, D), filled by `backward`; zero for what is not trained
        self.leaves: dict[str, Tensor] = {  # name -> (T, ...), views of `weights`
            name: view.detach().requires_grad_(self.spec[name].role == "parameter")
            for name, view in self.spec.unpack(self.weights).items()
        }

    def freeze(self, names: tuple[str, ...]) -> None:
        """Stop computing gradients of these tensors."""
        for name in names:
            self.leaves[name].requires_grad_(False)

    def drop(self, draws: Tensor | None) -> None:
        """Set the uniform numbers (T, B, L) of the L DropPath layers, in the order of the network's modules."""

    def drop_tokens(self, draws: Tensor) -> None:
        """Set the uniform numbers (T, v) of embeddings with dropout."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (T, B, K) of images (T, B, C, H, W), (T, B, n, v) of tokens (T, B, n); without T, shared by all."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Set `gradient` to the gradient of a scalar, usually the sum of the T networks' losses."""
        trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        views = self.spec.unpack(self.gradient)
        torch._foreach_copy_([views[name] for name in trained], torch.autograd.grad(loss, list(trained.values())))

    def calibrate(self, batches: list[Tensor]) -> None:
        """Set the running statistics of every BatchNorm to the mean of the batches' statistics."""

    def submodules(self, path: str) -> list[nn.Module]:
        """What computes the submodule of this name: one module for all networks, or one for each."""
        raise NotImplementedError

    def of_each(self, outputs: list[Tensor]) -> Tensor:
        """The outputs (T, B, d) of all networks, given those of `submodules`."""
        return torch.stack(outputs)


def networks_for(
    recipe: Recipe, template: nn.Module, ids: Sequence[int], device: Device = "cpu", kernels: Kernels = "torch"
) -> Networks:
    """Networks `ids` of a recipe as one."""
    nets: Networks
    own = isinstance(recipe.network, OwnNetworkConfig)
    if recipe.training.engine == "loop":  # only users' networks draw random numbers by themselves
        seeds = [torch_seed(recipe.population.seed, k, Purpose.FORWARD) for k in ids] if own else None
        nets = LoopNetworks(template, len(ids), device, seeds=seeds)
    else:
        template = template.to(device) if own else template  # its constants, too
        if recipe.data.stacked:
            nets = StackedNetworks(template, len(ids), device, kernels=kernels)
        else:
            nets = BatchedNetworks(template, len(ids), device, kernels=kernels)
    nets.input_axes = recipe.data.input_axes
    return nets


def copied(network: nn.Module) -> nn.Module:
    """A deep copy, also of layers whose weights a hook computes from others before each pass, as pruning does."""
    for path, module in network.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                if not module._forward_pre_hooks:
                    where = f"`{name}` of `{path}`" if path else f"`{name}`"
                    raise UsageError(f"{where} is computed from weights when the network is built; do so in `forward`")
                setattr(module, name, value.detach())
    return copy.deepcopy(network)


class StackedNetworks(Networks):
    """Networks for sequences as one function of their stacked weights, by `torch.vmap`; tied parameters stay tied.

    Every tensor has an axis of its own for the networks, which the forward code does not see: code that cuts its
    channels into parts, as Mamba's does, cannot run on a channel axis that holds all networks.
    """

    def __init__(self, template: nn.Module, count: int, device: Device = "cpu", *, kernels: Kernels = "torch") -> None:
        super().__init__(template, count, device)
        self.kernels = kernels
        for tensor in self.spec:
            if tensor.role == "statistic":
                raise UsageError(f"`{tensor.name}`, a buffer, cannot be batched; {USE_LOOP}")
        self.network = copied(template)
        for name, buffer in template.named_buffers():  # constants that are not stored
            path, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(path), last, buffer.to(device))
        for layer in self.network.modules():
            if isinstance(layer, TokenEmbedding):
                layer.checks = False  # the host cannot read one network's tokens
            if isinstance(layer, MambaMixer) and kernels == "c":
                layer.kernel = functions.scan, functions.scan_backward
        self._draws: dict[str, Tensor] = {}  # (T, v) each

    def drop_tokens(self, draws: Tensor) -> None:
        layers = self.network.named_modules()
        dropping = [name for name, layer in layers if isinstance(layer, TokenEmbedding) and layer.dropout]
        self._draws = {f"{name}.draws": draws for name in dropping}

    def forward(self, tokens: Tensor) -> Tensor:
        def one(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
            found: Tensor = functional_call(self.network, weights, (tokens,))
            return found

        # the fused attention of a CPU has no batching rule, and would run in a loop
        with sdpa_kernel(SDPBackend.MATH):
            given = self.leaves | self._draws if self.training else self.leaves
            logits: Tensor = torch.vmap(one, (0, 0 if tokens.ndim == self.input_axes + 2 else None))(given, tokens)
        return logits


class LoopNetworks(Networks):
    """T plain modules, copies of the template; each runs its own forward and backward pass.

    In the n-th forward pass in training mode, network t draws random numbers from a generator with the seed
    `seeds[t] + n`, so that dropout does not depend on the other networks.
    """

    def __init__(self, template: nn.Module, count: int, device: Device = "cpu", *, seeds: Sequence[int] | None) -> None:
        super().__init__(template, count, device)
        self.seeds, self.passes = seeds, 0
        self.networks = nn.ModuleList(copied(template).to(device) for _ in range(count))
        self._drop_paths = [[m for m in network.modules() if isinstance(m, DropPath)] for network in self.networks]
        self.drop_paths: int = len(self._drop_paths[0])
        self.parameters_of: list[dict[str, nn.Parameter]] = []
        for row, network in zip(self.weights, self.networks, strict=True):
            parameters = dict(network.named_parameters())
            tensors = {**dict(network.named_buffers()), **parameters}
            for name, view in self.spec.unpack(row).items():
                if tensors[name].dtype != row.dtype:
                    raise UsageError(f"`{name}`: expected float32 weights, found {tensors[name].dtype}")
                tensors[name].data = view
            self.parameters_of.append(parameters)

    def freeze(self, names: tuple[str, ...]) -> None:
        for parameters in self.parameters_of:
            for name in names:
                if name in parameters:
                    parameters[name].requires_grad_(False)

    def drop(self, draws: Tensor | None) -> None:
        for t, layers in enumerate(self._drop_paths):
            for at, layer in enumerate(layers):
                layer.draws = None if draws is None else draws[t, :, at]

    def drop_tokens(self, draws: Tensor) -> None:
        for network, numbers in zip(self.networks, draws, strict=True):
            for layer in network.modules():
                if isinstance(layer, TokenEmbedding) and layer.dropout:
                    layer.draws = numbers

    def forward(self, inputs: Tensor) -> Tensor:
        parts = inputs if inputs.ndim == self.input_axes + 2 else inputs.expand(self.count, *inputs.shape)
        logits = []
        for t, (network, part) in enumerate(zip(self.networks, parts, strict=True)):
            with nullcontext() if self.seeds is None else seeded(self.seeds[t] + self.passes):
                logits.append(network(part))
        self.passes += self.training
        with torch.no_grad():
            for row, network in zip(self.weights, self.networks, strict=True):
                views = self.spec.unpack(row)
                for name, buffer in network.named_buffers():  # that the pass replaced, rather than changed in place
                    if name in views and buffer.data_ptr() != views[name].data_ptr():
                        buffer.data = views[name].copy_(buffer)
        return torch.stack(logits)

    def submodules(self, path: str) -> list[nn.Module]:
        return [network.get_submodule(path) for network in self.networks]

    def backward(self, loss: Tensor) -> None:
        views = self.spec.unpack(self.gradient)
        named = [(t, name, p) for t, each in enumerate(self.parameters_of) for name, p in each.items()]
        trained = [(views[name][t], name, p) for t, name, p in named if p.requires_grad]
        gradients = torch.autograd.grad(loss, [p for _, _, p in trained], allow_unused=True)
        for (view, name, _), gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                raise UsageError(f"`{name}` does not affect the loss; freeze it (training.frozen) or remove it")
            view.copy_(gradient)

    def calibrate(self, batches: list[Tensor]) -> None:
        self.train()  # a network may keep some in evaluation mode
        layers = [m for m in self.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]
        if not layers:
            return
        self.eval()
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative, equally weighted average
            layer.train()
        with torch.no_grad():
            for batch in batches:
                self(batch)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


class _NormMlp(nn.Module):
    """LayerNorm and the MLP after it as one compiled function; the norm itself becomes the identity."""

    def __init__(self, norm: Normalisation, fc1: Any, fc2: Any) -> None:
        super().__init__()
        self.weights: tuple[Pair, Pair, Pair] = norm.pair, fc1.pair, fc2.pair
        self.count: int = norm.count
        self.eps: float = norm.layer.eps

    def forward(self, x: Tensor) -> Tensor:
        return unrows(functions.norm_mlp(rows_of(x, self.count), *self.weights, self.eps), x)


class _Blocks(nn.Module):
    """Consecutive blocks of equal sizes as one compiled function of their layers' weights."""

    def __init__(self, function: Any, blocks: list[list[tuple[Pair, Tensor | None]]], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.blocks = blocks  # weight and bias (T, ...) of the layers of each, and the layer scale (T, C) after it

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What consecutive blocks must have in common."""
        return self.function, *self.options.items(), *(pair[0].shape for pair, _ in self.blocks[0])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(
            x, tuple(tuple(_scaled(*layer, x.dtype) for layer in block) for block in self.blocks), **self.options
        )
        return found


def _scaled(layer: Pair, gamma: Tensor | None, dtype: torch.dtype) -> Pair:
    """Weight and bias of a layer and its layer scale: gamma (W a + b) = (gamma W) a + gamma b."""
    if gamma is None:
        return layer
    weight, bias, gamma = (value.to(dtype) for value in (*layer, gamma))
    return weight * gamma[:, :, None], bias * gamma


def _convnext(x: Tensor, blocks: tuple[functions.Block, ...], eps: float) -> Tensor:
    blocks = tuple((filters_of(*filters), *layers) for filters, *layers in blocks)
    return functions.convnext_blocks(x.permute(1, 2, 3, 0), blocks, eps).permute(3, 0, 1, 2)


def _transformer(x: Tensor, blocks: tuple[functions.Block, ...], heads: int, eps: float) -> Tensor:
    return functions.transformer_blocks(x.permute(2, 1, 0), blocks, heads, eps).permute(2, 1, 0)


class _NormResidual(nn.Module):
    """`x -> fn(x) + x` where the last layer of `fn` is a BatchNorm after GELU, which adds x."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first: Any = layers[:-1]
        self.norm: Any = layers[-1]
        before: list[Any] = [layer for layer in self.first.children() if not isinstance(layer, nn.Identity)]
        conv = before[0]
        fits = len(before) == 1 and isinstance(conv, Conv2d) and conv.depthwise
        # A list, so that the convolution is registered once, in `first`; one function computes it and the norm.
        self._mixing = before if fits else []

    def forward(self, x: Tensor) -> Tensor:
        if not (self._mixing and self.norm.training and not self.norm.calibrating):
            return self.norm(self.first(x), x)
        conv, norm, inner = self._mixing[0], self.norm, x.permute(1, 2, 3, 0)
        gain, shift = (value.reshape(-1) for value in norm.pair)
        eps, dilation, filters = norm.layer.eps, conv.layer.dilation[0], filters_of(*conv.pair)
        y = functions.convmixer_mixing(inner, filters, (gain, shift), eps, dilation=dilation)
        return y.permute(3, 0, 1, 2)


_CONTAINERS = (nn.Module, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict)


class BatchedNetworks(Networks):
    """T networks of one architecture, their channels side by side.

    The module's own forward code runs unchanged on an axis of T*C channels, those of all networks: images
    (B, T*C, H, W), tokens (B, N, T*C). Only the leaf layers, which mix channels, are replaced by batched layers;
    residual additions, elementwise functions and pooling give the same result. `batched_layers.py` describes the
    memory layout.
    """

    def __init__(self, template: nn.Module, count: int, device: Device = "cpu", *, kernels: Kernels = "torch") -> None:
        super().__init__(template, count, device)
        if kernels not in get_args(Kernels) or (kernels == "c" and torch.device(device).type != "cpu"):
            raise UsageError(f"kernels: expected 'torch', 'c' on a CPU or 'inductor', found {kernels!r} on {device}")
        self.kernels: Kernels = kernels
        first: dict[int, str] = {}
        named = [*template.named_modules(remove_duplicate=False), *template.named_parameters(remove_duplicate=False)]
        for name, item in named:  # what has two names would become independent weights
            if first.setdefault(id(item), name) != name:
                raise UsageError(f"`{first[id(item)]}` and `{name}` are the same and cannot be batched; {USE_LOOP}")
        self.network = self._batch(copied(template), "")
        self._drop_paths = [layer for layer in self.network.modules() if isinstance(layer, BatchedDropPath)]
        self.drop_paths: int = len(self._drop_paths)

    def _batch(self, module: nn.Module, path: str) -> nn.Module:
        """Replace the leaf layers of `module` by batched ones, and fused blocks where the kernels have them."""
        batched = module
        if type(module) in BATCHED_LAYERS:
            batched = self._batched_layer(module, path)
        elif next(k for k in type(module).__mro__ if k.__module__.startswith("torch.")) not in _CONTAINERS:
            raise UsageError(f"`{path.rstrip('.')}` ({type(module).__name__}) has no batched version; {USE_LOOP}")
        else:
            self._stack_own_parameters(module, path)
        for name, child in module.named_children():
            setattr(batched, name, self._batch(child, f"{path}{name}."))
        return self._fused(module, batched, path) if self.kernels == "c" else batched

    def _batched_layer(self, module: nn.Module, path: str) -> BatchedLayer:
        if module._forward_pre_hooks or module._forward_hooks:
            hooked = f"`{path.rstrip('.')}` ({type(module).__name__}) has hooks, such as those of pruning"
            raise UsageError(f"{hooked}, and cannot be batched; {USE_LOOP}")
        try:
            layer = BATCHED_LAYERS[type(module)](module, self.count)
        except UsageError as error:
            raise UsageError(f"`{path.rstrip('.')}`: {error}; {USE_LOOP}") from None
        layer.kernels = self.kernels
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        layer.leaves = {name: self.leaves[path + name] for name, value in own if value.is_floating_point()}
        return layer

    def _fused(self, module: nn.Module, batched: nn.Module, path: str) -> nn.Module:
        """One module in place of several batched layers that one kernel computes."""
        # exact types: a derived class may have a forward of its own
        parts: Any = batched
        if type(module) in (ConvNeXtBlock, Block) and type(parts.mlp.fc1.layer) is nn.Linear:
            mlp, dropped = parts.mlp, any(isinstance(layer, BatchedDropPath) for layer in module.children())
            if type(module) is ConvNeXtBlock:
                if not dropped:
                    scales = {mlp.fc2: f"{path}gamma"}
                    weights = self._weights((parts.conv_dw, parts.norm, mlp.fc1, mlp.fc2), scales)
                    return _Blocks(_convnext, [weights], eps=parts.norm.layer.eps)
                parts.mlp, parts.norm = _NormMlp(parts.norm, mlp.fc1, mlp.fc2), nn.Identity()
            else:
                attn = parts.attn
                if type(attn.layer) is Attention and not dropped and f"{path}skip_scale" not in self.leaves:
                    scales = {attn.proj: f"{path}ls1.gamma", mlp.fc2: f"{path}ls2.gamma"}
                    layers = parts.norm1, attn.qkv, attn.proj, parts.norm2, mlp.fc1, mlp.fc2
                    weights = self._weights(layers, scales)
                    return _Blocks(_transformer, [weights], heads=attn.layer.heads, eps=parts.norm1.layer.eps)
                parts.mlp, parts.norm2 = _NormMlp(parts.norm2, mlp.fc1, mlp.fc2), nn.Identity()
        if type(module) is nn.Sequential and isinstance(batched, nn.Sequential):
            sizes = {block.sizes if isinstance(block, _Blocks) else None for block in parts}
            if len(sizes) == 1 and None not in sizes:
                blocks = [block for each in parts for block in each.blocks]
                return _Blocks(parts[0].function, blocks, **parts[0].options)
            for k, (before, layer) in enumerate(pairwise(batched)):
                gelu = isinstance(before, Elementwise) and repr(before.layer) == repr(nn.GELU())
                if gelu and isinstance(layer, Normalisation) and isinstance(layer.layer, nn.BatchNorm2d):
                    layer.after_gelu = True
                    batched[k] = nn.Identity()
        if type(module) is Residual and isinstance(parts.fn, nn.Sequential):
            last = parts.fn[-1]
            if isinstance(last, Normalisation) and last.after_gelu:
                return _NormResidual(parts.fn)
        return batched

    def _weights(self, layers: Sequence[Any], scales: dict[Any, str]) -> list[tuple[Pair, Tensor | None]]:
        return [(layer.pair, self.leaves.get(scales.get(layer, ""))) for layer in layers]

    def _stack_own_parameters(self, module: nn.Module, path: str) -> None:
        """Parameters that a container uses itself, (..., C), become (..., T*C) just before its forward."""
        for name, value in module.named_buffers(recurse=False):
            if value.is_floating_point():
                raise UsageError(f"`{path}{name}`, a buffer of {type(module).__name__}, cannot be batched; {USE_LOOP}")
        own = {name: self.leaves[path + name] for name, _ in module.named_parameters(recurse=False)}
        if any(leaf.ndim < 2 for leaf in own.values()):
            raise UsageError(f"`{path}{next(iter(own))}` is a scalar, which cannot be batched; {USE_LOOP}")
        if not own:
            return
        for name in own:
            del module._parameters[name]

        def stack(container: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for name, leaf in own.items():
                value = leaf.movedim(0, -2).to(inputs[0].dtype)
                container.__dict__[name] = value.reshape(*value.shape[:-2], -1)

        def unstack(container: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for name in own:  # so that no step's graph outlives it
                container.__dict__.pop(name, None)

        module.register_forward_pre_hook(stack)
        module.register_forward_hook(unstack, always_call=True)

    def drop(self, draws: Tensor | None) -> None:
        for at, layer in enumerate(self._drop_paths):
            layer.draws = None if draws is None else draws[:, :, at]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (T, B, classes) of images (T, B, C, H, W), or of (B, C, H, W) shared by all networks."""
        if images.ndim == 4:
            images = images.expand(self.count, *images.shape)
        inner = images.permute(0, 2, 3, 4, 1).reshape(-1, *images.shape[3:], images.shape[1])  # (T*C, H, W, B)
        logits = self.network(inner.permute(3, 0, 1, 2))  # (B, T*K)
        return logits.reshape(len(logits), self.count, -1).transpose(0, 1)

    def submodules(self, path: str) -> list[nn.Module]:
        return [self.network.get_submodule(path)]

    def of_each(self, outputs: list[Tensor]) -> Tensor:
        """(T, B, d) of one output (B, T*d)."""
        return outputs[0].unflatten(1, (self.count, -1)).transpose(0, 1)

    def calibrate(self, batches: list[Tensor]) -> None:
        layers = [m for m in self.modules() if isinstance(m, Normalisation) and "running_mean" in m.leaves]
        if not layers:
            return
        self.train()
        self.drop(None)
        for layer in layers:
            layer.calibrating = 1
        with torch.no_grad():
            for batch in batches:
                self(batch)
        for layer in layers:
            layer.calibrating = 0
