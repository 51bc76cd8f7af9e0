# ruff: noqa: D102 - the methods of pools are described in `Pool`
"""Workers: whom to ask, how one runs a task, what it reports, and the processes of this machine.

Processes are started by joblib's loky: without fork, and without `if __name__ == "__main__"` in scripts. Each has a
pipe of its own, so if one dies, it is known which tile it had. A shared executor does not notice processes that are
stopped, and leaves them behind when this process is killed.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import cloudpickle
from joblib.externals.loky.backend import resource_tracker
from joblib.externals.loky.backend.process import LokyProcess

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

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.5
_UNUSED_SECONDS = 300.0  # after which a process that nobody uses ends
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    "1",
)

Task = Callable[..., Any]
Progress = Callable[[Any, float], None]

# A dask worker may run tasks in threads; they would share torch's global generator and number of threads.
_one_at_a_time = threading.Lock()

# Processes that have nothing to do: starting one takes seconds, and a session may call `collect` often.
_spare: list["_Process"] = []
os.register_at_fork(after_in_child=_spare.clear)


class WorkerDied(Exception):
    """A worker ended or stopped without returning a result; the message says how."""


class ClusterLost(Exception):
    """The scheduler, or all workers of a cluster, cannot be reached."""


class TilesFailed(Exception):
    """Some tiles failed; all others are finished, unless none succeeded."""

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
        """Wait a moment, and return the tiles that have ended."""

    def close(self) -> None:
        """Stop what still runs."""


@dataclass(frozen=True)
class Workers:
    """Which workers to use."""

    backend: str = "loky"  # one of `BACKENDS`
    count: int | None = (
        None  # processes of this machine; 1 runs the tasks in this process. A cluster has its own number
    )
    scheduler: str | None = None  # the cluster's address; without one, ray finds or starts a cluster
    gpu: bool = False  # whether every task needs one

    def on_device(self, device: str, tiles: int) -> "Workers":
        """For some tiles on a device: by default one process per core, or one on a GPU."""
        number = self.count
        if self.backend == "loky":
            number = min(number or (usable_cores() if device == "cpu" else 1), max(tiles, 1))
        return replace(self, count=number, gpu=device != "cpu")


def chosen_workers(backend: str, workers: int | None, scheduler: str | None) -> Workers:
    """The workers that arguments of `collect` name."""
    choice("backend", backend, BACKENDS)
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: expected none for backend {backend}, whose cluster has its own, found {workers}")
    return Workers(backend, None if workers is None else count("workers", workers), scheduler)


def run(task: Task, tile: Any, report: Callable[[float | None], None], hangs: float) -> Any:
    """Run a task in a worker.

    `report` is called with the fraction done, None if it is not known, now and then every second: the heartbeat. The
    process ends if the task uses less than 1 % of the processor for `hangs` seconds. Only time in which the process
    runs counts, so that a stopped one that continues is not ended.
    """
    done: list[float | None] = [None]
    over, pause = threading.Event(), min(_BEAT_SECONDS, hangs / 20)
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None

    def used() -> float:
        return time.process_time() if clock is None else time.clock_gettime(clock)

    def watch() -> None:
        idle, before = 0.0, used()
        while not over.wait(pause):
            report(done[0])
            now = used()
            idle, before = (idle + pause if now - before < 0.01 * pause else 0.0), now
            if idle >= hangs:
                os._exit(HUNG)

    with _one_at_a_time:
        report(None)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            return task(tile, progress=lambda fraction: done.__setitem__(0, fraction))
        finally:
            over.set()
            watcher.join()  # the clock is that of this thread


class LocalPool:
    """The `Pool` of `count` processes of this machine."""

    def __init__(self, task: Task, count: int, progress: Progress) -> None:
        self._task, self._count, self._progress = cloudpickle.dumps(task), count, progress
        self._busy: list[_Process] = []

    def size(self) -> int:
        return self._count

    def free(self) -> int:
        return self._count - len(self._busy)

    def start(self, tile: Any) -> None:
        while _spare and not _spare[-1].process.is_alive():
            _spare.pop().end()
        worker = _spare.pop() if _spare else _Process()
        self._busy.append(worker)
        worker.give(self._task, tile)

    def poll(self) -> list[Ended]:
        wait([w.connection for w in self._busy] + [w.process.sentinel for w in self._busy], _POLL_SECONDS)
        ended = [(worker, found) for worker in self._busy if (found := worker.listen(self._progress)) is not None]
        for worker, found in ended:
            self._busy.remove(worker)
            if isinstance(found.error, WorkerDied):
                worker.end()
            else:
                _spare.append(worker)
        return [found for _, found in ended]

    def close(self) -> None:
        for worker in self._busy:
            worker.end()


class _Process:
    """One process, and its last message."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.process = LokyProcess(target=_serve, args=(theirs,), daemon=True, env=_ONE_THREAD)
        # Ctrl-C reaches every process of a terminal; only the parent reports it. A blocked signal stays blocked in the
        # new process, from its first moment. Starting the tracker would unblock it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._tile: Any = None
        self._silent, self._listened = 0.0, time.monotonic()
        self._limit = START_SECONDS

    def give(self, task: bytes, tile: Any) -> None:
        self._tile, self._silent, self._listened = tile, 0.0, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which `listen` reports
            self.connection.send((task, tile, HANGS_SECONDS))

    def listen(self, progress: Progress) -> Ended | None:
        """Read what it sent; the end of its tile, if it has ended or the process is dead or silent."""
        now = time.monotonic()
        # If this process did not run for a while, neither may the worker have done.
        self._silent += min(now - self._listened, 2 * _POLL_SECONDS)
        self._listened = now
        try:
            while self.connection.poll():
                kind, tile, value = self.connection.recv()
                self._silent, self._limit = 0.0, SILENT_SECONDS
                if tile != self._tile:  # a heartbeat that was late
                    continue
                if kind != "progress":
                    return Ended(self._tile, **{kind: value})
                if value is not None:
                    progress(self._tile, value)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.process.join(1)
            return Ended(self._tile, error=WorkerDied(_how(self.process.exitcode)))
        if self._silent > self._limit:
            return Ended(self._tile, error=WorkerDied(f"its worker gave no sign of life for {self._limit:.0f} seconds"))
        return None

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()


def _how(code: int | None) -> str:
    if code == HUNG:
        return f"its worker did nothing for {HANGS_SECONDS:.0f} seconds"
    if code is not None and code < 0:
        why = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return f"its worker process died of {signal.Signals(-code).name}{why}"
    return f"its worker process died with exit code {code}"


def _serve(connection: Connection) -> None:
    """Run tasks until the parent ends or has none for some time."""
    lock = threading.Lock()

    def send(kind: str, tile: Any, value: Any) -> None:
        try:
            with lock:
                connection.send((kind, tile, value))
        except OSError:  # the parent has ended
            os._exit(1)

    with contextlib.suppress(EOFError, OSError):
        while connection.poll(_UNUSED_SECONDS):
            task, tile, hangs = connection.recv()
            report = partial(send, "progress", tile)
            try:
                ended = "value", tile, run(cloudpickle.loads(task), tile, report, hangs)
            except Exception as error:  # noqa: BLE001 - raised in the parent
                ended = "error", tile, _picklable(error)
            send(*ended)


def _picklable(error: Exception) -> Exception:
    """The error, or one with its message if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever pickling raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
