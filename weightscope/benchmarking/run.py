"""`bench`: compare initialisers on paired seeds.

Every arm (cell x length x initialiser x frozen or not) is a population trained by `collect`, so a benchmark can be
resumed, and network k of every arm of a cell starts from the same default weights, sees the same batches in the same
order with the same augmentation, and differs in its initialiser alone.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky.process_executor import BrokenProcessPool
from tqdm import tqdm

from weightscope._util import atomic, plugins
from weightscope._util.checks import count
from weightscope._util.environment import environment, usable_cores
from weightscope._util.names import unknown
from weightscope._util.results import finite_or_none
from weightscope._util.sources import is_population
from weightscope.benchmarking.design import Arm, Axis, Init, default_folder, plan_arms, point_text
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.statistics import Chance, cell_key, chance_of, summarise
from weightscope.data.metrics import Metric
from weightscope.errors import RecipeError, Resumable, UsageError
from weightscope.networks import build_for
from weightscope.population import Population, recipe_of, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import BenchConfig, Recipe
from weightscope.training import request
from weightscope.training.collection import collect
from weightscope.training.devices import resolve_device
from weightscope.training.initial_weights import check_initialisers, resolve
from weightscope.training.request import hashed_once
from weightscope.training.tile_size import choose_tile

SEED_OFFSET = 1_000_000
TILE = 32
RUNS, TIMES = "runs", "times"


def bench(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] = (),
    out: str | Path | None = None,
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    seed: int | None = None,
    frozen: str | None = None,
    control: str | None = None,
    vary: Mapping[str, Any] | Sequence[Axis] = (),
    grid: Mapping[str, Any] | Sequence[Axis] = (),
    **options: Any,
) -> BenchResult:
    """Train every arm, compare them on paired seeds, and write `out/results.json`.

    Args:
        recipe: network, data and training: a recipe, a .toml file, the name of a shipped recipe, or the folder of a
            population. What is not given here is taken from its [bench] table.
        inits: see `plan_arms`; the others are compared with the first.
        out: folder of the arms' populations and the results; named after the recipe if None. Calling again resumes.
        epochs: see `plan_arms`.
        seeds: see `plan_arms`.
        seed: root of the benchmark's random streams. By default one of its own, the recipe's plus 1,000,000, since a
            population of the recipe, from which an artifact may come, has the recipe's.
        frozen: see `plan_arms`.
        control: see `plan_arms`; "scale" tells what an initialiser's structure adds beyond its scale.
        vary: see `plan_arms`.
        grid: see `plan_arms`.
        options: `metric`, the name of the task's metric that is compared, such as "test_loss"; the primary one if it is
            not given. All are in the results. The others are passed on to `collect` (`workers`, `device`, `data`,
            `progress`, ...). With `collector`, a function with the signature of `collect`, the arms are trained by it,
            one after the other.

    Raises:
        UsageError: see `plan_arms`; also for an unknown initialiser or metric, and for a seed of the population that an
            artifact was fitted to, before anything is trained.
        DataError: if trained weights that an arm takes have changed in the meantime.
        Resumable: if interrupted.

    Example:
        >>> result = bench("digits-convnext", ["default", my_init])
        >>> print(result)
        >>> result.plot("bench.png")
        >>> bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}).plot("axis.png")
    """
    folder = default_folder(recipe) if out is None else Path(out)
    if is_population(folder) or folder.is_file():
        what = "a file" if folder.is_file() else "a population"
        raise UsageError(f"{folder}: expected a folder for the results, found {what}; give another one (-o)")
    given = {"init": inits, "epochs": epochs, "seeds": seeds, "seed": seed, "frozen": frozen}
    recipe = recipe_of(recipe)
    name = options.pop("metric", None) or (recipe.bench or BenchConfig()).metric
    recipe, arms = planned(recipe, **given, control=control, vary=vary, grid=grid, metric=name)
    metric, metrics = metrics_of(arms, name)
    collector = options.pop("collector", None)
    runs: list[dict[str, Any]] = []
    device: dict[str, Any] = {}
    complete = [arm.recipe.completed(options.get("data")) for arm in arms]
    check_arms(arms, complete)
    with hashed_once(complete):
        for arm, population, seconds in _trained(arms, folder, collector, options):
            runs += _rows(arm, population, seconds, metric, metrics)
            device = population.environment
    about = {**environment(), **device, "recipe": recipe.to_dict()}
    chances = _chances(arms, complete, metric, options.get("data"))
    result = BenchResult(runs, summarise(runs, metric, chances), about, metric, metrics)
    atomic.make_folder(folder)
    atomic.write(folder / "results.json", json.dumps(result.to_dict(), indent=1, allow_nan=False).encode() + b"\n")
    return result


def _chances(
    arms: Sequence[Arm], recipes: Sequence[Recipe], metric: Metric, root: str | Path | None
) -> dict[str, Chance]:
    """The chance level of each cell that has one; each data set is read once."""
    keys = [recipe.data.model_dump_json() for recipe in recipes]
    levels = {key: chance_of(recipe, metric, root) for key, recipe in dict(zip(keys, recipes, strict=True)).items()}
    cells = {cell_key({"cell": dict(arm.cell)}): levels[key] for arm, key in zip(arms, keys, strict=True)}
    return {cell: level for cell, level in cells.items() if level is not None}


def planned(recipe: Recipe | str | Path, **given: Any) -> tuple[Recipe, list[Arm]]:
    """The recipe with the benchmark's seed, and its arms, every initialiser checked.

    Args:
        recipe: see `bench`.
        given: `init`, `epochs`, `seeds`, `seed`, `frozen`, `control`, `vary`, `grid` and `metric`; what is None or
            empty is taken from the recipe's [bench] table.

    Raises:
        UsageError: see `bench`.
    """
    recipe = recipe_of(recipe)
    table = (recipe.bench or BenchConfig()).model_dump()
    design = {**table, **{key: value for key, value in given.items() if value not in (None, (), [], {})}}
    own, inits, metric = (design.pop(key) for key in ("seed", "init", "metric"))
    if not inits:
        raise UsageError("--init: expected at least one initialiser, here or in the recipe's [bench] table, found none")
    recipe = recipe.model_copy(update={"bench": None})

    def arms_with(seed: int) -> list[Arm]:
        return plan_arms(recipe.replace({"population.seed": seed}), inits, **design)

    seed = recipe.population.seed + SEED_OFFSET if own is None else count("seed", own, least=0)
    arms = arms_with(seed)
    metrics_of(arms, metric)
    used = _fitted_seeds(arms)
    if own is not None and seed in used:
        raise UsageError(
            f"seed: expected one that no artifact was fitted to, found {seed}, that of the population of {used[seed]}; "
            "give another, or none"
        )
    while seed in used:
        seed += SEED_OFFSET
        arms = arms_with(seed)
    return recipe.replace({"population.seed": seed}), arms


def check_arms(arms: Sequence[Arm], recipes: Sequence[Recipe]) -> None:
    """Apply the initialiser of each arm to one network of its recipe.

    Raises:
        RecipeError: if it does not apply to the network, or raises; names the arm's cell.
        DataError: if a file that it reads is missing or damaged.
    """
    for arm, recipe in zip(arms, recipes, strict=True):
        try:
            check_initialisers(recipe, partial(build_for, recipe))
        except RecipeError as error:
            cell = f"{point_text(dict(arm.cell))}: " if arm.cell else ""
            raise RecipeError(f"{cell}{error}") from error


def metrics_of(arms: Sequence[Arm], name: str | None) -> tuple[Metric, tuple[Metric, ...]]:
    """The metric that arms are compared by, the primary one if it is not named, and all that their tasks share.

    Raises:
        UsageError: if their tasks have none of this name, or none in common.
    """
    tasks = [arm.recipe.data.metrics for arm in arms]
    shared = tuple(metric for metric in tasks[0] if all(metric in task for task in tasks))
    names = [metric.name for metric in shared]
    if not shared:
        raise UsageError("data: expected tasks with a metric in common, found none; compare them one by one")
    if name is not None and name not in names:
        raise UsageError(f"metric: {unknown('metric of this task', name, names)}")
    return shared[0 if name is None else names.index(name)], shared


def _fitted_seeds(arms: Sequence[Arm]) -> dict[int, str]:
    """The seeds of the populations that the arms' artifacts were fitted to; resolves every initialiser."""
    seeds: dict[int, str] = {}
    for config in {
        json.dumps(arm.recipe.to_dict()["init"], sort_keys=True): arm.recipe.init[0] for arm in arms
    }.values():
        fitted = getattr(resolve(config), "result", None)
        recipe = getattr(fitted, "provenance", {}).get("recipe") if config.artifact is not None else None
        if isinstance(recipe, dict) and isinstance(recipe.get("population"), dict):
            seeds[int(recipe["population"].get("seed", 0))] = str(config.artifact)
    return seeds


