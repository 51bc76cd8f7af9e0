"""`plan`: what a benchmark will cost, from short measurements of its own tiles."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weightscope._util.environment import usable_cores
from weightscope._util.results import Result, text_table
from weightscope.benchmarking import run as training
from weightscope.benchmarking.design import Arm, Init, default_folder, point_text
from weightscope.benchmarking.run import check_arms, planned
from weightscope.benchmarking.statistics import cell_key
from weightscope.recipe import Recipe
from weightscope.training.collection import collect
from weightscope.training.devices import choose_kernels, current, one_thread, resolve_device, trust

_STEPS = 8  # that are timed, after as many that are not


@dataclass(frozen=True, repr=False)
class BenchPlan(Result):
    """The planned cost of a benchmark.

    Attributes:
        cells: one row for each cell: `cell`, `arms`, `networks`, `tiles`, `done` (tiles that are on disk), and, if
            measured, the `seconds` of one worker that the others take.
        workers: processes.
        seconds: expected wall time; None if not measured.
    """

    cells: list[dict[str, Any]]
    workers: int
    seconds: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The cells."""
        return [{**row, "cell": point_text(row["cell"])} for row in self.cells]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"cells": self.cells, "workers": self.workers, "seconds": self.seconds}

    def summary(self) -> str:
        """Numbers of cells, arms, networks and tiles, and the expected time."""
        arms, networks, tiles, done = (sum(r[key] for r in self.cells) for key in ("arms", "networks", "tiles", "done"))
        counted = [("cell", len(self.cells)), ("arm", arms), ("network", networks), ("tile", tiles)]
        words = [f"{number} {name}{'s' * (number != 1)}" for name, number in counted]
        text = f"{', '.join(words[:3])} in {words[3]}"
        text += f", {done} of them done" if done else ""
        if self.seconds is None:
            return text
        return f"{text}; expected time {duration(self.seconds)} with {self.workers} worker{'s' * (self.workers != 1)}"

    def text(self) -> str:
        """A line for each cell, and the sum."""
        if len(self.cells) == 1 and not self.cells[0]["cell"]:
            return self.summary()
        header = ("cell", "arms", "networks", "tiles", "done", "time of one worker")
        rows = [
            (point_text(r["cell"]), r["arms"], r["networks"], r["tiles"], r["done"], duration(r["seconds"]))
            for r in self.cells
        ]
        return f"{text_table(header, rows)}\n{self.summary()}"


def plan_bench(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] = (),
    out: str | Path | None = None,
    *,
    workers: int | None = None,
    device: str = "auto",
    data: str | Path | None = None,
    measure: bool = True,
    **given: Any,
) -> BenchPlan:
    """What `bench` with the same arguments will cost.

    A tile of every cell is trained for a few steps and evaluated, as many at a time as there are workers, and every
    initialiser draws one tile. Nothing is kept of it.

        seconds of a tile = other + initialisation + epochs x steps per epoch x seconds of a step
                            + evaluations x seconds of an evaluation
        seconds of a cell = comparison of the kernels with torch's, once in a worker + seconds of its tiles

    Args:
        recipe: see `bench`.
        inits: see `bench`.
        out: see `bench`; tiles that are there are not counted again.
        workers: see `collect`.
        device: see `collect`.
        data: see `collect`.
        measure: whether to measure; otherwise only the numbers of arms, networks and tiles are returned.
        given: the other arguments of `bench`.

    Raises:
        UsageError: see `bench`.

    Example:
        >>> print(plan_bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}))
    """
    folder = default_folder(recipe) if out is None else Path(out)
    keys = ("epochs", "seeds", "seed", "frozen", "control", "vary", "grid", "metric")
    _, arms = planned(recipe, init=inits, **{key: given.pop(key, None) for key in keys})
    where = resolve_device(device)
    recipes = training.with_tiles(arms, folder, where, data)
    if measure:
        check_arms(arms, recipes)
    tasks = training.tasks_of(arms, recipes, folder)
    finished = {(task.path, task.tile) for task in tasks if training.done(task)}
    left = len(tasks) - len(finished)
    number = workers or (usable_cores() if where.type == "cpu" else 1)
    number = max(1, min(number, left))
    parts = _Parts.of(arms, recipes, number, str(where), data) if measure and left else None
    work: dict[str, _Work] = {}
    for arm in arms:
        path = folder / training.RUNS / arm.folder
        tiles = [(path, task.tile) in finished for task in tasks if task.path == path]
        work.setdefault(_cell_of(arm), _Work()).add(arm, tiles)
    if parts is None:
        return BenchPlan([each.row() for each in work.values()], number, None if left else 0.0)
    cells = [each.row(parts.cells[key]) for key, each in work.items()]
    seconds = [one for key, each in work.items() for one in each.seconds(parts.cells[key])]
    checks = sum(parts.cells[key].check for key, each in work.items() if each.left)
    return BenchPlan(cells, number, _makespan(seconds, number) + checks + parts.start)


