"""Moments of weights under the permutations that leave a network's function unchanged.

An axis of n renumberable units splits R^n into the trivial part (the mean times sqrt n) and the standard part (the n
deviations, of dimension n - 1). A tensor splits into one part for each subset S of the groups on its axes. By Schur's
lemma an invariant covariance couples only parts of the same S, and there by a C x C matrix times the identity of
dimension d_S, where C is the multiplicity of S, the number of parts that belong to it (Shah and Chandrasekaran 2012,
"Group symmetry and covariance regularization"). So a network of any width is described by a few small matrices, each
estimated from N d_S samples.

A group on two axes of a tensor, W -> P W P^T, has two orbits of entries, the diagonal and the rest. Such a tensor adds
two parts to the empty type, three to the type of the group (diagonal, rows + columns, rows - columns), and has two
types of its own, in pairs of units i < j: symmetric and antisymmetric (`weightscope.statistics.conjugation`).

Tests of the pairs of such a covariance say which tensors of a network are correlated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import atanh, copysign, exp, inf, lgamma, log, prod, sqrt, tanh
from typing import Literal, Self

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtr, chdtrc, chndtr, hyp2f1, ndtri, stdtr, stdtrit

from weightscope._util.environment import available_memory
from weightscope._util.names import listing
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.conjugation import projected
from weightscope.statistics.index_effects import NETWORKS, IndexEffect, IndexEffects, holm
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.permutations import (
    InvariantType,
    PermutationSpec,
    View,
    is_signed,
    pairs_of,
    subsets,
)

CENTRE = 64  # networks whose median is taken


Averages = Callable[[View, tuple[str, ...]], np.ndarray]


def _averages(arrays: Mapping[str, np.ndarray]) -> Averages:
    """Views averaged over the axes of other groups than S: (N, *sizes of S, multiplicity), times sqrt of their number.

    What has been summed over one axis is used again for sums over more.
    """
    sums: dict[tuple[str, tuple[int, ...]], np.ndarray] = {(name, ()): array for name, array in arrays.items()}

    def averaged(view: View, keep: tuple[str, ...]) -> np.ndarray:
        away = tuple(i for i, axis in enumerate(view.axes) if axis is not None and axis not in keep)
        for n, axis in enumerate(away):
            if (view.name, away[: n + 1]) not in sums:
                sums[view.name, away[: n + 1]] = _sum(sums[view.name, away[:n]], axis + 1 - n)
        axes = [axis for axis in view.axes if axis is None or axis in keep]
        order = [0, *(axes.index(group) + 1 for group in keep), *(i + 1 for i, axis in enumerate(axes) if axis is None)]
        moved = sums[view.name, away].transpose(order)
        moved = moved.reshape(*moved.shape[: len(keep) + 1], view.multiplicity)
        return moved / sqrt(prod(view.shape[i] for i in away)) if away else moved

    return averaged


def _sum(array: np.ndarray, axis: int) -> np.ndarray:
    """The sum (N, ...) over an axis, by BLAS, which is several times as fast as `numpy.sum` for short axes."""
    lead, n, rest = array.shape[1:axis], array.shape[axis], array.shape[axis + 1 :]
    ones = np.ones(n, dtype=array.dtype)
    folded = array.reshape(len(array), prod(lead), n, prod(rest))
    out = folded[..., 0] @ ones if prod(rest) == 1 else ones @ folded
    return out.reshape(len(array), *lead, *rest)


def centred(stack: np.ndarray, kind: InvariantType) -> np.ndarray:
    """A copy of (..., *sizes of S, C) with mean zero along each unsigned axis of units."""
    stack = np.array(stack, dtype=np.float64)
    _centre(stack, kind)
    return stack


def _centre(stack: np.ndarray, kind: InvariantType) -> None:
    """Subtract the mean along each unsigned axis of units, in place."""
    for axis, label in enumerate(kind.groups, -len(kind.groups) - 1):
        if _has_mean(label):
            stack -= np.expand_dims(_sum(stack[None], axis % stack.ndim + 1)[0] / stack.shape[axis], axis)


def _has_mean(label: str) -> bool:
    """Whether averages along an axis need not be zero."""
    return not is_signed(label) and pairs_of(label) is None


def projection(noise: np.ndarray, kind: InvariantType) -> np.ndarray:
    """The projection of (..., *sizes of S, C) on the type's part."""
    out = centred(noise, kind)
    for axis, label in enumerate(kind.groups, -len(kind.groups) - 1):
        if part := pairs_of(label):
            out = np.moveaxis(projected(np.moveaxis(out, axis, -1), part), -1, axis)
    return out


