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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from weightscope._util import atomic, plugins
from weightscope._util.checks import choice, count
from weightscope._util.environment import environment, usable_cores
from weightscope.errors import DataError, Resumable, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.population.shard_format import TrainedTile
from weightscope.recipe import Recipe
from weightscope.training.provenance import made_on, warn_of_other_builds
from weightscope.training.workers import BACKENDS, OwnCode, WorkerDied, spread

if TYPE_CHECKING:
    from weightscope.training.devices import Choice  # imports torch

_log = logging.getLogger(__name__)

Job = Callable[..., tuple[int, str]]


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
) -> Population:
    """Train the networks of a recipe that the population at `path` does not have yet.

    Network k has the same bits after any interruption, for any number of workers and any order of tiles (same torch
    build and device).

    Args:
        recipe: a `Recipe`, or the nested dictionaries of one, in which `network`, `data` and `init` may be callables.
            It must be the recipe that the population was created with, except that the number of networks may grow.
            Without `population.tile` it takes the population's tile, or one that fits the device.
        path: the population's folder; created if it does not exist.
        networks: N, in place of the recipe's. Without it, a population that has grown keeps its size.
        workers: processes of this machine, each with one thread; by default one per usable core, or one on a GPU.
            Changes only the speed.
        backend: "loky" (this machine), or "dask" or "ray" (a cluster that shares the file system of `path`; it runs one
            tile at a time in each worker process).
        scheduler: the cluster's address, such as "tcp://host:8786".
        shard: train only this tile, for job arrays.
        data: the first folder to look for the data set in.
        device: "auto", "cpu" or "cuda".
        progress: show a progress bar if stderr is a terminal, or in a notebook.

    Returns:
        The population, opened with `partial=True`, because other processes or job arrays may still be working on it.

    Raises:
        RecipeError: if the population has another recipe; shows the differences.
        UsageError: for an invalid argument, or a network that the recipe's engine cannot train.
        DataError: if data are missing, there is a foreign shard, or one's own functions have changed.
        Resumable: if interrupted (Ctrl-C or SIGTERM); says what is kept.
        WeightscopeError: if a worker died or the disk is full; finished tiles are kept.

    Example:
        >>> population = collect(Recipe.load("populations/digits-convnext.toml"), "digits.pop", networks=512)
    """
    path = Path(path)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    recipe = recipe.model_copy(update={"bench": None})  # which says nothing about the networks
    choice("backend", backend, BACKENDS)
    if workers is not None and backend != "loky":
        raise UsageError(f"workers: expected none for backend {backend}, whose cluster has its own, found {workers}")
    if workers is not None:
        count("workers", workers)
    wanted, device, kernels = _wanted(recipe, path, networks, data, device)
    existed = path.exists()
    manifest, created = manifests.create_or_match(path, wanted, grow=networks is not None)
    try:
        with _terminate_as_interrupt():
            todo = _scan(path, manifest, shard)
            # each machine of a cluster chooses again, unless the recipe or the population asks for torch's
            again = backend != "loky" and recipe.training.kernels == "auto"
            job = _job(path, manifest, data, device, None if again else kernels)
            if todo:
                warn_of_other_builds(path, manifest, made_on(kernels, device))
            total = manifest.networks if shard is None else manifest.rows(shard)
            with _Bar(total, total - sum(map(manifest.rows, todo)), show=progress) as bar:
                if backend == "loky":
                    workers = min(workers or (usable_cores() if device == "cpu" else 1), len(todo))
                if workers is not None and workers <= 1:
                    _run_here(job, todo, manifest, bar)
                else:
                    finished = spread(
                        job, todo, backend=backend, workers=workers, scheduler=scheduler, gpu=device != "cpu"
                    )
                    with contextlib.closing(finished):
                        for tile in finished:
                            bar.move_to(bar.n + manifest.rows(tile))
    except KeyboardInterrupt:
        raise Resumable(f"stopped: {_kept(path)}; run the same command again to resume") from None
    except WorkerDied as error:
        raise WeightscopeError(
            f"{error}: {_kept(path)}; run the same command again to resume, with fewer workers if memory is short"
        ) from error
    except Exception:
        if created:
            _leave_nothing(path, existed)
        raise
    finally:
        _sweep(path)  # workers that were terminated may have been writing
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
    own_code: OwnCode,
    kernels: "Choice | None" = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, str]:
    """Train one tile and write its shard; the task of a worker. Idempotent.

    Args:
        train_tile: the trainer.
        recipe: the manifest's recipe, with absolute paths.
        tile: index of the tile, counted from 0.
        path: the population's folder.
        manifest: of the population when the work began.
        data: the first folder to look for the data set in.
        device: "cpu" or "cuda".
        own_code: the functions that the recipe refers to.
        kernels: what trains it, for the shard's header; by default those that this machine chooses.
        progress: called with the fraction done.

    Returns:
        The tile and its shard's sha256.
    """
    import torch

    from weightscope.training.devices import choose_kernels, trust

    own_code.load()
    if kernels is not None:
        trust(recipe, torch.device(device), kernels)
    trained = train_tile(recipe, tile, data_root=data, device=device, progress=progress)
    # Another process may have grown the population in the meantime; the shard then holds more networks.
    there = manifests.read(path)
    if there.networks > manifest.networks:
        manifests.match(path, there, manifest)
        manifest = there
    if kernels is None:
        kernels = choose_kernels(recipe, torch.device(device))
    return tile, shards.save(path, manifest, trained, made_on(kernels, device), kernels.checked)[1]


