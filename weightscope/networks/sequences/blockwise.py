"""The scan of Mamba-2 in blocks: attention within a block of tokens, a recurrence between blocks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weightscope.errors import UsageError


def block_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *, block: int = 64) -> Tensor:
    """Run a state-space model with one rate for each head by the block decomposition of its matrix.

        h_i = exp(delta_i A) h_{i-1} + delta_i B_i x_i^T,      y_i = h_i^T C_i      in each head, h_i (N, k)

    Within a block, `y = (L * C B^T) (delta x)` with `L[i, j] = exp(A sum_{j < m <= i} delta_m)` for i >= j; the state
    at the end of each block is handed to the next. With A = 0 and delta = 1 this is linear attention with queries C,
    keys B and values x.

    Args:
        x: inputs (B, n, H, k): batch, tokens, heads, width of a head.
        delta: steps (B, n, H), >= 0.
        a: rates A (H,), <= 0.
        b: input maps (B, n, G, N); head h belongs to group `h // (H / G)`.
        c: output maps (B, n, G, N).
        block: tokens in a block; affects speed and memory only, except for rounding.

    Returns:
        y (B, n, H, k), differentiable.

    Raises:
        UsageError: if the shapes do not fit together.

    Source: Dao and Gu 2024, section 6 and Listing 1; thesis 3.3.1.

    Example:
        >>> block_scan(values, torch.ones(2, 50, 1), torch.zeros(1), keys, queries)  # linear attention
    """
    (batch, tokens, heads, _), (groups, states) = x.shape, b.shape[2:]
    expected = ((batch, tokens, heads), (heads,), (batch, tokens, groups, states), (batch, tokens, groups, states))
    found = tuple(tuple(value.shape) for value in (delta, a, b, c))
    if found != expected or heads % groups:
        raise UsageError(
            f"block_scan: expected delta, A, B, C of {list(expected)} with groups that divide the {heads} heads, "
            f"found {list(found)}"
        )
    block = min(block, tokens)
    short = -tokens % block
    # (B, blocks, block, ...), padded by tokens without a step, which leave the state as it is
    x, b, c = (F.pad(value, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, block)) for value in (x, b, c))
    delta = F.pad(delta, (0, 0, 0, short)).unflatten(1, (-1, block)).unflatten(-1, (groups, -1))
    u = x.unflatten(3, (groups, -1)) * delta.unsqueeze(-1)  # (B, blocks, block, G, H/G, k)
    log = (delta * a.view(groups, -1)).permute(0, 1, 3, 4, 2).cumsum(-1)  # (B, blocks, G, H/G, block)
    within = _decays(log) * torch.einsum("bmign,bmjgn->bmgij", c, b).unsqueeze(3)
    y = torch.einsum("bmgrij,bmjgrk->bmigrk", within, u)
    remaining = torch.exp(log[..., -1:] - log)
    ends = torch.einsum("bmjgn,bmgrj,bmjgrk->bmgrnk", b, remaining, u)
    starts = _carried(ends, log[..., -1].exp())
    y = y + torch.einsum("bmign,bmgri,bmgrnk->bmigrk", c, log.exp(), starts)
    return y.flatten(3, 4).flatten(1, 2)[:, :tokens]


def _decays(log: Tensor) -> Tensor:
    """L (..., block, block) of cumulated logarithms (..., block)."""
    size = log.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log.device).triu(1)
    return (log.unsqueeze(-1) - log.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()


def _carried(ends: Tensor, decay: Tensor) -> Tensor:
    """The state in which each block starts, given where each ends from zero, (B, blocks, G, H/G, N, k)."""
    starts = [torch.zeros_like(ends[:, 0])]
    for m in range(ends.shape[1] - 1):
        starts.append(decay[:, m, ..., None, None] * starts[-1] + ends[:, m])
    return torch.stack(starts, dim=1)
