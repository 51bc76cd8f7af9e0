"""Sinusoidal position codes on a grid of patches."""

import torch
from torch import Tensor

from weightscope.errors import UsageError

TEMPERATURE = 10_000.0  # Vaswani et al. 2017, section 3.5; the same in MoCo-v3 and simple ViT


def sinusoidal_positions(rows: int, columns: int, width: int) -> Tensor:
    """The 2-D sinusoidal code of each cell of a grid, row by row.

    With `w_i = 10000^(-i / (width/4))`, i = 0 .. width/4 - 1, the cell (y, x) has the code

        [sin(x w), cos(x w), sin(y w), cos(y w)]

    as in MoCo-v3 (Chen et al. 2021). Every code has the squared norm width/2.

    Args:
        rows: cells from top to bottom.
        columns: cells from left to right.
        width: d, length of a code, a multiple of 4.

    Returns:
        Codes, float32 (rows * columns, width).

    Raises:
        UsageError: if width is not a multiple of 4.

    Example:
        >>> sinusoidal_positions(1, 2, 4)[1]  # y = 0, x = 1
        tensor([0.8415, 0.5403, 0.0000, 1.0000])
    """
    if width % 4:
        raise UsageError(f"2-D sinusoidal positions need a width that is a multiple of 4, found {width}")
    frequencies = TEMPERATURE ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64), indexing="ij"
    )
    angles = [axis.reshape(-1, 1) * frequencies for axis in (x, y)]  # each (rows * columns, width / 4)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1).float()
