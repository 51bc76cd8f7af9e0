"""Functions shared by the kernels, and how work is divided into programs."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# A float32 product as three TF32 products on tensor cores: nearly as accurate as float32.
PRECISION = tl.constexpr("tf32x3")
SMALLEST = 16  # smallest side of an operand of `tl.dot`
PROGRAMS = 1024  # enough for several on every multiprocessor of current GPUs
_SHARED = 232_448  # bytes of shared memory per program on an H100


@triton.jit
def normal_cdf(h, SUM: tl.constexpr):
    """The standard normal distribution function at h, and exp(-h^2 / 2), which is proportional to the density.

    Exact in float64; otherwise Abramowitz and Stegun, formula 7.1.26, whose error of 0.75e-7 is close to float32's
    rounding error and which uses the same exponential.
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
def gelu(h, SUM: tl.constexpr):
    """`h Phi(h)`."""
    cdf, _ = normal_cdf(h, SUM)
    return h * cdf


@triton.jit
def gelu_and_slope(h, SUM: tl.constexpr):
    """GELU and its derivative."""
    cdf, e = normal_cdf(h, SUM)
    return h * cdf, cdf + h * e * 0.3989422804014327


@triton.jit
def standardised(x, inside, c, eps):
    """The columns of x (C, P), standardised over their first c rows, and the scale factors (P,)."""
    centred = tl.where(inside, x - (tl.sum(x, 0) / c)[None, :], 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / c + eps)
    return centred * factor[None, :], factor


@triton.jit
def standardised_backward(grad, normal, factor, inside, c):
    """The gradient of the input of `standardised`, given that of its output."""
    along = tl.sum(grad * normal, 0) / c
    return tl.where(inside, grad - (tl.sum(grad, 0) / c)[None, :] - normal * along[None, :], 0.0) * factor[None, :]


@triton.jit
def vector(at, size, SIZE: tl.constexpr, SUM: tl.constexpr):
    """`size` numbers padded with zeros to (SIZE,)."""
    index = tl.arange(0, SIZE)
    return tl.load(at + index, mask=index < size, other=0.0).to(SUM)


@triton.jit
def square(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a (rows, columns) matrix padded to (ROWS, COLUMNS), and a mask of its entries."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return i * columns + j, (i < rows) & (j < columns)


@triton.jit
def columns(positions, c, P, C: tl.constexpr):
    """Offsets of some positions of (c, P), and a mask of those within it."""
    i = tl.arange(0, C)[:, None]
    return i.to(tl.int64) * P + positions[None, :], (i < c) & (positions < P)[None, :]


@cache
def shared_memory() -> int:
    """Bytes of shared memory per program on this device; those of an H100 if there is no GPU."""
    if not torch.cuda.is_available():
        return _SHARED
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch's stub lacks the field
    return int(properties.shared_memory_per_block_optin)


def sum_type(x: Tensor) -> tl.dtype:
    """The type in which sums over activations of x's type accumulate."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def padded(size: int, most: int | None = None) -> int:
    """The next power of two, at least SMALLEST and at most `most`."""
    power = max(SMALLEST, triton.next_power_of_2(size))
    return power if most is None else min(power, most)


def cut_positions(x: Tensor, width: int, entries: int) -> tuple[tuple[int, int], dict[str, object]]:
    """The grid (S, T) for x (T, c, P), and the size arguments of all kernels over positions.

    A program works on `entries / width` positions at a time, and the positions of a network are divided into S parts so
    that there are enough programs.
    """
    count, c, positions = x.shape
    size = padded(positions, max(SMALLEST, min(256, entries // padded(width))))
    parts = min(triton.cdiv(positions, size), triton.cdiv(4 * PROGRAMS, count))
    return (parts, count), {"C": padded(c), "POSITIONS": size, "SUM": sum_type(x)}
