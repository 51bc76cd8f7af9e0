"""Every backend gives all tiles, and outlives workers that die, stop, hang or are lost altogether."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import clusters
import fake_training as fake
import pytest

from weightscope._util import workers
from weightscope._util.workers import ATTEMPTS, ClusterLost, TilesFailed, WorkerDied, Workers, on_each, spread
from weightscope.errors import DataError, Resumable, UsageError, WeightscopeError
from weightscope.population import Population
from weightscope.training.collection import collect
from weightscope.training.tensorboard import tensorboard

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
def test_all_tiles_with_their_results_and_progress(backend, tmp_path):
    seen: list[tuple[int, float]] = []
    task = partial(fake.work, tmp_path, "none")
    found = dict(spread(task, [0, 2, 3, 4], backend, lambda *event: seen.append(event)))
    assert found == {0: 0, 2: 20, 3: 30, 4: 40}
    assert {tile for tile, _ in seen} <= {0, 2, 3, 4}
    assert {done for _, done in seen} <= {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dask", "ray"], indirect=True)
def test_tiles_of_a_cluster_are_told_and_logged_here(backend, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fake.use(monkeypatch)
    told, log = [], tensorboard(tmp_path / "logs")

    def on_tile(result):
        told.append((result.tile, os.getpid(), [*result.networks]))
        log(result)

    where = {"backend": backend.backend, "scheduler": backend.scheduler}
    population = collect(fake.recipe(), tmp_path / "a.pop", on_tile=on_tile, **where)
    parts = [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert sorted(told) == [(tile, os.getpid(), networks) for tile, networks in enumerate(parts)]
    found = accumulator.EventAccumulator(str(tmp_path / "logs/a")).Reload().Scalars("test_accuracy")
    kept = ~population.diverged[:8]
    assert len(found) == 3
    means = {each.step: each.value for each in found}
    assert means[0] == pytest.approx(population.metrics["test_accuracy"][:8, -1][kept].mean())


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
@pytest.mark.parametrize("trouble", ["dies", "stops", "hangs"])
def test_a_worker_in_trouble_is_noticed_and_its_tile_given_to_another(backend, tmp_path, monkeypatch, trouble):
    short = 4.0 if backend.backend == "loky" else 15.0
    monkeypatch.setattr(workers, "HANGS_SECONDS", 2.0 if backend.backend == "loky" else 4.0)
    monkeypatch.setattr(workers, "SILENT_SECONDS", short if trouble == "stops" else 60.0)
    try:
        found = dict(spread(partial(fake.work, tmp_path, trouble), range(4), backend))
    finally:
        clusters.kill_stopped(tmp_path / "1")
    assert found == {0: 0, 1: 10, 2: 20, 3: 30}
    assert attempts(tmp_path, 1) >= 2


@pytest.mark.slow
@on_this_machine_and_in_torture_on_clusters
def test_a_poison_tile_is_given_up_and_the_others_finish(backend, tmp_path):
    found: list[int] = []
    with pytest.raises(TilesFailed) as error:
        found.extend(tile for tile, _ in spread(partial(fake.work, tmp_path, "poison"), range(5), backend))
    assert list(error.value.errors) == [1]
    assert isinstance(error.value.errors[1], WorkerDied)
    assert [attempts(tmp_path, tile) for tile in range(5)] == [1, ATTEMPTS, 1, 1, 1]


@pytest.mark.slow
@on_this_machine_and_in_torture_on_clusters
def test_all_workers_can_be_asked_at_once(backend, tmp_path):
    assert sorted(on_each(partial(fake.work, tmp_path, "raises"), backend, most=1)) == [0]
    assert len(list(tmp_path.iterdir())) == 1


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


def test_a_process_that_is_used_again_has_the_new_task(tmp_path):
    two = Workers("loky", 2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert len(list(spread(partial(fake.work, tmp_path / name, "raises"), [0, 2, 3], two))) == 3
    ids = {name: {(tmp_path / name / str(tile)).read_text() for tile in (0, 2, 3)} for name in ("a", "b")}
    assert ids["a"] & ids["b"]


@pytest.mark.slow
def test_a_worker_whose_parent_is_killed_ends(tmp_path):
    program = "import sys; sys.path.insert(0, sys.argv[1]); import fake_training; fake_training.hang(sys.argv[2])"
    parent = subprocess.Popen([sys.executable, "-c", program, str(clusters.HERE), str(tmp_path)])
    clusters.wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text())
    worker = int((tmp_path / "1").read_text())
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
def test_an_error_that_concerns_every_tile_stops_the_others(error, tiles):
    tried = []

    def task(tile, **options):
        tried.append(tile)
        raise error

    with pytest.raises(TilesFailed if isinstance(error, RuntimeError) else type(error)) as found:
        list(spread(task, range(100), Workers("loky", 1)))
    assert tried == tiles
    if isinstance(error, RuntimeError):
        assert list(found.value.errors) == tiles


def test_a_process_runs_one_task_at_a_time():
    """Threads of one worker would share torch's global generator."""
    running, most = [], []

    def task(_tile, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    threads = [threading.Thread(target=workers.run, args=(task, i, print, 60.0)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_task_that_works_is_not_taken_for_one_that_hangs():
    """The process would end, and the tests with it."""

    def task(_tile, **options):
        until = time.thread_time() + 0.5
        while time.thread_time() < until:
            pass
        return 5

    assert workers.run(task, 0, print, 0.3) == 5


@clusters.torture
def test_a_dead_dask_scheduler_is_an_error(tmp_path, monkeypatch):
    """Killed, or stopped, in which case connections stay open."""
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    assert workers.LOST_SECONDS < 60
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with clusters.dask_processes(tmp_path, workers=1) as (address, scheduler, _):
            folder = tmp_path / number.name
            folder.mkdir()
            tiles = spread(partial(fake.work, folder, "hangs"), [0, 1], Workers("dask", scheduler=address))
            assert next(tiles)[0] == 0
            monkeypatch.setattr(workers, "LOST_SECONDS", 6.0)
            scheduler.send_signal(number)
            begun = time.monotonic()
            with pytest.raises(ClusterLost, match=r"dask scheduler at tcp://.* has not answered for 6 seconds"):
                next(tiles)
            assert time.monotonic() - begun < 50
            monkeypatch.undo()


@clusters.torture
def test_a_dask_cluster_that_loses_all_workers_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with clusters.dask_processes(tmp_path, workers=2) as (address, _, there):
        tiles = spread(partial(fake.work, tmp_path, "hangs"), [0, 1, 2], Workers("dask", scheduler=address))
        next(tiles)
        monkeypatch.setattr(workers, "LOST_SECONDS", 6.0)
        for worker in there:
            worker.kill()
        with pytest.raises(ClusterLost, match="no worker of the dask cluster has responded for 6 seconds"):
            list(tiles)


@pytest.mark.slow
def test_a_ray_cluster_that_loses_all_workers_is_an_error(monkeypatch):
    """As much of ray as its pool uses; a cluster whose machines are gone."""
    ray = MagicMock(exceptions=SimpleNamespace(RayError=RuntimeError, RayTaskError=KeyError))
    ray.get.return_value = {}
    ray.wait.side_effect = lambda futures, timeout: (time.sleep(0.02), ([], futures))[1]

    def poll_for_a_second(cpus):
        ray.cluster_resources.return_value = {"CPU": cpus}
        pool, until = workers.RayPool(print, None, False, print), time.monotonic() + 1.0
        pool.start(0)
        try:
            while time.monotonic() < until:
                assert pool.poll() == []
        finally:
            pool.close()

    monkeypatch.setattr(workers, "_package", lambda *_: ray)
    monkeypatch.setattr(workers, "LOST_SECONDS", 0.5)
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.02)
    poll_for_a_second(2.0)
    with pytest.raises(ClusterLost, match="has had no CPU for"):
        poll_for_a_second(0.0)
    ray.cluster_resources.side_effect = lambda: time.sleep(3)
    with pytest.raises(ClusterLost, match="the ray cluster has not answered"):
        poll_for_a_second(2.0)


@pytest.mark.slow
def test_addresses():
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with pytest.raises(UsageError, match="expected the address of a scheduler"):
        list(spread(print, [0], Workers("dask")))
    with pytest.raises(WeightscopeError, match="cannot connect to the scheduler at nonsense://x"):
        list(spread(print, [0], Workers("dask", scheduler="nonsense://x")))
