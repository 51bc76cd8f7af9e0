"""`bench`: initialisers against each other, on paired seeds, with intervals and tests.

Every arm (initialiser x length x frozen or not) is a population that `collect` trains, so a benchmark is
resumable, and network k of every arm starts from the same default weights, sees the same batches in the same
order with the same augmentation, and differs in its initialiser alone.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from weightscope._util import atomic
from weightscope._util.environment import environment
from weightscope.errors import UsageError
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.collection import collect


@dataclass(frozen=True)
class Arm:
    """One initialiser at one training length.

    Attributes:
        init: the label: the initialiser's name or the artifact's file name, with ` (frozen)` if it is.
        epochs: a full schedule of so many epochs.
        recipe: what `collect` trains.
    """

    init: str
    epochs: int
    recipe: Recipe

    @property
    def folder(self) -> str:
        """Name of the arm's population."""
        return re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.init}-{self.epochs}-epochs").strip("-") + ".pop"


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark found.

    Attributes:
        runs: one row for each network: `init`, `epochs`, `seed` (its number), `accuracy`, `loss`, `diverged`.
        summary: one row for each arm: `init`, `epochs`, `n`, `mean` accuracy, `ci95`, `loss`, `diverged`, and
            against the first initialiser at the same length the mean paired `difference`, `difference_ci95`,
            `p` of the paired t-test and `p_holm`, adjusted for the number of comparisons in the table.
        environment: versions, machine, device and the recipe.
    """

    runs: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"runs": self.runs, "summary": self.summary, "environment": self.environment}

    def table(self) -> str:
        """The summary as text, one line for each arm."""
        width = max(len("initialiser"), *(len(row["init"]) for row in self.summary))
        head = (
            f"{'initialiser':<{width}}  epochs   n  accuracy %  95 % interval    difference  95 % interval     p (Holm)"
        )
        lines = [head, "-" * len(head)]
        for row in self.summary:
            low, high = (100 * value for value in row["ci95"])
            line = f"{row['init']:<{width}}  {row['epochs']:>6}  {row['n']:>2}  {100 * row['mean']:10.2f}"
            line += f"  {low:5.2f} to {high:5.2f}"
            if row["difference"] is not None:
                low, high = (100 * value for value in row["difference_ci95"])
                line += f"  {100 * row['difference']:+10.2f}  {low:+5.2f} to {high:+5.2f}  {row['p_holm']:9.2g}"
            if row["diverged"]:
                line += f"  ({row['diverged']} diverged)"
            lines.append(line)
        return "\n".join(lines)


def arms(
    recipe: Recipe,
    inits: Sequence[str | InitConfig],
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
) -> list[Arm]:
    """The arms of a benchmark, initialiser by initialiser within each length.

    Args:
        recipe: network, data and training; its own [init] is not used.
        inits: registered names (also joined by `+`), artifacts (.safetensors), [init] tables, also as files
            (.toml: a name with its numbers).
        epochs: training lengths; the recipe's when empty.
        seeds: networks in each arm; the recipe's when None.
        frozen: a pattern of tensors; when given, each arm also runs with these frozen at their initial values.

    Raises:
        UsageError: if there is no initialiser, a label comes twice, or there are fewer than 2 seeds.
    """
    configs = [_named(init) for init in inits]
    labels = [label for label, _ in configs]
    if not configs or len(set(labels)) < len(labels):
        raise UsageError(f"expected initialisers with different names, found {labels or 'none'}")
    networks = recipe.population.networks if seeds is None else seeds
    if networks < 2:
        raise UsageError(f"a paired comparison needs at least 2 seeds, found {networks}")
    variants = [("", ())] if frozen is None else [("", ()), (" (frozen)", (frozen,))]
    out = []
    for length in epochs or (recipe.training.epochs,):
        for suffix, patterns in variants:
            for label, config in configs:
                changes: dict[str, Any] = {
                    "training.epochs": length,
                    "init": config.model_dump(exclude_none=True),
                    "population.networks": networks,
                }
                if patterns:
                    changes["training.frozen"] = sorted({*recipe.training.frozen, *patterns})
                out.append(Arm(label + suffix, length, recipe.replace(changes)))
    return out


def _named(init: str | InitConfig) -> tuple[str, InitConfig]:
    """The label and the [init] table of an initialiser."""
    if isinstance(init, str):
        path = Path(init)
        if path.suffix == ".safetensors":
            return path.stem, InitConfig(artifact=init)
        if path.suffix == ".toml":
            return path.stem, InitConfig.load(path)
        return init, InitConfig(name=init)
    if init.artifact is not None:
        return Path(init.artifact).stem, init
    numbers = ", ".join(f"{key}={value}" for key, value in init.parameters.items())
    return init.name + (f" ({numbers})" if numbers else ""), init


def bench(
    recipe: Recipe,
    inits: Sequence[str | InitConfig],
    out: str | Path,
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
    collector: Callable[..., Any] = collect,
    **options: Any,
) -> BenchResult:
    """Train every arm, compare, and write `out/results.json`.

    Args:
        recipe: network, data and training.
        inits: see `arms`; the first is what the others are compared to.
        out: a folder; holds the arms' populations and the results. Running again goes on where it stopped.
        epochs: see `arms`.
        seeds: see `arms`.
        frozen: see `arms`.
        collector: trains one population, `collect` or something with its signature.
        options: passed on to `collect` (`workers`, `device`, `data`, `progress`, ...).

    Raises:
        UsageError: see `arms`; also for an unknown initialiser.
        Resumable: if it was interrupted.
    """
    folder = Path(out)
    planned = arms(recipe, inits, epochs=epochs, seeds=seeds, frozen=frozen)
    runs = []
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


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means, Student t intervals and paired t-tests of the rows of `BenchResult.runs`.

    A network that diverged counts with the accuracy that it had. The reference of an arm is the first
    initialiser that ran at its length; a frozen arm's is the first frozen one. p-values are two-sided, and
    `p_holm` controls the family-wise error of the whole table (Holm 1979).
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["epochs"], run["init"]), []).append(run)
    rows, reference = [], {}
    for (epochs, init), group in groups.items():
        accuracy = {run["seed"]: run["accuracy"] for run in group}
        losses = [run["loss"] for run in group if run["loss"] is not None]
        row: dict[str, Any] = {"init": init, "epochs": epochs, **_interval(np.array(list(accuracy.values())))}
        row["loss"] = float(np.mean(losses)) if losses else None
        row["diverged"] = sum(run["diverged"] for run in group)
        row |= {"reference": None, "difference": None, "difference_ci95": None, "p": None, "p_holm": None}
        kind = (epochs, init.endswith("(frozen)"))
        if kind not in reference:
            reference[kind] = (init, accuracy)
        else:
            name, base = reference[kind]
            row |= {"reference": name} | _paired(np.array([accuracy[k] - base[k] for k in accuracy if k in base]))
        rows.append(row)
    _holm([row for row in rows if row["p"] is not None])
    return rows


def _interval(values: np.ndarray) -> dict[str, Any]:
    n, mean = len(values), float(values.mean())
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)) if n > 1 else float("inf")
    return {"n": n, "mean": mean, "ci95": [mean - half, mean + half]}


def _paired(differences: np.ndarray) -> dict[str, Any]:
    found = _interval(differences)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    if error > 0:
        p = float(2 * stats.t.sf(abs(found["mean"]) / error, len(differences) - 1))
    else:  # t is 0/0 for arms that agree in every run, which is no evidence of a difference
        p = float(found["mean"] == 0)
    return {"difference": found["mean"], "difference_ci95": found["ci95"], "p": p}


def _holm(rows: list[dict[str, Any]]) -> None:
    running = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row["p"])):
        running = max(running, min(1.0, (len(rows) - rank) * row["p"]))
        row["p_holm"] = running