def _trained(
    arms: Sequence[Arm], folder: Path, collector: Callable[..., Any] | None, options: dict[str, Any]
) -> Iterator[tuple[Arm, Any, list[float | None]]]:
    """Each arm with its population and the seconds that each network took."""
    if collector is not None or options.get("backend", "loky") != "loky":  # a cluster spreads the tiles of an arm
        for arm in arms:
            population = (collector or collect)(arm.recipe, folder / RUNS / arm.folder, **options)
            yield arm, population, [None] * len(population)
        return
    device = resolve_device(options.get("device", "auto"))
    recipes = with_tiles(arms, folder, device, options.get("data"))
    tasks = tasks_of(arms, recipes, folder)
    workers = options.get("workers")
    if workers is None and device.type != "cpu":
        workers = 1
    left = {task.path for task in tasks if not done(task)}
    for arm, recipe in zip(arms, recipes, strict=True):
        path = folder / RUNS / arm.folder
        if path not in left:  # trains nothing, but compares data, own code and artifacts with those of then
            collect(recipe, path, **{**options, "workers": 1, "progress": False})
    train_all(tasks, workers, options.get("progress", True), options)
    for arm in arms:
        path = folder / RUNS / arm.folder
        population = Population(path, partial=True)
        mine = sorted((task for task in tasks if task.path == path), key=lambda task: task.tile)
        yield arm, population, seconds_of(population, mine)


def _rows(
    arm: Arm, population: Any, seconds: Sequence[float | None], metric: Metric, metrics: Sequence[Metric]
) -> list[dict[str, Any]]:
    """One row for each network of an arm."""
    found = population.metrics
    curves = found.get(f"{metric.name}_per_epoch")
    return [
        {
            "init": arm.init,
            "cell": dict(arm.cell),
            "numbers": dict(arm.numbers),
            "epochs": arm.epochs,
            "seed": k,
            **{each.key: finite_or_none(found[each.name][k]) for each in metrics},
            "diverged": bool(found["diverged"][k]),
            "curve": [] if curves is None else [finite_or_none(value) for value in curves[k]],
            "seconds": seconds[k],
        }
        for k in range(min(len(population), arm.recipe.population.networks))
    ]


# --- tiles of all arms, side by side on the workers -------------------------------------------------------------------


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
        recipe, path = arm.recipe.completed(data), folder / RUNS / arm.folder
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
    images = recipe.data.load(data)
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
