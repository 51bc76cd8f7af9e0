# ruff: noqa: D102 - the methods of pools are described in `Pool`
"""Workers of clusters: dask and ray.

What a cluster's own retries would do is done for all backends by `spreading`: theirs count a death against every tile
of a worker, or do not notice processes that are stopped.
"""

import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from weightscope.errors import UsageError, WeightscopeError
from weightscope.training import workers
from weightscope.training.workers import ClusterLost, Ended, Progress, Task, WorkerDied

_LOOK_SECONDS = 1.0
_DASK_POLL_SECONDS, _RAY_POLL_SECONDS = 0.2, 0.5
_FETCH_SECONDS = 30.0
_ANSWERING = 5.0  # seconds within which a scheduler that works has answered
_PROGRESS = "weightscope-progress"
_PENDING = 1000  # tiles that ray holds; it adds machines for those that wait


class DaskPool:
    """The `Pool` of the worker processes of a dask cluster, those included that join later.

    Each is given one tile at a time by name, so that a tile is known to be lost when its worker is.
    """

    def __init__(self, task: Task, scheduler: str | None, progress: Progress) -> None:
        distributed = _package("distributed", "dask", "dask[distributed]")
        if scheduler is None:
            raise UsageError("backend dask: expected the address of a scheduler, such as tcp://host:8786, found none")
        try:
            client = distributed.Client(scheduler, set_as_default=False)
        except (OSError, ValueError) as error:
            raise WeightscopeError(
                f"backend dask: cannot connect to the scheduler at {scheduler}: {_one_line(error)}"
            ) from error
        self._client, self._task, self._scheduler = client, task, scheduler
        self._running: dict[str, tuple[Any, Any]] = {}  # address of a worker -> tile, future
        self._heartbeats: dict[str, tuple[float, float]] = {}  # address -> its last heartbeat, and when it was new
        self._last_heartbeat = time.monotonic()
        self._lookout = _Lookout(lambda: client.scheduler_info(n_workers=-1)["workers"])
        client.subscribe_topic(_PROGRESS, lambda event: progress(*event[1]))

    def size(self) -> int:
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    def free(self) -> int:
        return len(self._idle())

    def start(self, tile: Any) -> None:
        address = self._idle()[0]
        here: dict[str, Any] = {"workers": [address], "allow_other_workers": False, "pure": False}
        future = self._client.submit(_run_on_dask, self._task, tile, workers.HANGS_SECONDS, **here)
        self._running[address] = tile, future

    def poll(self) -> list[Ended]:
        time.sleep(_DASK_POLL_SECONDS)
        alive = self._alive()
        limit = workers.LOST_SECONDS
        silent = time.monotonic() - self._last_heartbeat  # while it reconnects, the client repeats what it knew
        away = self._client.status != "running" and silent > limit
        if self._lookout.age() > limit or self._client.status == "closed" or away:
            raise ClusterLost(f"the dask scheduler at {self._scheduler} has not answered for {limit:.0f} seconds")
        if not self._heartbeats:  # workers that are still to start
            limit = workers.START_SECONDS
        if silent - self._lookout.age() > limit:  # as long as the scheduler has answered
            raise ClusterLost(f"no worker of the dask cluster has responded for {limit:.0f} seconds")
        ended = []
        for address, (tile, future) in list(self._running.items()):
            if future.status == "pending":
                if address in alive:
                    continue
                found = Ended(tile, error=WorkerDied(f"its worker at {address} died or stopped"))
            else:
                found = self._result(tile, future, address)
            del self._running[address]
            with contextlib.suppress(Exception):  # a cluster that is going down; nothing depends on it
                self._client.cancel([future])
            ended.append(found)
        return ended

    def close(self) -> None:
        """Cancel what is left, without waiting for a cluster that does not answer."""
        self._lookout.stop()
        left = [future for _, future in self._running.values()]
        answering = self._lookout.age() < _ANSWERING and self._client.status == "running"
        if answering and left:
            self._client.cancel(left, force=True)
        with contextlib.suppress(TimeoutError):  # of a scheduler that is gone
            self._client.close(timeout=5 if answering else 0.1)

    def _idle(self) -> list[str]:
        return sorted(self._alive() - self._running.keys())

    def _alive(self) -> set[str]:
        """The workers with a recent heartbeat, by this machine's clock: those of others may differ."""
        now, found = time.monotonic(), self._lookout.latest or {}
        for address, info in found.items():
            if self._heartbeats.get(address, (None,))[0] != info["last_seen"]:
                self._heartbeats[address] = info["last_seen"], now
                self._last_heartbeat = now
        return {a for a in found if now - self._heartbeats[a][1] < workers.SILENT_SECONDS}

    def _result(self, tile: Any, future: Any, address: str) -> Ended:
        try:
            return Ended(tile, future.result(timeout=_FETCH_SECONDS))
        except Exception as error:  # noqa: BLE001 - the task's or the cluster's
            # Its module says whose: the result of a dead worker is lost in many ways.
            if future.status != "error" or type(error).__module__.partition(".")[0] in ("distributed", "dask"):
                return Ended(tile, error=WorkerDied(f"its worker at {address} died ({type(error).__name__})"))
            return Ended(tile, error=error)


