"""What all kinds of workers share: whom to ask, what they report, and how a task is run in a worker process."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from weightscope._util.checks import choice, count
from weightscope._util.environment import usable_cores
from weightscope.errors import UsageError

BACKENDS = ("loky", "dask", "ray")

# A worker that sends no heartbeat for so long is stopped: its machine or process does not run.
SILENT_SECONDS = 60.0
# A task that uses no processor time for so long hangs.
HANGS_SECONDS = 300.0
# A cluster whose scheduler or workers cannot be reached for so long is lost.
LOST_SECONDS = 50.0
# A cluster whose first worker does not come for so long, and a worker that does not get as far as its first heartbeat.
START_SECONDS = 300.0
HUNG = 75  # the exit code of a process that ends itself because its task hangs

Task = Callable[..., Any]
Progress = Callable[[Any, float], None]

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

    def __init__(self, errors: dict[Any, Exception]) -> None:
        super().__init__(f"{len(errors)} tiles failed")
        self.errors = errors


class Ended(NamedTuple):
    """A tile that a worker no longer works on: its result, or the error."""

    tile: Any
    value: Any = None
    error: Exception | None = None


class Pool(Protocol):
    """Workers, each of which runs one tile at a time."""

    def size(self) -> int:
        """The number of workers."""

    def free(self) -> int:
        """The number of tiles that can be started now."""

    def start(self, tile: Any) -> None:
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

    def on_device(self, device: str, tiles: int) -> "Workers":
        """For some tiles on a device: by default one process per core, or one on a GPU."""
        number = self.count
        if self.backend == "loky":
            number = min(number or (usable_cores() if device == "cpu" else 1), max(tiles, 1))
        return replace(self, count=number, gpu=device != "cpu")


def chosen_workers(backend: str, workers: int | None, scheduler: str | None) -> Workers:
    """The workers that arguments of `collect` name.

    Raises:
        UsageError: if an argument is invalid.
    """
    choice("backend", backend, BACKENDS)
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: expected none for backend {backend}, whose cluster has its own, found {workers}")
    return Workers(backend, None if workers is None else count("workers", workers), scheduler)


def run(task: Task, tile: Any, progress: Callable[[float], None], hangs: float) -> Any:
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
