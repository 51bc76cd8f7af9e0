import numpy as np
import pytest
from references_statistics import random_covariance, rearranged

from weightscope.errors import DataError, UsageError
from weightscope.statistics import kronecker
from weightscope.statistics.kronecker import explained_variance, kronecker_sum, matrix_normal


def symmetric(rng, size):
    x = rng.standard_normal((size, size))
    return x + x.T


def relative_error(covariance, fit):
    return np.linalg.norm(covariance - fit.matrix()) / np.linalg.norm(covariance)


def test_order_of_the_factors_on_filters():
    """Rows of a filter that are correlated go to the first factor, row-major pixels: Cov(W_ij, W_kl) = A_ik B_jl."""
    rng = np.random.default_rng(0)
    a, b = np.diag([1.0, 2.0, 3.0]), np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    w = np.linalg.cholesky(a) @ rng.standard_normal((200_000, 3, 3)) @ np.linalg.cholesky(b).T
    covariance = np.cov(w.reshape(-1, 9), rowvar=False)
    fit = kronecker_sum(covariance)
    scale = 3 / np.trace(fit.columns[0])
    np.testing.assert_allclose(fit.columns[0] * scale, b, atol=0.02)  # 6 standard errors
    np.testing.assert_allclose(fit.rows[0] / scale, a, atol=0.04)
    for (i, j), (k, l) in [((0, 1), (0, 0)), ((2, 2), (2, 2)), ((1, 0), (1, 1))]:  # noqa: E741
        assert fit.matrix()[3 * i + j, 3 * k + l] == pytest.approx(a[i, k] * b[j, l], abs=0.06)


@pytest.mark.parametrize(("p", "n"), [(3, 3), (4, 3), (2, 6), (1, 5), (5, 1)])
def test_sums_are_the_truncated_svd_of_the_rearrangement(p, n):
    covariance = symmetric(np.random.default_rng(2), p * n)
    values = np.linalg.svd(rearranged(covariance, p, n), compute_uv=False)
    for terms in range(1, min(p, n) ** 2 + 1):
        fit = kronecker_sum(covariance, p, n, terms=terms)
        np.testing.assert_allclose(fit.values, values[:terms], rtol=1e-10)
        left = np.sqrt(np.sum(values[terms:] ** 2))
        assert np.linalg.norm(covariance - fit.matrix()) == pytest.approx(left, abs=1e-12 * values[0])
        assert fit.explained == pytest.approx(1 - left**2 / np.sum(values**2), abs=1e-12)
        assert fit.explained == pytest.approx(explained_variance(covariance, fit.matrix()), abs=1e-12)
    assert relative_error(covariance, fit) < 1e-13  # min(p^2, n^2) terms are exact


def test_terms_are_orthogonal_and_symmetric_or_antisymmetric():
    fit = kronecker_sum(random_covariance(20, np.random.default_rng(4)), 4, 5, terms=16)
    flat = np.stack([np.kron(a, b).ravel() for a, b in zip(fit.rows, fit.columns, strict=True)])
    np.testing.assert_allclose(flat @ flat.T, np.diag(fit.values**2), atol=1e-11)
    signs = [np.sign(np.sum(a * a.T)) for a in fit.rows]
    for sign, a, b in zip(signs, fit.rows, fit.columns, strict=True):
        np.testing.assert_allclose(a, sign * a.T, atol=1e-14)
        np.testing.assert_allclose(b, sign * b.T, atol=1e-14)
    assert {-1.0, 1.0} == set(signs)
    np.testing.assert_allclose(np.linalg.norm(fit.columns, axis=(1, 2)), np.sqrt(5))


