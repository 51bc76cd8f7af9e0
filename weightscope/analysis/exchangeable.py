"""The covariance of a whole network's weights, averaged over the permutations that leave its function unchanged.

And when in training its correlations appear.
"""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from weightscope._util.names import listing, numbered
from weightscope._util.results import Result, finite_or_none, text_table
from weightscope._util.sources import is_population
from weightscope._util.threads import one_thread
from weightscope._util.workers import Workers
from weightscope.analysis.computed import coordinates_of
from weightscope.errors import AnatomyError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Function
from weightscope.statistics.exchangeable import (
    ExchangeableMoments,
    Pair,
    TypeCovariance,
    beginning,
    correlated_pairs,
)
from weightscope.statistics.index_effects import IndexEffect, described
from weightscope.statistics.moments import BLOCK
from weightscope.statistics.permutation_rules import permutations_by_name
from weightscope.statistics.permutations import PermutationSpec, View
from weightscope.statistics.samples import WeightArray, WeightSamples, finite_chunks, over_parts

if TYPE_CHECKING:
    from weightscope.population import Population

_NUMBERS = 1 << 23  # of a block of networks, at most


@dataclass(frozen=True, eq=False, repr=False)
class ExchangeableCovariance(Result):
    """One small covariance for each set of units that are permuted together."""

    types: tuple[TypeCovariance, ...]  # `kind.groups` is the set of units with which alone its variables vary
    permutations: PermutationSpec  # that was averaged over
    n: int  # networks
    excluded: int  # networks left out because they diverged or are not finite
    index_effects: tuple[IndexEffect, ...]  # of each group: is it exchangeable by distribution; () of one network

    @cached_property
    def _pairs(self) -> list[Pair]:
        return correlated_pairs(self.types)

    def pairs(self) -> list[Pair]:
        """Every pair of tensors that share a set of units, the largest effect in standard errors first."""
        return list(self._pairs)

    @cached_property
    def constant(self) -> list[str]:
        """Tensors, or parts of them, that are the same in all networks; they are in no pair."""
        varying = {
            name for t in self.types for name, part in t.kind.slices.items() if t.covariance.diagonal()[part].any()
        }
        return [view.name for view in self.permutations.parts if view.name not in varying]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"groups": " x ".join(pair.groups), "a": pair.a, "b": pair.b, "correlation": pair.correlation}
            | {"low": pair.ci95[0], "high": pair.ci95[1], "p": pair.p, "in words": self.words(pair)}
            for pair in self._pairs
        ]

    def summary(self) -> str:
        pairs = f"{sum(pair.p < 0.05 for pair in self._pairs)} of {len(self._pairs)} pairs with p < 0.05"
        return f"{self.n} networks, {len(self.types)} sets of units, {pairs}"

    def text(self, most: int = 20) -> str:
        """What crosses tensors, strongest first, in a table of at most so many rows."""
        lines = [f"{self.n} network{'s' * (self.n != 1)}" + (f" ({self.excluded} excluded)" if self.excluded else "")]
        head = ("units", "independent units", "samples", "variables", "tensors")
        kinds = [(t.kind, t.samples) for t in self.types]
        cells = [(k.label, k.dimension, samples, k.multiplicity, len(k.views)) for k, samples in kinds]
        lines.append(text_table(head, cells))
        lines.append("one covariance for each set of units: of what varies with these units alone")
        lines.append("samples: independent units times networks; variables: rows of the covariance, one for each fixed")
        lines.append("entry of a tensor, such as a pixel of filters")
        if line := described(self.index_effects):
            lines += [line]
        if self.constant:
            lines.append(f"the same in all networks, in no pair: {listing(self.constant)}")
        if self.n < 3:
            lines.append("fewer than 3 networks: channels are taken for independent samples, so this is exploratory")
        shown = [pair for pair in self._pairs if pair.p < 0.05][:most]
        if not shown:
            none = "no pair of tensors is correlated (p < 0.05, adjusted for the number of pairs)"
            return "\n".join([*lines, "", none])
        each = "the unbiased mean over networks of that in each (maps pool them)"
        each = "that of their covariance" if self.n < 3 else each
        lines += [
            "",
            f"correlated pairs (p < 0.05, adjusted for {len(self._pairs)} pairs), the surest first",
            f"correlation: of single variables {each},",
            "of several the largest canonical one, which chance increases",
            "interval: 95 %, over networks; of a canonical one from the number of samples, conservative",
        ]
        pairs = []
        for pair in shown:
            r, (low, high) = pair.correlation, pair.ci95
            value, words = (f"{r:+.3f}", "") if pair.signed else (f"{r:.3f}", " (canonical)")
            pairs.append((value, f"{low:+.3f} to {high:+.3f}", p_floor(pair), self.words(pair) + words))
        lines.append(text_table(("correlation", "95 % interval", "p", "pair"), pairs, left=(3,)))
        return "\n".join(lines)

    def words(self, pair: Pair) -> str:
        """A pair as a person would say it: `blocks.1: norm.bias and mlp.fc1.weight column means`."""
        views = {view.name: view for view in self.permutations.parts}
        (where_a, what_a), (where_b, what_b) = (_split(views[name], pair.groups) for name in (pair.a, pair.b))
        first = f"{where_a}: {what_a}" if where_a else what_a
        return f"{first} and {what_b}" if where_a == where_b or not where_b else f"{first} and {where_b}: {what_b}"

    def _named(self, groups: Sequence[str]) -> str:
        """For a title: `channels`, `channels 0 of 3` where there are several groups of them, `units of fc1`."""
        known = {name for found in self.types for name in found.kind.groups}

        def named(group: str) -> str:
            word, _, number = group.partition(".")
            if word not in ("channels", "hidden"):  # such as a layer, from whose network it was derived
                return f"units of {group}"
            alike = sum(name.partition(".")[0] == word for name in known)
            return (word + " units" * (word == "hidden")) + (f" {number} of {alike}" if alike > 1 else "")

        return " x ".join(map(named, groups)) or "means"

    def to_dict(self) -> dict[str, Any]:
        covariances = [
            {"groups": list(t.kind.groups), "independent_units": t.kind.dimension, "samples": t.samples}
            | {"tensors": [[view.name, view.multiplicity] for view in t.kind.views]}
            for t in self.types
        ]
        pairs = [asdict(pair) | {"z": finite_or_none(pair.z) if pair.signed else None} for pair in self._pairs]
        effects = [asdict(effect) for effect in self.index_effects]
        counts = {"networks": self.n, "excluded": self.excluded, "constant": self.constant}
        return counts | {"covariances": covariances, "pairs": pairs, "index_effects": effects}

    def plot(self, path: str | Path | None = None, groups: Sequence[str] | None = None) -> Any:
        """The correlation matrix over one set of units, tensors ruled off in network order.

        The set is given by its groups, and is by default the one group with the most variables, the residual channels.
        Cells within chance are white (`plots.covariance.CHANCE` of independent ones are not).
        """
        from weightscope import plots

        if groups is None:
            of_one_group = [t for t in self.types if len(t.kind.groups) == 1]
            found = max(of_one_group or self.types, key=lambda t: t.kind.multiplicity)
        else:
            there = {frozenset(t.kind.groups): t for t in self.types}
            if frozenset(groups) not in there:
                labels = "; ".join(t.kind.label for t in self.types)
                raise UsageError(f"groups: no covariance over {' x '.join(groups)}; there are {labels}")
            found = there[frozenset(groups)]
        networks = f"{self.n} network{'s' if self.n > 1 else ''}"
        title = f"Correlation over {self._named(found.kind.groups)}, {found.samples:,} samples from {networks}"
        correlation = found.correlation()
        constant = found.covariance.diagonal() <= 0
        correlation[constant], correlation[:, constant] = np.nan, np.nan
        cells = plots.covariance.CELLS
        within = self._chance(found, plots.covariance.CHANCE) if len(correlation) <= cells else None
        axes = plots.covariance_map(correlation, found.kind.slices, kind="correlation", title=title, within=within)
        return plots.finished(axes, path)

    def _chance(self, found: TypeCovariance, rate: float) -> np.ndarray:
        """The sizes that this share of correlations (C, C) exceeds by chance, by their errors or samples."""
        freedom, assumed = self.n - 1 if self.n > 2 else math.inf, np.sqrt(1 / found.samples)
        if found.inflation is not None:
            sizes = [view.multiplicity for view in found.kind.views]
            assumed *= np.sqrt(np.maximum(found.inflation, 1)).repeat(sizes, axis=0).repeat(sizes, axis=1)
        known = -float(stdtrit(freedom, rate / 2)) * found.errors
        return np.where(np.isfinite(known), known, -float(stdtrit(math.inf, rate / 2)) * assumed)