def invariant_parts(weights: np.ndarray, spec: WeightSpec, permutations: PermutationSpec) -> Iterator[np.ndarray]:
    """The parts of each type S in turn, (N, *sizes of S, C): float64, with mean zero along unsigned axes."""
    tensors = spec.unpack(weights)
    for kind in permutations.types:
        averages = _averages({view.name: view.of(tensors[view.tensor]) for view in kind.views})
        yield centred(np.concatenate([averages(view, kind.groups) for view in kind.views], axis=-1), kind)


def assembled(parts: dict[tuple[str, ...], np.ndarray], spec: WeightSpec, permutations: PermutationSpec) -> np.ndarray:
    """The inverse of `invariant_parts`: parts (N, *sizes of S, C) by type to vectors (N, D)."""
    size = len(next(iter(parts.values())))
    out = np.zeros((size, spec.size))
    tensors = spec.unpack(out)
    for kind in permutations.types:
        for view in kind.views:
            part = parts[kind.groups][..., kind.slices[view.name]]
            view.add(tensors[view.tensor], _spread(part, view, kind.groups))
    return out


def _spread(part: np.ndarray, view: View, keep: tuple[str, ...]) -> np.ndarray:
    """(N, *sizes of S, multiplicity) to (N, *view.shape), constant along the axes of other groups."""
    fixed = [n for n, axis in zip(view.shape, view.axes, strict=True) if axis is None]
    part = part.reshape(*part.shape[: len(keep) + 1], *fixed)
    there = [axis for axis in view.axes if axis is None or axis in keep]
    fixed_at = iter(range(len(keep) + 1, part.ndim))
    part = part.transpose([0, *(next(fixed_at) if axis is None else keep.index(axis) + 1 for axis in there)])
    missing = [i for i, axis in enumerate(view.axes) if axis is not None and axis not in keep]
    return np.expand_dims(part, tuple(i + 1 for i in missing)) / sqrt(prod(view.shape[i] for i in missing))


@dataclass(frozen=True, eq=False)
class TypeCovariance:
    """The covariance (C, C) of one type."""

    kind: InvariantType  # the type S
    samples: int  # N d_S; N - 1 for the empty type, whose mean is estimated
    covariance: np.ndarray  # (C, C), divisor `samples`
    mean: np.ndarray  # (C,), of the empty type; zero for the others, where invariance makes it zero
    # (C, C) standard errors of `correlation()` for views of multiplicity 1: those of `own`, times the square root of
    # what networks of different scale add; NaN as there
    errors: np.ndarray
    networks: int  # N
    # (2, C, C): of the correlations of views of multiplicity 1 in each network alone, about the means over networks,
    # the mean and its standard error over networks; NaN for other views, and with fewer than 3 networks; None where
    # networks are not compared. Networks that differ in scale count alike
    own: np.ndarray | None = None
    # (V, V) for each pair of views: n sum of T_a T_b / (sum of T_a sum of T_b) over the n units of all networks, T the
    # sum of a unit's squares over C. That many times the variance of a correlation is that of units of equal
    # scale, where it is 1 (White 1980)
    inflation: np.ndarray | None = None

    def correlation(self) -> np.ndarray:
        """(C, C), with zeros in rows that do not vary."""
        std = np.sqrt(np.maximum(self.covariance.diagonal(), 0))  # rounding: that of constants may be negative
        inverse = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)
        return self.covariance * np.outer(inverse, inverse)


