"""What the operations of a forward pass do to the axes of tensors: recorded once, then propagated symbolically.

What is added is permuted alike, what is contracted cancels, and what meets tokens, pixels or an operation without a
rule stays in its place.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from weightscope.anatomy.symbolic_axes import Axes, Axis, Fixed, concatenated, factors, fixed, length
from weightscope.anatomy.tracing import Dispatch, words

Value: TypeAlias = list[Axis]  # the axes of a tensor


@dataclass(frozen=True)
class Ref:
    """A tensor of the recorded forward pass, by number."""

    number: int


@dataclass
class Step:
    """One operation: its name and overload, arguments by name, and the tensors that it returned."""

    name: str
    overload: str
    pointwise: bool
    arguments: dict[str, Any]
    written: str | None  # the argument that it changes in place
    strides: tuple[int, ...]  # of its first tensor, before
    out: list[Ref]


_COMPOSED = (  # of other operations, as those that torch decomposes by itself
    "native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_fused_rms_norm", "_weight_norm_interface", "_softmax", "_log_softmax",
    "_safe_softmax", "embedding", "logsumexp", "unbind", "stack", "t", "transpose", "addcmul", "addcdiv",
    "std", "_prelu_kernel", "glu",
)  # fmt: skip
_DECOMPOSITIONS = get_decompositions([getattr(torch.ops.aten, name) for name in _COMPOSED])


class Recorder(Dispatch):
    """Records the operations that are run, with tensors replaced by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.shapes: list[tuple[int, ...]] = []
        self.storages: list[int] = []
        self.dtypes: set[torch.dtype] = set()  # of floating-point numbers that were computed
        self.written: set[int] = set()  # tensors of which a view was changed in place
        self._numbers = WeakTensorKeyDictionary()
        self._bases: dict[int, int] = {}

    def ref(self, tensor: Tensor) -> Ref:
        """The number of a tensor, a new one if it has not been seen."""
        if tensor not in self._numbers:
            self._numbers[tensor] = len(self.shapes)
            self.shapes.append(tuple(tensor.shape))
            self.storages.append(tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0)
        return Ref(self._numbers[tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            if (out := _DECOMPOSITIONS.get(func, func.decompose)(*args, **(kwargs or {}))) is not NotImplemented:
                return out
        schema = func._schema
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        first = next((x for x in args if isinstance(x, Tensor)), None)
        strides = tuple(first.stride()) if first is not None and first.layout == torch.strided else ()
        arguments = tree_map(lambda x: self.ref(x) if isinstance(x, Tensor) else x, arguments)
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.dtypes |= {x.dtype for x in tensors if x.is_floating_point()}
        returned = [self.ref(x) for x in tensors]
        aliases = [a for a in schema.arguments if a.alias_info is not None]
        written = next((a.name for a in aliases if a.alias_info.is_write), None)
        if aliases and isinstance(base := arguments.get(aliases[0].name), Ref):
            root = self._bases.get(base.number, base.number)
            self._bases |= {ref.number: root for ref in returned}
            if written:
                self.written.add(root)
        name = schema.name.partition("::")[2]
        pointwise = torch.Tag.pointwise in func.tags
        self.steps.append(Step(name, func._overloadname, pointwise, arguments, written, strides, returned))
        return out


def call(module: nn.Module, inputs: Any) -> Any:
    """What a module returns for one tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def tensors_in(value: Any) -> list[Tensor]:
    """All floating-point tensors in what a module returns; the outputs of transformers are mappings."""
    leaves = tree_leaves(dict(value) if isinstance(value, Mapping) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# -- what each operation does to axes

Rule: TypeAlias = Callable[["Propagation", dict[str, Any], Step], list[Value]]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


_ODD = words("neg sign sgn tanh sin sinh asin asinh atan atanh erf erfinv reciprocal trunc round")
_EVEN = {"abs", "cos", "cosh", "square"}
_SUMS = {"add", "sub", "rsub"}
_PRODUCTS = {"mul", "div"}
_MOVED = {"alias", "detach", "lift_fresh", "clone", "_to_copy"}
_FILLED = words(
    "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
    "scalar_tensor"
)
_POOLED = re.compile(r"_?(adaptive_)?(avg_pool|max_pool|upsample_\w+|reflection_pad|replication_pad)(?P<axes>[123])d.*")


class Propagation:
    """One walk through the recorded operations, from the parameters' axes to the outputs'."""

    def __init__(self, recorder: Recorder, axes: Axes, parameters: Mapping[int, Value]) -> None:
        self.axes = axes
        self.shapes = recorder.shapes
        self.values: dict[int, Value] = dict(parameters)
        self.plain = set(parameters)  # parameters, moved at most
        self.unknown: set[str] = set()
        self.written = recorder.written
        storages = {recorder.storages[n]: value for n, value in parameters.items() if recorder.storages[n]}
        self._aliased = {
            n: storages[s] for n, s in enumerate(recorder.storages) if s in storages and n not in parameters
        }

    def run(self, steps: Sequence[Step], outputs: Sequence[Ref]) -> None:
        """Propagate; the axes of the outputs are fixed."""
        for step in steps:
            self._step(step)
        for ref in outputs:
            self.axes.fix(*self.value(ref))

    def value(self, ref: Ref) -> Value:
        """The axes of a tensor; one that no operation returned is constant, and fixes what it shares memory with."""
        if ref.number not in self.values:
            if ref.number in self._aliased:
                self.axes.fix(*self._aliased[ref.number])
            self.values[ref.number] = [fixed(n) for n in self.shapes[ref.number]]
        return self.values[ref.number]

    def _step(self, step: Step) -> None:
        refs = [x for x in tree_leaves(step.arguments) if isinstance(x, Ref)]
        inputs = [self.value(ref) for ref in refs]
        base = step.name.removesuffix("_") if step.written else step.name
        moving = base in _MOVEMENTS
        for ref in () if moving else refs:
            self.values[ref.number] = [self.axes.collapsed(axis) for axis in self.value(ref)]
        for ref in refs:
            self._restrict(self.value(ref))
        arguments = tree_map(lambda x: self.value(x) if isinstance(x, Ref) else x, step.arguments)
        if not refs and base not in _FILLED:
            found = [[fixed(n) for n in self.shapes[ref.number]] for ref in step.out]
        elif base in RULES:
            found = RULES[base](self, arguments, step)
        elif step.pointwise or base == "hardswish":  # which torch does not tag
            found = [self.pointwise(base, arguments, step)]
        elif pooled := _POOLED.fullmatch(base):
            found = _pooled(self, arguments, step, int(pooled["axes"]))
        else:
            found = self.without_rule(step, inputs)
        if step.written and found:
            found = self._in_place(self.value(step.arguments[step.written]), found)
        for ref, value in zip(step.out, found, strict=False):
            value = [self.axes.resolved(axis) for axis in value]
            if tuple(map(length, value)) != self.shapes[ref.number]:
                self.without_rule(step, inputs)
                value = [fixed(n) for n in self.shapes[ref.number]]
            self.values[ref.number] = value
            self._restrict(value)
            if moving and refs and refs[0].number in self.plain:
                self.plain.add(ref.number)

    def without_rule(self, step: Step, inputs: Sequence[Value]) -> list[Value]:
        """Fix everything that meets an operation without a rule."""
        if any(not unit.fixed for value in inputs for axis in value for unit in self.axes.units(axis)):
            self.unknown.add(step.name)
        self.axes.fix(*(axis for value in inputs for axis in value))
        return [[fixed(n) for n in self.shapes[ref.number]] for ref in step.out]

    def _in_place(self, target: Value, found: list[Value]) -> list[Value]:
        """Views of a tensor that is written to share its axes, so these must not change."""
        for axis, new in zip(target, found[0], strict=True):
            if any(isinstance(factor, Fixed) for factor in factors(axis)):
                self.axes.fix(new)
        return [[self.axes.merge(a, b) for a, b in zip(target, found[0], strict=True)]]

    def _restrict(self, value: Value) -> None:
        """Permutations can differ only between units that are on another axis, or factor, of the same tensor once."""
        units = [unit for axis in value for unit in self.axes.units(axis)]
        once = {unit for unit in units if units.count(unit) == 1} if len(units) > len(set(units)) else set(units)
        for unit in units:
            if unit.within:
                unit.within = self.axes.within(unit) & once

    # -- families of operations

    def broadcast(self, values: Sequence[Value], *, product: bool = False) -> Value:
        """The axes of a sum or product of tensors."""
        out = list(values[0])
        for value in values[1:]:
            value = [fixed(1)] * (len(out) - len(value)) + value
            out = [fixed(1)] * (len(value) - len(out)) + out
            out = [self._broadcast(a, b, product) for a, b in zip(out, value, strict=True)]
        return out

    def _broadcast(self, a: Axis, b: Axis, product: bool) -> Axis:
        if not a or not b:
            if not product:
                self.axes.unsigned(a or b)
            return self.axes.resolved(a or b)
        return self.axes.merge(a, b, product=product)

    def pointwise(self, name: str, a: dict[str, Any], step: Step) -> Value:
        """Entry by entry."""
        refs = {key: ref for key, ref in step.arguments.items() if isinstance(ref, Ref)}
        values = [a[key] for key in refs]
        power = a.get("exponent")
        parity = power % 2 if name == "pow" and isinstance(power, int | float) else None
        if name in _ODD or parity == 1:
            return values[0]
        if name in _EVEN or parity == 0:
            return [self.axes.even(axis) for axis in values[0]]
        if name in _SUMS:
            out = self.broadcast(values)
            if any(isinstance(a.get(key), int | float) and a[key] for key in ("self", "other")):  # a number is added
                self.axes.unsigned(*out)
            return out
        if name in _PRODUCTS and not isinstance(a.get("rounding_mode"), str):
            for key, ref in refs.items():  # gains start at one: their sign is not free
                if ref.number in self.plain and sum(n > 1 for n in self.shapes[ref.number]) <= 1:
                    self.axes.unsigned(*a[key])
            return self.broadcast(values, product=True)
        out = self.broadcast(values)
        self.axes.unsigned(*(axis for value in (out, *values) for axis in value))
        return out

    def contracted(self, a: Axis, b: Axis, batch: Sequence[Axis] = ()) -> None:
        """Sum over two axes: they are permuted alike, in the same way for all but batch axes."""
        merged = self.axes.merge(a, b)
        there = {unit for axis in (merged, *batch) for unit in self.axes.units(axis)}
        for unit in self.axes.units(merged):
            unit.within = self.axes.within(unit) & there


def _dims(given: Any, n: int) -> list[int]:
    """Dimensions as non-negative numbers; all if none are given."""
    if given is None or given == []:
        return list(range(n))
    return [d % n for d in (given if isinstance(given, list | tuple) else [given])] if n else []


RULES |= dict.fromkeys(_MOVED, lambda p, a, step: [a["self"]])
RULES["permute"] = lambda p, a, step: [[a["self"][d] for d in _dims(list(a["dims"]), len(a["self"]))]]


@_rule("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze")
def _view(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    if step.overload == "dtype":
        return p.without_rule(step, [a["self"]])
    return [p.axes.reshaped(a["self"], p.shapes[step.out[0].number])]


@_rule("expand")
def _expand(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    shape = p.shapes[step.out[0].number]
    value = [fixed(1)] * (len(shape) - len(a["self"])) + a["self"]
    return [[axis or fixed(n, free=True) for axis, n in zip(value, shape, strict=True)]]


@_rule("repeat")
def _repeat(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    value = [fixed(1)] * (len(a["repeats"]) - len(a["self"])) + a["self"]
    return [[(*fixed(n, free=True), *axis) for axis, n in zip(value, a["repeats"], strict=True)]]


@_rule("slice")
def _slice(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    value, dim = a["self"], a.get("dim", 0) % len(a["self"])
    n = length(value[dim])
    start, stop, by = slice(a.get("start"), a.get("end"), a.get("step") or 1).indices(n)
    if by != 1:
        p.axes.fix(value[dim])
        return [[*value[:dim], fixed(p.shapes[step.out[0].number][dim]), *value[dim + 1 :]]]
    return [_between(p, value, dim, start, stop)]


def _between(p: Propagation, value: Value, dim: int, start: int, stop: int) -> Value:
    """Entries start to stop along a dimension; none is a fixed axis of length zero."""
    if stop <= start:
        return [*value[:dim], (Fixed(0),), *value[dim + 1 :]]
    return p.axes.sliced(value, dim, start, stop)


@_rule("select")
def _select(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    dim = a.get("dim", 0) % len(a["self"])
    i = a["index"] % length(a["self"][dim])
    out = _between(p, a["self"], dim, i, i + 1)
    return [out[:dim] + out[dim + 1 :]]


@_rule("split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "unsafe_split")
def _split(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    dim, start, out = a.get("dim", 0) % len(a["self"]), 0, []
    for ref in step.out:
        stop = start + p.shapes[ref.number][dim]
        out.append(_between(p, a["self"], dim, start, stop))
        start = stop
    return out


@_rule("cat")
def _cat(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    values = [value for value in a["tensors"] if len(value) == len(p.shapes[step.out[0].number])]
    dim = a.get("dim", 0) % len(values[0])
    out = list(values[0])
    for value in values[1:]:
        pairs = enumerate(zip(out, value, strict=True))
        out = [axis if i == dim else p.axes.merge(axis, other) for i, (axis, other) in pairs]
    out[dim] = concatenated([p.axes.resolved(value[dim]) for value in values if length(value[dim])])
    return [out]


@_rule("constant_pad_nd")
def _pad(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    out = list(a["self"])
    pads = list(a["pad"])
    for i in range(len(pads) // 2):
        before, after = pads[2 * i : 2 * i + 2]
        d = len(out) - 1 - i
        if min(before, after) < 0:
            return p.without_rule(step, [a["self"]])
        if before or after:
            out[d] = concatenated([axis for axis in (fixed(before), out[d], fixed(after)) if length(axis)])
    if any(pads) and a.get("value"):
        p.axes.unsigned(*out)
    return [out]


@_rule("flip", "roll", "cumsum")
def _along(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    p.axes.fix(*(a["self"][d] for d in _dims(a["dim"] if "dim" in a else list(a["dims"]), len(a["self"]))))
    return [a["self"]]


@_rule("index", "_unsafe_index")
def _index(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    value, indices = a["self"], list(a["indices"])
    used = [i for i, index in enumerate(indices) if index is not None]
    shape = p.shapes[step.out[0].number]
    if used != list(range(used[0], used[-1] + 1)):
        return p.without_rule(step, [value])
    p.axes.fix(*(axis for i in used for axis in (value[i], *indices[i])))
    rest = value[used[-1] + 1 :]
    new = len(shape) - used[0] - len(rest)
    if new < 0 or tuple(map(length, rest)) != shape[len(shape) - len(rest) :]:
        return p.without_rule(step, [value])
    return [[*value[: used[0]], *(fixed(n) for n in shape[used[0] : used[0] + new]), *rest]]


@_rule("copy")
def _copy(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    src = [*([fixed(1)] * (len(a["self"]) - len(a["src"]))), *a["src"]]
    return [[x or fixed(length(y), free=True) for x, y in zip(src, a["self"], strict=True)]]


@_rule("as_strided")
def _as_strided(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    before, after = runs(map(length, a["self"]), step.strides), runs(a["size"], a["stride"])
    if before != after or a.get("storage_offset"):
        return p.without_rule(step, [a["self"]])
    return [p.axes.reshaped(a["self"], a["size"])]


def runs(shape: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """Lengths and strides of axes, as few as have the same entries in this order."""
    out: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if out and out[-1][1] == n * stride:
            out[-1] = out[-1][0] * n, stride
        elif n > 1:
            out.append((n, stride))
    return out


@_rule("gather")
def _gathered(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    p.axes.fix(*[*a["self"], *a["index"]])
    return [[fixed(n) for n in p.shapes[step.out[0].number]]]


@_rule(*_FILLED)
def _filled(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    ref = step.out[0]
    return [[fixed(n, free=ref.number not in p.written) for n in p.shapes[ref.number]]]


@_rule("sum", "mean", "var", "var_mean", "linalg_vector_norm", "norm", "amax", "amin", "any", "all")
def _reduced(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    dims = _dims(a.get("dim"), len(a["self"]))
    if step.name[:2] in ("am", "an", "al"):
        p.axes.unsigned(*a["self"])
    elif "norm" not in step.name:
        p.axes.unsigned(*[a["self"][d] for d in dims])
    out = [() if i in dims else axis for i, axis in enumerate(a["self"]) if a.get("keepdim") or i not in dims]
    if step.name in ("var", "var_mean", "linalg_vector_norm", "norm"):
        return [[p.axes.even(axis) for axis in out], out][: len(step.out)]
    return [out]


@_rule("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv")
def _matmul(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    x, y = [value for value in a.values() if isinstance(value, list)][-2:]  # after what is added to the product
    batch = [p.axes.merge(x[0], y[0], product=True)] if "bmm" in step.name else []
    left, right = x[len(batch) :], y[len(batch) :]
    p.contracted(left[-1], right[0], batch)
    out = [*batch, *left[:-1], *right[1:]]
    return [p.broadcast([out, a["self"]]) if step.name.startswith(("add", "badd")) else out]


@_rule("convolution")
def _convolution(p: Propagation, a: dict[str, Any], step: Step) -> list[Value]:
    x, weight, groups = a["input"], a["weight"], a["groups"]
    shape = p.shapes[step.out[0].number]
    p.axes.fix(*x[2:], *weight[2:])
    into, out = (1, 0) if not a.get("transposed") else (0, 1)
    n_in = length(x[1])
    if groups == 1:
        p.contracted(x[1], weight[into])
        axis = weight[out]
    else:
        g, i = p.axes.reshaped([x[1]], (groups, n_in // groups))
        split = [(groups, length(weight[0]) // groups), (length(weight[1]),)]
        (h, w0), (w1,) = (p.axes.reshaped([weight[d]], split[d]) for d in (0, 1))
        group = p.axes.merge(g, h, product=True)
        p.contracted(i, w0 if into == 0 else w1, [group])
        axis = p.axes.resolved((*group, *(w1 if into == 0 else w0)))
    if a.get("bias") is not None:
        axis = p.axes.merge(axis, a["bias"][0])
    return [[x[0], axis, *(fixed(n) for n in shape[2:])]]


def _pooled(p: Propagation, a: dict[str, Any], step: Step, axes: int) -> list[Value]:
    value = a["self"] if "self" in a else a["input"]
    last = len(value) - axes
    if "max" in step.name:
        p.axes.unsigned(*value)
    p.axes.fix(*value[last:])
    return [[*value[:last], *(fixed(n) for n in p.shapes[step.out[0].number][last:])]] * len(step.out)


_MOVEMENTS = _MOVED | words(
    "view _unsafe_view _reshape_alias permute unsqueeze squeeze expand slice select split split_with_sizes"
)
