"""The seam `Networks`: T networks of one architecture, trained and evaluated as one module.

`networks_for` chooses among three forms with one interface:

- `BatchedNetworks` (`batched_networks.py`), for images: the networks' channels side by side, compiled kernels;
- `StackedNetworks`, for sequences: `torch.vmap` over the rows of the weight matrix;
- `LoopNetworks`, for any module (`training.engine = "loop"`): one network after the other.

Networks do not interact: one that diverges does not affect the others.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from weightscope._util.seeding import Purpose, kept_generators, seed_generators, torch_seed
from weightscope.errors import UsageError
from weightscope.networks.layers import DropPath
from weightscope.networks.sequences import TokenEmbedding, check_tokens
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.kernels.functions import Kernels

DEFAULT_TILE = 32  # networks, on a CPU
USE_LOOP = 'use training.engine = "loop", which trains any network, one at a time'


class Networks(nn.Module):
    """T networks of one architecture.

    Attributes:
        weights: (T, D) float32, one row per network in the order of `spec`; parameters are views of it.
        gradient: (T, D) float32, filled by `backward`; zero for what is not trained.
        spec: the `WeightSpec` of one network.
        leaves: name -> tensor (T, ...), views of `weights`.
        kernels: the backend that computes them.
        drop_paths: L, how many DropPath layers one network has.

    Args:
        template: a module of the architecture; its weights are not used.
        count: T.
        device: of all tensors.
    """

    kernels: Kernels = "torch"
    drop_paths: int = 0

    def __init__(self, template: nn.Module, count: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.count: int = count
        self.spec = WeightSpec.of(template)
        self.weights = torch.zeros(count, self.spec.size, device=device)
        self.gradient = torch.zeros_like(self.weights)
        self.leaves: dict[str, Tensor] = {
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
        """Logits (T, B, classes) of images (T, B, C, H, W), or of (B, C, H, W) shared by all networks.

        Of tokens (T, B, n), or (B, n) shared by all, they are (T, B, n, v).
        """
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
    recipe: Recipe,
    template: nn.Module,
    ids: Sequence[int],
    device: torch.device | str = "cpu",
    kernels: Kernels = "torch",
) -> Networks:
    """Networks `ids` of a recipe as one.

    Args:
        recipe: its engine, data and root seed.
        template: a module of the architecture; its weights are not used.
        ids: indices of the T networks in their population.
        device: of all tensors.
        kernels: the backend, see `kernels/functions.py`.

    Raises:
        UsageError: if the recipe's engine cannot train the module.
    """
    if recipe.training.engine == "loop":
        seeds = [torch_seed(recipe.population.seed, k, Purpose.FORWARD) for k in ids]
        return LoopNetworks(template, len(ids), device, seeds=seeds)
    if isinstance(recipe.network, OwnNetworkConfig):  # its constants, too
        template = template.to(device)
    if recipe.data.stacked:
        return StackedNetworks(template, len(ids), device)
    from weightscope.training.batched_networks import BatchedNetworks  # which imports this module

    return BatchedNetworks(template, len(ids), device, kernels=kernels)


class StackedNetworks(Networks):
    """Networks for sequences as one function of their stacked weights, by `torch.vmap`; tied parameters stay tied.

    `BatchedNetworks` runs a module's forward once on activations whose channel axis holds all networks. Code that cuts
    its channels into parts, as Mamba's does, cannot run on such an axis. Here every tensor has an axis of its own for
    the networks, which the forward code does not see.

    Raises:
        UsageError: if the module keeps running statistics.
    """

    def __init__(self, template: nn.Module, count: int, device: torch.device | str = "cpu") -> None:
        super().__init__(template, count, device)
        for tensor in self.spec:
            if tensor.role == "statistic":
                raise UsageError(f"`{tensor.name}`, a buffer, cannot be batched; {USE_LOOP}")
        self.network = copy.deepcopy(template)
        for name, buffer in template.named_buffers():  # constants that are not stored
            path, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(path), last, buffer.to(device))
        embeddings = [layer for layer in self.network.modules() if isinstance(layer, TokenEmbedding)]
        for layer in embeddings:
            layer.checks = False  # the host cannot read one network's tokens; `forward` checks those of all
        self._vocabulary = min((layer.num_embeddings for layer in embeddings), default=None)
        self._draws: dict[str, Tensor] = {}  # (T, v) each

    def drop_tokens(self, draws: Tensor) -> None:
        """Set the uniform numbers (T, v) of embeddings with dropout."""
        layers = self.network.named_modules()
        self._draws = {
            f"{n}.draws": draws for n, layer in layers if isinstance(layer, TokenEmbedding) and layer.dropout
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (T, B, n, v) of tokens (T, B, n), or of (B, n) shared by all networks.

        Raises:
            UsageError: if a token is outside the vocabulary.
        """
        if self._vocabulary is not None:
            check_tokens(tokens, self._vocabulary)

        def one(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
            found: Tensor = functional_call(self.network, weights, (tokens,))
            return found

        # the fused attention of a CPU has no batching rule, and would run in a loop
        with sdpa_kernel(SDPBackend.MATH):
            given = self.leaves | self._draws if self.training else self.leaves
            logits: Tensor = torch.vmap(one, (0, 0 if tokens.ndim == 3 else None))(given, tokens)
        return logits


class LoopNetworks(Networks):
    """T plain modules, copies of the template; each runs its own forward and backward pass.

    Args:
        template: see `Networks`.
        count: T.
        device: of all tensors.
        seeds: one seed per network. The n-th forward pass of network t in training mode sees the global generators of
            torch, NumPy and Python seeded with `seeds[t] + n`, so that dropout does not depend on the other networks.

    Raises:
        UsageError: if a weight is not float32.
    """

    def __init__(
        self, template: nn.Module, count: int, device: torch.device | str = "cpu", *, seeds: Sequence[int]
    ) -> None:
        super().__init__(template, count, device)
        self.device, self.seeds, self.passes = torch.device(device), list(seeds), 0
        self.networks = nn.ModuleList(copy.deepcopy(template).to(device) for _ in range(count))
        self._drop_paths = [[m for m in network.modules() if isinstance(m, DropPath)] for network in self.networks]
        self.drop_paths: int = len(self._drop_paths[0])
        self.parameters_of: list[dict[str, nn.Parameter]] = []
        for row, network in zip(self.weights, self.networks, strict=True):
            parameters = dict(network.named_parameters())
            tensors = {**dict(network.named_buffers()), **parameters}
            for name, view in self.spec.unpack(row).items():
                if tensors[name].dtype != torch.float32:
                    raise UsageError(f"`{name}`: expected float32 weights, found {tensors[name].dtype}")
                tensors[name].data = view
            self.parameters_of.append(parameters)

    def freeze(self, names: tuple[str, ...]) -> None:
        """Stop computing gradients of these tensors."""
        for parameters in self.parameters_of:
            for name in names:
                if name in parameters:
                    parameters[name].requires_grad_(False)

    def drop(self, draws: Tensor | None) -> None:
        """Set the uniform numbers (T, B, L) of the L DropPath layers, in the order of each network's modules."""
        for t, layers in enumerate(self._drop_paths):
            for at, layer in enumerate(layers):
                layer.draws = None if draws is None else draws[t, :, at]

    def drop_tokens(self, draws: Tensor) -> None:
        """Set the uniform numbers (T, v) of embeddings with dropout."""
        for network, numbers in zip(self.networks, draws, strict=True):
            for layer in network.modules():
                if isinstance(layer, TokenEmbedding) and layer.dropout:
                    layer.draws = numbers

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of all networks, see `Networks.forward`."""
        own = 5 if inputs.is_floating_point() else 3
        parts = inputs if inputs.ndim == own else inputs.expand(self.count, *inputs.shape)
        logits = []
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), kept_generators():
            for seed, network, part in zip(self.seeds, self.networks, parts, strict=True):
                seed_generators(seed + self.passes)
                logits.append(network(part))
        self.passes += self.training
        self._store_buffers()
        return torch.stack(logits)

    def submodules(self, path: str) -> list[nn.Module]:
        """The submodule of each network."""
        return [network.get_submodule(path) for network in self.networks]

    @torch.no_grad()
    def _store_buffers(self) -> None:
        """Copy buffers that a forward pass replaced, rather than changed in place, into `weights`."""
        for row, network in zip(self.weights, self.networks, strict=True):
            views = self.spec.unpack(row)
            for name, buffer in network.named_buffers():
                if name in views and buffer.data_ptr() != views[name].data_ptr():
                    buffer.data = views[name].copy_(buffer)

    def backward(self, loss: Tensor) -> None:
        """Set `gradient`, see `Networks.backward`.

        Raises:
            UsageError: if the loss does not depend on a trained parameter; names it.
        """
        views = self.spec.unpack(self.gradient)
        trained = [
            (views[name][t], name, parameter)
            for t, parameters in enumerate(self.parameters_of)
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]
        gradients = torch.autograd.grad(loss, [parameter for _, _, parameter in trained], allow_unused=True)
        for (view, name, _), gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                raise UsageError(f"`{name}` does not affect the loss; freeze it (training.frozen) or remove it")
            view.copy_(gradient)

    def calibrate(self, batches: list[Tensor]) -> None:
        """Set the running statistics of every BatchNorm to the mean of the batches' statistics."""
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
