"""Every backend gives all tiles, and outlives workers that die."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial

import clusters
import fake_training as fake
import pytest

from weightscope._util.workers import ATTEMPTS, TilesFailed, WorkerDied, Workers, spread
from weightscope.errors import DataError, Resumable, UsageError, WeightscopeError
from weightscope.population import Population
from weightscope.training.collection import collect

pytestmark = pytest.mark.filterwarnings("default")  # what clusters warn of is their own affair


@pytest.fixture(scope="module")
def backend(request):
    """Two worker processes; clusters are skipped where their packages are missing."""
    with clusters.two_workers(request.param) as found:
        yield found


on_every_backend = pytest.mark.parametrize("backend", ["loky", "dask", "ray"], indirect=True)
on_this_machine_and_in_torture_on_clusters = pytest.mark.parametrize(
    "backend", ["loky", *(pytest.param(name, marks=clusters.torture) for name in ("dask", "ray"))], indirect=True
)


def attempts(folder, tile):
    return len((folder / str(tile)).read_text().splitlines())


@pytest.mark.slow
@on_every_backend
def test_all_tiles_though_a_worker_dies_and_each_is_told_here(backend, tmp_path, monkeypatch):
    assert dict(spread(partial(fake.work, tmp_path, "dies"), range(5), backend)) == {t: 10 * t for t in range(5)}
    assert attempts(tmp_path, 1) >= 2
    fake.use(monkeypatch, processes=True)
    told, where = [], {"backend": backend.backend, "scheduler": backend.scheduler, "workers": backend.count}
    population = collect(fake.recipe(), tmp_path / "a.pop", on_tile=lambda each: told.append(each.tile), **where)
    assert (sorted(told), len(population)) == ([0, 1, 2], 20)


@on_this_machine_and_in_torture_on_clusters
def test_a_tile_that_raises_does_not_stop_the_others(backend, tmp_path):
    with pytest.raises(TilesFailed) as error:
        list(spread(partial(fake.work, tmp_path, "raises"), range(4), backend))
    assert {tile: (type(e), str(e)) for tile, e in error.value.errors.items()} == {1: (RuntimeError, "no such luck")}
    assert [attempts(tmp_path, tile) for tile in range(4)] == [1, 1, 1, 1]
    with pytest.raises(TilesFailed) as error:
        list(spread(partial(fake.train_tile_or_refuse, fake.recipe()), range(3), backend))
    assert isinstance(error.value.errors[1], DataError)
    assert str(error.value.errors[1]) == "tile 1 is broken"


@pytest.mark.slow
@on_this_machine_and_in_torture_on_clusters
def test_a_poison_tile_is_given_up_and_the_others_finish(backend, tmp_path):
    found: list[int] = []
    with pytest.raises(TilesFailed) as error:
        found.extend(tile for tile, _ in spread(partial(fake.work, tmp_path, "poison"), range(5), backend))
    assert {tile: type(each) for tile, each in error.value.errors.items()} == {1: WorkerDied}
    assert sorted(found) == [0, 2, 3, 4]
    if backend.backend == "loky":
        assert attempts(tmp_path, 1) == ATTEMPTS


@pytest.mark.slow
@on_this_machine_and_in_torture_on_clusters
def test_workers_that_are_killed_at_random_change_no_byte(backend, tmp_path):
    """Real networks in tiles of four; resumed where a tile lost too many workers."""
    networks, epochs, kills = (64, 60, 12) if clusters.TORTURE else (24, 4, 2)
    wanted = fake.recipe(networks=networks, tile=4, training__epochs=epochs)
    collect(wanted, tmp_path / "whole.pop", workers=1, progress=False)
    options = {"workers": backend.count, "backend": backend.backend, "scheduler": backend.scheduler}
    with clusters.killing(backend.backend, kills, pause=(0.2, 3.0), seed=1) as killed:
        while True:
            with contextlib.suppress(Resumable):
                collect(wanted, tmp_path / "a.pop", progress=False, **options)
                break
    assert killed
    assert fake.files(tmp_path / "a.pop/shards") == fake.files(tmp_path / "whole.pop/shards")
    assert len(Population(tmp_path / "a.pop")) == networks


@pytest.mark.slow
def test_a_worker_whose_parent_is_killed_ends(tmp_path):
    program = "import sys; sys.path.insert(0, sys.argv[1]); import fake_training; fake_training.last(sys.argv[2])"
    parent = subprocess.Popen([sys.executable, "-c", program, str(clusters.HERE), str(tmp_path)])
    clusters.wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text())
    worker = int((tmp_path / "1").read_text())
    assert clusters.runs(worker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    clusters.wait_until(lambda: not clusters.runs(worker))


@pytest.mark.parametrize(
    ("error", "tiles"),
    [
        (RuntimeError("all of them"), [0, 1, 2]),  # the first tiles fail, and nothing else is tried
        (UsageError("no such layer"), [0]),
        (WeightscopeError("cannot write: disk full"), [0]),
    ],
)
def test_an_error_that_concerns_every_tile_stops_the_others(error, tiles, monkeypatch):
    tried = []

    def task(tile):
        tried.append(tile)
        raise error

    fake.use(monkeypatch)
    with pytest.raises(TilesFailed if isinstance(error, RuntimeError) else type(error)) as found:
        list(spread(task, range(100), Workers("loky", 1)))
    assert tried == tiles
    if isinstance(error, RuntimeError):
        assert list(found.value.errors) == tiles


@clusters.torture
def test_a_dead_dask_scheduler_is_an_error(tmp_path):
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with clusters.dask_processes(tmp_path, workers=1) as (address, scheduler, _):
        tiles = spread(partial(fake.work, tmp_path, "lasts"), [0, 1], Workers("dask", scheduler=address))
        assert next(tiles)[0] == 0
        scheduler.kill()
        with pytest.raises(TilesFailed) as error:
            next(tiles)
        assert str(error.value.errors[1]) == "the dask cluster was lost"


@pytest.mark.slow
def test_addresses():
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with pytest.raises(UsageError, match="expected the address of a scheduler"):
        list(spread(print, [0], Workers("dask")))
    with pytest.raises(WeightscopeError, match="cannot connect to nonsense://x"):
        list(spread(print, [0], Workers("dask", scheduler="nonsense://x")))
