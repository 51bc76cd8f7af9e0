"""GELU followed by BatchNorm, as in a ConvMixer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightscope.training.kernels.triton.common import gelu, gelu_and_slope, padded, sum_type


@triton.jit
def _gelu_norm_forward(
    x, gain, shift, more, y, mean, factor, P, eps, BLOCK: tl.constexpr, MORE: tl.constexpr, SUM: tl.constexpr
):
    """One channel of one network: its GELU, normalised over all P positions. x is read three times, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x += row * P
    y += row * P
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        total += tl.where(inside, gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM), 0.0)
    middle = tl.sum(total, 0) / P
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        centred = tl.where(inside, gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle, 0.0)
        total += centred * centred
    scale = tl.rsqrt(tl.sum(total, 0) / P + eps)
    tl.store(mean + row, middle)
    tl.store(factor + row, scale)
    g, s = tl.load(gain + row).to(SUM), tl.load(shift + row).to(SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        out = (gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle) * scale * g + s
        if MORE:
            out += tl.load(more + row * P + start + at, mask=inside, other=0.0).to(SUM)
        tl.store(y + start + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_norm_backward(
    x,
    gain,
    mean,
    factor,
    grad,
    grad_x,
    grad_gain,
    grad_shift,
    P,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * P
    grad += row * P
    grad_x += row * P
    middle, scale = tl.load(mean + row), tl.load(factor + row)
    at = tl.arange(0, BLOCK)
    total, along = tl.zeros((BLOCK,), SUM), tl.zeros((BLOCK,), SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        normal = (gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle) * scale
        of_y = tl.load(grad + start + at, mask=inside, other=0.0).to(SUM)
        total += of_y
        along += of_y * normal
    of_shift, of_gain = tl.sum(total, 0), tl.sum(along, 0)
    tl.store(grad_shift + row, of_shift)
    tl.store(grad_gain + row, of_gain)
    steepness = tl.load(gain + row).to(SUM) * scale
    for start in range(0, P, BLOCK):
        inside = start + at < P
        h = tl.load(x + start + at, mask=inside, other=0.0).to(SUM)
        active, slope = gelu_and_slope(h, SUM)
        normal = (active - middle) * scale
        of_y = tl.load(grad + start + at, mask=inside, other=0.0).to(SUM)
        out = (of_y - of_shift / P - normal * (of_gain / P)) * steepness * slope
        tl.store(grad_x + start + at, out.to(grad_x.dtype.element_ty), mask=inside)


def gelu_norm(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """GELU, then normalisation over P, of contiguous x (T, c, P), plus `more`; and mean and factor, (T, c) each."""
    count, c, positions = x.shape
    y = torch.empty_like(x)
    mean, factor = (torch.empty(count, c, dtype=gain.dtype, device=x.device) for _ in range(2))
    extra = x if more is None else more
    options = {"BLOCK": padded(positions, 1024), "MORE": more is not None, "SUM": sum_type(x)}
    _gelu_norm_forward[(count * c,)](x, gain, shift, extra, y, mean, factor, positions, eps, **options)
    return y, mean, factor


def gelu_norm_backward(
    x: Tensor, gain: Tensor, mean: Tensor, factor: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, gain and shift."""
    count, c, positions = x.shape
    of_x, of_gain, of_shift = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
    options = {"BLOCK": padded(positions, 1024), "SUM": sum_type(x)}
    _gelu_norm_backward[(count * c,)](x, gain, mean, factor, grad, of_x, of_gain, of_shift, positions, **options)
    return of_x, of_gain, of_shift
