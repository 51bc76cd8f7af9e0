"""Causal attention, with softmax or linear, and rotary positions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope.errors import UsageError
from weightscope.networks.positions import TEMPERATURE
from weightscope.networks.sequences.blockwise import block_scan


def rotated(x: Tensor) -> Tensor:
    """Rotate each pair of channels (i, i + k/2) of (..., n, k) by the angle t w_i, t = 0 .. n - 1.

    Products of two rotated vectors depend on the difference of their positions; w_i = 10,000^(-2 i / k).

    Source: Su et al. 2021, section 3.2, with the pairs of Llama.
    """
    tokens, width = x.shape[-2:]
    half = width // 2
    frequencies = TEMPERATURE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(tokens, dtype=torch.float64, device=x.device)[:, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class CausalAttention(nn.Module):
    """Multi-head self-attention to the present and past tokens, (B, n, d) to (B, n, d).

        softmax(mask(Q K^T / sqrt(k))) V in each head, then `o_proj`

    Args:
        width: d.
        heads: H, divides d.
        key_width: k of each head's queries and keys; d / H if None.
        rotary: rotate queries and keys by their position; needs an even k.

    Raises:
        UsageError: if the heads do not divide the width, or a rotated k is odd.
    """

    is_causal = True

    def __init__(self, width: int, heads: int = 1, key_width: int | None = None, rotary: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"heads must divide width, found width {width} and heads {heads}")
        key_width = width // heads if key_width is None else key_width
        if rotary and key_width % 2:
            raise UsageError(f"rotary positions: expected queries and keys of even width, found {key_width}")
        self.num_heads, self.rope = heads, True if rotary else None  # by these names the anatomy finds them
        self.q_proj = nn.Linear(width, heads * key_width, bias=False)
        self.k_proj = nn.Linear(width, heads * key_width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in layers)  # (B, H, n, .)
        if self.rope:
            q, k = rotated(q), rotated(k)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Causal attention of one head without a softmax, (B, n, d) to (B, n, d), in time linear in n.

        mask(Q K^T / sqrt(k)) V, then `o_proj`

    Args:
        width: d.
        key_width: k of queries and keys, the size of the state as N is in Mamba; d if None.

    Source: Katharopoulos et al. 2020, section 3.2, without a kernel and a denominator; thesis Eq. 3.38 and Fig. 3.28.
    """

    def __init__(self, width: int, key_width: int | None = None) -> None:
        super().__init__()
        key_width = width if key_width is None else key_width
        self.q_proj = nn.Linear(width, key_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        q, k, v = (layer(x).unsqueeze(2) for layer in (self.q_proj, self.k_proj, self.v_proj))  # (B, n, 1, .)
        step, rate = v.new_ones(v.shape[:3]), v.new_zeros(1)
        return self.o_proj(block_scan(v, step, rate, k, q / k.shape[-1] ** 0.5).squeeze(2))
