"""Expectations of weight selection: every tensor is a slice of the teacher's, at the same indices throughout."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.auditing.intervals import UNTOUCHED, Row
from weightscope.auditing.report import EXPECTATIONS, Check, checks_of
from weightscope.init._trained import end_to_end, spaced
from weightscope.init.selection import Pair, matched

INCONSISTENT = "inconsistent indices"
_FREE = ("l1", "random-inconsistent", "magnitude")  # rules whose indices differ between tensors
_RULES = {"linspace": end_to_end, "consecutive": lambda large, small: torch.arange(small)}  # others: `spaced`
_ALL = (1.0, 1.0)


@EXPECTATIONS.register("select_weights")
def select_weights_checks(
    source: NamedTensors,
    *,
    teacher: Any,
    layers: str,
    elements: str,
    components: str | Sequence[str],
    exclude: str | None,
    positions: str,
) -> list[Check]:
    """Checks that tensors are slices of the teacher's, bit by bit, and that their indices agree.

    Along each axis (t -> s) the teacher's index of every slice is recovered from values that the teacher's tensor has
    once; "entries" is the share of entries that equal the teacher's at these indices, and "indices" the share of
    indices that are those of the rule ("uniform", "linspace", "consecutive"), or those that most tensors with the same
    t and s have ("random"). Nothing is random in a right network, so no right one fails.
    """
    student = source.module if isinstance(source, ModuleTensors) else source
    options: dict[str, Any] = {"layers": layers, "components": components, "exclude": exclude, "positions": positions}
    pairs = list(matched(student, teacher, **options))
    if elements == "magnitude":
        parts = [_Part(pair, None, pair.value, pair.teacher) for pair in pairs]
        return [check for part in parts for check in part.checks([("entries", part.largest(), _ALL, part.power())])]
    parts = [part for pair in pairs for part in _blocks(pair)]
    found = [part.indices() for part in parts]
    agreed = _agreed(parts, found, elements)
    checks = []
    for part, axes in zip(parts, found, strict=True):
        wanted = [agreed.get(sizes) for sizes in part.sizes]
        rows: list[Row] = [("entries", part.equal(axes, wanted), _ALL, part.power())]
        both = zip(axes, wanted, strict=True)
        known = [(mine, right) for mine, right in both if right is not None and (mine >= 0).any()]
        if known and elements not in _FREE:
            rows.append(("indices", _share(known), _ALL, {INCONSISTENT: part.inconsistent()}))
        checks += part.checks(rows)
    return checks


class _Part:
    """A tensor of the student, or one of the matrices that it packs, and the teacher's."""

    def __init__(self, pair: Pair, block: int | None, mine: Tensor, theirs: Tensor) -> None:
        self.name, self.block = pair.name, block
        self.mine = mine.detach().cpu().double()
        self.exact, self.theirs = theirs, theirs.to(mine.dtype).double()  # rounded as the student's
        self.sizes = list(zip(self.theirs.shape, self.mine.shape, strict=True))

    def checks(self, rows: list[Row]) -> list[Check]:
        return checks_of("select_weights", "weights", None, self.block, self.name, rows)

    def indices(self) -> list[Tensor]:
        """For each axis the teacher's index of each slice, -1 where no value tells it."""
        values, inverse, counts = self.theirs.flatten().unique(return_inverse=True, return_counts=True)
        places = torch.zeros(len(values), dtype=torch.long)
        places[inverse] = torch.arange(self.theirs.numel())
        at = torch.searchsorted(values, self.mine.flatten().contiguous()).clamp(max=len(values) - 1)
        unique = (values[at] == self.mine.flatten()) & (counts[at] == 1)
        there = torch.stack(torch.unravel_index(places[at][unique], self.theirs.shape))
        here = torch.stack(torch.unravel_index(unique.nonzero()[:, 0], self.mine.shape))
        out = []
        for axis, (large, small) in enumerate(self.sizes):
            votes = torch.zeros(small, large).index_put_((here[axis], there[axis]), torch.ones(()), accumulate=True)
            indices = torch.where(votes.sum(1) > 0, votes.argmax(1), -1)
            out.append(torch.where(indices < 0, torch.arange(small), indices) if large == small else indices)
        unknown = [axis for axis, indices in enumerate(out) if bool((indices < 0).any())]
        if len(unknown) == 1:
            same = self._matching(unknown[0], out)
            out[unknown[0]] = torch.where(same.sum(1) == 1, same.int().argmax(1), out[unknown[0]])
        return out

    def _matching(self, axis: int, known: list[Tensor]) -> Tensor:
        """(s, t), which slices along an axis equal the teacher's, the indices of the other axes being known."""
        value = self.theirs
        for other, indices in enumerate(known):
            value = value if other == axis else value.index_select(other, indices)
        mine, theirs = (tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1) for tensor in (self.mine, value))
        return torch.stack([(row == theirs).all(1) for row in mine])

    def equal(self, axes: list[Tensor], wanted: list[Tensor | None]) -> float:
        """The share of entries that equal the teacher's at the indices, those agreed on where none is recovered."""
        value = self.theirs
        for axis, (mine, right) in enumerate(zip(axes, wanted, strict=True)):
            other = torch.arange(len(mine)) if right is None else right
            if right is None and not any((rest < 0).any() for i, rest in enumerate(axes) if i != axis):
                other = self._matching(axis, axes).int().argmax(1)  # slices that the teacher has twice
            value = value.index_select(axis, torch.where(mine >= 0, mine, other))
        return float((value == self.mine).double().mean())

    def largest(self) -> float:
        """The share of entries, in the order of size, that are the teacher's of largest magnitude."""
        kept = self.exact.flatten().abs().topk(self.mine.numel()).indices
        wanted = self.theirs.flatten()[kept].sort().values
        return float((self.mine.flatten().sort().values == wanted).double().mean())

    def power(self) -> dict[str, float]:
        """An untouched tensor is drawn from a density, so it differs from the teacher's unless both are constant."""
        return {UNTOUCHED: 1.0} if self.theirs.min() < self.theirs.max() else {}

    def inconsistent(self) -> float:
        """The probability that random indices, drawn for this tensor alone, differ from the right ones."""
        return 1 - math.prod(1 / math.comb(large, small) for large, small in self.sizes)


