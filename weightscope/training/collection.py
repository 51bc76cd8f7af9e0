"""`collect`: train a population, or resume one, tile by tile.

A task is a pure function of (recipe, tile); its result is one shard. The shards on disk are the only state, so nothing
needs to be locked or repaired: after any interruption the same call resumes.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from weightscope import training
from weightscope._util import atomic
from weightscope._util.environment import environment
from weightscope._util.progress import Bar
from weightscope._util.trust import trusting
from weightscope._util.workers import TilesFailed, WorkerDied, Workers, chosen_workers, spread
from weightscope.errors import DataError, Resumable, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.population.shards import TrainedTile
from weightscope.recipe import Recipe
from weightscope.training.request import Request, warn_of_other_builds

_log = logging.getLogger(__name__)
Item = tuple[int, int]  # index of a request, and a tile of its population


def collect(
    recipe: Recipe | Mapping[str, Any],
    path: str | Path,
    *,
    networks: int | None = None,
    workers: int | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    shard: int | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    on_tile: Callable[["TileResult"], None] | None = None,
    trust: bool = False,
) -> Population:
    """Train the networks of a recipe that the population at `path` does not have yet.

    Network k has the same bits after any interruption, for any number of workers and any order of tiles (same torch
    build and device).

    Args:
        recipe: a `Recipe`, or the nested dictionaries of one, in which `network`, `data` and `init` may be callables.
            It must be the recipe that the population was created with, except that the number of networks may differ.
            Without `population.tile` it takes the population's tile, or one that fits the device.
        path: the population's folder; created if it does not exist.
        networks: N, in place of the recipe's; by default a population that exists keeps its size. A population that
            grows has its old size until all networks are trained; one that shrinks keeps its shards. Of two runs at the
            same time the larger number counts, and a warning says so. A new population has tiles of at most N networks,
            and keeps them as it grows: begin a large one in a new folder, not as the continuation of a look at one.
        workers: processes of this machine, each with one thread; by default one per usable core, or one per GPU that
            CUDA_VISIBLE_DEVICES allows, which sees no other. Changes only the speed.
        backend: "loky" (this machine), or "dask" or "ray" (a cluster that shares the file system of `path`; it runs one
            tile at a time in each worker process).
        scheduler: the cluster's address, such as "tcp://host:8786".
        shard: train only this tile, for job arrays.
        data: the first folder to look for the data set in.
        device: "auto", "cpu" or "cuda".
        progress: show a progress bar if stderr is a terminal, or in a notebook.
        on_tile: called in this process with each tile as it ends (`TileResult`); an error in it stops the run.
        trust: run the code that an artifact of the recipe names (docs/architecture.md).

    Returns:
        The population, opened with `partial=True`, because other processes or job arrays may still be working on it.

    Raises:
        RecipeError: if the population has another recipe; shows the differences.
        UsageError: for an invalid argument, or a network that the recipe's engine cannot train.
        DataError: if data are missing, there is a foreign shard, or one's own functions have changed.
        Resumable: if interrupted, or if tiles or a cluster failed while others were finished; says what is kept.
        WeightscopeError: if the disk is full; finished tiles are kept.

    Example:
        >>> population = collect(Recipe.load("populations/digits-convnext.toml"), "digits.pop", networks=512)
    """
    chosen = chosen_workers(backend, workers, scheduler)
    with trusting(trust):
        request = Request.of(recipe, path, networks=networks, data=data, device=device, cluster=backend != "loky")
        train([request], chosen, progress=progress, shard=shard, resize=networks is not None, on_tile=on_tile)
    return Population(path, partial=True, trust=True)  # its code has just run


@dataclass(frozen=True)
class TileResult:
    """A tile that has been trained."""

    manifest: Manifest = field(repr=False)
    path: Path  # the population's folder
    tile: int
    seconds: float  # that its worker took
    name: str  # of the population: that of its folder, or the arm of a benchmark, `default, 3 epochs`
    speed: Mapping[str, Any] | None = None  # `images_per_second` at evaluation, and `measured_on`; None if not measured

    @property
    def networks(self) -> range:
        """The indices of its networks."""
        first = self.tile * self.manifest.tile
        return range(first, first + self.manifest.rows(self.tile))

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Name -> value of each network, shape (n,), or of each epoch, shape (n, E); as `Population.metrics`."""
        with shards.open_shard(self.path, self.manifest, self.tile, verify=False) as h5:
            return {name: values[: len(self.networks)] for name, values in h5["metrics"].items()}


