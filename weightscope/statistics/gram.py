"""Accumulators of `sum of z z^T`: symmetric rank-k updates through BLAS, or products on a torch device."""

import contextlib
import ctypes
import importlib
import mmap
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from scipy.linalg import blas, cython_blas

_Function = Any
_KINDS = {np.dtype(np.float64): ("dsyrk", ctypes.c_double), np.dtype(np.float32): ("ssyrk", ctypes.c_float)}


def add_gram(matrix: np.ndarray, rows: np.ndarray) -> None:
    """Add `rows.T @ rows` to the upper triangle of `matrix` in place; half the work of a general product.

    SciPy's wrapper holds Python's lock during the whole product. The same routine is called here through the address
    that SciPy exports to Cython (`scipy.linalg.cython_blas`); ctypes releases the lock.

    Args:
        matrix: (D, D), Fortran-ordered, float64 or float32.
        rows: (n, D), C-ordered, of the same dtype.

    Raises:
        ValueError: if an array has another layout.
    """
    size, count = len(matrix), len(rows)
    if not (matrix.flags.f_contiguous and rows.flags.c_contiguous and matrix.flags.writeable):
        raise ValueError("expected a writeable Fortran-ordered matrix and C-ordered rows")
    if matrix.shape != (size, size) or rows.shape != (count, size) or matrix.dtype != rows.dtype:
        raise ValueError(f"expected (D, D) and (n, D) of one dtype, found {matrix.shape} and {rows.shape}")
    if not size or not count:
        return
    name, real = _KINDS[matrix.dtype]
    function = _address(name)
    if function is None:
        getattr(blas, name)(1.0, rows.T, beta=1.0, c=matrix, overwrite_c=1)
        return
    one = ctypes.byref(real(1.0))
    n, k = ctypes.byref(ctypes.c_int(size)), ctypes.byref(ctypes.c_int(count))
    data = (ctypes.c_void_p(array.ctypes.data) for array in (rows, matrix))
    function(ctypes.c_char_p(b"U"), ctypes.c_char_p(b"N"), n, k, one, next(data), n, one, next(data), n)


@cache
def _address(name: str) -> _Function | None:
    """The routine as a ctypes function, or None where SciPy's integers are not C's `int`."""
    capsule = getattr(cython_blas, "__pyx_capi__", {}).get(name)
    if capsule is None:
        return None
    text, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    text.restype, text.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = text(capsule)
    arguments = [part.strip() for part in signature.decode().partition("(")[2].rstrip(")").split(",")]
    integers = [arguments[i] for i in (2, 3, 6, 9)] if len(arguments) == 10 else []
    if integers != ["int *"] * 4:
        return None
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 10)(pointer(capsule, signature))


# NumPy and SciPy have separate BLAS libraries with separate threads, which keep spinning for a while after a
# call: a NumPy product just before `syrk` slows it by half. So the streaming loop uses SciPy's only.

Precision = Literal["float64", "float32"]

# Side of the tiles in which a triangle is mirrored: two float64 tiles of this size stay in a 2 MB cache.
_TILE = 256


