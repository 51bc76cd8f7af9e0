"""Run one function over many tiles on workers: processes of this machine, a dask cluster, or ray.

A task is a function of its tile and its result is a file, so a tile can be given to another worker at any time. Pools
notice what ends a worker: a kill, a machine that goes down, a process that is stopped or hangs. A cluster's own retries
would not do: they count a death against every tile of a worker, or do not notice processes that are stopped.

Processes of this machine are started by joblib's loky: without fork, and without `if __name__ == "__main__"` in
scripts. Each has a pipe of its own, so if one dies, it is known which tile it had. A shared executor does not notice
processes that are stopped, and leaves them behind when this process is killed.
"""

import contextlib
import heapq
import importlib
import itertools
import logging
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from weightscope._util.checks import choice, count
from weightscope._util.environment import usable_cores, visible_gpus
from weightscope._util.threads import one_thread
from weightscope._util.trust import trusted, trusting
from weightscope.errors import UsageError, WeightscopeError

_log = logging.getLogger(__name__)

ATTEMPTS = 3  # workers that a tile may lose before it is given up
_DEVICE_FAILURES = 2  # workers that a GPU may lose in a row before it is left alone: less than a tile may lose
_FAILURES_AT_FIRST = 3  # failed tiles after which nothing else is tried, if no tile has succeeded
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
_WAITING = 4  # results of each worker that may wait for an earlier one
_UNUSED_SECONDS = 300.0  # after which a process that nobody uses ends
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)

T = TypeVar("T")
Task = Callable[..., Any]
Progress = Callable[[Any, float], None]
Named = Callable[[Any], str]
_tile = "tile {}".format

# A dask worker may run tasks in threads; they would share torch's global generator and number of threads.
_one_at_a_time = threading.Lock()

# Processes that have nothing to do: starting one takes seconds, and a session may call `collect` often.
_spare: list["_Process"] = []
os.register_at_fork(after_in_child=_spare.clear)


class WorkerDied(Exception):
    """A worker ended or stopped without returning a result; the message says how."""


class DeviceFailed(WorkerDied, WeightscopeError):
    """The worker's GPU failed, or has no memory left; the process cannot be used again."""


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


class Pool:
    """Workers, each of which runs one tile at a time; this one has this process as its only worker."""

    def __init__(self, task: Task, progress: Progress) -> None:
        self._task, self._progress = task, progress
        self._waiting: list[Any] = []

    def size(self) -> int:
        """The number of workers."""
        return 1

    def free(self) -> int:
        """The number of tiles that can be started now."""
        return 1 - len(self._waiting)

    def start(self, tile: Any) -> None:
        """Give a tile to a free worker."""
        self._waiting.append(tile)

    def poll(self) -> list[Ended]:
        """Wait a moment; returns the tiles that have ended."""
        tile = self._waiting.pop()
        try:
            return [Ended(tile, self._task(tile, progress=lambda done: self._progress(tile, done)))]
        except Exception as error:  # noqa: BLE001 - handed to the caller
            return [Ended(tile, error=error)]

    def close(self) -> None:
        """Stop what still runs."""


@dataclass(frozen=True)
class Workers:
    """Which workers to use.

    Example:
        >>> covariance(Population("million.pop"), workers=Workers("dask", scheduler="tcp://head:8786"))
    """

    backend: str = "loky"  # one of `BACKENDS`
    count: int | None = None  # processes of this machine; 1: this one. A cluster has its own number
    scheduler: str | None = None  # the cluster's address; without one, ray finds or starts a cluster
    gpu: bool = False  # whether every task needs one
    devices: tuple[str, ...] = ()  # GPUs of this machine, one for each process: values of CUDA_VISIBLE_DEVICES

    @property
    def many(self) -> bool:
        """Whether they are not this process alone."""
        return self != Workers(count=1)

    def on_device(self, device: str, tiles: int) -> "Workers":
        """For some tiles on a device: by default one process per core, or one per GPU ("cuda" is any of them)."""
        number, devices = self.count, self.devices
        if self.backend == "loky":
            devices = devices or (visible_gpus() if device == "cuda" else ())
            number = number or len(devices) or (usable_cores() if device == "cpu" else 1)
            number = min(number, max(tiles, 1))
        return replace(self, count=number, gpu=device != "cpu", devices=devices)


