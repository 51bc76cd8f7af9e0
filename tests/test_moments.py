import numpy as np
import pytest
import references_statistics as naive

from weightscope.errors import DataError, UsageError
from weightscope.statistics.moments import BLOCK, Moments, _TorchGram, finite_rows, new_gram


def relative(found, expected):
    """The largest error of a covariance in units of the standard deviations' product."""
    scale = np.sqrt(np.diag(expected))
    return np.abs((found - expected) / np.outer(scale, scale)).max()


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((1500, 40)) @ naive.random_covariance(40, rng)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_numpy_cov_on_badly_centred_data(dtype):
    rng = np.random.default_rng(1)
    data = (1e4 + rng.standard_normal((3000, 50))).astype(dtype)
    moments = Moments(50)
    for start in range(0, len(data), 700):
        moments.update(data[start : start + 700])
    found = moments.covariance()
    expected = np.cov(data.astype(np.float64), rowvar=False)
    assert relative(found, expected) < 1e-10
    assert relative(found, naive.covariance(data)) < 1e-13
    np.testing.assert_allclose(moments.mean, data.mean(axis=0, dtype=np.float64), rtol=1e-14)
    np.testing.assert_allclose(moments.variance(), np.diag(found), rtol=1e-14)
    np.testing.assert_array_equal(found, found.T)
    assert moments.n == 3000


def test_drifting_data_lose_no_accuracy():
    # A first block far away from all others is what a fixed shift would not survive.
    rng = np.random.default_rng(2)
    data = rng.standard_normal((20 * BLOCK, 6)) + np.repeat(np.arange(20), BLOCK)[:, None] ** 2 * 100.0
    assert relative(Moments(6).update(data).covariance(), naive.covariance(data)) < 1e-12
    narrow = Moments(6, precision="float32").update(data.astype(np.float32))
    assert relative(narrow.covariance(), naive.covariance(data.astype(np.float32))) < 1e-6


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_chunking_does_not_change_a_bit(rows, precision):
    whole = Moments(40, precision=precision).update(rows)
    rng = np.random.default_rng(3)
    cuts = np.sort(rng.integers(0, len(rows), 30))
    pieces = Moments(40, precision=precision)
    for piece in np.split(rows, cuts):
        pieces.update(piece)
    singles = Moments(40, precision=precision)
    for row in rows:
        singles.update(row)
    for other in (pieces, singles):
        np.testing.assert_array_equal(whole.covariance(), other.covariance())
        np.testing.assert_array_equal(whole.mean, other.mean)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_moments_of_parts_add_up(rows, device):
    rows[700:] += 3.0
    whole, added = (Moments(40, device=device) for _ in range(2))
    whole.update(rows)
    for part in np.split(rows, [0, 300, 301, 1000]):
        added += Moments(40, device=device).update(part).update(np.full(40, np.nan))
    assert (added.n, added.excluded) == (1500, 5)
    assert relative(added.covariance(), naive.covariance(rows)) < 1e-13


@pytest.mark.parametrize(("precision", "most"), [("float64", 1e-10), ("float32", 1e-5)])
def test_parts_far_from_zero_lose_no_accuracy(rows, precision, most):
    """Means of 10^6 standard deviations, of which sums of squares about zero leave three digits."""
    data = (rows - rows.mean(0)) / rows.std(0) + 1e6 * np.sign(np.arange(40) - 19.5)
    added = Moments(40, precision=precision)
    for part in np.split(data, [1, 8, 300, 1000]):
        added += Moments(40, precision=precision).update(part)
    expected = naive.covariance(data)
    assert np.abs(added.covariance() - expected).max() < most
    naively = (data.T @ data - len(data) * np.outer(data.mean(0), data.mean(0))) / (len(data) - 1)
    assert np.abs(naively - expected).max() > 1e-4


def test_reading_in_between_changes_only_rounding(rows):
    moments = Moments(40)
    for start in range(0, len(rows), 100):
        moments.update(rows[start : start + 100])
        if moments.n > 1:
            moments.covariance()
    assert relative(moments.covariance(), naive.covariance(rows)) < 1e-13


