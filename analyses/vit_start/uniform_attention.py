"""A start of attention whose maps are uniform."""

import torch
from torch import nn

from weightscope import anatomy
from weightscope.init.attention import mimetic_attention_


def uniform_attention_(
    module: nn.Module, *, c: float = 0.4, keep: bool = False, generator: torch.Generator | None = None
) -> nn.Module:
    """W_Q = W_K = 0, so that every token attends to all alike, and W_V W_O = -c I in every layer, or as it is."""
    if not keep:
        mimetic_attention_(module, parts="vo", alpha_vo=0.0, beta_vo=c, generator=generator)
    for part in anatomy.self_attention(module):
        for name in ("q", "k"):
            part.write(name, torch.zeros_like(part.read(name)))
    return module
