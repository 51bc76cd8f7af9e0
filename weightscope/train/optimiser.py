"""AdamW over the stacked weight matrix, and learning-rate schedules."""

import math

import torch
from torch import Tensor


class StackedAdamW:
    """AdamW with decoupled weight decay for T networks at once, each with its own rates.

    For every network and every entry that is not frozen, with gradient g, step t, rate eta and decay lambda:
    `m <- b1 m + (1 - b1) g`, `v <- b2 v + (1 - b2) g^2`,
    `w <- w - eta lambda w - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    Equal to `torch.optim.AdamW` on each network alone. Weight decay applies to every trained entry, biases and
    norms included, as in `torch.optim.AdamW(model.parameters())`.

    Args:
        weights: (T, D), updated in place.
        gradient: (T, D).
        trained: (D,) bool; other entries (frozen tensors, running statistics) are not touched.
        learning_rate: (T,).
        weight_decay: (T,).
        betas: (b1, b2).
        eps: added to the root of the second moment.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, Algorithm 2.
    """

    def __init__(
        self,
        weights: Tensor,
        gradient: Tensor,
        trained: Tensor,
        *,
        learning_rate: Tensor,
        weight_decay: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.weights, self.gradient = weights, gradient
        self.rate = learning_rate[:, None] * trained  # (T, D)
        self.decay = weight_decay[:, None]
        self.betas, self.eps, self.steps = betas, eps, 0
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)

    @torch.no_grad()
    def step(self, factor: float, clip_norm: float = 0.0) -> None:
        """One update with every rate multiplied by `factor`; scales `gradient` in place when it clips.

        With `clip_norm` > 0 each network's gradient is scaled to at most that Euclidean norm, as
        `torch.nn.utils.clip_grad_norm_` does.
        """
        self.steps += 1
        b1, b2 = self.betas
        g = self.gradient
        if clip_norm > 0:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.mul_((clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        rate = self.rate * factor
        self.first.lerp_(g, 1 - b1)
        self.second.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = self.second.sqrt().div_(math.sqrt(1 - b2**self.steps)).add_(self.eps)
        self.weights.addcmul_(self.weights, rate * self.decay, value=-1)
        self.weights.addcmul_(rate, self.first / denominator, value=-1 / (1 - b1**self.steps))


def schedule_factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    """The learning rate's factor in (0, 1] at one step.

    Over the fraction `warmup` of the steps it rises linearly to 1; after that it stays ("constant"), falls
    linearly to 0 ("triangular") or follows half a cosine to 0 ("cosine"). It is evaluated at the middle of
    the step, so no step has rate 0 and schedules of different lengths are the same curve.

    Raises:
        ValueError: for another schedule.
    """
    progress = (step + 0.5) / steps
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "triangular":
            return 1.0 - fall
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * fall))
    raise ValueError(f"expected schedule triangular, cosine or constant, found {schedule!r}")
