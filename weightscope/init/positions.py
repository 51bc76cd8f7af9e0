"""Sinusoidal position embeddings, scaled."""

import torch
from torch import Tensor

from weightscope._util.checks import choice, number, positive
from weightscope.anatomy import PositionEmbedding, positions
from weightscope.errors import UsageError
from weightscope.init._common import M

TEMPERATURE = 10_000.0  # Vaswani et al. 2017, section 3.5


def sinusoidal_codes(
    rows: int, columns: int | None, width: int, temperature: float = TEMPERATURE, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Codes of a grid's cells, row by row, or of a sequence.

    With q frequencies `w_i = temperature^(-i/q)`:

        sequence   [sin(t w), cos(t w)],                              q = width / 2
        grid       [sin(x w), cos(x w), sin(y w), cos(y w)],          q = width / 4, as in MoCo-v3

    A shift of the position rotates each pair (sin, cos), so every code has the squared norm width / 2.

    Args:
        rows: of the grid, or the length of the sequence.
        columns: of the grid; None for a sequence.
        width: d.
        temperature: ratio of the longest to the shortest wavelength, roughly, > 0.
        dtype: of the result; computed in float64.

    Returns:
        (rows, width) for a sequence, (rows * columns, width) for a grid.

    Raises:
        UsageError: if width is not a multiple of 2 (sequence) or 4 (grid).

    Example:
        >>> sinusoidal_codes(1, 2, 4)[1]  # y = 0, x = 1
        tensor([0.8415, 0.5403, 0.0000, 1.0000])
    """
    axes = 1 if columns is None else 2
    if width % (2 * axes):
        raise UsageError(f"sinusoidal codes of {axes} axes need a width that {2 * axes} divides, found {width}")
    q = width // (2 * axes)
    frequencies = temperature ** (-torch.arange(q, dtype=torch.float64) / q)
    y = torch.arange(rows, dtype=torch.float64)
    if columns is None:
        places = [y]
    else:
        y, x = torch.meshgrid(y, torch.arange(columns, dtype=torch.float64), indexing="ij")
        places = [x.reshape(-1), y.reshape(-1)]
    angles = [place[:, None] * frequencies for place in places]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1).to(dtype)


def sinusoidal_positions_(
    module: M,
    *,
    gamma: float = 1.0,
    special: str = "keep",
    temperature: float = TEMPERATURE,
    generator: torch.Generator | None = None,
) -> M:
    """Set every table of position embeddings to gamma times the sinusoidal code, 2-D for images, 1-D for sequences.

    Args:
        module: changed in place: its position tables (parameters or buffers).
        gamma: scale; about 2 helps mimetic attention on CIFAR, 1 is used on ImageNet.
        special: rows of class, distillation and register tokens: "keep" or "zero".
        temperature: of the frequencies.
        generator: not used.

    Raises:
        AnatomyError: if the module has no position table.
        UsageError: if an argument cannot be meant, or the width is not a multiple of 4 (2 for a sequence).

    Source: attention paper, section 5.1 and Fig. 4; thesis 3.2.4 (gamma).

    Example:
        >>> sinusoidal_positions_(vit, gamma=2.0, special="zero")
    """
    number("gamma", gamma)
    positive("temperature", temperature)
    choice("special", special, ("keep", "zero"))
    tables = positions(module)
    codes = [table_codes(table, temperature) for table in tables]
    for table, code in zip(tables, codes, strict=True):
        value = table.read()
        value[table.prefix :] = gamma * code.to(value)
        if special == "zero":
            value[: table.prefix] = 0
        table.write(value)
    return module


def table_codes(table: PositionEmbedding, temperature: float = TEMPERATURE) -> Tensor:
    """The unscaled sinusoidal codes of a table's ordinary tokens, float32 (tokens - prefix, d)."""
    if table.grid is None:
        return sinusoidal_codes(table.tokens - table.prefix, None, table.width, temperature)
    return sinusoidal_codes(*table.grid, table.width, temperature)
