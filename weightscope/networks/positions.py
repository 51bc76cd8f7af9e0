"""Sinusoidal position codes of grids and sequences."""

import torch
from torch import Tensor

from weightscope.errors import UsageError

TEMPERATURE = 10_000.0  # Vaswani et al. 2017, section 3.5; also in MoCo-v3 and simple ViT


def sinusoidal_positions(
    rows: int,
    columns: int | None,
    width: int,
    temperature: float = TEMPERATURE,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sinusoidal codes of the cells of a grid, row by row, or of the positions of a sequence.

    With q frequencies `w_i = temperature^(-i/q)`, i = 0 .. q - 1, the codes are

        grid       [sin(x w), cos(x w), sin(y w), cos(y w)],          q = width / 4
        sequence   [sin(t w), cos(t w)],                              q = width / 2

    A shift of the position rotates each pair (sin, cos), so every code has the squared norm width / 2.

    Args:
        rows: of the grid, or the length of the sequence.
        columns: of the grid; None for a sequence.
        width: d, length of a code; a multiple of 4 (grid) or 2 (sequence).
        temperature: about the ratio of the longest to the shortest wavelength, > 0.
        dtype: of the result; codes are computed in float64.

    Returns:
        (rows * columns, width) for a grid, (rows, width) for a sequence.

    Raises:
        UsageError: if width is not such a multiple.

    Source: Chen et al. 2021 (MoCo-v3) for grids, Vaswani et al. 2017 for sequences.

    Example:
        >>> sinusoidal_positions(1, 2, 4)[1]  # y = 0, x = 1
        tensor([0.8415, 0.5403, 0.0000, 1.0000])
    """
    axes = 1 if columns is None else 2
    if width % (2 * axes):
        raise UsageError(
            f"sinusoidal positions on {axes} axes: expected a width that is a multiple of {2 * axes}, found {width}"
        )
    q = width // (2 * axes)
    frequencies = temperature ** (-torch.arange(q, dtype=torch.float64) / q)
    places = [torch.arange(rows, dtype=torch.float64)]
    if columns is not None:
        y, x = torch.meshgrid(places[0], torch.arange(columns, dtype=torch.float64), indexing="ij")
        places = [x.reshape(-1), y.reshape(-1)]
    angles = [place[:, None] * frequencies for place in places]  # each (rows * columns, q)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1).to(dtype)