def chosen_workers(backend: str, workers: Workers | int | None, scheduler: str | None) -> Workers:
    """The workers that arguments of `collect` name, or those that were chosen already."""
    if isinstance(workers, Workers):
        return workers
    choice("backend", backend, BACKENDS)
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: expected none for backend {backend}, whose cluster has its own, found {workers}")
    if scheduler is not None and backend == "loky":
        raise UsageError(f"scheduler: expected none for backend loky, found {scheduler}; give backend dask or ray")
    return Workers(backend, None if workers is None else count("workers", workers), scheduler)


def spread(
    task: Task, tiles: Sequence[Any], workers: Workers, progress: Progress | None = None, named: Named = _tile
) -> Generator[tuple[Any, Any], None, None]:
    """Run `task(tile, progress=...)` for every tile on workers; yields (tile, result) in any order.

    A tile whose worker ends or stops is given to another one, at most `ATTEMPTS` times in all. A tile that fails does
    not stop the others; an error that is sure to concern every tile (an invalid argument, a full disk) does. `progress`
    is called with a tile and the fraction of it that is done. `named` writes a tile in messages.
    """
    with contextlib.closing(_pool(task, workers, progress or _silent)) as pool:
        yield from _distribute(pool, tiles, progress or _silent, named)


def in_order(
    task: Callable[[Any], T], items: Sequence[Any], names: Sequence[str], workers: Workers | int | None
) -> Generator[T | WeightscopeError, None, None]:
    """`task(item)` of each item, in their order; a `WeightscopeError` takes the place of a result that it prevents.

    Tasks run on one thread, in this process's folder and with its trust, so that results do not depend on the workers.
    A few of them wait for earlier ones, however many items there are. `names` of the items are for messages.

    Raises:
        WeightscopeError: if the workers of an item are lost, or a cluster.
    """
    chosen = chosen_workers("loky", workers, None).on_device("cpu", len(items))
    if not chosen.many:
        yield from map(partial(_in_place, task, None, trusted()), items)
        return
    one = partial(_in_place, task, os.getcwd(), trusted())
    tiles = ((i, cloudpickle.dumps(item)) for i, item in enumerate(items))
    waiting = deque(itertools.islice(tiles, _WAITING * (chosen.count or 16)))
    held, at = dict[int, bytes](), 0

    def named(tile: tuple[int, bytes]) -> str:
        return names[tile[0]]

    try:
        with contextlib.closing(spread(partial(_sent, one), waiting, chosen, named=named)) as results:
            for (i, _), value in results:
                held[i] = value
                while at in held:
                    yield pickle.loads(held.pop(at))
                    at += 1
                    waiting.extend(itertools.islice(tiles, 1))
    except TilesFailed as error:
        tile, why = next(iter(error.errors.items()))
        raise WeightscopeError(f"{named(tile)}: {why}; run the same command again, with fewer workers") from why
    except ClusterLost as error:
        raise WeightscopeError(f"{error}; run the same command again") from error


def _in_place(task: Callable[[Any], T], folder: str | None, trust: bool, item: Any) -> T | WeightscopeError:
    try:
        with contextlib.ExitStack() as stack, trusting(trust), one_thread():
            if folder is not None:
                if not os.path.isdir(folder):  # on a machine of a cluster: a relative path must not name another file
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                stack.enter_context(contextlib.chdir(folder))
            return task(item)
    except WeightscopeError as error:
        return error


def _sent(one: Callable[[Any], Any], tile: tuple[int, bytes], **_: Any) -> bytes:
    """A result as bytes: arrays that clusters return may be read-only."""
    return pickle.dumps(one(pickle.loads(tile[1])), protocol=5)


def on_each(task: Task, workers: Workers, most: int) -> list[Any]:
    """The results of `task(i, progress=...)` for i = 0, 1, ..., run at the same time on all workers, or on `most`."""
    with contextlib.closing(_pool(task, workers, _silent)) as pool:
        return [value for _, value in _distribute(pool, range(max(1, min(pool.size(), most))), _silent, _tile)]


