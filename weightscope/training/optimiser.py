"""AdamW over the weight matrix of many networks, and learning-rate schedules."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from weightscope.training.kernels import functions
from weightscope.training.kernels.functions import Kernels

_EPS = 1e-8  # added to the square root of the second moment; torch's default
_BLOCK = 1 << 14  # entries of a row whose squares are added in one go


class BatchedAdamW:
    """AdamW with decoupled weight decay for T networks at once, each with its own rates.

    Equal to `torch.optim.AdamW(model.parameters())` on each network alone: `m <- b1 m + (1 - b1) g`,
    `v <- b2 v + (1 - b2) g^2`, `w <- w - eta lambda w - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    Weights and gradient are (T, D), rates and decays (T,); weight decay is of what is `decayed` (D,),
    and what is frozen has gradient 0.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, Algorithm 2.
    """

    def __init__(
        self,
        weights: Tensor,
        gradient: Tensor,
        decayed: Tensor,
        learning_rate: Tensor,
        weight_decay: Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        kernels: Kernels = "torch",
    ) -> None:
        self.weights, self.gradient, self.decayed = weights, gradient, decayed
        self.rate, self.decay = learning_rate, weight_decay
        self.betas, self.kernels = betas, kernels
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)

    def scalars(self, step: int, factor: float) -> tuple[float, float, float]:
        """The arguments of `step` for step t = 1, 2, ...: `factor`, 1 / (1 - b1^t), 1 / sqrt(1 - b2^t)."""
        b1, b2 = self.betas
        return factor, 1 / (1 - b1**step), 1 / math.sqrt(1 - b2**step)

    @torch.no_grad()
    def step(self, scalars: Tensor, clip_norm: float = 0.0) -> None:
        """One update in place; only tensors change from step to step, so a CUDA graph can capture it."""
        clip = torch.ones_like(self.rate)
        if clip_norm > 0:
            clip = (clip_norm / (row_norms(self.gradient) + 1e-6)).clamp_(max=1.0)
        if self.kernels == "c":
            moments, rates = (self.first, self.second), (self.rate, self.decay)
            tensors = self.weights, self.gradient, moments, self.decayed, rates, clip, scalars
            functions.adamw(*tensors, self.betas, _EPS)
            return
        b1, b2 = self.betas
        factor, mean, root = scalars
        rate, g = (self.rate * factor)[:, None], self.gradient
        if clip_norm > 0:
            g.mul_(clip[:, None])
        self.first.lerp_(g, 1 - b1)
        self.second.mul_(b2).addcmul_(g, g, value=1 - b2)
        change = self.second.sqrt().mul_(root).add_(_EPS)
        torch.div(self.first, change, out=change)
        self.weights.addcmul_(self.weights, rate * self.decay[:, None] * self.decayed, value=-1)
        self.weights.addcmul_(rate * mean, change, value=-1)


def row_norms(matrix: Tensor) -> Tensor:
    """The Euclidean norm (T,) of each row (T, D), from those of its blocks: PyTorch's of 5,500,000 is off by 1.6e-4."""
    whole = matrix.shape[1] // _BLOCK * _BLOCK
    if whole == 0:
        return torch.linalg.vector_norm(matrix, dim=1)
    blocks = torch.linalg.vector_norm(matrix[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
    rest = torch.linalg.vector_norm(matrix[:, whole:], dim=1, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([blocks, rest], dim=1), dim=1)


def schedule_factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    """The factor in (0, 1] of the learning rate at the middle of a step, so that no step has rate 0.

    It rises linearly to 1 over the fraction `warmup` of the steps; then it stays ("constant"; also "plateau", where
    `Plateau` changes the rates), falls linearly to 0 ("triangular") or follows half a cosine to 0 ("cosine").
    """
    progress = (step + 0.5) / steps
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup)
    match schedule:
        case "constant" | "plateau":
            return 1.0
        case "triangular":
            return 1.0 - fall
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * fall))
    raise ValueError(f"expected schedule triangular, cosine, constant or plateau, found {schedule!r}")


class Plateau:
    """Learning rates (T,), each cut by a factor where the network's own loss has not improved for `patience` epochs."""

    def __init__(self, rates: np.ndarray, factor: float, patience: int) -> None:
        self.rates = np.array(rates, dtype=np.float64)
        optimisers = [torch.optim.SGD([torch.zeros(1)], lr=float(rate)) for rate in rates]
        self._each = [ReduceLROnPlateau(optimiser, factor=factor, patience=patience) for optimiser in optimisers]

    def step(self, losses: np.ndarray) -> np.ndarray:
        """The rates (T,) of the next epoch, after the losses (T,) of this one."""
        for scheduler, loss in zip(self._each, losses, strict=True):
            scheduler.step(float(loss))
        self.rates = np.array([scheduler.get_last_lr()[0] for scheduler in self._each])
        return self.rates
