"""Statistics of a benchmark: means with intervals inside their range, paired t-tests, and Holm's correction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from weightscope.benchmarking.arms import FROZEN


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means, their intervals and paired t-tests of the rows of `BenchResult.runs`.

    A network that diverged counts with the accuracy that it reached. The reference of an arm is the first
    initialiser at its length, that of a frozen arm the first frozen one. p-values are two-sided; `p_holm` controls
    the family-wise error rate of the whole table (Holm 1979).
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["epochs"], run["init"]), []).append(run)
    rows: list[dict[str, Any]] = []
    reference: dict[tuple[int, bool], tuple[str, dict[int, float]]] = {}
    for (epochs, init), group in groups.items():
        accuracy = {run["seed"]: run["accuracy"] for run in group}
        losses = [run["loss"] for run in group if run["loss"] is not None]
        row: dict[str, Any] = {"init": init, "epochs": epochs, **mean_interval(np.array(list(accuracy.values())))}
        row["loss"] = float(np.mean(losses)) if losses else None
        row["diverged"] = sum(run["diverged"] for run in group)
        row |= {"reference": None, "difference": None, "difference_ci95": None, "p": None, "p_holm": None}
        name, base = reference.setdefault((epochs, init.endswith(FROZEN)), (init, accuracy))
        if name != init:
            row |= {"reference": name} | paired(np.array([accuracy[k] - base[k] for k in accuracy if k in base]))
        rows.append(row)
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return rows


def mean_interval(accuracies: np.ndarray) -> dict[str, Any]:
    """`n`, `mean` m, and the 95 % interval `ci95` of the mean of accuracies (n,) in [0, 1], inside [0, 1].

        logit m +- t(0.975, n - 1) s / (sqrt(n) m (1 - m)),   mapped back by the logistic function

    Student's t on the log-odds, with the standard error of logit m by the delta method: an interval on the accuracies'
    own scale reaches beyond 100 % where few networks are close to it. Equal accuracies give an interval of no width,
    one accuracy gives [0, 1].

    Source: Lumley, Complex Surveys (2010), section 2.2.4 (method "logit" of `svyciprop`).
    """
    n, mean = len(accuracies), float(accuracies.mean())
    if n < 2:
        return {"n": n, "mean": mean, "ci95": [0.0, 1.0]}
    error = float(accuracies.std(ddof=1)) / np.sqrt(n)
    if not 0 < mean < 1 or error == 0:
        return {"n": n, "mean": mean, "ci95": [mean, mean]}
    half = stats.t.ppf(0.975, n - 1) * error / (mean * (1 - mean))
    ends = special.expit(special.logit(mean) + np.array([-half, half]))
    return {"n": n, "mean": mean, "ci95": ends.tolist()}


def paired(differences: np.ndarray) -> dict[str, Any]:
    """The mean of paired differences (n,) of accuracies, its interval, and the p-value of the paired t-test.

    The interval is Student's, intersected with the possible range [-1, 1], which does not change how often it covers
    the true difference.
    """
    n, mean = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / np.sqrt(n) if n > 1 else np.inf
    half = float(stats.t.ppf(0.975, n - 1) * error) if n > 1 else np.inf
    if error > 0:
        p = float(2 * stats.t.sf(abs(mean) / error, n - 1)) if n > 1 else 1.0
    else:  # t is 0/0 for arms that agree in every run, which is no evidence of a difference
        p = float(mean == 0)
    ends = [max(-1.0, mean - half), min(1.0, mean + half)]
    return {"difference": mean, "difference_ci95": ends, "p": p}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (1979) of m p-values, in their order: max over j <= i of (m - j) p_(j), at most 1."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
