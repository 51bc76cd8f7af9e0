"""Kronecker factorisations of covariances: the nearest product, and matrix normals by maximum likelihood.

Order throughout: the covariance is of vec(W), row-major, for matrices W (p, n), and A (x) B means `np.kron(A, B)` with
A (p, p) between rows and B (n, n) between columns: `Cov(W_ij, W_kl) = A_ik B_jl`. For filters this is Sigma' of thesis
Eq. 3.1, whose row `k*i + j` belongs to pixel (i, j), not the block form of its figures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import DataError

_EQUAL = 1e-10  # relative distance of singular values that are treated as equal
_ZERO = 1e-13  # a singular value below this share of |Sigma|_F is a rounding error
_POWERS, _CONVERGED = 40, 3e-15
_STEPS = 500  # of the flip-flop algorithm, at most
_SYMMETRY = 1e-6  # largest difference across the diagonal, as a share of the largest entry


class KroneckerProduct(NamedTuple):
    """A Kronecker product near a covariance."""

    rows: np.ndarray  # A (p, p)
    columns: np.ndarray  # B (n, n), of Frobenius norm sqrt(n); A for A (x) A
    explained: float  # 1 - |Sigma - A (x) B|_F^2 / |Sigma|_F^2


def nearest_kronecker(covariance: np.ndarray, p: int | None = None, *, same: bool = False) -> KroneckerProduct:
    """The Kronecker product nearest to a covariance in the Frobenius norm.

        R[(i, k), (j, l)] = Sigma[(i, j), (k, l)],   |Sigma - A (x) B|_F = |R - vec(A) vec(B)^T|_F

    A (x) B is the leading singular triple of R (p^2, n^2), A (x) A the leading eigenpair of its symmetric part if the
    eigenvalue is positive, else zero: the optimum over all A and B. For a positive semi-definite Sigma these are
    positive semi-definite (Krein and Rutman 1948); if they are not unique, the projection of the identity is taken.

    Args:
        covariance: (p n, p n), symmetric; it need not be positive semi-definite.
        p: rows of the matrices W whose row-major vec has this covariance; None for square W, the filters' case.
        same: A (x) A, for square W (thesis 3.1.1).

    DataError if the covariance is not finite, symmetric and other than zero, or p does not divide its size.

    Source: Van Loan and Pitsianis 1993.

    Example:
        >>> fit = nearest_kronecker(np.kron(A, A), same=True)
        >>> np.allclose(fit.rows, A), fit.explained
        (True, 1.0)
    """
    sigma = np.asarray(covariance, dtype=np.float64)
    p = p or math.isqrt(len(sigma))
    n = len(sigma) // p
    if sigma.shape != (p * n, p * n) or (same and p != n):
        raise DataError(f"expected the covariance of {p} x {p if same else n} matrices, found {sigma.shape}")
    norm, largest = float(np.linalg.norm(sigma)), float(np.abs(sigma).max())
    if not (math.isfinite(norm) and norm > 0 and np.abs(sigma - sigma.T).max() <= _SYMMETRY * largest):
        raise DataError("expected a covariance that is finite, symmetric and other than zero, found another matrix")
    r = (sigma / norm).reshape(p, n, p, n).transpose(0, 2, 1, 3).reshape(p * p, n * n)
    r = 0.5 * (r + r.T) if same else r
    value, left, right = _by_powers(r, n, same) or _decomposed(r, p, same)
    left, right = (part * (-1.0 if right @ np.eye(n).ravel() < 0 else 1.0) for part in (left, right))
    left, right = left.reshape(p, p), right.reshape(n, n)
    if same:
        columns = rows = left * math.sqrt(value * norm)
    else:
        rows, columns = left * (value * norm / math.sqrt(n)), right * math.sqrt(n)
    return KroneckerProduct(rows, columns, min(1.0, value**2))


_Triple = tuple[float, np.ndarray, np.ndarray]  # the leading value, the left and the right vector


def _decomposed(r: np.ndarray, p: int, same: bool) -> _Triple:
    """The leading singular triple of R; if `same` the leading eigenpair, with the value zero unless it is positive."""
    if same:
        values, vectors = np.linalg.eigh(r)
        values, left = values[::-1], vectors.T[::-1]
        right = left
    else:
        vectors, values, right = np.linalg.svd(r, full_matrices=False)
        left = vectors.T
    equal = values >= values[0] - _EQUAL * abs(values[0])
    weights, identity = left[: equal.sum()] @ np.eye(p).ravel(), math.sqrt(p)
    if np.linalg.norm(weights) < 1e-8 * identity:
        weights = np.eye(equal.sum())[0]
    weights /= np.linalg.norm(weights)
    value = float(values[0]) if values[0] > _ZERO else 0.0
    return value, weights @ left[: equal.sum()], weights @ right[: equal.sum()]


def _by_powers(r: np.ndarray, n: int, same: bool) -> _Triple | None:
    """The same by power iteration from the identity, several times as fast; None where that is uncertain or slow.

    It is certain if the value has more than half of the squared norm, as of most covariances of filters.
    """
    right = np.eye(n).ravel() / math.sqrt(n)
    for _ in range(_POWERS):
        left = r @ right
        value = math.sqrt(left @ left)
        if value == 0:
            return None
        left /= value
        new = left @ r
        new /= math.sqrt(new @ new)
        change = new - right
        right = new
        if change @ change < _CONVERGED**2:
            left = r @ right
            value = math.sqrt(left @ left)
            left /= value
            positive = not same or left @ right > 0
            certain = 2.0 * value**2 > float(np.vdot(r, r)) * (1 + 1e-12)
            return (value, right if same else left, right) if certain and positive else None
    return None


@dataclass(frozen=True)
class MatrixNormal:
    """A matrix-normal covariance A (x) B."""

    rows: np.ndarray  # A (p, p)
    columns: np.ndarray  # B (n, n), of trace n, which fixes the scales of both
    iterations: int  # of the flip-flop algorithm
    converged: bool  # whether the tolerance was reached


def matrix_normal(matrices: np.ndarray, *, tolerance: float = 1e-10) -> MatrixNormal:
    """The maximum-likelihood matrix normal by the flip-flop algorithm, without the dense covariance.

    Cov(vec W) = A (x) B for W (p, n) in row-major order. In turn, until the log-likelihood per number changes by less
    than the tolerance,

        A <- sum over samples of W B^-1 W^T / (N n),   B <- sum over samples of W^T A^-1 W / (N p)

    They have full rank only if N n >= p and N p >= n, which is checked. This is necessary but not sufficient for a
    maximum to exist (the exact thresholds are in Derksen, Makam and Walter 2022); where there is none, a factor becomes
    singular, which is an error, too. Means of entries that were estimated from the same N samples take one of them.

    Args:
        matrices: (N, p, n), already centred; DataError if they are too few for an estimate.
        tolerance: on the log-likelihood per number, in nats; `converged` is False if 500 steps do not reach it.

    Source: Dutilleul 1999, "The MLE algorithm for the matrix normal distribution".

    Example:
        >>> fit = matrix_normal(w - w.mean(axis=0))
        >>> covariance = np.kron(fit.rows, fit.columns)
    """
    x = np.asarray(matrices, dtype=np.float64)
    shape = p, n = x.shape[1:]
    factors, roots = [np.eye(p), np.eye(n)], [np.eye(p), np.eye(n)]
    previous, converged, steps = np.inf, False, 0
    while steps < _STEPS and not converged:
        steps += 1
        for axis, size in enumerate(shape):
            white = along(partial(solve_triangular, roots[1 - axis], lower=True), x, 2 - axis)
            flat = np.moveaxis(white, axis + 1, 0).reshape(size, -1)
            factors[axis] = flat @ flat.T / flat.shape[1]
            roots[axis] = _root(factors[axis])
        # With the last factor matched to the other the quadratic term is constant; only determinants change.
        value = sum(2.0 * float(np.log(np.diag(root)).sum()) / len(root) for root in roots)
        converged = abs(previous - value) < tolerance
        previous = value
    scale = np.trace(factors[1]) / n
    return MatrixNormal(factors[0] * scale, factors[1] / scale, steps, converged)


def along(apply: Callable[[np.ndarray], np.ndarray], x: np.ndarray, axis: int) -> np.ndarray:
    """Apply a map of matrices (d, ...) along an axis of length d."""
    front = np.moveaxis(x, axis, 0)
    return np.moveaxis(apply(front.reshape(len(front), -1)).reshape(front.shape), 0, axis)


def _root(matrix: np.ndarray) -> np.ndarray:
    """The Cholesky factor; a DataError if the matrix is singular."""
    try:
        root = cholesky(matrix, lower=True)
    except np.linalg.LinAlgError:
        root = None
    # A rank-deficient factor can pass with rounding errors on its diagonal.
    if root is None or np.diag(root).min() ** 2 < 1e-13 * np.trace(matrix) / len(matrix):
        raise DataError("matrix normal: too few matrices for an estimate, or linearly dependent rows or columns")
    return root
