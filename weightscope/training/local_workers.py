"""Worker processes of this machine.

Processes are started by joblib's loky: without fork, and without `if __name__ == "__main__"` in scripts. Each has a
pipe of its own, so that the death of one is known to be the end of its tile and of no other; an executor, whose workers
share a queue, ends all of them when one dies.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
from joblib.externals.loky.backend import resource_tracker
from joblib.externals.loky.backend.process import LokyProcess

from weightscope.training import workers
from weightscope.training.workers import HUNG, Ended, Progress, Task, WorkerDied

_BEAT_SECONDS = 0.5
_POLL_SECONDS = 0.5
_UNUSED_SECONDS = 300.0  # after which a process that nobody uses ends
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    "1",
)

# Processes that have nothing to do: starting one takes seconds, and a benchmark calls `collect` often.
_spare: list["_Worker"] = []
os.register_at_fork(after_in_child=_spare.clear)


@contextlib.contextmanager
def local_pool(task: Task, count: int, progress: Progress) -> Iterator["_Local"]:
    """A pool of `count` processes."""
    pool = _Local(task, count, progress)
    try:
        yield pool
    finally:
        pool.close()


class _Local:
    def __init__(self, task: Task, count: int, progress: Progress) -> None:
        self._task, self._count, self._progress = cloudpickle.dumps(task), count, progress
        self._busy: list[_Worker] = []

    def size(self) -> int:
        return self._count

    def free(self) -> int:
        return self._count - len(self._busy)

    def start(self, tile: Any) -> None:
        while _spare and not _spare[-1].process.is_alive():
            _spare.pop().end()
        worker = _spare.pop() if _spare else _Worker()
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


class _Worker:
    """One process, and what it was last heard to say."""

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
        self._limit = workers.START_SECONDS

    def give(self, task: bytes, tile: Any) -> None:
        self._tile, self._silent, self._listened = tile, 0.0, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which `listen` reports
            self.connection.send((task, tile, workers.HANGS_SECONDS))

    def listen(self, progress: Progress) -> Ended | None:
        """Read what it sent; the end of its tile, if it has ended or the process is dead or silent."""
        now = time.monotonic()
        # If this process did not run for a while, neither may the worker have done.
        self._silent += min(now - self._listened, 2 * _POLL_SECONDS)
        self._listened = now
        try:
            while self.connection.poll():
                kind, tile, value = self.connection.recv()
                self._silent, self._limit = 0.0, workers.SILENT_SECONDS
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
        return f"its worker did nothing for {workers.HANGS_SECONDS:.0f} seconds"
    if code is not None and code < 0:
        why = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return f"its worker process died of {signal.Signals(-code).name}{why}"
    return f"its worker process died with exit code {code}"


def _serve(connection: Connection) -> None:
    """Run tasks until the parent ends or has none for some time; while one runs, send heartbeats."""
    lock = threading.Lock()
    now: dict[str, Any] = {"tile": None, "done": None}

    def send(kind: str, tile: Any, value: Any) -> None:
        try:
            with lock:
                connection.send((kind, tile, value))
        except OSError:  # the parent has ended
            os._exit(1)

    def beat() -> None:
        while True:
            if now["tile"] is not None:
                send("progress", now["tile"], now["done"])
            time.sleep(_BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while connection.poll(_UNUSED_SECONDS):
            task, tile, hangs = connection.recv()
            now.update(tile=tile, done=None)
            send("progress", tile, None)  # a process that is stopped right away is known to have started
            try:
                value = workers.run(cloudpickle.loads(task), tile, lambda done: now.update(done=done), hangs)
            except Exception as error:  # noqa: BLE001 - raised in the parent
                send("error", tile, _picklable(error))
            else:
                send("value", tile, value)
            now.update(tile=None, done=None)


def _picklable(error: Exception) -> Exception:
    """The error, or one with its message if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever pickling raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
