import numpy as np
import pytest
import references_statistics as naive

from weightscope.errors import DataError
from weightscope.statistics.stripes import stripes


def test_equals_the_definition():
    w = np.random.default_rng(0).standard_normal((20, 6, 4)) * np.arange(1, 5) + 3.0
    found = stripes(w)
    assert (found.column.value, found.row.value, found.overall.value) == pytest.approx(
        naive.stripe_ratios(w), rel=1e-12
    )
    assert found.networks == 20


def test_one_under_independence_whatever_the_variances_and_means():
    rng = np.random.default_rng(1)
    scale, mean = np.exp(rng.standard_normal((8, 5))), 10 * rng.standard_normal((8, 5))
    results = [stripes(mean + scale * rng.standard_normal((40, 8, 5))) for _ in range(400)]
    for part in ("column", "row", "overall"):
        values = np.array([getattr(r, part).value for r in results])
        # |z| < 4.5 has a false-alarm rate of 7e-6; 0.01 is allowed for the bias of a ratio.
        assert abs(values.mean() - 1) < 4.5 * values.std() / 20 + 0.01
        covered = np.mean([getattr(r, part).ci95[0] <= 1 <= getattr(r, part).ci95[1] for r in results])
        rejected = np.mean([getattr(r, part).p < 0.05 for r in results])
        assert 0.90 < covered < 0.99  # 95 % +- 4.5 standard errors of 1.1 %
        assert rejected == pytest.approx(1 - covered, abs=1e-12)


def test_finds_stripes_and_their_size():
    # W = Z + 1 b^T with Var b = v: Var(column mean) = 1/p + v, against (1 + v)/p.
    rng = np.random.default_rng(2)
    p, n, v = 16, 10, 0.1
    w = rng.standard_normal((500, p, n)) + np.sqrt(v) * rng.standard_normal((500, 1, n))
    found = stripes(w)
    expected = (1 / p + v) / ((1 + v) / p)
    assert found.column.ci95[0] < expected < found.column.ci95[1]
    assert found.column.p < 1e-20
    assert found.row.ci95[0] < 1 < found.row.ci95[1]
    transposed = stripes(w.transpose(0, 2, 1))
    assert transposed.row == found.column
    assert transposed.overall.value == pytest.approx(found.overall.value)


def test_means_that_never_vary():
    w = np.random.default_rng(4).standard_normal((30, 6, 4))
    found = stripes(w - w.mean(axis=1, keepdims=True))
    assert found.column.value == pytest.approx(0, abs=1e-20)
    assert found.column.p == 0


def test_trailing_axes_are_columns_and_bad_networks_are_counted():
    filters = np.random.default_rng(5).standard_normal((30, 8, 1, 3, 3)).astype(np.float32)
    filters[4, 0, 0, 0, 0] = np.nan
    found = stripes(filters)
    assert found.networks == 29
    assert found.row.value == stripes(np.delete(filters, 4, axis=0).reshape(29, 8, 9)).row.value


def test_bad_input():
    with pytest.raises(DataError, match=r"expected matrices \(N, p, n\), found \(5, 6\)"):
        stripes(np.ones((5, 6)))
    with pytest.raises(DataError, match="at least 3 finite networks, found 2"):
        stripes(np.ones((2, 3, 4)))
    with pytest.raises(DataError, match="found constant ones"):
        stripes(np.ones((5, 3, 4)))
