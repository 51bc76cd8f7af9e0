"""`explain`: the shortest statement of a population's distribution, in terms of one or two numbers each.

The covariance that `exchangeable` fits has a number of its own for each pair of parts of the network. A *term* is one
number, or two that are interpolated over relative depth, for all pairs of a kind:

    (a, b, along, where)     the correlation of tensors a and b along units that both have, where: "same block",
                             "1 apart" (blocks), "outside" (not both in blocks), "pixels 0 1" (apart in one filter)
    (a, a, along, "std")     the standard deviation of a's part along these units over that of its single entries

The part of a tensor along units is its mean over all others, times the root of their number: of `fc1.weight` along
"channels" the column means. Single entries are what is left without these means; terms along two kinds of units tie
them. Of two matrices W_1 (r, d) and W_2 (d, r) whose entries ij and ji have the correlation c, the product is on
average W_2 W_1 ~ alpha Z + beta I with beta / alpha = c sqrt(r / d), where Z has independent entries of variance 1 / d:
that of values and outputs (r = d) has the form of thesis Eq. 3.13.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky
from scipy.special import stdtr, stdtrit

from weightscope._util import atomic
from weightscope._util.names import BLOCK, unknown
from weightscope._util.results import Result
from weightscope._util.threads import one_thread
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits.exchangeable import Exchangeable, mean_vector
from weightscope.fits.resizing import default_stds, depths, in_blocks
from weightscope.spec import WeightSpec
from weightscope.statistics.exchangeable import invariant_parts
from weightscope.statistics.index_effects import holm
from weightscope.statistics.permutations import InvariantType, PermutationSpec, View
from weightscope.statistics.samples import finite_chunks, literal
from weightscope.statistics.shrinkage import nearest_correlation

Key = tuple[str, str, str, str]
"""a, b, along, where."""
Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and relative depths of entries of a type's covariance."""
Scales = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Pattern of a tensor -> its mean and standard deviation, each a few numbers that are interpolated over depth."""
_FOLDS = 8
_PAIRED = 12  # terms that were not taken alone, which are tried in pairs
_GROUPS = 32  # of networks, at most, for standard errors
_STD = "std"
_MOST = 1 - 1e-9  # a larger correlation is one of equal parts


def pattern_of(name: str) -> str:
    """The name of a tensor or view with `*` for the number of its block: `blocks.*.attn.proj.weight`."""
    found = BLOCK.fullmatch(name)
    return f"{found['stack']}*{found['rest']}" if found else name


def _where(a: View, p: int, b: View, q: int) -> str | None:
    """How fixed entry p of a view stands to fixed entry q of another; None if no term speaks of them."""
    if a.name == b.name:
        if p == q:
            return _STD
        fixed = [n for n, axis in zip(a.shape, a.axes, strict=True) if axis is None]
        places = zip(np.unravel_index(p, fixed), np.unravel_index(q, fixed), strict=True)
        *others, y, x = [0, 0, *(abs(int(one) - int(other)) for one, other in places)]
        pixels = len(fixed) > 1 and not any(others)  # of a filter; not classes or input channels
        return f"pixels {min(y, x)} {max(y, x)}" if pixels else None
    if a.multiplicity > 1 and b.multiplicity > 1 and p != q:
        return None
    mine, theirs = BLOCK.fullmatch(a.name), BLOCK.fullmatch(b.name)
    if not (mine and theirs):
        return "outside"
    if mine["stack"] != theirs["stack"]:
        return None
    apart = abs(int(mine["index"]) - int(theirs["index"]))
    return f"{apart} apart" if apart else "same block"


class _Layout:
    """Which entries of the covariances of a network's types each term speaks of."""

    def __init__(self, spec: WeightSpec, permutations: PermutationSpec, network: WeightSpec) -> None:
        self.spec, self.permutations, self.types = spec, permutations, permutations.types
        depth, default = depths(network), default_stds(network)
        self.t, self.units = dict[str, float](), dict[str, float]()  # of each view: relative depth, unit of its scale
        for view in permutations.parts:
            found = BLOCK.fullmatch(view.tensor)
            self.t[view.name] = int(found["index"]) / max(1, depth[found["stack"]] - 1) if found else 0.0
            self.units[view.name] = default[view.tensor] or 1.0
        self.rows = [[(view, i) for view in kind.views for i in range(view.multiplicity)] for kind in self.types]

    @cached_property
    def entries(self) -> dict[Key, dict[int, Entries]]:
        """Key -> number of a type -> its entries."""
        out: dict[Key, dict[int, list[tuple[int, int, float]]]] = {}
        for number, kind in enumerate(self.types):
            rows, along = self.rows[number], _along(kind)
            for i, j in itertools.combinations_with_replacement(range(len(rows)), 2):
                (a, p), (b, q) = rows[i], rows[j]
                where = _where(a, p, b, q)
                if where is not None and not (where == _STD and _single(a, kind)):
                    t = (self.t[a.name] + self.t[b.name]) / (1 if where == "outside" else 2)
                    key = pattern_of(a.name), pattern_of(b.name), along, where
                    out.setdefault(key, {}).setdefault(number, []).append((i, j, t))
        return {key: {number: _entries(each) for number, each in of.items()} for key, of in out.items()}

    def scale(self, scales: Scales, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Means (of the empty type, else zero) and standard deviations (C,) of the parts of a type."""
        rows, trivial = self.rows[number], not self.types[number].groups
        found = [
            (v, *(_at(self.t[v.name], x) * self.units[v.name] for x in scales[pattern_of(v.name)])) for v, _ in rows
        ]
        means = [mean * sqrt(view.entries) * trivial for view, mean, _ in found]
        return np.array(means), np.array([std for *_, std in found])


def _along(kind: InvariantType) -> str:
    """`channels x hidden`: a type's groups without the numbers of blocks."""
    return " x ".join(re.sub(r"[.].*", "", group.lstrip("~")) for group in kind.groups) or "means"


def _single(view: View, kind: InvariantType) -> bool:
    """Whether a view's part of a type is that of single entries, along all of its units."""
    return len(kind.groups) == len(view.labels)


def _entries(found: Iterable[tuple[int, int, float]]) -> Entries:
    rows, columns, t = zip(*found, strict=True)
    return np.array(rows), np.array(columns), np.array(t)


def _at(t: Any, values: Any) -> Any:
    """Numbers for equidistant depths from 0 to 1, interpolated."""
    return np.interp(t, np.linspace(0, 1, len(values)), values) if len(values) > 1 else values[0] + 0 * t


def structure_of(
    network: WeightSpec,
    permutations: PermutationSpec,
    scales: Scales,
    terms: Sequence[Sequence[Any]],
    gain: float = 1.0,
) -> Exchangeable:
    """The distribution that scales and terms `(a, b, along, where, values)` state, for the tensors in `scales`.

    Correlations are multiplied by `gain` and clipped at +-0.9; where they contradict each other, the nearest
    correlation matrix is taken. Terms of blocks that are further apart than the network is deep are left out; a
    SpecError if another term or a pattern is of no tensors.
    """
    named: dict[str, list[str]] = {}
    for view in permutations.parts:
        named.setdefault(pattern_of(view.name), []).append(view.tensor)
    for pattern, pair in scales.items():
        if pattern not in named:
            raise SpecError(f"scales: {unknown('tensor', pattern, named)}")
        _check_numbers(f"scales: {pattern}: mean", pair[0], -np.inf)
        _check_numbers(f"scales: {pattern}: std", pair[1], 0.0)
    names = [*dict.fromkeys(name for pattern in scales for name in named[pattern])]
    spec = WeightSpec(tensor for tensor in network.tensors if tensor.name in names)
    layout = _Layout(spec, permutations.restrict(names), network)
    if missing := [v.name for v in layout.permutations.parts if pattern_of(v.name) not in scales]:
        raise SpecError(
            f"scales: {pattern_of(missing[0])!r} is missing, which is in one tensor with others that are there"
        )
    matrices = [np.eye(kind.multiplicity) for kind in layout.types]
    parts = [np.ones(kind.multiplicity) for kind in layout.types]
    for line in terms:
        if len(line) != 5:
            raise SpecError(f"terms: expected (a, b, along, where, values), found {line!r}")
        *key, values = line
        for pattern in key[:2]:
            if pattern not in scales:
                raise SpecError(f"terms: {unknown('tensor in `scales`', pattern, scales)}")
        bounds = (0.0, np.inf) if key[3] == _STD else (-1.0, 1.0)
        _check_numbers(f"terms: {', '.join(key)}", values, *bounds)
        found = layout.entries.get((key[0], key[1], key[2], key[3]), {})
        if not found and not re.fullmatch(r"\d+ apart", key[3]):  # of a network with fewer blocks
            there = sorted({f"along {k[2]!r}, {k[3]!r}" for k in layout.entries if k[:2] == (key[0], key[1])})
            what = f"{', '.join(there)}" if there else "none in this order"
            raise SpecError(f"terms: {key[0]}, {key[1]}: expected one of {what}; found along {key[2]!r}, {key[3]!r}")
        for number, (i, j, t) in found.items():
            if key[3] == _STD:
                parts[number][i] = _at(t, values)
            else:
                matrices[number][i, j] = matrices[number][j, i] = np.clip(gain * _at(t, values), -0.9, 0.9)
    factors, mean = [], None
    for number, kind in enumerate(layout.types):
        means, stds = layout.scale(scales, number)
        matrix, std = matrices[number], stds * parts[number]
        factors.append(cholesky(_definite(matrix) * np.outer(std, std), lower=True))
        mean = mean if kind.groups else means
    permutations = layout.permutations
    return Exchangeable(spec, mean_vector(mean, spec, permutations), permutations, factors, network=network)


def _check_numbers(what: str, values: Any, low: float, high: float = np.inf) -> None:
    """A list of one or more numbers between two bounds, which are excluded."""
    fine = isinstance(values, list | tuple) and values and all(isinstance(x, int | float) for x in values)
    if not fine or not all(low < x < high for x in values):
        raise SpecError(f"{what}: expected a list of numbers between {low:g} and {high:g}, found {values!r}")


def _definite(matrix: np.ndarray) -> np.ndarray:
    """The matrix or, where terms contradict each other, the nearest correlation matrix."""
    return matrix if np.linalg.eigvalsh(matrix)[0] > 1e-3 else nearest_correlation(matrix, floor=1e-3)


class _Sums:
    """Of groups of networks: their numbers (G,), and sums of each type's products (G, C, C) and parts (G, C)."""

    def __init__(self, layout: _Layout, rows: np.ndarray) -> None:
        groups = min(_GROUPS, len(rows) // 2)
        self.layout, self.n = layout, np.bincount(np.arange(len(rows)) % groups)
        sizes = [kind.multiplicity for kind in layout.types]
        self.products = [np.zeros((groups, c, c)) for c in sizes]
        self.parts = [np.zeros((groups, c)) for c in sizes]
        for g in range(groups):
            own = rows[g::groups].astype(np.float64)
            for number, part in enumerate(invariant_parts(own, layout.spec, layout.permutations)):
                flat = part.reshape(-1, part.shape[-1])
                self.products[number][g] = flat.T @ flat
                if not layout.types[number].groups:
                    self.parts[number][g] = flat.sum(axis=0)


class _Estimate:
    """Scales, and the value of every possible term, of the groups that `keep` (G,) marks."""

    def __init__(self, sums: _Sums, keep: np.ndarray) -> None:
        layout = self.layout = sums.layout
        self.n = float(sums.n[keep].sum())
        self.products = [p[keep].sum(axis=0) / self.n for p in sums.products]  # of one network
        self.parts = [m[keep].sum(axis=0) / self.n for m in sums.parts]
        squares, means = dict.fromkeys(layout.t, 0.0), dict.fromkeys(layout.t, 0.0)
        for number, kind in enumerate(layout.types):
            product, part = self.products[number], self.parts[number]
            for i, (view, _) in enumerate(layout.rows[number]):
                means[view.name] += part[i] / sqrt(view.entries) / view.multiplicity
                if _single(view, kind):
                    squares[view.name] += (product[i, i] - part[i] ** 2) / kind.dimension / view.multiplicity
        each: dict[str, list[tuple[float, float, float]]] = {}
        for name, t in layout.t.items():
            found = t, means[name] / layout.units[name], sqrt(squares[name]) / layout.units[name]
            each.setdefault(pattern_of(name), []).append(found)
        self.scales = {key: (_knots(found, 1), _knots(found, 2)) for key, found in each.items()}
        self.correlations = []
        for number, kind in enumerate(layout.types):
            part, freedom = self.parts[number], kind.dimension if kind.groups else 1 - 1 / self.n
            variances = (self.products[number] - np.outer(part, part)) / freedom
            own = np.sqrt(variances.diagonal())
            self.correlations.append(variances / np.outer(own, own))
            np.fill_diagonal(self.correlations[-1], own / [sqrt(squares[v.name]) for v, _ in layout.rows[number]])
        self.values = {key: self._fitted(found, key[3] == _STD) for key, found in layout.entries.items()}

    def _fitted(self, entries: Mapping[int, Entries], std: bool) -> tuple[float, float, float]:
        """Mean over the entries, and intercept and slope over depth by least squares; NaN where all have one depth.

        Of correlations on Fisher's scale, artanh; of standard deviations as logarithms, their mean that of the root
        mean square. Means over few networks are less biased and skewed there.
        """
        dimensions = [self.layout.types[number].dimension for number in entries]
        y = np.concatenate([self.correlations[number][i, j] for number, (i, j, _) in entries.items()])
        t = np.concatenate([t for *_, t in entries.values()])
        w = np.repeat(dimensions, [len(i) for i, *_ in entries.values()])
        scaled = np.log(y) if std else np.arctanh(np.clip(y, -_MOST, _MOST))
        mean = float(np.log(w @ y**2 / w.sum()) / 2 if std else w @ scaled / w.sum())
        centre = float(w @ t / w.sum())
        spread = float(w @ (t - centre) ** 2)
        slope = float(w @ ((t - centre) * scaled)) / spread if spread > 1e-12 * w.sum() else np.nan
        return mean, mean - slope * centre, slope

    def stated(self, key: Key, sloped: bool) -> tuple[float, ...]:
        """The value of a term, or those at relative depths 0 and 1."""
        mean, start, slope = self.values[key]
        return _unscaled(key, (start, start + slope) if sloped else (mean,))

    def log_prob(self, number: int, chosen: Mapping[Key, bool], other: "_Estimate") -> float:
        """Log-likelihood, per network, of a type's parts of other networks; `chosen` are keys and whether sloped."""
        kind, (means, std) = self.layout.types[number], self.layout.scale(self.scales, number)
        matrix = np.eye(kind.multiplicity)
        for key, sloped in chosen.items():
            if (found := self.layout.entries[key].get(number)) is not None:
                i, j, t = found
                value = _at(t, self.stated(key, sloped))
                if key[3] == _STD:
                    std[i] *= value
                else:
                    matrix[i, j] = matrix[j, i] = value
        root = cho_factor(_definite(matrix))
        cross = np.outer(means, other.parts[number])
        about = (other.products[number] - cross - cross.T + np.outer(means, means)) / np.outer(std, std)
        log_det = 2 * (np.log(root[0].diagonal()).sum() + np.log(std).sum()) + kind.multiplicity * np.log(2 * np.pi)
        return -0.5 * float(kind.dimension * log_det + np.trace(cho_solve(root, about)))


def _unscaled(key: Key, values: Iterable[float]) -> tuple[float, ...]:
    """From the scales of `_Estimate.values` to standard deviations or correlations."""
    return tuple(float(np.exp(x) if key[3] == _STD else np.tanh(x)) for x in values)


def _knots(found: Sequence[tuple[float, float, float]], column: int) -> tuple[float, ...]:
    """Values at the first, middle and last block, or fewer if there are fewer blocks, by least squares."""
    t, y = np.array([row[0] for row in found]), np.array([row[column] for row in found])
    basis = np.stack([_at(t, one) for one in np.eye(min(3, len(set(t))))], axis=1)
    return tuple(float(x) for x in np.linalg.lstsq(basis, y, rcond=None)[0])


@dataclass(frozen=True)
class Term:
    """One term, with what the population says of it."""

    of: str
    against: str
    along: str
    where: str
    values: tuple[float, ...]  # one number, or those at relative depths 0 and 1
    low: float  # 95 % interval of the mean over the entries, not adjusted for the selection of terms
    high: float
    share: float  # of what `exchangeable` (or all terms, if that is more) gains in held-out log-likelihood

    @property
    def stated(self) -> tuple[Any, ...]:
        """As `structure_of` takes it, rounded to three digits."""
        return self.of, self.against, self.along, self.where, _rounded(self.values)


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


_CODE = '''"""{terms} terms of {networks} networks, {gain} in held-out log-likelihood.

Written by `weightscope fit-init {source} --explain`.
"""

from weightscope.init import from_terms_

SCALES = {{  # mean and std at the first, middle and last block; of layers with a fan-in times sqrt(3 fan_in)
{scale_lines}}}
TERMS = [  # correlations, or stds of a part over that of single entries, at the first and the last block
{term_lines}]


def start(module, *, generator, gain=1.0, permutations=None):
    return from_terms_(
        module, scales=SCALES, terms=TERMS, gain=gain, permutations=permutations, generator=generator
    )
'''


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """Scales and terms that state a population's distribution; `code` is an initialiser that draws from it."""

    source: str
    networks: int
    scales: Scales
    terms: tuple[Term, ...]  # the largest share first
    tested: int  # kinds of entries
    fixed: tuple[str, ...]  # tensors that never vary, which are left out
    log_prob: Mapping[str, float]  # held-out, nats per network: "independent", "terms", "exchangeable"

    columns: ClassVar[Mapping[str, str]] = {
        "term": "{term}",
        "along": "{along}",
        "where": "{where}",
        "size": "{size}",
        "of the mean, 95 %": "{low:+.3f} to {high:+.3f}",
        "held-out": "{share:.1%}",
    }
    left = (0, 1, 2)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each term: `term`, `along`, `where`, `size` (at the first and last block), interval, `share`."""
        rows = []
        for term in self.terms:
            name = term.of if term.of == term.against else f"{term.of} ~ {term.against}"
            size = " to ".join(f"{value:+.3f}" for value in term.values)
            row = {"term": name, "along": term.along, "where": term.where, "size": size}
            rows.append(row | {"low": term.low, "high": term.high, "share": term.share})
        return rows

    @property
    def gain(self) -> str:
        """What all terms gain over independent entries, beside what `exchangeable` gains, whose numbers overfit."""
        share = sum(term.share for term in self.terms)
        more = self.log_prob["terms"] > self.log_prob["exchangeable"]
        return "more than exchangeable gains" if more and share else f"{share:.0%} of what exchangeable gains"

    def summary(self) -> str:
        return (
            f"{len(self.terms)} terms, of {self.tested} tested, are {self.gain} over independent entries in held-out "
            f"log-likelihood ({self.networks} networks)"
        )

    def notes(self) -> list[str]:
        lines = [
            "a ~ b: correlation of their parts along these units, which are means over all others (fc1, channels: its "
            "columns)",
            "std: standard deviation of such a part over that of single entries; pixels i j: so far apart in a filter",
            "two sizes: in the first and the last block; the interval is of the mean over blocks",
        ]
        return lines + ([f"left out, they never vary: {', '.join(self.fixed)}"] if self.fixed else [])

    def to_dict(self) -> dict[str, Any]:
        own = {"source": self.source, "networks": self.networks, "log_prob": dict(self.log_prob)}
        scales = {pattern: {"mean": list(mean), "std": list(std)} for pattern, (mean, std) in self.scales.items()}
        terms = [list(term.stated) for term in self.terms]
        return own | {"scales": scales, "terms": terms, "fixed": list(self.fixed)} | super().to_dict()

    def code(self) -> str:
        """An initialiser in Python with these numbers, `start`, which `bench --init MODULE:start` takes."""
        lines = [
            f"    {json.dumps(key)}: ({_rounded(mean)}, {_rounded(std)}),\n" for key, (mean, std) in self.scales.items()
        ]
        terms = [f"    ({json.dumps(term.stated)[1:-1]}),\n" for term in self.terms]
        numbers = {"terms": len(terms), "networks": self.networks, "gain": self.gain, "source": self.source}
        return _CODE.format(**numbers, scale_lines="".join(lines), term_lines="".join(terms))

    def save(self, path: str | Path) -> Path:
        """Write `code` atomically; a WeightscopeError if that fails."""
        atomic.write(path, self.code().encode())
        return Path(path)


@one_thread()
def explain(
    source: Any, select: str | Sequence[str] | None = None, *, least: float = 0.01, permutations: Any = None
) -> Explanation:
    """The shortest statement of the distribution of a population's weights, in terms of one or two numbers each.

    Scales (mean and standard deviation of each tensor's entries over depth) are always part of it. Every kind of entry
    is tested by the jackknife over up to 32 groups of networks (Student's t of artanh of correlations and log of
    standard deviations, 1 % for all of them together by Holm's method), and so is its slope over depth. What is
    significant becomes a term, in the order of what it gains alone in the log-likelihood of held-out networks (8
    folds), if it still adds `least` of what the structure `exchangeable` gains over independent entries, or is a
    correlation along two kinds of units: these are small, but add up in the products of matrices, as those of values
    and outputs do. What was not taken is tried in pairs, which share what they gain. All networks take part in the
    tests, so sizes and shares of terms that are barely significant are too large on average. Fixed entries, such as
    pixels, have one standard deviation in common.

    Args:
        source: a `Population`, its path, or a `WeightArray`.
        select: patterns of tensors; by default those in blocks.
        least: the smallest share of a term.
        permutations: as in `fit`.

    Raises:
        UsageError: if no tensor is selected.
        DataError: of fewer than 32 usable networks, or if no tensor varies.

    Example:
        >>> print(explain("digits.pop").code())
    """
    from weightscope.anatomy.permutation_groups import permutations_of  # imports torch
    from weightscope.fits.fitting import fit
    from weightscope.population import open_source  # h5py

    opened = open_source(source) if isinstance(source, str | Path) else source
    select = select or literal(in_blocks(opened.spec.names))
    if not select:
        raise UsageError("--select: no tensor is in a numbered block; name the tensors")
    names = opened.spec.select(select).names
    rows = np.concatenate([rows for rows, _ in finite_chunks(opened, names)])
    if len(rows) < 4 * _FOLDS:
        where = getattr(opened, "path", "an array")
        raise DataError(f"{where}: terms need at least {4 * _FOLDS} usable networks, found {len(rows)}")
    columns = opened.spec.select(literal(names)).slices
    fixed = tuple(name for name in names if not np.ptp(rows[:, columns[name]], axis=0).any())
    names = [name for name in names if name not in fixed]
    if not names:
        raise DataError(f"none of the {len(fixed)} selected tensors varies")
    rows = np.concatenate([rows[:, columns[name]] for name in names], axis=1)
    layout = _Layout(
        WeightSpec(opened.spec[name] for name in names),
        permutations_of(opened, permutations).restrict(names),
        opened.spec,
    )
    sums = _Sums(layout, rows)
    groups = np.arange(len(sums.n))
    whole = _Estimate(sums, groups >= 0)
    sloped, errors = _significant(whole, [_Estimate(sums, groups != g) for g in groups])
    folds = [(_Estimate(sums, groups % _FOLDS != k), _Estimate(sums, groups % _FOLDS == k)) for k in range(_FOLDS)]

    def score(chosen: Mapping[Key, bool], numbers: Iterable[int]) -> float:
        return sum(one.log_prob(n, chosen, held) * held.n for one, held in folds for n in numbers) / len(rows)

    everything = range(len(layout.types))
    rival = fit(
        opened, literal(names), structure="exchangeable", joint="all", holdout=_FOLDS, permutations=permutations
    )
    scores = {"independent": score({}, everything), "exchangeable": float(rival.table[0]["log_prob"])}
    most = max(0.0, scores["exchangeable"] - scores["independent"])

    def gained(keys: Sequence[Key], before: Mapping[Key, bool]) -> float:
        numbers = sorted({number for key in keys for number in layout.entries[key]})
        return score({**before, **{key: sloped[key] for key in keys}}, numbers) - score(before, numbers)

    chosen: dict[Key, bool] = {}
    gains = dict[Key, float]()

    def added(keys: Sequence[Key]) -> bool:
        gain = gained(keys, chosen)
        small = all(" x " in key[2] and key[3] != _STD for key in keys)
        if gain <= 0 or (gain < least * most * len(keys) and not small):
            return False
        chosen.update({key: sloped[key] for key in keys})
        gains.update(dict.fromkeys(keys, gain / len(keys)))
        return True

    alone = {key: gained([key], {}) for key in sloped}
    waiting = [key for key in sorted(alone, key=alone.__getitem__, reverse=True) if not added([key])]
    # the correlations of b with a and c may contradict each other unless that of a and c is there
    for pair in itertools.combinations(waiting[:_PAIRED], 2):
        if pair[0][2] == pair[1][2] and not set(pair) & set(chosen):
            added(pair)
    scores["terms"] = score(chosen, everything)
    most, terms = max(most, sum(gains.values())), []
    for key in sorted(gains, key=gains.__getitem__, reverse=True):
        mean, half = whole.values[key][0], -float(stdtrit(len(groups) - 1, 0.025)) * errors[key]
        low, high = _unscaled(key, (mean - half, mean + half))
        terms.append(Term(*key, whole.stated(key, sloped[key]), low, high, gains[key] / most))
    name = str(getattr(opened, "path", "an array"))
    return Explanation(name, len(rows), whole.scales, tuple(terms), len(layout.entries), fixed, scores)


def _significant(whole: _Estimate, left_out: Sequence[_Estimate]) -> tuple[dict[Key, bool], dict[Key, float]]:
    """The significant kinds of entries, with whether their slope is, too; and the standard errors of all means."""
    groups, keys = len(left_out), [*whole.values]
    each = np.array([[one.values[key] for key in keys] for one in left_out])  # (groups, keys, 3)
    errors = np.sqrt((groups - 1) / groups * np.square(each - each.mean(axis=0)).sum(axis=0))
    found = np.array([whole.values[key] for key in keys])  # zero of entries that are independent
    t = np.abs(found[:, (0, 2)]) / np.maximum(errors[:, (0, 2)], 1e-12)
    p = np.nan_to_num(2 * stdtr(groups - 1, -t), nan=1.0)
    adjusted = np.reshape(holm(p.reshape(-1)), p.shape)
    sloped = {
        key: bool(slope < 0.01) for key, (mean, slope) in zip(keys, adjusted, strict=True) if min(mean, slope) < 0.01
    }
    return sloped, dict(zip(keys, errors[:, 0].tolist(), strict=True))
