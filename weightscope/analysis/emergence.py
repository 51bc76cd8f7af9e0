"""When in training the correlations between parts of a network appear."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from weightscope._util.results import Result, text_table
from weightscope.analysis.exchangeable import ExchangeableCovariance, exchangeable_covariance
from weightscope.errors import UsageError
from weightscope.population import Population
from weightscope.statistics.exchangeable import Pair

Key = tuple[tuple[str, ...], str, str]  # groups of a type, and the names of two views
_LEVEL, _STRONGEST = 0.05, 3


@dataclass(frozen=True, eq=False, repr=False)
class Emergence(Result):
    """The covariances of a population's networks, averaged over permutations, at several moments of training."""

    found: dict[int, ExchangeableCovariance]  # moment -> covariances, ascending
    unit: str  # of the moments: "epoch" or "step"

    @cached_property
    def curves(self) -> dict[str, list[Pair | None]]:
        """The strong entries in words, each with its pair at every moment; None where one of its parts is constant.

        Strong are the three largest effects of each moment with p < 0.05, among correlations of two single copies;
        canonical correlations, which chance increases, are left out.
        """
        pairs = [{(p.groups, p.a, p.b): p for p in one.pairs() if p.signed} for one in self.found.values()]
        strong: dict[Key, str] = {}
        for moment, one in zip(pairs, self.found.values(), strict=True):
            sure = [key for key, pair in moment.items() if pair.p < _LEVEL and math.isfinite(pair.z)]
            strong |= {key: one.words(moment[key]) for key in sure[:_STRONGEST]}
        return {words: [moment.get(key) for moment in pairs] for key, words in strong.items()}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `ExchangeableCovariance.rows` at each moment."""
        return [{self.unit: moment} | row for moment, one in self.found.items() for row in one.rows()]

    def summary(self) -> str:
        """Counts."""
        n = next(iter(self.found.values())).n
        return f"{n} networks at {len(self.found)} moments of training, {len(self.curves)} strong entries"

    def text(self) -> str:
        """A table of the strong entries against the moments; an asterisk marks p < 0.05 at this moment."""

        def cell(pair: Pair | None) -> str:
            return "-" if pair is None else f"{pair.correlation:+.3f}{'*' if pair.p < _LEVEL else ' '}"

        head = ("correlation", *(f"{self.unit} {moment}" for moment in self.found))
        table = text_table(head, [(words, *map(cell, pairs)) for words, pairs in self.curves.items()])
        return f"{self.summary()} (* p < {_LEVEL}, adjusted for all pairs of the moment)\n{table}"

    def to_dict(self) -> dict[str, Any]:
        return {"unit": self.unit, "moments": [{"moment": at} | one.to_dict() for at, one in self.found.items()]}

    def plot(self, path: str | Path | None = None) -> Any:
        """Each strong entry against training; dashed, the largest of their thresholds at each moment."""
        from weightscope import plots

        lines = {
            words: [math.nan if pair is None else pair.correlation for pair in pairs]
            for words, pairs in self.curves.items()
        }
        thresholds = [[_threshold(p[i], x) for p in self.curves.values()] for i, x in enumerate(self.found.values())]
        limits = [np.fmax.reduce(each, initial=math.nan) for each in thresholds]
        n = next(iter(self.found.values())).n
        title = f"{n} networks in training" + ("" if lines else ": no correlation with p < 0.05 at any moment")
        return plots.finished(plots.moment_curves([*self.found], lines, limits, unit=self.unit, title=title), path)


def emergence(population: Population, select: str | Sequence[str] = "*") -> Emergence:
    """The invariant covariance (`exchangeable_covariance`) at every snapshot of a population.

    UsageError if the population has no snapshots, and the errors of `exchangeable_covariance`.

    Example:
        >>> found = emergence(Population("digits.pop"))
        >>> found.plot("emergence.png")
    """
    if not population.snapshots:
        raise UsageError(f"{population.path}: no snapshots; collect it with [population] snapshots = [0, 1, 2, 4]")
    found = {moment: exchangeable_covariance(population.at(moment), select) for moment in population.snapshots}
    return Emergence(found, population.unit)


def _threshold(pair: Pair | None, one: ExchangeableCovariance) -> float:
    """The correlation with p = 0.05 after Bonferroni's adjustment, given the pair's standard error; NaN if unknown."""
    if pair is None or not math.isfinite(pair.z) or not pair.z:
        return math.nan
    null = stats.t(one.n - 1) if one.n > 2 else stats.norm
    error = np.arctanh(pair.correlation) / pair.z
    return float(np.tanh(error * null.isf(_LEVEL / 2 / len(one.pairs()))))
