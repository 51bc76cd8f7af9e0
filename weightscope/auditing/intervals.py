"""Intervals that contain a statistic of a correct initialisation with probability 1 - `LEVEL`, and powers of checks.

A statistic of known distribution (chi-squared energies, means of many entries) has the one of `scipy.stats`. For any
other, the initialiser is run again and again, and one more run has a t distribution around the mean of these; so have
the default start and runs with an error, which give the power.
"""

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from weightscope._util.torch_random import seeded
from weightscope.anatomy import ModuleTensors, NamedTensors

# Per check. A report of 5,000 checks (36 heads have about 300) then has a false-alarm rate below 0.5 %.
LEVEL = 1e-6
RUNS = 24  # of an initialiser; the t quantile of LEVEL is 6.6, the normal one 4.9
# An error is decided if an audit finds it with this probability. Below, its verdict is "undecidable".
DECIDED = 0.99
UNTOUCHED = "an untouched network"

Interval = tuple[float, float]
Distribution = Any
"""The distribution of a statistic: a frozen one of `scipy.stats`, or a number."""
Row = tuple[str, float, Interval, dict[str, float]]
"""A statistic, its value, the expected interval, and error -> the power of the check."""


def error_in(parameter: str) -> str:
    """The name of the error by which every parameter of an initialiser is off in the powers of audits."""
    return f"a 20 % error in {parameter}"


def row(
    statistic: str,
    found: float,
    expected: Distribution,
    wrong: Mapping[str, Distribution] | None = None,
    slack: float = 0.0,
) -> Row:
    """A statistic with the two-sided interval of its expected distribution, wider by `slack` on each side, or as given.

    The power is the probability P(x < low) + P(x > high) under the distribution with an error, or 0 or 1 for a number.
    """
    low, high = map(float, expected if isinstance(expected, tuple) else interval(expected, slack))
    power = {
        error: float(d.cdf(low) + d.sf(high)) if hasattr(d, "cdf") else float(not low <= d <= high)
        for error, d in (wrong or {}).items()
    }
    return statistic, float(found), (low, high), power


def zero_biases(part: Any, names: Iterable[str]) -> list[Row]:
    """The largest entry of the biases of a part's matrices, which an initialiser sets to zero, if it has any."""
    found = [bias.flatten() for name in names if (bias := part.read_bias(name)) is not None]
    return [row("largest bias", float(torch.cat(found).abs().max()), 0.0)] if found else []


def interval(x: Distribution, slack: float = 0.0, level: float = LEVEL) -> Interval:
    """The quantiles level / 2 and 1 - level / 2, moved apart by the slack."""
    ends = (x.ppf(level / 2), x.isf(level / 2)) if hasattr(x, "ppf") else (x, x)
    return float(ends[0]) - slack, float(ends[1]) + slack


def normal(mean: float, sd: float) -> Distribution:
    """The normal distribution, or the mean if there is no finite std."""
    return stats.norm(mean, sd) if 0 < sd < math.inf else mean


def mean_square(dof: float) -> Distribution:
    """The distribution of the mean of the squares of independent standard normal numbers."""
    return stats.chi2(dof, scale=1 / dof)


def predicted(draws: Sequence[float] | np.ndarray, factor: float = 1.0, shrink: float = 1.0) -> Distribution:
    """One more draw: mean + sd sqrt(shrink^2 + 1/n) t_(n-1), `shrink` its std divided by the std of the n given ones.

    `factor` is on all of it.
    """
    n, mean, sd = len(draws), factor * float(np.mean(draws)), abs(factor) * float(np.std(draws, ddof=1))
    return stats.t(n - 1, mean, sd * math.sqrt(shrink**2 + 1 / n)) if sd > 0 and math.isfinite(sd) else mean


def compared(
    found: Mapping[str, float],
    right: Sequence[Mapping[str, float]],
    wrong: Mapping[str, Sequence[Mapping[str, float]]],
    slack: Mapping[str, float] = MappingProxyType({}),
) -> list[Row]:
    """Rows of the statistics of a part, from those of runs of the initialiser and of runs with each error."""

    def run(draws: Sequence[Mapping[str, float]], statistic: str) -> Distribution:
        return predicted([draw[statistic] for draw in draws])

    rows = []
    for what, value in found.items():
        errors = {error: run(draws, what) for error, draws in wrong.items()}
        rows.append(row(what, value, run(right, what), errors, slack.get(what, 0.0)))
    return rows


def default_start(source: NamedTensors, name: str, seed: int = 0) -> Tensor | None:
    """What `reset_parameters` of a copy of its module gives a tensor; None without a module that has this method."""
    if not isinstance(source, ModuleTensors):
        return None
    path, _, attribute = name.rpartition(".")
    owner = source.module.get_submodule(path)
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset) or inspect.signature(reset).parameters:
        return None
    fresh: Any = copy.copy(owner)  # with its own tensors, which share no memory, and with its children as they are
    fresh.__dict__.update(copy.deepcopy({kind: owner.__dict__[kind] for kind in ("_parameters", "_buffers")}))
    with seeded(seed), torch.no_grad():
        fresh.reset_parameters()
    value: Tensor = getattr(fresh, attribute)
    return value.detach()
