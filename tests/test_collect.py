"""`collect` trains what is missing, and nothing else, whatever happened before."""

import contextlib
import errno
import io
import logging
import os
import resource
import signal
import sys
import time
from types import SimpleNamespace

import fake_training as fake
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from weightscope import training
from weightscope._util import atomic, workers
from weightscope.errors import DataError, RecipeError, Resumable, UsageError, WeightscopeError
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import DataConfig
from weightscope.training.collection import _Bar, collect, train_shard
from weightscope.training.planning import plan
from weightscope.training.request import Request


def run(path, recipe=None, **options):
    return collect(recipe or fake.recipe(), path, workers=1, **options)


@pytest.fixture
def trained(monkeypatch):
    """The fake trainer in place of the real one; the tiles that it was asked for."""
    tiles = []

    def train_tile(recipe, tile, **options):
        tiles.append(tile)
        return fake.train_tile(recipe, tile, **options)

    fake.use(monkeypatch, train_tile)
    return tiles


def shard_files(path):
    return fake.files(path / "shards")


def times(path):
    return {p: p.stat().st_mtime_ns for p in path.rglob("*")}


def raising(_module, *, generator=None):
    """An initialiser with an error in it."""
    raise KeyError("x")


@pytest.fixture
def path(tmp_path, trained):
    """A finished population of 20 networks in three tiles."""
    run(tmp_path / "reference.pop")
    trained.clear()
    return tmp_path / "reference.pop"


@pytest.fixture
def reference(path):
    """The shards of an uninterrupted run."""
    return shard_files(path)


def test_a_population_from_nothing(tmp_path, trained):
    population = run(tmp_path / "deep/down/a.pop")
    assert trained == [0, 1, 2]
    assert population.missing == ()
    np.testing.assert_array_equal(population.weights()[0], fake.vector(fake.recipe(), 0))
    assert population.recipe == fake.recipe()
    assert population.environment["device"] == "cpu"
    assert population.environment["packages"]["torch"]


def test_only_missing_tiles_are_trained(path, trained, reference):
    before = times(path)
    run(path)
    assert (trained, times(path)) == ([], before)
    (path / "shards/00001.h5").unlink()
    assert Population(path, partial=True).missing == (1,)
    run(path)
    assert trained == [1]
    assert shard_files(path) == reference


def test_one_shard_at_a_time_for_job_arrays(tmp_path, trained, reference):
    for shard, there in ((2, 4), (0, 12), (0, 12), (1, 20)):
        assert len(collect(fake.recipe(), tmp_path / "array.pop", shard=shard)) == there
    assert trained == [2, 0, 1]
    assert shard_files(tmp_path / "array.pop") == reference


def test_growing_trains_the_missing_ones_only(tmp_path, path, trained, reference):
    reader = Population(path)
    before = reader.weights()
    population = run(path, networks=40)
    assert trained == [3, 4]  # tile 2 was stored whole
    assert len(population) == 40
    np.testing.assert_array_equal(population.weights()[:20], before)
    np.testing.assert_array_equal(reader.weights(), before)
    assert reference.items() <= shard_files(path).items()
    run(tmp_path / "fresh.pop", fake.recipe(networks=40))
    assert shard_files(path) == shard_files(tmp_path / "fresh.pop")


@contextlib.contextmanager
def interrupted_after(trained, tiles):
    """Ctrl-C when some tiles have been trained."""
    with pytest.MonkeyPatch.context() as patch:
        train = training.train_tile

        def train_tile(*arguments, **options):
            if len(trained) == tiles:
                raise KeyboardInterrupt
            return train(*arguments, **options)

        patch.setattr(training, "train_tile", train_tile)
        yield