@dataclass
class _Work:
    """The tiles of a cell.

    Attributes:
        arms: of the cell.
        left: the arm of each tile that is not on disk.
        done: number of tiles that are.
    """

    arms: list[Arm] = field(default_factory=list)
    left: list[Arm] = field(default_factory=list)
    done: int = 0

    def add(self, arm: Arm, tiles: Sequence[bool]) -> None:
        """Add an arm, with whether each of its tiles is on disk."""
        self.arms.append(arm)
        self.left += [arm] * tiles.count(False)
        self.done += tiles.count(True)

    def seconds(self, cell: "_Cell") -> list[float]:
        """Expected seconds of each tile that is left."""
        return [cell.tile(arm) for arm in self.left]

    def row(self, cell: "_Cell | None" = None) -> dict[str, Any]:
        """The row of `BenchPlan.cells`, with the expected seconds if the cell was measured."""
        seconds: float | None = None if self.left else 0.0
        if self.left and cell is not None:
            seconds = sum(self.seconds(cell)) + cell.check
        return {
            "cell": dict(self.arms[0].cell),
            "arms": len(self.arms),
            "networks": sum(arm.recipe.population.networks for arm in self.arms),
            "tiles": len(self.left) + self.done,
            "done": self.done,
            "seconds": seconds,
        }


@dataclass(frozen=True)
class _Cell:
    """Measured seconds of a cell.

    Attributes:
        check: of the comparison of compiled kernels with torch's, once in a worker.
        epoch: of training.
        evaluation: of one evaluation.
        other: of a tile, which do not grow with its epochs.
        inits: initialiser without its numbers -> of the initialisation of a tile.
    """

    check: float
    epoch: float
    evaluation: float
    other: float
    inits: dict[str, float]

    def slowest(self, another: "_Cell") -> "_Cell":
        """The larger of each number of two measurements."""
        return _Cell(
            max(self.check, another.check),
            max(self.epoch, another.epoch),
            max(self.evaluation, another.evaluation),
            max(self.other, another.other),
            {**self.inits, **another.inits},
        )

    def tile(self, arm: Arm) -> float:
        """Seconds of one tile of an arm."""
        evaluations = arm.epochs if arm.recipe.training.evaluate == "epoch" else 1
        return self.other + self.inits[_kind(arm)] + arm.epochs * self.epoch + evaluations * self.evaluation


@dataclass(frozen=True)
class _Parts:
    """Measured seconds: `start`, until a worker is ready, and those of the cells."""

    start: float
    cells: dict[str, _Cell]

    @classmethod
    def of(cls, arms: Sequence[Arm], recipes: Sequence[Recipe], workers: int, device: str, data: Any) -> "_Parts":
        """Measure, on as many processes as will work later."""
        first: dict[str, dict[str, Recipe]] = {}
        for arm, recipe in zip(arms, recipes, strict=True):
            first.setdefault(_cell_of(arm), {}).setdefault(_kind(arm), recipe)
        calls = [(key, by_init, device, data) for key, by_init in first.items()]
        calls = calls * -(-workers // len(calls))  # so that every worker is busy, as later
        asked = time.time()
        found = list(training.on_workers(_measure, calls, workers, recipes))
        cells: dict[str, _Cell] = {}
        for key, _, cell in found:
            cells[key] = cell.slowest(cells[key]) if key in cells else cell
        return cls(max(0.0, min(begun for _, begun, _ in found) - asked), cells)


def _cell_of(arm: Arm) -> str:
    """The key of an arm's cell."""
    return cell_key({"cell": dict(arm.cell)})


def _kind(arm: Arm) -> str:
    config = arm.recipe.init[0]
    return f"{config.artifact or config.name} {config.control}"


def _measure(cell: str, by_init: dict[str, Recipe], device: str, data: Any) -> tuple[str, float, _Cell]:
    """Time the parts of a cell's tiles: (cell, time of the start, seconds)."""
    from weightscope.training.engine import TileRun

    where = resolve_device(device)
    first = next(iter(by_init.values()))
    with TemporaryDirectory() as folder, one_thread(), current(where):
        begun = time.time()
        images = first.data.load(data)
        clock = time.perf_counter()
        kernels = choose_kernels(first, where)
        check = time.perf_counter() - clock
        drawn: dict[str, float] = {}
        for kind, recipe in by_init.items():
            clock = time.perf_counter()
            run = TileRun(recipe, 0, images, where)
            drawn[kind] = time.perf_counter() - clock
        steps, whole = min(_STEPS, run.steps_per_epoch), run.steps_per_epoch
        step, evaluation = _seconds_of(run, steps)
        short = first.replace({"training.epochs": 1, "population.networks": first.population.tile})
        few = run.batch + (getattr(first.data, "validation", None) or 0)  # which are held back of these
        short = short.replace({"data.train": few, "init": {}})
        trust(short, where, kernels)  # their shapes are the same, but for the number of images
        clock = time.perf_counter()
        collect(short, Path(folder) / "one.pop", workers=1, device=device, data=data, progress=False)
        passed = time.perf_counter() - clock
    other = max(0.0, passed - step - evaluation - min(drawn.values()))
    return cell, begun, _Cell(check, whole * step, evaluation, other, drawn)


def _seconds_of(run: Any, steps: int) -> tuple[float, float]:
    """Seconds of a step and of an evaluation of a tile."""
    run.steps_per_epoch = steps
    run.epoch(0)
    run.evaluate()
    clock = time.perf_counter()
    run.ready = None
    run.epoch(0)
    middle = time.perf_counter()
    run.evaluate()
    return (middle - clock) / steps, time.perf_counter() - middle


def _makespan(seconds: Sequence[float], workers: int) -> float:
    """Wall time of tasks that are given in turn to the worker that is free first."""
    busy = [0.0] * workers
    for each in seconds:
        busy[busy.index(min(busy))] += each
    return max(busy)


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds is None:
        return "not measured"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
