"""AdamW over the weights of all networks in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from weightscope.training.kernels.triton.common import padded


@triton.jit
def _adamw(
    weights,
    gradient,
    first,
    second,
    trained,
    rate,
    decay,
    clip,
    scalars,
    D,
    keep1,
    keep2,
    take1,
    take2,
    eps,
    BLOCK: tl.constexpr,
):
    """One network and BLOCK of its entries; `scalars` holds the rate's factor and both bias corrections."""
    net = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = entry < D
    kept &= tl.load(trained + entry, mask=kept, other=0) != 0
    at = net * D + entry
    eta = tl.load(rate + net) * tl.load(scalars)
    g = tl.load(gradient + at, mask=kept, other=0.0) * tl.load(clip + net)
    w = tl.load(weights + at, mask=kept, other=0.0)
    m = tl.load(first + at, mask=kept, other=0.0)
    v = tl.load(second + at, mask=kept, other=0.0)
    m = m * keep1 + g * take1
    v = v * keep2 + g * g * take2
    w -= w * eta * tl.load(decay + net)
    w -= eta * tl.load(scalars + 1) * m / (tl.sqrt(v) * tl.load(scalars + 2) + eps)
    tl.store(weights + at, w, mask=kept)
    tl.store(first + at, m, mask=kept)
    tl.store(second + at, v, mask=kept)


def adamw(
    weights: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    trained: Tensor,
    rates: tuple[Tensor, Tensor],
    clip: Tensor,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of `BatchedAdamW` in place.

    Args:
        weights: (T, D).
        gradient: (T, D).
        moments: first and second, (T, D) each.
        trained: (D,) bool.
        rates: learning rate and decay, (T,) each.
        clip: the factor of each network's gradient, (T,).
        scalars: (3,), the rates' factor, 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t).
        betas: b1 and b2.
        eps: added to the root of the second moment.
    """
    count, size = weights.shape
    block = padded(size, 1024)
    _adamw[(count, triton.cdiv(size, block))](
        weights,
        gradient,
        *moments,
        trained,
        *rates,
        clip,
        scalars,
        size,
        *betas,
        *(1 - b for b in betas),  # here, in float64
        eps,
        BLOCK=block,
    )
