"""What a task reports about a trained network: names, units, ranges and directions. Does not import torch."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from weightscope._util.results import finite_or_none

PER_EPOCH = "_per_epoch"
"""The end of the names of metrics after each epoch."""


def at_end(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> values at the end of training, (N,), of metrics (N,) or (N, E): arrays, or data sets of HDF5."""
    return {
        name: values if values.ndim == 1 else values[:, -1]
        for name, values in metrics.items()
        if not name.endswith(PER_EPOCH)
    }


@dataclass(frozen=True)
class Metric:
    """A number that a task reports for each trained network."""

    name: str  # in `Population.metrics`, such as `test_accuracy`; values after each epoch are `NAME_per_epoch`
    label: str  # in words, without "test" and unit
    unit: str = ""  # of the values as they are shown
    factor: float = 1.0  # shown value = factor x stored value
    bounds: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest possible stored value
    higher_is_better: bool = False
    decimals: int = 4  # of a value as it is shown
    length: int = 1  # of the evaluated sequences, as a multiple of the training length

    @property
    def key(self) -> str:
        """In a benchmark's rows: the name without `test_`."""
        return self.name.removeprefix("test_")

    @property
    def title(self) -> str:
        """The label of an axis: `test accuracy (%)`."""
        return f"test {self.label}" + (f" ({self.unit})" if self.unit else "")

    @property
    def difference_unit(self) -> str:
        """The unit of a difference as it is shown: percentage points for per cent."""
        return "percentage points" if self.unit == "%" else self.unit

    @property
    def direction(self) -> str:
        """What a label adds to a difference: nothing, or `; lower is better`."""
        return "" if self.higher_is_better else "; lower is better"

    @property
    def sign(self) -> int:
        """1 if a positive difference is an improvement, otherwise -1."""
        return 1 if self.higher_is_better else -1

    def better(self, difference: float) -> bool:
        """Whether a value that is larger by `difference` is better."""
        return self.sign * difference > 0

    def tells(self, interval: Sequence[float] | None) -> bool:
        """Whether the interval of a difference says anything: it is narrower than the range of the metric.

        A wider one, such as that of two seeds at an adjusted level, holds 0 and at least half of what is possible.
        """
        return interval is not None and interval[1] - interval[0] < self.bounds[1] - self.bounds[0]

    def amount(self, difference: float) -> str:
        """The size of a difference in words: `2.1 points`, `0.023 bits per token`."""
        unit = self.difference_unit.removeprefix("percentage ")
        return f"{self.factor * abs(difference):.{self.decimals - 1}f} {unit}".strip()

    def to_dict(self) -> dict[str, Any]:
        """JSON types; an infinite bound is None."""
        return {**asdict(self), "bounds": [finite_or_none(bound) for bound in self.bounds]}


ACCURACY = Metric("test_accuracy", "accuracy", "%", 100.0, (0.0, 1.0), higher_is_better=True, decimals=2)
LOSS = Metric("test_loss", "loss", "nats")
BITS = Metric("test_bits", "cross entropy", "bits per token")
PERPLEXITY = Metric("test_perplexity", "perplexity", bounds=(1.0, math.inf), decimals=3)


def accuracy_at(length: int) -> Metric:
    """The accuracy over the answer's tokens at a multiple of the training length, such as `test_accuracy_2x`."""
    if length == 1:
        return ACCURACY
    name, label = f"{ACCURACY.name}_{length}x", f"{ACCURACY.label} at {length}x the length"
    return replace(ACCURACY, name=name, label=label, length=length)


ACCURACY_2X, ACCURACY_4X = accuracy_at(2), accuracy_at(4)
AREA = replace(ACCURACY, name="test_area", label="accuracy averaged over lengths")
LENGTH_90 = Metric("test_length_90", "length at 90 % accuracy", "x", higher_is_better=True, decimals=2)
METRICS = {
    metric.name: metric for metric in (ACCURACY, ACCURACY_2X, ACCURACY_4X, LOSS, BITS, PERPLEXITY, AREA, LENGTH_90)
}


def over_lengths(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """How far networks generalise, `AREA` and `LENGTH_90`, each (N,), of their accuracies a_1 .. a_K at K > 1 lengths.

        area = sum_i (l_(i+1) - l_i) (a_i + a_(i+1)) / 2 / (l_K - l_1)

    for the lengths l_1 = 1 < .. < l_K in multiples of the training length. The length at 90 % is the largest l up to
    which the accuracy is 90 % or more, linear between the l_i; 0 if it is less at l_1, and l_K if it is nowhere less.

    Args:
        metrics: name -> values (N,); what is not the accuracy at a length is ignored. No values if K = 1.

    Source: thesis 3.3.4, Fig. 3.30 ("area under the curve", "generalization length").
    """
    found = {metric.length: name for name in metrics if (metric := metric_named(name)) and metric.key[:8] == "accuracy"}
    if len(found) < 2:
        return {}
    lengths = np.array(sorted(found))
    values = np.array([metrics[found[length]] for length in lengths], dtype=float)  # (K, N)
    area = np.trapezoid(values, lengths, axis=0) / (lengths[-1] - 1)
    below = np.vstack([values < 0.9, np.ones_like(values[:1], bool)]).argmax(0)  # the first length with less than 90 %
    last = (below - 1).clip(0, len(lengths) - 2)
    here, there = (np.take_along_axis(values, at[None], 0)[0] for at in (last, last + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = lengths[last] + (here - 0.9) / (here - there) * (lengths[last + 1] - lengths[last])
    reached = np.where(below == 0, 0.0, np.where(below == len(lengths), float(lengths[-1]), between))
    return {AREA.name: area, LENGTH_90.name: np.where(np.isfinite(area), reached, np.nan)}


def same_differences(values: np.ndarray, others: np.ndarray | float = 0.0) -> bool:
    """Whether the differences `values - others` (n,) are all equal up to the rounding of float32, as metrics have it.

    Accuracies are multiples of one over the number of examples, so a few differences may be equal by coincidence.
    """
    largest = max(float(np.abs(values).max()), float(np.abs(others).max()))
    return bool(np.ptp(values - others) <= 4 * np.finfo(np.float32).eps * largest)


def metric_named(name: str) -> Metric | None:
    """The metric of this name in `Population.metrics`, at any length; None if there is none."""
    at_length = re.fullmatch(rf"{ACCURACY.name}_([2-9]|[1-9][0-9]{{1,8}})x", name)
    return accuracy_at(int(at_length[1])) if at_length else METRICS.get(name)