def test_a_kronecker_square_of_an_antisymmetric_matrix_is_found():
    """The optimum is over all A: here the symmetric ones would leave everything."""
    a = np.array([[0.0, 2.0, 0.0], [-2.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    fit = kronecker_sum(np.kron(a, a), same=True)
    assert relative_error(np.kron(a, a), fit) < 1e-13
    np.testing.assert_allclose(np.abs(fit.rows[0]), np.abs(a), atol=1e-13)


def test_sums_of_squares_are_the_positive_part_of_the_symmetric_rearrangement():
    covariance = symmetric(np.random.default_rng(7), 16)
    r = rearranged(covariance, 4, 4)
    values = np.sort(np.linalg.eigvalsh((r + r.T) / 2))[::-1]
    positive = values[values > 0]
    fit = kronecker_sum(covariance, terms=16, same=True)
    np.testing.assert_allclose(fit.values, positive, rtol=1e-10)
    left = np.linalg.norm(r) ** 2 - np.sum(positive**2)
    assert np.linalg.norm(covariance - fit.matrix()) ** 2 == pytest.approx(left)


def test_a_matrix_without_positive_eigenvalue_is_best_left_alone():
    """A (x) A has <vec A, R vec A> >= 0, so nothing of -I (x) I is explained."""
    fit = kronecker_sum(-np.eye(9), same=True)
    assert (fit.terms, fit.explained) == (0, 0.0)
    np.testing.assert_array_equal(fit.matrix(), np.zeros((9, 9)))
    assert kronecker_sum(-np.eye(9)).explained == pytest.approx(1)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_first_factors_of_a_positive_covariance_are_positive(same, rank):
    """Krein and Rutman: R maps positive semi-definite matrices to such."""
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((16, rank))
        fit = kronecker_sum(x @ x.T, same=same)
        for factor in (fit.rows[0], fit.columns[0]):
            values = np.linalg.eigvalsh(factor)
            assert values[0] > -1e-12 * values[-1]


@pytest.mark.parametrize("same", [True, False])
def test_first_factors_are_positive_where_they_are_not_unique(same):
    """diag(A) (x) diag(A) blocks that do not interact: the leading value is double, its vectors must not mix signs."""
    covariance = np.zeros((4, 4))
    covariance[0, 0] = covariance[3, 3] = 1.0  # R is e_11 e_11^T + e_22 e_22^T
    fit = kronecker_sum(covariance, same=same)
    np.testing.assert_allclose(np.kron(fit.rows[0], fit.columns[0]), 0.5 * np.eye(4), atol=1e-14)
    both = kronecker_sum(covariance, same=same, terms=2)
    assert relative_error(covariance, both) < 1e-14
    np.testing.assert_allclose(both.rows[0], fit.rows[0], atol=1e-14)


@pytest.mark.parametrize("same", [True, False])
def test_power_iteration_changes_nothing(monkeypatch, same):
    rng = np.random.default_rng(9)
    covariance = np.kron(random_covariance(7, rng), np.eye(7)) + 0.1 * random_covariance(49, rng)
    fast = kronecker_sum(covariance, same=same)
    monkeypatch.setattr(kronecker, "_POWERS", 0)
    dense = kronecker_sum(covariance, same=same)
    np.testing.assert_allclose(fast.matrix(), dense.matrix(), rtol=0, atol=1e-12 * np.abs(covariance).max())


def test_explained_variance_off_the_diagonal():
    sigma = np.array([[2.0, 1.0], [1.0, 2.0]])
    assert explained_variance(sigma, np.diag([2.0, 2.0])) == pytest.approx(0.8)
    assert explained_variance(sigma, np.diag([2.0, 2.0]), diagonal=False) == 0
    assert explained_variance(sigma, 3 * sigma) == pytest.approx(-3)
    with pytest.raises(DataError, match="entries other than zero, found none off the diagonal"):
        explained_variance(np.eye(3), np.eye(3), diagonal=False)
    with pytest.raises(DataError, match=r"one size, found \(2, 2\) and \(3, 3\)"):
        explained_variance(sigma, np.eye(3))


LOPSIDED = np.eye(4) + 0.1 * np.eye(4, k=1)
BAD_COVARIANCES = [
    (DataError, r"expected a covariance \(D, D\), found \(3, 4\)", np.zeros((3, 4)), {}),
    (DataError, "expected a covariance of square matrices, found 8 coordinates", np.eye(8), {}),
    (DataError, r"expected a covariance \(6, 6\) of 3 x 2 matrices, found \(7, 7\)", np.eye(7), {"p": 3}),
    (DataError, r"of 2 x 2 matrices, found \(5, 5\)", np.eye(5), {"n": 2}),
    (UsageError, "p: expected an integer >= 1", np.eye(4), {"p": 0}),
    (DataError, "2 non-finite entries", np.diag([1.0, np.nan, np.inf, 1.0]), {}),
    (DataError, "expected a symmetric covariance", LOPSIDED, {}),
    (DataError, "expected a covariance other than zero", np.zeros((4, 4)), {}),
    (UsageError, "needs square matrices, found 2 x 3", np.eye(6), {"p": 2, "n": 3, "same": True}),
    *((UsageError, "terms: expected an integer from 1 to 4", np.eye(4), {"terms": n}) for n in (0, 5, 1.5, True)),
]


@pytest.mark.parametrize(("error", "match", "covariance", "options"), BAD_COVARIANCES)
def test_bad_covariances(error, match, covariance, options):
    with pytest.raises(error, match=match):
        kronecker_sum(covariance, **options)


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
    with pytest.raises(DataError, match="expected more matrices, found 1"):
        matrix_normal(rng.standard_normal((1, 5, 3)))
    dependent = rng.standard_normal((50, 4, 3))
    dependent[:, 3] = dependent[:, 0]
    with pytest.raises(DataError, match="too few matrices for an estimate"):
        matrix_normal(dependent)
