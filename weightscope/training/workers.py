"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

A task is a function of its tile and its result is a file, so that a tile can be given to another worker at any time. What
ends a worker (a kill, a machine that goes down, a process that is stopped or hangs) is noticed by the pools of workers;
here is decided what follows: the tile is given to another worker, up to a limit, and the other tiles go on.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from weightscope.errors import UsageError, WeightscopeError

_log = logging.getLogger(__name__)

BACKENDS = ("loky", "dask", "ray")
ATTEMPTS = 3  # workers that a tile may lose before it is given up
_FAILURES_AT_FIRST = 3  # failed tiles after which nothing else is tried, if no tile has succeeded

# A worker that sends no heartbeat for so long is stopped: its machine or process does not run.
SILENT_SECONDS = 60.0
# A task that uses no processor time for so long hangs.
HANGS_SECONDS = 300.0
# A cluster whose scheduler or workers cannot be reached for so long is lost.
LOST_SECONDS = 50.0
HUNG = 75  # the exit code of a process that ends itself because its task hangs

Task = Callable[..., Any]
Progress = Callable[[int, float], None]

# A dask worker may run tasks in threads; they would share torch's global generator and number of threads.
_one_at_a_time = threading.Lock()


class WorkerDied(Exception):
    """A worker ended or stopped without returning a result; the message says how."""


class ClusterLost(Exception):
    """The scheduler, or all workers of a cluster, cannot be reached."""


class TilesFailed(Exception):
    """Some tiles failed; all others are finished, unless none succeeded.

    Attributes:
        errors: tile -> the error that its task raised, or `WorkerDied`.
    """

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__(f"{len(errors)} tiles failed")
        self.errors = errors


class Ended(NamedTuple):
    """A tile that a worker no longer works on: its result, or the error."""

    tile: int
    value: Any = None
    error: Exception | None = None


class Pool(Protocol):
    """Workers, each of which runs one tile at a time."""

    def free(self) -> int:
        """The number of tiles that can be started now."""

    def start(self, tile: int) -> None:
        """Give a tile to a worker."""

    def poll(self) -> list[Ended]:
        """Wait a moment, and return the tiles that have ended.

        Raises:
            ClusterLost: if no worker can be reached any more.
        """


@dataclass(frozen=True)
class Workers:
    """Which workers to use.

    Attributes:
        backend: one of `BACKENDS`.
        count: number of processes of this machine; 1 runs the tasks in this process. A cluster has its own number.
        scheduler: the cluster's address; required for dask, optional for ray, which otherwise finds or starts one.
        gpu: whether every task needs a GPU.
    """

    backend: str = "loky"
    count: int | None = None
    scheduler: str | None = None
    gpu: bool = False


def spread(
    task: Task, tiles: Sequence[int], workers: Workers, progress: Progress | None = None
) -> Generator[tuple[int, Any], None, None]:
    """Run `task(tile, progress=...)` for every tile on workers; yields (tile, result) in any order.

    A tile whose worker ends or stops is given to another one, at most `ATTEMPTS` times in all. A tile that fails does not
    stop the others; an error that is sure to concern every tile (an invalid argument, a full disk) does.

    Args:
        task: pickled by reference or by cloudpickle; takes the tile and `progress`, a function of the fraction done.
        tiles: its arguments.
        workers: where to run them.
        progress: called with a tile and the fraction of it that is done.

    Raises:
        TilesFailed: at the end, if tiles have failed; at once, if the first ones have all failed.
        ClusterLost: if the cluster's scheduler or all its workers are gone for `LOST_SECONDS`.
        UsageError: if the backend is not installed or needs an address.
        WeightscopeError: if a task raises an error that concerns every tile, or the cluster does not respond.
    """
    with _pool(task, workers, progress or (lambda _tile, _done: None)) as pool:
        yield from _distribute(pool, tiles, progress)


@contextlib.contextmanager
def _pool(task: Task, workers: Workers, progress: Progress) -> Iterator[Pool]:
    # Imported here because the pools import from this module.
    if workers.backend == "dask":
        from weightscope.training.dask_workers import dask_pool

        with dask_pool(task, workers.scheduler, progress) as pool:
            yield pool
    elif workers.backend == "ray":
        from weightscope.training.ray_workers import ray_pool

        with ray_pool(task, workers.scheduler, workers.gpu, progress) as pool:
            yield pool
    elif (workers.count or 1) > 1:
        from weightscope.training.local_workers import local_pool

        with local_pool(task, workers.count or 1, progress) as pool:
            yield pool
    else:
        yield _ThisProcess(task, progress)


def _distribute(pool: Pool, tiles: Sequence[int], progress: Progress | None) -> Generator[tuple[int, Any], None, None]:
    waiting, running, succeeded = deque(tiles), 0, False
    lost: Counter[int] = Counter()
    failed: dict[int, Exception] = {}
    while waiting or running:
        for _ in range(min(pool.free(), len(waiting))):
            pool.start(waiting.popleft())
            running += 1
        for tile, value, error in pool.poll():
            running -= 1
            if error is None:
                succeeded = True
                yield tile, value
                continue
            if progress is not None:
                progress(tile, 0.0)
            if isinstance(error, WorkerDied):
                lost[tile] += 1
                if lost[tile] < ATTEMPTS:
                    _log.warning(
                        "tile %d: %s (attempt %d of %d); it is trained again", tile, error, lost[tile], ATTEMPTS
                    )
                    waiting.append(tile)
                    continue
            elif isinstance(error, UsageError) or type(error) is WeightscopeError:
                raise error
            failed[tile] = error
            _log.warning("tile %d failed: %s: %s", tile, type(error).__name__, error)
            if not succeeded and len(failed) >= _FAILURES_AT_FIRST:
                raise TilesFailed(failed)
    if failed:
        raise TilesFailed(failed)


class _ThisProcess:
    """A pool of one worker: this process."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self._task, self._progress = task, progress
        self._tile: int | None = None

    def free(self) -> int:
        return int(self._tile is None)

    def start(self, tile: int) -> None:
        self._tile = tile

    def poll(self) -> list[Ended]:
        tile, self._tile = self._tile, None
        assert tile is not None
        try:
            return [Ended(tile, self._task(tile, progress=lambda done: self._progress(tile, done)))]
        except Exception as error:  # noqa: BLE001 - handed to the caller
            return [Ended(tile, error=error)]


def run(task: Task, tile: int, progress: Callable[[float], None], hangs: float) -> Any:
    """Run a task in a worker; ends the process if the task uses no processor time for `hangs` seconds."""
    with _one_at_a_time, _watched(hangs):
        return task(tile, progress=progress)


@contextlib.contextmanager
def _watched(limit: float) -> Iterator[None]:
    """End this process if the block, in this thread, uses less than 1 % of the processor for `limit` seconds.

    Only time in which this process runs counts, so that a stopped process that continues is not ended.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None
    pause, over = limit / 20, threading.Event()

    def used() -> float:
        return time.process_time() if clock is None else time.clock_gettime(clock)

    def watch() -> None:
        idle, before = 0, used()
        while not over.wait(pause):
            now = used()
            idle, before = (idle + 1 if now - before < 0.01 * pause else 0), now
            if idle >= 20:
                os._exit(HUNG)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()  # the clock is that of this thread
