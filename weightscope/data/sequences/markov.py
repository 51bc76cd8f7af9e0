"""A Markov source of tokens whose entropy is known, so that the best possible loss is."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightscope._util.checks import count, positive
from weightscope.data.sequences.scoring import ScoredSequences
from weightscope.errors import UsageError


@dataclass(frozen=True, eq=False)
class MarkovSource:
    """Tokens of which each depends on the one before, started from the stationary distribution.

    Attributes:
        transitions: P (v, v), probabilities of the next token; rows sum to 1.

    Raises:
        UsageError: if the rows are not positive probabilities.

    Example:
        >>> source = MarkovSource.random(27)
        >>> source.batch(torch.Generator().manual_seed(0), 8, 64).tokens.shape
        torch.Size([8, 64])
    """

    transitions: np.ndarray

    def __post_init__(self) -> None:
        p = self.transitions
        if p.ndim != 2 or p.shape[0] != p.shape[1] or not (p > 0).all() or not np.allclose(p.sum(1), 1, atol=1e-12):
            raise UsageError(
                f"transitions: expected a square matrix of probabilities > 0, rows of sum 1, found {p.shape}"
            )

    @classmethod
    def random(cls, vocabulary: int, *, concentration: float = 0.2, seed: int = 0) -> "MarkovSource":
        """A source whose rows are drawn from a symmetric Dirichlet distribution.

        Args:
            vocabulary: v.
            concentration: of the Dirichlet distribution; the smaller, the more certain the next token.
            seed: of the rows.

        Raises:
            UsageError: if a number is out of range.
        """
        size = count("vocabulary", vocabulary, 2)
        drawn = np.random.default_rng(seed).gamma(positive("concentration", concentration), size=(size, size))
        drawn += 1e-6  # so that every token can follow every other
        return cls(drawn / drawn.sum(1, keepdims=True))

    @property
    def vocabulary(self) -> int:
        """The number of tokens, v."""
        return len(self.transitions)

    @property
    def stationary(self) -> np.ndarray:
        """Probabilities of the tokens, pi (v,) with pi P = pi."""
        size = self.vocabulary
        equations = np.vstack([self.transitions.T - np.eye(size), np.ones(size)])
        return np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0))[0]

    @property
    def entropy(self) -> float:
        """-sum_i pi_i sum_j P_ij log2 P_ij, bits per token: the smallest possible loss of a network."""
        return float(-(self.stationary[:, None] * self.transitions * np.log2(self.transitions)).sum())

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw sequences of `length` tokens (B, n), all of which are scored, on the generator's device."""
        count("batch", batch)
        count("length", length)
        device = generator.device
        rows = torch.from_numpy(self.transitions).cumsum(1).to(device)
        chance = torch.rand(length + 1, batch, generator=generator, device=device, dtype=torch.float64)
        token = self._place(torch.from_numpy(self.stationary).cumsum(0).to(device).repeat(batch, 1), chance[0])
        tokens = [token]
        for row in chance[1:]:
            tokens.append(self._place(rows[tokens[-1]], row))
        whole = torch.stack(tokens, 1)
        return ScoredSequences(whole[:, :-1], whole[:, 1:], torch.ones_like(whole[:, 1:], dtype=torch.bool))

    def _place(self, cumulated: Tensor, chance: Tensor) -> Tensor:
        """The token whose interval of the cumulated probabilities (B, v) holds the number (B,) in [0, 1)."""
        found = torch.searchsorted(cumulated, chance.unsqueeze(1), right=True).squeeze(1)
        return found.clamp_max(self.vocabulary - 1)  # where rounding leaves the last sum below 1
