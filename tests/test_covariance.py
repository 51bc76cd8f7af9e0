import json
import subprocess
import sys

import numpy as np
import pytest
import references_statistics as naive

import weightscope
from weightscope.analysis.across_networks import PopulationCovariance, covariance_across
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits.fitting import fit
from weightscope.plots.covariance import chance
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray, literal
from weightscope.statistics.stripes import stripes

SPEC = WeightSpec(
    [TensorSpec("a.fc1.weight", (4, 3)), TensorSpec("a.norm.bias", (5,)), TensorSpec("a.fc2.weight", (3, 4))]
)


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((300, SPEC.size)) @ naive.random_covariance(SPEC.size, rng) + 2).astype(np.float32)


class Diverging(WeightArray):
    """A source that flags networks whose weights look harmless."""

    diverged = np.arange(300) % 100 == 7

    def marked_chunks(self, select="*", size=None):
        start = 0
        for rows in self.chunks(select, size):
            yield rows, self.diverged[start : start + len(rows)]
            start += len(rows)


def test_joint_covariance_of_a_selection(weights):
    result = covariance_across(WeightArray(weights, SPEC), "*.fc?.weight")
    columns = np.r_[0:12, 17:29]
    expected = np.cov(weights[:, columns].astype(np.float64), rowvar=False)
    np.testing.assert_allclose(result.matrix, expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(result.mean, weights[:, columns].mean(axis=0, dtype=np.float64))
    assert (result.n, result.excluded, result.kind) == (300, 0, "covariance")
    assert result.blocks == {"a.fc1.weight": slice(0, 12), "a.fc2.weight": slice(12, 24)}
    np.testing.assert_array_equal(result.block("a.fc1.weight", "a.fc2.weight"), result.matrix[:12, 12:])
    np.testing.assert_array_equal(result.block("a.fc2.weight"), result.matrix[12:, 12:])
    with pytest.raises(SpecError, match=r"no tensor 'a.norm.bias' in this spec"):
        result.block("a.norm.bias")


def test_correlation_and_float32(weights):
    result = covariance_across(WeightArray(weights, SPEC), kind="correlation", precision="float32")
    assert result.matrix.dtype == np.float32
    np.testing.assert_allclose(result.matrix, np.corrcoef(weights.astype(np.float64), rowvar=False), atol=1e-5)
    assert result.diagnostics == {"precision": "float32", "folded_norms": False, "constant": 0, "rank_bound": 29}


def test_networks_are_excluded_and_counted(weights):
    weights[[11, 12], [3, 20]] = np.nan, np.inf
    result = covariance_across(Diverging(weights, SPEC))
    keep = np.delete(weights, [7, 107, 207, 11, 12], axis=0)
    assert (result.n, result.excluded) == (295, 5)
    np.testing.assert_allclose(result.matrix, np.cov(keep.astype(np.float64), rowvar=False), rtol=1e-10, atol=1e-14)
    # Only what is looked at counts: network 12 is finite in this tensor.
    assert covariance_across(Diverging(weights, SPEC), "a.fc1.weight").excluded == 4


def test_computed_coordinates_stand_after_the_weights(weights):
    computed = {"diagonal": lambda t: np.einsum("kij,kji->ki", t["a.fc2.weight"], t["a.fc1.weight"])}
    result = covariance_across(WeightArray(weights, SPEC), "a.fc1.weight", computed=computed)
    assert result.spec.names == ("a.fc1.weight", "diagonal")
    diagonal = np.einsum("kij,kji->ki", weights[:, 17:].reshape(-1, 3, 4), weights[:, :12].reshape(-1, 4, 3))
    expected = naive.covariance(np.concatenate([weights[:, :12], diagonal], axis=1))
    np.testing.assert_allclose(result.matrix, expected, rtol=1e-4, atol=1e-5)
    alone = covariance_across(WeightArray(weights, SPEC), None, computed=computed)
    np.testing.assert_allclose(alone.matrix, result.block("diagonal"), rtol=1e-12)


def test_frozen_coordinates_are_counted(weights):
    weights[:, 12:17] = 0.25
    result = covariance_across(WeightArray(weights, SPEC), kind="correlation")
    assert result.diagnostics["constant"] == 5
    assert np.isnan(result.block("a.norm.bias")).all()


def test_permuting_hidden_units_conjugates_the_covariance(weights):
    order = np.random.default_rng(2).permutation(4)
    columns = np.r_[np.arange(12).reshape(4, 3)[order].reshape(-1), 12:29]
    plain, permuted = (covariance_across(WeightArray(w, SPEC)).matrix for w in (weights, weights[:, columns]))
    np.testing.assert_allclose(permuted, plain[np.ix_(columns, columns)], rtol=1e-12, atol=1e-16)


def test_literal_patterns_match_only_themselves():
    spec = WeightSpec([TensorSpec(name, (1,)) for name in ("a[0]", "a0", "a*", "ab")])
    for name in spec.names:
        assert spec.select(literal([name])).names == (name,)


def test_bad_input(weights):
    source = WeightArray(weights, SPEC)
    with pytest.raises(UsageError, match=r"no tensor matches '\*fc3\*'"):
        covariance_across(source, "*fc3*")
    with pytest.raises(UsageError, match="kind: expected one of 'covariance', 'correlation', found 'corr'"):
        covariance_across(source, kind="corr")
    with pytest.raises(UsageError, match="nothing to compute"):
        covariance_across(source, None)
    with pytest.raises(DataError, match="at least 2 finite rows, found 1"):
        covariance_across(WeightArray(weights[:1], SPEC))
    with pytest.raises(SpecError, match=r"expected weights \(N, 29\)"):
        WeightArray(weights[:, 1:], SPEC)
    with pytest.raises(DataError, match="at least 1 finite rows, found 0"):
        covariance_across(WeightArray(np.full_like(weights, np.nan), SPEC))


def test_the_public_covariance_of_a_population(weights, tmp_path):
    found = weightscope.covariance(WeightArray(weights, SPEC), "*.fc?.weight")
    assert isinstance(found, PopulationCovariance)
    wanted = covariance_across(WeightArray(weights, SPEC), "*.fc?.weight", stripes=False)
    np.testing.assert_array_equal(found.matrix, wanted.matrix)
    assert not wanted.stripes
    fc1 = stripes(weights[:, :12].reshape(-1, 4, 3))
    assert found.stripes["a.fc1.weight"] == fc1
    frame = found.to_pandas()
    assert len(frame) == 6
    (row,) = [r for r in found.rows() if (r["tensor"], r["means"]) == ("a.fc1.weight", "column")]
    assert (row["ratio"], row["low"], row["high"]) == (fc1.column.value, *fc1.column.ci95)
    assert f"{fc1.column.value:.2f} (" in found.text()
    assert repr(found) == "<PopulationCovariance: covariance of 24 coordinates in 2 tensors over 300 networks>"
    assert json.loads(json.dumps(found.to_dict()))["stripes"]["a.fc1.weight"]["column"]["p"] == fc1.column.p
    assert found.plot(tmp_path / "c.png", means=True).axes
    assert (tmp_path / "c.png").exists()


def test_the_default_selection_is_the_mlps_or_everything(weights):
    assert weightscope.covariance(WeightArray(weights, SPEC)).spec == SPEC
    tensors = [TensorSpec(t.name.replace("fc", "mlp.fc"), t.shape) for t in SPEC.tensors]
    found = weightscope.covariance(WeightArray(weights, WeightSpec(tensors)))
    assert found.spec.names == ("a.mlp.fc1.weight", "a.mlp.fc2.weight")


def test_what_has_no_stripes_is_named(weights):
    weights[:, :12] = 1
    found = weightscope.covariance(WeightArray(weights, SPEC))
    assert list(found.stripes) == ["a.fc2.weight"]
    assert "no stripe ratios of `a.fc1.weight`: stripes: expected matrices that vary" in found.text()


def test_covariance_chooses_by_the_source_alone(weights, tmp_path):
    with pytest.raises(UsageError, match="select: applies to a population, found one network"):
        weightscope.covariance({"a": None}, "*.weight")
    with pytest.raises(DataError, match="expected a population, found no such folder"):
        weightscope.covariance(tmp_path / "none.pop")


def test_a_population_on_disk_is_a_source(tmp_path):
    pytest.importorskip("h5py")
    import fake_training

    from weightscope.population import Population

    fake_training.write_population(tmp_path / "a.pop", fake_training.recipe(networks=60, tile=8))
    population = Population(tmp_path / "a.pop")
    good = population.weights("mlp.fc?.weight")[~population.diverged]
    result = covariance_across(population, "mlp.fc?.weight")
    assert (result.n, result.excluded) == (len(good), 60 - len(good))
    assert result.excluded > 0
    np.testing.assert_allclose(result.matrix, naive.covariance(good), rtol=1e-10, atol=1e-14)
    assert weightscope.covariance(str(population.path), "mlp.fc?.weight").n == result.n
    fitted = fit(population, "mlp.fc?.weight", structure="diagonal", joint="all")
    assert (fitted.networks, fitted.excluded) == (result.n, result.excluded)
    assert fitted.provenance["source"] == "a.pop"
    assert fitted.provenance["recipe"]["population"]["networks"] == 60


@pytest.mark.slow
def test_nothing_here_needs_torch():
    modules = "weightscope.fits.fitting, weightscope.analysis.across_networks, weightscope.statistics.stripes, sys"
    heavy = "{'torch', 'h5py', 'matplotlib'}"
    command = [sys.executable, "-c", f"import {modules}; sys.exit(bool({heavy} & set(sys.modules)))"]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_default_picture_of_matrices_is_of_group_means(tmp_path):
    """Cells of 7 x 7 entries across columns of 16 mix the columns; group means follow them."""
    rng = np.random.default_rng(4)
    spec = WeightSpec([TensorSpec("a.mlp.fc1.weight", (32, 16)), TensorSpec("a.mlp.fc2.weight", (16, 32))])
    rows = rng.standard_normal((60, spec.size)) + np.tile(rng.standard_normal((60, 1, 16)), (1, 64, 1)).reshape(60, -1)
    found = weightscope.covariance(WeightArray(rows, spec))
    (image,) = found.plot().axes[0].images
    assert image.get_array().shape == (32, 32)
    means = (rows / rows.std(axis=0))[:, :512].reshape(60, 32, 16).mean(axis=1)
    expected = np.corrcoef(means.T)
    expected[(abs(expected) < chance(60)) | np.eye(16, dtype=bool)] = 0
    np.testing.assert_allclose(np.asarray(image.get_array())[:16, :16], expected, atol=1e-12)
    means = rows[:, :512].reshape(60, 32, 16).mean(axis=1)
    (image,) = found.plot(kind="covariance").axes[0].images
    np.testing.assert_allclose(np.asarray(image.get_array())[:16, :16], np.cov(means.T), atol=1e-12)
    (entries,) = found.plot(cells=600).axes[0].images
    assert entries.get_array().shape[0] > 100
    # Running statistics are left out unless selected; convolutions have a table, too.
    spec = WeightSpec([TensorSpec("conv", (4, 2, 3, 3)), TensorSpec("bn.running_mean", (4,), "statistic")])
    found = weightscope.covariance(WeightArray(rng.standard_normal((60, spec.size)), spec))
    assert list(found.spec.names) == ["conv"]
    expected = weightscope.statistics.stripes.stripes(
        found_rows := rng.standard_normal((60, 72)).reshape(60, 4, 2, 3, 3)
    )
    again = weightscope.covariance(WeightArray(found_rows.reshape(60, 72), found.spec))
    assert again.stripes["conv"].row.value == pytest.approx(expected.row.value)
    # Without matrices, entries are drawn while they fit into the picture, then means over filters.
    filter_spec = WeightSpec([TensorSpec("filter", (3, 3))])
    filters = covariance_across(WeightArray(rng.standard_normal((64, 9)), filter_spec), stripes=False)
    assert filters.plot().axes[0].images[0].get_array().shape == (9, 9)
    large = WeightSpec([TensorSpec("conv.weight", (20, 4, 3, 3)), TensorSpec("conv.bias", (20,))])
    found = covariance_across(WeightArray(rng.standard_normal((30, large.size)), large))
    assert found.plot().axes[0].images[0].get_array().shape == (40, 40)
