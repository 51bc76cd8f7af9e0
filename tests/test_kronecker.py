import numpy as np
import pytest
import references_statistics as naive

from weightscope.errors import DataError
from weightscope.statistics.kronecker import matrix_normal, nearest_kronecker


def sample(rng, n, rows, columns):
    return np.linalg.cholesky(rows) @ rng.standard_normal((n, len(rows), len(columns))) @ np.linalg.cholesky(columns).T


@pytest.fixture
def factors():
    rng = np.random.default_rng(0)
    rows, columns = naive.random_covariance(5, rng), naive.random_covariance(3, rng)
    return rows * np.trace(columns) / 3, columns * 3 / np.trace(columns)


def test_order_is_rows_times_columns():
    # Row-major vec: neighbours in vec(W) share a row, so a perfect correlation within rows is R (x) 1 1^T.
    rng = np.random.default_rng(1)
    w = np.repeat(rng.standard_normal((4000, 4, 1)), 3, axis=2) + 1e-3 * rng.standard_normal((4000, 4, 3))
    found = np.cov(w.reshape(len(w), -1), rowvar=False)
    np.testing.assert_allclose(found, np.kron(np.eye(4), np.ones((3, 3))), atol=0.1)
    rows, columns, _ = nearest_kronecker(found, 4, 3)
    np.testing.assert_allclose(columns, np.ones((3, 3)), atol=0.02)
    np.testing.assert_allclose(rows, np.eye(4), atol=0.1)
    fit = matrix_normal(w)
    np.testing.assert_allclose(fit.columns, np.ones((3, 3)), atol=0.02)
    np.testing.assert_allclose(fit.rows, np.eye(4), atol=0.1)


def test_nearest_of_an_exact_product_is_exact(factors):
    rows, columns, error = nearest_kronecker(np.kron(*factors), 5, 3)
    np.testing.assert_allclose(rows, factors[0], atol=1e-14)
    np.testing.assert_allclose(columns, factors[1], atol=1e-13)
    assert error < 1e-14


def test_nearest_is_a_minimum_and_positive_definite():
    rng = np.random.default_rng(2)
    covariance = naive.random_covariance(12, rng)
    rows, columns, error = nearest_kronecker(covariance, 4, 3)
    best = np.linalg.norm(covariance - np.kron(rows, columns))
    assert error == pytest.approx(best / np.linalg.norm(covariance), rel=1e-12)
    assert np.linalg.eigvalsh(rows).min() > 0
    assert np.linalg.eigvalsh(columns).min() > 0
    for _ in range(200):
        other = np.kron(rows + 1e-2 * rng.standard_normal((4, 4)), columns + 1e-2 * rng.standard_normal((3, 3)))
        assert np.linalg.norm(covariance - other) > best


def test_nearest_large_enough_for_lanczos():
    rng = np.random.default_rng(3)
    rows, columns = naive.random_covariance(18, rng), naive.random_covariance(17, rng)
    columns *= 17 / np.trace(columns)
    noise = 1e-3 * rng.standard_normal((306, 306))
    found = nearest_kronecker(np.kron(rows, columns) + noise + noise.T, 18, 17)
    again = nearest_kronecker(np.kron(rows, columns) + noise + noise.T, 18, 17)
    np.testing.assert_allclose(found[0], rows, atol=2e-3)
    np.testing.assert_allclose(found[1], columns, atol=1e-2)
    np.testing.assert_array_equal(found[0], again[0])


def test_nearest_with_one_row_or_column():
    covariance = naive.random_covariance(6, np.random.default_rng(4))
    for p, n in ((1, 6), (6, 1)):
        rows, columns, error = nearest_kronecker(covariance, p, n)
        np.testing.assert_allclose(np.kron(rows, columns), covariance, atol=1e-14)
        assert error < 1e-14


def test_matrix_normal_recovers_the_factors(factors):
    # Standard error of a variance from N n = 6,000 values is 2 %; 10 % has a false-alarm rate below 1e-5.
    w = sample(np.random.default_rng(5), 2000, *factors)
    fit = matrix_normal(w)
    assert fit.converged
    assert np.trace(fit.columns) == pytest.approx(3, rel=1e-12)
    np.testing.assert_allclose(fit.rows, factors[0], atol=0.1 * np.diag(factors[0]).max())
    np.testing.assert_allclose(fit.columns, factors[1], atol=0.1 * np.diag(factors[1]).max())


def test_matrix_normal_is_a_maximum(factors):
    rng = np.random.default_rng(6)
    w = sample(rng, 40, *factors)
    fit = matrix_normal(w, tolerance=1e-14)
    best = naive.flip_flop_log_likelihood(w, fit.rows, fit.columns)
    for _ in range(100):
        step = [m @ (np.eye(len(m)) + 0.02 * rng.standard_normal(m.shape)) for m in (fit.rows, fit.columns)]
        rows, columns = ((m + m.T) / 2 for m in step)
        assert naive.flip_flop_log_likelihood(w, rows, columns) < best


def test_matrix_normal_does_not_depend_on_order_and_conjugates(factors):
    rng = np.random.default_rng(7)
    w = sample(rng, 60, *factors)
    fit, shuffled = matrix_normal(w), matrix_normal(rng.permutation(w))
    np.testing.assert_allclose(shuffled.rows, fit.rows, rtol=1e-10, atol=1e-12)
    # Permuting hidden units conjugates the covariance between rows.
    order = rng.permutation(5)
    permuted = matrix_normal(w[:, order])
    np.testing.assert_allclose(permuted.rows, fit.rows[np.ix_(order, order)], atol=1e-8)
    np.testing.assert_allclose(permuted.columns, fit.columns, atol=1e-8)
    transposed = matrix_normal(w.transpose(0, 2, 1), tolerance=1e-14)
    both = np.kron(transposed.columns, transposed.rows)
    exact = matrix_normal(w, tolerance=1e-14)
    np.testing.assert_allclose(both, np.kron(exact.rows, exact.columns), atol=1e-6)


def test_bad_input(factors):
    rng = np.random.default_rng(8)
    with pytest.raises(DataError, match="expected more matrices, found 1"):
        matrix_normal(rng.standard_normal((1, 5, 3)))
    dependent = rng.standard_normal((50, 4, 3))
    dependent[:, 3] = dependent[:, 0]
    with pytest.raises(DataError, match="too few matrices for an estimate"):
        matrix_normal(dependent)
    with pytest.raises(DataError, match=r"expected a covariance \(12, 12\)"):
        nearest_kronecker(np.eye(11), 4, 3)
    with pytest.raises(DataError, match="expected a covariance other than zero"):
        nearest_kronecker(np.zeros((12, 12)), 4, 3)
