"""Many networks of one architecture as one function of their stacked weights, by `torch.vmap`.

`BatchedNetworks` runs a module's forward once on activations whose channel axis holds all networks. Code that cuts its
channels into parts, as Mamba's does, cannot run on such an axis. Here every tensor has an axis of its own for the
networks, which the forward code does not see. Networks do not interact: one that diverges does not affect the others.
"""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope.errors import UsageError
from weightscope.networks.sequences import TokenEmbedding, check_tokens
from weightscope.spec import WeightSpec
from weightscope.training.batched_networks import USE_LOOP
from weightscope.training.kernels.functions import Kernels


class StackedNetworks(nn.Module):
    """T networks for sequences with the interface of `BatchedNetworks`; tied parameters stay tied.

    Attributes:
        weights: (T, D) float32, one row per network in the order of `spec`; parameters are views of it.
        gradient: (T, D) float32, filled by `backward`; zero for what is not trained.
        spec: the `WeightSpec` of one network.
        drop_paths: 0.

    Args:
        template: a module of the architecture; its weights are not used.
        count: T.
        device: of all tensors.

    Raises:
        UsageError: if the module keeps running statistics.
    """

    kernels: Kernels = "torch"
    drop_paths: int = 0

    def __init__(self, template: nn.Module, count: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.count: int = count
        self.spec = WeightSpec.of(template)
        for tensor in self.spec:
            if tensor.role == "statistic":
                raise UsageError(f"`{tensor.name}`, a buffer, cannot be batched; {USE_LOOP}")
        self.weights = torch.zeros(count, self.spec.size, device=device)
        self.gradient = torch.zeros_like(self.weights)
        self.leaves = {
            name: view.detach().requires_grad_() for name, view in self.spec.unpack(self.weights).items()
        }  # (T, ...) each
        self.network = copy.deepcopy(template)
        for name, buffer in template.named_buffers():  # constants that are not stored
            _set_buffer(self.network, name, buffer.to(device))
        embeddings = [layer for layer in self.network.modules() if isinstance(layer, TokenEmbedding)]
        for layer in embeddings:
            layer.checks = False  # the host cannot read one network's tokens; `forward` checks those of all
        self._vocabulary = min((layer.num_embeddings for layer in embeddings), default=None)
        self._draws: dict[str, Tensor] = {}  # (T, v) each

    def freeze(self, names: tuple[str, ...]) -> None:
        """Stop computing gradients of these tensors."""
        for name in names:
            self.leaves[name].requires_grad_(False)

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

    def backward(self, loss: Tensor) -> None:
        """Set `gradient` to the gradient of a scalar, usually the sum of the T networks' losses."""
        trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        views = self.spec.unpack(self.gradient)
        torch._foreach_copy_([views[name] for name in trained], torch.autograd.grad(loss, list(trained.values())))


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, value)
