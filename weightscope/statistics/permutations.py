"""Which axes of which tensors may be renumbered together without changing the network's function.

A group on two axes of a tensor, W -> P W P^T, is of a matrix that maps units to themselves: `x + relu(W x)`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from weightscope._util.names import listing
from weightscope.errors import SpecError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics import conjugation


@dataclass(frozen=True)
class View:
    """A tensor, or some rows of it, with the permutation group of each axis."""

    name: str  # the tensor's name, with the part in brackets where it is not the whole: `attn.qkv.weight[q]`
    tensor: str  # name of the tensor
    shape: tuple[int, ...]  # of the view
    # for each axis None (fixed: filter positions, classes, tokens), the name of the group that permutes it, or that
    # name after a "~" where the group also flips the sign of each of its coordinates
    axes: tuple[str | None, ...]
    offset: tuple[int, ...] = ()  # where it begins on each axis of the tensor; () at zero, if there are no strides
    # for each axis of the view the tensor's axis and the lengths and strides along it, in entries; () if the view has
    # the axes of the tensor. A group of heads may have two, of the heads and of the units in each
    strides: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def labels(self) -> frozenset[str]:
        """The axes' groups, "~" included."""
        return frozenset(axis for axis in self.axes if axis is not None)

    @property
    def multiplicity(self) -> int:
        """The number of fixed entries, which is how often each irreducible part occurs."""
        return prod(n for n, axis in zip(self.shape, self.axes, strict=True) if axis is None)

    @property
    def entries(self) -> int:
        """How many of the tensor's entries its mean is over."""
        return prod(self.shape)

    @property
    def always(self) -> frozenset[str]:
        """The labels along which it has no mean: those whose signs flip."""
        return frozenset(filter(is_signed, self.labels))

    @property
    def parts(self) -> "tuple[View, ...]":
        """The view itself, or the parts of one with a group on two axes, each with distinct groups."""
        group = next((axis for axis in self.labels if self.axes.count(axis) == 2), None)
        if group is None:
            return (self,)
        fixed = [(axis, n) for axis, n in zip(self.axes, self.shape, strict=True) if axis != group]
        n, out = self.shape[self.axes.index(group)], []
        for part in (part for part, least in conjugation.PARTS.items() if n >= least):
            axis = {"off-diagonal": None, "symmetric": group + _PAIRS[0], "antisymmetric": group + _PAIRS[1]}
            size = 1 if part == "off-diagonal" else n * (n - 1) // 2 if part.endswith("symmetric") else n
            axes, shape = zip((axis.get(part, group), size), *fixed, strict=True)
            out.append(Part(f"{self.name} {part}", self.tensor, shape, axes, whole=self, part=part))
        return tuple(out)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "View":
        """The view that `dataclasses.asdict` gave, from JSON."""
        strides = tuple((axis, tuple((n, step) for n, step in pairs)) for axis, pairs in stored.get("strides", ()))
        shapes = {key: tuple(stored.get(key, ())) for key in ("shape", "axes", "offset")}
        return cls(stored["name"], stored["tensor"], **shapes, strides=strides)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all entries of the view."""
        strides = self.strides or tuple((i, ((n, 1),)) for i, n in enumerate(self.shape))
        last = list(self.offset or (0,) * len(shape))
        numbers = [*last, *self.shape, *(x for axis, pairs in strides for pair in ((axis, 1), *pairs) for x in pair)]
        if not all(type(x) is int and x >= 0 for x in numbers) or not len(last) == len(shape) >= len(
            {a for a, _ in strides}
        ):
            return False
        if [prod(n for n, _ in pairs) for _, pairs in strides] != list(self.shape):
            return False
        for axis, pairs in strides:
            if axis >= len(shape):
                return False
            last[axis] += sum((n - 1) * step for n, step in pairs)
        return all(end < n for end, n in zip(last, shape, strict=True)) and len(self.axes) == len(self.shape)

    def _window(self, tensor: np.ndarray) -> np.ndarray:
        """The view's entries in the tensor's memory, (..., *lengths)."""
        strides = self.strides or tuple((i, ((n, 1),)) for i, n in enumerate(self.shape))
        ndim = len(self.offset) or len(self.shape)
        lead = tensor.ndim - ndim
        if self.offset:
            window: tuple[Any, ...] = (..., *(slice(start, None) for start in self.offset))
            tensor = tensor[window]
        lengths = [n for _, pairs in strides for n, _ in pairs]
        steps = [step * tensor.strides[lead + axis] for axis, pairs in strides for _, step in pairs]
        return as_strided(tensor, (*tensor.shape[:lead], *lengths), (*tensor.strides[:lead], *steps))

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """The view's entries (..., *shape) of its tensor (..., *tensor shape)."""
        window = self._window(tensor)
        return window.reshape(*window.shape[: tensor.ndim - (len(self.offset) or len(self.shape))], *self.shape)

    def write(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Set the view's entries of its tensor to values (..., *shape)."""
        window = self._window(tensor)
        window[...] = values.reshape(window.shape)

    def add(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Add values (..., *shape), or an array that is broadcast to it, to the view's entries of its tensor."""
        window = self._window(tensor)
        window += np.broadcast_to(values, (*values.shape[: values.ndim - len(self.shape)], *self.shape)).reshape(
            window.shape
        )


@dataclass(frozen=True, kw_only=True)
class Part(View):
    """A part of a view with a group on two axes, see `conjugation`; its first axis is in place of both."""

    whole: View
    part: str

    @property
    def _units(self) -> tuple[int, int, int]:
        """The two axes, from the end, and how long they are."""
        i, j = (k for k, axis in enumerate(self.whole.axes) if self.whole.axes.count(axis) == 2 and axis is not None)
        return i - len(self.whole.axes), j - len(self.whole.axes), self.whole.shape[i]

    @property
    def entries(self) -> int:
        """See `View.entries`."""
        *_, n = self._units
        return prod(self.shape) * (n * (n - 1) if self.part == "off-diagonal" else 1)

    @property
    def always(self) -> frozenset[str]:
        """See `View.always`."""
        pair = self.axes[0] if self.part != "diagonal" else None
        return frozenset(label for label in self.labels if is_signed(label) or label == pair)

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """Its coordinates (..., *shape) of its tensor (..., *tensor shape)."""
        *pair, _ = self._units
        found = conjugation.coordinates(np.moveaxis(self.whole.of(tensor), pair, (-2, -1)), self.part)
        return np.moveaxis(found, -1, -len(self.shape))

    def add(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Add the entries with these coordinates (..., *shape) to those of its tensor."""
        *pair, n = self._units
        values = np.broadcast_to(values, (*values.shape[: values.ndim - len(self.shape)], *self.shape))
        matrices = conjugation.matrices(np.moveaxis(values, -len(self.shape), -1), self.part, n)
        self.whole.add(tensor, np.moveaxis(matrices, (-2, -1), pair))


@dataclass(frozen=True)
class InvariantType:
    """One type S of irreducible part: a set of groups, and the views that contain it."""

    # S, in the specification's order, with "~" where signs flip, and "^2+" or "^2-" for the symmetric or antisymmetric
    # pairs of a group on two axes; empty for the means of everything
    groups: tuple[str, ...]
    sizes: tuple[int, ...]  # n of each group of S: the shape of a part before the dependent entries are left out
    views: tuple[View, ...]  # those that contain the type, each with its multiplicity

    @property
    def dimension(self) -> int:
        """Of the irreducible representation: the product of those of its groups, see `freedom`."""
        return prod(map(freedom, self.groups, self.sizes))

    @property
    def label(self) -> str:
        """Its name in diagnostics and in the keys of `gain`: `"hidden.0 x channels"`, or `"means"`."""
        return " x ".join(self.groups) or "means"

    @cached_property
    def slices(self) -> dict[str, slice]:
        """View name -> its rows and columns in the type's covariance (C, C)."""
        out, start = {}, 0
        for view in self.views:
            out[view.name] = slice(start, start + view.multiplicity)
            start += view.multiplicity
        return out

    @property
    def multiplicity(self) -> int:
        """C, the sum over its views."""
        return sum(view.multiplicity for view in self.views)


@dataclass(frozen=True)
class PermutationSpec:
    """The permutation specification of an architecture (the term of Git Re-Basin, Ainsworth et al. 2023).

    Axes with one group's name are permuted together. A group whose name stands after a "~" on some axis is signed: it
    also flips the sign of each of its coordinates there, and permutes without flipping where the "~" is missing. Query
    and key rows are `~qk`; in a gated MLP up and down have `~hidden` and the gate `hidden`; a residual stream with
    RMSNorm is `~channels`, its norms' weights `channels`.

    Attributes:
        views: the tensors, or parts of tensors.
        heads: group -> (name, H) for the units of attention heads: unit i belongs to head i // (n / H). Units stay
            within their head, and heads of one name are permuted together; those without a name (None) stay where
            they are. Statistics do not depend on it: they are averages over heads.
        notes: what a specification that was derived leaves out, and why.

    Raises:
        SpecError: if axes of one group differ in length, or groups are on several axes of a tensor other than one of
            them, without signs, on two (a matrix that maps units to themselves).
    """

    views: tuple[View, ...]
    heads: Mapping[str, tuple[str | None, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        self.sizes  # noqa: B018 - checks the lengths
        for view in self.views:
            if repeated(view.axes):
                raise SpecError(
                    f"`{view.name}`: expected each group on one axis, or one group, without signs, on two, "
                    f"found {view.axes}"
                )

    @classmethod
    def from_axes(
        cls,
        spec: WeightSpec,
        axes: Mapping[str, Sequence[str | None]],
        heads: Mapping[str, tuple[str | None, int]] | None = None,
    ) -> "PermutationSpec":
        """A specification of one's own: tensor name -> the group of each axis, None for fixed ones.

        Example:
            >>> spec = WeightSpec([TensorSpec("fc1.weight", (32, 8)), TensorSpec("fc2.weight", (8, 32))])
            >>> PermutationSpec.from_axes(spec, {"fc1.weight": ("hidden", None), "fc2.weight": (None, "hidden")})
        """
        if missing := [name for name in spec.names if name not in axes]:
            raise SpecError(f"no axes for {listing(missing)}; give each axis a group or None")
        views = []
        for tensor in spec.tensors:
            named = tuple(axes[tensor.name])
            if len(named) != len(tensor.shape):
                raise SpecError(f"`{tensor.name}`: expected {len(tensor.shape)} axes {tensor.shape}, found {named}")
            views.append(View(tensor.name, tensor.name, tensor.shape, named))
        return cls(tuple(views), heads or {})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Group -> n, the length of its axes, in order of appearance."""
        out: dict[str, int] = {}
        for view in self.views:
            for axis, n in zip(view.axes, view.shape, strict=True):
                if axis is not None and out.setdefault(bare(axis), n) != n:
                    raise SpecError(
                        f"`{view.name}`: group {bare(axis)} has {out[bare(axis)]} members elsewhere, found {n}"
                    )
        return out

    @cached_property
    def parts(self) -> tuple[View, ...]:
        """The views, those with a group on two axes in parts."""
        return tuple(part for view in self.views for part in view.parts)

    @cached_property
    def types(self) -> tuple[InvariantType, ...]:
        """All types of irreducible parts, from the empty set of groups upwards."""
        order = list(self.sizes)
        found: dict[tuple[str, ...], list[View]] = {}
        for view in self.parts:
            for chosen in subsets(sorted(view.labels - view.always)):
                key = tuple(sorted((*view.always, *chosen), key=lambda label: order.index(bare(label))))
                found.setdefault(key, []).append(view)
        sizes = {axis: n for view in self.parts for axis, n in zip(view.axes, view.shape, strict=True)}
        keys = sorted(
            found, key=lambda key: (len(key), [order.index(bare(g)) for g in key], [pairs_of(g) or "" for g in key])
        )
        return tuple(InvariantType(key, tuple(sizes[g] for g in key), tuple(found[key])) for key in keys)

    def restrict(self, names: Iterable[str]) -> "PermutationSpec":
        """The specification of some of the tensors."""
        names = set(names)
        views = tuple(view for view in self.views if view.tensor in names)
        if not views:
            raise UsageError(f"none of the tensors {listing(names)} is in the permutation specification")
        return PermutationSpec(views, self.heads)

    def random(self, rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A uniformly random element: group -> (permutation (n,), signs (n,)); signs are 1 unless it is signed."""
        signed = {bare(label) for view in self.views for label in view.labels if is_signed(label)}
        order_of_heads: dict[str, np.ndarray] = {}
        out = {}
        for group, n in self.sizes.items():
            name, heads = self.heads.get(group, (group, 1))
            if name is not None and name not in order_of_heads:
                order_of_heads[name] = rng.permutation(heads)
            of_heads = np.arange(heads) if name is None else order_of_heads[name]
            width = n // heads
            within = np.stack([rng.permutation(width) for _ in range(heads)])  # (H, n / H)
            order = (of_heads[:, None] * width + within).reshape(-1)
            out[group] = order, rng.choice([-1.0, 1.0], n) if group in signed else np.ones(n)
        return out

    def apply(
        self, tensors: Mapping[str, np.ndarray], element: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Renumber tensors: entry i of a permuted axis becomes entry permutation_i, times sign_i where signs flip.

        Tensors without a view are returned as they are; `element` as from `random`.
        """
        out = {name: np.array(array) for name, array in tensors.items()}
        for view in self.views:
            part = view.of(np.asarray(tensors[view.tensor]))
            for i, axis in enumerate(view.axes):
                if axis is None:
                    continue
                order, signs = element[bare(axis)]
                part = np.take(part, order, axis=i)
                if is_signed(axis):
                    part = part * signs.astype(part.dtype).reshape([-1 if j == i else 1 for j in range(part.ndim)])
            view.write(out[view.tensor], part)
        return out


_PAIRS = ("^2+", "^2-")  # what labels of the pairs of units of a group end in, symmetric and antisymmetric


def bare(label: str) -> str:
    """The group of an axis: its label without the "~" and the sign of pairs."""
    return label.removeprefix("~").removesuffix(_PAIRS[0]).removesuffix(_PAIRS[1])


def is_signed(label: str) -> bool:
    """Whether the group also flips signs on an axis with this label."""
    return label.startswith("~")


def pairs_of(label: str) -> str | None:
    """The part of `conjugation` whose coordinates are along an axis with this label: those of pairs of units."""
    return {_PAIRS[0]: "symmetric", _PAIRS[1]: "antisymmetric"}.get(label[-3:])


def freedom(label: str, n: int) -> int:
    """The dimension of what varies along an axis of n: n where signs flip, n - 1, or less by the sums of pairs."""
    part = pairs_of(label)
    if part is None:
        return n - (not is_signed(label))
    return n - conjugation.units(n) + (part == "antisymmetric")


def repeated(axes: Sequence[str | None]) -> set[str]:
    """The groups that are on several axes in a way that statistics do not know: all but one, without signs, on two."""
    named = [bare(axis) for axis in axes if axis is not None]
    several = {group for group in named if named.count(group) > 1}
    known = len(several) < 2 and all(axes.count(group) == 2 == named.count(group) for group in several)
    return set() if known else several


def subsets(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets, from the empty one upwards."""
    return chain.from_iterable(combinations(labels, n) for n in range(len(labels) + 1))
