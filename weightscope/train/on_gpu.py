"""What a training step on a GPU spends its time on, as Triton kernels; `compiled.py` makes them differentiable.

Activations are bfloat16, float32, or (in Triton's interpreter) float64; weights and their gradients keep their own
type, float32 in training. Products take the activations' type and are summed in at least float32; everything between
load and store is at least float32. No kernel adds with atomic operations: sums over the batch go through partial sums
in a fixed order, so a step has the same bits every time.

The convolution is the one of `depthwise.py`: a block of image rows is one small banded Toeplitz matrix, built in
registers, times the window of rows around it. With the batch innermost that is a product for tensor cores whose
operand is contiguous in memory.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightscope.errors import UsageError
from weightscope.train import depthwise

if TYPE_CHECKING:
    from weightscope.recipe import AugmentConfig

_MATRIX = 8192  # entries of a Toeplitz matrix, which lies in registers
_TAPS = 1 << 17  # entries of what the taps' gradients are gathered from
_SHARED = 232_448  # bytes of shared memory that a program can have on an H100
# Bytes of shared memory for each entry of a padded matrix in float32, read off the compiled kernels, rounded up.
_SHARED_TOEPLITZ, _SHARED_MLP = 16, 34
_SMALLEST = 16  # side of what `tl.dot` takes
PRECISION = tl.constexpr(
    "tf32x3"
)  # of products of float32: three of tensor cores, nearly as accurate as one in float32
_PROGRAMS = 1024  # enough for every multiprocessor of today's GPUs to hold several


@triton.jit
def _toeplitz(
    taps,
    W: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    ABOVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FLIP: tl.constexpr,
):
    """(M, N), from the pixels of WINDOW rows to those of ROWS rows, the first of which is the window's row ABOVE."""
    to, source = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    reach = DILATION * (K - 1) // 2
    dy = source // W - ABOVE - to // W + reach  # distance from the kernel's first tap, in pixels
    dx = source % W - to % W + reach
    hit = (dy >= 0) & (dy < K * DILATION) & (dy % DILATION == 0)
    hit &= (dx >= 0) & (dx < K * DILATION) & (dx % DILATION == 0)
    hit &= (to < ROWS * W) & (source < WINDOW * W)
    tap = dy // DILATION * K + dx // DILATION
    if FLIP:
        tap = K * K - 1 - tap
    return tl.load(taps + tap, mask=hit, other=0.0)


@triton.jit
def _pixels(image, top, rows, batch, H: tl.constexpr, W: tl.constexpr, B, COUNT: tl.constexpr):
    """Pointers to COUNT pixels of (H, W, B) from row `top` on, and which of them lie in the image and in `rows`."""
    pixel = tl.arange(0, COUNT)
    row = top + pixel // W
    inside = (row >= 0) & (row < H) & (pixel < rows * W)
    where = image + (top * W + pixel)[:, None] * B + batch[None, :]
    return where, inside[:, None] & (batch < B)[None, :]


