"""LayerNorm over channels, alone and followed by an MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightscope.training.kernels.triton.common import (
    PRECISION,
    columns,
    cut_positions,
    gelu,
    gelu_and_slope,
    padded,
    shared_memory,
    square,
    standardised,
    standardised_backward,
    vector,
)

_SHARED_BYTES = 34  # for each entry of a padded weight matrix in float32, measured on the compiled kernels, rounded up


@triton.jit
def _maps(x, gain, shift, w1, b1, w2, net, c, m, C: tl.constexpr, HIDDEN: tl.constexpr, SUM: tl.constexpr):
    """A network's linear maps in x's type: fc1 with gain and shift folded in (W diag(gain), b + W shift), and fc2."""
    at, within = square(m, c, HIDDEN, C)
    raw = tl.load(w1 + net * m * c + at, mask=within, other=0.0).to(SUM)
    bias = vector(b1 + net * m, m, HIDDEN, SUM) + tl.sum(raw * vector(shift + net * c, c, C, SUM)[None, :], 1)
    first = raw * vector(gain + net * c, c, C, SUM)[None, :]
    at, within = square(c, m, C, HIDDEN)
    second = tl.load(w2 + net * m * c + at, mask=within, other=0.0)
    return first.to(x.dtype.element_ty), bias, second.to(x.dtype.element_ty)


@triton.jit
def _mlp_forward(
    x,
    gain,
    shift,
    w1,
    b1,
    w2,
    b2,
    more,
    y,
    c,
    m,
    P,
    eps,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    POSITIONS: tl.constexpr,
    MORE: tl.constexpr,
    SUM: tl.constexpr,
):
    """One network and one of S parts of the positions."""
    net = tl.program_id(1).to(tl.int64)
    x += net * c * P
    y += net * c * P
    kind = x.dtype.element_ty
    first, bias, second = _maps(x, gain, shift, w1, b1, w2, net, c, m, C, HIDDEN, SUM)
    second_bias = vector(b2 + net * c, c, C, SUM)[:, None]
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = columns(start + tl.arange(0, POSITIONS), c, P, C)
        normal, _ = standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        hidden = tl.dot(first, normal.to(kind), input_precision=PRECISION, out_dtype=SUM) + bias[:, None]
        out = tl.dot(second, gelu(hidden, SUM).to(kind), input_precision=PRECISION, out_dtype=SUM) + second_bias
        if MORE:
            out += tl.load(more + net * c * P + at, mask=inside, other=0.0).to(SUM)
        tl.store(y + at, out.to(kind), mask=inside)


@triton.jit
def _mlp_backward(
    x,
    gain,
    shift,
    w1,
    b1,
    w2,
    grad,
    grad_x,
    grad_gain,
    grad_shift,
    grad_w1,
    grad_b1,
    grad_w2,
    grad_b2,
    c,
    m,
    P,
    eps,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    POSITIONS: tl.constexpr,
    SUM: tl.constexpr,
):
    """One network and one of S parts of the positions; weight gradients are partial sums (T, S, ...)."""
    net = tl.program_id(1).to(tl.int64)
    x += net * c * P
    grad += net * c * P
    grad_x += net * c * P
    kind = x.dtype.element_ty
    first, bias, second = _maps(x, gain, shift, w1, b1, w2, net, c, m, C, HIDDEN, SUM)
    of_first, of_second = tl.zeros((HIDDEN, C), SUM), tl.zeros((C, HIDDEN), SUM)
    # Sums over positions as products with ones: tensor cores need no exchange between threads.
    ones = tl.full((POSITIONS, 16), 1.0, kind)
    of_bias, of_y_sum = tl.zeros((HIDDEN, 16), SUM), tl.zeros((C, 16), SUM)
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = columns(start + tl.arange(0, POSITIONS), c, P, C)
        normal, factor = standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        rounded = normal.to(kind)
        hidden = tl.dot(first, rounded, input_precision=PRECISION, out_dtype=SUM) + bias[:, None]
        of_y = tl.load(grad + at, mask=inside, other=0.0)
        # Positions beyond the last have zero gradient and add nothing.
        active, slope = gelu_and_slope(hidden, SUM)
        of_second = tl.dot(of_y, tl.trans(active.to(kind)), of_second, input_precision=PRECISION, out_dtype=SUM)
        of_y_sum = tl.dot(of_y, ones, of_y_sum, input_precision=PRECISION, out_dtype=SUM)
        of_hidden = tl.dot(tl.trans(second), of_y, input_precision=PRECISION, out_dtype=SUM) * slope
        of_hidden = of_hidden.to(kind)
        of_first = tl.dot(of_hidden, tl.trans(rounded), of_first, input_precision=PRECISION, out_dtype=SUM)
        of_bias = tl.dot(of_hidden, ones, of_bias, input_precision=PRECISION, out_dtype=SUM)
        of_normal = tl.dot(tl.trans(first), of_hidden, input_precision=PRECISION, out_dtype=SUM)
        tl.store(grad_x + at, standardised_backward(of_normal, normal, factor, inside, c).to(kind), mask=inside)
    # With W the weight of fc1, F the gradient of W diag(gain) and f that of b + W shift, the gradients are
    # F diag(gain) + f shift^T for W, the column sums of W * F for gain, and W^T f for shift.
    here = net * tl.num_programs(0) + tl.program_id(0)
    channels, units = tl.arange(0, C), tl.arange(0, HIDDEN)
    f, of_b2 = tl.sum(of_bias, 1) / 16, tl.sum(of_y_sum, 1) / 16
    at, within = square(m, c, HIDDEN, C)
    raw = tl.load(w1 + net * m * c + at, mask=within, other=0.0).to(SUM)
    g, s = vector(gain + net * c, c, C, SUM), vector(shift + net * c, c, C, SUM)
    tl.store(grad_w1 + here * m * c + at, of_first * g[None, :] + f[:, None] * s[None, :], mask=within)
    tl.store(grad_gain + here * c + channels, tl.sum(of_first * raw, 0), mask=channels < c)
    tl.store(grad_shift + here * c + channels, tl.sum(raw * f[:, None], 0), mask=channels < c)
    tl.store(grad_b1 + here * m + units, f, mask=units < m)
    at, within = square(c, m, C, HIDDEN)
    tl.store(grad_w2 + here * m * c + at, of_second, mask=within)
    tl.store(grad_b2 + here * c + channels, of_b2, mask=channels < c)


@triton.jit
def _norm_forward(x, gain, shift, y, c, P, eps, C: tl.constexpr, POSITIONS: tl.constexpr, SUM: tl.constexpr):
    net = tl.program_id(1).to(tl.int64)
    g, s = vector(gain + net * c, c, C, SUM)[:, None], vector(shift + net * c, c, C, SUM)[:, None]
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = columns(start + tl.arange(0, POSITIONS), c, P, C)
        at += net * c * P
        normal, _ = standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        tl.store(y + at, (normal * g + s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    x,
    gain,
    grad,
    grad_x,
    grad_gain,
    grad_shift,
    c,
    P,
    eps,
    C: tl.constexpr,
    POSITIONS: tl.constexpr,
    SUM: tl.constexpr,
):
    net = tl.program_id(1).to(tl.int64)
    g = vector(gain + net * c, c, C, SUM)[:, None]
    of_gain, of_shift = tl.zeros((C,), SUM), tl.zeros((C,), SUM)
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = columns(start + tl.arange(0, POSITIONS), c, P, C)
        at += net * c * P
        normal, factor = standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        of_y = tl.load(grad + at, mask=inside, other=0.0).to(SUM)
        of_gain += tl.sum(of_y * normal, 1)
        of_shift += tl.sum(of_y, 1)
        out = standardised_backward(of_y * g, normal, factor, inside, c)
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), mask=inside)
    channels = tl.arange(0, C)
    here = (net * tl.num_programs(0) + tl.program_id(0)) * c + channels
    tl.store(grad_gain + here, of_gain, mask=channels < c)
    tl.store(grad_shift + here, of_shift, mask=channels < c)


def fits(channels: int, hidden: int) -> bool:
    """Whether an MLP of these sizes fits into shared memory."""
    return padded(channels) * padded(hidden) <= shared_memory() // _SHARED_BYTES


def mlp(x: Tensor, weights: list[Tensor], eps: float, more: Tensor | None = None) -> Tensor:
    """`more + fc2(gelu(fc1(norm(x))))` of contiguous x (T, c, P); `weights` are those of norm, fc1 and fc2."""
    y = torch.empty_like(x)
    m = weights[2].shape[1]
    grid, sizes = cut_positions(x, max(x.shape[1], m), 4096)
    extra = x if more is None else more
    _mlp_forward[grid](
        x, *weights, extra, y, x.shape[1], m, x.shape[2], eps, **sizes, HIDDEN=padded(m), MORE=more is not None
    )
    return y


def mlp_backward(x: Tensor, weights: list[Tensor], grad: Tensor, eps: float) -> list[Tensor]:
    """Gradients of the input and of the six weights."""
    count, c, positions = x.shape
    m = weights[2].shape[1]
    wide, half = padded(c) * padded(m) > 1024, x.element_size() == 2
    grid, sizes = cut_positions(x, max(c, m), (8192 if half else 2048) if wide else (2048 if half else 1024))
    warps = {"num_warps": 8} if wide else {"num_warps": 4, "maxnreg": 128 if half else None}
    of_x = torch.empty_like(x)
    partial = [w.new_empty(count, grid[0], *w.shape[1:]) for w in weights]
    options = {"HIDDEN": padded(m), "num_stages": 2, **warps}
    _mlp_backward[grid](x, *weights[:-1], grad, of_x, *partial, c, m, positions, eps, **sizes, **options)
    return [of_x, *(value.sum(1) for value in partial)]


def norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm of contiguous x (T, c, P) over c."""
    y = torch.empty_like(x)
    grid, sizes = cut_positions(x, x.shape[1], 2048)
    _norm_forward[grid](x, gain, shift, y, *x.shape[1:], eps, **sizes)
    return y


def norm_backward(x: Tensor, gain: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, gain and shift."""
    count, c, positions = x.shape
    grid, sizes = cut_positions(x, c, 2048)
    of_x = torch.empty_like(x)
    of_gain, of_shift = gain.new_empty(count, grid[0], c), gain.new_empty(count, grid[0], c)
    _norm_backward[grid](x, gain, grad, of_x, of_gain, of_shift, c, positions, eps, **sizes)
    return of_x, of_gain.sum(1), of_shift.sum(1)
