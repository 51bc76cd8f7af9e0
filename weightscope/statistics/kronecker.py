"""Kronecker factorisations of covariances: sums of products exactly, matrix normals by maximum likelihood.

Order throughout: the covariance is of vec(W), row-major, for matrices W (p, n), and A (x) B means `np.kron(A, B)` with
A (p, p) between rows and B (n, n) between columns: `Cov(W_ij, W_kl) = A_ik B_jl`. For filters this is Sigma' of thesis
Eq. 3.1, whose row `k*i + j` belongs to pixel (i, j), not the block form of its figures.

The rearrangement of Van Loan and Pitsianis (1993), `R[(i, k), (j, l)] = Sigma[(i, j), (k, l)]` (p^2, n^2), turns
A (x) B into vec(A) vec(B)^T, and preserves the Frobenius norm. For a symmetric Sigma, R maps symmetric matrices to
symmetric and antisymmetric to antisymmetric ones, so it is the sum of two parts, which are decomposed separately.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope._util.checks import count
from weightscope.errors import DataError, UsageError

_EQUAL = 1e-10  # relative distance of singular values that are treated as equal
_ZERO = 1e-13  # singular values below this share of |Sigma|_F are rounding errors
_POWERS, _CONVERGED = 40, 3e-15
_STEPS = 500  # of the flip-flop algorithm, at most
_SYMMETRY = 1e-6  # largest difference across the diagonal, as a share of the largest entry


@dataclass(frozen=True, eq=False)
class KroneckerSum:
    """A covariance as a sum of r Kronecker products, `sum over i of A_i (x) B_i`."""

    rows: np.ndarray  # A_i, (r, p, p), each symmetric or antisymmetric
    columns: np.ndarray  # B_i, (r, n, n), each of Frobenius norm sqrt(n); equal to `rows` if `same`
    # (r,), the norms of the terms, `|A_i|_F |B_i|_F`, descending. Terms are orthogonal to each other
    values: np.ndarray
    norm: float  # |Sigma|_F
    same: bool  # whether each term is A_i (x) A_i

    @property
    def terms(self) -> int:
        """r; smaller than requested if fewer terms are exact (or, for A (x) A, no further term reduces the error)."""
        return len(self.values)

    @property
    def shares(self) -> np.ndarray:
        """Explained variance of each term (r,): `values^2 / |Sigma|_F^2`."""
        return (self.values / self.norm) ** 2

    @property
    def explained(self) -> float:
        """Explained variance, `1 - |Sigma - sum|_F^2 / |Sigma|_F^2 = sum of values^2 / |Sigma|_F^2`."""
        return min(1.0, float(self.shares.sum()))

    def matrix(self) -> np.ndarray:
        """The sum, (p n, p n). Only the first term is guaranteed to be positive semi-definite."""
        p, n = self.rows.shape[1], self.columns.shape[1]
        return np.einsum("rik,rjl->ijkl", self.rows, self.columns).reshape(p * n, p * n)


def kronecker_sum(
    covariance: np.ndarray, p: int | None = None, n: int | None = None, *, terms: int = 1, same: bool = False
) -> KroneckerSum:
    """The sum of r Kronecker products nearest to a covariance in the Frobenius norm, without iteration.

    `same=False`: `min |Sigma - sum_i A_i (x) B_i|_F` over all A_i (p, p) and B_i (n, n). The optimum is the truncated
    singular value decomposition of the rearrangement R (Eckart and Young 1936; Van Loan and Pitsianis 1993); no choice
    of r terms leaves a smaller residual, and min(p^2, n^2) terms leave none.

    `same=True`: `min |Sigma - sum_i A_i (x) A_i|_F` over all A_i (p, p). With a_i = vec(A_i) this is
    `min |R - sum_i a_i a_i^T|_F`, of which only the symmetric part of R takes part, and the optimum is its positive
    semi-definite truncation: a_i = sqrt(lambda_i) v_i with the r largest positive eigenvalues. It is the global
    optimum, over factors that need not be symmetric; the part of Sigma that is odd under transposition of W remains.

    For a positive semi-definite Sigma the A and B of the first term are positive semi-definite (Krein and Rutman 1948);
    if it is not unique, the projection of the identity is taken. Signs are chosen so that traces are not negative.

    Args:
        covariance: (p n, p n), symmetric; it need not be positive semi-definite.
        p: rows of the matrices W whose row-major vec has this covariance; None for square W, the filters' case.
        n: columns; None for (size of the covariance) / p.
        terms: r, at most min(p^2, n^2).
        same: one factor for rows and columns, for square W (thesis 3.1.1).

    Raises:
        DataError: if the covariance is not square, finite and symmetric, has no such factors, or is zero.
        UsageError: if `terms` is out of range, or `same` is given for W that are not square.

    Example:
        >>> fit = kronecker_sum(np.kron(A, A), same=True)
        >>> np.allclose(fit.rows[0], A), fit.explained
        (True, 1.0)
    """
    sigma = _checked(covariance)
    p, n = _sizes(len(sigma), p, n)
    if same and p != n:
        raise UsageError(f"same: A (x) A needs square matrices, found {p} x {n}; use same=False for A (x) B")
    if isinstance(terms, bool) or not isinstance(terms, int | np.integer) or not 1 <= terms <= min(p, n) ** 2:
        raise UsageError(f"terms: expected an integer from 1 to {min(p, n) ** 2} for {p} x {n} matrices, found {terms}")
    norm = float(np.linalg.norm(sigma))
    if norm == 0:
        raise DataError("expected a covariance other than zero for its Kronecker factors")
    r = (sigma / norm).reshape(p, n, p, n).transpose(0, 2, 1, 3).reshape(p * p, n * n)
    found = _dominant(r, n, same) if terms == 1 else None
    values, left, right = _decomposed(r, p, n, terms, same) if found is None else found
    values, left, right = values * norm, left.reshape(-1, p, p), right.reshape(-1, n, n)
    if same:
        rows = columns = left * np.sqrt(values)[:, None, None]
    else:
        rows, columns = left * (values / math.sqrt(n))[:, None, None], right * math.sqrt(n)
    return KroneckerSum(rows, columns, values, norm, same)


def explained_variance(covariance: np.ndarray, approximation: np.ndarray, *, diagonal: bool = True) -> float:
    """`1 - |Sigma - S|_F^2 / |Sigma|_F^2`: 1 where S is exact, 0 for S = 0, negative where S is worse than that.

    Args:
        covariance: Sigma (D, D); DataError if all its entries in question are zero.
        approximation: S (D, D).
        diagonal: include the variances. Without them the number describes the dependence alone: a large part of any
            diagonal Sigma is a Kronecker product.
    """
    sigma, other = np.asarray(covariance, dtype=np.float64), np.asarray(approximation, dtype=np.float64)
    if sigma.ndim != 2 or sigma.shape != other.shape or sigma.shape[0] != sigma.shape[1]:
        raise DataError(f"expected two covariances of one size, found {sigma.shape} and {other.shape}")
    counted = np.ones(sigma.shape, dtype=bool) if diagonal else ~np.eye(len(sigma), dtype=bool)
    total = float(np.sum(sigma[counted] ** 2))
    if not total > 0:
        raise DataError(
            "expected a covariance with entries other than zero, found none" + " off the diagonal" * (not diagonal)
        )
    return 1.0 - float(np.sum((sigma - other)[counted] ** 2)) / total


_Triples = tuple[np.ndarray, np.ndarray, np.ndarray]  # values (r,), left (r, ...), right (r, ...)


def _checked(covariance: np.ndarray) -> np.ndarray:
    sigma = np.asarray(covariance, dtype=np.float64)
    if sigma.ndim != 2 or sigma.shape[0] != sigma.shape[1] or sigma.size == 0:
        raise DataError(f"expected a covariance (D, D), found {sigma.shape}")
    largest = float(np.abs(sigma).max())
    if not math.isfinite(largest):
        raise DataError(f"the covariance has {int((~np.isfinite(sigma)).sum())} non-finite entries")
    asymmetry = float(np.abs(sigma - sigma.T).max())
    if asymmetry > _SYMMETRY * largest:
        raise DataError(f"expected a symmetric covariance, found an asymmetry of {asymmetry:.3g}")
    return sigma if asymmetry == 0 else 0.5 * (sigma + sigma.T)


def _sizes(size: int, p: int | None, n: int | None) -> tuple[int, int]:
    for name, value in (("p", p), ("n", n)):
        if value is not None:
            count(name, value)
    if p is None and n is None and math.isqrt(size) ** 2 != size:
        raise DataError(f"expected a covariance of square matrices, found {size} coordinates; give p and n")
    p = p or (math.isqrt(size) if n is None else size // n)
    n = n or size // p
    if p * n != size:
        raise DataError(f"expected a covariance {(p * n, p * n)} of {p} x {n} matrices, found {(size, size)}")
    return p, n


def _decomposed(r: np.ndarray, p: int, n: int, terms: int, same: bool) -> _Triples:
    """The leading singular triples of R (eigenpairs with positive values if `same`), vectors in rows."""
    mirrored = r[:, np.arange(n * n).reshape(n, n).T.ravel()]
    parts: list[_Triples] = []
    for part in (0.5 * (r + mirrored), 0.5 * (r - mirrored)):  # between symmetric matrices, and antisymmetric ones
        if same:
            values, vectors = np.linalg.eigh(0.5 * (part + part.T))
            left = right = vectors.T
        else:
            vectors, values, right = np.linalg.svd(part, full_matrices=False)
            left = vectors.T
        order = np.argsort(-values, kind="stable")
        order = order[values[order] > _ZERO]
        values, left, right = values[order], left[order], right[order]
        if not parts:
            left, right = _aligned(values, left, right, np.eye(p).ravel())
        parts.append((values, left, right))
    values, left, right = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    order = np.argsort(-values, kind="stable")[:terms]  # symmetric ones first among equals
    values, left, right = values[order], left[order], right[order]
    deciding = np.take_along_axis(right, np.abs(right).argmax(axis=1)[:, None], axis=1)[:, 0]
    traces = right @ np.eye(n).ravel()
    signs = np.where(np.where(np.abs(traces) > 1e-12, traces, deciding) < 0, -1.0, 1.0)[:, None]  # vectors have norm 1
    return values, left * signs, right * signs


def _dominant(r: np.ndarray, n: int, same: bool) -> _Triples | None:
    """The leading triple (the symmetric part's eigenpair if `same`) by power iteration from the identity, or None.

    None is returned where it is uncertain, or slow to converge. It is certain if it has more than half of the squared
    norm, as of most covariances of filters.
    """
    r = 0.5 * (r + r.T) if same else r
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
            left = right if same and left @ right > 0 else left
            certain = 2.0 * value**2 > float(np.vdot(r, r)) * (1 + 1e-12)
            return (np.array([value]), left[None], right[None]) if certain and (left is right or not same) else None
    return None


def _aligned(
    values: np.ndarray, left: np.ndarray, right: np.ndarray, identity: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """If the leading value is not simple, rotate its vectors so that the first is the identity's projection."""
    equal = int((values >= values[:1].max(initial=0.0) * (1 - _EQUAL)).sum())
    weights = left[:equal] @ identity
    if equal < 2 or np.linalg.norm(weights) < 1e-8 * np.linalg.norm(identity):
        return left, right
    turn = np.linalg.qr(np.column_stack([weights, np.eye(equal)]))[0].T  # (equal, equal), first row ~ the weights
    left, right = (np.concatenate([turn @ v[:equal], v[equal:]]) for v in (left, right))
    return left, right


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
    samples, *shape = x.shape
    p, n = shape
    if samples < (fewest := max(-(-p // n), -(-n // p))):
        raise DataError(
            f"matrix normal of shape {(p, n)}: expected more matrices, found {samples}; at least {fewest} are "
            "necessary for factors of full rank"
        )
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
