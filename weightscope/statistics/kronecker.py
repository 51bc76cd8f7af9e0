"""Kronecker-factored covariances: the matrix-normal fit from data, and the nearest factorisation of a matrix.

Order throughout: vec(W) is row-major, W is (p, n), and Cov(vec W) = R (x) C means `np.kron(R, C)` with R (p, p)
between rows and C (n, n) between columns: Cov(W_ij, W_kl) = R_ik C_jl.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.sparse.linalg import LinearOperator, svds

from weightscope.errors import DataError


@dataclass(frozen=True)
class MatrixNormal:
    """A matrix-normal covariance R (x) C.

    Attributes:
        rows: R, (p, p).
        columns: C, (n, n), with trace n, which fixes the factor that R and C could trade.
        iterations: of the flip-flop.
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
        matrices: (N, p, n), centred already.
        tolerance: on the log-likelihood per number, in nats.
        max_iterations: after which it stops; `converged` then is False.

    Raises:
        DataError: if there are too few matrices for an estimate (a factor becomes singular).

    Example:
        >>> fit = matrix_normal(w - w.mean(axis=0))
        >>> covariance = np.kron(fit.rows, fit.columns)
    """
    w = np.asarray(matrices, dtype=np.float64)
    networks, p, n = w.shape
    # Necessary for the factors to have full rank; where it is not sufficient, the Cholesky factor fails.
    if networks * n < p or networks * p < n:
        raise DataError(f"a matrix normal of shape {(p, n)} needs more matrices than {networks}")
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
        raise DataError("the matrix normal has no estimate: too few matrices, or rows or columns that are dependent")
    return factor


def nearest_kronecker(covariance: np.ndarray, p: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The R (p, p) and C (n, n) that minimise |covariance - R (x) C|_F (Van Loan and Pitsianis 1993).

    The p^2 x n^2 rearrangement, whose row (i, k) is vec of block (i, k), turns R (x) C into vec(R) vec(C)^T; the
    optimum is its leading pair of singular vectors. For a positive semi-definite covariance both factors are.

    Args:
        covariance: (p n, p n).
        p: rows of the matrix whose row-major vec has this covariance.
        n: its columns.

    Returns:
        R, C with trace n, and the relative error |covariance - R (x) C|_F / |covariance|_F.

    Raises:
        DataError: if the covariance is not (p n, p n) or is zero.

    Example:
        >>> rows, columns, error = nearest_kronecker(np.kron(R, C), len(R), len(C))
    """
    if covariance.shape != (p * n, p * n):
        raise DataError(f"expected a covariance {(p * n, p * n)} of {p} x {n} matrices, found {covariance.shape}")
    rearranged = covariance.reshape(p, n, p, n).transpose(0, 2, 1, 3).reshape(p * p, n * n)
    norm = float(np.linalg.norm(rearranged))
    if norm == 0:
        raise DataError("a covariance that is zero has no Kronecker factors")
    left, value, right = _leading(rearranged, p, n)
    residual = float(np.linalg.norm(rearranged - value * np.outer(left, right))) / norm
    rows, columns = left.reshape(p, p), right.reshape(n, n)
    trace = np.trace(columns)
    # A covariance has a positive diagonal, and so has the optimal C up to sign; without one the sign is free.
    scale = trace / n if abs(trace) > 1e-12 * np.linalg.norm(columns) else 1.0
    return value * rows * scale, columns / scale, residual


def _leading(matrix: np.ndarray, p: int, n: int) -> tuple[np.ndarray, float, np.ndarray]:
    """The leading singular triple; Lanczos for large matrices, from a start that does not depend on chance."""
    if min(matrix.shape) <= 256:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return left[:, 0], float(values[0]), right[0]
    start = np.eye(p).reshape(-1) if p <= n else np.eye(n).reshape(-1)
    operator = LinearOperator(matrix.shape, matvec=matrix.dot, rmatvec=matrix.T.dot, dtype=np.float64)
    left, values, right = svds(operator, k=1, v0=start, tol=0)
    return left[:, 0], float(values[0]), right[0]
