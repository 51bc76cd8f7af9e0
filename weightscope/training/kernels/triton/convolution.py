"""The depthwise convolution of `weightscope.training.kernels.pytorch` for tensor cores.

A block of image rows is one small banded Toeplitz matrix, built in registers, times the window of rows around it. With
the batch innermost the product's operand is contiguous in memory.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightscope.training.kernels import pytorch
from weightscope.training.kernels.triton.common import PRECISION, PROGRAMS, SMALLEST, padded, shared_memory, sum_type

_MATRIX = 8192  # entries of a Toeplitz matrix, which is kept in registers
_TAPS = 1 << 17  # entries of the matrix that the taps' gradients are gathered from
_SHARED_BYTES = 16  # for each entry of a padded matrix in float32, measured on the compiled kernels, rounded up


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
    """(M, N), from the pixels of WINDOW rows to those of ROWS rows, the first of which is row ABOVE of the window."""
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
    """Pointers to COUNT pixels of (H, W, B) from row `top` on, and a mask of those in the image and in `rows`."""
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
    # Entry (to, source) of `total` is part of the gradient of the tap that connects the two pixels.
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


@dataclass(frozen=True)
class Blocks:
    """How images are divided: `rows` rows are computed from the `window` rows around them, `above` of which precede.

    `m` and `n` are the numbers of pixels of both, padded to powers of two.
    """

    rows: int
    window: int
    above: int
    m: int
    n: int


@lru_cache(maxsize=64)
def blocks(height: int, width: int, k: int, dilation: int, half: bool = True) -> Blocks | None:
    """The division with the fewest multiplications per pixel; None if no matrix is small enough.

    Args:
        height: of the images.
        width: of the images.
        k: side of the filters.
        dilation: the distance between taps.
        half: whether activations have 16 bits; float32 needs smaller windows.
    """
    reach = dilation * (k - 1) // 2
    found = []
    for rows in range(1, height + 1):
        window, above = (height, 0) if rows == height else (rows + 2 * reach, reach)
        m, n = (max(SMALLEST, triton.next_power_of_2(count * width)) for count in (rows, window))
        fits = m * n <= min(_MATRIX, shared_memory() // _SHARED_BYTES) and n <= (512 if half else 256)
        if fits and m * triton.next_power_of_2(k * k) <= _TAPS:
            found.append((m * n * -(-height // rows), -rows, Blocks(rows, window, above, m, n)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def convolve(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """The depthwise convolution of contiguous x (C, H, W, B) with weight (C, k, k) and bias (C,)."""
    channels, height, width, batch = x.shape
    cut = blocks(height, width, weight.shape[-1], dilation, x.element_size() == 2)
    if cut is None:
        return pytorch.convolve(x, weight, dilation) + bias[:, None, None, None].to(x.dtype)
    y = torch.empty_like(x)
    size = padded(batch, 64)
    _depthwise_forward[(channels, triton.cdiv(batch, size))](
        x, weight, bias, y, batch, **_geometry(x, weight, dilation, cut), BATCH=size
    )
    return y


def convolve_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilation: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, filters and bias; `more` is added to the first."""
    channels, height, width, batch = x.shape
    k = weight.shape[-1]
    cut = blocks(height, width, k, dilation, x.element_size() == 2)
    if cut is None:
        of_x = pytorch.convolve(grad, weight.flip(1, 2), dilation)
        of_weight = pytorch.weight_gradient(x, grad, k, dilation).to(weight.dtype)
        return of_x if more is None else of_x + more, of_weight, grad.sum((1, 2, 3), dtype=weight.dtype)
    size = padded(batch, 64)
    parts = min(triton.cdiv(batch, size), triton.cdiv(PROGRAMS, channels))
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
        "SUM": sum_type(x),
        "num_warps": 4 if cut.m * cut.n <= _MATRIX // 4 else 8,
        "num_stages": 2 if x.element_size() == 2 else 1,
    }
