"""`collect`: train a population, or go on training one, tile by tile.

A task is a pure function of (recipe, tile); its result is one shard. What is done is what lies on the disk, so
there is nothing to lock, to repair or to remember: whatever stopped the work, the same call goes on from there.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tqdm import tqdm

from weightscope._util import atomic
from weightscope._util.environment import environment, usable_cores
from weightscope.errors import Resumable, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.population.shard_format import TrainedTile
from weightscope.recipe import Recipe
from weightscope.training.workers import BACKENDS, WorkerDied, spread

_log = logging.getLogger(__name__)

Job = Callable[..., tuple[int, str]]


def collect(
    recipe: Recipe,
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
) -> Population:
    """Train the networks of a recipe that the population at `path` does not hold yet.

    Network k has the same bits however often the work was interrupted, whatever the number of workers, and in
    whatever order tiles were trained (same torch build and device).

    Args:
        recipe: of the population; it must be the one that `path` was begun with, except that the number of
            networks may grow. Without `population.tile` it takes the population's, or one that fits the device.
        path: the population's folder; made when it does not exist.
        networks: N, in place of the recipe's. A population that has grown stays as large when this is not given.
        workers: processes of this machine, each with one thread; by default as many as there are usable cores,
            or one on a GPU. Changes the speed only.
        backend: where the workers run: "loky" (this machine), "dask" or "ray" (a cluster, with `path` on a file
            system that all of it shares; it runs one tile at a time in each of its worker processes).
        scheduler: the cluster's address, such as "tcp://host:8786".
        shard: train this tile alone, for job arrays.
        data: the folder to look for the data set in first.
        device: "auto", "cpu" or "cuda".
        progress: show it on stderr, if that is a terminal.

    Returns:
        The population, open with `partial=True`: another process, or another shard's job, may have work left.

    Raises:
        RecipeError: if the population there has another recipe; shows the differences.
        UsageError: if an argument cannot be meant.
        DataError: if data are missing, or there is a foreign shard in the population.
        Resumable: if it was interrupted (Ctrl-C or SIGTERM); says what is kept.
        WeightscopeError: if a worker died or the disk is full; what is done is kept.

    Example:
        >>> population = collect(Recipe.load("populations/digits-convnext.toml"), "digits.pop", networks=512)
    """
    path = Path(path)
    if backend not in BACKENDS:
        raise UsageError(f"no backend {backend!r}; there are {', '.join(BACKENDS)}")
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: backend {backend} has its own; give `workers` with loky only")
    if workers is not None and workers < 1:
        raise UsageError(f"workers: expected a positive number, found {workers}")
    wanted, device = _wanted(recipe, path, networks, data, device)
    existed = path.exists()
    manifest, created = manifests.create_or_match(path, wanted, grow=networks is not None)
    try:
        with _terminate_as_interrupt():
            todo = _scan(path, manifest, shard)
            job = _job(path, manifest, data, device)
            total = manifest.networks if shard is None else manifest.rows(shard)
            with _Bar(total, total - sum(map(manifest.rows, todo)), show=progress) as bar:
                if backend == "loky":
                    workers = min(workers or (usable_cores() if device == "cpu" else 1), len(todo))
                if backend == "loky" and workers <= 1:
                    _run_here(job, todo, manifest, bar)
                else:
                    finished = spread(
                        job, todo, backend=backend, workers=workers, scheduler=scheduler, gpu=device != "cpu"
                    )
                    with contextlib.closing(finished):
                        for tile in finished:
                            bar.move_to(bar.n + manifest.rows(tile))
    except KeyboardInterrupt:
        raise Resumable(f"stopped: {_kept(path)}; run the same command again to go on") from None
    except WorkerDied as error:
        raise WeightscopeError(
            f"{error}: {_kept(path)}; run the same command again to go on, with fewer workers if memory is short"
        ) from error
    except Exception:
        if created:
            _leave_nothing(path, existed)
        raise
    finally:
        # Workers that were ended on the way may have been writing.
        _sweep(path)
    return Population(path, partial=True)


def train_shard(
    train_tile: Callable[..., TrainedTile],
    recipe: Recipe,
    tile: int,
    *,
    path: Path,
    manifest: Manifest,
    data: Path | None,
    device: str,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, str]:
    """Train one tile and put its shard in place; the task that workers run. Idempotent.

    Args:
        train_tile: the trainer.
        recipe: what to train; the manifest's, with absolute paths.
        tile: which tile, counted from 0.
        path: the population's folder.
        manifest: of the population when the work began.
        data: the folder to look for the data set in first.
        device: "cpu" or "cuda".
        progress: called with the fraction done.

    Returns:
        The tile and its shard's sha256.
    """
    trained = train_tile(recipe, tile, data_root=data, device=device, progress=progress)
    # Another process may have let the population grow in the meantime; its shard then holds more networks.
    there = manifests.read(path)
    if there.networks > manifest.networks:
        manifests.match(path, there, manifest)
        manifest = there
    return tile, shards.save(path, manifest, trained, _made_on(recipe, device))[1]


def _wanted(
    recipe: Recipe, path: Path, networks: int | None, data: str | Path | None, device: str
) -> tuple[Manifest, str]:
    """What is to be trained, and on which device; raises for everything that can be known beforehand."""
    from weightscope import training
    from weightscope.data import load
    from weightscope.training.engine import kernels_on, resolve_device
    from weightscope.training.initial_weights import resolve as resolve_init
    from weightscope.training.tile_size import choose_tile

    if networks is not None:
        recipe = recipe.replace({"population.networks": networks})
    resolved = resolve_device(device)
    kernels_on(recipe, resolved)
    device = str(resolved)
    spec = training.spec_of(recipe)
    inputs = manifests.artifact_hashes(recipe)
    for init in recipe.init:
        resolve_init(init)
    images = load(recipe.data.name, data, train=recipe.data.train, test=recipe.data.test)
    inputs[f"data {recipe.data.name}"] = images.fingerprint
    if recipe.population.tile is None:
        begun = (path / manifests.NAME).exists()
        tile = manifests.read(path).tile if begun else choose_tile(recipe, images, resolved)
        recipe = recipe.replace({"population.tile": tile})
    return Manifest(recipe, spec, environment(device), (recipe.population.networks,), inputs), device


def _scan(path: Path, manifest: Manifest, shard: int | None) -> list[int]:
    """The tiles to train: those that are missing, short or damaged. Sweeps what killed processes left."""
    if shard is not None and not 0 <= shard < manifest.tiles:
        raise UsageError(f"shard: expected 0 to {manifest.tiles - 1} for {manifest.networks} networks, found {shard}")
    _sweep(path)
    todo = []
    for tile in range(manifest.tiles) if shard is None else [shard]:
        state = shards.state(path, manifest, tile)
        if state.kind == "damaged":
            _log.warning("%s", state.why.replace(shards.AGAIN, "its tile is trained anew"))
        if state.kind == "done":
            shards.tidy_hash(shards.shard_file(path, tile))
        else:
            todo.append(tile)
    return todo


def _job(path: Path, manifest: Manifest, data: str | Path | None, device: str) -> Job:
    """The task that is left to be told its tile. Its paths are absolute: a worker may run in another folder."""
    from weightscope import training

    recipe = manifest.recipe.to_dict()
    for init in recipe["init"]:
        if "artifact" in init:
            init["artifact"] = os.path.abspath(init["artifact"])
    return partial(
        train_shard,
        training.train_tile,
        Recipe.parse(recipe),
        path=path.absolute(),
        manifest=manifest,
        data=None if data is None else Path(data).absolute(),
        device=device,
    )


def _run_here(job: Job, todo: list[int], manifest: Manifest, bar: "_Bar") -> None:
    for tile in todo:
        start, rows = bar.n, manifest.rows(tile)
        job(tile, progress=lambda done, start=start, rows=rows: bar.move_to(start + done * rows))
        bar.move_to(start + rows)


def _kept(path: Path) -> str:
    population = Population(path, partial=True)
    return f"{len(population)} of {population.recipe.population.networks} networks are kept in {path}"


def _made_on(recipe: Recipe, device: str) -> str:
    """What a shard says that it was made on: GPUs of different models, and builds of kernels, round differently."""
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
        if recipe.training.kernels == "compiled":
            import triton

            return f"{name}, kernels triton {triton.__version__}"
        return name
    if recipe.training.kernels == "compiled":
        from weightscope.training.kernels.c.build import build_id

        return f"{device}, kernels {build_id()}"
    return device


def _sweep(path: Path) -> None:
    for folder in (path, path / manifests.SHARDS):
        atomic.sweep(folder)


def _leave_nothing(path: Path, existed: bool) -> None:
    """Take back a population that was made a moment ago and holds no network."""
    _sweep(path)
    folder = path / manifests.SHARDS
    if not any(folder.glob("*.h5")):
        with contextlib.suppress(OSError):
            # The hash of a shard that was never put in place.
            for file in folder.glob("*.h5.sha256"):
                file.unlink()
            folder.rmdir()
            (path / manifests.NAME).unlink()
            if not existed:
                path.rmdir()


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Batch systems send SIGTERM before they kill; it is handled as Ctrl-C is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Bar(tqdm):
    """Progress in networks, with networks/hour and the time left; silent where stderr is no terminal."""

    # tqdm's own lock is shared between processes, which no two bars here are; killed, it would leak a semaphore.
    _lock = threading.RLock()

    def __init__(self, total: int, initial: int, *, show: bool, file: TextIO | None = None) -> None:
        super().__init__(
            total=total,
            initial=initial,
            # None: tqdm finds out whether the file is a terminal.
            disable=None if show else True,
            file=file,
            desc="collect",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {whole} of {total} networks, {per_hour}, {remaining} left",
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """What `bar_format` may name."""
        values = super().format_dict
        done, seconds = values["n"] - values["initial"], values["elapsed"]
        values["whole"] = int(values["n"])
        values["per_hour"] = f"{3600 * done / seconds:,.0f} networks/hour" if done and seconds else "? networks/hour"
        return values

    def move_to(self, networks: float) -> None:
        """Show that so many networks are done."""
        # A disabled bar counts nothing, and `n` is where the next tile starts.
        if self.disable:
            self.n = networks
        else:
            self.update(networks - self.n)
