"""Axes as products of units that may be renumbered: what permutations of units do to the axes of tensors.

The rows of a linear layer are n units that may be renumbered. Reshaping them into heads makes them a product, slicing
makes them a concatenation, adding a residual makes two sets of units one, and meeting tokens or pixels makes them
fixed. `Axes` keeps this as terms and merges them by unification; `Unit.within` says on which other units a permutation
may depend, since the coordinates of each head may be renumbered by themselves.

Signs are linear equations over GF(2). Each axis of a parameter has an unknown bit: whether its entries change sign when
that of the unit does. An axis of an intermediate result has a sum of such bits, as the bit mask of an int; products
add, sums and contractions need equal ones, and an operation that is neither odd nor even needs zero.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import prod
from typing import TypeAlias


@dataclass(eq=False)
class Unit:
    """n units that are renumbered together, until they turn out to be the same as others, fixed or composed of some."""

    size: int
    same: "Unit | None" = None  # as which it was found to be
    fixed: bool = False
    parts: "Axis | None" = None  # what it is composed of
    within: "set[Unit]" = field(default_factory=set)  # permutations may differ between these
    inner: bool = False  # whether it is a factor of others
    cuts: set[int] = field(default_factory=set)  # where it was sliced, as an outer factor of others


@dataclass(frozen=True)
class Leaf:
    """Some units along an axis, and the mask of bits whose sum says whether entries change sign with them."""

    unit: Unit
    sign: int = 0

    @property
    def size(self) -> int:
        """How many."""
        return self.unit.size


@dataclass(frozen=True)
class Fixed:
    """n positions that keep their place: tokens, pixels, classes; `free` if entries do not differ between them."""

    size: int
    free: bool = False


@dataclass(frozen=True)
class Concatenation:
    """Axes one after another."""

    parts: "tuple[Axis, ...]"
    key: int | None = None  # of an axis whose parts have a `Choice` elsewhere in the tensor

    @property
    def size(self) -> int:
        """The sum of the parts'."""
        return sum(map(length, self.parts))


@dataclass(frozen=True)
class Choice:
    """An axis that differs between the parts of the `Concatenation` with this key: q, k and v in (3, n)."""

    key: int
    axes: "tuple[Axis, ...]"

    @property
    def size(self) -> int:
        """The same for all."""
        return length(self.axes[0])


Factor: TypeAlias = Leaf | Fixed | Concatenation | Choice
Axis: TypeAlias = tuple[Factor, ...]  # a product, outer factors first; () has length one


def length(axis: Axis) -> int:
    """The number of entries along an axis."""
    return prod(factor.size for factor in axis)


def fixed(n: int, free: bool = False) -> Axis:
    """An axis of n fixed positions."""
    return (Fixed(n, free),) if n != 1 else ()


def factors(axis: Axis) -> Iterator[Factor]:
    """All factors of an axis, those inside concatenations and choices as well."""
    for factor in axis:
        yield factor
        if isinstance(factor, Concatenation | Choice):
            for part in factor.parts if isinstance(factor, Concatenation) else factor.axes:
                yield from factors(part)


class _NoForm(Exception):
    """An axis has no form with these parts, so its units are fixed."""


