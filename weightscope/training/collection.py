"""`collect`: train a population, or resume one, tile by tile.

A task is a pure function of (recipe, tile); its result is one shard. The shards on disk are the only state, so nothing
needs to be locked or repaired: after any interruption the same call resumes.
"""

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from weightscope._util import atomic
from weightscope.errors import DataError, Resumable, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.population.shard_format import TrainedTile
from weightscope.recipe import Recipe
from weightscope.training.own_code import OwnCode
from weightscope.training.request import made_on, portable, requested, warn_of_other_builds
from weightscope.training.spreading import spread
from weightscope.training.workers import ClusterLost, TilesFailed, WorkerDied, Workers, chosen_workers

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
            It must be the recipe that the population was created with, except that the number of networks may differ.
            Without `population.tile` it takes the population's tile, or one that fits the device.
        path: the population's folder; created if it does not exist.
        networks: N, in place of the recipe's. A population that is to grow keeps its size until all networks are
            trained; one that shrinks keeps its shards. Without it, a population that has grown keeps its size.
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
        Resumable: if interrupted (Ctrl-C or SIGTERM), if tiles failed or lost too many workers while the others were
            finished, or if a cluster is gone; says what is kept.
        WeightscopeError: if the disk is full; finished tiles are kept.

    Example:
        >>> population = collect(Recipe.load("populations/digits-convnext.toml"), "digits.pop", networks=512)
    """
    path = Path(path)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    recipe = recipe.model_copy(update={"bench": None})  # which says nothing about the networks
    chosen = chosen_workers(backend, workers, scheduler)
    wanted, device, kernels = requested(recipe, path, networks, data, device)
    existed = path.exists()
    manifest, created = manifests.create_or_match(path, wanted, resize=networks is not None)
    try:
        with _terminate_as_interrupt():
            todo = _scan(path, manifest, shard)
            # each machine of a cluster chooses again, unless the recipe or the population asks for torch's
            again = backend != "loky" and recipe.training.kernels == "auto"
            job = _job(path, manifest, data, device, None if again else kernels)
            if todo:
                warn_of_other_builds(path, manifest, made_on(kernels, device))
            _train(job, todo, manifest, chosen.on_device(device, len(todo)), progress, shard)
        if shard is None or (manifests.read(path).networks < manifest.networks and shards.complete(path, manifest)):
            manifests.record_size(path, manifest)
    except KeyboardInterrupt:
        raise Resumable(f"stopped: {_kept(path, manifest)}; run the same command again to resume") from None
    except ClusterLost as error:
        raise Resumable(f"{error}: {_kept(path, manifest)}; run the same command again to resume") from error
    except TilesFailed as error:
        failure = _failure(error.errors, path, manifest)
        if created:
            _leave_nothing(path, existed)
        raise failure from next(iter(error.errors.values()))
    except Exception:
        if created:
            _leave_nothing(path, existed)
        raise
    finally:
        _sweep(path)  # workers that were terminated may have been writing
    return Population(path, partial=True)


def _train(job: Job, todo: list[int], manifest: Manifest, workers: Workers, progress: bool, shard: int | None) -> None:
    total = manifest.networks if shard is None else manifest.rows(shard)
    finished = total - sum(map(manifest.rows, todo))
    running: dict[int, float] = {}
    with _Bar(total, finished, show=progress) as bar:

        def show(tile: int, done: float) -> None:
            running[tile] = done * manifest.rows(tile)
            bar.move_to(finished + sum(running.values()))

        with contextlib.closing(spread(job, todo, workers, show)) as tiles:
            for tile, _ in tiles:
                running.pop(tile, None)
                finished += manifest.rows(tile)
                bar.move_to(finished + sum(running.values()))


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

    # Another process may have changed the population's size in the meantime; the shard then holds more networks.
    there = manifests.read(path)
    manifests.match(path, there, manifest)
    if shards.state(path, manifest, tile).kind == "done":  # by a worker that was believed to be dead
        return tile, shards.tidy_hash(shards.shard_file(path, tile))
    own_code.load()
    if kernels is not None:
        trust(recipe, torch.device(device), kernels)
    trained = train_tile(recipe, tile, data_root=data, device=device, progress=progress)
    there = manifests.read(path)
    manifests.match(path, there, manifest)
    larger = there if there.networks > manifest.networks else manifest
    if kernels is None:
        kernels = choose_kernels(recipe, torch.device(device))
    return tile, shards.save(path, larger, trained, made_on(kernels, device), kernels.checked)[1]


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

    return partial(
        train_shard,
        training.train_tile,
        portable(manifest.recipe, kernels, data),
        path=path.absolute(),
        manifest=manifest,
        data=None if data is None else Path(data).absolute(),
        device=device,
        own_code=OwnCode.of(name for _, name in manifest.recipe.references),
        kernels=kernels,
    )


def _kept(path: Path, manifest: Manifest) -> str:
    here = shards.networks_on_disk(path, manifest)
    return f"{here} of {manifest.networks} networks are kept in {path}"


def _failure(errors: Mapping[int, Exception], path: Path, manifest: Manifest) -> WeightscopeError:
    """The error that says which tiles failed and why."""
    error = next(iter(errors.values()))
    died = isinstance(error, WorkerDied)
    kind = DataError if isinstance(error, DataError) else Resumable
    why = str(error) if died or isinstance(error, WeightscopeError) else f"{type(error).__name__}: {error}"
    advice = "with fewer workers if memory is short" if died else "when the cause is gone"
    where, kept = manifest.described(list(errors)), _kept(path, manifest)
    return kind(f"{why}, in {where}: {kept}; run the same command again, {advice}")


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
