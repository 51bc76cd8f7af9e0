"""`plan_bench`: what a benchmark will cost, from short measurements of its own tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util.environment import usable_cores
from weightscope._util.results import Result, text_table
from weightscope.benchmarking.design import Arm, Init, point_text
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import Design, train_arms
from weightscope.population import shards
from weightscope.recipe import Recipe
from weightscope.training.measuring import TileCost
from weightscope.training.planning import tile_costs
from weightscope.training.request import Request
from weightscope.training.workers import Workers


@dataclass(frozen=True, repr=False)
class BenchPlan(Result):
    """A benchmark that is checked, and its planned cost.

    Attributes:
        cells: one row for each cell: `cell`, `arms`, `networks`, `tiles`, `done` (tiles that are on disk), and, if
            measured, the `seconds` of one worker that the others take.
        workers: processes.
        seconds: expected wall time; None if not measured.
        design: what is compared.
        requests: the populations of the arms.
        on: where they are trained.
    """

    cells: list[dict[str, Any]]
    workers: int
    seconds: float | None
    design: Design = field(compare=False)
    requests: Sequence[Request] = field(compare=False)
    on: Workers = field(compare=False)

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

    Args:
        recipe: see `bench`.
        inits: see `bench`.
        out: see `bench`; tiles that are there are not counted again.
        workers: see `collect`.
        backend: see `collect`.
        scheduler: see `collect`.
        device: see `collect`.
        data: see `collect`.
        progress: of no effect.
        measure: whether to measure; otherwise only the numbers of arms, networks and tiles are returned.
        given: the other arguments of `bench`.

    Raises:
        UsageError: see `bench`.

    Example:
        >>> print(plan_bench("digits-convnext", ["default", "mimetic_mlp"], vary={"network.kernel_size": [3, 7]}))
    """
    design = Design.of(recipe, inits, out, data=data, **given)
    requests, on = design.requests(workers, backend, scheduler, device)
    missing = [_missing(request) for request in requests]
    on = on.on_device(requests[0].device, sum(missing))
    number = on.count or usable_cores()
    costs: list[TileCost | None] = [None] * len(requests)
    if measure and any(missing):
        kinds = [f"{arm.place} {arm.kind}" for arm in design.arms]
        timed = list(dict.fromkeys(kind for kind, left in zip(kinds, missing, strict=True) if left))
        found = dict(zip(timed, tile_costs([requests[kinds.index(kind)] for kind in timed], on), strict=True))
        costs = [found.get(kind) for kind in kinds]
    rows: dict[str, dict[str, Any]] = {}
    seconds: list[float] = []
    for arm, request, left, cost in zip(design.arms, requests, missing, costs, strict=True):
        each = 0.0 if cost is None else cost.seconds(request.recipe.training)
        seconds += [each] * left
        _add(rows.setdefault(arm.place, {}), arm, request, left, each * left if cost or not left else None)
    return BenchPlan(
        cells=list(rows.values()),
        workers=number,
        seconds=_makespan(seconds, number) if measure or not any(missing) else None,
        design=design,
        requests=requests,
        on=on,
    )


def _missing(request: Request) -> int:
    """The number of tiles that are not on disk."""
    path, manifest = request.path, request.manifest
    there = shards.tiles_on_disk(path, manifest) if path.exists() else []
    return manifest.tiles - sum(shards.state(path, manifest, tile).kind == "done" for tile in there)


def _add(row: dict[str, Any], arm: Arm, request: Request, left: int, seconds: float | None) -> None:
    """Count an arm in the row of its cell."""
    tiles = request.manifest.tiles
    row.setdefault("cell", dict(arm.cell))
    for key, more in (("arms", 1), ("networks", request.manifest.networks), ("tiles", tiles), ("done", tiles - left)):
        row[key] = row.get(key, 0) + more
    known = row.get("seconds", 0.0)
    row["seconds"] = None if known is None or seconds is None else known + seconds


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
