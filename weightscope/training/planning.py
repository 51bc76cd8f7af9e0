"""`plan`: what training a population takes, from one timed step of one worker, and arithmetic."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weightscope._util.checks import number
from weightscope._util.remote import is_remote, is_there
from weightscope._util.results import Result, duration
from weightscope._util.trust import trusting
from weightscope._util.workers import Workers, chosen_workers, spread
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.shards import expected_bytes
from weightscope.recipe import Recipe
from weightscope.training.devices import current, one_thread
from weightscope.training.engine import TileRun
from weightscope.training.network_check import settings
from weightscope.training.request import Request, timed


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What remains to be trained of a population, and how long that takes."""

    path: str
    networks: int
    tile: int
    tiles: int  # of the whole population
    done: int  # tiles that are trained already
    files: int  # a shard and its hash for each tile, and the manifest
    bytes_on_disk: int  # expected size of all shards
    disk_free: int | None  # bytes; None for an object store
    workers: int | None  # processes; None for a cluster, which may grow and shrink
    device: str
    tile_seconds: float  # expected, of one tile: start, all epochs and evaluations
    price: float | None = None  # of a worker's hour
    left = (0, 1)

    @property
    def worker_hours(self) -> float:
        """Of all workers together, for the tiles that are left."""
        return (self.tiles - self.done) * self.tile_seconds / 3600

    @property
    def hours(self) -> float | None:
        """Expected, until all tiles are trained; None for a cluster."""
        if self.workers is None:
            return None
        return -(-(self.tiles - self.done) // self.workers) * self.tile_seconds / 3600

    @property
    def cost(self) -> float | None:
        """The price of all worker-hours."""
        return None if self.price is None else self.price * self.worker_hours

    def summary(self) -> str:
        left = f"{self.worker_hours:,.3g} worker-hours" if self.hours is None else duration(3600 * self.hours)
        return f"{self.path}: {self.tiles - self.done} of {self.tiles} tiles to train, about {left}"

    def rows(self) -> list[dict[str, Any]]:
        unit = "GPU-hours" if self.device.startswith("cuda") else "core-hours"
        values = {
            "networks": f"{self.networks:,}",
            "tiles": f"{self.tiles:,} of {self.tile} networks each, {self.done:,} done",
            "files": f"{self.files:,}",
            "bytes on disk": f"{self.bytes_on_disk:,}",
            "seconds for a tile": f"{self.tile_seconds:,.3g}",
            unit: f"{self.worker_hours:,.3g}",
        }
        if self.hours is not None:
            values["time left"] = f"{duration(3600 * self.hours)} with {self.workers} workers"
        if self.cost is not None:
            values["cost"] = f"{self.cost:,.2f} at {self.price:,g} for a worker-hour"
        return [{"quantity": name, "value": value} for name, value in values.items()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worker_hours": self.worker_hours, "hours": self.hours, "cost": self.cost}

    def notes(self) -> list[str]:
        size = self.bytes_on_disk * (self.tiles - self.done) // self.tiles
        full = self.disk_free is not None and size > self.disk_free
        short = [f"too little room on disk: {self.disk_free:,} bytes are free, {size:,} are needed"] if full else []
        return [*short, "one worker was timed, for one step and one evaluation of tile 0; several slow each other down"]


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

        seconds of a tile = start + epochs x steps per epoch x seconds of a step + evaluations x seconds of one
        hours = tiles / workers, rounded up, x seconds of a tile
        cost = price x tiles x seconds of a tile

    `price` is for an hour of one worker. The other arguments and the errors are those of `collect`.

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
    on = chosen.on_device(request.device, manifest.tiles)
    (seconds,) = tile_seconds([request], on)
    folder = request.path.absolute()
    there = None if is_remote(folder) else next(each for each in (folder, *folder.parents) if each.is_dir())
    return Plan(
        path=str(path),
        networks=manifest.networks,
        tile=manifest.tile,
        tiles=manifest.tiles,
        done=done,
        files=2 * manifest.tiles + 1,
        bytes_on_disk=expected_bytes(manifest),
        disk_free=None if there is None else shutil.disk_usage(there).free,
        workers=on.count,
        device=request.device,
        tile_seconds=seconds,
        price=price,
    )


def tile_seconds(requests: Sequence[Request], workers: Workers) -> list[float]:
    """Expected seconds of a tile of each request; those that differ in nothing that takes time are timed once."""
    about = []  # what steps and evaluations depend on in time
    for request in requests:
        recipe, training = request.recipe, request.recipe.training
        values = recipe.population.tile, training.ema, training.clip_norm, recipe.distillation
        about.append(repr((settings(recipe), values)))
    kinds = list(dict.fromkeys(about))
    measured = partial(_timed, [requests[about.index(kind)] for kind in kinds])
    here = len(kinds) == 1 and workers.backend == "loky" and not workers.gpu  # a process takes longer to start
    found = {0: measured(0)} if here else dict(spread(measured, range(len(kinds)), workers))
    out = []
    for request, kind in zip(requests, about, strict=True):
        (start, step, steps, evaluation), training = found[kinds.index(kind)], request.recipe.training
        evaluations = training.epochs if training.evaluate == "epoch" else 1
        out.append(start + training.epochs * steps * step + evaluations * evaluation)
    return out


def _timed(requests: Sequence[Request], i: int) -> tuple[float, float, int, float]:
    """Seconds until a tile is initialised, of a step, the number of steps of an epoch, and seconds of an evaluation."""
    request = requests[i]
    recipe, device = request.recipe, torch.device(request.device)
    with trusting(request.trust), one_thread(), current(device):
        request.own_code.load()
        data, kernels = recipe.data.load(request.data), request.kernels_here()[0].kernels
        batch = min(recipe.training.batch_size, data.examples)
        start, run = timed(lambda: TileRun(recipe, 0, data.shortened(batch), device, kernels))
        run.epoch(0)  # compiles, and allocates what is allocated once
        step = min(timed(lambda: run.epoch(0))[0] for _ in range(2))
        return start, step, data.examples // batch, timed(run.evaluate)[0]
