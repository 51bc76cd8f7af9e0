"""Ledoit-Wolf shrinkage of a covariance matrix towards a multiple of the identity."""

from dataclasses import dataclass

import numpy as np

from weightscope.errors import DataError
from weightscope.statistics.moments import Moments


@dataclass(frozen=True)
class LedoitWolf:
    """S_shrunk = (1 - intensity) S + intensity * target * I, with S the covariance with divisor n.

    Attributes:
        intensity: in [0, 1].
        target: the mean of the variances, tr(S) / D.
    """

    intensity: float
    target: float


def ledoit_wolf_from_sums(n: int, size: int, trace: float, frobenius: float, fourth: float) -> LedoitWolf:
    """The optimal intensity (Ledoit and Wolf 2004, Lemma 3.2-3.5) from sums over centred vectors x_k.

    With S = sum of x x^T / n, m = tr(S) / D, d^2 = (|S|_F^2 - D m^2) / D and
    b^2 = (sum |x|^4 / n - |S|_F^2) / (n D), the intensity is min(b^2, d^2) / d^2.

    Args:
        n: number of vectors.
        size: D.
        trace: sum of |x|^2.
        frobenius: |sum of x x^T|_F^2.
        fourth: sum of |x|^4.

    Raises:
        DataError: if n < 1.
    """
    if n < 1:
        raise DataError(f"shrinkage: expected at least one vector, found {n}")
    target = trace / (n * size)
    squared = frobenius / n**2
    delta = squared - size * target**2
    beta = (fourth / n - squared) / n
    # In one dimension, or when S is a multiple of the identity already, shrinking changes nothing.
    if size == 1 or delta <= 0:
        return LedoitWolf(0.0, target)
    return LedoitWolf(min(max(beta, 0.0), delta) / delta, target)


def ledoit_wolf(moments: Moments) -> LedoitWolf:
    """The intensity from moments, without a second pass over the data.

    Example:
        >>> shrunk = shrunk_covariance(moments, ledoit_wolf(moments))
    """
    return ledoit_wolf_from_sums(moments.n, moments.size, *moments.squared_norms())


def shrunk_covariance(moments: Moments, shrinkage: LedoitWolf | None = None, *, destroy: bool = False) -> np.ndarray:
    """The shrunk covariance (D, D), divisor n as in the paper; with `destroy` in the moments' memory."""
    shrinkage = shrinkage or ledoit_wolf(moments)
    n = moments.n
    matrix = moments.covariance(destroy=destroy)
    matrix *= (1.0 - shrinkage.intensity) * (n - 1) / n
    matrix[np.diag_indices_from(matrix)] += shrinkage.intensity * shrinkage.target
    return matrix


def ledoit_wolf_of_rows(rows: np.ndarray) -> LedoitWolf:
    """The intensity from centred vectors (n, D), without a D x D matrix if n < D.

    |sum of x x^T|_F^2 also equals the squared norm of the n x n Gram matrix.
    """
    n, size = rows.shape
    squares = np.einsum("ij,ij->i", rows, rows)
    gram = rows @ rows.T if n < size else rows.T @ rows
    return ledoit_wolf_from_sums(n, size, float(squares.sum()), float(np.vdot(gram, gram)), float(squares @ squares))
