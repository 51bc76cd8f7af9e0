"""Train the arms of a benchmark, tiles of all arms side by side on the workers.

A task is one tile of one arm, trained by `collect`; what is on disk is all there is of its state. So a benchmark that
was stopped resumes, and a finished tile is never trained again.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky.process_executor import BrokenProcessPool
from tqdm import tqdm

from weightscope._util import atomic, plugins
from weightscope._util.checks import count
from weightscope._util.environment import usable_cores
from weightscope.benchmarking.arms import Arm
from weightscope.data import load
from weightscope.errors import RecipeError, Resumable
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.training import request
from weightscope.training.collection import collect
from weightscope.training.request import with_classes
from weightscope.training.tile_size import choose_tile

TILE = 32
RUNS, TIMES = "runs", "times"


@dataclass(frozen=True)
class Task:
    """One tile of one arm.

    Attributes:
        recipe: of the arm.
        path: of the arm's population.
        tile: index of the tile.
        time: file that keeps the seconds that it took.
    """

    recipe: Recipe
    path: Path
    tile: int
    time: Path

    @property
    def rows(self) -> int:
        """The number of networks of the tile that count; the last tile may be padded."""
        size = self.recipe.population.tile or TILE
        return min(size, self.recipe.population.networks - self.tile * size)


def with_tiles(arms: Sequence[Arm], folder: Path, device: torch.device, data: str | Path | None) -> list[Recipe]:
    """The arms' recipes with the sizes of their tiles: those on disk, or the recipe's but not more than the networks.

    On a GPU, a size that no recipe gives is chosen by the memory that the first arm of each cell takes.

    Raises:
        RecipeError: if an arm's population on disk has another recipe.
    """
    chosen: dict[str, int] = {}
    out = []
    for arm in arms:
        recipe, path = with_classes(arm.recipe, data), folder / RUNS / arm.folder
        tile = recipe.population.tile or (TILE if device.type == "cpu" else None)
        if (path / manifests.NAME).exists():
            there = manifests.read(path)
            kernels = there.recipe.training.kernels if recipe.training.kernels == "auto" else recipe.training.kernels
            recipe = recipe.replace({"population.tile": there.tile, "training.kernels": kernels})
            _refuse_another(path, there.recipe, recipe)
            out.append(recipe)
            continue
        if tile is None:
            key = json.dumps(dict(arm.cell))
            chosen[key] = chosen.get(key) or _tile_on(recipe, device, data)
            tile = chosen[key]
        out.append(recipe.replace({"population.tile": min(tile, recipe.population.networks)}))
    return out


def _tile_on(recipe: Recipe, device: torch.device, data: str | Path | None) -> int:
    images = load(recipe.data, data, **recipe.data.counts)
    return choose_tile(recipe, images, device)


def _refuse_another(path: Path, there: Recipe, wanted: Recipe) -> None:
    lines = [line for line in there.differences(wanted) if not line.startswith("population.networks:")]
    if lines:
        raise RecipeError(
            f"{path} was trained with another recipe (there -> this benchmark): {'; '.join(lines)}; "
            "give another folder (-o), or the same recipe and --seed"
        )


def tasks_of(arms: Sequence[Arm], recipes: Sequence[Recipe], folder: Path) -> list[Task]:
    """All tiles of all arms, the first tiles of all arms first."""
    out = []
    for arm, recipe in zip(arms, recipes, strict=True):
        size = recipe.population.tile or TILE
        path = folder / RUNS / arm.folder
        for tile in range(-(-recipe.population.networks // size)):
            time_file = folder / TIMES / Path(arm.folder).with_suffix("") / f"{tile}.json"
            out.append(Task(recipe, path, tile, time_file))
    return sorted(out, key=lambda task: task.tile)


def done(task: Task) -> bool:
    """Whether the tile is on disk, whole."""
    if not (task.path / manifests.NAME).exists():
        return False
    manifest, wanted = manifests.read(task.path), task.recipe.population.networks
    manifest = manifest.resized(wanted) if manifest.networks < wanted else manifest
    return shards.state(task.path, manifest, task.tile).kind == "done"


def train(task: Task, options: dict[str, Any]) -> None:
    """Train one tile and keep its time. The task of a worker."""
    start = time.perf_counter()
    quiet = {**options, "workers": 1, "progress": False}
    collect(task.recipe, task.path, shard=task.tile, **quiet)
    atomic.make_folder(task.time.parent)
    atomic.write(task.time, json.dumps({"seconds": time.perf_counter() - start, "networks": task.rows}).encode())


def train_all(tasks: Sequence[Task], workers: int | None, progress: bool, options: dict[str, Any]) -> None:
    """Train the tiles that are not on disk, on `workers` processes of this machine.

    Raises:
        Resumable: if interrupted, or a worker died; says how many tiles are kept.
    """
    todo = [task for task in tasks if not done(task)]
    total = sum(task.rows for task in tasks)
    try:
        with tqdm(total=total, initial=total - sum(t.rows for t in todo), desc="bench", unit=" networks",
                  disable=None if progress else True) as bar:  # fmt: skip
            recipes = [task.recipe for task in todo]
            for task in on_workers(_finished, [(task, options) for task in todo], workers, recipes):
                bar.update(task.rows)
    except KeyboardInterrupt:
        raise Resumable(f"stopped: {_kept(tasks)}; run the same command again to resume") from None
    except BrokenProcessPool as error:
        why = "a worker process died, perhaps because memory ran out"
        raise Resumable(f"{why}: {_kept(tasks)}; run the same command again, with fewer workers") from error


def on_workers(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int | None, recipes: Sequence[Recipe]
) -> Iterator[Any]:
    """The results of calls in any order: of processes with one thread each, or of this one if `workers` is 1.

    Functions of the recipes that users passed in Python are known to the processes.
    """
    number = min(count("workers", workers) if workers is not None else usable_cores(), len(calls))
    if number <= 1:
        for call in calls:
            yield function(*call)
        return
    with joblib.parallel_config("loky", n_jobs=number, inner_max_num_threads=1):
        # one call at a time, or a bundle of short ones would be lost as a whole
        parallel = joblib.Parallel(batch_size=1, return_as="generator_unordered")
        run = joblib.delayed(_in_worker)
        passed = plugins.passed({name for recipe in recipes for _, name in recipe.references})
        place = _Place(os.getcwd(), list(sys.path), passed, request.passed())
        with contextlib.closing(parallel(run(function, call, place) for call in calls)) as results:
            yield from results


@dataclass(frozen=True)
class _Place:
    """Where calls run, the same in all processes; a worker outlives the benchmark for which it was started.

    Attributes:
        folder: the working directory, to which paths are relative.
        path: on which modules of users' own are found.
        passed: their functions that cannot be imported; see `plugins.passed`.
        hashes: of trained weights; see `request.passed`.
    """

    folder: str
    path: list[str]
    passed: dict[str, tuple[Any, str]]
    hashes: dict[tuple[str, str], str]


def _in_worker(function: Callable[..., Any], call: tuple[Any, ...], place: _Place) -> Any:
    plugins.restore(place.passed)
    os.chdir(place.folder)
    sys.path[:] = dict.fromkeys((*sys.path, *place.path))
    with request.restored(place.hashes):
        return function(*call)


def _finished(task: Task, options: dict[str, Any]) -> Task:
    train(task, options)
    return task


def _kept(tasks: Sequence[Task]) -> str:
    return f"{sum(map(done, tasks))} of {len(tasks)} tiles are kept"


def seconds_of(population: Population, tasks: Sequence[Task]) -> list[float | None]:
    """For each network, its share of the seconds that its tile took; None where they are not known."""
    out: list[float | None] = []
    for task in tasks:
        try:
            share = float(json.loads(task.time.read_text())["seconds"]) / (task.recipe.population.tile or TILE)
        except (OSError, ValueError, KeyError, TypeError):
            share = None
        out += [share] * task.rows
    return out[: len(population)]
