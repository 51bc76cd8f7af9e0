"""Covariances on disk and leading eigenpairs: equal to NumPy's in float64, from several passes over the same rows."""

from pathlib import Path
from typing import Any

import fake_training as fake
import numpy as np
import pytest

from weightscope.analysis.across_networks import eigenpairs, joint_covariance
from weightscope.errors import DataError, UsageError
from weightscope.population import Population
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.moments import BLOCK, EntryMoments
from weightscope.statistics.out_of_core import _BLOCKS, top_eigenpairs, write_covariance
from weightscope.statistics.samples import WeightArray


def rows(n: int, size: int, seed: int = 0) -> np.ndarray:
    """Correlated, badly centred rows; one column is constant."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((n, size)) + rng.standard_normal((n, 3)) @ rng.standard_normal((3, size)) * 2
    out += 1e4 * rng.standard_normal(size)
    out[:, 1] = 3.3
    return out.astype(np.float32)


def source(data: np.ndarray) -> WeightArray:
    return WeightArray(data, WeightSpec([TensorSpec("w", (data.shape[1],))]))


def enough_for(panel: int, size: int, item: int) -> int:
    return _BLOCKS * BLOCK * size * 8 + panel * size * item


@pytest.mark.parametrize(("precision", "most"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("panel", [1, 7, 30, 1000])
@pytest.mark.parametrize("n", [2, 256, 3000])
def test_on_disk_in_panels_equals_numpy(tmp_path: Path, n: int, panel: int, precision: Any, most: float) -> None:
    data, options = rows(n, 61), {"precision": precision, "memory": enough_for(panel, 61, int(precision[-2:]) // 8)}
    found = joint_covariance(source(data), file=tmp_path / "c.npy", **options)
    wanted = np.cov(data.astype(np.float64), rowvar=False)
    scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert np.all(np.abs(found.matrix - wanted) <= most * scale)
    assert found.matrix.dtype == precision
    assert isinstance(found.matrix, np.memmap)
    assert np.array_equal(found.matrix, found.matrix.T)
    np.testing.assert_allclose(found.mean, data.astype(np.float64).mean(axis=0), rtol=1e-13)
    assert (found.n, found.excluded, found.diagnostics["constant"]) == (n, 0, 1)


def test_the_correlation_on_disk_is_that_of_memory(tmp_path: Path) -> None:
    data = rows(300, 25)
    data[7, 3] = np.nan
    options = {"kind": "correlation"}
    found = joint_covariance(source(data), file=tmp_path / "c.npy", memory=enough_for(4, 25, 8), **options)
    wanted = joint_covariance(source(data), **options)
    np.testing.assert_allclose(found.matrix, wanted.matrix, atol=1e-12)
    assert np.isnan(found.matrix[1]).all()
    assert (found.n, found.excluded, found.diagnostics) == (299, 1, wanted.diagnostics)


def test_what_memory_would_have_to_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"memory: 25 coordinates need at least \d+ bytes, found 1000"):
        joint_covariance(source(rows(300, 25)), file=tmp_path / "c.npy", memory=1000)
    with pytest.raises(UsageError, match=r"ends in .npy, found .*c.npz"):
        joint_covariance(source(rows(300, 25)), file=tmp_path / "c.npz")
    with pytest.raises(DataError, match="at least 2 finite rows, found 1"):
        joint_covariance(source(rows(1, 25)), file=tmp_path / "c.npy")
    assert not list(tmp_path.iterdir())


def test_data_that_change_between_passes_are_refused(tmp_path: Path) -> None:
    passes = iter([rows(10, 5), rows(9, 5)])
    with (
        open(tmp_path / "c.npy", "wb") as file,
        pytest.raises(DataError, match="in every pass, found 9"),
    ):
        write_covariance(lambda function, size=0: function([next(passes)]), 5, file)


def test_margins_count_constant_columns_as_exactly_constant() -> None:
    data = rows(900, 20)
    found = EntryMoments(20, np.array_split(data, 7))
    assert found.variance()[1] == 0
    np.testing.assert_allclose(found.variance(), data.astype(np.float64).var(axis=0, ddof=1), rtol=1e-11)


def check_pairs(found, data: np.ndarray, tolerance: float) -> None:
    wanted = np.cov(data.astype(np.float64), rowvar=False)
    values = np.linalg.eigvalsh(wanted)[::-1]
    rank = len(found.values)
    np.testing.assert_allclose(found.values, values[:rank], rtol=tolerance)
    np.testing.assert_allclose(found.vectors @ found.vectors.T, np.eye(rank), atol=1e-9)
    residual = wanted @ found.vectors.T - found.vectors.T * found.values
    assert np.linalg.norm(residual, axis=0).max() <= np.sqrt(tolerance) * values[0]
    np.testing.assert_allclose(found.total, np.trace(wanted), rtol=1e-10)


def test_eigenpairs_from_the_gram_matrix_are_exact() -> None:
    data = rows(60, 300)
    found = eigenpairs(source(data), 20)
    assert found.method == "gram"
    check_pairs(found, data, 1e-10)


def test_eigenpairs_of_many_rows_need_no_matrix() -> None:
    """The randomised method: three strong directions are found to rounding, the bulk is bounded from below."""
    data = rows(1500, 80)
    found = eigenpairs(source(data), 3)
    assert found.method == "randomised"
    check_pairs(found, data, 1e-6)
    bulk = top_eigenpairs(lambda function, size=0: function(np.array_split(data, 5)), 80, 20)
    assert np.all(
        bulk.values <= np.linalg.eigvalsh(np.cov(data.astype(np.float64), rowvar=False))[::-1][:20] * (1 + 1e-9)
    )


def test_beyond_memory_the_rows_are_read_again_and_again() -> None:
    data, asked = rows(60, 300), []

    def total(function, size=0):
        asked.append(1)
        return function(np.array_split(data, 4))

    check_pairs(top_eigenpairs(total, 300, 3, memory=1000), data, 1e-6)
    assert len(asked) == 1 + 4


def test_diverged_networks_are_left_out_of_both(tmp_path: Path) -> None:
    path = tmp_path / "a.pop"
    fake.write_population(path, fake.recipe())
    population = Population(path)
    found = joint_covariance(population, "mlp.*", file=tmp_path / "c.npy")
    wanted = joint_covariance(population, "mlp.*")
    np.testing.assert_allclose(found.matrix, wanted.matrix, atol=1e-12)
    assert found.excluded == wanted.excluded == 2
    assert eigenpairs(population, 4, "mlp.*").excluded == 2


def test_a_rank_that_the_data_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="rank: expected 1 to 9 for 10 rows of 50, found 10"):
        eigenpairs(source(rows(10, 50)), 10)
    flat = np.outer(np.arange(10), np.ones(50))
    with pytest.raises(UsageError, match="rank: expected at most 1, the rank of the rows, found 3"):
        eigenpairs(source(flat), 3)
