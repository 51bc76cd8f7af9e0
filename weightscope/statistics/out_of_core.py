"""Covariances beyond memory: the matrix panel by panel on disk, or its leading eigenpairs only."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, BinaryIO, Literal, Protocol, Self, TypeVar

import numpy as np
from scipy.linalg import blas, eigh

from weightscope.errors import DataError, UsageError
from weightscope.statistics.moments import BLOCK, EntryMoments, add_gram, finite_rows

# The passes hold about this many arrays of BLOCK rows: read ahead, waiting, centred in float64, rounded, cut.
_BLOCKS = 8
T = TypeVar("T")


class Total(Protocol):
    """Applies a function to blocks of rows, in parts or all of them, and adds up (`+=`) what it returns: one pass."""

    def __call__(self, function: Callable[[Iterable[np.ndarray]], T], size: int = 0) -> T:
        """`size` is about how many bytes each result takes."""


def write_covariance(
    total: Total,
    size: int,
    file: BinaryIO,
    *,
    dtype: Any = np.float32,
    correlation: bool = False,
    memory: int = 2 << 30,
) -> EntryMoments:
    """Write the (D, D) covariance of rows as a `.npy` file, in memory independent of N and D^2.

        C[p, :] = sum over rows of (x - mean)_p (x - mean)^T / (n - 1)   for panels p of consecutive coordinates

    The first pass computes the means; each further one fills as many rows of C as fit into `memory`, from the diagonal
    on, and their transpose. Products are exact to the precision's rounding: rows are centred in float64.
    """
    dtype = np.dtype(dtype)
    left = memory - _BLOCKS * BLOCK * size * 8
    step = min(size, left // (size * dtype.itemsize))
    if step < 1:
        need = (_BLOCKS * BLOCK * 8 + dtype.itemsize) * size
        raise UsageError(f"memory: {size} coordinates need at least {need} bytes, found {memory}")
    known = total(partial(EntryMoments, size))
    variance = known.variance()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (size, size)})
    file.flush()
    start = file.tell()
    os.ftruncate(file.fileno(), start + size * size * dtype.itemsize)
    with np.errstate(divide="ignore"):
        scale = np.where(variance > 0, 1 / np.sqrt(variance), np.nan) if correlation else None
    for top in range(0, size, step):
        bottom = min(size, top + step)
        width = bottom - top
        found = total(partial(_Panel, known.mean[top:], width, dtype), width * (size - top) * dtype.itemsize)
        if found.n != known.n:
            raise DataError(f"expected {known.n} finite rows in every pass, found {found.n}; did the data change?")
        panel = found.products
        panel /= known.n - 1
        if scale is not None:
            panel *= scale[top:bottom, None].astype(dtype)
            panel *= scale[top:].astype(dtype)
            panel[np.arange(bottom - top), np.arange(bottom - top)] = np.where(variance[top:bottom] > 0, 1, np.nan)
        _put(file, start, size, top, panel)
    return known


class _Panel:
    """Sums of products of the first `width` coordinates with all of them, (width, D'), and the number of rows."""

    def __init__(self, centre: np.ndarray, width: int, dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
        gemm = blas.dgemm if dtype == np.float64 else blas.sgemm
        self.products, self.n = np.zeros((width, len(centre)), dtype), 0
        for block in _pieces(blocks):
            rows = block[:, block.shape[1] - len(centre) :]
            z = np.subtract(rows, centre, dtype=np.float64).astype(dtype, copy=False)
            self.n += len(z)
            # products.T is (D', width) in Fortran order: one call adds in place.
            own = np.ascontiguousarray(z[:, :width]).T
            gemm(1.0, z.T, own, beta=1.0, c=self.products.T, trans_b=1, overwrite_c=1)

    def __iadd__(self, other: Self) -> Self:
        self.products += other.products
        self.n += other.n
        return self


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


_COLUMNS = 2048  # columns of the data that are centred at once
_OVERSAMPLING, _PASSES = 16, 4  # of the randomised iteration


@dataclass(frozen=True)
class Eigenpairs:
    """The leading eigenpairs of the covariance of n rows."""

    values: np.ndarray  # (r,), descending; variances along the vectors
    vectors: np.ndarray  # (r, D), orthonormal rows; the largest entry of each is positive
    mean: np.ndarray  # (D,)
    total: float  # the trace of the covariance
    n: int  # number of finite rows
    excluded: int  # number of rows left out because they contain a non-finite number
    method: Literal["gram", "randomised"]  # "gram" (exact) or "randomised"

    @property
    def explained(self) -> np.ndarray:
        """The share of the total variance along each vector, (r,)."""
        return self.values / self.total if self.total else np.zeros_like(self.values)


def top_eigenpairs(total: Total, size: int, rank: int, *, memory: int = 2 << 30) -> Eigenpairs:
    """The `rank` leading eigenpairs of C = X^T X / (n - 1), X the centred rows (n, D).

    If the rows fit into `memory` as float32 and n <= D, from the Gram matrix: `X X^T = U S^2 U^T` gives
    `V = S^-1 U^T X` (Sirovich's snapshots); exact to float64 on float32 rows. Otherwise by randomised subspace
    iteration (Halko, Martinsson and Tropp 2011, Alg. 4.4) with four passes over the data: the values are then
    lower bounds, and close if the spectrum decays.
    """
    known = total(partial(EntryMoments, size))
    variance = float(known.variance().sum())
    if not 1 <= rank <= min(known.n - 1, size):
        raise UsageError(f"rank: expected 1 to {min(known.n - 1, size)} for {known.n} rows of {size}, found {rank}")
    method: Literal["gram", "randomised"]
    fits = 4 * (known.n + known.excluded) * size <= memory
    held = total(list) if fits else []
    if fits and known.n <= size:
        method, (values, vectors) = "gram", _by_gram(held, known, rank)
    else:
        if fits:
            total = _over(held)
        method, (values, vectors) = "randomised", _randomised(total, known, rank)
    vectors *= np.sign(vectors[np.arange(rank), np.abs(vectors).argmax(axis=1)])[:, None]
    return Eigenpairs(values, vectors, known.mean, variance, known.n, known.excluded, method)


def _by_gram(held: list[np.ndarray], known: EntryMoments, rank: int) -> tuple[np.ndarray, np.ndarray]:
    good = [chunk[finite_rows(chunk)] for chunk in held] if known.excluded else held
    parts = [slice(a, a + _COLUMNS) for a in range(0, len(known.mean), _COLUMNS)]

    def centred(part: slice) -> np.ndarray:
        return np.concatenate([np.subtract(rows[:, part], known.mean[part], dtype=np.float64) for rows in good])

    gram = np.zeros((known.n, known.n), order="F")
    for part in parts:
        add_gram(gram, np.ascontiguousarray(centred(part).T))
    squares, u = eigh(
        gram, lower=False, subset_by_index=(known.n - rank, known.n - 1), overwrite_a=True, check_finite=False
    )
    squares, u = squares[::-1], u[:, ::-1]
    varying = int((squares > known.n * np.finfo(float).eps * squares[0]).sum())
    if varying < rank:
        raise UsageError(f"rank: expected at most {varying}, the rank of the rows, found {rank}")
    vectors = np.concatenate([u.T @ centred(part) for part in parts], axis=1)
    return squares / (known.n - 1), vectors / np.sqrt(squares)[:, None]


def _over(held: list[np.ndarray]) -> Total:
    return lambda function, size=0: function(held)


def _image(mean: np.ndarray, basis: np.ndarray, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of z (z^T basis) over rows z about the mean, (D, r)."""
    image = np.zeros_like(basis)
    for rows in blocks:
        z = np.subtract(rows[finite_rows(rows)], mean, dtype=np.float64)
        image += z.T @ (z @ basis)
    return image


def _randomised(total: Total, known: EntryMoments, rank: int) -> tuple[np.ndarray, np.ndarray]:
    size = len(known.mean)
    width = min(rank + _OVERSAMPLING, size)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((size, width)))[0]
    image = basis
    for _ in range(_PASSES):
        basis = np.linalg.qr(image)[0]
        image = total(partial(_image, known.mean, basis), basis.nbytes) / (known.n - 1)
    values, turn = np.linalg.eigh(basis.T @ image)  # Rayleigh-Ritz
    return values[::-1][:rank].clip(0), np.ascontiguousarray((basis @ turn[:, ::-1][:, :rank]).T)
