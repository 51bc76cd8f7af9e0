"""Means, variances and covariances of N vectors in one pass, in memory independent of N."""

import contextlib
import importlib
import mmap
from collections.abc import Iterable
from typing import Any, Literal, Self, get_args

import numpy as np
from scipy.linalg import blas

from weightscope._util.checks import choice
from weightscope._util.environment import available_memory
from weightscope._util.threads import one_thread, threads_for
from weightscope.errors import DataError, UsageError

# NumPy and SciPy have separate BLAS libraries with separate threads, which keep spinning for a while after a
# call: a NumPy product just before `syrk` slows it by half. So the streaming loop uses SciPy's only.

Precision = Literal["float64", "float32"]

# Side of the tiles in which a triangle is mirrored: two float64 tiles of this size stay in a 2 MB cache.
_TILE = 256
_KEPT = 1 << 25  # bytes of an array up to which the allocator uses memory again that was freed
_LARGE = 1 << 28  # bytes of a matrix above which the available memory is looked up


def add_gram(matrix: np.ndarray, rows: np.ndarray) -> None:
    """Add `rows.T @ rows` to the upper triangle of a Fortran-ordered matrix in place, at half the work."""
    if rows.size:
        syrk = blas.dsyrk if matrix.dtype == np.float64 else blas.ssyrk
        with threads_for("product", len(matrix)):
            syrk(1.0, rows.T, beta=1.0, c=matrix, overwrite_c=1)