class Axes:
    """The terms of one pass through a network's operations, and the equations of signs that they led to."""

    def __init__(self) -> None:
        self.equations: list[int] = []  # sums of bits that must be zero
        self._bits = 0
        self._keys = 0

    def bit(self) -> int:
        """A new unknown bit, as a mask."""
        self._bits += 1
        return 1 << (self._bits - 1)

    def new(self, n: int) -> Axis:
        """An axis of n new units."""
        return (Leaf(Unit(n), self.bit()),) if n != 1 else ()

    # -- resolving

    def root(self, unit: Unit) -> Unit:
        """The unit that stands for all that were found to be the same."""
        while unit.same is not None:
            unit = unit.same
        return unit

    def resolved(self, axis: Axis) -> Axis:
        """The axis with everything put in that is known of its units."""

        def known(leaf: Leaf) -> Axis:
            unit = self.root(leaf.unit)
            return (Leaf(unit, leaf.sign),) if unit.parts is None else self.resolved(_signed(unit.parts, leaf.sign))

        return _mapped(axis, known)

    def units(self, axis: Axis) -> list[Unit]:
        """The units on an axis, fixed ones as well."""
        return [factor.unit for factor in factors(self.resolved(axis)) if isinstance(factor, Leaf)]

    def within(self, unit: Unit) -> set[Unit]:
        """The units on which permutations of these may depend."""
        return {other for outer in self.root(unit).within for other in self.units((Leaf(outer),))}

    # -- facts

    def fix(self, *axes: Axis) -> None:
        """Hold all units of axes in their places."""
        for unit in chain.from_iterable(map(self.units, axes)):
            unit.fixed = True

    def unsigned(self, *axes: Axis) -> None:
        """Entries must not change sign with units of these axes."""
        for factor in chain.from_iterable(factors(self.resolved(axis)) for axis in axes):
            if isinstance(factor, Leaf):
                self._equal(factor.sign, 0)

    def even(self, axis: Axis) -> Axis:
        """The axis of a result that does not change sign, whatever its argument does."""
        return _signed(self.resolved(axis), 0)

    def _equal(self, a: int, b: int) -> None:
        if a != b:
            self.equations.append(a ^ b)

    def _same(self, a: Unit, b: Unit) -> None:
        if a is b:
            return
        a.within = self.within(a) & self.within(b)
        b.same = a
        a.fixed |= b.fixed
        a.cuts |= b.cuts
        a.inner |= b.inner

    def _compose(self, unit: Unit, parts: Axis) -> None:
        """Record that units are a product, whose inner factors may depend on the outer ones, or a concatenation."""
        unit.parts = parts
        before: set[Unit] = set(unit.within)
        for factor in parts:
            for inner in factors((factor,)):
                if isinstance(inner, Leaf):
                    inner.unit.within |= before
                    inner.unit.fixed |= unit.fixed
            if isinstance(factor, Leaf):
                factor.unit.inner = True
                before = before | {factor.unit}

    # -- merging

    def merge(self, a: Axis, b: Axis, *, product: bool = False) -> Axis:
        """The axis of entries a + b, or of a b: both are permuted alike.

        Signs must be equal in a sum, and add in a product.
        """
        a, b = self.resolved(a), self.resolved(b)
        if not a or not b:  # broadcast
            a, b = a or fixed(length(b), free=True), b or fixed(length(a), free=True)
        out: list[Factor] = []
        left, right = list(a), list(b)
        while left and right:
            x, y = left[0], right[0]
            smaller = min(x.size, y.size)
            try:
                if x.size == y.size:
                    out += self._merge(x, y, product)
                    del left[0], right[0]
                else:
                    left[:1], right[:1] = (self._divided(f, smaller) if f.size > smaller else (f,) for f in (x, y))
            except _NoForm:
                self.fix(tuple(left), tuple(right))
                out += fixed(prod(factor.size for factor in left))
                break
        return self.resolved(tuple(out))

    def _merge(self, x: Factor, y: Factor, product: bool) -> Axis:
        for one, other in ((x, y), (y, x)):
            if isinstance(one, Fixed):
                if not one.free:
                    self.fix((other,))
                elif not product:
                    self.unsigned((other,))
                return (one,) if isinstance(other, Fixed) and other.free else (other,)
        for one, other in ((x, y), (y, x)):
            if isinstance(one, Choice):
                return self.merge(self.collapsed((one,)), (other,), product=product)
        if isinstance(x, Leaf) and isinstance(y, Leaf):
            if not product:
                self._equal(x.sign, y.sign)
            self._same(x.unit, y.unit)
            return (Leaf(x.unit, x.sign ^ y.sign if product else x.sign),)
        if isinstance(x, Leaf) or isinstance(y, Leaf):
            leaf, cat = (x, y) if isinstance(x, Leaf) else (y, x)
            assert isinstance(leaf, Leaf)
            assert isinstance(cat, Concatenation)
            self._compose(leaf.unit, (Concatenation(tuple(self._shape_of(part) for part in cat.parts)),))
            return self.merge((leaf,), (cat,), product=product)
        assert isinstance(x, Concatenation)
        assert isinstance(y, Concatenation)
        ends = sorted({*_ends(x), *_ends(y)})
        parts = [(self._part(x, *span), self._part(y, *span)) for span in zip([0, *ends], ends, strict=False)]
        merged = tuple(self.merge(p, q, product=product) for p, q in parts)
        return (Concatenation(merged, x.key if x.key == y.key else None),)

    def _shape_of(self, axis: Axis) -> Axis:
        """New units in the same arrangement; what is not one factor is found when the two are merged."""
        factors = self.resolved(axis)
        return tuple(f if isinstance(f, Fixed) else Leaf(Unit(f.size), self.bit()) for f in factors)

    def collapsed(self, axis: Axis) -> Axis:
        """An axis without choices: where there are some, their axes are made one."""
        out: list[Factor] = []
        for factor in self.resolved(axis):
            if isinstance(factor, Choice):
                first = factor.axes[0]
                for other in factor.axes[1:]:
                    first = self.merge(first, other)
                out += first
            elif isinstance(factor, Concatenation) and factor.key is not None:
                out += self.resolved((Concatenation(factor.parts),))
            else:
                out.append(factor)
        return tuple(out)

    # -- reshaping

    def reshaped(self, axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
        """The axes of the same entries, in order, in another shape."""
        rest = [factor for axis in axes for factor in self.resolved(axis)]
        try:
            return [self.resolved(self._taken(rest, n)) for n in shape]
        except _NoForm:
            self.fix(*axes)
            return [fixed(n) for n in shape]

    def _taken(self, rest: list[Factor], n: int) -> Axis:
        """Remove the first factors, whose product is n, from `rest`."""
        out: list[Factor] = []
        while (missing := n // prod(f.size for f in out)) > 1:
            if rest[0].size > missing:
                rest[:1] = self._divided(rest[0], missing)
            out.append(rest.pop(0))
        if prod(f.size for f in out) != n:
            raise _NoForm
        return tuple(out)

    def _divided(self, factor: Factor, outer: int) -> Axis:
        """A factor as a product whose outer factor has this length."""
        inner, remainder = divmod(factor.size, outer)
        if remainder:
            raise _NoForm
        if isinstance(factor, Fixed):
            return (Fixed(outer, factor.free), Fixed(inner, factor.free))
        if isinstance(factor, Leaf):
            self._compose(factor.unit, (Leaf(Unit(outer)), Leaf(Unit(inner))))
            return self.resolved((factor,))
        halves = []
        for part in factor.axes if isinstance(factor, Choice) else factor.parts:
            size, remainder = (outer, 0) if isinstance(factor, Choice) else divmod(length(part), inner)
            if remainder:
                raise _NoForm
            rest = list(self.resolved(part))
            halves.append((self._taken(rest, size), tuple(rest)))
        first, second = zip(*halves, strict=True)
        if isinstance(factor, Choice):
            return (Choice(factor.key, first), Choice(factor.key, second))
        self._keys += 1
        return (Concatenation(first, self._keys), Choice(self._keys, second))

    # -- slicing

    def sliced(self, axes: Sequence[Axis], dim: int, start: int, stop: int) -> list[Axis]:
        """The axes of entries start to stop along one axis."""
        axes = [self.resolved(axis) for axis in axes]
        axis = axes[dim]
        if (start, stop) == (0, length(axis)):
            return list(axes)
        try:
            found = self._span(axis, start, stop)
        except _NoForm:
            self.fix(axis)
            found = fixed(stop - start)
        out = list(axes)
        out[dim] = found
        outer = axis[0] if axis else None
        if isinstance(outer, Concatenation) and outer.key is not None and len(axis) == 1:
            ends = _ends(outer)
            if (start, stop) not in zip([0, *ends], ends, strict=False):  # several parts, or not whole ones
                return [self.collapsed(a) for a in out]
            i = ends.index(stop)
            out[dim] = outer.parts[i]
            return [self.resolved(tuple(f for g in a for f in _chosen(g, outer.key, i))) for a in out]
        return out

    def _span(self, axis: Axis, start: int, stop: int) -> Axis:
        """Entries start to stop of an axis."""
        axis = self.resolved(axis)
        if (start, stop) == (0, length(axis)):
            return axis
        outer, inner = axis[0], axis[1:]
        width = length(inner)
        if start % width or stop % width or isinstance(outer, Choice):
            raise _NoForm
        first, last = start // width, stop // width
        if isinstance(outer, Fixed):
            return (*fixed(last - first, outer.free), *inner)
        if isinstance(outer, Leaf):
            unit = outer.unit
            if unit.inner:
                unit.cuts |= {first, last}
                unit.fixed = True
                return (*fixed(last - first), *inner)
            ends = sorted({first, last, unit.size} - {0})
            sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
            self._compose(unit, (Concatenation(tuple(self.new(n) for n in sizes)),))
            return self._span(axis, start, stop)
        return (*self._part(outer, first, last), *inner)

    def _part(self, cat: Concatenation, start: int, stop: int) -> Axis:
        """Entries start to stop of a concatenation."""
        out: list[Axis] = []
        position = 0
        for part in cat.parts:
            low, high = max(start - position, 0), min(stop - position, length(part))
            if low < high:
                out.append(self._span(part, low, high))
            position += length(part)
        return self.resolved((Concatenation(tuple(out), cat.key if len(out) > 1 else None),))


def concatenated(axes: Sequence[Axis]) -> Axis:
    """Axes one after another; those of concatenations without a key become parts of this one."""
    parts: list[Axis] = []
    for axis in axes:
        only = axis[0] if len(axis) == 1 else None
        parts += only.parts if isinstance(only, Concatenation) and only.key is None else (axis,)
    if all(isinstance(factor, Fixed) for part in parts for factor in part):
        return fixed(sum(map(length, parts)))
    return (Concatenation(tuple(parts)),)


def _signed(axis: Axis, sign: int) -> Axis:
    """The axis with this mask everywhere."""
    return _mapped(axis, lambda leaf: (Leaf(leaf.unit, sign),))


def _mapped(axis: Axis, change: Callable[[Leaf], Axis]) -> Axis:
    """The axis with all its leaves changed; concatenations of one part are that part, fixed neighbours are one."""
    out: list[Factor] = []
    for factor in axis:
        if isinstance(factor, Leaf):
            out += change(factor)
        elif isinstance(factor, Concatenation):
            parts = tuple(_mapped(part, change) for part in factor.parts)
            out += parts[0] if len(parts) == 1 else (Concatenation(parts, factor.key),)
        elif isinstance(factor, Choice):
            out.append(Choice(factor.key, tuple(_mapped(part, change) for part in factor.axes)))
        else:
            out.append(factor)
    joined: list[Factor] = []
    for factor in out:
        if joined and isinstance(factor, Fixed) and isinstance(last := joined[-1], Fixed) and last.free == factor.free:
            joined[-1] = Fixed(last.size * factor.size, last.free)
        else:
            joined.append(factor)
    return tuple(joined)


def _ends(cat: Concatenation) -> list[int]:
    return list(accumulate(map(length, cat.parts)))


def _chosen(factor: Factor, key: int, kept: int) -> Axis:
    """A factor of which only one part is left."""
    return factor.axes[kept] if isinstance(factor, Choice) and factor.key == key else (factor,)
