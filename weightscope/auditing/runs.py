"""Checks of a network against runs of an initialiser on copies of it: one mechanism for all initialisers.

Statistics of the network are compared with those of copies that the initialiser was run on. On a scale on which a
statistic is nearly normal (the cube root of a variance, atanh of a correlation), one more run has Student's
distribution around the mean of n runs,

    mean +- t_(n-1) s sqrt(1 + 1/n)

whose quantiles are those of the level `RATE` divided by the number of checks. Statistics that have one distribution,
those of all heads of one size, share their runs. Runs of the default start and of the initialiser with an error give
the power. Where nothing is random, the interval is that of rounding.
"""

import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from scipy import special
from torch import Tensor

from weightscope._util.torch_random import seeded
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.anatomy.effective import unsettable
from weightscope.anatomy.tensors import read_once
from weightscope.auditing.report import RATE, UNTOUCHED, Check, error_in
from weightscope.errors import DataError, UsageError

DRAWS = 24  # of each statistic, or 48 where a run has several: t quantiles of 1e-5 are 5.6 and 5.0, the normal one 4.4
LEAST = 8  # draws, where entries are many
ENTRIES = 5e7  # drawn in all runs together, about a second
ROUNDING = 4e-3  # relative, of bfloat16

Key = tuple[Hashable, ...]
Draws = dict[Key, list[float]]


# Scales on which statistics are nearly normal, and their inverses. The cube root is Wilson and Hilferty's (1931).
# Of 100 to 1024 normal or uniform entries, minus the inverse of the kurtosis leaves intervals of the level 1e-4 with
# 0.4 to 1.8 times this probability, its cube root with up to 18 times.
SCALES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "identity": (float, float),
    "variance": (lambda x: float(np.cbrt(x)), lambda y: y**3),
    "correlation": (lambda r: math.atanh(min(max(r, -1 + 1e-9), 1 - 1e-9)), math.tanh),
    "kurtosis": (lambda x: -1 / max(x, 1e-9), lambda y: -1 / y if y < 0 else math.inf),
}


@dataclass(frozen=True)
class Statistic:
    """A statistic of a part of a network; the first six as the attributes of `Check`.

    Attributes:
        scale: "identity", "variance" for a mean of squares, "correlation", or "kurtosis".
        like: statistics of one name and equal `like` have the same distribution, in units of `unit`.
        unit: what the value is divided by before it is compared, > 0.
        slack: by how much the interval is wider on each side, beyond rounding.
        side: "both", "above" if only a large value is wrong, or "below".
        decides: whether its power counts, which is not so of single layers beside their mean.
    """

    part: str
    layer: int | None
    head: int | None
    name: str
    statistic: str
    value: float
    scale: str = "identity"
    like: Hashable = None
    unit: float = 1.0
    slack: float = 0.0
    side: str = "both"
    decides: bool = True

    @property
    def key(self) -> Key:
        """What statistics of one distribution have in common."""
        return self.part, self.statistic, self.like

    @property
    def scaled(self) -> float:
        """The value on the scale on which it is compared."""
        return SCALES[self.scale][0](float(self.value) / self.unit)


Measure = Callable[[NamedTensors], Iterable[Statistic]]
Run = Callable[["Copy", torch.Generator], Any]
"""Initialises a copy."""


