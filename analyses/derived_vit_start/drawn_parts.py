"""Parts of the start that an artifact draws, and the same with channels permuted or signs turned."""

from functools import cache

import torch
from torch import nn

from weightscope import anatomy, load_init

loaded = cache(load_init)
REST = "r"  # all tensors of the artifact that are no attention matrix


@torch.no_grad()
def draw_parts_(
    module: nn.Module,
    *,
    file: str,
    parts: str = "qkvor",
    permute: str = "",
    turn: str = "",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Draw W_Q, W_K, W_V, W_O and the rest (q, k, v, o, r) from the artifact `file`; what `parts` lacks stays default.

    Each of q, k, v in `permute` reads its channels in a random order, one for each block, and each in `turn` has its
    sign changed: both keep the set of a tensor's absolute values.
    """
    attention = anatomy.self_attention(module)
    default = {name: value.clone() for name, value in module.named_parameters()}
    kept = [{key: part.read(key).clone() for key in "qkvo"} for part in attention]
    loaded(file)(module, generator=generator)
    drawn = [{key: part.read(key).clone() for key in "qkvo"} for part in attention]
    if REST not in parts:
        for name, value in module.named_parameters():
            value.copy_(default[name])
    for part, old, new in zip(attention, kept, drawn, strict=True):
        for key in "qkvo":
            value = new[key] if key in parts else old[key]
            if key in permute:  # (H, d, k)
                value = value[:, torch.randperm(value.shape[1], generator=generator)]
            part.write(key, -value if key in turn else value)
    return module
