"""Intervals that contain a statistic of a correct initialisation with probability 1 - `LEVEL`, and powers of checks.

If a statistic's distribution is known (chi-squared energies, means of many entries), the interval has its quantiles.
Otherwise the initialiser is run again and again at the same shape, or at the same ratio of a smaller width, and the
interval is a t prediction interval of these draws; the power follows in the same way from wrong constructions.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from weightscope._util.torch_random import seeded
from weightscope.anatomy import ModuleTensors, NamedTensors

# Per check. A report of 5,000 checks (36 heads have about 300) then has a false-alarm rate below 0.5 %.
LEVEL = 1e-6
DRAWS = 48  # of a correct construction; the t quantile of LEVEL is 5.6
# An error is decided if an audit finds it with this probability. Below, its verdict is "undecidable".
DECIDED = 0.99
UNTOUCHED = "an untouched network"

Interval = tuple[float, float]
Row = tuple[str, float, Interval] | tuple[str, float, Interval, Mapping[str, float]]
"""A statistic, its value, the expected interval, and the power of the check."""
Transform = tuple[Callable[[float], float], Callable[[float], float]]
"""A function under which a statistic is about normal, and its inverse."""

PLAIN: Transform = (float, float)
CUBE_ROOT: Transform = (lambda x: float(np.cbrt(x)), lambda y: y**3)  # of variances (Wilson and Hilferty 1931)
FISHER: Transform = (lambda r: math.atanh(np.clip(r, -1 + 1e-12, 1 - 1e-12)), math.tanh)  # of correlations


def error_in(parameter: str) -> str:
    """The name of the error by which every parameter of an initialiser is off in the powers of audits."""
    return f"a 20 % error in {parameter}"


def normal(mean: float, sd: float, *, level: float = LEVEL, slack: float = 0.0) -> Interval:
    """`mean +- z sd`, z the two-sided normal quantile of `level`, wider by `slack` on each side."""
    half = float(stats.norm.isf(level / 2)) * sd + slack
    return mean - half, mean + half


def chi_squared(dof: float, *, level: float = LEVEL, slack: float = 0.0) -> Interval:
    """Two-sided interval of a chi-squared variable over its degrees of freedom."""
    low, high = stats.chi2.ppf(level / 2, dof) / dof, stats.chi2.isf(level / 2, dof) / dof
    return float(low) - slack, float(high) + slack


def f_ratio(over: float, under: float, *, level: float = LEVEL) -> Interval:
    """Two-sided interval of Fisher's F with (over, under) degrees of freedom."""
    return float(stats.f.ppf(level / 2, over, under)), float(stats.f.isf(level / 2, over, under))


def predicted(draws: Sequence[float], *, shrink: float = 1.0, level: float = LEVEL) -> Interval:
    """Prediction interval of one more draw, whose deviation is `shrink` times that of the n given ones."""
    n, mean, sd = len(draws), float(np.mean(draws)), float(np.std(draws, ddof=1))
    half = float(stats.t.isf(level / 2, n - 1)) * sd * math.sqrt(shrink**2 + 1 / n)
    return mean - half, mean + half


def outside(limits: Interval, mean: float, sd: float = 0.0, dof: float = math.inf) -> float:
    """The power of a check: the probability that a statistic of a wrong network is outside the interval.

    P(x < low) + P(x > high),   x ~ N(mean, sd^2), or mean + sd t with `dof` degrees;   0 or 1 for sd = 0
    """
    low, high = limits
    if sd <= 0 or not math.isfinite(sd):
        return float(not low <= mean <= high)
    return float(stats.t.cdf((low - mean) / sd, dof) + stats.t.sf((high - mean) / sd, dof))


def powers(limits: Interval, untouched: float | None, wrong: Mapping[str, float], sd: float = 0.0) -> dict[str, float]:
    """The powers of a check by the means of its statistic in untouched networks and those with a 20 % error."""
    found = {} if untouched is None else {UNTOUCHED: outside(limits, untouched, sd)}
    return found | {error_in(name): outside(limits, mean, sd) for name, mean in wrong.items()}


def outside_of(limits: Interval, draws: Sequence[float], *, shrink: float = 1.0) -> float:
    """The power of a check by n simulated wrong networks: x ~ mean + sd sqrt(1 + 1/n) t_(n-1) is outside."""
    n, mean, sd = len(draws), float(np.mean(draws)), float(np.std(draws, ddof=1))
    return outside(limits, mean, sd * shrink * math.sqrt(1 + 1 / n), dof=n - 1)


@dataclass(frozen=True)
class Simulated:
    """Statistics of parts that an initialiser has just set, and of parts with an error."""

    correct: Mapping[str, Sequence[float]]  # statistic -> its value in each correct draw
    wrong: Mapping[str, Mapping[str, Sequence[float]]]  # error -> statistic -> its value in each draw with that error

    @classmethod
    def of(
        cls,
        draw: Callable[[Any], Mapping[str, float]],
        correct: Any,
        wrong: Mapping[str, Any],
        draws: int = DRAWS,
        wrong_draws: int | None = None,
    ) -> "Simulated":
        """`draw` makes a part by a construction and measures it; a quarter as many draws of each wrong construction."""
        fewer = draws // 4 if wrong_draws is None else wrong_draws
        right = _columns(draw(correct) for _ in range(draws))
        return cls(right, {error: _columns(draw(make) for _ in range(fewer)) for error, make in wrong.items()})

    def interval(
        self, statistic: str, *, via: Transform = PLAIN, factor: float = 1.0, shrink: float = 1.0, slack: float = 0.0
    ) -> Interval:
        """The prediction interval of a statistic, about normal under `via`; `factor` is on its mean and deviation."""
        low, high = predicted([via[0](factor * x) for x in self.correct[statistic]], shrink=shrink)
        return via[1](low) - slack, via[1](high) + slack

    def power(
        self, statistic: str, limits: Interval, *, via: Transform = PLAIN, factor: float = 1.0, shrink: float = 1.0
    ) -> dict[str, float]:
        """Error -> the probability that the statistic of a part with that error is outside the limits."""
        low, high = (via[0](x) if math.isfinite(x) else x for x in limits)
        return {
            error: outside_of((low, high), [via[0](factor * x) for x in values[statistic]], shrink=shrink)
            for error, values in self.wrong.items()
            if statistic in values
        }


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    every = list(rows)
    return {key: [row[key] for row in every if key in row] for key in dict.fromkeys(k for row in every for k in row)}


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
    fresh.__dict__ = dict(owner.__dict__)
    for kind, wrap in (("_parameters", nn.Parameter), ("_buffers", Tensor.clone)):
        values = owner.__dict__[kind].items()
        fresh.__dict__[kind] = {k: None if v is None else wrap(v.detach().clone()) for k, v in values}
    with seeded(seed), torch.no_grad():
        fresh.reset_parameters()
    value: Tensor = getattr(fresh, attribute)
    return value.detach()