def _wanted(
    recipe: Recipe, path: Path, networks: int | None, data: str | Path | None, device: str
) -> tuple[Manifest, str, "Choice"]:
    """The manifest of the requested population, device and kernels; raises every error that can be detected beforehand.

    `kernels = "auto"` takes those of an existing population.
    """
    from weightscope import training
    from weightscope.data import load
    from weightscope.training import own_networks
    from weightscope.training.devices import choose_kernels, resolve_device
    from weightscope.training.initial_weights import resolve as resolve_init
    from weightscope.training.tile_size import choose_tile

    if networks is not None:
        recipe = recipe.replace({"population.networks": networks})
    resolved = resolve_device(device)
    device = str(resolved)
    own_code = _own_code_hashes(recipe)
    there = manifests.read(path) if (path / manifests.NAME).exists() else None
    if there is not None:
        _refuse_changed_code(path, there.inputs, own_code)
    spec = training.spec_of(recipe)
    inputs = manifests.artifact_hashes(recipe) | own_code
    for init in recipe.init:
        resolve_init(init)
    limits = {key: getattr(recipe.data, key) for key in ("train", "test", "validation")}
    images = load(recipe.data.name, data, **limits)
    inputs[f"data {recipe.data.name}"] = images.fingerprint
    there_kernels = None if there is None else there.recipe.training.kernels
    if recipe.training.kernels == "auto" and there_kernels == "torch":
        recipe = recipe.replace({"training.kernels": "torch"})
    kernels = choose_kernels(recipe, resolved)
    own_networks.check(recipe, kernels.kernels)
    if recipe.training.kernels == "auto":
        kept = there_kernels or ("torch" if kernels.kernels == "torch" else "compiled")
        if (kept, kernels.kernels) == ("compiled", "torch"):
            _log.warning(
                "%s: its kernels are compiled ones; what is trained here uses torch's, which round differently: %s",
                path,
                kernels.checked,
            )
        recipe = recipe.replace({"training.kernels": kept})
    if recipe.population.tile is None:
        tile = choose_tile(recipe, images, resolved) if there is None else there.tile
        recipe = recipe.replace({"population.tile": tile})
    return Manifest(recipe, spec, environment(device), (recipe.population.networks,), inputs), device, kernels


def _own_code_hashes(recipe: Recipe) -> dict[str, str]:
    """`"network package.module:factory"` -> hash of the source, for each function of one's own that a recipe names.

    A data set's images are hashed in place of its source.
    """
    return {
        f"{kind} {name}": plugins.source_hash(plugins.imported(name), name)
        for kind, name in _references(recipe)
        if kind != "data"
    }


def _references(recipe: Recipe) -> list[tuple[str, str]]:
    """The references to one's own code in a recipe, with the section of each."""
    named = [("network", recipe.network.type), ("data", recipe.data.name)]
    named += [("init", part.strip()) for init in recipe.init for part in init.name.split("+")]
    return [(section, name) for section, name in named if plugins.is_reference(name)]