def test_a_typo_in_the_size_locks_nothing(tmp_path, path, trained):
    """6000 for 60, of a population that exists and of a new one: stopped, it can be read, finished and taken back."""
    with interrupted_after(trained, 5), pytest.raises(Resumable, match=r"64 of 6000 networks are kept"):
        run(path, networks=6000)
    assert len(Population(path)) == 20
    assert len(run(path)) == 20  # without a number it is as large as before
    assert len(run(path, networks=60)) == len(Population(path)) == 60
    assert trained == [3, 4, 5, 6, 7]  # nothing was trained twice
    run(tmp_path / "fresh.pop", fake.recipe(networks=60))
    assert shard_files(path) == shard_files(tmp_path / "fresh.pop")

    path = tmp_path / "new.pop"
    trained.clear()
    with interrupted_after(trained, 9), pytest.raises(Resumable, match=r"72 of 6000 networks are kept"):
        run(path, networks=6000)
    with pytest.raises(DataError, match=r"expected 6000 networks, found 72; .* or use the others with --partial"):
        Population(path)
    assert len(run(path, networks=60)) == len(Population(path)) == 60
    assert len(trained) == 9


def test_a_job_array_that_grows_a_population_records_its_size_with_the_last_tile(path, trained):
    for tile in (4, 3):
        assert len(Population(path)) == 20
        collect(fake.recipe(), path, networks=40, shard=tile)
    assert len(Population(path)) == 40
    assert trained == [4, 3]


def test_a_population_shrinks_and_keeps_its_shards(path, trained, reference, caplog):
    whole = Population(path).weights()
    np.testing.assert_array_equal(run(path, networks=10).weights(), whole[:10])
    assert shard_files(path) == reference
    np.testing.assert_array_equal(run(path, networks=20).weights(), whole)
    assert trained == []
    (message,) = caplog.messages
    assert "this run asks for 10 networks and removes 10 of 20; their shards stay" in message


def test_another_recipe(path, trained, reference):
    with pytest.raises(RecipeError, match=r"training.epochs: 2 -> 3") as error:
        collect(fake.recipe(training__epochs=3), path)
    assert error.value.exit_code == 2
    assert trained == []
    assert shard_files(path) == reference


def test_another_network_or_other_data_under_the_same_name(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training, "spec_of", lambda _: fake.WeightSpec(fake.SPEC.tensors[1:]))
        with pytest.raises(DataError, match=r"builds another network from the same recipe: `mlp.fc1.weight`"):
            collect(fake.recipe(), path)
    monkeypatch.setattr(DataConfig, "load", lambda *_: SimpleNamespace(fingerprint="0" * 16, examples=64))
    with pytest.raises(DataError, match=r"collected with another data digits: expected hash \w{16}, found 0{16}"):
        collect(fake.recipe(), path)


