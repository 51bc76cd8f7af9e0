"""Some of the matrices of a ViT's blocks drawn from a distribution, or with signs or residual branches changed."""

from functools import cache

import torch
from torch import nn

from weightscope import anatomy, load_init

loaded = cache(load_init)  # of 70 MB


def draw_parts_(
    module: nn.Module,
    *,
    file: str,
    parts: str = "qkvo12",
    turn: str = "",
    residual: float = 1.0,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialise W_Q, W_K, W_V, W_O, fc1, fc2 (q, k, v, o, 1, 2) by an artifact; the others stay, some change sign.

    `residual` is a factor on W_O and fc2, which end the residual branches.
    """
    views = [(part, key) for part in anatomy.self_attention(module) for key in "qkvo"]
    views += [(part, key) for part in anatomy.mlps(module) for key in ("fc1", "fc2")]
    before = [part.read(key).clone() for part, key in views]
    loaded(file)(module, generator=generator)
    for (part, key), value in zip(views, before, strict=True):
        if key[-1] not in parts:
            part.write(key, value)
        elif key[-1] in turn:
            part.write(key, -part.read(key))
        elif key[-1] in "o2":
            part.write(key, residual * part.read(key))
    return module