@one_thread()
def covariance_exchangeable(
    source: Any,
    select: str | Sequence[str] | None = "auto",
    *,
    computed: Mapping[str, Function] | Sequence[str] | None = None,
    fold_norms: bool = False,
    permutations: PermutationSpec | Mapping[str, Sequence[str | None]] | str | Path | None = None,
    workers: Workers | int | None = None,
) -> ExchangeableCovariance:
    """The invariant covariance of the selected tensors: what is correlated within and across layers.

    The distribution of networks that start from independent entries does not change when units are permuted, unless
    something tells the units apart, as sinusoidal positions do with channels. The raw covariance is averaged over the
    permutations. What remains is one small matrix for each set of permuted axes, estimated from N times thousands of
    samples (Shah and Chandrasekaran 2012). Memory and time are O(N D). Standard
    errors come from the spread over networks; with one network they take its channels for independent samples. That
    units are exchangeable by distribution, too, is tested (`weightscope.statistics.index_effects`).

    Args:
        source: a population, its path, an array with a spec, or one network, whose channels are samples then: a path,
            `hf://org/name[@revision]`, a `Checkpoint`, a module or a state dict.
        select: patterns of tensor names; "auto" for all, but none beside computed coordinates; None for these alone.
        computed: as in `covariance_across`. Their axes are found by renumbering the units of random weights.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        permutations: the permutation specification, tensor name -> the group of each axis, or a TOML file of rules
            (`weightscope.statistics.permutation_rules`), of all tensors of the source; by default that of their names.
            One's own is checked by function on a population's network
            (`weightscope.anatomy.permutation_groups.permutations_of`).
        workers: see `covariance_across`. Index effects are those of the first 1,024 networks.

    UsageError for an unknown name or a computed coordinate of the wrong shape, or one that the renumbering of units
    changes otherwise than by renumbering an axis; AnatomyError if the architecture is not known and no specification is
    given; SpecError if that does not fit the tensors, or renumbering changes the network's function; DataError if no
    usable network is left.

    Example:
        >>> found = covariance_exchangeable(Population("digits.pop"))
        >>> print(found.text())
    """
    if not hasattr(source, "chunks"):
        from weightscope.population import population_in  # h5py

        source = population_in(source) if is_population(source) else _one_network(source)
    coordinates = coordinates_of(source.spec, select, computed, fold_norms, "*")
    spec, reads = coordinates.spec, coordinates.reads.names
    own = None
    if permutations is None:
        with contextlib.suppress(AnatomyError):
            own = permutations_by_name(source.spec)
    if own is None or own.heads:  # names do not say all that there is to know
        from weightscope.anatomy.permutation_groups import permutations_of  # imports torch

        own = permutations_of(source, permutations)
    own = coordinates.permutations(own)
    size = max(
        1, min(BLOCK, _NUMBERS // max(1, coordinates.reads.size))
    )  # networks: temporary arrays stay in the cache
    blocks = (coordinates(rows) for rows, _ in finite_chunks(source, reads, size))
    centre, effects = beginning(blocks, spec, own)

    def summed(part: WeightSamples, _: int) -> ExchangeableMoments:
        found = ExchangeableMoments(spec, own, centre=centre, index=False)
        with one_thread():  # another thread reads; on two cores more of them wait for each other
            for rows, out in finite_chunks(part, reads, size):
                found.excluded += out
                found.update(coordinates(rows))
        return found

    moments = over_parts(source, summed, workers)
    found = moments.covariances("networks" if moments.n > 1 else "zero")
    return ExchangeableCovariance(found, own, moments.n, moments.excluded, effects)


def _one_network(source: Any) -> WeightArray:
    """The floating-point tensors of one network as a population of one."""
    from weightscope.population import open_network

    network: Any = open_network(source)
    tensors = network.state_dict() if hasattr(network, "state_dict") else network
    read = {name: tensors[name] for name in numbered(tensors)}
    chosen = {name: x.detach().double().cpu().numpy() for name, x in read.items() if x.is_floating_point()}
    spec = WeightSpec(TensorSpec(name, tuple(value.shape)) for name, value in chosen.items())
    return WeightArray(spec.pack(chosen, dtype=float)[None], spec)


def p_floor(pair: Pair) -> str:
    """The p-value of a pair, at least 0.001: farther in the tails the distribution is an assumption."""
    if not math.isfinite(pair.z):
        return "no spread over networks"
    return f"{pair.p:.1g}" if pair.p >= 1e-3 else "< 0.001"


def _split(view: View, groups: Sequence[str]) -> tuple[str, str]:
    """The block that a view belongs to, and what of it is meant: `("blocks.1", "fc1.weight column means")`."""
    match = re.match(r"(.*?\d+(?:\.blocks\.\d+)?)\.(.+)", view.name)
    block, name = (match[1], match[2]) if match and re.search(r"block|layer|\bh\.", match[1]) else ("", view.name)
    away = [i for i, axis in enumerate(view.axes) if axis is not None and axis not in groups]
    if not away:
        return block, name
    if len(view.shape) - view.shape.count(1) == 2 and len(away) == 1:
        return block, f"{name} {'column' if away[0] == 0 else 'row'} means"
    return block, f"{name} means over {', '.join(str(view.axes[i]) for i in away)}"


# --- when in training they appear ------------------------------------------------------------------------------------

Key = tuple[tuple[str, ...], str, str]  # a set of units, and the names of two views
_LEVEL, _STRONGEST = 0.05, 3


@dataclass(frozen=True, eq=False, repr=False)
class Emergence(Result):
    """The covariances of a population's networks, averaged over permutations, at several snapshots of training."""

    found: dict[int, ExchangeableCovariance]  # epoch or step of the snapshot -> covariances, ascending
    unit: str  # "epoch" or "step"

    @cached_property
    def curves(self) -> dict[str, list[Pair | None]]:
        """The strong entries in words, each with its pair at every snapshot; None where one of its parts is constant.

        Strong are the three largest effects of each snapshot with p < 0.05, among correlations of two single variables;
        canonical correlations, which chance increases, are left out.
        """
        pairs = [{(p.groups, p.a, p.b): p for p in one.pairs() if p.signed} for one in self.found.values()]
        strong: dict[Key, str] = {}
        for found, one in zip(pairs, self.found.values(), strict=True):
            sure = [key for key, pair in found.items() if pair.p < _LEVEL and math.isfinite(pair.z)]
            strong |= {key: one.words(found[key]) for key in sure[:_STRONGEST]}
        return {words: [found.get(key) for found in pairs] for key, words in strong.items()}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `ExchangeableCovariance.rows` at each snapshot."""
        return [{self.unit: at} | row for at, one in self.found.items() for row in one.rows()]

    def summary(self) -> str:
        n = next(iter(self.found.values())).n
        return f"{n} networks at {len(self.found)} snapshots, {len(self.curves)} strong entries"

    def text(self) -> str:
        """A table of the strong entries against training; an asterisk marks p < 0.05 at this snapshot."""

        def cell(pair: Pair | None) -> str:
            return "-" if pair is None else f"{pair.correlation:+.3f}{'*' if pair.p < _LEVEL else ' '}"

        head = ("correlation", *(f"{self.unit} {at}" for at in self.found))
        table = text_table(head, [(words, *map(cell, pairs)) for words, pairs in self.curves.items()])
        return f"{self.summary()} (* p < {_LEVEL}, adjusted for all pairs of the snapshot)\n{table}"

    def to_dict(self) -> dict[str, Any]:
        return {"unit": self.unit, "snapshots": [{"at": at} | one.to_dict() for at, one in self.found.items()]}

    def plot(self, path: str | Path | None = None) -> Any:
        """Each strong entry against training; dashed, the largest of their thresholds at each snapshot."""
        from weightscope import plots

        lines = {
            words: [math.nan if pair is None else pair.correlation for pair in pairs]
            for words, pairs in self.curves.items()
        }
        thresholds = [[_threshold(p[i], x) for p in self.curves.values()] for i, x in enumerate(self.found.values())]
        limits = [np.fmax.reduce(each, initial=math.nan) for each in thresholds]
        n = next(iter(self.found.values())).n
        title = f"{n} networks in training" + ("" if lines else ": no correlation with p < 0.05 at any snapshot")
        return plots.finished(plots.emergence_curves([*self.found], lines, limits, unit=self.unit, title=title), path)


@one_thread()
def emergence(
    population: "Population",
    select: str | Sequence[str] = "*",
    workers: Workers | int | None = None,
) -> Emergence:
    """The invariant covariance (`covariance_exchangeable`) at every snapshot of a population.

    UsageError if the population has no snapshots, and the errors of `covariance_exchangeable`.

    Example:
        >>> found = emergence(Population("digits.pop"))
        >>> found.plot("emergence.png")
    """
    if not population.snapshots:
        raise UsageError(f"{population.path}: no snapshots; collect it with [population] snapshots = [0, 1, 2, 4]")
    each = {at: population.at(at) for at in population.snapshots}
    found = {at: covariance_exchangeable(one, select, workers=workers) for at, one in each.items()}
    return Emergence(found, population.unit)


def _threshold(pair: Pair | None, one: ExchangeableCovariance) -> float:
    """The correlation with p = 0.05 after Bonferroni's adjustment, given the pair's standard error; NaN if unknown."""
    if pair is None or not math.isfinite(pair.z) or not pair.z:
        return math.nan
    error = np.arctanh(pair.correlation) / pair.z
    freedom = one.n - 1 if one.n > 2 else math.inf
    return float(np.tanh(-error * stdtrit(freedom, _LEVEL / 2 / len(one.pairs()))))
