"""Workers of a ray cluster.

Ray queues the tiles and notices workers that die. It does not notice processes that are stopped, so tasks send
heartbeats to an actor, which keeps the time of the last one of each tile.
"""

import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from weightscope.errors import WeightscopeError
from weightscope.training import workers
from weightscope.training.clusters import Lookout, cluster_package, one_line
from weightscope.training.workers import ClusterLost, Ended, Progress, Task, WorkerDied

_POLL_SECONDS = 0.5
_BEAT_SECONDS = 2.0
_PENDING = 1000  # tiles that ray holds; it adds machines for those that wait


@contextlib.contextmanager
def ray_pool(task: Task, scheduler: str | None, gpu: bool, progress: Progress) -> Iterator["_Ray"]:
    """The workers of the cluster at an address; without one, of the one that ray finds or starts.

    Raises:
        UsageError: if ray is not installed.
        WeightscopeError: if the cluster does not respond.
    """
    ray = cluster_package("ray", "ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=scheduler, log_to_driver=False)
        except Exception as error:  # some of what ray raises is a plain Exception
            raise WeightscopeError(
                f"backend ray: cannot connect to the cluster at {scheduler or 'this machine'}: {one_line(error)}"
            ) from error
    pool = _Ray(ray, task, gpu, progress)
    try:
        yield pool
    finally:
        pool.close()
        if ours:
            ray.shutdown()


class _Ray:
    def __init__(self, ray: Any, task: Task, gpu: bool, progress: Progress) -> None:
        self._ray, self._progress, self._task = ray, progress, ray.put(task)
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=0)(_run)
        self._pending: dict[Any, tuple[Any, int]] = {}  # future -> tile, number of the attempt
        self._attempts = itertools.count()
        self._beat: dict[int, float] = {}  # attempt -> time of its last heartbeat
        self._kind, self._seen = "GPU" if gpu else "CPU", time.monotonic()
        self._lookout = Lookout(ray.cluster_resources)
        self._heard = Lookout(lambda: ray.get(self._board.read.remote()))

    def size(self) -> int:
        return int(self._ray.cluster_resources().get(self._kind, 0))

    def free(self) -> int:
        return _PENDING - len(self._pending)

    def start(self, tile: Any) -> None:
        attempt = next(self._attempts)
        future = self._remote.remote(self._task, tile, self._board, attempt, workers.HANGS_SECONDS)
        self._pending[future] = tile, attempt

    def poll(self) -> list[Ended]:
        ready, _ = self._ray.wait(list(self._pending), timeout=_POLL_SECONDS)
        ended = [self._result(self._pending.pop(future)[0], future) for future in ready]
        resources, beats = self._lookout.latest or {}, self._heard.latest or {}
        now = time.monotonic()
        if self._lookout.age() > workers.LOST_SECONDS:
            raise ClusterLost(f"the ray cluster has not answered for {workers.LOST_SECONDS:.0f} seconds")
        if resources.get(self._kind, 0) >= 1:
            self._seen = now
        if now - self._seen > workers.LOST_SECONDS:
            raise ClusterLost(f"the ray cluster has had no {self._kind} for {workers.LOST_SECONDS:.0f} seconds")
        for future, (tile, attempt) in list(self._pending.items()):
            if attempt in beats:
                silent, done = beats[attempt]
                self._beat[attempt] = now - silent
                if done is not None:
                    self._progress(tile, done)
            silent = now - self._beat.get(
                attempt, now
            )  # also if the board died and forgot it; 0 for a tile in the queue
            if silent > workers.SILENT_SECONDS:
                del self._pending[future]
                self._ray.cancel(future, force=True)
                ended.append(Ended(tile, error=WorkerDied(f"its worker gave no sign of life for {silent:.0f} seconds")))
        return ended

    def close(self) -> None:
        self._lookout.stop()
        self._heard.stop()
        for future in self._pending:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(future, force=True)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._board)

    def _result(self, tile: Any, future: Any) -> Ended:
        try:
            return Ended(tile, self._ray.get(future))
        except self._ray.exceptions.RayTaskError as error:
            return Ended(tile, error=error.cause if isinstance(error.cause, Exception) else error)
        except self._ray.exceptions.RayError as error:
            return Ended(tile, error=WorkerDied(f"its worker died ({type(error).__name__})"))


class _Board:
    """An actor that keeps the last heartbeat of each attempt, by its own clock, and how much of the tile is done."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[float, float | None]] = {}

    def beat(self, attempt: int, done: float | None) -> None:
        self._beats[attempt] = time.monotonic(), done

    def forget(self, attempt: int) -> None:
        self._beats.pop(attempt, None)

    def read(self) -> dict[int, tuple[float, float | None]]:
        """Attempt -> seconds since its last heartbeat, and the fraction done."""
        now = time.monotonic()
        return {attempt: (now - at, done) for attempt, (at, done) in self._beats.items()}


def _run(task: Task, tile: Any, board: Any, attempt: int, hangs: float) -> Any:
    now: dict[str, float | None] = {"done": None}
    over = threading.Event()

    def beat() -> None:
        while True:
            board.beat.remote(attempt, now["done"])
            if over.wait(_BEAT_SECONDS):
                board.forget.remote(attempt)
                return

    # A process that is stopped before its first heartbeat has left it would look like a tile that waits in the queue.
    importlib.import_module("ray").get(board.beat.remote(attempt, None))
    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        return workers.run(task, tile, lambda done: now.update(done=done), hangs)
    finally:
        over.set()
        beating.join()
