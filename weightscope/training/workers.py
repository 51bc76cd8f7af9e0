"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

Every backend yields tiles as they finish, raises the errors of tasks, and raises `WorkerDied` if a worker dies. (The
dask backend of joblib hangs in that case, and its ray backend returns results only when all are done, so clusters are
used directly.)
"""

import concurrent.futures
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import joblib
from joblib.externals.loky.process_executor import BrokenProcessPool

from weightscope._util import plugins
from weightscope.errors import UsageError, WeightscopeError

BACKENDS = ("loky", "dask", "ray")

# Long enough for a batch system to restart workers.
PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2
_DIED = "a worker process died, perhaps because memory ran out"

Task = Callable[[int], Any]

# A dask worker may run tasks in threads; they would share torch's global generator and number of threads.
_one_at_a_time = threading.Lock()
_THIS_PROCESS = uuid.uuid4().hex

# Module -> hash of its source when this worker imported it for a task.
_versions: dict[str, str] = {}


class WorkerDied(Exception):
    """A worker process ended without returning a result."""


@dataclass(frozen=True)
class OwnCode:
    """A user's own functions, made known to a worker process.

    Attributes:
        references: the functions of a recipe.
        path: of the launching process, on which their modules are: its working directory and `sys.path`.
        passed: cloudpickle of those of `plugins.passed()`, which cannot be imported.
        process: of the launching process, where there is nothing to do.
        hashes: of the sources of the others, which a worker must have, too.
    """

    references: tuple[str, ...]
    path: tuple[str, ...]
    passed: bytes
    process: str
    hashes: tuple[str, ...] = ()

    @classmethod
    def of(cls, references: Iterable[str]) -> "OwnCode":
        """What another process needs to use these references."""
        references = tuple(references)
        passed = {name: item for name, item in plugins.passed().items() if name in references}
        hashes = tuple(
            "" if name in passed else plugins.source_hash(plugins.imported(name), name) for name in references
        )
        path = (os.getcwd(), *filter(None, sys.path))
        return cls(references, path, cloudpickle.dumps(passed), _THIS_PROCESS, hashes)

    def load(self) -> None:
        """Import the references, unless this is the launching process.

        Raises:
            UsageError: if one cannot be imported, or has another source than in the launching process.
        """
        if not self.references or self.process == _THIS_PROCESS:
            return
        plugins.restore(cloudpickle.loads(self.passed))
        before = list(sys.path)
        sys.path[:] = dict.fromkeys((self.path[0], *before, *self.path))
        try:
            for reference, expected in zip(self.references, self.hashes, strict=True):
                module = sys.modules.get(reference.partition(":")[0])
                if expected and module is not None and _versions.get(module.__name__, expected) != expected:
                    importlib.reload(module)  # a worker outlives the call of `collect` for which it was started
                item = plugins.imported(reference)
                if not expected:
                    continue
                if (found := plugins.source_hash(item, reference)) != expected:
                    raise UsageError(f"{reference}: expected source hash {expected} in a worker, found {found}")
                _versions[reference.partition(":")[0]] = expected
        finally:
            sys.path[:] = before


def spread(
    task: Task, tiles: Sequence[int], *, backend: str, workers: int | None, scheduler: str | None, gpu: bool
) -> Generator[int, None, None]:
    """Run `task(tile)` for every tile on workers; yields each tile when it is finished, in any order.

    Args:
        task: pickled by reference or by cloudpickle.
        tiles: its arguments.
        backend: one of `BACKENDS`.
        workers: number of processes for loky; a cluster has its own.
        scheduler: the cluster's address; required for dask, optional for ray, which otherwise finds or starts one.
        gpu: whether every task needs a GPU.

    Raises:
        WorkerDied: if a worker died.
        UsageError: if the backend is not installed or needs an address.
        WeightscopeError: if the cluster does not respond.
    """
    if backend == "loky":
        yield from _loky(task, tiles, workers or 1)
    elif backend == "dask":
        yield from _dask(task, tiles, scheduler)
    else:
        yield from _ray(task, tiles, scheduler, gpu)


def _run(task: Task, tile: int) -> int:
    with _one_at_a_time:
        task(tile)
    return tile


def _run_quietly(task: Task, tile: int) -> int:
    # Ctrl-C reaches every process of a terminal; only the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _run(task, tile)


def _loky(task: Task, tiles: Sequence[int], workers: int) -> Iterator[int]:
    with joblib.parallel_config("loky", n_jobs=workers, inner_max_num_threads=1):
        # One tile at a time: joblib would otherwise bundle short tasks, and an interrupted bundle is lost as a whole.
        parallel = joblib.Parallel(batch_size=1, return_as="generator_unordered")
        try:
            yield from parallel(joblib.delayed(_run_quietly)(task, tile) for tile in tiles)
        except BrokenProcessPool as error:
            raise WorkerDied(_DIED) from error


def _dask(task: Task, tiles: Sequence[int], scheduler: str | None) -> Iterator[int]:
    distributed = _module("distributed", "dask", "dask[distributed]")
    if scheduler is None:
        raise UsageError("backend dask: expected the address of a scheduler, such as tcp://host:8786, found none")
    try:
        client = distributed.Client(scheduler, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WeightscopeError(
            f"backend dask: cannot connect to the scheduler at {scheduler}: {_line(error)}"
        ) from error
    with client:
        futures = client.map(_run, [task] * len(tiles), tiles, pure=False)
        pending = dict(zip(futures, tiles, strict=True))
        done = distributed.as_completed(futures, loop=client.loop)
        del futures
        try:
            # Results are on disk. Futures are never fetched and released at once: while one is held, dask repeats its
            # task if the worker that keeps it dies.
            for future in _ready(client, done, len(tiles)):
                if future.status != "finished":
                    raise future.exception() or WorkerDied(_DIED)
                yield pending.pop(future)
        except (distributed.KilledWorker, concurrent.futures.CancelledError) as error:
            raise WorkerDied(_DIED) from error
        finally:
            client.cancel(list(pending))


def _ready(client: Any, done: Any, count: int) -> Iterator[Any]:
    """Yield `count` futures as they finish; raises WorkerDied if the cluster has had no worker for too long."""
    last_seen = time.monotonic()
    while count:
        if done.has_ready():
            count -= 1
            last_seen = time.monotonic()
            yield next(done)
            continue
        time.sleep(_POLL_SECONDS)
        if client.nthreads():
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > PATIENCE_SECONDS:
            raise WorkerDied(f"the dask cluster has had no worker for {PATIENCE_SECONDS:.0f} seconds")


def _ray(task: Task, tiles: Sequence[int], scheduler: str | None, gpu: bool) -> Iterator[int]:
    ray = _module("ray", "ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=scheduler, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightscopeError(
                f"backend ray: cannot connect to the cluster at {scheduler}: {_line(error)}"
            ) from error
    remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=0)(_run)
    shared = ray.put(task)
    pending = [remote.remote(shared, tile) for tile in tiles]
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            yield ray.get(done[0])
    except ray.exceptions.WorkerCrashedError as error:
        raise WorkerDied(_DIED) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        for reference in pending:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()


def _module(name: str, backend: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f'backend {backend} is not installed: `pip install "{package}"`') from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
