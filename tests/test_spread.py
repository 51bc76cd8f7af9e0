"""Every backend gives all tiles, raises what a task raises, and does not wait for a dead worker."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fake_training as fake
import pytest

from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.training import workers
from weightscope.training.workers import WorkerDied, spread


@pytest.fixture(params=["loky", "dask", "ray"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Options of a backend with two workers; clusters are skipped where their packages are missing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    if request.param == "dask":
        distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
        with distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
            yield {"backend": "dask", "scheduler": cluster.scheduler_address, "workers": None, "gpu": False}
        return
    if request.param == "ray":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    workers = 2 if request.param == "loky" else None
    yield {"backend": request.param, "scheduler": None, "workers": workers, "gpu": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what clusters warn of is their own affair
def test_a_backend(backend: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(spread(partial(fake.touch, tmp_path), range(5), **backend)) == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]
    with pytest.raises(DataError, match=r"^tile 1 is broken$"):
        list(spread(partial(fake.train_tile_or_refuse, fake.recipe()), range(3), **backend))
    # On a busy machine dask may give its workers up altogether; that is said, too.
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 30.0)
    with pytest.raises(WorkerDied, match="worker"):
        list(spread(partial(fake.train_tile_and_die, fake.recipe()), range(3), **backend))


def test_a_process_runs_one_task_at_a_time() -> None:
    """Threads of one worker would share torch's global generator."""
    running, most = [], []

    def task(_tile: int) -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    threads = [threading.Thread(target=workers._run, args=(task, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


class _Cluster:
    """As much of dask as the loop that waits for it uses."""

    def __init__(self, ready: list[bool], workers: bool) -> None:
        self.ready, self.workers = ready, workers

    def has_ready(self) -> bool:
        return self.ready.pop(0) if self.ready else False

    def __next__(self) -> str:
        return "future"

    def nthreads(self) -> dict[str, int]:
        return {"worker": 1} if self.workers else {}


def test_a_cluster_without_workers_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(workers, "_POLL_SECONDS", 0.01)
    busy = _Cluster([True] + [False] * 20 + [True], workers=True)
    assert list(workers._ready(busy, busy, 2)) == ["future", "future"]
    lost = _Cluster([True], workers=False)
    with pytest.raises(WorkerDied, match="no worker for 0 seconds"):
        list(workers._ready(lost, lost, 2))


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    options = {"backend": "dask", "workers": None, "gpu": False}
    with pytest.raises(UsageError, match="expected the address of a scheduler"):
        list(spread(print, [0], scheduler=None, **options))
    with pytest.raises(WeightscopeError, match="cannot connect to the scheduler at nonsense://x"):
        list(spread(print, [0], scheduler="nonsense://x", **options))