class Copy:
    """A copy of a network, on which initialisers are run; made when it is first restored.

    Attributes:
        original: the network's tensors.
        source: those of the copy.
        target: the copy's module, or its tensors for a network without one.
    """

    source: NamedTensors
    target: Any

    def __init__(self, original: NamedTensors) -> None:
        self.original, original.found = original, {}
        self._files: _Copied | None = None
        self._layers: list[tuple[set[str], Callable[[], None]]] = []  # names of tensors, and what starts them

    def restored(self) -> Self:
        """Give the copy the weights of the original."""
        if self._files is not None:
            self._files.clear()
        elif hasattr(self, "source"):
            for name in self.source.names:
                self.source.get(name).copy_(self.original.get(name))
        elif isinstance(self.original, ModuleTensors):
            self.target = copy.deepcopy(self.original.module)
            if why := unsettable(self.target, writing=True):
                raise DataError(f"audit: {why}")
            self.source = ModuleTensors(self.target, self.original.config)
            self.source.found, self.source.reading = {}, list(self.original.reading)
            for path, layer in self.source._modules.items():
                reset: Any = getattr(layer, "reset_parameters", None)
                if callable(reset) and not inspect.signature(reset).parameters:
                    own = {f"{path}.{key}".lstrip(".") for key in (*layer._parameters, *layer._buffers)}
                    self._layers.append((own, reset))
        else:
            self._files = _Copied(self.original)
            self.target = self.source = NamedTensors(self._files, self.original.config)
            self.source.found = {}
        return self

    def run(self, init: Run, g: torch.Generator) -> None:
        """Run an initialiser on the copy, which has the code of the original."""
        with read_once(self.target, self.source.reading):
            init(self, g)

    def start_layers(self, names: Iterable[str]) -> list[str]:
        """Run `reset_parameters` of the layers of some tensors, and keep their others; the tensors of other layers."""
        left = dict.fromkeys(names)
        for own, reset in self._layers:
            if own & left.keys():
                others = [self.source.get(name) for name in own - left.keys() if name in self.source]
                before = [value.clone() for value in others]
                reset()
                for value, kept in zip(others, before, strict=True):
                    value.copy_(kept)
                left = {name: None for name in left if name not in own}
        return list(left)

    def start(self, names: Iterable[str], g: torch.Generator) -> None:
        """Give tensors their default start: `reset_parameters` of their layer, else U(-1, 1) / sqrt(fan_in)."""
        for tensor in map(self.source.get, self.start_layers(names)):
            if tensor.is_floating_point():
                draws = torch.rand(tensor.shape, generator=g) * 2 - 1
                tensor.copy_(draws / math.sqrt(max(1, math.prod(tensor.shape[1:]))))

    def below(self, names: Iterable[str]) -> list[str]:
        """The tensors of some modules, or of these names."""
        paths = tuple(f"{name}." if name else "" for name in names)
        return [name for name in self.source.names if f"{name}.".startswith(paths)]


class _Copied(dict[str, Tensor]):
    """Tensors by name, each copied when it is first read."""

    def __init__(self, source: NamedTensors) -> None:
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._source.get(name).clone()
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)


@dataclass(frozen=True)
class Trial:
    """A network on which an initialiser is run, and how it is measured.

    Attributes:
        network: the copy, with the weights of the original.
        measure: its statistics.
        run: the initialiser.
        wrong: error -> the same with an error.
        start: sets what a run starts from; None where a run sets all that is measured.
        wanted: runs, fewer if each has several draws of every statistic and all have twice as many.
    """

    network: Copy
    measure: Measure
    run: Run
    wrong: Mapping[str, Run]
    start: Callable[[torch.Generator], None] | None
    wanted: int = DRAWS

    def draws(self, seeds: range, run: Run | None, names: Sequence[str]) -> Draws:
        """The statistics after runs, or with None of the default start of tensors."""
        rows: list[Statistic] = []
        with seeded(seeds.start), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is left out was said of the network itself
            for seed in seeds:
                g = torch.Generator().manual_seed(seed)
                if self.start is not None:
                    self.start(g)
                elif run is None:
                    self.network.start(names, g)
                if run is not None:
                    self.network.run(run, g)
                rows += self.measure(self.network.source)
        return gathered(rows)


def gathered(rows: Iterable[Statistic]) -> Draws:
    """The values of statistics on their scales, of those of one distribution together, and of each layer."""
    out: Draws = {}
    for one in rows:
        for key in (one.key, (*one.key, one.layer)):
            out.setdefault(key, []).append(one.scaled)
    return out


