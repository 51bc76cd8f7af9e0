"""Many networks of one architecture, run one after the other: the engine for modules without batched layers."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weightscope._util.seeding import kept_generators, seed_generators
from weightscope.errors import UsageError
from weightscope.networks.layers import DropPath
from weightscope.networks.sequences import TokenEmbedding
from weightscope.spec import WeightSpec
from weightscope.training.kernels.functions import Kernels


class LoopNetworks(nn.Module):
    """T plain modules with the interface of `BatchedNetworks`; each runs its own forward and backward pass.

    Attributes:
        weights: (T, D) float32, one row per network in the order of `spec`; parameters and statistics are views of it.
        gradient: (T, D) float32, filled by `backward`; zero for what is not trained.
        spec: the `WeightSpec` of one network.
        drop_paths: L, how many DropPath layers one network has.

    Args:
        template: a module of the architecture, copied T times; its weights are not used.
        count: T.
        device: of all tensors.
        seeds: one seed per network. The n-th forward pass of network t in training mode sees the global generators of
            torch, NumPy and Python seeded with `seeds[t] + n`, so that dropout does not depend on the other networks.

    Raises:
        UsageError: if a weight is not float32.
    """

    kernels: Kernels = "torch"

    def __init__(
        self, template: nn.Module, count: int, device: torch.device | str = "cpu", *, seeds: Sequence[int]
    ) -> None:
        super().__init__()
        self.count: int = count
        self.spec = WeightSpec.of(template)
        self.weights = torch.zeros(count, self.spec.size, device=device)
        self.gradient = torch.zeros_like(self.weights)
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

    def drop(self, draws: Tensor) -> None:
        """Set the uniform numbers (T, B, L) of the L DropPath layers, in the order of each network's modules."""
        for layers, numbers in zip(self._drop_paths, draws, strict=True):
            for at, layer in enumerate(layers):
                layer.draws = numbers[:, at]

    def drop_tokens(self, draws: Tensor) -> None:
        """Set the uniform numbers (T, v) of embeddings with dropout."""
        for network, numbers in zip(self.networks, draws, strict=True):
            for layer in network.modules():
                if isinstance(layer, TokenEmbedding) and layer.dropout:
                    layer.draws = numbers

    def forward(self, images: Tensor) -> Tensor:
        """Logits (T, B, classes) of images (T, B, C, H, W), or of (B, C, H, W) shared by all networks.

        Of tokens (T, B, n), or (B, n) shared by all, they are (T, B, n, v).
        """
        own = 5 if images.is_floating_point() else 3
        parts = images if images.ndim == own else images.expand(self.count, *images.shape)
        logits = []
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), kept_generators():
            for seed, network, part in zip(self.seeds, self.networks, parts, strict=True):
                seed_generators(seed + self.passes)
                logits.append(network(part))
        self.passes += self.training
        self._store_buffers()
        return torch.stack(logits)

    @torch.no_grad()
    def _store_buffers(self) -> None:
        """Copy buffers that a forward pass replaced, rather than changed in place, into `weights`."""
        for row, network in zip(self.weights, self.networks, strict=True):
            views = self.spec.unpack(row)
            for name, buffer in network.named_buffers():
                if name in views and buffer.data_ptr() != views[name].data_ptr():
                    buffer.data = views[name].copy_(buffer)

    def backward(self, loss: Tensor) -> None:
        """Set `gradient` to the gradient of a scalar, usually the sum of the T networks' losses.

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
