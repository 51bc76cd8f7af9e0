"""`bench`: compare initialisers on paired seeds.

Every arm (initialiser x length x frozen or not) is a population trained by `collect`, so a benchmark can be resumed,
and network k of every arm starts from the same default weights, sees the same batches in the same order with the same
augmentation, and differs in its initialiser alone.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope._util.environment import environment
from weightscope.benchmarking.arms import Init, default_folder, plan_arms, recipe_of
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.statistics import summarise
from weightscope.recipe import Recipe
from weightscope.training.collection import collect
from weightscope.training.initial_weights import resolve


def bench(
    recipe: Recipe | str | Path,
    inits: Sequence[Init],
    out: str | Path | None = None,
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
    control: str | None = None,
    collector: Callable[..., Any] = collect,
    **options: Any,
) -> BenchResult:
    """Train every arm, compare them on paired seeds, and write `out/results.json`.

    Args:
        recipe: network, data and training: a recipe, a .toml file, the name of a shipped recipe, or the folder of a
            population.
        inits: see `plan_arms`; the others are compared with the first.
        out: folder of the arms' populations and the results; named after the recipe if None. Calling again resumes.
        epochs: see `plan_arms`.
        seeds: see `plan_arms`.
        frozen: see `plan_arms`.
        control: see `plan_arms`; "scale" tells what an initialiser's structure adds beyond its scale.
        collector: trains one population; `collect` or a function with its signature.
        options: passed on to `collect` (`workers`, `device`, `data`, `progress`, ...).

    Raises:
        UsageError: see `plan_arms`; also for an unknown initialiser, before anything is trained.
        Resumable: if interrupted.

    Example:
        >>> result = bench("digits-convnext", ["default", my_init])
        >>> print(result)
        >>> result.plot("bench.png")
    """
    folder = default_folder(recipe) if out is None else Path(out)
    recipe = recipe_of(recipe)
    planned = plan_arms(recipe, inits, epochs=epochs, seeds=seeds, frozen=frozen, control=control)
    for arm in planned[: len(planned) // max(len(epochs), 1)]:  # those of one length have all initialisers
        resolve(arm.recipe.init[0])
    runs: list[dict[str, Any]] = []
    device: dict[str, Any] = {}
    for arm in planned:
        population = collector(arm.recipe, folder / "runs" / arm.folder, **options)
        metrics = population.metrics
        runs += [
            {
                "init": arm.init,
                "epochs": arm.epochs,
                "seed": k,
                "accuracy": float(metrics["test_accuracy"][k]),
                "loss": _finite(metrics["test_loss"][k]),
                "diverged": bool(metrics["diverged"][k]),
            }
            for k in range(len(population))
        ]
        device = population.environment
    result = BenchResult(runs, summarise(runs), {**environment(), **device, "recipe": recipe.to_dict()})
    atomic.write(folder / "results.json", json.dumps(result.to_dict(), indent=1, allow_nan=False).encode() + b"\n")
    return result


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