MIMETIC = [{"name": "default"}, {"name": "mimetic_mlp", "sigma": "x"}]


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"shard": -1}, UsageError, "shard: expected 0 to 2 for 20 networks, found -1"),
        ({}, {"shard": 3}, UsageError, "shard: expected 0 to 2 for 20 networks, found 3"),
        ({}, {"workers": 0}, UsageError, "workers: expected an integer >= 1, found 0"),
        ({}, {"backend": "mpi"}, UsageError, "backend: expected one of 'loky', 'dask', 'ray', found 'mpi'"),
        ({}, {"backend": "dask", "workers": 2}, UsageError, "expected none for backend dask"),
        ({}, {"networks": 0}, RecipeError, "population.networks"),
        ({}, {"device": "abacus"}, UsageError, "abacus"),
        ({"init": [{"name": "nonsense"}]}, {}, UsageError, "nonsense"),
        ({"init": [{"artifact": "none.safetensors"}]}, {}, DataError, "none.safetensors"),
        ({"init": [{"name": "mimetic_attention"}]}, {}, RecipeError, r"^init \(mimetic_attention\): exp"),
        ({"init": MIMETIC}, {}, RecipeError, r"^init\.1 \(mimetic_mlp\): .*sigma"),
        ({"init": [{"name": raising}]}, {}, RecipeError, r"^init \(.*:raising\): .*raised KeyError: 'x'"),
        ({"population__snapshots": [0, 3]}, {}, RecipeError, "at most 2, the last epoch of training, found .0, 3."),
        ({"data__name": "cifar10"}, {}, DataError, "cifar-10-batches-bin"),
        ({}, {"backend": "dask"}, UsageError, r"backend dask is not installed: `pip install"),
        ({}, {"backend": "ray"}, UsageError, r"backend ray is not installed: `pip install"),
    ],
)
def test_what_can_be_known_beforehand_leaves_nothing(tmp_path, trained, monkeypatch, changes, options, error, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEIGHTSCOPE_DATA", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for package in ("distributed", "ray"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error, match=message):
        collect(fake.recipe(**changes), tmp_path / "a.pop", **options)
    assert not (tmp_path / "a.pop").exists()
    assert trained == []


@pytest.mark.parametrize("existed", [False, True])
def test_a_trainer_that_fails_at_once_leaves_nothing(tmp_path, monkeypatch, existed):
    def fail(recipe, tile, **options):
        # As a worker that is ended while it writes.
        (tmp_path / "a.pop/shards/00001.h5.sha256").write_text("hash\n")
        (tmp_path / "a.pop/shards/.00001.h5.weightscope-7-0123456789abcdef.tmp").write_text("half")
        raise DataError("broken")

    fake.use(monkeypatch, fail)
    if existed:
        (tmp_path / "a.pop").mkdir()
    with pytest.raises(DataError, match="broken"):
        run(tmp_path / "a.pop")
    assert [p.name for p in tmp_path.rglob("*")] == (["a.pop"] if existed else [])


def test_tiles_that_raise_are_named_when_the_others_are_done(tmp_path, monkeypatch):
    fake.use(monkeypatch, fake.train_tile_or_raise)
    message = r"^RuntimeError: odd, in tile 1 \(networks 8 to 15\), tile 3 .*: 24 of 40 networks are kept"
    with pytest.raises(Resumable, match=message) as error:
        run(tmp_path / "a.pop", fake.recipe(networks=40))
    assert error.value.exit_code == 4
    assert isinstance(error.value.__cause__, RuntimeError)  # --debug shows it
    assert Population(tmp_path / "a.pop", partial=True).missing == (1, 3)


def test_another_process_that_made_the_tile_meanwhile_saves_the_work(path, trained):
    """As when a worker that was believed dead wakes up."""
    train_shard(training.train_tile, [Request.of(fake.recipe(), path)], (0, 1))
    assert trained == []


def test_a_damaged_shard_is_trained_again_and_reported(path, trained, reference, caplog):
    os.truncate(path / "shards/00001.h5", 100)
    (path / "shards/00002.h5.sha256").unlink()
    with caplog.at_level(logging.WARNING):
        run(path)
    assert trained == [1, 2]
    assert shard_files(path) == reference
    assert [r.getMessage().split(":")[0][-8:] for r in caplog.records] == ["00001.h5", "00002.h5"]
    assert "trained again" in caplog.text


@pytest.mark.parametrize(("ema", "share"), [(0.9998, "99 %"), (0.97, "17 %"), (0.9, "")])
def test_an_average_longer_than_the_training_is_reported(tmp_path, trained, caplog, ema, share):
    recipe = fake.recipe(training__ema=ema, training__epochs=30)  # 60 steps
    run(tmp_path / "a.pop", recipe)
    assert len(caplog.messages) == bool(share)
    if share:
        assert f"training.ema = {ema} in 60 steps: {share} of the average" in caplog.messages[0]


def test_a_foreign_shard_is_not_overwritten(tmp_path, path, trained):
    run(tmp_path / "other.pop", fake.recipe(population__seed=8))
    for end in ("", ".sha256"):
        (tmp_path / f"other.pop/shards/00001.h5{end}").replace(path / f"shards/00001.h5{end}")
    before = shard_files(path)
    with pytest.raises(DataError, match=r"00001.h5: a foreign shard, expected .* found .*; move it"):
        run(path)
    assert shard_files(path) == before


def test_what_killed_processes_left_is_swept(path, trained, reference):
    for stale in (
        path / ".population.json.weightscope-7-0123456789abcdef.tmp",
        path / "shards/.00001.h5.weightscope-7-0123456789abcdef.tmp",
    ):
        stale.write_bytes(b"half")
    (path / ".mynotes.tmp").write_text("the user's own")
    run(path)
    assert trained == []
    assert shard_files(path) == reference
    assert {p.name for p in path.iterdir()} == {"population.json", "shards", ".mynotes.tmp"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_valid_population(tmp_path, monkeypatch, reference, number):
    def train_tile(recipe, tile, **options):
        if tile == 1:
            os.kill(os.getpid(), number)
        return fake.train_tile(recipe, tile)

    fake.use(monkeypatch, train_tile)
    path = tmp_path / "a.pop"
    with pytest.raises(Resumable, match=r"stopped: 8 of 20 networks are kept in .*a.pop; run the same") as error:
        run(path)
    assert error.value.exit_code == 4
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert Population(path, partial=True).missing == (1, 2)
    fake.use(monkeypatch)
    run(path)
    assert shard_files(path) == reference


def test_a_disk_that_fills_up_keeps_what_is_done(path, monkeypatch, reference):
    (path / "shards/00001.h5").unlink()
    (path / "shards/00001.h5.sha256").unlink()
    kept = shard_files(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(WeightscopeError, match=r"cannot write .*00001.h5: File too large"):
            run(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shard_files(path) == kept
    run(path)
    assert shard_files(path) == reference


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("show", "terminal", "notebook"),
    [(True, True, False), (True, False, True), (True, False, False), (False, True, True)],
)
def test_progress_shows_networks_per_hour_and_the_time_left(show, terminal, notebook, monkeypatch):
    """In a terminal, and in a notebook, whose stderr is none."""
    shell = SimpleNamespace(kernel=object() if notebook else None)  # IPython in a terminal is no notebook
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    screen = _Terminal() if terminal else io.StringIO()
    with _Bar(100, 20, show=show, file=screen) as bar:
        bar.start_t = getattr(bar, "start_t", 0) - 36  # 36 seconds ago
        bar.update(10)
        bar.refresh()
    text = screen.getvalue()
    # 10 in 36 s are 1000 in an hour
    for part in ("20 of 100 networks, ? networks/hour", "30 of 100 networks, ", "networks/hour", "left"):
        assert (part in text) == (show and (terminal or notebook))


def test_permission_to_write_is_checked_before_anything_is_trained(tmp_path, trained, monkeypatch):
    path = tmp_path / "a.pop"
    collect(fake.recipe(), path, shard=0)
    trained.clear()

    def refuse(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic, "_open_temporary", refuse)
    with pytest.raises(WeightscopeError, match=r"cannot write .*Read-only file system"):
        run(path)
    assert trained == []


def test_a_huge_population_answers_at_once(tmp_path, trained):
    """Ten million networks are planned, a billion refused; neither takes memory or time for tiles that do not exist."""
    began = time.process_time()
    with interrupted_after(trained, 0), pytest.raises(Resumable, match="0 of 10000000 networks are kept"):
        run(tmp_path / "a.pop", networks=10_000_000)
    with pytest.raises(RecipeError, match=r"population\.networks: input should be less than or equal to 10000000"):
        collect(fake.recipe(), tmp_path / "a.pop", networks=1_000_000_000)
    assert time.process_time() - began < 4, "two scans of 1.25 million tiles"


def test_a_worker_that_dies_is_named_and_the_others_finish(tmp_path, monkeypatch, reference):
    fake.use(monkeypatch, fake.train_tile_and_die)
    path = tmp_path / "a.pop"
    message = r"its worker died.* tile 1 \(networks 8 to 15\): 12 of 20 networks are kept.*with fewer workers"
    with pytest.raises(Resumable, match=message):
        run(path)
    assert Population(path, partial=True).missing == (1,)
    fake.use(monkeypatch)
    run(path)
    assert shard_files(path) == reference


@pytest.mark.slow
def test_real_networks_have_the_same_bits_however_they_were_collected(tmp_path):
    """Alone in one go, shard by shard, grown, and in worker processes."""
    recipe, threads = fake.recipe(networks=6, tile=4, population__snapshots=[0, 2]), torch.get_num_threads()
    whole = run(tmp_path / "whole.pop", recipe)
    assert torch.get_num_threads() == threads
    single = run(tmp_path / "single.pop", recipe, networks=1)
    assert (len(single), single.recipe.population.tile) == (1, 1), "no tile of 4 for one network"
    for shard in (1, 0):
        collect(recipe, tmp_path / "array.pop", shard=shard)
    for networks in (5, 6):
        run(tmp_path / "grown.pop", recipe, networks=networks)
    collect(recipe, tmp_path / "spread.pop", workers=2)
    for other in ("array", "grown", "spread"):
        assert shard_files(tmp_path / f"{other}.pop") == shard_files(tmp_path / "whole.pop")
    assert whole.metrics["test_accuracy"].shape == (6,)
    np.testing.assert_array_equal(whole.at(2).weights(), whole.weights())
    network = whole.network(5)
    state = {name: value.numpy() for name, value in network.state_dict().items() if name in whole.spec.names}
    np.testing.assert_array_equal(whole.spec.pack(state), whole.weights()[5])
    assert not network.training


def test_a_plan_trains_nothing_and_is_near_the_truth(tmp_path, monkeypatch):
    monkeypatch.setitem(workers.ENGINES, "loky", fake.in_this_process)
    recipe = fake.recipe(networks=12, tile=4, training__epochs=40)
    path = tmp_path / "a.pop"
    expected = plan(recipe, path, workers=2, price=2.5)
    assert list(tmp_path.iterdir()) == []
    assert (expected.networks, expected.tiles, expected.done, expected.workers, expected.files) == (12, 3, 0, 2, 7)
    assert expected.worker_hours == pytest.approx(3 * expected.tile_seconds / 3600)
    assert expected.hours == pytest.approx(2 * expected.tile_seconds / 3600)
    assert expected.cost == pytest.approx(2.5 * expected.worker_hours)
    with pytest.raises(UsageError, match="price: expected a number >= 0"):
        plan(recipe, path, price=-1)
    begun = time.perf_counter()
    collect(recipe, path, shard=0)
    taken = time.perf_counter() - begun
    assert taken / 3 < expected.tile_seconds < 3 * taken
    assert 0.95 < expected.bytes_on_disk / (3 * (path / "shards/00000.h5").stat().st_size) < 1.05
    before = times(path)
    again = plan(recipe, path, workers=1)
    assert (again.done, again.hours) == (1, pytest.approx(2 * again.tile_seconds / 3600))
    assert before == times(path)
    for part in ("3 of 4 networks each, 1 done", "bytes on disk", "time left", "one worker was timed"):
        assert part in again.text()
    with pytest.raises(RecipeError, match=r"training.epochs: 40 -> 3"):
        plan(recipe.replace({"training.epochs": 3}), path)


def test_another_source_of_trained_weights_is_refused(tmp_path, trained):
    source = tmp_path / "source.safetensors"
    wanted = fake.recipe().replace({"init": [{"name": "transfer", "source": str(source)}]})
    weights = build_for(wanted).state_dict()
    save_file(weights, source)
    run(tmp_path / "a.pop", wanted)
    run(tmp_path / "a.pop", wanted, networks=24)
    save_file({name: 5 * value for name, value in weights.items()}, source)
    with pytest.raises(DataError, match=r"collected with another weights .*: expected hash"):
        run(tmp_path / "a.pop", wanted, networks=32)


def test_each_tile_is_told_as_it_ends(tmp_path, monkeypatch):
    """Once, in this process, with the networks and metrics that the population has; tiles on disk are not told."""
    fake.use(monkeypatch)
    told = []
    run(tmp_path / "a.pop", fake.recipe(), shard=1)
    population = run(tmp_path / "a.pop", on_tile=told.append)
    assert sorted(result.tile for result in told) == [0, 2]
    for result in told:
        assert [*result.networks] == [[*range(8)], [], [16, 17, 18, 19]][result.tile]
        assert result.metrics.keys() == population.metrics.keys()
        for name, values in result.metrics.items():
            np.testing.assert_array_equal(values, population.metrics[name][result.networks])
        assert 0 < result.seconds < 60
        assert result.name == "a"
    (tmp_path / "a.pop" / "shards" / "00000.h5").unlink()
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a.pop", on_tile=lambda result: 1 / 0)
    assert len(Population(tmp_path / "a.pop")) == 20  # what was trained is kept
