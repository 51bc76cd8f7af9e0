"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

A task is a function of its tile, so a tile can be given to another worker at any time. The engines start workers and
notice that they end: joblib's loky on this machine (whose processes are started without fork), dask and ray.
"""

import contextlib
import importlib
import logging
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from weightscope._util.checks import choice, count
from weightscope._util.environment import usable_cores, visible_gpus
from weightscope.errors import UsageError, WeightscopeError

_log = logging.getLogger(__name__)

ATTEMPTS = 3  # workers that a tile may lose before it is given up
_FAILURES_AT_FIRST = 3  # failed tiles after which nothing else is tried, if no tile has succeeded
_PENDING = 1000  # tiles that a cluster is given; it may add machines for those that wait
_UNUSED_SECONDS = 300.0  # after which a process that nobody uses ends
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_one_at_a_time = threading.Lock()  # a dask worker may run tasks in threads, which share torch's generator

Submit = Callable[[Any], futures.Future[bytes]]


class WorkerDied(Exception):
    """A worker, or a whole cluster, ended without returning a result."""


class TilesFailed(Exception):
    """Some tiles failed; all others are finished, unless none succeeded or a cluster was lost."""

    def __init__(self, errors: dict[Any, Exception]) -> None:
        super().__init__(f"{len(errors)} tiles failed")
        self.errors = errors


@dataclass(frozen=True)
class Workers:
    """Which workers to use.

    Example:
        >>> covariance_across(Population("million.pop"), workers=Workers("dask", scheduler="tcp://head:8786"))
    """

    backend: str = "loky"  # one of `ENGINES`
    count: int | None = None  # processes of this machine; a cluster has its own number
    scheduler: str | None = None  # the cluster's address; without one, ray finds or starts a cluster
    gpu: bool = False  # whether every task needs one
    devices: tuple[str, ...] = ()  # GPUs of this machine, one for each process: values of CUDA_VISIBLE_DEVICES

    @property
    def many(self) -> bool:
        """Whether they are more than one process."""
        return self.backend != "loky" or self.count != 1

    def on_device(self, device: str, tiles: int) -> "Workers":
        """For some tiles on a device: by default one process per core, or one per GPU ("cuda" is any of them)."""
        if self.backend != "loky":
            return replace(self, gpu=device != "cpu")
        devices = self.devices or (visible_gpus() if device == "cuda" else ())
        number = self.count or len(devices) or (usable_cores() if device == "cpu" else 1)
        number = min(number, len(devices) or number, max(tiles, 1))
        return replace(self, count=number, gpu=device != "cpu", devices=devices[:number])


def chosen_workers(backend: str, workers: Workers | int | None, scheduler: str | None) -> Workers:
    """The workers that arguments of `collect` name, or those that were chosen already."""
    if isinstance(workers, Workers):
        return workers
    choice("backend", backend, tuple(ENGINES))
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: expected none for backend {backend}, whose cluster has its own, found {workers}")
    if scheduler is not None and backend == "loky":
        raise UsageError(f"scheduler: expected none for backend loky, found {scheduler}; give backend dask or ray")
    return Workers(backend, None if workers is None else count("workers", workers), scheduler)


def spread(
    task: Callable[[Any], Any], tiles: Sequence[Any], workers: Workers, named: Callable[[Any], str] = "tile {}".format
) -> Generator[tuple[Any, Any], None, None]:
    """Run `task(tile)` for every tile on workers; yields (tile, result) in any order.

    A tile whose worker dies is given to another one, at most `ATTEMPTS` times in all. When one worker dies, loky ends
    the others as well; on its last attempt, a tile therefore runs by itself. A tile that fails does not stop the
    others; an error that is sure to concern every tile (an invalid argument, a full disk) does. The caller may add
    to `tiles` if it is a deque. `named` writes a tile in messages.
    """
    waiting = tiles if isinstance(tiles, deque) else deque(tiles)
    running = dict[futures.Future[bytes], Any]()
    lost, failed, succeeded = Counter[Any](), dict[Any, Exception](), False
    alone = set[Any]()  # tiles before their last attempt
    here = workers.backend == "loky"  # clusters give the tiles of a dead worker to others by themselves
    most, attempts = (workers.count or 1, ATTEMPTS) if here else (_PENDING, 1)
    with ENGINES[workers.backend](task, workers, running) as submit:
        while waiting or running:
            while waiting and len(running) < (1 if alone else most):
                tile = waiting.popleft()
                running[submit(tile)] = tile
            for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                tile = running.pop(future)
                try:
                    value, error = pickle.loads(future.result())
                except futures.CancelledError:
                    raise TilesFailed({tile: WorkerDied(f"the {workers.backend} cluster was lost")}) from None
                except Exception as died:  # noqa: BLE001 - each engine has its own; a task returns its errors
                    error = WorkerDied(f"its worker died, perhaps because memory ran out ({type(died).__name__})")
                    lost[tile] += 1
                    if lost[tile] < attempts:
                        _log.warning("%s: %s; it is run again", named(tile), error)
                        if lost[tile] == attempts - 1:
                            alone.add(tile)
                            waiting.appendleft(tile)
                        else:
                            waiting.append(tile)
                        continue
                alone.discard(tile)
                if error is None:
                    succeeded = True
                    yield tile, value
                    continue
                if isinstance(error, UsageError) or type(error) is WeightscopeError:
                    raise error
                failed[tile] = error
                _log.warning("%s failed: %s: %s", named(tile), type(error).__name__, error)
                if not succeeded and len(failed) >= _FAILURES_AT_FIRST:
                    raise TilesFailed(failed)
    if failed:
        raise TilesFailed(failed)


def _attempt(task: bytes, tile: bytes) -> bytes:
    """In a worker, the value and the error of a task, pickled: arrays that clusters send may be read-only."""
    with _one_at_a_time:
        try:
            return pickle.dumps((cloudpickle.loads(task)(pickle.loads(tile)), None), protocol=5)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            with contextlib.suppress(Exception):
                pickled = pickle.dumps((None, error))
                pickle.loads(pickled)
                return pickled
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))


def _end_with(parent: int) -> None:
    """End this worker when the process that started it has been killed, which loky does not notice."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _loky(task: Any, workers: Workers, running: Collection[Any]) -> Iterator[Submit]:
    """Processes of this machine, which later calls use again; with GPUs one for each, which ends with the call."""
    from joblib.externals import loky  # a quarter of a second
    from joblib.externals.loky.backend import resource_tracker

    resource_tracker.ensure_running()  # or `submit` would start it, which unblocks interrupts
    warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)  # loky starts another one
    environment, pickled = {**os.environ, **dict.fromkeys(_THREADS, "1")}, cloudpickle.dumps(task)
    settings = {"initializer": _end_with, "initargs": (os.getpid(),), "timeout": _UNUSED_SECONDS}
    free, with_gpu = queue.SimpleQueue[str](), dict[str, Any]()
    for device in workers.devices or [""] * (workers.count or 1):
        free.put(device)

    def processes(device: str) -> Any:
        if not device:  # new ones if one has died
            return loky.get_reusable_executor(workers.count or 1, env=environment, **settings)
        if device not in with_gpu:  # torch reads the variable when it is imported
            visible = environment | {"CUDA_VISIBLE_DEVICES": device}
            with_gpu[device] = loky.ProcessPoolExecutor(1, env=visible, **settings)
        return with_gpu[device]

    def submit(tile: Any) -> futures.Future[bytes]:
        device = free.get()

        def ended(future: futures.Future[bytes]) -> None:
            if future.exception() is not None:
                with_gpu.pop(device, None)
            free.put(device)

        # Ctrl-C reaches every process of a terminal; a blocked signal stays blocked in processes that are started now
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future: futures.Future[bytes] = processes(device).submit(_attempt, pickled, cloudpickle.dumps(tile))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        future.add_done_callback(ended)
        return future

    try:
        yield submit
    finally:
        for each in [*with_gpu.values(), *([processes("")] if running and not workers.devices else [])]:
            each.shutdown(kill_workers=True)


