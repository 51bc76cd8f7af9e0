"""`bench`: compare initialisers on paired seeds; `plan_bench`: what that costs, from short measurements of its tiles.

Every arm (cell x length x initialiser x frozen or not) is a population, whose tiles are trained side by side with those
of the others. So a benchmark can be resumed, and network k of every arm of a cell starts from the same default weights,
sees the same batches in the same order with the same augmentation, and differs in its initialiser alone.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightscope._util import atomic
from weightscope._util.arms import epochs_text, point_text
from weightscope._util.checks import count
from weightscope._util.environment import environment, usable_cores
from weightscope._util.names import listing, unknown
from weightscope._util.results import Result, duration, finite_or_none, text_table
from weightscope._util.sources import as_path, is_population
from weightscope._util.threads import one_thread
from weightscope._util.trust import trusting
from weightscope._util.workers import Workers, chosen_workers
from weightscope.benchmarking.design import Arm, default_folder, plan_arms
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.statistics import ArmKey, Contrast, arm_key, contrast_tests, summarise
from weightscope.data.metrics import ACCURACY, METRICS, PER_EPOCH, Metric, over_lengths
from weightscope.errors import RecipeError, UsageError
from weightscope.init.named import Init, resolve
from weightscope.networks import build_for
from weightscope.population import Population, recipe_of, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import BenchConfig, Recipe
from weightscope.training.collection import TileResult, train
from weightscope.training.devices import check_memory, resolve_device
from weightscope.training.engine import spec_of
from weightscope.training.initial_weights import check_initialisers
from weightscope.training.planning import tile_seconds
from weightscope.training.request import Request, choose_tile

SEED_OFFSET = 1_000_000
TILE = 32  # networks on a CPU, at most
RUNS, PROBES, RESULTS, SPEEDS = "runs", "probes", "results.json", "throughput.json"
_COUNTED = ("arms", "networks", "tiles", "done")
Measured = tuple[Mapping[str, Any], dict[str, Any], np.ndarray | None]
"""Of an arm the metrics of its networks (n,), the environment, and `Population.hits`."""


@one_thread()
def bench(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] | Mapping[str, Init] = (),
    out: str | Path | None = None,
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    seed: int | None = None,
    frozen: str | None = None,
    control: str | Sequence[str] = (),
    contrasts: Sequence[Sequence[Mapping[str, Any]]] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    metric: str | None = None,
    overwrite: bool = False,
    data: str | Path | None = None,
    progress: bool = True,
    on_tile: Callable[[TileResult], None] | None = None,
    trust: bool = False,
    throughput: bool = False,
    **where: Any,
) -> BenchResult:
    """Train every arm, compare them on paired seeds, and write `out/results.json`.

    `recipe` is a recipe, a .toml file, the name of a shipped one, or the folder of a population; what is not given here
    is taken from its [bench] table. `inits`, `epochs`, `seeds`, `frozen`, `control`, `vary` and `grid` are those of
    `plan_arms`; the first initialiser is the reference of the others, and `control=("scale", "uncorrelated")` tells
    what structure adds beyond its scale, and what correlations add. `contrasts` are sums of means of arms, such as
    `[{"init": "my_init"}, {"init": "default", "weight": -1}]` (see `Contrast.of`), which are tested at 5 % by
    themselves; all other comparisons are exploratory, and adjusted for one another. A contrast that is added to results
    that are there is post hoc.

    `data`, `progress`, `on_tile`, `trust` and `where` (`workers`, `backend`, `scheduler` and `device`) are those of
    `collect`.

    `throughput` adds the images per second of each arm at evaluation, measured on the tiles that are trained now; see
    `BenchResult`.

    `out` is the folder of the arms' populations and the results, named after the recipe if None; calling again resumes.
    Results that would lose arms or seeds, or are of another recipe, are only replaced with `overwrite`.
    `seed` is the root of the random streams. By default it is not the recipe's but 1,000,000 more, since a population
    of the recipe, from which an artifact may come, has the recipe's. `metric` is the task's metric that is compared,
    such as "test_loss"; the primary one if None.

    Errors of the arguments come before anything is trained, also for a seed of the population that an artifact was
    fitted to. A DataError says that trained weights that an arm takes have changed in the meantime.

    Example:
        >>> result = bench("digits-convnext", ["default", my_init])
        >>> print(result)
        >>> result.plot("bench.png")
        >>> bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}).plot("axis.png")
    """
    given: dict[str, Any] = {"epochs": epochs, "seeds": seeds, "seed": seed, "frozen": frozen, "control": control}
    given |= {"contrasts": contrasts, "vary": vary, "grid": grid, "metric": metric, "overwrite": overwrite}
    with trusting(trust):
        plan = plan_bench(recipe, inits, out, **where, **given, data=data, measure=False)
        return plan.run(progress=progress, on_tile=on_tile, throughput=throughput)


@dataclass(frozen=True, repr=False)
class BenchPlan(Result):
    """A benchmark that is checked, and its planned cost.

    One row of `cells` for each cell: `cell`, `arms`, `networks`, `tiles`, `done` (tiles that are on disk), and, if
    measured, the `seconds` of one worker that the others take.
    """

    cells: list[dict[str, Any]]
    workers: int  # processes
    seconds: float | None  # expected wall time; None if not measured
    design: "Design" = field(compare=False)  # what is compared
    requests: Sequence[Request] = field(compare=False)  # the populations of the arms
    on: Workers = field(compare=False)  # where they are trained

    def run(
        self,
        *,
        progress: bool = True,
        on_tile: Callable[[TileResult], None] | None = None,
        throughput: bool = False,
    ) -> BenchResult:
        """Train the tiles of all arms that are not on disk, and compare the arms.

        UsageError with `throughput` if an arm evaluates no images, or evaluates only once.
        """
        titles = {request.path: arm.title for arm, request in zip(self.design.arms, self.requests, strict=True)}
        places = {request.path: arm.folder for arm, request in zip(self.design.arms, self.requests, strict=True)}
        if throughput:
            self.design.check_throughput()

        def ended(result: TileResult) -> None:
            if throughput and result.speed is not None:
                speeds = self.design.speeds()
                speeds.setdefault(places[result.path], {})[str(result.tile)] = result.speed
                atomic.write(self.design.folder / SPEEDS, json.dumps(speeds, indent=1).encode() + b"\n")
            if on_tile is not None:
                on_tile(replace(result, name=titles[result.path]))

        train(self.requests, self.on, progress=progress, label="bench", on_tile=ended)
        populations = (Population(request.path, partial=True) for request in self.requests)
        return self.design.result((found.metrics, found.environment, found.hits) for found in populations)

    def rows(self) -> list[dict[str, Any]]:
        return [{**row, "cell": point_text(row["cell"])} for row in self.cells]

    def to_dict(self) -> dict[str, Any]:
        contrasts = [contrast.text for contrast in self.design.contrasts]
        return {"cells": self.cells, "workers": self.workers, "seconds": self.seconds, "contrasts": contrasts}

    def summary(self) -> str:
        arms, networks, tiles, done = (sum(r[key] for r in self.cells) for key in _COUNTED)
        counted = [("cell", len(self.cells)), ("arm", arms), ("network", networks), ("tile", tiles)]
        words = [f"{number} {name}{'s' * (number != 1)}" for name, number in counted]
        text = f"{', '.join(words[:3])} in {words[3]}"
        text += f", {done} of them done" if done else ""
        if self.seconds is not None:
            text += f"; expected time {duration(self.seconds)} with {self.workers} worker{'s' * (self.workers != 1)}"
        for contrast in self.design.contrasts:
            late = " (post hoc: its results are there)" if contrast.text in self.design.late else ""
            text += f"\ndeclared contrast: {contrast.text}{late}"
        if several := len(self.design.contrasts):
            rule = "at 5 %" if several == 1 else f"at 5 % for the {several} of them (Holm)"
            text += f"\ntested {rule}; all other comparisons are exploratory, adjusted for one another (Holm)"
        return text

    def text(self) -> str:
        if len(self.cells) == 1 and not self.cells[0]["cell"]:
            return self.summary()
        header = ("cell", *_COUNTED, "time of one worker")
        rows = [(point_text(r["cell"]), *(r[key] for key in _COUNTED), duration(r["seconds"])) for r in self.cells]
        return f"{text_table(header, rows)}\n{self.summary()}"


def plan_bench(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] | Mapping[str, Init] = (),
    out: str | Path | None = None,
    *,
    measure: bool = True,
    workers: Workers | int | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    device: str = "auto",
    progress: bool = True,
    **given: Any,
) -> BenchPlan:
    """What `bench` with the same arguments will cost.

    A tile of each kind that takes another time is trained for a step and evaluated by a worker. Nothing is kept of it.

        seconds of a tile = start + epochs x steps per epoch x seconds of a step + evaluations x seconds of one
        seconds = seconds of all tiles / workers

    The arguments are those of `bench`; `progress` has no effect. Tiles in `out` are not counted again. Without
    `measure`, only the numbers of arms, networks and tiles are returned.

    Example:
        >>> print(plan_bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}))
    """
    design = Design.of(recipe, inits, out, **given)
    on = chosen_workers(backend, workers, scheduler)
    requests = design.requests(on, device)
    missing = [r.manifest.tiles - shards.tiles_done(r.path, r.manifest) for r in requests]
    on = on.on_device(requests[0].device, sum(missing))
    timed = [i for i, left in enumerate(missing) if left] if measure else []
    costs = dict(zip(timed, tile_seconds([requests[i] for i in timed], on) if timed else [], strict=True))
    rows: dict[str, dict[str, Any]] = {}
    for i, (arm, request, left) in enumerate(zip(design.arms, requests, missing, strict=True)):
        row = rows.setdefault(arm.cell_key, {"cell": dict(arm.cell), **dict.fromkeys((*_COUNTED, "seconds"), 0)})
        tiles = request.manifest.tiles
        counted = 1, request.manifest.networks, tiles, tiles - left, costs.get(i, 0.0) * left
        for key, more in zip((*_COUNTED, "seconds"), counted, strict=True):
            row[key] += more
    workers = on.count or usable_cores()
    expected = sum(row["seconds"] for row in rows.values()) / workers if measure else None
    cells = [row if measure else row | {"seconds": None} for row in rows.values()]
    return BenchPlan(cells, workers, expected, design, requests, on)


@dataclass(frozen=True)
class Design:
    """What a benchmark compares, and where its results go."""

    folder: Path
    recipe: Recipe
    arms: tuple[Arm, ...]
    metric: Metric
    metrics: tuple[Metric, ...]
    data: str | Path | None = None
    contrasts: tuple[Contrast, ...] = ()
    late: frozenset[str] = frozenset()  # texts of contrasts that were not declared before the results

    @classmethod
    def of(
        cls,
        recipe: Recipe | str | Path,
        inits: Sequence[Init] | Mapping[str, Init] = (),
        out: str | Path | None = None,
        *,
        data: str | Path | None = None,
        overwrite: bool = False,
        probe: bool = False,
        **given: Any,
    ) -> "Design":
        """The design of a benchmark with these arguments of `bench`; what is None or empty is taken from [bench].

        The networks of a linear `probe` are not trained; its arms have 0 epochs.
        """
        folder, recipe = default_folder(recipe) if out is None else as_path(out), recipe_of(recipe)
        _check_folder(folder)
        given = {key: value for key, value in {**given, "init": inits}.items() if value not in (None, (), [], {})}
        wanted = dict(recipe.bench or BenchConfig()) | given
        own, inits, metric, terms = (wanted.pop(key) for key in ("seed", "init", "metric", "contrasts"))
        if not inits:
            raise UsageError(
                "--init: expected at least one initialiser, here or in the recipe's [bench] table, found none"
            )
        recipe = recipe.model_copy(update={"bench": None})

        def arms_with(seed: int) -> list[Arm]:
            arms = plan_arms(recipe.replace({"population.seed": seed}), inits, **wanted)
            return [replace(arm, epochs=0) for arm in arms] if probe else arms

        seed = recipe.population.seed + SEED_OFFSET if own is None else count("seed", own, least=0)
        arms = arms_with(seed)
        metrics = metrics_of(arms, metric)
        used = _fitted_seeds(arms)
        if own is not None and seed in used:
            raise UsageError(
                f"seed {seed}: {used[seed]} was fitted to a population with this seed; choose another seed, or none"
            )
        while seed in used:
            seed += SEED_OFFSET
            arms = arms_with(seed)
        places = [(arm.cell, arm.epochs, arm.init) for arm in arms]
        contrasts = [Contrast.of(each, places) for each in terms]
        stored = BenchResult.load(folder) if not overwrite and (folder / RESULTS).exists() else None
        declared = {row["contrast"] for row in stored.contrasts if row["declared"]} if stored else set()
        late = frozenset(one.text for one in contrasts if stored and one.text not in declared)
        trained = recipe.replace({"population.seed": seed})
        design = cls(folder, trained, tuple(arms), *metrics, data, tuple(contrasts), late)
        if stored is not None:
            design._check_results(stored, probe)
        return design

    def _check_results(self, stored: BenchResult, probe: bool) -> None:
        """UsageError unless these results will hold all that is in the stored ones."""
        free = ("population.networks", "training.epochs", *(("training", "distillation") if probe else ()))
        lines = Recipe.parse(stored.environment["recipe"]).differences(self.recipe)
        chosen = ("training.kernels: auto", "training.kernels: absent")  # the runs keep what auto became
        what = [line for line in lines if not line.startswith((*free, *chosen)) and not line.endswith("-> auto")][:3]
        mine = {(arm.cell_key, arm.epochs, arm.init) for arm in self.arms}
        lost = [row for row in stored.arms if arm_key(row) not in mine]
        if lost:
            places = [(row["init"], point_text(row["cell"]), epochs_text(row["epochs"])) for row in lost]
            what.append(f"arms that are missing here: {listing([', '.join(filter(None, one)) for one in places], 3)}")
        elif (most := max(row["networks"] for row in stored.arms)) > self.arms[0].recipe.population.networks:
            what.append(f"{most} seeds")
        if what:
            raise UsageError(
                f"{self.folder} holds the results of another benchmark ({'; '.join(what)}); give another folder (-o), "
                "or --overwrite to replace them"
            )

    def check_throughput(self) -> None:
        """UsageError unless every arm evaluates images at least twice; the first evaluation is not measured."""
        for arm in self.arms:
            if arm.recipe.data.what != "images":
                raise UsageError(f"throughput: expected images, found {arm.recipe.data.what}")
            if arm.recipe.training.evaluate != "epoch" or arm.epochs < 2:
                found = f"evaluate = {arm.recipe.training.evaluate!r} and {epochs_text(arm.epochs)}"
                raise UsageError(f"throughput: expected evaluate = 'epoch' and 2 epochs or more, found {found}")

    def speeds(self) -> dict[str, dict[str, Any]]:
        """What was measured of each tile of each arm's folder: `images_per_second` and `measured_on`."""
        file = self.folder / SPEEDS
        return json.loads(file.read_text()) if file.exists() else {}

    def check(self) -> None:
        """Apply the initialiser of each arm to one network; RecipeError names the arm's cell."""
        for arm in self.arms:
            recipe = arm.recipe.completed(self.data)
            with _in_cell(arm):
                check_memory(recipe.replace({"population.tile": 1}), torch.device("cpu"))
                check_initialisers(recipe, partial(build_for, recipe))

    def requests(self, workers: Workers, device: str) -> list[Request]:
        """The populations of the arms, checked once; nothing is written."""
        where, shared = resolve_device(device), dict[Any, Any]()
        cluster = workers.backend != "loky"
        out = []
        for arm in self.arms:
            path = self.folder / RUNS / arm.folder
            there = manifests.read(path) if (path / manifests.NAME).exists() else None
            tile = self._tile(arm, where, shared) if there is None else there.tile
            recipe = arm.recipe.replace({"population.tile": tile})
            with _in_cell(arm):
                out.append(Request.of(recipe, path, data=self.data, device=device, cluster=cluster, shared=shared))
            if there is not None:
                manifests.match(path, there, out[-1].manifest)
        return out

    def _tile(self, arm: Arm, device: torch.device, shared: dict[Any, Any]) -> int:
        """Networks in a tile: the recipe's, or on a GPU by the memory that the first arm of each cell takes."""
        tile = arm.recipe.population.tile or (TILE if device.type == "cpu" else shared.get(("tile", arm.cell_key)))
        if tile is None:
            recipe = arm.recipe.completed(self.data)
            tile = shared["tile", arm.cell_key] = choose_tile(recipe, recipe.data.load(self.data), device)
        return min(tile, arm.recipe.population.networks)

    def result(self, measured: Iterable[Measured]) -> BenchResult:
        """Compare the arms and write `results.json`."""
        runs: list[dict[str, Any]] = []
        device: dict[str, Any] = {}
        hits: dict[ArmKey, np.ndarray] = {}
        for arm, (metrics, device, right) in zip(self.arms, measured, strict=True):  # noqa: B007 - the last device
            runs += self._rows(arm, metrics)
            if right is not None and self.metric == ACCURACY:
                hits[arm.cell_key, arm.epochs, arm.init] = right
        about = {**environment(), **device, "recipe": self.recipe.to_dict()}
        recipes = {arm.cell_key: arm.recipe.completed(self.data) for arm in self.arms}
        sections = {recipe.data.model_dump_json(): recipe.data for recipe in recipes.values()}
        levels = {text: data.chance(self.metric, self.data) for text, data in sections.items()}  # each is read once
        known = {place: levels[recipe.data.model_dump_json()] for place, recipe in recipes.items()}
        chances = {place: level for place, level in known.items() if level is not None}
        arms = summarise(runs, self.metric, chances, hits)
        speeds, sizes = self.speeds(), {place: _parameters(recipe) for place, recipe in recipes.items()}
        folders = {(arm.cell_key, arm.epochs, arm.init): arm.folder for arm in self.arms}
        for row in arms:
            row["parameters"] = sizes[arm_key(row)[0]]
            if found := list(speeds.get(folders[arm_key(row)], {}).values()):
                row["images_per_second"] = _supported([each["images_per_second"] for each in found])
                row["measured_on"] = "; ".join(sorted({each["measured_on"] for each in found}))
        declared = [contrast.text not in self.late for contrast in self.contrasts]
        contrasts = contrast_tests(self.contrasts, runs, self.metric, declared, hits)
        result = BenchResult(runs, arms, about, self.metric, self.metrics, contrasts, hits)
        atomic.make_folder(self.folder)
        text = json.dumps(result.to_dict(), indent=1, allow_nan=False)
        atomic.write(self.folder / RESULTS, text.encode() + b"\n")
        return result

    def _rows(self, arm: Arm, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row for each network of an arm."""
        curves, found = found.get(f"{self.metric.name}{PER_EPOCH}"), {**found, **over_lengths(found)}
        return [
            {
                "init": arm.init,
                "cell": dict(arm.cell),
                "numbers": dict(arm.numbers),
                "epochs": arm.epochs,
                "seed": k,
                **{each.key: finite_or_none(found[each.name][k]) for each in self.metrics},
                "diverged": bool(found["diverged"][k]),
                "curve": [] if curves is None else [finite_or_none(value) for value in curves[k]],
            }
            for k in range(min(len(found["diverged"]), arm.recipe.population.networks))
        ]


def _supported(values: Sequence[float]) -> float:
    """The median, to the first digit in which the values differ; of equal ones or one alone, to two digits."""
    middle, spread = float(np.median(values)), float(np.ptp(values))
    return float(round(middle, -math.floor(math.log10(spread or middle / 10))))


def _parameters(recipe: Recipe) -> int:
    """Parameters of a network of the recipe."""
    return sum(tensor.size for tensor in spec_of(recipe) if tensor.role == "parameter")


def _check_folder(folder: Path) -> None:
    """UsageError unless a folder is new, empty, or holds a benchmark or probe."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if folder.is_file() or is_population(folder) or (there and not {RUNS, PROBES, RESULTS} & set(there)):
        found = "a population" if is_population(folder) else listing(there, 3) or "a file"
        raise UsageError(
            f"{folder}: expected a new folder for the results, or a benchmark's, found {found}; give another (-o)"
        )


def metrics_of(arms: Sequence[Arm], name: str | None) -> tuple[Metric, tuple[Metric, ...]]:
    """The metric that arms are compared by, the primary one if it is not named, and all that their tasks share."""
    tasks = [arm.recipe.data.metrics for arm in arms]
    shared = tuple(metric for metric in tasks[0] if all(metric in task for task in tasks))
    shared += tuple(METRICS[name] for name in over_lengths({metric.name: [0.0] for metric in shared}))
    names = [metric.name for metric in shared]
    if not shared:
        raise UsageError("data: expected tasks with a metric in common, found none; compare them one by one")
    if name is not None and name not in names:
        raise UsageError(f"metric: {unknown('metric of this task', name, names)}")
    return shared[0 if name is None else names.index(name)], shared


def _fitted_seeds(arms: Sequence[Arm]) -> dict[int, str]:
    """The seeds of the populations that the arms' artifacts were fitted to; resolves every initialiser."""
    seeds: dict[int, str] = {}
    for config in {json.dumps(a.recipe.to_dict()["init"], sort_keys=True): a.recipe.init[0] for a in arms}.values():
        fitted = getattr(resolve(config), "result", None)
        recipe = getattr(fitted, "provenance", {}).get("recipe") if config.artifact is not None else None
        if isinstance(recipe, dict) and isinstance(recipe.get("population"), dict):
            seeds[int(recipe["population"].get("seed", 0))] = str(config.artifact)
    return seeds


@contextmanager
def _in_cell(arm: Arm) -> Iterator[None]:
    """A RecipeError within the block names the arm's cell."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{point_text(dict(arm.cell))}: {error}" if arm.cell else str(error)) from error