class ExchangeableMoments:
    """Streaming second moments of all types: update with blocks of networks, read the covariances.

    The cost is O(N D) plus N d_S C^2 for each type; no D x D matrix is ever formed. The median of each entry in the
    first networks is subtracted before squaring, so that float64 sums lose nothing, and what all networks share enters
    neither correlations nor their errors.

    Args:
        spec: of the D columns of the blocks.
        permutations: of the same tensors.
        centre: what is subtracted instead, (D,), of moments that are added to others (`+=`) with the same centre;
            index effects are those of the moments that others are added to.
        index: whether index effects are counted (`IndexEffects`), see also `beginning`.

    Raises:
        DataError: if the two are of different tensors.

    Example:
        >>> moments = ExchangeableMoments(spec, permutations)
        >>> for block in population.chunks():
        ...     moments.update(block)
        >>> moments.covariances()[0].covariance
    """

    def __init__(
        self, spec: WeightSpec, permutations: PermutationSpec, *, centre: np.ndarray | None = None, index: bool = True
    ) -> None:
        if strangers := {view.tensor for view in permutations.views} ^ set(spec.names):
            raise DataError(f"the permutation specification and the spec differ in {listing(sorted(strangers))}")
        self.spec, self.permutations, self.n = spec, permutations, 0
        self.excluded = 0  # networks that the caller left out
        self.index = IndexEffects(permutations)
        self._indexed = index
        self._types = {kind.groups: kind for kind in permutations.types}
        # products, covariances, correlations
        needed = 8 * 4 * sum(kind.multiplicity**2 for kind in self._types.values())
        if needed > 1 << 28 and needed > (free := available_memory()):
            largest = max(permutations.views, key=lambda view: view.multiplicity)
            raise UsageError(
                f"select: covariances between all fixed entries need {needed / 1e9:,.0f} GB, {free / 1e9:,.0f} GB are "
                f"available; leave out tensors such as `{largest.name}` with {largest.multiplicity:,} fixed entries"
            )
        self._products = {key: np.zeros((kind.multiplicity, kind.multiplicity)) for key, kind in self._types.items()}
        self._single = {
            key: np.concatenate([np.full(view.multiplicity, view.multiplicity == 1) for view in kind.views])
            for key, kind in self._types.items()
        }
        # for views of multiplicity 1: sums over networks of their correlations, of the squares of these, and of
        # 1 / (length of a, length of b)
        self._own = {key: np.zeros((3, int(one.sum()), int(one.sum()))) for key, one in self._single.items()}
        # sums of T_a T_b (V, V), and of T_a in the last row, over networks and over their units; see `inflation`
        shapes = {key: (2, len(kind.views) + 1, len(kind.views)) for key, kind in self._types.items()}
        self._traces = {key: np.zeros(shape) for key, shape in shapes.items()}
        # sums over networks for each type (*sizes of S, C), and for views of multiplicity 1 of what is divided by their
        # squared lengths (*sizes of S, C1)
        self._sums = {key: np.zeros((*kind.sizes, kind.multiplicity)) for key, kind in self._types.items()}
        self._units = {key: np.zeros((*self._types[key].sizes, int(one.sum()))) for key, one in self._single.items()}
        self._waiting: list[np.ndarray] = []  # blocks that are not in the sums yet
        self._centre = np.empty(0) if centre is None else centre  # (D,), which is subtracted

    def update(self, block: np.ndarray) -> "ExchangeableMoments":
        """Take up networks (n, D)."""
        if not len(block):
            return self
        if not finite_rows(block).all():
            raise DataError("expected finite weights, found NaN or infinity; leave those networks out")
        block = np.array(block, dtype=np.float64)
        if self._indexed:
            tensors = self.spec.unpack(block)
            self.index.update({view.name: view.of(tensors[view.tensor]) for view in self.permutations.views})
        self.n += len(block)
        self._waiting.append(block)
        if self.n >= CENTRE:
            self.flush()
        return self

    def __iadd__(self, other: "ExchangeableMoments") -> Self:
        """Take the networks of moments about the same centre."""
        self.flush()
        other.flush()
        self.n += other.n
        self.excluded += other.excluded
        theirs = other._kept()
        for name, sums in self._kept().items():
            for key, value in theirs[name].items():
                sums[key] += value
        return self

    def arrays(self) -> dict[str, np.ndarray]:
        """The sums by name, for `numpy.savez` and `restored`, which goes on from them; without the index effects."""
        self.flush()
        counts = {"n": np.array(self.n), "excluded": np.array(self.excluded), "centre": self._centre}
        return counts | {f"{name} {' '.join(key)}": sums[key] for name, sums in self._kept().items() for key in sums}

    @classmethod
    def restored(cls, spec: WeightSpec, permutations: PermutationSpec, arrays: Mapping[str, np.ndarray]) -> Self:
        """Moments with the sums of `arrays`, of the same spec and permutations."""
        found = cls(spec, permutations, centre=arrays["centre"], index=False)
        found.n, found.excluded = int(arrays["n"]), int(arrays["excluded"])
        for name, sums in found._kept().items():
            for key in sums:
                sums[key][...] = arrays[f"{name} {' '.join(key)}"]
        return found

    def _kept(self) -> dict[str, dict[tuple[str, ...], np.ndarray]]:
        """Sums over networks of each type."""
        names = ("products", "own", "traces", "sums", "units")
        return {name: getattr(self, f"_{name}") for name in names}

    def flush(self) -> None:
        """Add the waiting networks to the sums."""
        if not self._waiting:
            return
        block = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        self._waiting = []
        if not self._centre.size:
            self._centre = centre_of(block)
        block -= self._centre
        tensors = self.spec.unpack(block)
        averages = _averages({view.name: view.of(tensors[view.tensor]) for view in self.permutations.parts})
        for key, kind in self._types.items():
            views = [averages(view, key) for view in kind.views]
            if all(self._single[key]) and len(key) > 1:  # large parts of low multiplicity, which are not copied
                grams = _centred_grams(averages, kind.views, key)
                traces = grams.diagonal(axis1=1, axis2=2)
                inverse = _inverse(np.sqrt(np.maximum(traces, 0)))
                own = grams * inverse[:, :, None] * inverse[:, None, :]
                self._products[key] += grams.sum(axis=0)
                self._sums[key] += np.concatenate([view.sum(axis=0) for view in views], axis=-1)
                weighted = zip(np.square(inverse.T), views, strict=True)
                self._units[key] += np.stack([np.tensordot(w, view[..., 0], 1) for w, view in weighted], -1)
            else:
                parts = np.concatenate(views, axis=-1)  # (n, *sizes, C)
                _centre(parts, kind)
                rows = parts.reshape(-1, kind.multiplicity)
                self._products[key] += rows.T @ rows
                self._sums[key] += parts.sum(axis=0)
                if not key:
                    continue
                parts = parts.reshape(len(block), -1, kind.multiplicity)
                single = np.ascontiguousarray(parts.transpose(0, 2, 1)[:, self._single[key]])  # (n, C1, units)
                alone = np.array([view.multiplicity == 1 for view in kind.views])
                squares = np.empty((len(block), len(views), parts.shape[1]))  # (n, V, units)
                squares[:, alone] = np.square(single)
                for i in np.flatnonzero(~alone):
                    part = parts[..., kind.slices[kind.views[i].name]]
                    np.einsum("npc,npc->np", part, part, out=squares[:, i])
                self._traces[key][1] += _moments_of(squares.transpose(0, 2, 1).reshape(-1, len(views)))
                traces = squares.sum(axis=2)
                inverse = _inverse(np.sqrt(traces[:, alone]))
                single *= inverse[..., None]
                own = single @ single.transpose(0, 2, 1)  # (n, C1, C1)
                self._units[key] += np.einsum("nc,ncp->pc", inverse, single).reshape(self._units[key].shape)
            self._own[key] += own.sum(axis=0), np.einsum("nab,nab->ab", own, own), inverse.T @ inverse
            self._traces[key][0] += _moments_of(traces)

    def covariances(self, about: Literal["networks", "zero"] = "networks") -> tuple[TypeCovariance, ...]:
        """One for each type, from the means of everything upwards.

        About "networks" subtracts each entry's mean over networks and divides by (N - 1) d_S: the projection of
        `numpy.cov` on the invariant matrices. "zero" divides by N d_S: parts that are not invariant have mean zero, so
        that a single network is enough. The empty type is always taken about its mean. About means, rows that are the
        same in all networks have exactly no variance.
        """
        least = 2 if about == "networks" else 1
        if self.n < least:
            raise DataError(f"expected at least {least} networks for covariances about {about}, found {self.n}")
        self.flush()
        out = []
        centres = invariant_parts(self._centre[None], self.spec, self.permutations)
        for (key, kind), centre in zip(self._types.items(), centres, strict=True):
            sums, centre = (x.reshape(-1, kind.multiplicity) for x in (centred(self._sums[key], kind), centre))
            samples = (self.n - (about == "networks")) * kind.dimension
            matrix = self._products[key] - sums.T @ sums / self.n
            mean = sums / self.n + centre
            if about == "zero" and key:
                matrix += self.n * mean.T @ mean
            elif not key:
                samples = self.n - 1
            matrix = (matrix + matrix.T) / 2 / max(samples, 1)
            own = self._alone(key)
            traces = self._traces[key]
            networks = _inflation(traces[0], self.n)
            units = _inflation(traces[1], self.n * prod(kind.sizes)) if traces[1].any() else networks
            sizes = [view.multiplicity for view in kind.views]
            errors = own[1] * np.sqrt(networks).repeat(sizes, axis=0).repeat(sizes, axis=1)
            means = np.zeros(kind.multiplicity) if key else mean[0]
            out.append(TypeCovariance(kind, samples, matrix, means, errors, self.n, own, units))
        return tuple(out)

    def _alone(self, key: tuple[str, ...]) -> np.ndarray:
        """Mean and standard error over networks of the correlations in each of them, parts scaled to length one.

        What networks share is proportional to 1 / length of a scaled copy, and is taken away by least squares. Of
        independent parts with different means over networks, the error is at least the true one.
        """
        single = self._single[key]
        out = np.full((2, len(single), len(single)), np.nan)
        if self.n >= 3 and key:
            mean, squares, weights = self._own[key] / self.n
            spread = np.sqrt(np.maximum(squares - mean**2, 0) / (self.n - 1))
            kind = self._types[key]
            flat = centred(self._units[key], kind).reshape(prod(kind.sizes), len(mean)) / self.n
            own = weights.diagonal() + (weights.diagonal() == 0)  # zero where a copy is
            means = flat.T @ flat * weights / np.outer(own, own)
            left = np.maximum(1 - means.diagonal(), 1e-12)
            values = np.stack([mean - means, spread]) / np.sqrt(np.outer(left, left))
            out[:, np.outer(single, single)] = values.reshape(2, -1)
        return out


