"""Covariances beyond memory: the matrix is computed on disk, panel by panel, each in one pass over the data."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, BinaryIO

import numpy as np
from scipy.linalg import blas

from weightscope.errors import DataError, UsageError
from weightscope.statistics.moments import BLOCK, finite_rows

# The passes hold about this many arrays of BLOCK rows: read ahead, waiting, centred in float64, rounded, cut.
_BLOCKS = 8


@dataclass(frozen=True)
class Margins:
    """Mean and variance of every coordinate, from one pass over rows.

    Attributes:
        mean: (D,) float64.
        variance: (D,) float64, divisor n - 1.
        n: number of finite rows.
        excluded: number of rows left out because they contain a non-finite number.
    """

    mean: np.ndarray
    variance: np.ndarray
    n: int
    excluded: int


def margins(chunks: Iterable[np.ndarray], size: int) -> Margins:
    """Means and variances in one pass, merged block by block (Chan, Golub and LeVeque 1983, Eq. 2.1).

    Args:
        chunks: rows (n, D), float32 or float64.
        size: D.

    Raises:
        DataError: if fewer than 2 rows are finite.
    """
    mean, squares, n, excluded = np.zeros(size), np.zeros(size), 0, 0
    for rows in chunks:
        good = rows[finite_rows(rows)]
        excluded += len(rows) - len(good)
        if not len(good):
            continue
        # About its first row: a constant column has a sum of squares of exactly zero.
        z = np.subtract(good, good[0], dtype=np.float64)
        shift = z.mean(axis=0)
        z -= shift
        distance = good[0] + shift - mean if n else np.zeros(size)
        mean = mean + distance * (len(good) / (n + len(good))) if n else good[0] + shift
        squares += np.einsum("ij,ij->j", z, z) + distance**2 * (n * len(good) / (n + len(good)))
        n += len(good)
    if n < 2:
        raise DataError(f"expected at least 2 finite rows, found {n} ({excluded} excluded as not finite)")
    return Margins(mean, squares / (n - 1), n, excluded)


def write_covariance(
    passes: Callable[[], Iterable[np.ndarray]],
    size: int,
    file: BinaryIO,
    *,
    dtype: Any = np.float32,
    correlation: bool = False,
    memory: int = 2 << 30,
) -> Margins:
    """Write the (D, D) covariance of rows as a `.npy` file, in memory independent of N and D^2.

        C[p, :] = sum over rows of (x - mean)_p (x - mean)^T / (n - 1)   for panels p of consecutive coordinates

    The first pass computes the means; each further one fills as many rows of C as fit into `memory`, from the diagonal
    on, and their transpose. Products are exact to the precision's rounding: rows are centred in float64.

    Args:
        passes: called for every pass; yields the same rows (n, D) each time, in blocks of at most 256.
        size: D.
        file: open for writing, at its start.
        dtype: float32 or float64, of the sums and of the file.
        correlation: divide by both standard deviations; rows of constant coordinates are NaN.
        memory: bytes for the panel and for blocks of rows.

    Returns:
        Means, variances and counts.

    Raises:
        UsageError: if the memory does not suffice for one row of C and the blocks.
        DataError: if fewer than 2 rows are finite, or two passes differ.
    """
    dtype = np.dtype(dtype)
    left = memory - _BLOCKS * BLOCK * size * 8
    step = min(size, left // (size * dtype.itemsize))
    if step < 1:
        need = (_BLOCKS * BLOCK * 8 + dtype.itemsize) * size
        raise UsageError(f"memory: {size} coordinates need at least {need} bytes, found {memory}")
    known = margins(passes(), size)
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (size, size)})
    file.flush()
    start = file.tell()
    os.ftruncate(file.fileno(), start + size * size * dtype.itemsize)
    with np.errstate(divide="ignore"):
        scale = np.where(known.variance > 0, 1 / np.sqrt(known.variance), np.nan) if correlation else None
    for top in range(0, size, step):
        bottom = min(size, top + step)
        panel = _panel(passes(), known, top, bottom, dtype)
        panel /= known.n - 1
        if scale is not None:
            panel *= scale[top:bottom, None].astype(dtype)
            panel *= scale[top:].astype(dtype)
            panel[np.arange(bottom - top), np.arange(bottom - top)] = np.where(
                known.variance[top:bottom] > 0, 1, np.nan
            )
        _put(file, start, size, top, panel)
    return known


def _panel(rows: Iterable[np.ndarray], known: Margins, top: int, bottom: int, dtype: np.dtype) -> np.ndarray:
    """Sums of products of coordinates top to bottom with those from top on, (bottom - top, D - top)."""
    gemm = blas.dgemm if dtype == np.float64 else blas.sgemm
    out = np.zeros((bottom - top, len(known.mean) - top), dtype)
    n, centre = 0, known.mean[top:]
    for block in _pieces(rows):
        z = np.subtract(block[:, top:], centre, dtype=np.float64).astype(dtype, copy=False)
        n += len(z)
        # out.T is (D - top, panel) in Fortran order: one call adds in place.
        gemm(1.0, z.T, np.ascontiguousarray(z[:, : bottom - top]).T, beta=1.0, c=out.T, trans_b=1, overwrite_c=1)
    if n != known.n:
        raise DataError(f"expected {known.n} finite rows in every pass, found {n}; did the data change?")
    return out


def _pieces(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The finite rows, at most BLOCK at a time."""
    for rows in chunks:
        good = finite_rows(rows)
        rows = rows if good.all() else rows[good]
        for first in range(0, len(rows), BLOCK):
            yield rows[first : first + BLOCK]


def _put(file: BinaryIO, start: int, size: int, top: int, panel: np.ndarray) -> None:
    """Write a panel's rows, and the part right of the diagonal block transposed as columns."""
    width, item = len(panel), panel.itemsize

    def write(row: int, column: int, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B")
        position = start + (row * size + column) * item
        while data:
            done = os.pwrite(file.fileno(), data, position)
            data, position = data[done:], position + done

    for i in range(width):
        panel[i, :i] = panel[:i, i]  # symmetric to the bit
    for i, row in zip(count(top), panel, strict=False):
        write(i, top, row)
    for first in range(width, panel.shape[1], BLOCK):
        block = np.ascontiguousarray(panel[:, first : first + BLOCK].T)
        for i, row in zip(count(top + first), block, strict=False):
            write(i, top, row)
