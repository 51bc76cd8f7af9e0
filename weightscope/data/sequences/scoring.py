"""Sequences with the tokens that are scored, and what a network's logits are worth on them."""

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class ScoredSequences(NamedTuple):
    """Sequences of n tokens, the token that follows each, and which of these are scored.

    Attributes:
        tokens: int64 (B, n).
        targets: int64 (B, n), the token after each.
        mask: bool (B, n), whether the target belongs to the answer; only these are scored.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor


def accuracy(logits: Tensor, batch: ScoredSequences) -> float:
    """The share of the answer's tokens that are the most probable ones, logits (B, n, v)."""
    return float((logits.argmax(-1) == batch.targets)[batch.mask].float().mean())


def cross_entropy(logits: Tensor, batch: ScoredSequences) -> Tensor:
    """The mean of -log p of the answer's tokens, in nats, logits (B, n, v)."""
    return F.cross_entropy(logits[batch.mask], batch.targets[batch.mask])


def bits(nats: float) -> float:
    """Bits per token of a cross entropy in nats, for characters bits per character."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """The exponential of a cross entropy per token in nats."""
    return math.exp(nats)