def train(
    requests: Sequence[Request],
    workers: Workers,
    *,
    progress: bool = True,
    shard: int | None = None,
    resize: bool = False,
    label: str = "collect",
    on_tile: Callable[[TileResult], None] | None = None,
) -> None:
    """Train the tiles that populations do not have yet, the first tiles of all of them first.

    With `resize` the numbers of networks were given explicitly, so populations also shrink to them. `label` is that of
    the progress bar. `on_tile` is called with each tile as it ends.
    """
    begun: list[Request] = []
    created: list[tuple[Path, bool]] = []
    try:
        with _terminate_as_interrupt():
            todo: list[Item] = []
            kept = 0  # networks that are there
            for request in requests:
                existed = request.path.exists()
                manifest, new = manifests.create_or_match(request.path, request.manifest, resize=resize)
                created += [(request.path, existed)] if new else []
                begun.append(replace(request, manifest=manifest))
                tiles, rows = _scan(begun[-1], shard)
                kept += rows
                todo += zip(repeat(len(begun) - 1), tiles)
            todo.sort(key=itemgetter(1))
            if todo:
                total = sum(r.manifest.networks if shard is None else r.manifest.rows(shard) for r in begun)
                # paths are absolute for workers in other folders; messages show them as given
                absolute = [replace(request, path=request.path.absolute()) for request in begun]
                task = partial(train_shard, training.train_tile, absolute)
                on = workers.on_device(begun[0].device, len(todo))
                results = spread(task, todo, on, lambda i: f"tile {i[1]}" + f" of population {i[0]}" * (i[0] > 0))
                with contextlib.closing(results), _Bar(total, kept, show=progress, desc=label) as bar:
                    for (at, tile), (seconds, speed) in results:
                        request = begun[at]
                        bar.update(request.manifest.rows(tile))
                        if on_tile is not None:
                            name = request.path.stem
                            on_tile(TileResult(request.manifest, request.path, tile, seconds, name, speed))
        for request in begun:
            if shard is None or shards.tiles_done(request.path, request.manifest) == request.manifest.tiles:
                manifests.record_size(request.path, request.manifest)
    except KeyboardInterrupt as error:
        raise Resumable(f"stopped: {_kept(begun)}; run the same command again to resume") from error
    except TilesFailed as error:
        failure = _failure(error.errors, begun)
        _leave_nothing(created)
        raise failure from next(iter(error.errors.values()))
    except Exception:
        _leave_nothing(created)
        raise
    finally:
        for request in begun:
            manifests.sweep(request.path)  # workers that were ended may have been writing


def train_shard(
    train_tile: Callable[..., TrainedTile], requests: Sequence[Request], item: Item
) -> tuple[float, dict[str, Any] | None]:
    """The task of a worker: train one tile and write its shard, unless it is there.

    Returns the seconds it took, and the speed of evaluations where it was measured.
    """
    begun, speed, (at, tile) = time.perf_counter(), None, item
    request = requests[at]
    if not shards.is_done(request.path, request.manifest, tile):  # by another run, or a worker that was lost
        with trusting(request.trust):
            request.own_code.load()
            kernels, device = request.kernels_here()
            trained = train_tile(
                request.recipe,
                tile,
                data_root=request.data,
                device=request.device,
                kernels=kernels.kernels,
                data_hash=request.manifest.inputs[f"data {request.recipe.data.name}"],
            )
        shards.save(request.path, request.manifest, trained, device, kernels.comparison)
        if trained.speed is not None:
            about = environment(request.device)
            machine = about["gpu"]["name"] if "gpu" in about else f"one thread of {about['processor']}"
            speed = {"images_per_second": trained.speed, "measured_on": f"{machine}, tiles of {request.manifest.tile}"}
    return time.perf_counter() - begun, speed