@triton.jit
def _depthwise_forward(
    x,
    weight,
    bias,
    y,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    ABOVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    SUM: tl.constexpr,
):
    """One channel and BATCH images."""
    channel = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    x += channel * H * W * B
    y += channel * H * W * B
    matrix = _toeplitz(weight + channel * K * K, W, K, DILATION, ROWS, WINDOW, ABOVE, M, N, False)
    matrix = matrix.to(x.dtype.element_ty)
    shift = tl.load(bias + channel).to(SUM)
    for top in range(0, H, ROWS):
        where, inside = _pixels(x, top - ABOVE, WINDOW, batch, H, W, B, N)
        window = tl.load(where, mask=inside, other=0.0)
        out = tl.dot(matrix, window, input_precision=PRECISION, out_dtype=SUM) + shift
        where, inside = _pixels(y, top, ROWS, batch, H, W, B, M)
        tl.store(where, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _depthwise_backward(
    x,
    weight,
    grad,
    more,
    grad_x,
    grad_weight,
    grad_bias,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    DILATION: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    ABOVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    TAPS: tl.constexpr,
    MORE: tl.constexpr,
    SUM: tl.constexpr,
):
    """One channel and one of S parts of the batch; partial sums into (C, S, K^2) and (C, S)."""
    channel, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    offset = channel * H * W * B
    x += offset
    grad += offset
    grad_x += offset
    flipped = _toeplitz(weight + channel * K * K, W, K, DILATION, ROWS, WINDOW, ABOVE, M, N, True)
    flipped = flipped.to(grad.dtype.element_ty)
    total = tl.zeros((M, N), SUM)
    of_bias = tl.zeros((M,), SUM)
    for start in range(part * BATCH, B, parts * BATCH):
        batch = start + tl.arange(0, BATCH)
        for top in range(0, H, ROWS):
            where, inside = _pixels(grad, top - ABOVE, WINDOW, batch, H, W, B, N)
            window = tl.load(where, mask=inside, other=0.0)
            to, kept = _pixels(grad_x, top, ROWS, batch, H, W, B, M)
            out = tl.dot(flipped, window, input_precision=PRECISION, out_dtype=SUM)
            if MORE:
                of_sum, _ = _pixels(more + offset, top, ROWS, batch, H, W, B, M)
                out += tl.load(of_sum, mask=kept, other=0.0).to(SUM)
            tl.store(to, out.to(grad_x.dtype.element_ty), mask=kept)
            where, _ = _pixels(x, top - ABOVE, WINDOW, batch, H, W, B, N)
            window = tl.load(where, mask=inside, other=0.0)
            where, _ = _pixels(grad, top, ROWS, batch, H, W, B, M)
            rows = tl.load(where, mask=kept, other=0.0)
            total = tl.dot(rows, tl.trans(window), total, input_precision=PRECISION, out_dtype=SUM)
            of_bias += tl.sum(rows.to(SUM), 1)
    # Entry (to, source) of `total` belongs to the tap that leads from one to the other.
    to, tap = tl.arange(0, M)[:, None], tl.arange(0, TAPS)[None, :]
    reach = DILATION * (K - 1) // 2
    row = to // W + tap // K * DILATION - reach + ABOVE
    column = to % W + tap % K * DILATION - reach
    hit = (row >= 0) & (row < WINDOW) & (column >= 0) & (column < W) & (tap < K * K) & (to < ROWS * W)
    taken = tl.gather(total, tl.where(hit, row * W + column, 0), 1)
    of_taps = tl.sum(tl.where(hit, taken, 0.0), 0)
    taps = tl.arange(0, TAPS)
    here = channel * parts + part
    tl.store(grad_weight + here * K * K + taps, of_taps, mask=taps < K * K)
    tl.store(grad_bias + here, tl.sum(of_bias, 0))


@triton.jit
def _normal_cdf(h, SUM: tl.constexpr):
    """The standard normal's distribution function at h, and exp(-h^2 / 2), of which its density is a multiple.

    Exact in float64; else by Abramowitz and Stegun, formula 7.1.26, whose error of 0.75e-7 is near float32's rounding
    and which shares the exponential.
    """
    if SUM == tl.float64:  # noqa: SIM300
        e = tl.exp(-0.5 * h * h)
        cdf = 0.5 * (1 + tl.erf(h * 0.7071067811865476))
    else:
        e = tl.exp2(-0.7213475204444817 * h * h)
        t = 1 / (1 + 0.23164190 * tl.abs(h))
        tail = e * t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        cdf = tl.where(h < 0, tail, 1 - tail)
    return cdf, e


@triton.jit
def _gelu(h, SUM: tl.constexpr):
    cdf, _ = _normal_cdf(h, SUM)
    return h * cdf


@triton.jit
def _gelu_and_slope(h, SUM: tl.constexpr):
    cdf, e = _normal_cdf(h, SUM)
    return h * cdf, cdf + h * e * 0.3989422804014327


@triton.jit
def _standardised(x, inside, c, eps):
    """The columns of x (C, P) at mean 0 and variance 1 over their first c rows, and the factors (P,) of that."""
    centred = tl.where(inside, x - (tl.sum(x, 0) / c)[None, :], 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / c + eps)
    return centred * factor[None, :], factor


@triton.jit
def _standardised_backward(grad, normal, factor, inside, c):
    """The derivative of `_standardised`'s input from that of its value."""
    along = tl.sum(grad * normal, 0) / c
    return tl.where(inside, grad - (tl.sum(grad, 0) / c)[None, :] - normal * along[None, :], 0.0) * factor[None, :]


@triton.jit
def _vector(at, size, SIZE: tl.constexpr, SUM: tl.constexpr):
    index = tl.arange(0, SIZE)
    return tl.load(at + index, mask=index < size, other=0.0).to(SUM)


@triton.jit
def _square(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a (rows, columns) matrix padded to (ROWS, COLUMNS), and which are within."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return i * columns + j, (i < rows) & (j < columns)


@triton.jit
def _columns(positions, c, P, C: tl.constexpr):
    """Offsets of some positions of (c, P), and which are within."""
    i = tl.arange(0, C)[:, None]
    return i.to(tl.int64) * P + positions[None, :], (i < c) & (positions < P)[None, :]


@triton.jit
def _folded(gain, shift, w1, b1, c, m, C: tl.constexpr, HIDDEN: tl.constexpr, SUM: tl.constexpr):
    """`W1 (gain n + shift) + b1` as one linear map of n: W1 diag(gain) and b1 + W1 shift."""
    at, within = _square(m, c, HIDDEN, C)
    raw = tl.load(w1 + at, mask=within, other=0.0).to(SUM)
    bias = _vector(b1, m, HIDDEN, SUM) + tl.sum(raw * _vector(shift, c, C, SUM)[None, :], 1)
    return raw * _vector(gain, c, C, SUM)[None, :], bias


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
    first, bias = _folded(gain + net * c, shift + net * c, w1 + net * m * c, b1 + net * m, c, m, C, HIDDEN, SUM)
    first = first.to(kind)
    second_at, second_within = _square(c, m, C, HIDDEN)
    second = tl.load(w2 + net * m * c + second_at, mask=second_within, other=0.0).to(kind)
    second_bias = _vector(b2 + net * c, c, C, SUM)[:, None]
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = _columns(start + tl.arange(0, POSITIONS), c, P, C)
        normal, _ = _standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        hidden = tl.dot(first, normal.to(kind), input_precision=PRECISION, out_dtype=SUM) + bias[:, None]
        out = tl.dot(second, _gelu(hidden, SUM).to(kind), input_precision=PRECISION, out_dtype=SUM) + second_bias
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
    """One network and one of S parts of the positions; the weights' derivatives go into partial sums (T, S, ...)."""
    net = tl.program_id(1).to(tl.int64)
    x += net * c * P
    grad += net * c * P
    grad_x += net * c * P
    kind = x.dtype.element_ty
    first, bias = _folded(gain + net * c, shift + net * c, w1 + net * m * c, b1 + net * m, c, m, C, HIDDEN, SUM)
    first = first.to(kind)
    second_at, second_within = _square(c, m, C, HIDDEN)
    second = tl.load(w2 + net * m * c + second_at, mask=second_within, other=0.0).to(kind)
    of_first, of_second = tl.zeros((HIDDEN, C), SUM), tl.zeros((C, HIDDEN), SUM)
    # Sums over positions as products with ones: tensor cores add without exchanges between threads.
    ones = tl.full((POSITIONS, 16), 1.0, kind)
    of_bias, of_y_sum = tl.zeros((HIDDEN, 16), SUM), tl.zeros((C, 16), SUM)
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = _columns(start + tl.arange(0, POSITIONS), c, P, C)
        normal, factor = _standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        rounded = normal.to(kind)
        hidden = tl.dot(first, rounded, input_precision=PRECISION, out_dtype=SUM) + bias[:, None]
        of_y = tl.load(grad + at, mask=inside, other=0.0)
        # Positions beyond the last have no gradient, so what is computed for them adds nothing.
        active, slope = _gelu_and_slope(hidden, SUM)
        of_second = tl.dot(of_y, tl.trans(active.to(kind)), of_second, input_precision=PRECISION, out_dtype=SUM)
        of_y_sum = tl.dot(of_y, ones, of_y_sum, input_precision=PRECISION, out_dtype=SUM)
        of_hidden = tl.dot(tl.trans(second), of_y, input_precision=PRECISION, out_dtype=SUM) * slope
        of_hidden = of_hidden.to(kind)
        of_first = tl.dot(of_hidden, tl.trans(rounded), of_first, input_precision=PRECISION, out_dtype=SUM)
        of_bias = tl.dot(of_hidden, ones, of_bias, input_precision=PRECISION, out_dtype=SUM)
        of_normal = tl.dot(tl.trans(first), of_hidden, input_precision=PRECISION, out_dtype=SUM)
        tl.store(grad_x + at, _standardised_backward(of_normal, normal, factor, inside, c).to(kind), mask=inside)
    # Unfold: with F the derivative of W1 diag(gain) and f that of the bias, W1 has F diag(gain) + f shift^T, gain has
    # the columns' sums of W1 * F, and shift has W1^T f.
    here = net * tl.num_programs(0) + tl.program_id(0)
    channels, units = tl.arange(0, C), tl.arange(0, HIDDEN)
    f, of_b2 = tl.sum(of_bias, 1) / 16, tl.sum(of_y_sum, 1) / 16
    at, within = _square(m, c, HIDDEN, C)
    raw = tl.load(w1 + net * m * c + at, mask=within, other=0.0).to(SUM)
    g, s = _vector(gain + net * c, c, C, SUM), _vector(shift + net * c, c, C, SUM)
    tl.store(grad_w1 + here * m * c + at, of_first * g[None, :] + f[:, None] * s[None, :], mask=within)
    tl.store(grad_gain + here * c + channels, tl.sum(of_first * raw, 0), mask=channels < c)
    tl.store(grad_shift + here * c + channels, tl.sum(raw * f[:, None], 0), mask=channels < c)
    tl.store(grad_b1 + here * m + units, f, mask=units < m)
    tl.store(grad_w2 + here * m * c + second_at, of_second, mask=second_within)
    tl.store(grad_b2 + here * c + channels, of_b2, mask=channels < c)


@triton.jit
def _norm_forward(x, gain, shift, y, c, P, eps, C: tl.constexpr, POSITIONS: tl.constexpr, SUM: tl.constexpr):
    net = tl.program_id(1).to(tl.int64)
    g, s = _vector(gain + net * c, c, C, SUM)[:, None], _vector(shift + net * c, c, C, SUM)[:, None]
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = _columns(start + tl.arange(0, POSITIONS), c, P, C)
        at += net * c * P
        normal, _ = _standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
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
    g = _vector(gain + net * c, c, C, SUM)[:, None]
    of_gain, of_shift = tl.zeros((C,), SUM), tl.zeros((C,), SUM)
    for start in range(tl.program_id(0) * POSITIONS, P, tl.num_programs(0) * POSITIONS):
        at, inside = _columns(start + tl.arange(0, POSITIONS), c, P, C)
        at += net * c * P
        normal, factor = _standardised(tl.load(x + at, mask=inside, other=0.0).to(SUM), inside, c, eps)
        of_y = tl.load(grad + at, mask=inside, other=0.0).to(SUM)
        of_gain += tl.sum(of_y * normal, 1)
        of_shift += tl.sum(of_y, 1)
        out = _standardised_backward(of_y * g, normal, factor, inside, c)
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), mask=inside)
    channels = tl.arange(0, C)
    here = (net * tl.num_programs(0) + tl.program_id(0)) * c + channels
    tl.store(grad_gain + here, of_gain, mask=channels < c)
    tl.store(grad_shift + here, of_shift, mask=channels < c)


