"""Accumulators of `sum of z z^T`: symmetric rank-k updates through BLAS, or products on a torch device."""

import contextlib
import importlib
import mmap
from typing import Any, Literal

import numpy as np
from scipy.linalg import blas

from weightscope.errors import UsageError

# NumPy and SciPy have separate BLAS libraries with separate threads, which keep spinning for a while after a
# call: a NumPy product just before `syrk` slows it by half. So the streaming loop uses SciPy's only.

Precision = Literal["float64", "float32"]

# Side of the tiles in which a triangle is mirrored: two float64 tiles of this size stay in a 2 MB cache.
_TILE = 256


def add_gram(matrix: np.ndarray, rows: np.ndarray) -> None:
    """Add `rows.T @ rows` to the upper triangle of a Fortran-ordered matrix in place, at half the work."""
    if rows.size:
        syrk = blas.dsyrk if matrix.dtype == np.float64 else blas.ssyrk
        syrk(1.0, rows.T, beta=1.0, c=matrix, overwrite_c=1)


class _BlasGram:
    """One triangle of G, updated by `?syrk`: half the arithmetic of a general product, and no second matrix."""

    summed = ("_matrix",)

    def __init__(self, size: int, dtype: Precision) -> None:
        self._matrix = _zeros(size, np.dtype(dtype))  # of which the upper triangle is used

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows` for rows (n, D)."""
        add_gram(self._matrix, rows)

    def merge(self, other: Any) -> None:
        """`G += H`."""
        self._matrix += other._matrix

    def times(self, columns: np.ndarray) -> np.ndarray:
        """G x for x (D, T)."""
        symm = blas.dsymm if self._matrix.dtype == np.float64 else blas.ssymm
        return symm(1.0, self._matrix, columns)

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
    """(D, D) zeros in Fortran order, in huge pages that the threads of `syrk` allocate on their first write.

    One thread, or 4 KB pages, as of `numpy.zeros`, cost as much as several updates where allocation is slow.
    """
    count = size * size
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((size, size), dtype, order="F")
    try:
        pages = mmap.mmap(-1, count * dtype.itemsize)
    except OSError as error:
        needs = f"no memory for {size:,} x {size:,} entries, {count * dtype.itemsize / 2**30:,.0f} GiB"
        advice = "select fewer tensors, compute it on disk (--matrix NAME.npy), or average over units (--exchangeable)"
        raise UsageError(f"{needs}: {advice}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages, which affect speed only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape((size, size), order="F")


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

    def times(self, columns: np.ndarray) -> np.ndarray:
        """G x for x (D, T)."""
        return (self._matrix @ self._matrix.new_tensor(columns)).cpu().numpy()

    def take(self, factor: float, *, copy: bool) -> np.ndarray:
        """`factor * G` in host memory."""
        return (self._matrix * factor if copy else self._matrix.mul_(factor)).cpu().numpy()


Gram = _BlasGram | _TorchGram


def new_gram(size: int, precision: Precision, device: Any = None) -> Gram:
    """An empty accumulator: BLAS for `device=None`, torch for anything else."""
    return _BlasGram(size, precision) if device is None else _TorchGram(size, precision, device)
