"""Kronecker-factored covariances: matrix and tensor normals fitted to data, the nearest factorisation of a matrix.

Order throughout: vec(W) is row-major, W is (p, n), and Cov(vec W) = R (x) C means `np.kron(R, C)` with R (p, p)
between rows and C (n, n) between columns: Cov(W_ij, W_kl) = R_ik C_jl.
"""

import math
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


@dataclass(frozen=True)
class TensorNormal:
    """A tensor-normal covariance S_1 (x) ... (x) S_K.

    Attributes:
        factors: S_k, (d_k, d_k); all but the first have trace d_k, which fixes their scales.
        iterations: of the flip-flop algorithm.
        converged: whether the tolerance was reached.
    """

    factors: tuple[np.ndarray, ...]
    iterations: int
    converged: bool


def matrix_normal(matrices: np.ndarray, *, tolerance: float = 1e-10, max_iterations: int = 500) -> MatrixNormal:
    """The maximum-likelihood matrix normal by the flip-flop algorithm (Dutilleul 1999), without a pn x pn matrix.

    `tensor_normal` for K = 2: R <- sum over k of W_k C^-1 W_k^T / (N n), C <- sum over k of W_k^T R^-1 W_k / (N p).

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
    fit = tensor_normal(matrices, tolerance=tolerance, max_iterations=max_iterations)
    rows, columns = fit.factors
    return MatrixNormal(rows, columns, fit.iterations, fit.converged)


def tensor_normal(arrays: np.ndarray, *, tolerance: float = 1e-10, max_iterations: int = 500) -> TensorNormal:
    """The maximum-likelihood tensor normal of order K by the flip-flop algorithm, without the dense covariance.

    Cov(vec X) = S_1 (x) ... (x) S_K for X (d_1, ..., d_K) in row-major order. In turn, for each axis k,

        S_k <- d_k / (N D) sum over samples of X_(k) (S_1 (x) .. without k .. (x) S_K)^-1 X_(k)^T,   D = d_1 ... d_K,

    with X_(k) the matrix of axis k against all others, until the log-likelihood per number changes by less than the
    tolerance. S_k has full rank only if N D / d_k >= d_k, which is checked for every axis. This is necessary but not
    sufficient for a maximum to exist (Manceur and Dutilleul 2013; the exact thresholds are in Derksen, Makam and Walter
    2022); where there is none, a factor becomes singular, which is an error, too. Means of entries that were estimated
    from the same N samples take one of them.

    Args:
        arrays: (N, d_1, ..., d_K), already centred.
        tolerance: on the log-likelihood per number, in nats.
        max_iterations: limit, after which `converged` is False.

    Raises:
        DataError: if there are too few samples for an estimate.

    Source: Manceur and Dutilleul 2013, "Maximum likelihood estimation for the tensor normal distribution"; Hoff 2011;
    for matrices Dutilleul 1999.

    Example:
        >>> fit = tensor_normal(w - w.mean(axis=0))  # w (N, L, p, n)
        >>> covariance = np.kron(np.kron(fit.factors[0], fit.factors[1]), fit.factors[2])
    """
    x = np.asarray(arrays, dtype=np.float64)
    samples, shape = len(x), x.shape[1:]
    kind = "matrix" if len(shape) == 2 else "tensor"
    if fewest := [-(-d * d // math.prod(shape)) for d in shape if samples * math.prod(shape) < d * d]:
        things = "matrices" if kind == "matrix" else "samples"
        raise DataError(
            f"{kind} normal of shape {shape}: expected more {things}, found {samples}; "
            f"at least {max(fewest)} are necessary for factors of full rank"
        )
    factors, logs = [np.eye(d) for d in shape], [0.0] * len(shape)
    previous, converged, steps = np.inf, False, 0
    while steps < max_iterations and not converged:
        steps += 1
        for axis, size in enumerate(shape):
            white = x
            for other, factor in enumerate(factors):
                if other != axis:
                    white, logs[other] = _whiten(factor, white, other, kind)
            flat = np.moveaxis(white, axis + 1, 0).reshape(size, -1)
            factors[axis] = flat @ flat.T / flat.shape[1]
        logs[-1] = _log_determinant(_factor(factors[-1], kind))
        # With the last factor matched to the others the quadratic term is constant; only determinants change.
        value = sum(log / size for log, size in zip(logs, shape, strict=True))
        converged = abs(previous - value) < tolerance
        previous = value
    scales = [np.trace(factor) / len(factor) for factor in factors[1:]]
    scaled = [factor / scale for factor, scale in zip(factors[1:], scales, strict=True)]
    return TensorNormal((factors[0] * math.prod(scales), *scaled), steps, converged)


def _whiten(matrix: np.ndarray, x: np.ndarray, axis: int, kind: str) -> tuple[np.ndarray, float]:
    """Samples (N, d_1, ..., d_K) times L^-1 along an axis, for `matrix` = L L^T, and its log determinant."""
    factor = _factor(matrix, kind)
    front = np.moveaxis(x, axis + 1, 0)
    white = solve_triangular(factor, front.reshape(len(factor), -1), lower=True)
    return np.moveaxis(white.reshape(front.shape), 0, axis + 1), _log_determinant(factor)


def _log_determinant(factor: np.ndarray) -> float:
    return 2.0 * float(np.log(np.diag(factor)).sum())


def _factor(matrix: np.ndarray, kind: str) -> np.ndarray:
    try:
        factor = cholesky(matrix, lower=True)
    except np.linalg.LinAlgError:
        factor = None
    # A rank-deficient factor can pass with rounding errors on its diagonal.
    if factor is None or np.diag(factor).min() ** 2 < 1e-13 * np.trace(matrix) / len(matrix):
        raise DataError(
            f"{kind} normal: too few {'matrices' if kind == 'matrix' else 'samples'} for an estimate, "
            "or linearly dependent slices of an axis"
        )
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
