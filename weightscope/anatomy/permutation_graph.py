"""Permutations that keep the function of any network, derived from the operations of its forward pass.

The forward pass is run once on example inputs and its operations are recorded (`operations`). Then the axes of all
parameters are propagated through them symbolically (`symbolic_axes`). Passes are repeated until reshapes and slices
have shown what each axis is composed of.
"""

from collections.abc import Mapping, Sequence
from itertools import product as combinations
from math import prod
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.utils._pytree import tree_leaves

from weightscope._util.names import listing
from weightscope.anatomy.operations import Propagation, Recorder, Ref, Value, call, runs, tensors_in
from weightscope.anatomy.symbolic_axes import Axes, Axis, Concatenation, Leaf, Unit, length
from weightscope.anatomy.tracing import single_operations
from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec, View

_PASSES = 20  # each one finds what the axes of the one before are composed of; three are common
Skeleton: TypeAlias = tuple[Any, ...]  # an axis's factors: lengths, and lists of skeletons one after another


def _skeleton(units: Axes, axis: Axis) -> Skeleton:
    """What an axis turned out to be composed of; cuts of an outer factor become parts that hold the inner ones, too."""
    known = units.resolved(axis)
    out = tuple(
        [_skeleton(units, part) for part in factor.parts] if isinstance(factor, Concatenation) else factor.size
        for factor in known
    )
    for i, factor in enumerate(known):
        if isinstance(factor, Leaf) and factor.unit.cuts:
            ends, inner = sorted({*factor.unit.cuts, factor.size} - {0}), out[i + 1 :]
            return (*out[:i], [(b - a, *inner) if b - a > 1 else inner for a, b in zip([0, *ends], ends, strict=False)])
    return out


def _instance(units: Axes, skeleton: Skeleton, outer: tuple[Unit, ...] = ()) -> Axis:
    """An axis of new units in this arrangement."""
    out: list[Any] = []
    for factor in skeleton:
        if isinstance(factor, list):
            out.append(Concatenation(tuple(_instance(units, part, outer) for part in factor)))
        else:
            unit = Unit(factor, within=set(outer))
            out.append(Leaf(unit, units.bit()))
            outer = (*outer, unit)
    return tuple(out)


class _Segment(NamedTuple):
    """A part of a tensor's axis: where it begins, and its factors, each with its length and stride."""

    offset: int
    factors: list[tuple[Unit, int, int, int]]  # unit, sign, length, stride


def _segments(units: Axes, axis: Axis) -> list[_Segment]:
    """The parts of a parameter's axis between concatenations."""
    out, width = [_Segment(0, [])], 1
    for factor in reversed(axis):
        if isinstance(factor, Leaf):
            out = [_Segment(i, [(units.root(factor.unit), factor.sign, factor.size, width), *row]) for i, row in out]
        elif isinstance(factor, Concatenation):
            inner, start = list[_Segment](), 0
            for part in factor.parts:
                for offset, row in _segments(units, part):
                    scaled = [(unit, sign, n, stride * width) for unit, sign, n, stride in row]
                    inner.append(_Segment((start + offset) * width, scaled))
                start += length(part)
            out = [_Segment(i + offset, [*row, *rest]) for i, row in inner for offset, rest in out]
        width *= factor.size
    if all(unit.fixed for segment in out for unit, *_ in segment.factors):
        n = length(axis)
        return [_Segment(0, [(Unit(n, fixed=True), 0, n, 1)] if n > 1 else [])]
    return out


def _flipped(equations: Sequence[int], masks: Mapping[Unit, int]) -> dict[Unit, int]:
    """Unit -> of the bits of its axes, the solution of the equations with the most of them, if there is one but 0."""
    out = {}
    for unit, mask in masks.items():
        basis = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]  # of solutions so far
        for equation in sorted({e & mask for e in equations} - {0}):
            odd = [v for v in basis if (v & equation).bit_count() % 2]
            basis = [v for v in basis if v not in odd] + [v ^ odd[0] for v in odd[1:]]
        if basis:
            out[unit] = max(basis, key=int.bit_count)
    return out