def beginning(
    blocks: Iterable[np.ndarray], spec: WeightSpec, permutations: PermutationSpec
) -> tuple[np.ndarray | None, tuple[IndexEffect, ...]]:
    """The centre (D,) of the first 64 networks, None without any, and the index effects of the first 1,024."""
    head, index = np.empty((0, spec.size)), IndexEffects(permutations)
    for block in blocks:
        rows = block.astype(np.float64)
        head = np.concatenate([head, rows[: CENTRE - len(head)]])
        tensors = spec.unpack(rows)
        index.update({view.name: view.of(tensors[view.tensor]) for view in permutations.views})
        if index.n >= NETWORKS:
            break
    return (centre_of(head) if len(head) else None), index.effects()


def centre_of(rows: np.ndarray) -> np.ndarray:
    """The median of each entry in the first networks, (D,); unlike the mean it is not that of a few large ones."""
    return np.median(rows[:CENTRE].astype(np.float64), axis=0)


def _moments_of(traces: np.ndarray) -> np.ndarray:
    """Sums of T_a T_b, and of T_a in the last row, (V + 1, V), of traces (n, V)."""
    return np.concatenate([traces.T @ traces, traces.sum(axis=0, keepdims=True)])


def _inflation(moments: np.ndarray, n: int) -> np.ndarray:
    """N sum of T_a T_b / (sum of T_a sum of T_b), (V, V), and 1 where a sum is zero."""
    scale = np.outer(moments[-1], moments[-1])
    return np.divide(n * moments[:-1], scale, out=np.ones_like(scale), where=moments[:-1] > 0)


