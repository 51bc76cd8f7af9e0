import numpy as np
import pytest
import references_statistics as naive
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage

from weightscope.statistics.moments import Moments
from weightscope.statistics.shrinkage import ledoit_wolf, ledoit_wolf_of_rows, shrunk_covariance


@pytest.mark.parametrize(("n", "size"), [(30, 80), (80, 30), (500, 20), (3, 50), (2, 5)])
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_equals_scikit_learn(n, size, mean):
    rng = np.random.default_rng(n + size)
    data = rng.standard_normal((n, size)) @ naive.random_covariance(size, rng) + mean
    expected = LedoitWolf().fit(data)
    moments = Moments(size).update(data)
    shrinkage = ledoit_wolf(moments)
    assert shrinkage.intensity == pytest.approx(expected.shrinkage_, abs=1e-10)
    np.testing.assert_allclose(shrunk_covariance(moments), expected.covariance_, rtol=0, atol=1e-10)
    in_place = shrunk_covariance(moments, destroy=True)
    np.testing.assert_allclose(in_place, expected.covariance_, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "size"), [(30, 80), (80, 30)])
def test_straight_from_rows_equals_the_moments(n, size):
    rng = np.random.default_rng(0)
    data = rng.standard_normal((n, size)) * np.arange(1, size + 1)
    centred = data - data.mean(axis=0)
    found, expected = ledoit_wolf_of_rows(centred), ledoit_wolf(Moments(size).update(data))
    assert found.intensity == pytest.approx(expected.intensity, abs=1e-12)
    assert found.target == pytest.approx(expected.target, rel=1e-12)
    assert found.intensity == pytest.approx(ledoit_wolf_shrinkage(centred, assume_centered=True), abs=1e-10)


def test_nothing_to_shrink():
    rng = np.random.default_rng(2)
    assert ledoit_wolf(Moments(1).update(rng.standard_normal((9, 1)))).intensity == 0
    # Exactly white: S is the identity already.
    white = np.concatenate([np.eye(4), -np.eye(4)])
    assert ledoit_wolf(Moments(4).update(white)).intensity == 0


def test_shrinking_helps_when_there_are_few_samples():
    # Ledoit and Wolf 2004, Theorem 3.1: in expectation nearer to the truth than the sample covariance.
    rng = np.random.default_rng(3)
    truth = naive.random_covariance(30, rng)
    root = np.linalg.cholesky(truth)
    gains = []
    for _ in range(20):
        moments = Moments(30).update(rng.standard_normal((20, 30)) @ root.T)
        gains.append(np.linalg.norm(moments.covariance() - truth) / np.linalg.norm(shrunk_covariance(moments) - truth))
    assert min(gains) > 1.2
