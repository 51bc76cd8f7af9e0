r"""A matrix whose rows and columns are the same n units, W -> P W P^T, in orthogonal coordinates.

R^{n x n} is the sum of two trivial parts, three standard parts of dimension n - 1, and two of its own, the partitions
(n-2, 2) and (n-2, 1, 1). With the sums of rows and columns off the diagonal r_i = sum_{j != i} W_ij,
c_i = sum_{j != i} W_ji, their total t, and s_i = r_i + c_i - 2 t / n, the coordinates are

    diagonal        W_ii, which has a trivial and a standard part
    off-diagonal    t / sqrt(n (n - 1))
    rows + columns  s_i / sqrt(2 (n - 2)), for n > 2
    rows - columns  (r_i - c_i) / sqrt(2 n)
    symmetric       (W_ij + W_ji) / sqrt 2 for i < j, less what the sums explain; dimension n (n - 3) / 2
    antisymmetric   (W_ij - W_ji) / sqrt 2 for i < j, less what the sums explain; dimension (n - 1) (n - 2) / 2

Source: Fulton and Harris 1991, "Representation Theory", 4.3: Young's rule for the permutations of pairs.
"""

from collections.abc import Iterator
from math import sqrt

import numpy as np

# part -> the smallest n that has it
PARTS = {
    "diagonal": 1,
    "off-diagonal": 2,
    "rows + columns": 3,
    "rows - columns": 2,
    "symmetric": 4,
    "antisymmetric": 3,
}


def coordinates(matrix: np.ndarray, part: str) -> np.ndarray:
    """Those of a part of matrices (..., n, n): (..., 1), (..., n), or (..., n (n - 1) / 2) for pairs i < j."""
    n = matrix.shape[-1]
    diagonal = matrix.diagonal(axis1=-2, axis2=-1)
    if part == "diagonal":
        return diagonal
    rows, columns = matrix.sum(axis=-1) - diagonal, matrix.sum(axis=-2) - diagonal
    mean = rows.mean(axis=-1, keepdims=True)
    if part == "off-diagonal":
        return mean * sqrt(n / (n - 1))
    if part == "rows + columns":
        return (rows + columns - 2 * mean) / sqrt(2 * (n - 2))
    if part == "rows - columns":
        return (rows - columns) / sqrt(2 * n)
    if part == "symmetric":
        explained, sign = (rows + columns - 2 * mean) / (2 * (n - 2)) + mean / (2 * (n - 1)), 1
    else:
        explained, sign = (rows - columns) / (2 * n), -1
    out = np.empty((*matrix.shape[:-2], n * (n - 1) // 2))
    for i, at in _rows(n):  # slices are several times as fast as indices of all pairs
        pairs = matrix[..., i, i + 1 :] + sign * matrix[..., i + 1 :, i]
        out[..., at] = pairs / sqrt(2) - sqrt(2) * (explained[..., i, None] + sign * explained[..., i + 1 :])
    return out


def matrices(values: np.ndarray, part: str, n: int) -> np.ndarray:
    """The matrices (..., n, n) with these coordinates in one part and none in the others; the adjoint."""
    out = np.zeros((*values.shape[:-1], n, n))
    at = np.arange(n)
    if part == "diagonal":
        out[..., at, at] = values
    elif part in ("symmetric", "antisymmetric"):
        for i, pairs in _rows(n):
            out[..., i, i + 1 :] = values[..., pairs] / sqrt(2)
            out[..., i + 1 :, i] = out[..., i, i + 1 :] * (1 if part == "symmetric" else -1)
    else:
        scale = {"off-diagonal": 2 * sqrt(n * (n - 1)), "rows + columns": sqrt(2 * (n - 2))}.get(part, sqrt(2 * n))
        columns = -values if part == "rows - columns" else values
        out += values[..., :, None] / scale + columns[..., None, :] / scale
        out[..., at, at] = 0.0
    return out


def projected(pairs: np.ndarray, part: str) -> np.ndarray:
    """The projection of (..., n (n - 1) / 2) on the coordinates of the symmetric or antisymmetric part."""
    return coordinates(matrices(pairs, part, units(pairs.shape[-1])), part)


def _rows(n: int) -> Iterator[tuple[int, slice]]:
    """The pairs (i, j) with j > i, of each i in turn."""
    start = 0
    for i in range(n - 1):
        yield i, slice(start, start := start + n - 1 - i)


def units(pairs: int) -> int:
    """The number n of units that have n (n - 1) / 2 pairs."""
    return round((1 + sqrt(1 + 8 * pairs)) / 2)