def _centred_grams(averages: Averages, views: Sequence[View], key: tuple[str, ...]) -> np.ndarray:
    """Gram matrices (n, C, C) of C views of one copy each, centred by inclusion and exclusion over unsigned axes."""
    out = np.zeros((len(averages(views[0], key)), len(views), len(views)))
    for smaller in subsets([label for label in key if _has_mean(label)]):
        kept = tuple(label for label in key if not _has_mean(label) or label in smaller)
        flat = [averages(view, kept)[..., 0] for view in views]
        axes = "abcdefgh"[: len(kept)]
        sign = 1.0 if (len(key) - len(kept)) % 2 == 0 else -1.0
        for i, one in enumerate(flat):
            for j, other in enumerate(flat[: i + 1]):
                out[:, i, j] += sign * np.einsum(f"n{axes},n{axes}->n", one, other)
                out[:, j, i] = out[:, i, j]
    return out


def _inverse(lengths: np.ndarray) -> np.ndarray:
    """1 / lengths, and zero where a length is."""
    return np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)


@dataclass(frozen=True)
class Pair:
    """Two views that share a type, and how they go together."""

    groups: tuple[str, ...]  # of the type
    a: str  # name of one view
    b: str  # name of the other
    correlation: float  # signed for one copy each, otherwise the largest canonical one
    ci95: tuple[float, float]  # 95 %; of a canonical one conservative, and may be below the estimate, biased upwards
    z: float  # `correlation` in standard errors for one copy each; otherwise the normal quantile of p
    p: float  # two-sided, adjusted for the number of pairs of all types (Holm 1979)
    signed: bool  # whether each view has one copy


