"""Chance level of an accuracy, and the test whether networks are above it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from weightscope.data.catalog import dataset_info
from weightscope.data.config import FOLDER
from weightscope.data.metrics import Metric
from weightscope.data.sequence_config import TaskConfig
from weightscope.data.task_sizes import TASK_SIZES
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
    """The chance level of a metric: 1 / K of K classes of images, or of K equally probable tokens of an answer.

    None for metrics other than accuracies, for text and the Markov source, for sorting, where the most probable token
    depends on its place in the answer, and for a folder of images that cannot be read any more to count its test part.

    Args:
        recipe: of the networks, with the classes of a folder (`with_classes`).
        metric: the metric that is compared.
        root: the folder that is searched first for a folder of images.
    """
    data = recipe.data
    if metric.unit != "%":
        return None
    if isinstance(data, DataConfig):
        examples = data.validation or data.test or _test_images(data, root)
        return Chance(1 / dataset_info(data).classes, examples) if examples else None
    if not isinstance(data, TaskConfig) or data.name == "sort":
        return None
    values, answer = data.vocabulary - 1, TASK_SIZES[data.name].answer(metric.length * data.length)
    if data.name == "selective_copy":
        values -= 1
    if data.name == "associative_recall":  # half of the tokens are keys, and keys of the answer are not scored
        values, answer = values - values // 2, answer // 2
    return Chance(1 / values, data.test * answer)


def _test_images(data: DataConfig, root: str | Path | None) -> int:
    """The number of all test images; 0 for those of a folder that is missing."""
    if data.name != FOLDER:
        return dataset_info(data).test
    try:
        return dataset_info(data.model_copy(update={"classes": None}), root).test  # without classes, it is counted
    except DataError:
        return 0


def above_chance(values: np.ndarray, chance: Chance) -> float:
    """The one-sided p-value of a mean accuracy above chance.

        t = (mean - c) / sqrt(s^2 / n + c (1 - c) / m),   p = P(T > t)

    for Student's T with n - 1 degrees of freedom, normal for one network. The second variance is that of the test
    examples, which all networks share. Networks at chance level have p < 0.05 in at most about 5 % of cases.

    Args:
        values: accuracies (n,) of networks.
        chance: the level c, and the number of test examples m.
    """
    n, (c, examples) = len(values), chance
    variance = c * (1 - c) / examples + (float(values.var(ddof=1)) / n if n > 1 else 0.0)
    null = stats.t(n - 1) if n > 1 else stats.norm
    return float(null.sf((float(values.mean()) - c) / np.sqrt(variance)))


def note(arms: list[dict[str, Any]]) -> str:
    """One line that names the arms at chance level; empty if there are none."""
    found = [arm for arm in arms if (arm.get("chance_p") or 0.0) >= LEVEL]
    if not found:
        return ""
    named = ", ".join(dict.fromkeys(arm["init"] for arm in found))
    levels = " or ".join(f"{100 * level:.3g} %" for level in dict.fromkeys(arm["chance"] for arm in found))
    return f"not distinguishable from chance ({levels}): {named} (one-sided t-test at {100 * LEVEL:g} %)"
