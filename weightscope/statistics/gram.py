"""Accumulators of `sum of z z^T`: symmetric rank-k updates through BLAS, or products on a torch device."""

import contextlib
import importlib
import mmap
from typing import Any, Literal

import numpy as np
from scipy.linalg import blas

# NumPy and SciPy have separate BLAS libraries with separate threads, which keep spinning for a while after a
# call: a NumPy product just before `syrk` slows it by half. So the streaming loop uses SciPy's only.

Precision = Literal["float64", "float32"]

# Side of the tiles in which a triangle is mirrored: two float64 tiles of this size stay in a 2 MB cache.
_TILE = 256


def add_gram(matrix: np.ndarray, rows: np.ndarray) -> None:
    """Add `rows.T @ rows` to the upper triangle of `matrix` in place; half the work of a general product."""
    if not (matrix.flags.f_contiguous and rows.flags.c_contiguous and matrix.flags.writeable):
        raise ValueError("expected a writeable Fortran-ordered matrix and C-ordered rows")
    if matrix.shape != (rows.shape[1],) * 2 or matrix.dtype != rows.dtype:
        raise ValueError(f"expected (D, D) and (n, D) of one dtype, found {matrix.shape} and {rows.shape}")
    if rows.size:
        syrk = blas.dsyrk if matrix.dtype == np.float64 else blas.ssyrk
        syrk(1.0, rows.T, beta=1.0, c=matrix, overwrite_c=1)


class _BlasGram:
    """One triangle of G, updated by `?syrk`: half the arithmetic of a general product, and no second matrix."""

    def __init__(self, size: int, dtype: Any) -> None:
        # Only the upper triangle is used.
        self._matrix = _zeros(size, np.dtype(dtype))

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows` for rows (n, D)."""
        add_gram(self._matrix, rows)

    def add_gram(self, other: Any) -> None:
        """`G += other`, of the same class."""
        self._matrix += other._matrix

    def dot(self, vector: np.ndarray) -> np.ndarray:
        """`G @ vector` in float64, (D,)."""
        symv = blas.dsymv if self._matrix.dtype == np.float64 else blas.ssymv
        return np.asarray(symv(1.0, self._matrix, vector.astype(self._matrix.dtype)), dtype=np.float64)

    def diagonal(self) -> np.ndarray:
        return np.diagonal(self._matrix).astype(np.float64)

    def squared_norm(self) -> float:
        """`2 * (upper triangle)^2 - diagonal^2`, column by column and so without a temporary matrix."""
        upper = 0.0
        for j in range(len(self._matrix)):
            column = self._matrix[: j + 1, j].astype(np.float64)
            upper += float(column @ column)
        diagonal = self.diagonal()
        return 2.0 * upper - float(diagonal @ diagonal)

    def copy(self) -> "Gram":
        new = _BlasGram(0, self._matrix.dtype)
        new._matrix = self._matrix.copy(order="F")
        return new

    def take(self, factor: float) -> np.ndarray:
        """`factor * G`, full, scaled and mirrored tile by tile in the accumulator's own memory; it is empty then."""
        matrix, self._matrix = self._matrix, np.zeros((0, 0), dtype=self._matrix.dtype, order="F")
        size = len(matrix)
        for start in range(0, size, _TILE):
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
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((size, size), dtype, order="F")
    try:
        pages = mmap.mmap(-1, count * dtype.itemsize)
    except OSError as error:
        raise MemoryError(f"no memory for {size} x {size} {dtype}: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages, which affect speed only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count).reshape((size, size), order="F")


class _TorchGram:
    """G on a torch device, updated by `addmm` in full precision (no TF32)."""

    def __init__(self, size: int, dtype: Any, device: Any) -> None:
        # By name, so that this package needs torch only when a device is given.
        self._torch = importlib.import_module("torch")
        self._device = self._torch.device(device)
        self._matrix = self._torch.zeros(
            (size, size), dtype=getattr(self._torch, np.dtype(dtype).name), device=self._device
        )

    def add(self, rows: np.ndarray) -> None:
        block = self._torch.from_numpy(rows).to(self._device)
        matmul = self._torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, False
        try:
            self._matrix.addmm_(block.T, block)
        finally:
            matmul.allow_tf32 = before

    def add_gram(self, other: Any) -> None:
        self._matrix += other._matrix.to(self._device)

    def dot(self, vector: np.ndarray) -> np.ndarray:
        moved = self._torch.from_numpy(vector).to(self._matrix)
        return (self._matrix @ moved).cpu().numpy().astype(np.float64)

    def diagonal(self) -> np.ndarray:
        return self._matrix.diagonal().cpu().numpy().astype(np.float64)

    def squared_norm(self) -> float:
        """The squared Frobenius norm of G, row by row in float64."""
        return sum(float(row.double().square().sum()) for row in self._matrix.split(_TILE))

    def copy(self) -> "Gram":
        new = _TorchGram(0, np.float64, self._device)
        new._matrix = self._matrix.clone()
        return new

    def take(self, factor: float) -> np.ndarray:
        """`factor * G` in host memory."""
        matrix, self._matrix = self._matrix, self._matrix.new_zeros((0, 0))
        return matrix.mul_(factor).cpu().numpy()


Gram = _BlasGram | _TorchGram


def new_gram(size: int, precision: Precision, device: Any = None) -> Gram:
    """An empty accumulator: BLAS for `device=None`, torch for anything else."""
    return _BlasGram(size, precision) if device is None else _TorchGram(size, precision, device)