def _blocks(pair: Pair) -> list[_Part]:
    if pair.blocks == 1:
        return [_Part(pair, None, pair.value, pair.teacher)]
    mine, theirs = (tensor.chunk(pair.blocks, dim=pair.packed) for tensor in (pair.value, pair.teacher))
    return [_Part(pair, i, *tensors) for i, tensors in enumerate(zip(mine, theirs, strict=True))]


def _agreed(parts: list[_Part], found: list[list[Tensor]], rule: str) -> dict[tuple[int, int], Tensor]:
    """(t, s) -> the indices of the rule, or for "random" those that most tensors have."""
    votes: dict[tuple[int, int], Tensor] = {}
    pairs = (zip(part.sizes, axes, strict=True) for part, axes in zip(parts, found, strict=True))
    for sizes, indices in chain.from_iterable(pairs):
        large, small = sizes
        there = votes.setdefault(sizes, torch.zeros(small, large))
        known = indices >= 0
        there[torch.arange(small)[known], indices[known]] += 1
    out = {}
    for (large, small), there in votes.items():
        if rule == "random" and large != small:
            out[large, small] = there.argmax(1)
        elif rule not in _FREE or large == small:
            out[large, small] = _RULES.get(rule, spaced)(large, small)
    return out


def _share(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The share of recovered indices that are right."""
    right = torch.cat([(mine == wanted)[mine >= 0] for mine, wanted in pairs])
    return float(right.double().mean())
