"""Statistics of a benchmark: means with intervals, paired t-tests, and Holm's correction."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from weightscope.benchmarking.arms import CONTROL, FROZEN

_BEYOND = ("beyond_scale", "beyond_scale_ci95", "beyond_scale_p", "beyond_scale_p_holm")


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means, Student t intervals and paired t-tests of the rows of `BenchResult.runs`.

    The interval of a mean accuracy is cut at 0 and 1, which keeps its coverage. A network that diverged counts with the
    accuracy that it reached. The reference of an arm is the first initialiser in its cell at its length, that of a
    frozen arm the first frozen one. An arm that has a control is also compared with it: `beyond_scale` is the mean
    paired difference of the two, and the control's own `difference` the effect of scale. p-values are two-sided;
    `p_holm` and `beyond_scale_p_holm` control the family-wise error rate of the whole table (Holm 1979).
    """
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((cell_key(run), run["epochs"], run["init"]), []).append(run)
    controls = {(*place, arm): runs for (*place, init), runs in groups.items() if (arm := control_of(init)) is not None}
    rows: list[dict[str, Any]] = []
    reference: dict[tuple[str, int, bool], tuple[str, dict[int, float]]] = {}
    for (cell, epochs, init), group in groups.items():
        accuracy = {run["seed"]: run["accuracy"] for run in group}
        row: dict[str, Any] = {"init": init, "cell": group[0].get("cell", {}), "numbers": group[0].get("numbers", {})}
        row |= {"epochs": epochs, **mean_interval(np.array(list(accuracy.values())))}
        row["ci95"] = [max(0.0, row["ci95"][0]), min(1.0, row["ci95"][1])]  # where a mean of accuracies can be
        row["loss"], row["seconds"] = (_mean([run.get(key) for run in group]) for key in ("loss", "seconds"))
        row["diverged"] = sum(run["diverged"] for run in group)
        row |= {"reference": None, "difference": None, "difference_ci95": None, "p": None, "p_holm": None}
        name, base = reference.setdefault((cell, epochs, init.endswith(FROZEN)), (init, accuracy))
        if name != init:
            row |= {"reference": name} | paired(np.array([accuracy[k] - base[k] for k in accuracy if k in base]))
        control = controls.get((cell, epochs, init))
        row |= {"control": None if control is None else control[0]["init"]} | dict.fromkeys(_BEYOND)
        if control is not None:
            base = {run["seed"]: run["accuracy"] for run in control}
            found = paired(np.array([accuracy[k] - base[k] for k in accuracy if k in base]))
            row |= dict(zip(_BEYOND, found.values(), strict=False))
        rows.append(row)
    tested = [(row, key) for row in rows for key in ("p", "beyond_scale_p") if row[key] is not None]
    for (row, key), p in zip(tested, holm([row[key] for row, key in tested]), strict=True):
        row[f"{key}_holm"] = p
    return rows


def cell_key(row: dict[str, Any]) -> str:
    """The cell of a run or an arm as text, equal for equal cells."""
    return json.dumps(row.get("cell", {}), sort_keys=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def control_of(init: str) -> str | None:
    """The label of the initialiser that a control arm is the control of; None for other arms."""
    bare = init.removesuffix(FROZEN)
    return bare.removesuffix(CONTROL) + init[len(bare) :] if bare.endswith(CONTROL) else None


def mean_interval(values: np.ndarray) -> dict[str, Any]:
    """`n`, `mean`, and `ci95` by Student's t, of values (n,); the interval of one value is infinite."""
    n, mean = len(values), float(values.mean())
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)) if n > 1 else float("inf")
    return {"n": n, "mean": mean, "ci95": [mean - half, mean + half]}


def paired(differences: np.ndarray) -> dict[str, Any]:
    """The mean of paired differences (n,), its interval, and the p-value of the paired t-test."""
    found = mean_interval(differences)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    if error > 0:
        p = float(2 * stats.t.sf(abs(found["mean"]) / error, len(differences) - 1))
    else:  # t is 0/0 for arms that agree in every run, which is no evidence of a difference
        p = float(found["mean"] == 0)
    return {"difference": found["mean"], "difference_ci95": found["ci95"], "p": p}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (1979) of m p-values, in their order: max over j <= i of (m - j) p_(j), at most 1."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