def derive_permutations(module: nn.Module, inputs: Any) -> PermutationSpec:
    """The permutations of a module's units that its forward pass on these inputs shows, not yet checked by function.

    `notes` of the result say which operations are not known, which tensors were not used, and what cannot be described.
    """
    spec = WeightSpec.of(module)
    recorder = Recorder()
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    named = {name: recorder.ref(state[name]).number for name in spec.names}
    training = [m for m in module.modules() if m.training]
    try:
        with single_operations(), recorder:
            outputs = [recorder.ref(tensor) for tensor in tensors_in(call(module.eval(), inputs))]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"example inputs: {type(module).__name__} cannot be run on them: {error}; give a tensor, a tuple "
            "of arguments or a mapping of keyword arguments"
        ) from error
    finally:
        for m in training:
            m.training = True
    numbers = sorted(set(named.values()))
    skeletons: dict[int, list[Skeleton]] = {
        n: [(size,) if size > 1 else () for size in recorder.shapes[n]] for n in numbers
    }
    for _ in range(_PASSES):
        units = Axes()
        values = {n: [_instance(units, skeleton) for skeleton in skeletons[n]] for n in numbers}
        current = Propagation(recorder, units, values)
        current.run(recorder.steps, outputs)
        found = {n: [_skeleton(units, axis) for axis in values[n]] for n in numbers}
        if found == skeletons:
            break
        skeletons = found
    read = {ref.number for step in recorder.steps for ref in tree_leaves(step.arguments) if isinstance(ref, Ref)}
    notes = [
        f"{name}: no rule for this operation, so the axes that it meets are fixed" for name in sorted(current.unknown)
    ]
    if unused := [name for name in spec.names if named[name] not in read]:
        notes.append(f"not used in the forward pass: {listing(unused)}")
    for name in unused:
        units.fix(*values[named[name]])
    return _specification(spec, units, {name: values[number] for name, number in named.items()}, notes)


def _specification(spec: WeightSpec, units: Axes, values: Mapping[str, Value], notes: Sequence[str]) -> PermutationSpec:
    segments = {name: [_segments(units, axis) for axis in value] for name, value in values.items()}
    twice, beyond = _on_several_axes(segments)
    for unit in beyond:
        unit.fixed = True
    if beyond:
        tensors = dict.fromkeys(name for names in beyond.values() for name in names)
        notes = [*notes, f"units on three axes, or two sets of units each on two, so fixed: {listing(tensors)}"]
        segments = {name: [_segments(units, axis) for axis in value] for name, value in values.items()}
    everything = [s.factors for axes in segments.values() for axis in axes for s in axis]
    masks: dict[Unit, int] = {}
    for row in everything:
        for unit, sign, *_ in row:
            if not unit.fixed:
                masks[unit] = masks.get(unit, 0) | sign
    flipped = _flipped(units.equations, masks)
    if signed := [name for unit, names in twice.items() if flipped.pop(unit, 0) for name in names]:
        notes = [*notes, f"units on two axes, whose signs are left as they are: {listing(dict.fromkeys(signed))}"]
    outer = _heads(units, everything)
    for head in outer.values():  # signs of whole heads are among those of their units
        flipped.pop(head, None)
    names = _names(segments, outer)
    views = []
    for name, axes in segments.items():
        for chosen in combinations(*axes):
            label = _label(name, axes, chosen)
            layout = [row for i, s in enumerate(chosen) for row in _view_axes(i, s, names, flipped, outer)]
            lengths, labels = tuple(prod(n for n, _ in pairs) for _, pairs, _ in layout), tuple(g for *_, g in layout)
            joined = [(axis, runs(*zip(*pairs, strict=True))) for axis, pairs, _ in layout]
            rows = joined == [(i, runs([n], [1])) for i, n in enumerate(lengths)]  # of the tensor, or all of it
            strides = () if rows else tuple((axis, pairs) for axis, pairs, _ in layout)
            offset = tuple(segment.offset for segment in chosen)
            views.append(View(label, name, lengths, labels, offset if any(offset) or strides else (), strides))
    groups = {names[unit]: (None if head.fixed else names[head], head.size) for unit, head in outer.items()}
    groups |= {names[head]: (names[head], head.size) for head in outer.values() if not head.fixed}
    used = {axis.removeprefix("~") for view in views for axis in view.axes if axis is not None}
    heads = {group: value for group, value in groups.items() if group in used}
    return PermutationSpec(tuple(views), heads, tuple(notes))