def compared(initialiser: str, found: Sequence[Statistic], trials: Iterable[Trial], *, every: bool) -> list[Check]:
    """The checks of a network's statistics by trials; if `every` initialiser is tried, with powers if all pass."""
    right: Draws = {}
    wrong: dict[str, Draws] = {}
    planned = []
    for trial in trials:
        rows = list(trial.measure(trial.network.source))
        names = trial.network.below(one.name for one in rows)
        least = min(Counter(one.key for one in rows).values(), default=1)
        entries = sum(math.prod(trial.network.source.shape(name)) for name in names)
        most = max(2, math.ceil(LEAST / least), int(ENTRIES / max(1, entries)))
        n = min(trial.wanted, math.ceil(2 * trial.wanted / least), most)
        few = min(max(6, math.ceil(n / 4)), most)
        mine = trial.draws(range(2), trial.run, names)
        if any(max(values) > min(values) for values in mine.values()):
            for key, more in trial.draws(range(2, n), trial.run, names).items() if n > 2 else ():
                mine[key] += more
        else:
            n = few = min(4, few)
        right |= mine
        planned.append((trial, names, n, few))
    checks = checked(initialiser, found, right, {})
    if every and not all(check.passed for check in checks):
        return checks
    for trial, names, n, few in planned:
        # First the default start: what a `start` leaves as it is counts as it is after right runs.
        for error, run in {UNTOUCHED: None, **trial.wrong}.items():
            # As many as of right runs, since with 6, up to 1.6 % of untouched networks passed, with 24, 0.4 %.
            runs = range(n, n + (max(n, few) if run is None else few))
            wrong.setdefault(error, {}).update(trial.draws(runs, run, names))
    return checked(initialiser, found, right, wrong)


def checked(initialiser: str, found: Sequence[Statistic], right: Draws, wrong: Mapping[str, Draws]) -> list[Check]:
    """The checks of statistics by draws of right networks, with the powers by draws of wrong ones."""
    drawn = {one.key: _spread(right[one.key]) for one in found}
    level = RATE / max(1, sum(drawn[one.key][1] > 0 for one in found))
    limits = {key: _interval(len(right[key]), *spread, level) for key, spread in drawn.items()}
    others = {error: {key: _spread(values) for key, values in draws.items()} for error, draws in wrong.items()}
    powers: dict[Any, dict[str, float]] = {}
    checks = []
    for one in found:
        low, high = _widened(one, *limits[one.key])
        # With an error, layers may differ that are alike without it.
        place = (*one.key, one.layer), low, high
        if place not in powers:
            mine = {error: spreads.get(place[0], spreads.get(one.key)) for error, spreads in others.items()}
            powers[place] = {error: _outside(*spread, low, high) for error, spread in mine.items() if spread}
        back = SCALES[one.scale][1]
        # A statistic on its scale may be below what the scale can have: variances start at 0.
        ends = back(max(low, 0.0) if one.scale == "variance" else low) * one.unit, back(high) * one.unit
        power = powers[place] if one.decides else {}
        checks.append(
            Check(initialiser, one.part, one.layer, one.head, one.name, one.statistic, float(one.value), *ends, power)
        )
    return checks


def _spread(draws: Sequence[float]) -> tuple[float, float]:
    """The mean and the std of draws, which is 0 where these differ by rounding only."""
    mean, sd = float(np.mean(draws)), float(np.std(draws, ddof=1))
    return mean, 0.0 if sd <= 1e-9 * abs(mean) + 1e-15 else sd


def _interval(n: int, mean: float, sd: float, level: float) -> tuple[float, float]:
    """The interval that one more draw beside n leaves with the probability `level`."""
    half = -float(special.stdtrit(n - 1, level / 2)) * sd * math.sqrt(1 + 1 / n)
    return mean - half, mean + half


def _widened(one: Statistic, low: float, high: float) -> tuple[float, float]:
    """An interval on a statistic's scale, wider by its slack and by rounding, and open on a side that is not wrong."""
    slack = max(one.slack / one.unit, ROUNDING * abs(low + high) / 2)
    return (
        -math.inf if one.side == "above" else low - slack,
        math.inf if one.side == "below" else high + slack,
    )


def _outside(mean: float, sd: float, low: float, high: float) -> float:
    """The probability that a normal number is outside an interval."""
    if sd == 0:
        return float(not low <= mean <= high)
    return float(special.ndtr((low - mean) / sd) + special.ndtr((mean - high) / sd))


def pooled(rows: Iterable[Statistic]) -> list[Statistic]:
    """Statistics, and the mean of each over the layers, if there are several; the latter decides."""
    groups: dict[tuple[str, str], list[Statistic]] = {}
    for one in rows:
        groups.setdefault((one.part, one.statistic), []).append(one)
    out: list[Statistic] = []
    for group in groups.values():
        if len(group) > 1:
            mean = SCALES[group[0].scale][1](float(np.mean([one.scaled for one in group])))
            out.append(replace(group[0], layer=None, name=ALL_LAYERS, value=mean, like=ALL_LAYERS, unit=1.0))
        out += [replace(one, decides=len(group) == 1) for one in group]
    return out


