import numpy as np
import pytest
from references_statistics import random_covariance, rearranged

from weightscope.errors import DataError
from weightscope.statistics import kronecker
from weightscope.statistics.kronecker import matrix_normal, nearest_kronecker


def symmetric(rng, size):
    x = rng.standard_normal((size, size))
    return x + x.T


def left_over(covariance, fit):
    """|Sigma - A (x) B|^2 / |Sigma|^2."""
    return np.sum((covariance - np.kron(fit.rows, fit.columns)) ** 2) / np.sum(covariance**2)


def test_order_of_the_factors_on_filters():
    """Rows of a filter that are correlated go to the first factor, row-major pixels: Cov(W_ij, W_kl) = A_ik B_jl."""
    rng = np.random.default_rng(0)
    a, b = np.diag([1.0, 2.0, 3.0]), np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    w = np.linalg.cholesky(a) @ rng.standard_normal((200_000, 3, 3)) @ np.linalg.cholesky(b).T
    fit = nearest_kronecker(np.cov(w.reshape(-1, 9), rowvar=False))
    scale = 3 / np.trace(fit.columns)
    np.testing.assert_allclose(fit.columns * scale, b, atol=0.02)  # 6 standard errors
    np.testing.assert_allclose(fit.rows / scale, a, atol=0.04)
    assert np.linalg.norm(fit.columns) == pytest.approx(np.sqrt(3))


@pytest.mark.parametrize(("p", "n"), [(3, 3), (4, 3), (2, 6), (1, 5), (5, 1)])
def test_the_nearest_product_is_the_leading_triple_of_the_rearrangement(p, n):
    covariance = symmetric(np.random.default_rng(2), p * n)
    values = np.linalg.svd(rearranged(covariance, p, n), compute_uv=False)
    fit = nearest_kronecker(covariance, p)
    assert fit.explained == pytest.approx(values[0] ** 2 / np.sum(values**2), rel=1e-10)
    assert left_over(covariance, fit) == pytest.approx(1 - fit.explained, abs=1e-12)


def test_a_kronecker_square_of_an_antisymmetric_matrix_is_found():
    """The optimum is over all A: here the symmetric ones would leave everything."""
    a = np.array([[0.0, 2.0, 0.0], [-2.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    fit = nearest_kronecker(np.kron(a, a), same=True)
    assert left_over(np.kron(a, a), fit) < 1e-26
    np.testing.assert_allclose(np.abs(fit.rows), np.abs(a), atol=1e-13)


def test_squares_are_the_leading_eigenpair_of_the_symmetric_rearrangement():
    covariance = symmetric(np.random.default_rng(7), 16)
    r = rearranged(covariance, 4, 4)
    fit = nearest_kronecker(covariance, same=True)
    assert fit.explained == pytest.approx(np.linalg.eigvalsh((r + r.T) / 2)[-1] ** 2 / np.sum(r**2), rel=1e-10)
    assert left_over(covariance, fit) == pytest.approx(1 - fit.explained, abs=1e-12)


def test_a_matrix_without_positive_eigenvalue_is_best_left_alone():
    """A (x) A has <vec A, R vec A> >= 0, so nothing of -I (x) I is explained."""
    fit = nearest_kronecker(-np.eye(9), same=True)
    assert fit.explained == 0
    assert not fit.rows.any()
    assert nearest_kronecker(-np.eye(9)).explained == pytest.approx(1)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_factors_of_a_positive_covariance_are_positive(same, rank):
    """Krein and Rutman: R maps positive semi-definite matrices to such."""
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((16, rank))
        for factor in nearest_kronecker(x @ x.T, same=same)[:2]:
            values = np.linalg.eigvalsh(factor)
            assert values[0] > -1e-12 * values[-1]


@pytest.mark.parametrize("same", [True, False])
def test_factors_are_positive_where_they_are_not_unique(same):
    """diag(A) (x) diag(A) blocks that do not interact: the leading value is double, its vectors must not mix signs."""
    covariance = np.zeros((4, 4))
    covariance[0, 0] = covariance[3, 3] = 1.0  # R is e_11 e_11^T + e_22 e_22^T
    fit = nearest_kronecker(covariance, same=same)
    np.testing.assert_allclose(np.kron(fit.rows, fit.columns), 0.5 * np.eye(4), atol=1e-14)


@pytest.mark.parametrize("same", [True, False])
def test_power_iteration_changes_nothing(monkeypatch, same):
    rng = np.random.default_rng(9)
    covariance = np.kron(random_covariance(7, rng), np.eye(7)) + 0.1 * random_covariance(49, rng)
    fast = nearest_kronecker(covariance, same=same)
    monkeypatch.setattr(kronecker, "_POWERS", 0)
    dense = nearest_kronecker(covariance, same=same)
    np.testing.assert_allclose(fast.rows, dense.rows, rtol=0, atol=1e-12 * np.abs(fast.rows).max())
    np.testing.assert_allclose(fast.columns, dense.columns, rtol=0, atol=1e-12 * np.abs(fast.columns).max())


BAD_COVARIANCES = [
    (r"covariance of 3 x 1 matrices, found \(3, 4\)", np.zeros((3, 4)), {"p": 3}),
    (r"of 2 x 2 matrices, found \(6, 6\)", np.eye(6), {"p": 2, "same": True}),
    ("finite, symmetric and other than zero", np.diag([1.0, np.nan, np.inf, 1.0]), {}),
    ("finite, symmetric", np.eye(4) + 0.1 * np.eye(4, k=1), {}),
]


@pytest.mark.parametrize(("match", "covariance", "options"), BAD_COVARIANCES)
def test_bad_covariances(match, covariance, options):
    with pytest.raises(DataError, match=match):
        nearest_kronecker(covariance, **options)


def sample(rng, n, rows, columns):
    return np.linalg.cholesky(rows) @ rng.standard_normal((n, len(rows), len(columns))) @ np.linalg.cholesky(columns).T


@pytest.fixture
def factors():
    rng = np.random.default_rng(0)
    rows, columns = random_covariance(5, rng), random_covariance(3, rng)
    return rows * np.trace(columns) / 3, columns * 3 / np.trace(columns)


def test_permuting_rows_conjugates_the_matrix_normal(factors):
    rng = np.random.default_rng(7)
    w = sample(rng, 60, *factors)
    fit = matrix_normal(w)
    assert fit.converged
    assert np.trace(fit.columns) == pytest.approx(3, rel=1e-12)
    # Permuting hidden units conjugates the covariance between rows.
    order = rng.permutation(5)
    permuted = matrix_normal(w[:, order])
    np.testing.assert_allclose(permuted.rows, fit.rows[np.ix_(order, order)], atol=1e-8)
    np.testing.assert_allclose(permuted.columns, fit.columns, atol=1e-8)
    transposed = matrix_normal(w.transpose(0, 2, 1), tolerance=1e-14)
    both = np.kron(transposed.columns, transposed.rows)
    exact = matrix_normal(w, tolerance=1e-14)
    np.testing.assert_allclose(both, np.kron(exact.rows, exact.columns), atol=1e-6)


def test_too_few_or_dependent_matrices(factors):
    rng = np.random.default_rng(8)
    with pytest.raises(DataError, match="too few matrices for an estimate"):
        matrix_normal(rng.standard_normal((1, 5, 3)))
    dependent = rng.standard_normal((50, 4, 3))
    dependent[:, 3] = dependent[:, 0]
    with pytest.raises(DataError, match="too few matrices for an estimate"):
        matrix_normal(dependent)