@contextlib.contextmanager
def _dask(task: Any, workers: Workers, running: Collection[Any]) -> Iterator[Submit]:
    """The workers of a dask cluster, those included that join later."""
    with _connecting(workers):
        distributed = importlib.import_module("distributed")
        if workers.scheduler is None:
            raise UsageError("backend dask: expected the address of a scheduler, such as tcp://host:8786, found none")
        client = distributed.Client(workers.scheduler, set_as_default=False)
    needed = {"GPU": 1} if workers.gpu else None
    executor, pickled = client.get_executor(retries=ATTEMPTS - 1, resources=needed, pure=False), cloudpickle.dumps(task)
    try:
        yield lambda tile: executor.submit(_attempt, pickled, cloudpickle.dumps(tile))
    finally:
        if client.status == "running":
            executor.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):  # of a scheduler that is gone
            client.close(timeout=5)


@contextlib.contextmanager
def _ray(task: Any, workers: Workers, running: Collection[Any]) -> Iterator[Submit]:
    """The workers of a ray cluster; without an address, of the one that ray finds or starts."""
    with _connecting(workers):
        ray = importlib.import_module("ray")
        if ours := not ray.is_initialized():
            ray.init(address=workers.scheduler, log_to_driver=False)
    pickled = ray.put(cloudpickle.dumps(task))
    remote = ray.remote(num_cpus=1, num_gpus=int(workers.gpu), max_retries=ATTEMPTS - 1)(_attempt)
    try:
        yield lambda tile: remote.remote(pickled, cloudpickle.dumps(tile)).future()
    finally:
        for future in running:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(future.object_ref, force=True)
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _connecting(workers: Workers) -> Iterator[None]:
    name = workers.backend
    try:
        yield
    except ImportError as error:
        what = f'`pip install ".[{name}]"` in the clone of weightscope'
        raise UsageError(f"backend {name} is not installed: {what}") from error
    except UsageError:
        raise
    except Exception as error:  # some of what ray raises is a plain Exception
        where, why = workers.scheduler or "a cluster", " ".join(str(error).split())
        raise WeightscopeError(f"backend {name}: cannot connect to {where}: {why}") from error


ENGINES: dict[str, Any] = {"loky": _loky, "dask": _dask, "ray": _ray}