class Gram(Protocol):
    """Interface of an accumulator of `G = sum of z z^T`, shape (D, D)."""

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows` for rows (n, D)."""

    def add_gram(self, other: Any) -> None:
        """`G += other`, of the same class."""

    def dot(self, vector: np.ndarray) -> np.ndarray:
        """`G @ vector` in float64, shape (D,)."""

    def diagonal(self) -> np.ndarray:
        """The diagonal of G in float64, shape (D,)."""

    def squared_norm(self) -> float:
        """The squared Frobenius norm of G, accumulated in float64."""

    def copy(self) -> "Gram":
        """An independent copy."""

    def take(self, factor: float) -> np.ndarray:
        """`factor * G` as a full symmetric NumPy array, in place; the accumulator is empty afterwards."""


class BlasGram:
    """One triangle of G, updated by `?syrk`: half the arithmetic of a general product, and no second matrix.

    Args:
        size: D.
        dtype: of the accumulator and of the rows that are added.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        # Only the upper triangle is used.
        self._matrix = _zeros(size, np.dtype(dtype))

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows`."""
        add_gram(self._matrix, rows)

    def add_gram(self, other: "BlasGram") -> None:
        """`G += other`."""
        self._matrix += other._matrix

    def dot(self, vector: np.ndarray) -> np.ndarray:
        """`G @ vector`."""
        symv = blas.dsymv if self._matrix.dtype == np.float64 else blas.ssymv
        return np.asarray(symv(1.0, self._matrix, vector.astype(self._matrix.dtype)), dtype=np.float64)

    def diagonal(self) -> np.ndarray:
        """The diagonal of G."""
        return np.diagonal(self._matrix).astype(np.float64)

    def squared_norm(self) -> float:
        """`2 * (upper triangle)^2 - diagonal^2`, column by column and so without a temporary matrix."""
        upper = 0.0
        for j in range(len(self._matrix)):
            column = self._matrix[: j + 1, j].astype(np.float64)
            upper += float(column @ column)
        diagonal = self.diagonal()
        return 2.0 * upper - float(diagonal @ diagonal)

    def copy(self) -> "BlasGram":
        """An independent copy."""
        new = BlasGram(0, self._matrix.dtype)
        new._matrix = self._matrix.copy(order="F")
        return new

    def take(self, factor: float) -> np.ndarray:
        """`factor * G`, scaled and mirrored tile by tile in the accumulator's own memory."""
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
    """(D, D) zeros in Fortran order, in huge pages that are allocated on their first write.

    So the threads of `syrk` share the work of allocation. Filled beforehand by one thread, the matrix costs as much as
    several updates where allocation is slow (virtual machines), and more in 4 KB pages, as from `numpy.zeros`.
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


class TorchGram:
    """G on a torch device, updated by `addmm` in full precision (no TF32).

    Args:
        size: D.
        dtype: NumPy dtype of the accumulator.
        device: anything `torch.device` takes.
    """

    def __init__(self, size: int, dtype: Any, device: Any) -> None:
        # By name, so that this package needs torch only when a device is given.
        self._torch = importlib.import_module("torch")
        self._device = self._torch.device(device)
        self._matrix = self._torch.zeros(
            (size, size), dtype=getattr(self._torch, np.dtype(dtype).name), device=self._device
        )

    def add(self, rows: np.ndarray) -> None:
        """`G += rows.T @ rows`."""
        block = self._torch.from_numpy(rows).to(self._device)
        matmul = self._torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, False
        try:
            self._matrix.addmm_(block.T, block)
        finally:
            matmul.allow_tf32 = before

    def add_gram(self, other: "TorchGram") -> None:
        """`G += other`."""
        self._matrix += other._matrix.to(self._device)

    def dot(self, vector: np.ndarray) -> np.ndarray:
        """`G @ vector`."""
        moved = self._torch.from_numpy(vector).to(self._matrix)
        return (self._matrix @ moved).cpu().numpy().astype(np.float64)

    def diagonal(self) -> np.ndarray:
        """The diagonal of G."""
        return self._matrix.diagonal().cpu().numpy().astype(np.float64)

    def squared_norm(self) -> float:
        """The squared Frobenius norm of G, row by row in float64."""
        return sum(float(row.double().square().sum()) for row in self._matrix.split(_TILE))

    def copy(self) -> "TorchGram":
        """An independent copy."""
        new = TorchGram(0, np.float64, self._device)
        new._matrix = self._matrix.clone()
        return new

    def take(self, factor: float) -> np.ndarray:
        """`factor * G` in host memory."""
        matrix, self._matrix = self._matrix, self._matrix.new_zeros((0, 0))
        return matrix.mul_(factor).cpu().numpy()


def new_gram(size: int, precision: Precision, device: Any = None) -> Gram:
    """An empty accumulator: BLAS for `device=None`, torch for anything else."""
    return BlasGram(size, precision) if device is None else TorchGram(size, precision, device)