@triton.jit
def _gelu_norm_forward(
    x, gain, shift, more, y, mean, factor, P, eps, BLOCK: tl.constexpr, MORE: tl.constexpr, SUM: tl.constexpr
):
    """One channel of one network: its GELU, normalised over all P positions. Read three times, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    x += row * P
    y += row * P
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        total += tl.where(inside, _gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM), 0.0)
    middle = tl.sum(total, 0) / P
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        centred = tl.where(inside, _gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle, 0.0)
        total += centred * centred
    scale = tl.rsqrt(tl.sum(total, 0) / P + eps)
    tl.store(mean + row, middle)
    tl.store(factor + row, scale)
    g, s = tl.load(gain + row).to(SUM), tl.load(shift + row).to(SUM)
    for start in range(0, P, BLOCK):
        inside = start + at < P
        out = (_gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle) * scale * g + s
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
        normal = (_gelu(tl.load(x + start + at, mask=inside, other=0.0).to(SUM), SUM) - middle) * scale
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
        active, slope = _gelu_and_slope(h, SUM)
        normal = (active - middle) * scale
        of_y = tl.load(grad + start + at, mask=inside, other=0.0).to(SUM)
        out = (of_y - of_shift / P - normal * (of_gain / P)) * steepness * slope
        tl.store(grad_x + start + at, out.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _whole(draws, below):
    """As `weightscope.data.augment.whole`."""
    return tl.minimum((draws * below).to(tl.int32), below - 1)


@triton.jit
def _image_row(
    images,
    index,
    draws,
    image,
    within,
    channel,
    y,
    H: tl.constexpr,
    W: tl.constexpr,
    C,
    P,
    WIDTH: tl.constexpr,
    CROP: tl.constexpr,
    FLIP: tl.constexpr,
    CUTOUT: tl.constexpr,
):
    """Row `y` of some augmented images, (images, WIDTH) in [0, 1]; as `weightscope.data.augment.augment`."""
    which = tl.load(index + image, mask=within, other=0)
    draws += image * P
    x = tl.arange(0, WIDTH)[None, :]
    source_y, source_x = tl.zeros_like(image) + y, tl.zeros_like(image)[:, None] + x
    if FLIP:
        flip = tl.load(draws + 2 * (CROP > 0), mask=within, other=0.0) < 0.5
        source_x = tl.where(flip[:, None], W - 1 - source_x, source_x)
    if CROP > 0:
        source_y += _whole(tl.load(draws, mask=within, other=0.0), 2 * CROP + 1) - CROP
        source_x += (_whole(tl.load(draws + 1, mask=within, other=0.0), 2 * CROP + 1) - CROP)[:, None]
    kept = (within & (source_y >= 0) & (source_y < H))[:, None] & (source_x >= 0) & (source_x < W) & (x < W)
    if CUTOUT > 0:
        top = _whole(tl.load(draws + P - 2, mask=within, other=0.0), H) - CUTOUT // 2
        left = (_whole(tl.load(draws + P - 1, mask=within, other=0.0), W) - CUTOUT // 2)[:, None]
        kept &= ~(((y >= top) & (y < top + CUTOUT))[:, None] & (x >= left) & (x < left + CUTOUT))
    at = ((which * C + channel) * H + source_y)[:, None] * W + source_x
    return tl.load(images + at, mask=kept, other=0).to(tl.float32) / 255


@triton.jit
def _load_images(
    images,
    index,
    draws,
    shares,
    mean,
    std,
    out,
    B,
    C,
    P,
    H: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    CROP: tl.constexpr,
    FLIP: tl.constexpr,
    CUTOUT: tl.constexpr,
    MIXUP: tl.constexpr,
):
    """One row of one channel of BATCH images of one network."""
    net, channel, y = tl.program_id(0).to(tl.int64), tl.program_id(1) // H, tl.program_id(1) % H
    batch = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    within = batch < B
    m, s = tl.load(mean + channel), tl.load(std + channel)
    first = net * B
    row = _image_row(images, index, draws, first + batch, within, channel, y, H, W, C, P, WIDTH, CROP, FLIP, CUTOUT)
    row = (row - m) / s
    if MIXUP:  # with the image as far from the batch's end as this one is from its start
        other = first + B - 1 - batch
        more = _image_row(images, index, draws, other, within, channel, y, H, W, C, P, WIDTH, CROP, FLIP, CUTOUT)
        share = tl.load(shares + net)
        row = share * row + (1 - share) * ((more - m) / s)
    x = tl.arange(0, WIDTH)[:, None]
    at = (((net * C + channel) * H + y) * W + x) * B + batch[None, :]
    tl.store(out + at, tl.trans(row).to(out.dtype.element_ty), mask=(x < W) & within[None, :])


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


@dataclass(frozen=True)
class Blocks:
    """How images are cut for the convolution: ROWS rows from the WINDOW rows around them, of which ABOVE precede.

    M and N are the pixels of both, padded to powers of two.
    """

    rows: int
    window: int
    above: int
    m: int
    n: int


@cache
def _shared_memory() -> int:
    """Bytes that one program can have on this device; an H100's without one."""
    if not torch.cuda.is_available():
        return _SHARED
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


