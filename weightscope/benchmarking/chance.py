"""Chance level of an accuracy, and the test whether networks are above it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from weightscope.data.metrics import Metric
from weightscope.data.sequence_config import TASK_SIZES, TaskConfig
from weightscope.errors import DataError
from weightscope.recipe import DataConfig, Recipe

LEVEL = 0.05


class Chance(NamedTuple):
    """The chance level of a metric.

    Attributes:
        accuracy: c, expected of predictions that do not depend on the input.
        examples: m, number of independent labels or tokens over which an accuracy is taken.
    """

    accuracy: float
    examples: int


def chance_of(recipe: Recipe, metric: Metric, root: str | Path | None = None) -> Chance | None:
    """The chance level of a metric: the share of the most frequent class among the images of the evaluation, or 1 / K
    of K equally probable tokens of an answer.

    None for metrics other than accuracies, for text and the Markov source, for sorting, where the most probable token
    depends on its place in the answer, for data that are no longer there, and where every answer is the same.

    Args:
        recipe: of the networks, with the classes of a folder (`with_classes`).
        metric: the metric that is compared.
        root: the folder that is searched first for the data.
    """
    from weightscope.data import load  # imports torch, which results do not need

    data = recipe.data
    if metric.unit != "%":
        return None
    if isinstance(data, DataConfig):
        try:
            labels = load(data, root, **data.counts).test_labels
        except DataError:
            return None
        level = Chance(int(labels.bincount().max()) / len(labels), len(labels))
    elif isinstance(data, TaskConfig) and data.name != "sort":
        values, answer = data.vocabulary - 1, TASK_SIZES[data.name].answer(metric.length * data.length)
        if data.name == "selective_copy":
            values -= 1
        if data.name == "associative_recall":  # half of the tokens are keys, and keys of the answer are not scored
            values, answer = values - values // 2, answer // 2
        level = Chance(1 / values, data.test * answer)
    else:
        return None
    return level if level.accuracy < 1 else None


def above_chance(values: np.ndarray, chance: Chance) -> float:
    """The one-sided p-value of a mean accuracy above chance, not corrected for the number of arms.

        a = c (1 - c) / m,   b = s^2 / n,   t = (mean - c - 1 / (2 m)) / sqrt(a + b),   p = P(T > t)

    for Student's T with (n - 1) (a + b)^2 / b^2 degrees of freedom (Satterthwaite 1946), normal for one network. a is
    the variance due to the test examples, which all networks share, and 1 / (2 m) the correction for continuity.
    Networks at chance level have p < 0.05 in at most about 5 % of cases, and in up to 7 % where m c < 10.

    Args:
        values: accuracies (n,) of networks.
        chance: the level c < 1, and the number of test examples m.
    """
    n, (c, examples) = len(values), chance
    shared, own = c * (1 - c) / examples, float(values.var(ddof=1)) / n if n > 1 else 0.0
    freedom = (n - 1) * (shared + own) ** 2 / own**2 if own > 0 else np.inf
    excess = float(values.mean()) - c - 0.5 / examples
    return float(stats.t.sf(excess / np.sqrt(shared + own), freedom))


def note(arms: list[dict[str, Any]]) -> str:
    """One line that names the arms at chance level; empty if there are none."""
    found = [arm for arm in arms if (arm.get("chance_p") or 0.0) >= LEVEL]
    if not found:
        return ""
    named = ", ".join(dict.fromkeys(arm["init"] for arm in found))
    levels = " or ".join(f"{100 * level:.3g} %" for level in dict.fromkeys(arm["chance"] for arm in found))
    return f"not distinguishable from chance ({levels}): {named} (one-sided t-test at {100 * LEVEL:g} %)"