def makespan(tasks: Iterable[float], free: Sequence[float]) -> float:
    """When the last of some tasks ends, each given to the worker that is free first; `free` is when each worker is."""
    busy = sorted(free)
    for duration in tasks:
        heapq.heapreplace(busy, busy[0] + duration)
    return max(busy)


def _silent(_tile: Any, _done: float) -> None:
    """No progress is shown."""


def _pool(task: Task, workers: Workers, progress: Progress) -> Pool:
    if workers.backend == "dask":
        return DaskPool(task, workers.scheduler, workers.gpu, progress)
    if workers.backend == "ray":
        return RayPool(task, workers.scheduler, workers.gpu, progress)
    number = workers.count or 1
    return LocalPool(task, number, workers.devices, progress) if number > 1 else Pool(task, progress)


def _distribute(
    pool: Pool, tiles: Sequence[Any], progress: Progress, named: Named
) -> Generator[tuple[Any, Any], None, None]:
    waiting = tiles if isinstance(tiles, deque) else deque(tiles)  # the caller may add to it
    running, succeeded = 0, False
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
            progress(tile, 0.0)
            lost[tile] += isinstance(error, WorkerDied)
            if isinstance(error, WorkerDied) and lost[tile] < ATTEMPTS:
                again = f"{error} (attempt {lost[tile]} of {ATTEMPTS}); it is run again"
                _log.warning("%s: %s", named(tile), again)
                waiting.appendleft(tile)  # results of others may have to wait for it
                continue
            if isinstance(error, UsageError) or type(error) is WeightscopeError:
                raise error
            failed[tile] = error
            _log.warning("%s failed: %s: %s", named(tile), type(error).__name__, error)
            if not succeeded and len(failed) >= _FAILURES_AT_FIRST:
                raise TilesFailed(failed)
    if failed:
        raise TilesFailed(failed)


def run(task: Task, tile: Any, report: Callable[[float | None], None], hangs: float) -> Any:
    """Run a task in a worker; `report` is called with the fraction done, if it is known, every second: the heartbeat.

    The process ends if the task uses less than 1 % of the processor for `hangs` seconds in which the process runs.
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


class LocalPool(Pool):
    """Processes of this machine; if there are GPUs, each has one of them, and several may have the same."""

    def __init__(self, task: Task, count: int, devices: Sequence[str], progress: Progress) -> None:
        super().__init__(task, progress)
        self._count, self._pickled = count, cloudpickle.dumps(task)
        self._busy: list[_Process] = []
        self._idle = list(itertools.islice(itertools.cycle(devices or [""]), count))  # devices of idle workers
        self._lost: Counter[str] = Counter()  # workers that a device has lost since it last finished a tile

    def size(self) -> int:
        return self._count

    def free(self) -> int:
        return len(self._idle)

    def start(self, tile: Any) -> None:
        device, worker = self._idle.pop(0), None
        for other in [each for each in _spare if each.device == device]:
            _spare.remove(other)
            if other.process.is_alive() and other.environment == os.environ:  # credentials may have been set since
                worker = other
                break
            other.end()
        worker = worker or _Process(device)
        self._busy.append(worker)
        worker.give(self._pickled, tile)

    def poll(self) -> list[Ended]:
        wait([w.connection for w in self._busy] + [w.process.sentinel for w in self._busy], _POLL_SECONDS)
        ended = [(worker, found) for worker in self._busy if (found := worker.listen(self._progress)) is not None]
        for worker, found in ended:
            self._busy.remove(worker)
            if isinstance(found.error, WorkerDied):
                worker.end()
                self._lost[worker.device] += 1
                self._idle.append(worker.device)
            else:
                _spare.append(worker)
                self._lost[worker.device] = 0
                self._idle.insert(0, worker.device)
            self._leave_alone(worker.device, found.error)
        return [found for _, found in ended]

    def _leave_alone(self, device: str, error: Exception | None) -> None:
        """Do not use a device again that has failed several times in a row, unless it is the last one."""
        others = {each for each in self._idle if each != device} | {each.device for each in self._busy}
        if self._lost[device] >= _DEVICE_FAILURES and others - {device}:
            self._idle = [each for each in self._idle if each != device]
            _log.warning("GPU %s is not used again in this run: %s", device, error)

    def close(self) -> None:
        """Stop what still runs; processes that have nothing to do are kept, unless they hold a GPU's memory."""
        with_gpu = [worker for worker in _spare if worker.device]
        _spare[:] = [worker for worker in _spare if not worker.device]
        for worker in self._busy + with_gpu:
            worker.end()