def correlated_pairs(covariances: Sequence[TypeCovariance]) -> list[Pair]:
    """Every pair of views with a shared type, tested; the empty type, which has N samples only, is left out.

    Views of multiplicity 1: Fisher's transformation of the mean over N networks of the correlation in each of them,
    about the means over networks, so that networks of different scale count alike, with its standard error compared
    with Student's t of N - 1 degrees of freedom. Of few units a sample correlation is too small on average; the mean
    and its interval are given as the correlations that have them as expectations (`unbiased`). With fewer than 3
    networks, the correlation of their covariance, with 1 / sqrt(samples). Of 3 or 4 networks, 6 to 7 % of the p-values
    of independent views are below 0.05. Views of higher multiplicity: the largest canonical correlation with Bartlett's
    chi-squared test of Wilks' lambda; samples are divided by what units of different scale do to the variance of the
    two views' correlations (`TypeCovariance.inflation`), where that exceeds one. Its interval inverts the noncentral
    chi-squared distribution of the same statistic; its upper end is the larger one of the divided and of all samples.
    """
    out = []
    for found in covariances:
        if not found.kind.groups:
            continue
        blocks = {view.name: found.kind.slices[view.name] for view in found.kind.views}
        # A test of multiplicities p and q needs more samples than p + q; larger views are not whitened for nothing.
        testable = [name for name, part in blocks.items() if part.stop - part.start < found.samples - 3]
        index = {view.name: i for i, view in enumerate(found.kind.views)}
        white = {name: _whitened(found.covariance[blocks[name], blocks[name]]) for name in testable}
        for a, b in combinations(testable, 2):
            block, i, j = found.covariance[blocks[a], blocks[b]], blocks[a].start, blocks[b].start
            tested = None
            if block.size > 1:
                effect = 1.0 if found.inflation is None else max(1.0, float(found.inflation[index[a], index[b]]))
                tested = _canonical(block, white[a], white[b], found.samples, effect)
            elif (scale := sqrt(found.covariance[i, i] * found.covariance[j, j])) > 0:
                value, error = (np.nan, np.nan) if found.own is None else found.own[:, i, j]
                known = bool(np.isfinite(error))
                r = float(np.clip(value if known else block.item() / scale, -1, 1))
                error = float(error) if known else (1 - r**2) / sqrt(found.samples - 3)
                (low, high), z, p = fisher_interval(r, error, found.networks - 1 if known else inf)
                if known:
                    r, low, high = (unbiased(value, found.kind.dimension) for value in (r, low, high))
                tested = r, (low, high), z, p
            if tested is not None:
                out.append(Pair(found.kind.groups, a, b, *tested, block.size == 1))
    pairs = [replace(pair, p=p) for pair, p in zip(out, holm([pair.p for pair in out]), strict=True)]
    return sorted(pairs, key=lambda pair: -abs(pair.z))


