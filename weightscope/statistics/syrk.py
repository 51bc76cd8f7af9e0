"""`C += X^T X` through BLAS with Python's lock released, so that a thread can read the next rows."""

import ctypes
from functools import cache
from typing import Any

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