@lru_cache(maxsize=64)
def blocks(height: int, width: int, k: int, dilation: int, half: bool = True) -> Blocks | None:
    """The cut that multiplies least for a pixel; None where no matrix is small enough.

    Args:
        height: of the images.
        width: of the images.
        k: side of the filters.
        dilation: the distance between taps.
        half: whether activations take 16 bits; float32 leaves room for smaller windows only.
    """
    reach = dilation * (k - 1) // 2
    found = []
    for rows in range(1, height + 1):
        window, above = (height, 0) if rows == height else (rows + 2 * reach, reach)
        m, n = (max(_SMALLEST, triton.next_power_of_2(count * width)) for count in (rows, window))
        fits = m * n <= min(_MATRIX, _shared_memory() // _SHARED_TOEPLITZ) and n <= (512 if half else 256)
        if fits and m * triton.next_power_of_2(k * k) <= _TAPS:
            found.append((m * n * -(-height // rows), -rows, Blocks(rows, window, above, m, n)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def probe(device: torch.device) -> None:
    """Launch the smallest kernel.

    Raises:
        UsageError: if Triton cannot build or launch it, for want of a C compiler, say.
    """
    try:
        norm(torch.zeros(1, 1, 1, device=device), *torch.zeros(2, 1, 1, device=device), 1.0)
    except RuntimeError as error:
        raise UsageError(
            f"kernels = 'compiled' need Triton on a GPU, and it does not work here: {error}; use kernels = 'torch'"
        ) from error


def convolve(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """As `depthwise.depthwise_conv2d` of contiguous x (C, H, W, B)."""
    channels, height, width, batch = x.shape
    cut = blocks(height, width, weight.shape[-1], dilation, x.element_size() == 2)
    if cut is None:
        return depthwise.convolve(x, weight, dilation) + bias[:, None, None, None].to(x.dtype)
    y = torch.empty_like(x)
    size = _padded(batch, 64)
    _depthwise_forward[(channels, triton.cdiv(batch, size))](
        x, weight, bias, y, batch, **_geometry(x, weight, dilation, cut), BATCH=size
    )
    return y


def convolve_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilation: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of input, filters and bias; `more` is added to the first."""
    channels, height, width, batch = x.shape
    k = weight.shape[-1]
    cut = blocks(height, width, k, dilation, x.element_size() == 2)
    if cut is None:
        of_x = depthwise.convolve(grad, weight.flip(1, 2), dilation)
        of_weight = depthwise.weight_gradient(x, grad, k, dilation).to(weight.dtype)
        return of_x if more is None else of_x + more, of_weight, grad.sum((1, 2, 3), dtype=weight.dtype)
    size = _padded(batch, 64)
    parts = min(triton.cdiv(batch, size), triton.cdiv(_PROGRAMS, channels))
    of_x = torch.empty_like(x)
    of_weight = torch.empty(channels, parts, k * k, dtype=weight.dtype, device=x.device)
    of_bias = torch.empty(channels, parts, dtype=weight.dtype, device=x.device)
    _depthwise_backward[(channels, parts)](
        x,
        weight,
        grad,
        grad if more is None else more,
        of_x,
        of_weight,
        of_bias,
        batch,
        **_geometry(x, weight, dilation, cut),
        BATCH=size,
        TAPS=triton.next_power_of_2(k * k),
        MORE=more is not None,
    )
    return of_x, of_weight.sum(1).view_as(weight), of_bias.sum(1)


def fits(channels: int, hidden: int) -> bool:
    """Whether an MLP of these sizes is small enough for `mlp`."""
    return _padded(channels) * _padded(hidden) <= _shared_memory() // _SHARED_MLP


def mlp(x: Tensor, weights: list[Tensor], eps: float, more: Tensor | None = None) -> Tensor:
    """As `compiled.norm_mlp` of contiguous x (T, c, P), plus `more`."""
    y = torch.empty_like(x)
    m = weights[2].shape[1]
    grid, sizes = _cut(x, max(x.shape[1], m), 4096)
    extra = x if more is None else more
    _mlp_forward[grid](
        x, *weights, extra, y, x.shape[1], m, x.shape[2], eps, **sizes, HIDDEN=_padded(m), MORE=more is not None
    )
    return y


def mlp_backward(x: Tensor, weights: list[Tensor], grad: Tensor, eps: float) -> list[Tensor]:
    """Derivatives of the input and of the six weights."""
    count, c, positions = x.shape
    m = weights[2].shape[1]
    wide, half = _padded(c) * _padded(m) > 1024, x.element_size() == 2
    grid, sizes = _cut(x, max(c, m), (8192 if half else 2048) if wide else (2048 if half else 1024))
    warps = {"num_warps": 8} if wide else {"num_warps": 4, "maxnreg": 128 if half else None}
    of_x = torch.empty_like(x)
    partial = [w.new_empty(count, grid[0], *w.shape[1:]) for w in weights]
    options = {"HIDDEN": _padded(m), "num_stages": 2, **warps}
    _mlp_backward[grid](x, *weights[:-1], grad, of_x, *partial, c, m, positions, eps, **sizes, **options)
    return [of_x, *(value.sum(1) for value in partial)]


def norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm of contiguous x (T, c, P) over c."""
    y = torch.empty_like(x)
    grid, sizes = _cut(x, x.shape[1], 2048)
    _norm_forward[grid](x, gain, shift, y, *x.shape[1:], eps, **sizes)
    return y


def norm_backward(x: Tensor, gain: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of input, gain and shift."""
    count, c, positions = x.shape
    grid, sizes = _cut(x, c, 2048)
    of_x = torch.empty_like(x)
    of_gain, of_shift = gain.new_empty(count, grid[0], c), gain.new_empty(count, grid[0], c)
    _norm_backward[grid](x, gain, grad, of_x, of_gain, of_shift, c, positions, eps, **sizes)
    return of_x, of_gain.sum(1), of_shift.sum(1)


def gelu_norm(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """GELU, then normalisation over P, of contiguous x (T, c, P), plus `more`; also mean and factor, (T, c) each."""
    count, c, positions = x.shape
    y = torch.empty_like(x)
    mean, factor = (torch.empty(count, c, dtype=gain.dtype, device=x.device) for _ in range(2))
    extra = x if more is None else more
    options = {"BLOCK": _padded(positions, 1024), "MORE": more is not None, "SUM": _sum(x)}
    _gelu_norm_forward[(count * c,)](x, gain, shift, extra, y, mean, factor, positions, eps, **options)
    return y, mean, factor


def gelu_norm_backward(
    x: Tensor, gain: Tensor, mean: Tensor, factor: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of input, gain and shift."""
    count, c, positions = x.shape
    of_x, of_gain, of_shift = torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)
    options = {"BLOCK": _padded(positions, 1024), "SUM": _sum(x)}
    _gelu_norm_backward[(count * c,)](x, gain, mean, factor, grad, of_x, of_gain, of_shift, positions, **options)
    return of_x, of_gain, of_shift


def load_images(
    images: Tensor,
    index: Tensor,
    draws: Tensor | None,
    shares: Tensor | None,
    moments: tuple[Tensor, Tensor],
    config: "AugmentConfig",
    dtype: torch.dtype,
) -> Tensor:
    """Augmented, normalised and mixed images as the networks take them, in one pass over memory.

    Args:
        images: uint8 (n, C, H, W), all that there are.
        index: (T, B), which images each network sees.
        draws: (T, B, P) uniform numbers as `augment` takes them, or None where nothing is random.
        shares: (T,) of mixup, or None without it.
        moments: mean and standard deviation of the channels, (C,) each.
        config: crop, flip and cutout; no operations.
        dtype: of the result.

    Returns:
        (T C, H, W, B).
    """
    count, batch = index.shape
    _, channels, height, width = images.shape
    out = torch.empty(count * channels, height, width, batch, dtype=dtype, device=images.device)
    size = _padded(batch, 64)
    _load_images[(count, channels * height, triton.cdiv(batch, size))](
        images,
        index,
        moments[0] if draws is None else draws,
        moments[0] if shares is None else shares,
        *moments,
        out,
        batch,
        channels,
        0 if draws is None else draws.shape[2],
        H=height,
        W=width,
        WIDTH=triton.next_power_of_2(width),
        BATCH=size,
        CROP=config.crop,
        FLIP=config.flip,
        CUTOUT=config.cutout,
        MIXUP=shares is not None,
    )
    return out


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
    """One step of `StackedAdamW` in place.

    Args:
        weights: (T, D).
        gradient: (T, D).
        moments: first and second, (T, D) each.
        trained: (D,) bool.
        rates: learning rate and decay, (T,) each.
        clip: the factor of each network's gradient, (T,).
        scalars: (3,), the factor of the rates, 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t).
        betas: b1 and b2.
        eps: added to the root of the second moment.
    """
    count, size = weights.shape
    block = _padded(size, 1024)
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


def _geometry(x: Tensor, weight: Tensor, dilation: int, cut: Blocks) -> dict[str, object]:
    return {
        "H": x.shape[1],
        "W": x.shape[2],
        "K": weight.shape[-1],
        "DILATION": dilation,
        "ROWS": cut.rows,
        "WINDOW": cut.window,
        "ABOVE": cut.above,
        "M": cut.m,
        "N": cut.n,
        "SUM": _sum(x),
        "num_warps": 4 if cut.m * cut.n <= _MATRIX // 4 else 8,
        "num_stages": 2 if x.element_size() == 2 else 1,
    }


def _sum(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _padded(size: int, most: int | None = None) -> int:
    """The power of two from `size` up, within what `tl.dot` takes and `most`."""
    padded = max(_SMALLEST, triton.next_power_of_2(size))
    return padded if most is None else min(padded, most)


def _cut(x: Tensor, width: int, entries: int) -> tuple[tuple[int, int], dict[str, object]]:
    """The grid (S, T) for x (T, c, P), and the sizes that all kernels over positions take.

    A program works on as many positions at a time as make `entries` of what is `width` wide, and the positions of a
    network are cut into S parts so that there are programs enough.
    """
    count, c, positions = x.shape
    size = _padded(positions, max(_SMALLEST, min(256, entries // _padded(width))))
    parts = min(triton.cdiv(positions, size), triton.cdiv(4 * _PROGRAMS, count))
    return (parts, count), {"C": _padded(c), "POSITIONS": size, "SUM": _sum(x)}