def design_effect(found: TypeCovariance) -> float:
    """The median over pairs of views of what units of different scale do to the variance of their correlation; >= 1."""
    pairs = np.empty(0) if found.inflation is None else found.inflation[np.triu_indices(len(found.inflation), 1)]
    return max(1.0, float(np.median(pairs))) if len(pairs) else 1.0


def fisher_interval(r: float, error: float, freedom: float) -> tuple[tuple[float, float], float, float]:
    """The 95 % interval of a correlation, its z and its two-sided p-value, on Fisher's scale atanh r.

    The estimate over its standard error has Student's distribution with so many degrees of freedom.
    """
    if abs(r) > 1 - 1e-12 or not error > 0:
        return (r, r), copysign(inf, r), 0.0 if r else 1.0
    centre, step = atanh(r), error / (1 - r**2)
    half = -float(stdtrit(freedom, 0.025)) * step
    return (tanh(centre - half), tanh(centre + half)), centre / step, float(2 * stdtr(freedom, -abs(centre) / step))


def unbiased(mean: float, freedom: int) -> float:
    """The correlation of Gaussian pairs whose sample correlations of so many degrees of freedom f have this mean.

    `E[r] = rho (2 / f) (Gamma((f + 1) / 2) / Gamma(f / 2))^2 2F1(1/2, 1/2; f / 2 + 1; rho^2)` (Hotelling 1953), and
    from f = 100 its expansion in 1 / f, with an error below 2e-5.
    """
    if freedom >= 100:  # scipy's 2F1 is NaN near 1 from f = 200 or so
        return mean * (1 + (1 - mean**2) / (2 * freedom))
    scale = 2 / freedom * exp(2 * (lgamma((freedom + 1) / 2) - lgamma(freedom / 2)))

    def excess(rho: float) -> float:
        expected = 1 if rho == 1 else rho * scale * float(hyp2f1(0.5, 0.5, freedom / 2 + 1, rho**2))
        return expected - abs(mean)

    return copysign(float(brentq(excess, 0, 1)), mean)


def _canonical(
    block: np.ndarray, left: np.ndarray, right: np.ndarray, samples: int, effect: float
) -> tuple[float, tuple[float, float], float, float] | None:
    p, q = left.shape[1], right.shape[1]
    if not p or not q or samples / effect <= p + q + 2:
        return None
    values = np.linalg.svd(left.T @ block @ right, compute_uv=False).clip(0, 1 - 1e-12)
    explained = -float(np.log1p(-(values**2)).sum())
    weights = np.array([samples / effect, samples]) - (p + q + 3) / 2
    statistic = explained * weights[0]
    tail = float(chdtrc(p * q, statistic))
    # the logarithm of one that underflows is that of the leading term of the incomplete gamma function
    log_p = log(tail) if tail else (p * q / 2 - 1) * log(statistic / 2) - statistic / 2 - lgamma(p * q / 2)
    z = -float(ndtri(tail / 2)) if log_p > -600 else sqrt(-2 * log_p)
    low = _noncentrality(statistic, p * q, 0.975) / weights[0]
    high = max(_noncentrality(explained * weight, p * q, 0.025) / weight for weight in weights)
    # -sum log(1 - rho^2) of all canonical correlations is at least that of the largest, at most min(p, q) times it
    interval = sqrt(-np.expm1(-low / min(p, q))), sqrt(-np.expm1(-high))
    return float(values[0]), interval, z, tail


def _noncentrality(statistic: float, freedom: int, level: float) -> float:
    """That with which a chi-squared statistic is below this one with such a probability; zero if none is so large."""
    if chdtr(freedom, statistic) <= level:
        return 0.0
    # the mean is freedom + noncentrality, the variance 2 (freedom + 2 noncentrality)
    most = statistic + 20 * sqrt(freedom + 2 * statistic) + 100
    return float(brentq(lambda x: chndtr(statistic, freedom, x) - level, 0.0, most))


def _whitened(block: np.ndarray) -> np.ndarray:
    """V / sqrt(eigenvalues) of a covariance, without directions that do not vary."""
    values, vectors = np.linalg.eigh(block)
    kept = values > max(values.max(initial=0.0), 0.0) * 1e-10
    return vectors[:, kept] / np.sqrt(values[kept])
