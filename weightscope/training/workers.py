"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

Every backend gives tiles as they are finished, raises what a task raises, and turns the death of a worker into
`WorkerDied`, never into a wait without end. (joblib's own dask backend waits for ever then, and its ray backend
hands results back only when all are there; so clusters are asked directly.)
"""

import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import joblib
from joblib.externals.loky.process_executor import BrokenProcessPool

from weightscope.errors import UsageError, WeightscopeError

BACKENDS = ("loky", "dask", "ray")

# Long enough for a batch system to start workers anew.
PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2
_DIED = "a worker process died, perhaps because memory ran out"

Task = Callable[[int], Any]

# A dask worker may run tasks in threads; they would share torch's global generator and number of threads.
_one_at_a_time = threading.Lock()


class WorkerDied(Exception):
    """A worker process ended without an answer; the message says so."""


def spread(
    task: Task, tiles: Sequence[int], *, backend: str, workers: int | None, scheduler: str | None, gpu: bool
) -> Iterator[int]:
    """Run `task(tile)` for every tile on workers; gives each tile when it is finished, in any order.

    Args:
        task: pickled by reference or by cloudpickle.
        tiles: what it is called with.
        backend: one of `BACKENDS`.
        workers: processes of this machine; a cluster has its own.
        scheduler: the cluster's address; dask needs one, ray looks for one or starts its own without.
        gpu: every task needs a GPU.

    Raises:
        WorkerDied: if a worker did.
        UsageError: if the backend is not installed or lacks an address.
        WeightscopeError: if the cluster does not answer.
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
    # Ctrl-C reaches every process of a terminal; the parent alone says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _run(task, tile)


def _loky(task: Task, tiles: Sequence[int], workers: int) -> Iterator[int]:
    with joblib.parallel_config("loky", n_jobs=workers, inner_max_num_threads=1):
        # One tile at a time: joblib would else bundle short tasks, and a bundle is lost as a whole.
        parallel = joblib.Parallel(batch_size=1, return_as="generator_unordered")
        try:
            yield from parallel(joblib.delayed(_run_quietly)(task, tile) for tile in tiles)
        except BrokenProcessPool as error:
            raise WorkerDied(_DIED) from error


def _dask(task: Task, tiles: Sequence[int], scheduler: str | None) -> Iterator[int]:
    distributed = _module("distributed", "dask")
    if scheduler is None:
        raise UsageError("backend dask: give the address of its scheduler, such as tcp://host:8786")
    try:
        client = distributed.Client(scheduler, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WeightscopeError(f"backend dask: no scheduler answers at {scheduler}: {_line(error)}") from error
    with client:
        futures = client.map(_run, [task] * len(tiles), tiles, pure=False)
        pending = dict(zip(futures, tiles, strict=True))
        done = distributed.as_completed(futures, loop=client.loop)
        del futures
        try:
            # What was asked for is on the disk. Results are never fetched, and each is let go at once: while one is
            # held, dask runs its task again when the worker that keeps it dies.
            for future in _ready(client, done, len(tiles)):
                if future.status != "finished":
                    raise future.exception() or WorkerDied(_DIED)
                yield pending.pop(future)
        except (distributed.KilledWorker, concurrent.futures.CancelledError) as error:
            raise WorkerDied(_DIED) from error
        finally:
            client.cancel(list(pending))


def _ready(client: Any, done: Any, count: int) -> Iterator[Any]:
    """`count` futures as they are done. A cluster that lost all its workers would let one wait for ever."""
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
    ray = _module("ray", "ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=scheduler, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightscopeError(f"backend ray: no cluster answers at {scheduler}: {_line(error)}") from error
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


def _module(name: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"backend {extra}: install it with `pip install weightscope[{extra}]`") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