def _on_several_axes(
    segments: Mapping[str, Sequence[Sequence[_Segment]]],
) -> tuple[dict[Unit, list[str]], dict[Unit, list[str]]]:
    """Unit -> tensors of which it is alone on two axes; and those on more, or beside other such units."""
    twice, beyond = dict[Unit, list[str]](), dict[Unit, list[str]]()
    for name, axes in segments.items():
        for chosen in combinations(*axes):
            there = [unit for segment in chosen for unit, *_ in segment.factors if not unit.fixed]
            several = {unit: there.count(unit) for unit in there if there.count(unit) > 1}
            for unit in several:
                (twice if [*several.values()] == [2] else beyond).setdefault(unit, []).append(name)
    return {unit: names for unit, names in twice.items() if unit not in beyond}, beyond


def _heads(units: Axes, rows: Sequence[Sequence[tuple[Unit, int, int, int]]]) -> dict[Unit, Unit]:
    """Unit -> the one that it may be permuted within, as coordinates within heads: always next to it."""
    found: dict[Unit, Unit | None] = {}
    for row in rows:
        for i, (unit, *_) in enumerate(row):
            before = row[i - 1][0] if i else None
            possible = before if before is not None and before in units.within(unit) else None
            if unit.fixed or (unit in found and found[unit] is not possible):
                possible = None
            found[unit] = possible
    return {unit: head for unit, head in found.items() if head is not None and found.get(head) is None}


def _names(segments: Mapping[str, Sequence[Sequence[_Segment]]], outer: Mapping[Unit, Unit]) -> dict[Unit, str]:
    """Groups are named after the first tensor that has them on its first axis, else on another."""
    found: dict[Unit, str] = {}
    heads = set(outer.values())
    for first in (True, False):
        for name, axes in segments.items():
            for i, axis in enumerate(axes):
                if (i == 0) != first:
                    continue
                for j, segment in enumerate(axis):
                    module = name.rpartition(".")[0] or name
                    for unit, *_ in segment.factors:
                        if unit.fixed or unit in found:
                            continue
                        label = f"{module}[{j}]" if len(axis) > 1 else module
                        label = f"head of {label}" if unit in heads else label
                        taken = set(found.values())
                        found[unit] = next(c for k in range(999) if (c := label + "'" * k) not in taken)
    return found


def _label(name: str, axes: Sequence[Sequence[_Segment]], chosen: Sequence[_Segment]) -> str:
    """The tensor's name, with the numbers of its parts in brackets where it has several."""
    places = [str(axis.index(segment)) for axis, segment in zip(axes, chosen, strict=True) if len(axis) > 1]
    return f"{name}[{', '.join(places)}]" if places else name


def _view_axes(
    axis: int, segment: _Segment, names: Mapping[Unit, str], flipped: Mapping[Unit, int], outer: Mapping[Unit, Unit]
) -> list[tuple[int, tuple[tuple[int, int], ...], str | None]]:
    """(axis of the tensor, lengths and strides, label) of each axis of a view."""
    out: list[tuple[int, tuple[tuple[int, int], ...], str | None]] = []
    row = list(segment.factors)
    while row:
        unit, sign, n, stride = row.pop(0)
        pairs = [(n, stride)]
        if row and outer.get(row[0][0]) is unit:
            unit, sign, n, stride = row.pop(0)
            pairs.append((n, stride))
        label = None if unit.fixed else "~" * bool(flipped.get(unit, 0) & sign) + names[unit]
        if label is None and out and out[-1][2] is None and out[-1][1][-1][1] == n * stride:
            pairs = [(out.pop()[1][-1][0] * n, stride)]
        out.append((axis, tuple(pairs), label))
    return out or [(axis, ((1, 1),), None)]
