"""AdamW over the weight matrix of many networks, and learning-rate schedules."""

import math

import numpy as np
import torch
from torch import Tensor

from weightscope.training.kernels import functions
from weightscope.training.kernels.functions import Kernels

_BLOCK = 1 << 14  # entries of a row whose squares are added in one go


class BatchedAdamW:
    """AdamW with decoupled weight decay for T networks at once, each with its own rates.

    For each network and each entry that is not frozen, with gradient g, step t, rate eta and decay lambda:
    `m <- b1 m + (1 - b1) g`, `v <- b2 v + (1 - b2) g^2`,
    `w <- w - eta lambda w - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    Equal to `torch.optim.AdamW` on each network alone. Weight decay applies to every trained entry, biases and
    norms included, as in `torch.optim.AdamW(model.parameters())`.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, Algorithm 2.
    """

    def __init__(
        self,
        weights: Tensor,
        gradient: Tensor,
        trained: Tensor,
        learning_rate: Tensor,
        weight_decay: Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        kernels: Kernels = "torch",
    ) -> None:
        self.weights, self.gradient, self.trained = weights, gradient, trained
        self.rate, self.decay = learning_rate, weight_decay
        self.betas, self.eps, self.kernels = betas, eps, kernels
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)

    def scalars(self, step: int, factor: float) -> tuple[float, float, float]:
        """The arguments of `step` for step t = 1, 2, ...: `factor`, 1 / (1 - b1^t), 1 / sqrt(1 - b2^t)."""
        b1, b2 = self.betas
        return factor, 1 / (1 - b1**step), 1 / math.sqrt(1 - b2**step)

    @torch.no_grad()
    def step(self, scalars: Tensor, clip_norm: float = 0.0) -> None:
        """One update in place; only tensors change from step to step, so a CUDA graph can capture it."""
        clip = None
        if clip_norm > 0:
            clip = (clip_norm / (row_norms(self.gradient) + 1e-6)).clamp_(max=1.0)
        if self.kernels == "c":
            clip = torch.ones_like(self.rate) if clip is None else clip
            moments, rates = (self.first, self.second), (self.rate, self.decay)
            tensors = self.weights, self.gradient, moments, self.trained, rates, clip, scalars
            functions.adamw(*tensors, self.betas, self.eps)
            return
        b1, b2 = self.betas
        factor, mean, root = scalars
        g = self.gradient if clip is None else self.gradient * clip[:, None]
        rate = (self.rate * factor)[:, None] * self.trained
        self.first.lerp_(g, 1 - b1)
        self.second.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = self.second.sqrt().mul_(root).add_(self.eps)
        self.weights.addcmul_(self.weights, rate * self.decay[:, None], value=-1)
        self.weights.addcmul_(rate * mean, self.first / denominator, value=-1)


def row_norms(matrix: Tensor) -> Tensor:
    """The Euclidean norm of each row, from those of its blocks of 2^14 entries; (T, D) -> (T,).

    On a CPU, PyTorch adds the squares of a row one by one in a few accumulators of the row's own type: in float32 the
    norm of 5,500,000 entries is off by 1.6e-4. The error of a block, and of the norm of their norms, is of rounding.
    """
    whole = matrix.shape[1] // _BLOCK * _BLOCK
    if whole == 0:
        return torch.linalg.vector_norm(matrix, dim=1)
    blocks = torch.linalg.vector_norm(matrix[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
    rest = torch.linalg.vector_norm(matrix[:, whole:], dim=1, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([blocks, rest], dim=1), dim=1)


def schedule_factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    """The factor in (0, 1] of the learning rate at one step.

    It rises linearly to 1 over the fraction `warmup` of the steps; after that it stays ("constant"), falls
    linearly to 0 ("triangular") or follows half a cosine to 0 ("cosine"). With "plateau" it stays, too, and
    `Plateau` changes the rates themselves. It is evaluated at the middle of the step, so no step has rate 0 and
    schedules of different lengths are samples of the same curve.
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
    """Learning rates of T networks, each cut where the network's own loss no longer improves.

    A loss improves if it is below (1 - 1e-4) times the best one before. After more than `patience` epochs in a row
    without, the rate is multiplied by `factor`, unless that changes it by 1e-8 or less, and the count begins again. A
    loss that is not a number has not improved. Equal to `torch.optim.lr_scheduler.ReduceLROnPlateau` on each network
    alone.
    """

    threshold, smallest_change = 1e-4, 1e-8  # torch's

    def __init__(self, rates: np.ndarray, factor: float, patience: int) -> None:
        self.rates, self.factor, self.patience = np.array(rates, dtype=np.float64), factor, patience
        self.best = np.full(self.rates.shape, np.inf)
        self.waited = np.zeros(self.rates.shape, dtype=np.int64)

    def step(self, losses: np.ndarray) -> np.ndarray:
        """The rates (T,) of the next epoch, after the losses (T,) of this one."""
        better = losses < self.best * (1 - self.threshold)
        self.best = np.where(better, losses, self.best)
        self.waited = np.where(better, 0, self.waited + 1)
        late = self.waited > self.patience
        cut = self.rates * self.factor
        self.rates = np.where(late & (self.rates - cut > self.smallest_change), cut, self.rates)
        self.waited[late] = 0
        return self.rates
