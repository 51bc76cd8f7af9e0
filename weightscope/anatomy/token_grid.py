"""The positions of the tokens of a vision transformer or a sequence model."""

from dataclasses import dataclass

import torch
from torch import Tensor

Offset = tuple[int, int]
"""(dy, dx): token (y, x) refers to the token at (y + dy, x + dx)."""


@dataclass(frozen=True)
class TokenGrid:
    """Positions of tokens: `prefix` special ones (class token, registers), then a grid in row-major order.

    A sequence is a grid of one row.

    Attributes:
        rows: of the grid.
        columns: of the grid.
        prefix: special tokens at the start.
        causal: whether a token attends only to itself and earlier ones.
    """

    rows: int
    columns: int
    prefix: int = 0
    causal: bool = False

    @property
    def total(self) -> int:
        """N, the number of all tokens."""
        return self.prefix + self.rows * self.columns

    def targets(self, offset: Offset) -> Tensor:
        """The index (N,) of the token at `offset` = (dy, dx) from each token, -1 if it is outside the grid.

        Special tokens have none.
        """
        y, x = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        y, x = y + offset[0], x + offset[1]
        inside = (y >= 0) & (y < self.rows) & (x >= 0) & (x < self.columns)
        index = torch.where(inside, y * self.columns + x + self.prefix, -1).reshape(-1)
        index = torch.cat([torch.full((self.prefix,), -1), index])
        if self.causal:
            index = torch.where(index > torch.arange(self.total), -1, index)
        return index
