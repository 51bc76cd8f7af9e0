"""Means, variances and covariances of N vectors in one pass, in memory independent of N."""

from collections.abc import Iterable
from copy import copy
from typing import Any, get_args

import numpy as np
from scipy.linalg import blas

from weightscope._util.checks import choice
from weightscope.errors import DataError, UsageError
from weightscope.statistics.gram import Gram, Precision, new_gram


class RunningMean:
    """The mean (D,) of rows that come block by block, and deviations (Chan, Golub and LeVeque 1983, Eq. 2.1b)."""

    def __init__(self, size: int) -> None:
        self.n = 0
        self.mean = np.zeros(size)
        self.block_mean = self.mean  # of the last block

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Take rows (n, D), n >= 1; returns deviations (n + 1, D), in `out` if given.

        They are the rows about their own mean, and the distance of that mean from the mean so far: products of them, or
        of any linear map of them, add up over all calls to those of the deviations from the common mean. An entry with
        one value in all rows has deviations of exactly zero.
        """
        deviations = (np.empty((len(rows) + 1, len(self.mean))) if out is None else out)[: len(rows) + 1]
        z = deviations[:-1]
        start = rows[0].astype(np.float64)
        np.copyto(z, rows)  # converting and subtracting in one call is slower than in two
        z -= start
        shift = z.mean(axis=0)
        z -= shift
        self.block_mean = start + shift
        deviations[-1] = self.join(len(rows), self.block_mean)
        return deviations

    def join(self, n: int, mean: np.ndarray) -> np.ndarray:
        """Take n rows of that mean; returns the row that their distance adds to the deviations, (D,)."""
        both, distance = self.n + n, mean - self.mean
        row = np.sqrt(self.n * n / both) * distance
        self.mean = mean if not self.n else self.mean + distance * (n / both)
        self.n = both
        return row


class EntryMoments(RunningMean):
    """Streaming mean and sum of squared deviations of each of D entries.

    Rows of `chunks` (n, D) that are not finite are left out and counted in `excluded`.
    """

    def __init__(self, size: int, chunks: Iterable[np.ndarray] = ()) -> None:
        super().__init__(size)
        self.squares = np.zeros(size)
        self.excluded = 0
        for rows in chunks:
            good = rows[finite_rows(rows)]
            self.excluded += len(rows) - len(good)
            if len(good):
                self.update(good)

    def update(self, rows: np.ndarray) -> np.ndarray:
        """Take rows (n, D), n >= 1; returns deviations (n + 1, D), see `RunningMean.take`."""
        deviations = self.take(rows)
        self.squares += np.einsum("ij,ij->j", deviations, deviations)
        return deviations

    def variance(self) -> np.ndarray:
        """The variances with divisor n - 1, (D,); DataError if there are fewer than 2 rows."""
        if self.n < 2:
            raise DataError(f"expected at least 2 finite rows, found {self.n} ({self.excluded} excluded as not finite)")
        return self.squares / (self.n - 1)

    def mean_square(self, about: np.ndarray) -> np.ndarray:
        """The mean squared deviation of each entry from `about` (D,), divisor n."""
        return self.squares / self.n + (self.mean - about) ** 2


# Rows per block. syrk reaches its full speed at 256 rows (512 and 1024 are no faster), and two float64 blocks
# at D = 15,106 take 62 MB.
BLOCK = 256


class Moments:
    r"""Streaming, mergeable mean and covariance of vectors of length D.

    Rows are taken in blocks of 256. A block is centred in float64 and added by a symmetric rank-k update, with its
    distance from the mean so far as one more row (`RunningMean`), inside the same BLAS call. So data far from zero or
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
        self.size = size
        self.precision: Precision = precision
        self.excluded = 0
        self._device = device
        self._gram: Gram | None = new_gram(size, precision, device)
        self._running = RunningMean(size)
        # The mean of the first block. Sums over z = x - pilot, for the fourth moment that Ledoit and Wolf need:
        # |z|^4, |z|^2 z, |z|^2.
        self._pilot: np.ndarray | None = None
        self._fourth, self._third, self._second = 0.0, np.zeros(size), 0.0
        self._pending: np.ndarray | None = None
        self._waiting = 0
        self._work: np.ndarray | None = None

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
            if self._pending is None:
                self._pending = np.empty((BLOCK, self.size))
            taken = min(BLOCK - self._waiting, len(rows))
            self._pending[self._waiting : self._waiting + taken] = rows[:taken]
            self._waiting += taken
            rows = rows[taken:]
            if self._waiting == BLOCK:
                self._flush()
        return self

    def merge(self, other: "Moments") -> "Moments":
        """The moments of the union of both samples, in a new object; UsageError if size, precision or device differ."""
        kinds = [(m.size, m.precision, str(m._device)) for m in (self, other)]
        if kinds[0] != kinds[1]:
            raise UsageError(f"merge: expected equal (size, precision, device), found {kinds[0]} and {kinds[1]}")
        first, second = (self, other) if self.n else (other, self)
        first._flush()
        second._flush()
        new = Moments(first.size, device=first._device, precision=first.precision)
        new.excluded = first.excluded + second.excluded
        new._gram = first._alive().copy()
        new._pilot, new._running = first._pilot, copy(first._running)
        sums = first._fourth, first._third, first._second
        if (n := second._running.n) and first._pilot is not None and second._pilot is not None:
            more = second._about(first._pilot)
            sums = sums[0] + more[0], sums[1] + more[1], sums[2] + more[2]
            row = new._running.join(n, second._running.mean)
            new._gram.add_gram(second._alive())
            new._gram.add(row[None].astype(new.precision))
        new._fourth, new._third, new._second = sums
        return new

    @property
    def n(self) -> int:
        """The number of rows added, without the excluded ones."""
        return self._running.n + self._waiting

    @property
    def mean(self) -> np.ndarray:
        """The mean, (D,) float64."""
        self._need(1)
        return self._running.mean.copy()

    def variance(self) -> np.ndarray:
        """The variances with divisor n - 1, (D,) float64."""
        self._need(2)
        return self._alive().diagonal() / (self._running.n - 1)

    def covariance(self, *, destroy: bool = False) -> np.ndarray:
        """The covariance with divisor n - 1, (D, D), in the precision of accumulation.

        With `destroy` it is computed in the accumulator's memory, so that the peak is one matrix and not two; the
        object cannot be used afterwards.
        """
        self._need(2)
        gram = self._alive() if destroy else self._alive().copy()
        if destroy:
            self._gram = None
        return gram.take(1.0 / (self._running.n - 1))

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

    def squared_norms(self) -> tuple[float, float, float]:
        """The sums in the Ledoit-Wolf intensity, for centred rows x: `(sum |x|^2, |sum x x^T|_F^2, sum |x|^4)`.

        The fourth moment is accumulated about the first block's mean and centred here, without a second pass over
        the data.
        """
        self._need(1)
        gram = self._alive()
        return float(gram.diagonal().sum()), gram.squared_norm(), self._about(self._running.mean)[0]

    def _about(self, centre: np.ndarray) -> tuple[float, np.ndarray, float]:
        """The sums of |z|^4, |z|^2 z and |z|^2 over z = x - centre."""
        assert self._pilot is not None  # there is a row
        n, mean, shift = self._running.n, self._running.mean - self._pilot, self._pilot - centre
        square, total = float(shift @ shift), n * float(mean @ shift)
        # Sums over x - pilot need (sum z z^T) shift; the Gram matrix is about the mean.
        outer = self._alive().dot(shift) + mean * total
        second = self._second + 2.0 * total + n * square
        third = self._third + 2.0 * outer + square * n * mean + second * shift
        fourth = (
            self._fourth
            + 4.0 * float(shift @ outer)
            + n * square * square
            + 4.0 * float(self._third @ shift)
            + 2.0 * self._second * square
            + 4.0 * square * total
        )
        return fourth, third, second

    def _flush(self) -> None:
        if self._waiting:
            assert self._pending is not None
            waiting, self._waiting = self._waiting, 0
            self._add_block(self._pending[:waiting])

    def _add_block(self, rows: np.ndarray) -> None:
        if self._work is None:
            self._work = np.empty((BLOCK + 1, self.size))
        block = self._running.take(rows, self._work)
        if self._pilot is None:
            self._pilot = self._running.block_mean
        d, shift = block[:-1], self._running.block_mean - self._pilot  # x - pilot = d + shift
        squares = np.einsum("ij,ij->i", d, d)
        if shift.any():
            squares += 2.0 * blas.dgemv(1.0, d.T, shift, trans=1) + shift @ shift
        total = float(squares.sum())
        self._second += total
        self._fourth += float(squares @ squares)
        self._third += blas.dgemv(1.0, d.T, squares) + total * shift
        self._alive().add(block.astype(self.precision, copy=False))

    def _need(self, n: int) -> None:
        self._alive()
        self._flush()
        if self._running.n < n:
            raise DataError(
                f"expected at least {n} finite rows, found {self._running.n} ({self.excluded} excluded as not finite)"
            )

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
