"""Kronecker-factored covariances: the matrix-normal fit from data, and the nearest factorisation of a matrix.

Order throughout: vec(W) is row-major, W is (p, n), and Cov(vec W) = R (x) C means `np.kron(R, C)` with R (p, p)
between rows and C (n, n) between columns: Cov(W_ij, W_kl) = R_ik C_jl.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import DataError
from weightscope.statistics.kronecker.sums import kronecker_sum


@dataclass(frozen=True)
class MatrixNormal:
    """A matrix-normal covariance R (x) C.

    Attributes:
        rows: R, (p, p).
        columns: C, (n, n), with trace n, which fixes the scale between R and C.
        iterations: of the flip-flop algorithm.
        converged: whether the tolerance was reached.
    """

    rows: np.ndarray
    columns: np.ndarray
    iterations: int
    converged: bool


def matrix_normal(matrices: np.ndarray, *, tolerance: float = 1e-10, max_iterations: int = 500) -> MatrixNormal:
    """The maximum-likelihood matrix normal by the flip-flop algorithm (Dutilleul 1999), without a pn x pn matrix.

    R <- sum over k of W_k C^-1 W_k^T / (N n) and C <- sum over k of W_k^T R^-1 W_k / (N p), until the
    log-likelihood per number changes by less than the tolerance.

    Args:
        matrices: (N, p, n), already centred.
        tolerance: on the log-likelihood per number, in nats.
        max_iterations: limit, after which `converged` is False.

    Raises:
        DataError: if there are too few matrices for an estimate (a factor becomes singular).

    Example:
        >>> fit = matrix_normal(w - w.mean(axis=0))
        >>> covariance = np.kron(fit.rows, fit.columns)
    """
    w = np.asarray(matrices, dtype=np.float64)
    networks, p, n = w.shape
    # Necessary for factors of full rank; if it is not sufficient, the Cholesky factorisation fails.
    if networks * n < p or networks * p < n:
        raise DataError(f"matrix normal of shape {(p, n)}: expected more matrices, found {networks}")
    columns, previous, converged, steps = np.eye(n), np.inf, False, 0
    by_row = np.ascontiguousarray(w.transpose(1, 0, 2)).reshape(p, -1)  # (p, N n)
    by_column = np.ascontiguousarray(w.transpose(2, 0, 1)).reshape(n, -1)  # (n, N p)
    while steps < max_iterations and not converged:
        steps += 1
        half, _ = _whiten(columns, by_column)
        whitened = half.reshape(n, networks, p).transpose(2, 1, 0).reshape(p, -1)
        rows = whitened @ whitened.T / (networks * n)
        half, log_rows = _whiten(rows, by_row)
        whitened = half.reshape(p, networks, n).transpose(2, 1, 0).reshape(n, -1)
        columns = whitened @ whitened.T / (networks * p)
        # With R and C matched to each other the quadratic term is constant; only determinants change.
        value = log_rows / p + 2.0 * float(np.log(np.diag(_factor(columns))).sum()) / n
        converged = abs(previous - value) < tolerance
        previous = value
    scale = np.trace(columns) / n
    return MatrixNormal(rows * scale, columns / scale, steps, converged)


def _whiten(matrix: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, float]:
    factor = _factor(matrix)
    return solve_triangular(factor, data, lower=True), 2.0 * float(np.log(np.diag(factor)).sum())


def _factor(matrix: np.ndarray) -> np.ndarray:
    try:
        factor = cholesky(matrix, lower=True)
    except np.linalg.LinAlgError:
        factor = None
    # A rank-deficient factor can pass with rounding errors on its diagonal.
    if factor is None or np.diag(factor).min() ** 2 < 1e-13 * np.trace(matrix) / len(matrix):
        raise DataError("matrix normal: too few matrices for an estimate, or linearly dependent rows or columns")
    return factor


def nearest_kronecker(covariance: np.ndarray, p: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The R (p, p) and C (n, n) that minimise |covariance - R (x) C|_F (Van Loan and Pitsianis 1993).

    One term of `kronecker_sum`, scaled as in `MatrixNormal`. For a positive semi-definite covariance both factors are
    positive semi-definite.

    Args:
        covariance: (p n, p n).
        p: rows of the matrix whose row-major vec has this covariance.
        n: its columns.

    Returns:
        R, C with trace n, and the relative error |covariance - R (x) C|_F / |covariance|_F.

    Raises:
        DataError: if the covariance does not have shape (p n, p n), is not finite or symmetric, or is zero.

    Example:
        >>> rows, columns, error = nearest_kronecker(np.kron(R, C), len(R), len(C))
    """
    fit = kronecker_sum(covariance, p, n)
    columns = fit.columns[0]
    trace = np.trace(columns)
    # A covariance has a positive diagonal, and so has the optimal C; another symmetric matrix can have trace 0.
    scale = trace / n if abs(trace) > 1e-12 * np.linalg.norm(columns) else 1.0
    left = float(np.linalg.norm(np.asarray(covariance) - fit.matrix())) / fit.norm
    return fit.rows[0] * scale, columns / scale, left