ALL_LAYERS = "all layers"


# --- initialisers without statistics of their own -------------------------------------------------------------------

MEANS = 8  # runs before those whose statistics are compared, which make the mean of each tensor; 2 of large networks
_OTHERS = 1 << 20  # the first of their seeds (of 32 bits): a mean is like the runs that it is of


def by_tensor(name: str, init: Run, network: Copy, modules: Iterable[str] = ("",), *, every: bool) -> list[Check]:
    """Checks of every tensor of modules that an initialiser changes, by runs of it on the default start.

    - mean, variance: of the entries;
    - kurtosis: of 100 entries or more;
    - likeness: the cosine between the tensor and its mean over other runs, near 1 if a structure is always the same;
    - difference: of a tensor that is the same in all runs, the largest from its value, relative to the largest entry.

    Raises:
        UsageError: if the initialiser sets nothing, or tensors without a module are to be set as a whole.
    """
    if not isinstance(network.original, ModuleTensors) and modules == ("",):
        raise UsageError(f"{name}: expected a module, on copies of which it can be run, found tensors only")
    network.restored()

    def values(names: Sequence[str], run: int, *, start: int | None = None) -> dict[str, Tensor]:
        with seeded(run), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if start is not None:
                network.start(names, torch.Generator().manual_seed(start))
            network.run(init, torch.Generator().manual_seed(_OTHERS + run))
        return {key: network.source.get(key).float() for key in names}

    names = network.below(modules)
    with seeded(0), torch.no_grad():
        network.start(names, torch.Generator().manual_seed(0))
    before = {key: network.source.get(key).float().clone() for key in names}
    first = {key: x.clone() for key, x in values(names, 0).items() if not torch.equal(x, before[key])}
    if not first:
        raise UsageError(f"{name}: expected an initialiser that changes the default start, found no changed parameter")
    chosen, fixed = list(first), dict.fromkeys(first, True)
    means = {key: value.clone() for key, value in first.items()}
    # Whether it sets all that is measured, so that runs need no start.
    whole = all(torch.equal(x, first[key]) for key, x in values(chosen, 0, start=1).items())
    runs = max(2, min(MEANS, int(ENTRIES / sum(x.numel() for x in first.values()))))
    for seed in range(1, runs):
        for key, x in values(chosen, seed, start=None if whole else seed).items():
            fixed[key] &= torch.equal(x, first[key])
            means[key] += x
    centres = {key: first[key] if fixed[key] else means[key] / runs for key in chosen}
    sizes = {key: float(x.abs().max() if fixed[key] else x.norm()) for key, x in centres.items()}
    del before, first, means

    def measure(tensors: NamedTensors) -> Iterator[Statistic]:
        for i, key in enumerate(chosen):
            x = tensors.get(key).to(centres[key])
            for what, value in _of_entries(x, centres[key], max(sizes[key], 1e-30), fixed[key]).items():
                slack = 0.0 if what in SCALES else ROUNDING
                scale = what if what in SCALES else "identity"
                yield Statistic("weight", i, None, key, what, value, scale, key, slack=slack)

    def scaled(network: Copy, g: torch.Generator) -> None:
        init(network, g)
        for key in chosen:
            network.source.get(key).mul_(1.2)

    start = None if whole else partial(network.start, chosen)
    trial = Trial(network, measure, init, {error_in("scale"): scaled}, start)
    return compared(name, list(measure(network.original)), [trial], every=every)


def _of_entries(x: Tensor, mean: Tensor, size: float, fixed: bool) -> dict[str, float]:
    """The statistics of a tensor by its mean over runs, and the size of that: its largest entry if fixed, or norm."""
    if fixed:
        return {"difference": float((x - mean).abs().max()) / size}
    n, x = x.numel(), x.flatten()
    centre, square = float(x.mean()), float(x @ x) / n
    likeness = float(x @ mean.flatten()) / max(math.sqrt(square * n) * size, 1e-30)
    apart = x - centre
    found = {"mean": centre, "variance": float(apart @ apart) / n, "likeness": likeness}
    if n >= 100:  # below, the sample kurtosis is far from normal
        squares = torch.mul(x, x, out=apart)
        found["kurtosis"] = float(squares @ squares) / n / max(square**2, 1e-30)
    return found