class _Process:
    """One process, and its last message."""

    def __init__(self, device: str) -> None:
        from joblib.externals.loky.backend import resource_tracker  # a quarter of a second
        from joblib.externals.loky.backend.process import LokyProcess

        self.device, self.environment = device, dict(os.environ)
        self.connection, theirs = Pipe()
        environment = _ONE_THREAD | ({"CUDA_VISIBLE_DEVICES": device} if device else {})  # before torch is imported
        self.process = LokyProcess(target=_serve, args=(theirs,), daemon=True, env=environment)
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
            code = self.process.exitcode
            how = f"its worker process died with exit code {code}"
            if code == HUNG:
                how = f"its worker did nothing for {HANGS_SECONDS:.0f} seconds"
            elif code is not None and code < 0:
                why = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
                how = f"its worker process died of {signal.Signals(-code).name}{why}"
            return Ended(self._tile, error=WorkerDied(how))
        if self._silent > self._limit:
            return Ended(self._tile, error=WorkerDied(f"its worker gave no sign of life for {self._limit:.0f} seconds"))
        return None

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()


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
            kind, value = "value", None
            try:
                value = run(cloudpickle.loads(task), tile, report, hangs)
            except Exception as error:  # noqa: BLE001 - raised in the parent
                kind, value = "error", error
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:  # noqa: BLE001 - whatever pickling raises
                    value = RuntimeError(f"{type(error).__name__}: {error}")
            send(kind, tile, value)


_LOOK_SECONDS = 1.0
_DASK_POLL_SECONDS, _RAY_POLL_SECONDS = 0.2, 0.5
_FETCH_SECONDS = 30.0
_ANSWERING = 5.0  # seconds within which a scheduler that works has answered
_PROGRESS = "weightscope-progress"
_PENDING = 1000  # tiles that ray holds; it adds machines for those that wait


class DaskPool(Pool):
    """The `Pool` of the worker processes of a dask cluster, those included that join later.

    Each is given one tile at a time by name, so that a tile is known to be lost when its worker is.
    """

    def __init__(self, task: Task, scheduler: str | None, gpu: bool, progress: Progress) -> None:
        distributed = _package("distributed", "dask")
        if scheduler is None:
            raise UsageError("backend dask: expected the address of a scheduler, such as tcp://host:8786, found none")
        with _connecting(f"dask: cannot connect to the scheduler at {scheduler}", OSError, ValueError):
            client = distributed.Client(scheduler, set_as_default=False)
        super().__init__(task, progress)
        self._client, self._scheduler = client, scheduler
        self._resources = {"GPU": 1} if gpu else None
        self._running: dict[str, tuple[Any, Any]] = {}  # address of a worker -> tile, future
        self._heartbeats: dict[str, tuple[float, float]] = {}  # address -> its last heartbeat, and when it was new
        self._last_heartbeat = time.monotonic()
        self._lookout = _Lookout(lambda: client.scheduler_info(n_workers=-1)["workers"])
        client.subscribe_topic(_PROGRESS, lambda event: progress(*event[1]))

    def size(self) -> int:
        return len(self._usable(self._client.scheduler_info(n_workers=-1)["workers"]))

    def free(self) -> int:
        return len(self._idle())

    def start(self, tile: Any) -> None:
        address = self._idle()[0]
        here: dict[str, Any] = {"workers": [address], "allow_other_workers": False, "resources": self._resources}
        future = self._client.submit(_run_on_dask, self._task, tile, HANGS_SECONDS, pure=False, **here)
        self._running[address] = tile, future

    def poll(self) -> list[Ended]:
        time.sleep(_DASK_POLL_SECONDS)
        alive = self._alive()
        limit = LOST_SECONDS
        silent = time.monotonic() - self._last_heartbeat  # while it reconnects, the client repeats what it knew
        away = self._client.status != "running" and silent > limit
        if self._lookout.age() > limit or self._client.status == "closed" or away:
            raise ClusterLost(f"the dask scheduler at {self._scheduler} has not answered for {limit:.0f} seconds")
        if not self._heartbeats:  # workers that are still to start
            limit = START_SECONDS
        if silent - self._lookout.age() > limit:  # as long as the scheduler has answered
            kind = "worker with the resource GPU" if self._resources else "worker"
            raise ClusterLost(f"no {kind} of the dask cluster has responded for {limit:.0f} seconds")
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
        now, found = time.monotonic(), self._usable(self._lookout.latest or {})
        for address, info in found.items():
            if self._heartbeats.get(address, (None,))[0] != info["last_seen"]:
                self._heartbeats[address] = info["last_seen"], now
                self._last_heartbeat = now
        return {a for a in found if now - self._heartbeats[a][1] < SILENT_SECONDS}

    def _usable(self, found: dict[str, Any]) -> dict[str, Any]:
        """The workers that have a GPU if tiles need one."""
        return {a: info for a, info in found.items() if not self._resources or info["resources"].get("GPU", 0) >= 1}

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

    return run(task, tile, report, hangs)


