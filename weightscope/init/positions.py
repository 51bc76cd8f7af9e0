"""Sinusoidal position embeddings, scaled."""

import torch
from torch import Tensor

from weightscope._util.checks import choice, number, positive
from weightscope.anatomy import PositionEmbedding, positions
from weightscope.init._common import M
from weightscope.init.registry import INITIALISERS
from weightscope.networks.layers import TEMPERATURE, sinusoidal_positions


@INITIALISERS.register("sinusoidal_positions", source="attention paper, section 5.1", needs="position embeddings")
def sinusoidal_positions_(
    module: M,
    *,
    gamma: float = 1.0,
    special: str = "keep",
    temperature: float = TEMPERATURE,
    generator: torch.Generator | None = None,
) -> M:
    """Set every position embedding to gamma times the sinusoidal codes, 2-D for images and 1-D for sequences.

    Args:
        module: changed in place: its position embeddings (parameters or buffers).
        gamma: scale; about 2 with mimetic attention on CIFAR, 1 on ImageNet.
        special: rows of class, distillation and register tokens: "keep" or "zero".
        temperature: of the frequencies.
        generator: not used.

    Raises:
        AnatomyError: if the module has no position embedding.
        UsageError: if an argument is invalid, or the width is not a multiple of 4 (2 for a sequence).

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
    rows, columns = table.grid or (table.tokens - table.prefix, None)
    return sinusoidal_positions(rows, columns, table.width, temperature)
