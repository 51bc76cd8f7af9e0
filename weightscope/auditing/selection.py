"""Expectations of weight selection: every tensor is a slice of the teacher's, at the same indices throughout."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.auditing.report import EXPECTATIONS, UNTOUCHED, Check
from weightscope.init.selection import ELEMENTS, Pair, Selection, matched

INCONSISTENT = "inconsistent indices"


@EXPECTATIONS.register("select_weights")
def select_weights_checks(source: NamedTensors, *, teacher: Any, elements: str, **options: Any) -> Iterator[Check]:
    """Checks that tensors are the teacher's at the selected indices, bit by bit.

    Where the rule is random, the teacher's index of each slice is that in which most of its values are found that the
    teacher's tensor has once, together with the other tensors of the same sizes for "random". Nothing is random in a
    right network, so no right one fails.
    """
    choice("elements", elements, ELEMENTS)
    student = source.module if isinstance(source, ModuleTensors) else source
    options.pop("strict", None)
    pairs = list(matched(student, teacher, **options))
    if not elements.startswith("random"):
        selection = Selection(elements, None)
        yield from (_check(pair.name, None, pair.value, selection.select(pair), {}) for pair in pairs)
        return
    parts = [part for pair in pairs for part in _blocks(pair)]
    votes, sums = [_votes(mine, theirs) for *_, mine, theirs in parts], dict[torch.Size, Tensor]()
    if elements == "random":
        for axis in itertools.chain.from_iterable(votes):
            sums[axis.shape] = sums.get(axis.shape, 0) + axis
    for (name, block, mine, theirs), own in zip(parts, votes, strict=True):
        sets = math.prod(math.comb(large, small) for small, large in (axis.shape for axis in own))
        expected = _slices(mine, theirs, [sums.get(axis.shape, axis) for axis in own])
        yield _check(name, block, mine, expected, {INCONSISTENT: 1 - 1 / sets} if sums else {})


def _check(name: str, block: int | None, mine: Tensor, expected: Tensor, power: dict[str, float]) -> Check:
    """The share of entries that are the expected ones, rounded as the student's."""
    # Untouched tensors are drawn from a density, so that they differ from the teacher's unless these are constant.
    equal, decided = expected.to(mine) == mine, bool(expected.numel() and expected.min() < expected.max())
    powers = {UNTOUCHED: 1.0, **power} if decided else {}
    share = float(equal.double().mean())
    return Check("select_weights", "weights", None, block, name, "entries", share, 1.0, 1.0, powers)


def _blocks(pair: Pair) -> list[tuple[str, int | None, Tensor, Tensor]]:
    """Name, number, the student's and the teacher's, rounded alike, of each of the matrices that a pair packs."""
    mine = pair.value.detach().cpu()
    theirs = pair.teacher.to(mine)
    if pair.blocks == 1:
        return [(pair.name, None, mine, theirs)]
    both = zip(*(tensor.chunk(pair.blocks, dim=pair.packed) for tensor in (mine, theirs)), strict=True)
    return [(pair.name, i, *tensors) for i, tensors in enumerate(both)]


def _votes(mine: Tensor, theirs: Tensor) -> list[Tensor]:
    """For each axis (s, t), how many values that the teacher has once are in slice i here and in slice j there."""
    values, inverse, counts = theirs.flatten().unique(return_inverse=True, return_counts=True)
    places = torch.zeros(len(values), dtype=torch.long)
    places[inverse] = torch.arange(theirs.numel())
    flat = mine.flatten().contiguous()
    at = torch.searchsorted(values, flat).clamp(max=len(values) - 1)
    once = (values[at] == flat) & (counts[at] == 1)
    here, there = (
        torch.unravel_index(found, tensor.shape)
        for found, tensor in ((once.nonzero()[:, 0], mine), (places[at][once], theirs))
    )
    votes = []
    for small, large, pair in zip(mine.shape, theirs.shape, zip(here, there, strict=True), strict=True):
        counted = torch.zeros(small, large).index_put_(pair, torch.ones(()), accumulate=True)
        votes.append(torch.eye(large) if small == large else counted)
    return votes


def _slices(mine: Tensor, theirs: Tensor, votes: list[Tensor]) -> Tensor:
    """The teacher's slices with the most votes; where none has any, the first that equals the student's."""
    picks = [axis.argmax(1) for axis in votes]
    for axis, counted in enumerate(votes):
        unknown = counted.sum(1) == 0
        if unknown.any():
            value = theirs
            for other, pick in enumerate(picks):
                value = value if other == axis else value.index_select(other, pick)
            rows, candidates = (x.movedim(axis, 0).reshape(x.shape[axis], -1) for x in (mine, value))
            equal = torch.stack([(row == candidates).all(1) for row in rows]).int().argmax(1)
            picks[axis] = torch.where(unknown, equal, picks[axis])
    for axis, pick in enumerate(picks):
        theirs = theirs.index_select(axis, pick)
    return theirs
