"""`plan`: what training a population takes, measured on the workers that would do it."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weightscope._util.results import Result, text_table
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.shard_format import expected_bytes
from weightscope.recipe import Recipe
from weightscope.training.own_code import OwnCode
from weightscope.training.request import portable, requested
from weightscope.training.spreading import on_each
from weightscope.training.workers import chosen_workers

_TIMED_SECONDS = 2.0  # of steps, on each worker
_MOST_STEPS = 64


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What remains to be trained of a population, and how long that takes.

    Attributes:
        path: the population's folder.
        networks: N.
        tile: T.
        tiles: of the whole population.
        done: tiles that are trained already.
        bytes_on_disk: expected size of all shards.
        workers: how many workers were timed, all at the same time.
        tile_seconds: expected seconds of one tile on each worker: start, all epochs and evaluations.
        hours: expected hours until all tiles are trained.
    """

    path: str
    networks: int
    tile: int
    tiles: int
    done: int
    bytes_on_disk: int
    workers: int
    tile_seconds: tuple[float, ...]
    hours: float

    def summary(self) -> str:
        """Path, tiles to train, and hours."""
        return f"{self.path}: {self.tiles - self.done} of {self.tiles} tiles to train, about {self.hours:.2g} hours"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each quantity."""
        return [{"quantity": name, "value": value} for name, value in self._values()]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)

    def text(self) -> str:
        """A table, and how the time was measured."""
        how = (
            f"measured: each of {self.workers} workers, at the same time, trained tile 0 for a few steps and evaluated "
            "it once; nothing was kept"
        )
        return text_table(("", self.path), self._values(), left=(0, 1)) + "\n" + how

    def _values(self) -> list[tuple[str, Any]]:
        seconds = sorted(self.tile_seconds)
        spread = f"{seconds[0]:,.3g}" if len(seconds) == 1 else f"{seconds[0]:,.3g} to {seconds[-1]:,.3g}"
        return [
            ("networks", f"{self.networks:,}"),
            ("tiles", f"{self.tiles:,} of {self.tile}, {self.done:,} done"),
            ("bytes on disk", f"{self.bytes_on_disk:,}"),
            ("workers", self.workers),
            ("seconds for a tile", spread),
            ("hours left", f"{self.hours:,.3g}"),
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

    Args:
        recipe: as in `collect`.
        path: the population's folder; need not exist.
        networks: N, in place of the recipe's.
        workers: processes of this machine.
        backend: "loky", "dask" or "ray".
        scheduler: the cluster's address.
        data: the first folder to look for the data set in.
        device: "auto", "cpu" or "cuda".

    Raises:
        RecipeError: if the population has another recipe.
        UsageError: for an invalid argument.
        DataError: if data are missing.
        TilesFailed: if no worker could be timed.

    Example:
        >>> print(plan(Recipe.load("digits-convnext"), "digits.pop", networks=10_000, workers=2).text())
    """
    path = Path(path)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    chosen = chosen_workers(backend, workers, scheduler)
    manifest, device, kernels = requested(recipe, path, networks, data, device)
    done = 0
    if (path / manifests.NAME).exists():
        manifests.match(path, manifests.read(path), manifest)
        done = sum(shards.state(path, manifest, t).kind == "done" for t in shards.tiles_on_disk(path, manifest))
    job = partial(
        _time_tile,
        portable(manifest.recipe, kernels, data),
        data=None if data is None else Path(data).absolute(),
        device=device,
        own_code=OwnCode.of(name for _, name in manifest.recipe.references),
    )
    seconds = on_each(job, chosen.on_device(device, manifest.tiles), manifest.tiles)
    return Plan(
        path=str(path),
        networks=manifest.networks,
        tile=manifest.tile,
        tiles=manifest.tiles,
        done=done,
        bytes_on_disk=expected_bytes(manifest),
        workers=len(seconds),
        tile_seconds=tuple(seconds),
        hours=_seconds(manifest.tiles - done, tuple(seconds)) / 3600,
    )


def _seconds(tiles: int, each: tuple[float, ...]) -> float:
    """When the last of some tiles is finished, if whichever worker is free takes the next."""
    # after t seconds worker i has finished floor(t / each[i]) tiles: the least t with enough in all, by bisection
    low, high = 0.0, tiles * min(each)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(math.floor(middle / e) for e in each) >= tiles
        low, high = (low, middle) if enough else (middle, high)
    return high


def _time_tile(
    recipe: Recipe,
    _tile: int,
    *,
    data: Path | None,
    device: str,
    own_code: OwnCode,
    progress: Callable[[float], None],
) -> float:
    """Seconds that tile 0 takes in this process, extrapolated from a few steps."""
    from weightscope.data import load
    from weightscope.training.devices import current, one_thread, resolve_device
    from weightscope.training.engine import TileRun

    own_code.load()
    where, training = resolve_device(device), recipe.training
    source = load(recipe.data, data, **recipe.data.counts)
    with one_thread(), current(where):
        begun = time.perf_counter()
        run = TileRun(recipe, 0, source, where)
        start = time.perf_counter() - begun
        whole, steps, step = run.steps_per_epoch, min(2, run.steps_per_epoch), 0.0
        while True:  # the first round warms up; later ones are longer, until they can be timed
            few = steps * run.batch
            short = TileRun(recipe, 0, source.shortened(few), where)
            short.epoch(0)
            begun = time.perf_counter()
            short.epoch(0)
            step = (time.perf_counter() - begun) / steps
            if step * steps > _TIMED_SECONDS / 4 or steps >= min(whole, _MOST_STEPS):
                break
            steps = min(2 * steps, whole, _MOST_STEPS)
        begun = time.perf_counter()
        run.evaluate()
        evaluation = time.perf_counter() - begun
    evaluations = training.epochs if training.evaluate == "epoch" else 1
    return start + training.epochs * whole * step + evaluations * evaluation
