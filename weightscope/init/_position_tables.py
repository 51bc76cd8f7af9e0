"""Tables of position embeddings in other sizes: rows selected on the grid, or interpolated."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weightscope.anatomy import PositionEmbedding
from weightscope.errors import SpecError
from weightscope.init._counterparts import spaced


@dataclass(frozen=True)
class PositionTable:
    """The tokens of a position embedding: special ones, then a grid (one row for a sequence)."""

    prefix: int
    rows: int
    columns: int

    @classmethod
    def of(cls, part: PositionEmbedding) -> "PositionTable":
        """The table of a part of the anatomy."""
        return cls(part.prefix, *(part.grid or (1, part.tokens - part.prefix)))

    def __str__(self) -> str:
        return f"{self.prefix} + {self.rows} x {self.columns}"


def selected_tokens(name: str, small: PositionTable, large: PositionTable) -> Tensor:
    """The rows of a larger position embedding for a smaller one: evenly spaced on the grid, or the first.

    Raises:
        SpecError: if the table is not larger.
    """
    if small.prefix > large.prefix or small.rows > large.rows or small.columns > large.columns:
        raise SpecError(
            f"`{name}`: expected at most the teacher's tokens, {large}, found {small}; use positions='interpolate'"
        )
    if large.rows == 1:
        found = torch.arange(small.columns)
    else:
        found = (
            spaced(large.rows, small.rows)[:, None] * large.columns + spaced(large.columns, small.columns)
        ).reshape(-1)
    return torch.cat([torch.arange(small.prefix), found + large.prefix])


def interpolated(name: str, table: Tensor, there: PositionTable, wanted: PositionTable) -> Tensor:
    """A position embedding (..., tokens, d) on another grid, smaller or larger, by bicubic interpolation.

    Special tokens are copied; pixels are aligned by their edges and smaller grids are filtered (antialias), as in
    `timm.layers.resample_abs_pos_embed`.

    Raises:
        SpecError: if there are fewer special tokens than wanted.
    """
    if wanted.prefix > there.prefix:
        raise SpecError(f"`{name}`: expected at most {there.prefix} special tokens, found {wanted.prefix}")
    special, grid = table[..., : wanted.prefix, :], table[..., there.prefix :, :]
    lead, width = table.shape[:-2], table.shape[-1]
    pictures = grid.reshape(-1, there.rows, there.columns, width).permute(0, 3, 1, 2).float()
    size = (wanted.rows, wanted.columns)
    if size != (there.rows, there.columns):
        pictures = F.interpolate(pictures, size=size, mode="bicubic", antialias=True, align_corners=False)
    tokens = pictures.permute(0, 2, 3, 1).reshape(*lead, wanted.rows * wanted.columns, width)
    return torch.cat([special, tokens.to(table.dtype)], dim=-2)
