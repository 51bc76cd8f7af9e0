"""`plan`: what training a population takes, measured on the workers that would do it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weightscope._util.results import Result, duration
from weightscope._util.workers import Workers, chosen_workers, on_each, spread
from weightscope.data.task import Source
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.shards import expected_bytes
from weightscope.recipe import Recipe, TrainingConfig
from weightscope.training.devices import current, one_thread
from weightscope.training.engine import TileRun
from weightscope.training.kernels.functions import Kernels
from weightscope.training.request import Request, timed

_TIMED_SECONDS, _MOST_STEPS = 2.0, 64  # on each worker


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What remains to be trained of a population, and how long that takes."""

    path: str
    networks: int
    tile: int
    tiles: int  # of the whole population
    done: int  # tiles that are trained already
    bytes_on_disk: int  # expected size of all shards
    workers: int  # how many were timed, all at the same time
    tile_seconds: tuple[float, ...]  # expected, of one tile on each worker: start, all epochs and evaluations
    hours: float  # expected, until all tiles are trained
    left = (0, 1)

    def summary(self) -> str:
        left = duration(3600 * self.hours)
        return f"{self.path}: {self.tiles - self.done} of {self.tiles} tiles to train, about {left}"

    def rows(self) -> list[dict[str, Any]]:
        seconds = sorted(self.tile_seconds)
        values = {
            "networks": f"{self.networks:,}",
            "tiles": f"{self.tiles:,} of {self.tile}, {self.done:,} done",
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "workers": self.workers,
            "seconds for a tile": " to ".join(dict.fromkeys(f"{each:,.3g}" for each in (seconds[0], seconds[-1]))),
            "time left": duration(3600 * self.hours),
        }
        return [{"quantity": name, "value": value} for name, value in values.items()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def notes(self) -> list[str]:
        return [
            f"measured: each of {self.workers} workers, at the same time, trained tile 0 for a few steps and evaluated "
            "it once; nothing was kept"
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
) -> Plan:
    """Estimate what `collect` with the same arguments would take; trains and writes nothing.

    Every worker trains a tile for a few steps at the same time, because workers share caches and memory bandwidth:

        seconds of a tile = start + epochs (steps per epoch x seconds per step) + evaluations x seconds per evaluation
        hours = longest of the workers' shares of the tiles, which are given to whichever is free

    The arguments and errors are those of `collect`, and TilesFailed if no worker could be timed.

    Example:
        >>> print(plan(Recipe.load("digits-convnext"), "digits.pop", networks=10_000, workers=2).text())
    """
    chosen = chosen_workers(backend, workers, scheduler)
    request = Request.of(recipe, path, networks=networks, data=data, device=device, cluster=backend != "loky")
    manifest, done = request.manifest, 0
    if (request.path / manifests.NAME).exists():
        manifests.match(request.path, manifests.read(request.path), manifest)
        done = shards.tiles_done(request.path, manifest)
    costs = on_each(partial(_time, [request]), chosen.on_device(request.device, manifest.tiles), manifest.tiles)
    seconds = tuple(cost.seconds(request.recipe.training) for cost in costs)
    hours = _until_finished(manifest.tiles - done, seconds) / 3600
    size = expected_bytes(manifest)
    return Plan(str(path), manifest.networks, manifest.tile, manifest.tiles, done, size, len(seconds), seconds, hours)


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
    """Measured seconds of a tile."""

    start: float  # until its networks are initialised
    step: float  # one step of all networks
    steps: int  # number of steps of an epoch
    evaluation: float  # one evaluation of all networks

    def seconds(self, training: TrainingConfig) -> float:
        """Of the whole tile: start + epochs x steps x step + evaluations x evaluation."""
        evaluations = training.epochs if training.evaluate == "epoch" else 1
        return self.start + training.epochs * self.steps * self.step + evaluations * self.evaluation


def time_tile(recipe: Recipe, data: Source, device: torch.device, kernels: Kernels) -> TileCost:
    """What tile 0 of a recipe costs in this process, from a few steps; nothing is kept.

    Each part is done once before it is timed: code is compiled and memory is allocated on first use.
    """
    with one_thread(), current(device):
        run = TileRun(recipe, 0, data, device, kernels)
        run.evaluate()
        whole, steps = run.steps_per_epoch, min(2, run.steps_per_epoch)
        while True:  # longer and longer, until it can be timed
            few = data.shortened(steps * run.batch)
            start, short = timed(partial(TileRun, recipe, 0, few, device, kernels))
            short.epoch(0)
            seconds, _ = timed(partial(short.epoch, 0))
            if seconds > _TIMED_SECONDS / 4 or steps >= min(whole, _MOST_STEPS):
                break
            steps = min(2 * steps, whole, _MOST_STEPS)
        return TileCost(start, seconds / steps, whole, timed(run.evaluate)[0])


def tile_costs(requests: Sequence[Request], workers: Workers) -> list[TileCost]:
    """What a tile of each request costs while all workers are busy; the slowest of those that were timed."""
    rounds = -(-(workers.count or 1) // len(requests))  # so that every worker is busy, as later
    found: list[list[TileCost]] = [[] for _ in requests]
    for i, cost in spread(partial(_time, requests), range(rounds * len(requests)), workers):
        found[i % len(requests)].append(cost)
    return [
        max(costs, key=lambda each: each.seconds(r.recipe.training)) for r, costs in zip(requests, found, strict=True)
    ]


def _time(requests: Sequence[Request], i: int, *, progress: Callable[[float], None]) -> TileCost:
    request = requests[i % len(requests)]
    request.own_code.load()
    kernels, source = request.kernels_here()[0].kernels, request.recipe.data.load(request.data)
    return time_tile(request.recipe, source, torch.device(request.device), kernels)
