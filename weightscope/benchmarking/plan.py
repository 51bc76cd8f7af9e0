"""`plan_bench`: what a benchmark will cost, from short measurements of its own tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util.environment import usable_cores
from weightscope._util.results import Result, text_table
from weightscope.benchmarking.design import Init, point_text
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import Design, train_arms
from weightscope.population import shards
from weightscope.recipe import Recipe
from weightscope.training.measuring import TileCost
from weightscope.training.planning import tile_costs
from weightscope.training.request import Request
from weightscope.training.workers import Workers

_COUNTED = ("arms", "networks", "tiles", "done")


@dataclass(frozen=True, repr=False)
class BenchPlan(Result):
    """A benchmark that is checked, and its planned cost.

    One row of `cells` for each cell: `cell`, `arms`, `networks`, `tiles`, `done` (tiles that are on disk), and, if
    measured, the `seconds` of one worker that the others take.
    """

    cells: list[dict[str, Any]]
    workers: int  # processes
    seconds: float | None  # expected wall time; None if not measured
    design: Design = field(compare=False)  # what is compared
    requests: Sequence[Request] = field(compare=False)  # the populations of the arms
    on: Workers = field(compare=False)  # where they are trained

    def run(self, *, progress: bool = True) -> BenchResult:
        """Train and compare the arms, as `bench` does, without checking them again."""
        return train_arms(self.design, self.requests, self.on, progress=progress)

    def rows(self) -> list[dict[str, Any]]:
        """The cells."""
        return [{**row, "cell": point_text(row["cell"])} for row in self.cells]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"cells": self.cells, "workers": self.workers, "seconds": self.seconds}

    def summary(self) -> str:
        """Numbers of cells, arms, networks and tiles, and the expected time."""
        arms, networks, tiles, done = (sum(r[key] for r in self.cells) for key in _COUNTED)
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
    inits: Sequence[Init] | Mapping[str, Init] = (),
    out: str | Path | None = None,
    *,
    workers: int | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    device: str = "auto",
    data: str | Path | None = None,
    progress: bool = True,
    measure: bool = True,
    **given: Any,
) -> BenchPlan:
    """What `bench` with the same arguments will cost.

    A tile of every initialiser in every cell is trained for a few steps and evaluated, as many at a time as there are
    workers. Nothing is kept of it.

        seconds of a tile = start, with the initialisation + epochs x steps per epoch x seconds of a step
                            + evaluations x seconds of an evaluation

    The arguments are those of `bench`, of which `progress` has no effect. Tiles in `out` are not counted again. Without
    `measure`, only the numbers of arms, networks and tiles are returned.

    Example:
        >>> print(plan_bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}))
    """
    design = Design.of(recipe, inits, out, data=data, **given)
    requests, on = design.requests(workers, backend, scheduler, device)
    missing = [_missing(request) for request in requests]
    on = on.on_device(requests[0].device, sum(missing))
    kinds = [f"{arm.place} {arm.kind}" for arm in design.arms]
    timed = list(dict.fromkeys(kind for kind, left in zip(kinds, missing, strict=True) if left)) if measure else []
    costs: dict[str, TileCost] = {}
    if timed:
        found = tile_costs([requests[kinds.index(kind)] for kind in timed], on)
        costs = dict(zip(timed, found, strict=True))
    rows: dict[str, dict[str, Any]] = {}
    seconds: list[float] = []
    for arm, request, left, kind in zip(design.arms, requests, missing, kinds, strict=True):
        each = costs[kind].seconds(request.recipe.training) if kind in costs else 0.0
        seconds += [each] * left
        row = rows.setdefault(arm.place, {"cell": dict(arm.cell), **dict.fromkeys(_COUNTED, 0), "seconds": 0.0})
        tiles = request.manifest.tiles
        for key, more in zip(_COUNTED, (1, request.manifest.networks, tiles, tiles - left), strict=True):
            row[key] += more
        known = row["seconds"] is not None and (kind in costs or not left)
        row["seconds"] = row["seconds"] + each * left if known else None
    number = on.count or usable_cores()
    expected = _makespan(seconds, number) if measure or not any(missing) else None
    return BenchPlan(list(rows.values()), number, expected, design, requests, on)


def _missing(request: Request) -> int:
    """The number of tiles that are not on disk."""
    path, manifest = request.path, request.manifest
    there = shards.tiles_on_disk(path, manifest) if path.exists() else []
    return manifest.tiles - sum(shards.state(path, manifest, tile).kind == "done" for tile in there)


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
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
