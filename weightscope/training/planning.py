"""`plan`: what training a population takes, measured on the workers that would do it."""

import contextlib
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightscope._util.checks import number
from weightscope._util.environment import available_memory, usable_cores
from weightscope._util.remote import is_remote, is_there
from weightscope._util.results import Result, duration
from weightscope._util.workers import Workers, chosen_workers, on_each, spread
from weightscope.data.task import Source
from weightscope.errors import WeightscopeError
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.shards import expected_bytes
from weightscope.recipe import Recipe, TrainingConfig
from weightscope.training.devices import current, one_thread
from weightscope.training.engine import TileRun
from weightscope.training.kernels.functions import Kernels
from weightscope.training.network_check import settings
from weightscope.training.request import Request, timed

T = TypeVar("T")
_TIMED_SECONDS, _MOST_STEPS = 0.5, 64  # of steps on each worker
_BENCH_SECONDS = 4.0  # of steps of all kinds of tiles of a benchmark
_FIRST = {"cpu": 1, "cuda": 3}  # steps that are not timed: they compile, allocate, and record a graph
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage, in bytes


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What remains to be trained of a population, how long that takes, and what limits it."""

    path: str
    networks: int
    tile: int
    tiles: int  # of the whole population
    done: int  # tiles that are trained already
    files: int  # a shard and its hash for each tile, and the manifest
    bytes_on_disk: int  # expected size of all shards
    disk_free: int | None  # bytes; None for an object store
    workers: int  # how many were timed, all at the same time
    device: str
    tile_seconds: tuple[float, ...]  # expected, of one tile on each worker: start, all epochs and evaluations
    quiet: float  # times these, those of workers that nothing else slows down
    alone_seconds: float  # the same of one worker without the others
    write_seconds: float | None  # measured, of a file as large as a shard; None for an object store
    memory: int  # bytes that the largest worker took, of its GPU if it has one
    memory_free: int | None  # bytes for all workers before they began; None where it is that of other machines
    hours: float  # expected, until all tiles are trained
    price: float | None = None  # of a worker's hour
    left = (0, 1)

    @property
    def worker_hours(self) -> float:
        """Of all workers until the last tile is trained."""
        return self.workers * self.hours

    @property
    def cost(self) -> float | None:
        """The price of all worker-hours."""
        return None if self.price is None else self.price * self.worker_hours

    @property
    def limits(self) -> dict[str, float]:
        """For each of what workers share, the number of workers that it has room for, and the disk's of networks."""
        each = sum(self.tile_seconds) / len(self.tile_seconds)
        found = {} if not self.write_seconds else {"writing, workers": each / self.write_seconds}
        if self.memory_free is not None:
            found["memory, workers"] = self.memory_free / self.memory
        if self.disk_free is not None:
            found["disk, networks"] = self.disk_free * self.networks / self.bytes_on_disk
        return {name: math.floor(value) for name, value in found.items()}

    def summary(self) -> str:
        left = duration(3600 * self.hours)
        return f"{self.path}: {self.tiles - self.done} of {self.tiles} tiles to train, about {left}"

    def rows(self) -> list[dict[str, Any]]:
        seconds = sorted(self.tile_seconds)
        at_once = " to ".join(dict.fromkeys(f"{each:,.3g}" for each in (seconds[0], seconds[-1])))
        unit = "GPU-hours" if self.device.startswith("cuda") else "core-hours"
        values = {
            "networks": f"{self.networks:,}",
            "tiles": f"{self.tiles:,} of {self.tile} networks each, {self.done:,} done",
            "files": f"{self.files:,}",
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "workers": self.workers,
            "seconds for a tile": f"{at_once}; one worker alone {self.alone_seconds:,.3g}",
            "memory of a worker": f"{self.memory / 2**30:,.2f} GiB",
            unit: f"{self.worker_hours:,.3g}",
            "time left": duration(3600 * self.hours),
            "time left without other load": duration(3600 * self.quiet * self.hours),
        }
        if self.cost is not None:
            values["cost"] = f"{self.cost:,.2f} at {self.price:,g} for a worker-hour"
        values |= {f"room for: {name}": f"{most:,}" for name, most in self.limits.items()}
        return [{"quantity": name, "value": value} for name, value in values.items()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worker_hours": self.worker_hours, "cost": self.cost, "limits": self.limits}

    def notes(self) -> list[str]:
        left = (self.tiles - self.done) * self.tile
        needed = {"writing, workers": self.workers, "memory, workers": self.workers, "disk, networks": left}
        return [
            *(
                f"too little room: {name}: {most:,} of {needed[name]:,}"
                for name, most in self.limits.items()
                if most < needed[name]
            ),
            "measured: one worker, and then all at the same time, trained tile 0 for a few steps and evaluated it; "
            "nothing was kept",
        ]


def plan(
    recipe: Recipe | Mapping[str, Any],
    path: str | Path,
    *,
    networks: int | None = None,
    workers: int | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    price: float | None = None,
) -> Plan:
    """Estimate what `collect` with the same arguments would take; trains and writes nothing.

    One worker, and then every worker at the same time, trains a tile for a few steps: workers share caches and memory
    bandwidth. On a CPU the time of the processor is measured, and the share of one that each worker got.

        seconds of a tile = (start + epochs (steps per epoch x seconds per step)
                             + evaluations x seconds per evaluation) / share
        hours = longest of the workers' shares of the tiles, which are given to whichever is free
        cost = price x workers x hours

    `price` is that of an hour of one worker. The other arguments and the errors are those of `collect`, and TilesFailed
    if no worker could be timed.

    Example:
        >>> print(plan(Recipe.load("digits-convnext"), "digits.pop", networks=10_000, workers=2).text())
    """
    price = None if price is None else number("price", price, least=0)
    chosen = chosen_workers(backend, workers, scheduler)
    request = Request.of(recipe, path, networks=networks, data=data, device=device, cluster=backend != "loky")
    manifest, done = request.manifest, 0
    if is_there(request.path / manifests.NAME):
        manifests.match(request.path, manifests.read(request.path), manifest)
        done = shards.tiles_done(request.path, manifest)
    size, on = expected_bytes(manifest), chosen.on_device(request.device, manifest.tiles)
    disk, writing = (None, None) if is_remote(request.path) else _disk(request.path, size // manifest.tiles)
    memory = None if backend != "loky" else _memory(request.device, len(set(on.devices[: on.count])) or 1)
    task = partial(_time, [request], _TIMED_SECONDS)
    (alone,) = costs = on_each(task, replace(on, count=1), 1)
    if on.count != 1:
        costs = on_each(task, on, manifest.tiles)
    seconds = tuple(cost.seconds(request.recipe.training) for cost in costs)
    return Plan(
        path=str(path),
        networks=manifest.networks,
        tile=manifest.tile,
        tiles=manifest.tiles,
        done=done,
        files=2 * manifest.tiles + 1,
        bytes_on_disk=size,
        disk_free=disk,
        workers=len(seconds),
        device=request.device,
        tile_seconds=seconds,
        quiet=quiet(costs, on),
        alone_seconds=alone.seconds(request.recipe.training),
        write_seconds=writing,
        memory=max(cost.memory for cost in costs),
        memory_free=memory,
        hours=_until_finished(manifest.tiles - done, seconds) / 3600,
        price=price,
    )


def _disk(path: Path, size: int) -> tuple[int, float]:
    """Free bytes where a population will be, and the seconds that a file of some size takes, which is removed."""
    folder = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            return shutil.disk_usage(folder).free, time.perf_counter() - begun
    except OSError as error:
        raise WeightscopeError(
            f"cannot write in {folder}: {error.strerror}; change permissions or free space"
        ) from error


def _memory(device: str, gpus: int) -> int:
    if device != "cuda":
        return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_memory()
    seen = torch.cuda.device_count()  # one MIG slice of several
    return sum(torch.cuda.mem_get_info(i % seen)[0] for i in range(gpus))


def _until_finished(tiles: int, each: tuple[float, ...]) -> float:
    """When the last of some tiles is finished, if whichever worker is free takes the next."""
    # after t seconds worker i has finished floor(t / each[i]) tiles: the least t with enough in all, by bisection
    low, high = 0.0, tiles * min(each)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(math.floor(middle / e) for e in each) >= tiles
        low, high = (low, middle) if enough else (middle, high)
    return high


@dataclass(frozen=True)
class TileCost:
    """Measured seconds and memory of a tile; seconds of the processor, if it is trained on one."""

    start: float  # until its networks are initialised
    step: float  # one step of all networks, with its share of drawing the random numbers
    steps: int  # number of steps of an epoch
    evaluation: float  # one evaluation of all networks
    memory: int = 0  # bytes: the most that the process, or its GPU, took so far
    share: float = 1.0  # of a processor that the worker got

    def seconds(self, training: TrainingConfig) -> float:
        """Of the whole tile: (start + epochs x steps x step + evaluations x evaluation) / share."""
        evaluations = training.epochs if training.evaluate == "epoch" else 1
        busy = self.start + training.epochs * self.steps * self.step + evaluations * self.evaluation
        return busy / self.share


def quiet(costs: Sequence[TileCost], workers: Workers) -> float:
    """Times the expected time, that of workers that nothing but each other slows down."""
    most = min(1.0, usable_cores() / (workers.count or 1)) if workers.backend == "loky" and not workers.gpu else 1.0
    return min(1.0, sum(cost.share for cost in costs) / len(costs) / most)


class _Enough(Exception):
    """Ends an epoch of which enough steps were timed."""


def time_tile(recipe: Recipe, data: Source, device: torch.device, kernels: Kernels, budget: float) -> TileCost:
    """What tile 0 of a recipe costs in this process, from steps of about `budget` seconds; nothing is kept."""
    cuda = device.type == "cuda"
    clock = _clock(device)
    ends: list[float] = []

    def step_ended(_: float) -> None:
        over = len(ends) >= _MOST_STEPS or (len(ends) >= first and clock() - ends[first - 1] > budget)
        if cuda and (over or len(ends) == first - 1):  # which has not done yet what it was told
            torch.cuda.synchronize(device)
        ends.append(clock())
        if over:
            raise _Enough

    with one_thread(), current(device):
        first = _FIRST.get(device.type, 1)
        begun = time.perf_counter(), clock()
        start, run = _timed_warm(partial(TileRun, recipe, 0, data, device, kernels), budget, clock)
        drawing, run.ready = timed(run.batches.draw, clock)
        with contextlib.suppress(_Enough):
            while True:  # epochs may be short
                run.epoch(0, step_ended)
        step = (ends[-1] - ends[first - 1]) / (len(ends) - first) + drawing / run.steps_per_epoch
        evaluation, _ = _timed_warm(run.evaluate, budget, clock)
        share = min(1.0, (clock() - begun[1]) / (time.perf_counter() - begun[0]))
        most = torch.cuda.max_memory_reserved(device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return TileCost(start, step, run.steps_per_epoch, evaluation, most * (1 if cuda else _RSS_UNIT), share)


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds of this thread on the processor, which other programs do not change; of a GPU, those of the wall."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def _timed_warm(work: Callable[[], T], budget: float, clock: Callable[[], float]) -> tuple[float, T]:
    """Seconds and result of some work; of short work those of the second time, after what is done on first use."""
    seconds, found = timed(work, clock)
    if seconds < budget:
        del found  # its memory is used again
        seconds, found = timed(work, clock)
    return seconds, found


def tile_costs(requests: Sequence[Request], workers: Workers) -> list[TileCost]:
    """What a tile of each request costs while all workers are busy; the slowest of those that were timed.

    Steps and evaluations are timed once for requests that differ in nothing that they take time for, such as the
    initialiser, the rates or the number of epochs.
    """
    about = [_takes(request) for request in requests]
    kinds = list(dict.fromkeys(about))
    ones = [requests[about.index(kind)] for kind in kinds]
    count = workers.count or 1
    rounds = -(-count // len(ones))  # so that every worker is busy, as later
    task = partial(_time, ones, min(_TIMED_SECONDS, _BENCH_SECONDS * count / len(ones)))
    found: dict[str, list[TileCost]] = {kind: [] for kind in kinds}
    for i, cost in spread(task, range(rounds * len(ones)), workers):
        found[kinds[i % len(ones)]].append(cost)
    slowest = {kind: max(costs, key=lambda each: (each.step / each.share, each.start)) for kind, costs in found.items()}
    starts = dict(spread(partial(_start, requests), range(len(requests)), workers))
    return [replace(slowest[kind], start=starts[i]) for i, kind in enumerate(about)]


def _takes(request: Request) -> str:
    """What of a request steps and evaluations depend on in time."""
    recipe, training = request.recipe, request.recipe.training
    return repr((settings(recipe), recipe.population.tile, training.ema, training.clip_norm, recipe.distillation))


def _time(requests: Sequence[Request], budget: float, i: int, *, progress: Callable[[float], None]) -> TileCost:
    return time_tile(*_arguments(requests[i % len(requests)]), budget)


def _start(requests: Sequence[Request], i: int, *, progress: Callable[[float], None]) -> float:
    recipe, data, device, kernels = _arguments(requests[i])
    with one_thread(), current(device):
        return timed(partial(TileRun, recipe, 0, data, device, kernels), _clock(device))[0]


def _arguments(request: Request) -> tuple[Recipe, Source, torch.device, Kernels]:
    request.own_code.load()
    kernels, source = request.kernels_here()[0].kernels, request.recipe.data.load(request.data)
    return request.recipe, source, torch.device(request.device), kernels