@pytest.mark.parametrize(("n", "size"), [(200_000, 4), (20_000, 64)])
def test_float32_mode_keeps_its_stated_error(n, size):
    rng = np.random.default_rng(4)
    mixing = naive.random_covariance(size, rng, condition=1e4)
    moments, rows = Moments(size, precision="float32"), []
    for _ in range(10):
        rows.append((rng.standard_normal((n // 10, size)) @ mixing + 3.0).astype(np.float32))
        moments.update(rows[-1])
    found = moments.covariance()
    assert found.dtype == np.float32
    assert relative(found, naive.covariance(np.concatenate(rows))) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_excluded_and_counted(rows, bad):
    damaged = rows.copy()
    damaged[[0, 17, 1499], [0, 39, 20]] = bad
    keep = np.delete(rows, [0, 17, 1499], axis=0)
    moments = Moments(40)
    for start in range(0, len(rows), 13):
        moments.update(damaged[start : start + 13])
    assert (moments.n, moments.excluded) == (1497, 3)
    np.testing.assert_array_equal(moments.covariance(), Moments(40).update(keep).covariance())


def test_large_finite_rows_are_not_mistaken_for_infinite():
    big = np.full((2, 3), 3e38, dtype=np.float32)
    assert finite_rows(big).all()
    cancelling = np.array([[np.inf, -np.inf, 0.0], [1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(finite_rows(cancelling), [False, True])


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_constant_coordinates_have_no_variance_and_no_correlation(rows, precision):
    rows = rows.copy()
    rows[:, 5] = np.float32(0.1)
    rows[:, 6] = np.float32(1e6 + 1 / 3)
    moments = Moments(40, precision=precision).update(rows[:100]).update(rows[100:])
    assert moments.variance()[5] == moments.variance()[6] == 0
    assert moments.mean[5] == np.float32(0.1)
    correlation = moments.correlation()
    assert np.isnan(correlation[5]).all()
    assert np.isnan(correlation[:, 6]).all()
    varying = np.delete(np.arange(40), [5, 6])
    expected = np.corrcoef(rows[:, varying].astype(np.float64), rowvar=False)
    np.testing.assert_allclose(
        correlation[np.ix_(varying, varying)], expected, atol=1e-12 if precision == "float64" else 1e-5
    )


def test_destroy_gives_the_same_matrix_once(rows):
    moments = Moments(40).update(rows)
    kept = moments.covariance()
    np.testing.assert_array_equal(kept, moments.covariance(destroy=True))
    for use in (moments.covariance, moments.variance, lambda: moments.update(rows)):
        with pytest.raises(UsageError, match="destroyed by destroy=True"):
            use()


def test_larger_than_a_tile():
    data = np.random.default_rng(7).standard_normal((300, 600))
    np.testing.assert_allclose(Moments(600).update(data).covariance(), np.cov(data, rowvar=False), atol=1e-13)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_torch_device_gives_the_same(rows, precision):
    pytest.importorskip("torch")
    found = Moments(40, device="cpu", precision=precision).update(rows)
    expected = Moments(40, precision=precision).update(rows)
    bound = 1e-12 if precision == "float64" else 1e-6
    assert isinstance(found._gram, _TorchGram)
    assert relative(found.covariance(), expected.covariance()) < bound
    assert isinstance(found.covariance(destroy=True), np.ndarray)


def test_bad_input(rows):
    with pytest.raises(UsageError, match="length >= 1"):
        Moments(0)
    with pytest.raises(UsageError, match="precision: expected one of 'float64', 'float32', found"):
        Moments(3, precision="float16")
    with pytest.raises(DataError, match=r"expected rows \(n, 3\), found \(1500, 40\)"):
        Moments(3).update(rows)
    with pytest.raises(DataError, match=r"at least 1 finite rows, found 0 \(1 excluded"):
        _ = Moments(2).update([[np.nan, 0.0]]).mean
    with pytest.raises(DataError, match="at least 2 finite rows, found 1"):
        Moments(2).update([0.0, 1.0]).covariance()
    with pytest.raises(UsageError, match=r"10,000,000 x 10,000,000 needs 800,000.0 GB, .* are available: select fewer"):
        new_gram(10_000_000, "float64", None)
    assert Moments(3).n == 0
