"""Which axes of which tensors may be renumbered together without changing the network's function."""

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


@dataclass(frozen=True)
class InvariantType:
    """One type S of irreducible part: a set of groups, and the views that contain it."""

    # S, in the specification's order, with "~" where signs flip; empty for the means of everything
    groups: tuple[str, ...]
    sizes: tuple[int, ...]  # n of each group of S: the shape of a part before the dependent entries are left out
    views: tuple[View, ...]  # those that contain the type, each with its multiplicity

    @property
    def dimension(self) -> int:
        """Of the irreducible representation: the product over S of n - 1, or n where signs flip."""
        return prod(n - (not is_signed(label)) for label, n in zip(self.groups, self.sizes, strict=True))

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
        SpecError: if axes of one group differ in length, or one group acts on two axes of a tensor (a recurrent
            matrix, whose invariant covariances have further parts).
    """

    views: tuple[View, ...]
    heads: Mapping[str, tuple[str | None, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        self.sizes  # noqa: B018 - checks the lengths
        for view in self.views:
            named = [bare(axis) for axis in view.axes if axis is not None]
            if len(set(named)) < len(named):
                raise SpecError(
                    f"`{view.name}`: one group on two axes, found {view.axes}; an invariant covariance has further "
                    "parts there, which are not supported"
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
    def types(self) -> tuple[InvariantType, ...]:
        """All types of irreducible parts, from the empty set of groups upwards."""
        order = list(self.sizes)
        found: dict[tuple[str, ...], list[View]] = {}
        for view in self.views:
            signed = {label for label in view.labels if is_signed(label)}
            for chosen in subsets(sorted(view.labels - signed)):
                key = tuple(sorted((*signed, *chosen), key=lambda label: order.index(bare(label))))
                found.setdefault(key, []).append(view)
        keys = sorted(found, key=lambda key: (len(key), [order.index(bare(label)) for label in key]))
        return tuple(InvariantType(key, tuple(self.sizes[bare(g)] for g in key), tuple(found[key])) for key in keys)

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


def bare(label: str) -> str:
    """The group of an axis: its label without the "~"."""
    return label.removeprefix("~")


def is_signed(label: str) -> bool:
    """Whether the group also flips signs on an axis with this label."""
    return label.startswith("~")


def subsets(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets, from the empty one upwards."""
    return chain.from_iterable(combinations(labels, n) for n in range(len(labels) + 1))
