"""Workers of a dask cluster.

Each worker process is given one tile at a time by name, so that a tile is known to be lost when its worker is. (Left to
itself, the scheduler counts the death of a worker against all tiles that were queued there.)
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from weightscope.errors import UsageError, WeightscopeError
from weightscope.training import workers
from weightscope.training.clusters import Lookout, cluster_package, one_line
from weightscope.training.workers import ClusterLost, Ended, Progress, Task, WorkerDied

_POLL_SECONDS = 0.2
_FETCH_SECONDS = 30.0
_ANSWERING = 5.0  # seconds within which a scheduler that works has answered
_PROGRESS = "weightscope-progress"


@contextlib.contextmanager
def dask_pool(task: Task, scheduler: str | None, progress: Progress) -> Iterator["_Dask"]:
    """A pool of the worker processes of the cluster at an address, those included that join later.

    Raises:
        UsageError: if dask is not installed or there is no address.
        WeightscopeError: if the scheduler does not respond.
    """
    distributed = cluster_package("distributed", "dask", "dask[distributed]")
    if scheduler is None:
        raise UsageError("backend dask: expected the address of a scheduler, such as tcp://host:8786, found none")
    try:
        client = distributed.Client(scheduler, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WeightscopeError(
            f"backend dask: cannot connect to the scheduler at {scheduler}: {one_line(error)}"
        ) from error
    pool = _Dask(client, task, scheduler, progress)
    try:
        yield pool
    finally:
        pool.close()


class _Dask:
    def __init__(self, client: Any, task: Task, scheduler: str, progress: Progress) -> None:
        self._client, self._task, self._scheduler = client, task, scheduler
        self._running: dict[str, tuple[Any, Any]] = {}  # address of a worker -> tile, future
        self._heartbeats: dict[str, tuple[float, float]] = {}  # address -> its last heartbeat, and when it was new
        self._last_heartbeat = time.monotonic()
        self._lookout = Lookout(lambda: client.scheduler_info(n_workers=-1)["workers"])
        client.subscribe_topic(_PROGRESS, lambda event: progress(*event[1]))

    def size(self) -> int:
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    def free(self) -> int:
        return len(self._idle())

    def start(self, tile: Any) -> None:
        address = self._idle()[0]
        future = self._client.submit(
            _run, self._task, tile, workers.HANGS_SECONDS, workers=[address], allow_other_workers=False, pure=False
        )
        self._running[address] = tile, future

    def poll(self) -> list[Ended]:
        time.sleep(_POLL_SECONDS)
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


def _run(task: Task, tile: Any, hangs: float) -> Any:
    from distributed import get_worker

    worker = get_worker()
    return workers.run(task, tile, lambda done: worker.log_event(_PROGRESS, (tile, done)), hangs)