class _BlasGram:
    """One triangle of G, updated by `?syrk`: half the arithmetic of a general product, and no second matrix."""

    def __init__(self, size: int, dtype: Precision) -> None:
        self._matrix = _zeros(size, np.dtype(dtype))  # of which the upper triangle is used

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows` for rows (n, D)."""
        add_gram(self._matrix, rows)

    def merge(self, other: Any) -> None:
        """`G += H`."""
        self._matrix += other._matrix

    def take(self, factor: float, *, copy: bool) -> np.ndarray:
        """`factor * G`, full, scaled and mirrored tile by tile; without a copy in the accumulator's own memory."""
        matrix = self._matrix.copy(order="F") if copy else self._matrix
        for start in range(0, len(matrix), _TILE):
            stop = start + _TILE
            for first in range(0, start, _TILE):
                above = matrix[first : first + _TILE, start:stop]
                above *= factor
                matrix[start:stop, first : first + _TILE] = above.T
            block = matrix[start:stop, start:stop]
            upper = np.triu(block) * block.dtype.type(factor)
            block[...] = upper + np.triu(upper, 1).T
        return matrix.T


def _zeros(size: int, dtype: np.dtype) -> np.ndarray:
    """(D, D) zeros in Fortran order, above 32 MiB in huge pages that the threads of `syrk` touch first.

    One thread, or 4 KB pages, as of `numpy.zeros`, cost as much as several updates where allocation is slow.
    """
    needed = size * size * dtype.itemsize
    if needed > _LARGE and needed > (free := available_memory()):
        raise UsageError(
            f"a matrix of {size:,} x {size:,} needs {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are available: select "
            "fewer tensors (--select), or ask for the leading eigenpairs only (--eigenpairs)"
        )
    if needed < _KEPT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((size, size), dtype, order="F")
    pages = mmap.mmap(-1, needed)
    with contextlib.suppress(OSError):  # a kernel without huge pages, which affect speed only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, size * size).reshape((size, size), order="F")


class _TorchGram:
    """G on a torch device, updated by `addmm` in full precision (no TF32)."""

    def __init__(self, size: int, dtype: Precision, device: Any) -> None:
        self._torch = importlib.import_module("torch")  # by name: this package needs torch for a device only
        self._matrix = self._torch.zeros((size, size), dtype=getattr(self._torch, dtype), device=device)

    def add(self, rows: np.ndarray) -> None:
        block = self._torch.from_numpy(rows).to(self._matrix.device)
        matmul = self._torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, False
        try:
            self._matrix.addmm_(block.T, block)
        finally:
            matmul.allow_tf32 = before

    def merge(self, other: Any) -> None:
        """`G += H`."""
        self._matrix += other._matrix

    def take(self, factor: float, *, copy: bool) -> np.ndarray:
        """`factor * G` in host memory."""
        return (self._matrix * factor if copy else self._matrix.mul_(factor)).cpu().numpy()


Gram = _BlasGram | _TorchGram


def new_gram(size: int, precision: Precision, device: Any = None) -> Gram:
    """An empty accumulator: BLAS for `device=None`, torch for anything else."""
    return _BlasGram(size, precision) if device is None else _TorchGram(size, precision, device)


class EntryMoments:
    """Streaming mean and sum of squared deviations of each of D entries (Chan, Golub and LeVeque 1983, Eq. 2.1b).

    Rows of `chunks` (n, D) that are not finite are left out and counted in `excluded`.
    """

    def __init__(self, size: int, chunks: Iterable[np.ndarray] = ()) -> None:
        self.n = self.excluded = 0
        self.mean, self.squares = np.zeros(size), np.zeros(size)
        for rows in chunks:
            good = rows[finite_rows(rows)]
            self.excluded += len(rows) - len(good)
            if len(good):
                self.update(good)

    def update(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Take finite rows (n, D), n >= 1; returns deviations (n + 1, D), in `out` if given.

        They are the rows about their own mean, and the distance of that mean from the mean so far: products of them, or
        of any linear map of them, add up over all calls to those of the deviations from the common mean. An entry with
        one value in all rows has deviations of exactly zero.
        """
        n = len(rows)
        deviations = (np.empty((n + 1, len(self.mean))) if out is None else out)[: n + 1]
        z, start = deviations[:-1], rows[0].astype(np.float64)
        np.copyto(z, rows)  # converting and subtracting in one call is slower than in two
        z -= start
        shift = z.mean(axis=0)
        z -= shift
        deviations[-1] = self._moved(start + shift, n)
        self.squares += np.einsum("ij,ij->j", deviations, deviations)
        return deviations

    def _moved(self, mean: np.ndarray, n: int) -> np.ndarray:
        """Take n more rows with this mean; the distance of the means, (D,), as long as it adds to the deviations."""
        both, distance = self.n + n, mean - self.mean
        row = np.sqrt(self.n * n / both) * distance
        self.mean = self.mean + distance * (n / both) if self.n else mean
        self.n = both
        return row

    def merge(self, other: "EntryMoments") -> np.ndarray:
        """Take the rows of others; returns the distance (D,) that completes the sums of products of deviations."""
        self.excluded += other.excluded
        row = self._moved(other.mean, other.n) if other.n else np.zeros_like(self.mean)
        self.squares += other.squares + row**2
        return row

    def __iadd__(self, other: "EntryMoments") -> Self:
        self.merge(other)
        return self

    def variance(self) -> np.ndarray:
        """The variances with divisor n - 1, (D,); DataError if there are fewer than 2 rows."""
        if self.n < 2:
            raise DataError(f"expected at least 2 finite rows, found {self.n} ({self.excluded} excluded)")
        return self.squares / (self.n - 1)

    def std(self) -> np.ndarray:
        """The standard deviations with divisor n - 1, (D,), zero for fewer than 2 rows."""
        return np.sqrt(self.squares / max(self.n - 1, 1))

    def mean_square(self, about: np.ndarray) -> np.ndarray:
        """The mean squared deviation of each entry from `about` (D,), divisor n."""
        return self.squares / self.n + (self.mean - about) ** 2


# Rows per block. syrk reaches its full speed at 256 rows (512 and 1024 are no faster), and two float64 blocks
# at D = 15,106 take 62 MB.
BLOCK = 256


class Moments:
    r"""Streaming mean and covariance of vectors of length D.

    Rows are taken in blocks of 256. A block is centred in float64 and added by a symmetric rank-k update, with its
    distance from the mean so far as one more row (`EntryMoments`), inside the same BLAS call. So data far from zero or
    drifting lose no accuracy. With `precision="float64"` the result equals `numpy.cov` in float64 to 1e-10 relative
    at mean 1e4 and spread 1. With `"float32"` the centred block is rounded to float32 and products are accumulated in
    float32: twice as fast, half the memory, and entry (i, j) is within 1e-5 of the product of the standard deviations
    i and j (the measured error grows as the square root of N, and is 1e-6 at N = 10^6).

    Rows with a non-finite entry are left out and counted in `excluded`; print that number. Results have the same
    bits for all chunk sizes if nothing is read in between; reading closes a block, and results then agree to
    rounding. Memory is one D x D matrix and three blocks.

    Args:
        size: D.
        device: None for the CPU (BLAS), or a torch device on which to accumulate; results are NumPy.
        precision: `"float64"` or `"float32"`.

    Raises:
        UsageError: if the size is not positive or the precision unknown.
        DataError: by a method, if there are too few rows for it (2, for the mean 1), or rows have another length.

    Example:
        >>> moments = Moments(3).update(np.eye(3))
        >>> moments.n, moments.mean
        (3, array([0.33333333, 0.33333333, 0.33333333]))
    """

    def __init__(self, size: int, *, device: Any = None, precision: Precision = "float64") -> None:
        if size < 1:
            raise UsageError(f"Moments: expected a vector length >= 1, found {size}")
        choice("precision", precision, get_args(Precision))
        self.size, self.precision, self.excluded = size, precision, 0
        self._gram: Gram | None = new_gram(size, precision, device)
        self._entries = EntryMoments(size)
        self._pending, self._waiting = np.empty((0, size)), 0
        self._work: np.ndarray | None = None

    @one_thread()
    def update(self, chunk: Any) -> "Moments":
        """Add rows (n, D), or (D,) for one row, in float32 or float64; returns this object."""
        self._alive()
        rows = np.atleast_2d(np.asarray(chunk))
        if rows.ndim != 2 or rows.shape[1] != self.size:
            raise DataError(f"Moments of length {self.size}: expected rows (n, {self.size}), found {rows.shape}")
        if rows.dtype not in (np.float32, np.float64):
            rows = rows.astype(np.float64)
        finite = finite_rows(rows)
        if not finite.all():
            self.excluded += int(len(rows) - finite.sum())
            rows = rows[finite]
        while len(rows):
            if not self._waiting and len(rows) >= BLOCK:
                self._add_block(rows[:BLOCK])
                rows = rows[BLOCK:]
                continue
            if not len(self._pending):
                self._pending = np.empty((BLOCK, self.size))
            taken = min(BLOCK - self._waiting, len(rows))
            self._pending[self._waiting : self._waiting + taken] = rows[:taken]
            self._waiting += taken
            rows = rows[taken:]
            if self._waiting == BLOCK:
                self.flush()
        return self

    def __iadd__(self, other: "Moments") -> Self:
        """Take the rows of other moments of the same size and precision (Chan et al. 1983, Eq. 2.1b)."""
        self.flush()
        theirs, gram, added = other.entries(0), self._alive(), other._alive()
        self.excluded += other.excluded
        if theirs.n:
            gram.merge(added)
            gram.add(self._entries.merge(theirs)[None].astype(self.precision, copy=False))
        return self

    @property
    def n(self) -> int:
        """The number of rows added, without the excluded ones."""
        return self._entries.n + self._waiting

    @property
    def mean(self) -> np.ndarray:
        """The mean, (D,) float64."""
        return self.entries(1).mean

    def variance(self) -> np.ndarray:
        """The variances with divisor n - 1, (D,) float64."""
        return self.entries(2).variance()

    def covariance(self, *, destroy: bool = False) -> np.ndarray:
        """The covariance with divisor n - 1, (D, D), in the precision of accumulation.

        With `destroy` it is computed in the accumulator's memory, so that the peak is one matrix and not two; the
        object cannot be used afterwards.
        """
        n, gram = self.entries(2).n, self._alive()
        if destroy:
            self._gram = None
        return gram.take(1.0 / (n - 1), copy=not destroy)

    def correlation(self, *, destroy: bool = False) -> np.ndarray:
        """The correlation matrix, (D, D); rows and columns of coordinates without variance are NaN."""
        variance = self.variance()
        matrix = self.covariance(destroy=destroy)
        with np.errstate(divide="ignore"):
            scale = np.where(variance > 0, 1.0 / np.sqrt(variance), np.nan).astype(matrix.dtype)
        matrix *= scale
        matrix *= scale[:, None]
        matrix[np.diag_indices_from(matrix)] = np.where(variance > 0, 1.0, np.nan)
        return matrix

    def entries(self, least: int = 1) -> EntryMoments:
        """The moments of each coordinate over all rows so far; DataError if there are fewer than `least` rows."""
        self._alive()
        self.flush()
        if self._entries.n < least:
            n = self._entries.n
            raise DataError(f"expected at least {least} finite rows, found {n} ({self.excluded} excluded)")
        return self._entries

    def flush(self) -> None:
        """Close the block that waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, 0
            self._add_block(self._pending[:waiting])

    def _add_block(self, rows: np.ndarray) -> None:
        if self._work is None:
            self._work = np.empty((BLOCK + 1, self.size))
        deviations = self._entries.update(rows, self._work)
        self._alive().add(deviations.astype(self.precision, copy=False))

    def _alive(self) -> Gram:
        if self._gram is None:
            raise UsageError("these Moments were destroyed by destroy=True; create new ones")
        return self._gram


def finite_rows(rows: np.ndarray) -> np.ndarray:
    """Which rows (n, D) contain finite numbers only, as booleans (n,).

    A sum over each row finds the candidates (NaN and infinity propagate), and only those are checked entry by entry.
    """
    with np.errstate(all="ignore"):
        finite = np.isfinite(np.einsum("ij->i", rows))
    for k in np.flatnonzero(~finite):
        finite[k] = np.isfinite(rows[k]).all()
    return finite
