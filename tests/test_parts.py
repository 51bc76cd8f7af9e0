"""Statistics of a population are summed over parts of it: the same bits by one process, by several and by clusters."""

import os
import signal
from functools import partial

import clusters
import fake_training as fake
import h5py
import numpy as np
import pytest

from weightscope._util import workers as pools
from weightscope.analysis.across_networks import covariance_across, eigenpairs
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.cli import main
from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.fits.fitting import fit
from weightscope.population import Population, export, exporting
from weightscope.statistics import samples
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import over_parts

pytestmark = pytest.mark.filterwarnings("default")  # what clusters warn of is their own affair
NETWORKS, TILE = 205, 8
STREAMED = ["isotropic", "diagonal", "group_means", "dense", "exchangeable"]
AXES = {"mlp.fc1.weight": ("units", "channels"), "mlp.fc1.bias": ("units",), "mlp.fc2.weight": ("channels", "units")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "a.pop"
    fake.write_population(path, fake.recipe(networks=NETWORKS, tile=TILE))
    return path


@pytest.fixture
def small(monkeypatch):
    """Parts of three tiles, cut in this process; and permutations, which the fake network has not."""
    monkeypatch.setattr(samples, "LEAF", 3 * TILE)
    axes = {t.name: AXES.get(t.name, (None,) * len(t.shape)) for t in fake.SPEC}
    own = PermutationSpec.from_axes(fake.SPEC, axes)
    monkeypatch.setattr("weightscope.anatomy.permutation_groups.permutations_of", lambda *_: own)


def covariance(population, workers, folder):
    found = covariance_across(population, "mlp.*", workers=workers, stripes=False)
    return [found.matrix, found.mean, found.n, found.excluded]


def leading(population, workers, folder):
    found = eigenpairs(population, 3, "mlp.*", workers=workers, memory=1000)
    return [found.values, found.vectors, found.mean, found.total, found.excluded]


def exchangeable(population, workers, folder):
    found = covariance_exchangeable(population, "mlp.*", workers=workers)
    return [found.n, found.excluded, *(x for t in found.types for x in (t.covariance, t.mean, t.errors, t.own))]


def fitted(population, workers, folder):
    several = [
        fit(population, "mlp.*", structure=names, joint=joint, holdout=holdout, workers=workers)
        for names, joint, holdout in ((STREAMED, "block", 0.2), ("dense", "tensor", 3), ("exchangeable", "all", 0.3))
    ]
    arrays = [array for found in several for array in found.arrays().values()]
    return [*arrays, *([row["log_prob"] for row in found.table] for found in several)]


def matrices(population, workers, folder):
    found = covariance_across(population, "mlp.fc?.weight", workers=workers)
    return [np.array([(each.value, *each.ci95, each.p) for each in t.ratios.values()]) for t in found.stripes.values()]


EVERY = pytest.mark.parametrize("statistic", [covariance, leading, exchangeable, fitted, matrices])


def same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


@EVERY
def test_any_number_of_workers_gives_the_same_bits_and_one_part_the_same_numbers(path, small, tmp_path, statistic):
    one, three = (statistic(Population(path), workers, tmp_path) for workers in (1, 3))
    assert same(one, three)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "LEAF", NETWORKS)
        whole = statistic(Population(path), 1, tmp_path)
    assert not same(one, whole)  # another order of sums: the parts were used
    for a, b in zip(one, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if statistic is leading else 1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_clusters_give_the_same_bits(path, small, tmp_path, backend):
    with clusters.two_workers(backend) as workers:
        for statistic in (covariance, exchangeable, fitted, matrices):
            found = statistic(Population(path), workers, tmp_path)
            assert same(found, statistic(Population(path), 1, tmp_path))


@clusters.torture
@pytest.mark.parametrize(("backend", "pause"), [("loky", (0.5, 2)), ("dask", (2, 4))])
def test_killed_workers_make_no_difference(path, small, tmp_path, monkeypatch, backend, pause):
    """20 workers are killed while covariances and fits are computed again and again; attempts are not limited."""
    monkeypatch.setattr(pools, "ATTEMPTS", 1000)
    statistics = covariance, exchangeable, fitted, matrices
    expected = [statistic(Population(path), 1, tmp_path) for statistic in statistics]
    with clusters.two_workers(backend) as two, clusters.killing(backend, 20, pause, seed=3) as killed:
        while len(killed) < 20:
            for statistic, numbers in zip(statistics, expected, strict=True):
                assert same(statistic(Population(path), two, tmp_path), numbers)
    assert len(killed) == 20


def numbers(folder, trouble, part, i):
    """The networks of a part; part 2 is in trouble, at its first attempt or always."""
    if i == 2 and (trouble == "always" or not (folder / "tried").exists()):
        (folder / "tried").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return part.indices.tolist()


def test_a_part_whose_worker_is_killed_is_read_again_and_in_its_place(path, small, tmp_path):
    found = over_parts(Population(path), partial(numbers, tmp_path, "once"), 2)
    assert found == list(range(NETWORKS))
    assert (tmp_path / "tried").exists()


def test_a_part_that_kills_every_worker_is_named(path, small, tmp_path):
    with pytest.raises(WeightscopeError, match=r"a.pop, shards 00006.h5 to 00008.h5: its worker died"):
        over_parts(Population(path), partial(numbers, tmp_path, "always"), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_shard_is_the_same_error_in_a_worker(small, tmp_path, workers):
    fake.write_population(tmp_path / "a.pop", fake.recipe(networks=60, tile=TILE))
    os.truncate(tmp_path / "a.pop/shards/00005.h5", 1000)
    with pytest.raises(DataError, match=r"00005.h5: checksum mismatch"):
        covariance_across(Population(tmp_path / "a.pop"), workers=workers)


def test_a_shard_that_a_worker_has_verified_is_known(path, small):
    population = Population(path)
    assert len(population.verified) < 2
    covariance_across(population, workers=2)
    assert sorted(population.verified) == [*population._rows]


def test_tiles_keep_their_part_when_a_population_grows(path, tmp_path):
    fake.write_population(tmp_path / "a.pop", fake.recipe(networks=60, tile=TILE), tiles=[0, 2, 4, 6, 7])
    parts = Population(tmp_path / "a.pop", partial=True).parts(20)
    assert [part.indices.tolist() for part in parts] == [
        [*range(8), *range(16, 24)],
        [*range(32, 40)],
        [*range(48, 60)],
    ]
    assert [len(part) for part in Population(path).parts(20)] == [24] * 8 + [13]


def test_an_export_by_workers_has_the_same_bytes(path, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_PART", 3 * TILE)
    one, two = (export(Population(path), tmp_path / f"{w}.h5", "mlp.*", workers=w).read_bytes() for w in (1, 2))
    assert one == two
    with h5py.File(tmp_path / "2.h5") as file:
        np.testing.assert_array_equal(file["weights"][:], Population(path).weights("mlp.*"))


def run(*arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


def test_the_command_takes_workers(path, small, tmp_path):
    command = ["covariance", str(path), "--exchangeable", "-o", str(tmp_path / "a.png"), "--json"]
    for workers in ("1", "2"):
        run(*command, str(tmp_path / workers), "--workers", workers)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    run("covariance", str(path), "--select", "mlp.fc?.weight", "-o", str(tmp_path / "b.png"))
    for workers in ("1", "2"):
        fitted = ["fit-init", str(path), "--structure", "diagonal", "-o", str(tmp_path / f"{workers}.safetensors")]
        run(*fitted, "--select", "mlp.*", "--workers", workers)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()
    for wrong in (["2", "--backend", "dask"], ["0"], ["2", "--scheduler", "tcp://host:8786"]):
        run("covariance", str(path), "--workers", *wrong, code=2)


def test_a_wrong_number_of_workers_is_one_of_few_networks_too():
    with pytest.raises(UsageError, match="workers: expected an integer >= 1, found 0"):
        over_parts(samples.WeightArray(np.zeros((2, 1)), fake.SPEC.select("scale")), len, 0)
