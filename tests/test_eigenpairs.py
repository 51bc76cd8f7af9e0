"""Leading eigenpairs equal NumPy's in float64, from several passes over the same rows."""

import json
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest
from programs import run

from weightscope.analysis.across_networks import eigenpairs
from weightscope.errors import UsageError
from weightscope.population import Population
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.eigenpairs import top_eigenpairs
from weightscope.statistics.moments import EntryMoments
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


def test_diverged_networks_are_left_out_and_the_command_lists_the_variances(tmp_path: Path, capsys) -> None:
    path, table = tmp_path / "a.pop", tmp_path / "a.json"
    fake.write_population(path, fake.recipe())
    found = eigenpairs(Population(path), 4, "mlp.*")
    assert found.excluded == 2
    command = ("covariance", path, "--select", "mlp.*", "--eigenpairs", 4, "--json", table)
    code, out, _ = run(*command, "-o", tmp_path / "a.png", capsys=capsys)
    assert (code, (tmp_path / "a.png").exists()) == (0, False)
    assert f"{found.explained[0]:.2%}" in out
    assert [row["variance"] for row in json.loads(table.read_text())["rows"]] == found.values.tolist()


def test_a_rank_that_the_data_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="rank: expected 1 to 9 for 10 rows of 50, found 10"):
        eigenpairs(source(rows(10, 50)), 10)
    flat = np.outer(np.arange(10), np.ones(50))
    with pytest.raises(UsageError, match="rank: expected at most 1, the rank of the rows, found 3"):
        eigenpairs(source(flat), 3)