def _run_on_dask(task: Task, tile: Any, hangs: float) -> Any:
    from distributed import get_worker

    worker = get_worker()

    def report(done: float | None) -> None:
        if done is not None:
            worker.log_event(_PROGRESS, (tile, done))

    return workers.run(task, tile, report, hangs)


class RayPool:
    """The `Pool` of a ray cluster; without an address, of the one that ray finds or starts.

    Ray queues the tiles and notices workers that die. It does not notice processes that are stopped, so tasks send
    heartbeats to an actor, which keeps the time of the last one of each tile.
    """

    def __init__(self, task: Task, scheduler: str | None, gpu: bool, progress: Progress) -> None:
        ray = _package("ray", "ray", "ray")
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=scheduler, log_to_driver=False)
            except Exception as error:  # some of what ray raises is a plain Exception
                raise WeightscopeError(
                    f"backend ray: cannot connect to the cluster at {scheduler or 'this machine'}: {_one_line(error)}"
                ) from error
        self._ray, self._progress, self._task = ray, progress, ray.put(task)
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=0)(_run_on_ray)
        self._pending: dict[Any, tuple[Any, int]] = {}  # future -> tile, number of the attempt
        self._attempts = itertools.count()
        self._beat: dict[int, float] = {}  # attempt -> time of its last heartbeat
        self._kind, self._seen = "GPU" if gpu else "CPU", time.monotonic()
        self._lookout = _Lookout(ray.cluster_resources)
        self._heard = _Lookout(lambda: ray.get(self._board.read.remote()))

    def size(self) -> int:
        return int(self._ray.cluster_resources().get(self._kind, 0))

    def free(self) -> int:
        return _PENDING - len(self._pending)

    def start(self, tile: Any) -> None:
        attempt = next(self._attempts)
        future = self._remote.remote(self._task, tile, self._board, attempt, workers.HANGS_SECONDS)
        self._pending[future] = tile, attempt

    def poll(self) -> list[Ended]:
        ready, _ = self._ray.wait(list(self._pending), timeout=_RAY_POLL_SECONDS)
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
            # also if the board died and forgot it; 0 for a tile in the queue
            silent = now - self._beat.get(attempt, now)
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
        if self._ours:
            self._ray.shutdown()

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

    def read(self) -> dict[int, tuple[float, float | None]]:  # attempt -> seconds since its heartbeat, fraction done
        now = time.monotonic()
        return {attempt: (now - at, done) for attempt, (at, done) in self._beats.items()}


def _run_on_ray(task: Task, tile: Any, board: Any, attempt: int, hangs: float) -> Any:
    # A process that is stopped before its first heartbeat has left it would look like a tile that waits in the queue.
    importlib.import_module("ray").get(board.beat.remote(attempt, None))
    try:
        return workers.run(task, tile, lambda done: board.beat.remote(attempt, done), hangs)
    finally:
        board.forget.remote(attempt)


def _package(name: str, backend: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f'backend {backend} is not installed: `pip install "{package}"`') from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Lookout:
    """Calls a function of a cluster again and again in a thread, which may block when the cluster is gone."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.latest: Any = None
        self._heard = time.monotonic()
        self._over = threading.Event()

        def watch() -> None:
            while not self._over.wait(_LOOK_SECONDS):
                with contextlib.suppress(Exception):  # what counts is how long there is no answer
                    self.latest = look()
                    self._heard = time.monotonic()

        threading.Thread(target=watch, daemon=True).start()

    def age(self) -> float:
        # seconds since the last answer
        return time.monotonic() - self._heard

    def stop(self) -> None:
        self._over.set()
