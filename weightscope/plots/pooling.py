"""Large symmetric matrices averaged over cells, one for each pixel or so."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weightscope.errors import DataError

_ROWS = 512


@dataclass(frozen=True)
class Pooled:
    """A matrix averaged over cells.

    Attributes:
        cells: (c, c); NaN where a cell has no valid entry.
        edges: (c + 1,) first coordinate of each cell, and D.
        factor: coordinates along the side of a full cell; 1 if nothing was averaged.
    """

    cells: np.ndarray
    edges: np.ndarray
    factor: int

    @property
    def off_diagonal(self) -> np.ndarray:
        """The finite values off the diagonal."""
        values = self.cells[~np.eye(len(self.cells), dtype=bool)]
        return values[np.isfinite(values)]


def cell_edges(bounds: Sequence[tuple[int, int]], most: int) -> tuple[np.ndarray, int]:
    """Cell borders that respect the blocks' borders, with at most `most` cells (or one for each block).

    All cells of a block but the last have one size: uneven sizes would cause moire patterns in regular stripes.
    """
    size = bounds[-1][1]
    factor = max(1, -(-size // most))
    while True:
        starts = np.concatenate([np.arange(a, b, factor) for a, b in bounds])
        if len(starts) <= max(most, len(bounds)):
            return np.append(starts, size), factor
        factor += 1


def pool(matrix: np.ndarray, edges: np.ndarray, factor: int, missing: np.ndarray, *, diagonal: bool) -> Pooled:
    """Average a symmetric matrix (D, D) over cells.

    The mean rather than the entry of largest magnitude: a mean of f x f covariances is the covariance of two means,
    hence unbiased, while the maximum of f x f noisy entries grows with f and suggests structure in pure noise. A cell
    on the diagonal averages either its off-diagonal or its diagonal entries, never both.

    Args:
        matrix: (D, D).
        edges: (c + 1,) from `cell_edges`.
        factor: from `cell_edges`.
        missing: (D,) bool, coordinates to ignore.
        diagonal: whether cells on the diagonal average the diagonal entries or the others.
    """
    starts = edges[:-1]
    counted = np.add.reduceat((~missing).astype(np.float64), starts)  # (c,)
    values = np.where(missing[:, None] | missing[None, :], 0.0, matrix) if missing.any() else matrix
    rows = np.stack([values[a:b].sum(axis=0, dtype=np.float64) for a, b in pairwise(edges)])  # (c, D)
    sums = np.add.reduceat(rows, starts, axis=1)
    counts = np.outer(counted, counted)
    own = np.add.reduceat(np.where(missing, 0.0, np.diagonal(matrix)), starts)
    index = np.arange(len(starts))
    sums[index, index] = own if diagonal else sums[index, index] - own
    counts[index, index] = counted if diagonal else counted**2 - counted
    cells = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return Pooled(cells, edges, factor)


def pool_groups(
    matrix: np.ndarray, order: np.ndarray, edges: np.ndarray, missing: np.ndarray, *, diagonal: bool
) -> Pooled:
    """Average a symmetric matrix (D, D) over pairs of groups of coordinates, in blocks of rows.

    Args:
        matrix: (D, D).
        order: (D,) the coordinates sorted by group.
        edges: (c + 1,) first place of each group in `order`, and D.
        missing: (D,) bool, coordinates to ignore.
        diagonal: whether the variances of single coordinates count.
    """
    starts, index = edges[:-1], np.arange(len(edges) - 1)
    group = np.empty(len(order), dtype=np.intp)
    group[order] = np.repeat(index, np.diff(edges))
    sums = np.zeros((len(starts), len(starts)))
    for first in range(0, len(matrix), _ROWS):
        rows = np.asarray(matrix[first : first + _ROWS], dtype=np.float64)
        rows = np.where(missing[first : first + _ROWS, None] | missing, 0.0, rows)
        np.add.at(sums, group[first : first + _ROWS], np.add.reduceat(rows[:, order], starts, axis=1))
    counted = np.add.reduceat((~missing[order]).astype(np.float64), starts)
    counts = np.outer(counted, counted)
    if not diagonal:
        sums[index, index] -= np.add.reduceat(np.where(missing, 0.0, np.diagonal(matrix))[order], starts)
        counts[index, index] -= counted
    cells = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return Pooled(cells, edges, 1)


def checked_square(matrix: np.ndarray, what: str) -> np.ndarray:
    """The matrix as a float array (D, D); `check_entries` checks its values.

    Raises:
        DataError: if it is not square, or empty.
    """
    array = np.asarray(matrix)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise DataError(f"{what}: expected a square matrix (D, D), found {array.shape}")
    if not np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    return array


def check_entries(matrix: np.ndarray, missing: np.ndarray, what: str) -> None:
    """Check that a matrix is finite and symmetric outside missing coordinates, in blocks of rows.

    Raises:
        DataError: names the first entry.
    """
    scale = 0.0
    for start in range(0, len(matrix), _ROWS):
        rows = matrix[start : start + _ROWS]
        finite = np.isfinite(rows)
        if not finite.all():
            bad = ~finite & ~missing[start : start + _ROWS, None] & ~missing
            if bad.any():
                i, j = np.argwhere(bad)[0]
                raise DataError(
                    f"{what}: entry ({start + i}, {j}) is {rows[i, j]}, and {int(bad.sum())} in these rows are not "
                    "finite; leave out networks that diverged"
                )
            rows = np.where(finite, rows, 0)
        scale = max(scale, float(rows.max()), -float(rows.min()))
    _check_symmetry(matrix, scale * (1e-3 if matrix.dtype.itemsize < 8 else 1e-6), what)


def _check_symmetry(matrix: np.ndarray, tolerance: float, what: str) -> None:
    """Compare tiles with their transposes; NaN compares equal to anything."""
    for top in range(0, len(matrix), _ROWS):
        for left in range(0, top + 1, _ROWS):
            tile = matrix[top : top + _ROWS, left : left + _ROWS]
            apart = np.abs(tile - matrix[left : left + _ROWS, top : top + _ROWS].T) > tolerance
            if apart.any():
                i, j = np.argwhere(apart)[0]
                i, j = top + i, left + j
                found = f"{matrix[i, j]} at ({i}, {j}) and {matrix[j, i]} at ({j}, {i})"
                raise DataError(f"{what}: expected a symmetric matrix, found {found}")