class RayPool(Pool):
    """The `Pool` of a ray cluster; without an address, of the one that ray finds or starts.

    Ray queues the tiles and notices workers that die. It does not notice processes that are stopped, so tasks send
    heartbeats to an actor, which keeps the time of the last one of each tile.
    """

    def __init__(self, task: Task, scheduler: str | None, gpu: bool, progress: Progress) -> None:
        ray = _package("ray", "ray")
        self._ours = not ray.is_initialized()
        if self._ours:  # some of what ray raises is a plain Exception
            with _connecting(f"ray: cannot connect to the cluster at {scheduler or 'this machine'}", Exception):
                ray.init(address=scheduler, log_to_driver=False)
        super().__init__(ray.put(task), progress)
        self._ray = ray
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
        future = self._remote.remote(self._task, tile, self._board, attempt, HANGS_SECONDS)
        self._pending[future] = tile, attempt

    def poll(self) -> list[Ended]:
        ready, _ = self._ray.wait(list(self._pending), timeout=_RAY_POLL_SECONDS)
        ended = [self._result(self._pending.pop(future)[0], future) for future in ready]
        resources, beats = self._lookout.latest or {}, self._heard.latest or {}
        now = time.monotonic()
        if self._lookout.age() > LOST_SECONDS:
            raise ClusterLost(f"the ray cluster has not answered for {LOST_SECONDS:.0f} seconds")
        if resources.get(self._kind, 0) >= 1:
            self._seen = now
        if now - self._seen > LOST_SECONDS:
            raise ClusterLost(f"the ray cluster has had no {self._kind} for {LOST_SECONDS:.0f} seconds")
        for future, (tile, attempt) in list(self._pending.items()):
            if attempt in beats:
                silent, done = beats[attempt]
                self._beat[attempt] = now - silent
                if done is not None:
                    self._progress(tile, done)
            # also if the board died and forgot it; 0 for a tile in the queue
            silent = now - self._beat.get(attempt, now)
            if silent > SILENT_SECONDS:
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
        return run(task, tile, lambda done: board.beat.remote(attempt, done), hangs)
    finally:
        board.forget.remote(attempt)


def _package(name: str, backend: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f'`pip install ".[{backend}]"` in the clone of weightscope'
        raise UsageError(f"backend {backend} is not installed: {what}") from error


@contextlib.contextmanager
def _connecting(what: str, *expected: type[Exception]) -> Iterator[None]:
    try:
        yield
    except expected as error:
        raise WeightscopeError(f"backend {what}: {' '.join(str(error).split())}") from error


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
        """Seconds since the last answer."""
        return time.monotonic() - self._heard

    def stop(self) -> None:
        self._over.set()