def _refuse_changed_code(path: Path, there: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, digest in found.items():
        if there.get(name, digest) != digest:
            raise DataError(
                f"{path}: the source of {name} has changed since the population was created: expected hash "
                f"{there[name]}, found {digest}; restore it, or collect into another folder"
            )


def _scan(path: Path, manifest: Manifest, shard: int | None) -> list[int]:
    """The tiles to train: missing, short or damaged ones. Removes temporary files of killed processes."""
    if shard is not None and not 0 <= shard < manifest.tiles:
        raise UsageError(f"shard: expected 0 to {manifest.tiles - 1} for {manifest.networks} networks, found {shard}")
    _sweep(path)
    todo = []
    present = set(shards.tiles_on_disk(path, manifest))  # few of perhaps millions
    for tile in range(manifest.tiles) if shard is None else [shard]:
        if tile not in present:
            todo.append(tile)
            continue
        state = shards.state(path, manifest, tile)
        if state.kind == "damaged":
            _log.warning("%s", state.why.replace(shards.AGAIN, "its tile is trained again"))
        if state.kind == "done":
            shards.tidy_hash(shards.shard_file(path, tile))
        else:
            todo.append(tile)
    if todo:
        atomic.check_writable(shards.shard_file(path, todo[0]))
    return todo


def _job(path: Path, manifest: Manifest, data: str | Path | None, device: str, kernels: "Choice | None") -> Job:
    """The task, a function of the tile. Its paths are absolute, since a worker may run in another folder.

    Without `kernels`, a worker chooses the kernels where those of the population are compiled.
    """
    from weightscope import training

    recipe = manifest.recipe.to_dict()
    if recipe["training"]["kernels"] == "compiled":
        actual = "auto" if kernels is None else "torch" if kernels.kernels == "torch" else "compiled"
        recipe["training"]["kernels"] = actual
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
        own_code=OwnCode.of(name for _, name in _references(manifest.recipe)),
        kernels=kernels,
    )


def _run_here(job: Job, todo: list[int], manifest: Manifest, bar: "_Bar") -> None:
    for tile in todo:
        start, rows = bar.n, manifest.rows(tile)
        job(tile, progress=lambda done, start=start, rows=rows: bar.move_to(start + done * rows))
        bar.move_to(start + rows)


def _kept(path: Path) -> str:
    population = Population(path, partial=True)
    return f"{len(population)} of {population.recipe.population.networks} networks are kept in {path}"


def _sweep(path: Path) -> None:
    for folder in (path, path / manifests.SHARDS):
        atomic.sweep(folder)


def _leave_nothing(path: Path, existed: bool) -> None:
    """Remove a population that was created a moment ago and has no networks."""
    _sweep(path)
    folder = path / manifests.SHARDS
    if not any(folder.glob("*.h5")):
        with contextlib.suppress(OSError):
            # hashes of shards that were never written
            for file in folder.glob("*.h5.sha256"):
                file.unlink()
            folder.rmdir()
            (path / manifests.NAME).unlink()
            if not existed:
                path.rmdir()


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, which batch systems send before they kill, like Ctrl-C."""
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


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class _Bar(tqdm):
    """Progress in networks, with networks/hour and the time left; silent unless a terminal or a notebook shows it."""

    # tqdm's own lock is a semaphore shared between processes, which would leak if killed.
    _lock = threading.RLock()

    def __init__(self, total: int, initial: int, *, show: bool, file: TextIO | None = None) -> None:
        super().__init__(
            total=total,
            initial=initial,
            # None: tqdm checks whether the file is a terminal; a notebook shows stderr, too
            disable=not show or (False if in_notebook() else None),
            file=file,
            desc="collect",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {whole} of {total} networks, {per_hour}, {remaining} left",
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values for `bar_format`."""
        values = dict(super().format_dict)
        done, seconds = values["n"] - values["initial"], values["elapsed"]
        values["whole"] = int(values["n"])
        values["per_hour"] = f"{3600 * done / seconds:,.0f} networks/hour" if done and seconds else "? networks/hour"
        return values

    def move_to(self, networks: float) -> None:
        """Show this number of finished networks."""
        # a disabled bar does not count, but `n` is used as the start of the next tile
        if self.disable:
            self.n = networks
        else:
            self.update(networks - self.n)
