"""Mimetic attention and the default, with other positions than the sinusoidal ones that the network starts with."""

from typing import Literal

import torch
from torch import nn

from weightscope.init import mimetic_attention_
from weightscope.networks.vit import EMBEDDING_STD


def start(
    module: nn.Module,
    *,
    generator: torch.Generator,
    positions: Literal["learned", "permuted"] = "learned",
    mimetic: bool = False,
) -> nn.Module:
    """Set the positions, and the attention if asked to.

    Learned positions are N(0, 0.02^2), as the network's own. Permuted ones are the entries of the sinusoidal ones in
    random order.
    """
    if mimetic:  # first, so that its random numbers are those of the arm with sinusoidal positions
        mimetic_attention_(module, generator=generator)
    embedding = module.get_parameter("pos_embed")
    with torch.no_grad():
        if positions == "learned":
            embedding.normal_(std=EMBEDDING_STD, generator=generator)
        else:
            order = torch.randperm(embedding.numel(), generator=generator)
            embedding.copy_(embedding.flatten()[order].view_as(embedding))
    return module