def _scan(request: Request, shard: int | None) -> tuple[list[int], int]:
    """The tiles to train, and the number of networks in the others; removes what killed processes left."""
    path, manifest = request.path, request.manifest
    if shard is not None and not 0 <= shard < manifest.tiles:
        raise UsageError(f"shard: expected 0 to {manifest.tiles - 1} for {manifest.networks} networks, found {shard}")
    manifests.sweep(path)
    done = set()
    for tile in shards.tiles_on_disk(path, manifest) if shard is None else [shard]:
        if shards.is_done(path, manifest, tile):
            done.add(tile)
        elif (file := shards.shard_file(path, tile)).exists():
            _log.warning("%s: damaged, or without its sha256 beside it; its tile is trained again", file)
    todo = [tile for tile in (range(manifest.tiles) if shard is None else [shard]) if tile not in done]
    if todo:
        atomic.check_writable(shards.shard_file(path, todo[0]))
        warn_of_other_builds(request)
    return todo, sum(map(manifest.rows, done))


def _kept(requests: Sequence[Request]) -> str:
    here = sum(shards.networks_on_disk(r.path, r.manifest) for r in requests)
    total = sum(r.manifest.networks for r in requests)
    paths = [str(r.path) for r in requests]
    folder = os.path.commonpath(paths) if len(paths) > 1 else "".join(paths)
    return f"{here} of {total} networks are kept in {folder}"


def _failure(errors: Mapping[Item, Exception], requests: Sequence[Request]) -> WeightscopeError:
    error = next(iter(errors.values()))
    died = isinstance(error, WorkerDied)
    kind = DataError if isinstance(error, DataError) else Resumable
    why = str(error) if died or isinstance(error, WeightscopeError) else f"{type(error).__name__}: {error}"
    advice = "with fewer workers if memory is short" if died else "when the cause is gone"
    named = []
    for at, request in enumerate(requests):
        if tiles := [tile for there, tile in errors if there == at]:
            name = f"{request.path.name}: " if len(requests) > 1 else ""
            named.append(name + request.manifest.described(tiles))
    return kind(f"{why}, in {'; '.join(named)}: {_kept(requests)}; run the same command again, {advice}")


def _leave_nothing(created: Sequence[tuple[Path, bool]]) -> None:
    """Remove populations that were just created and have no networks; their folders unless they existed."""
    for path, existed in created:
        if not any((path / manifests.SHARDS).glob("*.h5")):
            manifests.remove(path, existed)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, which batch systems send before they kill, like Ctrl-C."""
    handles = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if handles else None
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)


class _Bar(Bar):
    """Progress in networks, with networks/hour and the time left; silent unless a terminal or a notebook shows it."""

    def __init__(self, total: int, initial: int, *, show: bool, **options: Any) -> None:
        form = "{desc}: {percentage:3.0f}%|{bar}| {n} of {total} networks, {per_hour}, {remaining} left"
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        # None: tqdm checks whether the file is a terminal; a notebook shows stderr, too
        disable = not show or (False if getattr(shell, "kernel", None) is not None else None)
        super().__init__(total=total, initial=initial, disable=disable, bar_format=form, **options)

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values for `bar_format`."""
        values = dict(super().format_dict)
        done, seconds = values["n"] - values["initial"], values["elapsed"]
        values["per_hour"] = f"{3600 * done / seconds:,.0f} networks/hour" if done and seconds else "? networks/hour"
        return values
