"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

A task is a function of its tile and its result is a file, so a tile can be given to another worker at any time. What
ends a worker (a kill, a machine that goes down, a process that is stopped or hangs) is noticed by the pools of workers.
This module gives the tile to another worker, up to a limit, while the other tiles go on.
"""

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from weightscope.errors import UsageError, WeightscopeError
from weightscope.training.clusters import DaskPool, RayPool
from weightscope.training.workers import Ended, LocalPool, Pool, Progress, Task, TilesFailed, WorkerDied, Workers

_log = logging.getLogger(__name__)

ATTEMPTS = 3  # workers that a tile may lose before it is given up
_FAILURES_AT_FIRST = 3  # failed tiles after which nothing else is tried, if no tile has succeeded


def spread(
    task: Task,
    tiles: Sequence[Any],
    workers: Workers,
    progress: Progress | None = None,
    named: Callable[[Any], str] = str,
) -> Generator[tuple[Any, Any], None, None]:
    """Run `task(tile, progress=...)` for every tile on workers; yields (tile, result) in any order.

    A tile whose worker ends or stops is given to another one, at most `ATTEMPTS` times in all. A tile that fails does
    not stop the others; an error that is sure to concern every tile (an invalid argument, a full disk) does. `progress`
    is called with a tile and the fraction of it that is done. `named` writes a tile in messages.
    """
    with contextlib.closing(_pool(task, workers, progress or (lambda _tile, _done: None))) as pool:
        yield from _distribute(pool, tiles, progress, named)


def on_each(task: Task, workers: Workers, most: int) -> list[Any]:
    """The results of `task(i, progress=...)` for i = 0, 1, ..., run at the same time on all workers, or on `most`."""
    with contextlib.closing(_pool(task, workers, lambda _tile, _done: None)) as pool:
        return [value for _, value in _distribute(pool, range(max(1, min(pool.size(), most))), None, str)]


def _pool(task: Task, workers: Workers, progress: Progress) -> Pool:
    if workers.backend == "dask":
        return DaskPool(task, workers.scheduler, progress)
    if workers.backend == "ray":
        return RayPool(task, workers.scheduler, workers.gpu, progress)
    if (workers.count or 1) > 1:
        return LocalPool(task, workers.count or 1, progress)
    return _ThisProcess(task, progress)


def _distribute(
    pool: Pool, tiles: Sequence[Any], progress: Progress | None, named: Callable[[Any], str]
) -> Generator[tuple[Any, Any], None, None]:
    waiting, running, succeeded = deque(tiles), 0, False
    lost: Counter[Any] = Counter()
    failed: dict[Any, Exception] = {}
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
                        f"tile {named(tile)}: {error} (attempt {lost[tile]} of {ATTEMPTS}); it is trained again"
                    )
                    waiting.append(tile)
                    continue
            elif isinstance(error, UsageError) or type(error) is WeightscopeError:
                raise error
            failed[tile] = error
            _log.warning("tile %s failed: %s: %s", named(tile), type(error).__name__, error)
            if not succeeded and len(failed) >= _FAILURES_AT_FIRST:
                raise TilesFailed(failed)
    if failed:
        raise TilesFailed(failed)


class _ThisProcess:
    """A pool of one worker: this process."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self._task, self._progress = task, progress
        self._tile: Any = None

    def size(self) -> int:
        return 1

    def free(self) -> int:
        return int(self._tile is None)

    def start(self, tile: Any) -> None:
        self._tile = tile

    def poll(self) -> list[Ended]:
        tile, self._tile = self._tile, None
        assert tile is not None
        try:
            return [Ended(tile, self._task(tile, progress=lambda done: self._progress(tile, done)))]
        except Exception as error:  # noqa: BLE001 - handed to the caller
            return [Ended(tile, error=error)]

    def close(self) -> None:
        """Nothing runs any more."""
