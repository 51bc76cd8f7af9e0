"""The parts of a module as its forward pass shows them, and what is only called like one."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weightscope.anatomy import attention_modules, mlp
from weightscope.anatomy.architectures import names as known_names
from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.attention_trace import attentions
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.running import traces
from weightscope.anatomy.tensors import (
    ModuleTensors,
    Parts,
    Slot,
    Unread,
    in_layers,
    module_of,
    path_of,
    places,
    span,
    tensor_of,
)
from weightscope.anatomy.tracing import BITS, ENTRY, Node, Origin, Rerun, Tracer, Weight
from weightscope.errors import AnatomyError

SHOWS = {
    "attention modules": "no softmax of queries and keys applied to values",
    "MLPs": "no function of each unit between two linear maps, of which the second returns to the stream",
}
Reading = tuple[dict[str, list[Any]], set[str], dict[str, str]]


def read(tensors: ModuleTensors) -> Reading:
    """The parts of each kind that run, or why they are not read; the names of all parameters that were used; the errors
    of modules that could not be run, by path.
    """
    if not tensors.reading:
        tensors.reading.append(_read(tensors))
    found, used, failed = tensors.reading[0]
    own = {kind: [_with(one, tensors) for one in ones] for kind, ones in found.items()}
    return own, used, failed


def _with(one: Any, tensors: Any) -> Any:
    return one if isinstance(one, Unread) else replace(one, _tensors=tensors)


def _read(tensors: ModuleTensors) -> Reading:
    kinds = {"attention": attentions, "mlp": _mlps}
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in kinds}
    used: set[str] = set()
    failed: dict[str, str] = {}
    for path, tracer in traces(tensors.module, "", failed, tensors.example):
        prefix = f"{path}." if path else ""
        used |= {prefix + tracer.names[n] for node in tracer.nodes if node is not None for n in node.parameters}
        masked = _takes_a_mask(tensors.module.get_submodule(path))
        for kind, find in kinds.items():
            for one in find(tensors, tracer, prefix):
                if masked and isinstance(one, AttentionPart) and one.causal is False:
                    one = replace(one, causal=None)
                first = found[kind].setdefault(_identity(one), one)
                if isinstance(first, AttentionPart) and isinstance(one, AttentionPart) and first.kind != one.kind:
                    why = "(run alone, it is self- or cross-attention; give the model an attribute example_input_array)"
                    found[kind][_identity(one)] = Unread(tensor_of(one), why, path=one.name)
    return {kind: [_with(one, None) for one in ones.values()] for kind, ones in found.items()}, used, failed


def _takes_a_mask(module: nn.Module) -> bool:
    """Whether the caller of a layer decides which tokens are masked; whole models of transformers decide themselves."""
    named = inspect.signature(module.forward).parameters
    return not hasattr(module, "main_input_name") and any("mask" in name or name == "is_causal" for name in named)


def _identity(one: Any) -> Any:
    """Equal for two runs of one part."""
    if isinstance(one, Unread):
        return one.path, one.why
    return tuple((slot.name, str(slot.rows)) for slot in one._weights.values())


def find_attention(tensors: ModuleTensors) -> Parts[AttentionPart]:
    """All attention modules, in order."""
    named = places(
        tensors, attention_modules.schemes(), lambda prefix, scheme: Unread(prefix + scheme[0], "", path=prefix[:-1])
    )
    found = _with_named(tensors, "attention", named, SHOWS["attention modules"])
    stated = next((n for key in known_names("heads") if isinstance(n := tensors.config.get(key), int)), None)
    if wrong := [one for one in found if isinstance(one, AttentionPart) and stated not in (None, one.heads)]:
        raise AnatomyError(f"`{wrong[0].name}`: config= says {stated} heads, its forward pass has {wrong[0].heads}")
    return in_layers(found, tensors, attention_modules.same_block, attention_modules.owner, read(tensors)[1])


def find_mlps(tensors: ModuleTensors) -> Parts[MLPPart]:
    """All MLPs, in order."""
    named = _with_named(tensors, "mlp", mlp.find(tensors), SHOWS["MLPs"])
    return in_layers(named, tensors, owner=mlp.owner, ran=read(tensors)[1])


def _with_named(tensors: ModuleTensors, kind: str, named: Sequence[Any], shows: str) -> list[Any]:
    """The parts of a kind in the model's order, and why what has the names of one is none, or never ran."""
    found, used, failed = read(tensors)
    ones = [one for one in found[kind] if not isinstance(one, Unread) or one.why]
    parts = (one for one in ones if not isinstance(one, Unread))
    seen = {tensors.identity(slot.name) for part in parts for slot in part._weights.values()}
    ran = set(map(tensors.identity, used))  # of tied tensors, one name

    def tied(names: Sequence[str], path: str = "") -> frozenset[Any]:
        return frozenset(tensors.identity(f"{path}.{name}".lstrip(".")) for name in names)

    done = {tied(tensors.under(path), path) for path in map(path_of, found[kind])}
    for one in named:
        path, slots = path_of(one), [] if isinstance(one, Unread) else one._weights.values()
        own = tied([slot.name for slot in slots]) or tied(tensors.under(path), path)
        if own in done or own & seen:
            continue
        done.add(own)
        why = f"(its forward pass shows {shows})"
        if not own & ran:
            words = path.split(".")
            coded = next((p for n in range(len(words), -1, -1) if _has_code(tensors, p := ".".join(words[:n]))), path)
            why = f"({_not_run(tensors, coded, failed)})"
        ones.append(Unread(tensor_of(one), why, path=path))
    order = {name: i for i, name in enumerate(tensors.every)}
    return sorted(ones, key=lambda one: order.get(tensor_of(one), len(order)))


def _not_run(tensors: ModuleTensors, path: str, failed: Mapping[str, str]) -> str:
    said = f": {failed[path]}" if path in failed else ""
    name = path or type(tensors.module).__name__
    return f"`{name}` could not be run on random inputs{said}; give the model an attribute example_input_array"


def shown(tensors: Any, kind: str) -> str | None:
    """Why a module has no parts of a kind, if its forward pass tells."""
    if not isinstance(tensors, ModuleTensors) or kind not in SHOWS:
        return None
    _, used, failed = read(tensors)
    if failed and ("" in failed or not used):
        return _not_run(tensors, next(iter(failed)), failed)
    return f"its forward pass shows {SHOWS[kind]}" if used else None


def _has_code(tensors: ModuleTensors, path: str) -> bool:
    return type(tensors.module.get_submodule(path)).forward is not nn.Module.forward


# -- MLPs: a linear map, a function of each unit, and a linear map back to the stream


def _mlps(tensors: ModuleTensors, tracer: Tracer, prefix: str) -> list[MLPPart]:
    """The MLPs of one trace, in the order in which they run."""
    streams = any(node is not None and node.kind == "sum" for node in tracer.nodes)
    names = [f"{prefix}{name}" for name in tracer.names]
    found = []
    for node in tracer.nodes:
        if node is None or node.kind != "linear" or node.weight is None or node.inputs is None or node.scales:
            continue
        if streams and node.after is None:
            continue  # a head or an embedding: nothing is added to a stream
        sides = _sides(tracer, node)
        if sides is None:
            continue
        (first, units), gate = sides
        assert first.weight is not None
        if first.weight.columns != node.rows or not _reads_channels(tracer, first) or first.scales:
            continue
        part = _mlp(tensors, tracer, names, node, first, units, gate)
        if part is not None:
            found.append((part, node, [(first, units), *([gate] if gate else [])]))
    mixed = _mixed(tracer, [(node, sides) for _, node, sides in found])
    return [part for part, node, _ in found if node.step not in mixed]


Side = tuple[Node, Tensor]


def _mixed(tracer: Tracer, found: Sequence[tuple[Node, list[Side]]]) -> set[int]:
    """The second maps of MLPs, by the number of their operation, of which an input depends on several units.

    In another run, half of the units change; what is read of the others must not. Nothing is known of a module that
    remembers earlier calls.
    """
    if not found:
        return set()
    rows, halves, draw = dict[int, tuple[Node, Tensor]](), dict[int, Tensor](), torch.Generator().manual_seed(0)
    for node, sides in found:
        halves[node.step] = half = torch.rand(len(sides[0][1]), generator=draw) < 0.5
        for first, units in sides:
            _, changing = rows.setdefault(first.step, (first, torch.zeros(first.rows, dtype=torch.bool)))
            changing[units[half]] = True
    tracer.run(plain := Rerun(halves, {}))
    tracer.run(changed := Rerun(halves, rows, plain.out))

    def mixed(x: Tensor | None, y: Tensor | None, half: Tensor) -> bool:
        if x is None or y is None or x.shape != y.shape or x.shape[-1] != len(half):
            return True
        apart = (x - y).abs().amax(0).cpu()
        return bool((apart[~half] > 1e-3 * apart.amax()).any())

    return {n for n, half in halves.items() if mixed(plain.read.get(n), changed.read.get(n), half)}


def _sides(tracer: Tracer, node: Node) -> tuple[Side, Side | None] | None:
    """The linear map and its units that a map reads, and those of its gate; None if they are made otherwise."""
    assert node.inputs is not None
    number = int(node.inputs.max()) >> BITS
    if number <= 0 or bool((node.inputs >> BITS != number).any()):
        return None
    made, channels = tracer.node(number), tracer.channels(node.inputs) & ENTRY
    if len(channels.unique()) != len(channels):
        return None
    if made.kind == "linear":
        changed = "nonlinear" in node.marks and not node.marks & {"gated", "pooled", "rotated", "normalised"}
        plain = changed and ("convolved" not in node.marks or tracer.parameters[made.parameters[0]].ndim == 2)
        return ((made, channels), None) if plain and _is_map(made) else None
    if made.kind != "gate":
        return None
    sides = [_units(tracer, made, origin, channels) for origin in made.sides]
    active = ["nonlinear" in origin.marks for origin in made.sides]
    if None in sides or active[0] == active[1]:
        return None
    return (sides[active.index(False)], sides[active.index(True)])  # type: ignore[return-value]


def _is_map(node: Node) -> bool:
    return node.kind == "linear" and node.weight is not None and node.inputs is not None


def _units(tracer: Tracer, gate: Node, origin: Origin, channels: Tensor) -> Side | None:
    """The linear map that made one side of a gate, and its units for these channels of the gate."""
    after, axis = 1, gate.out.ndim - 1
    while (after, gate.out.shape[axis]) != (gate.inner, gate.rows):
        after, axis = after * gate.out.shape[axis], axis - 1
    vector = tracer.vector(origin.codes, axis).cpu()[channels]
    numbers = (vector >> BITS).unique().tolist()
    if len(numbers) != 1 or numbers[0] <= 0 or not _is_map(tracer.node(numbers[0])):
        return None
    return tracer.node(numbers[0]), vector & ENTRY


def _reads_channels(tracer: Tracer, node: Node) -> bool:
    """Whether a map reads the channels of a stream, and not its tokens or numbers of positions."""
    assert node.inputs is not None
    channels = tracer.channels(node.inputs)
    return bool((channels >= 0).all()) and len(channels.unique()) == len(channels)


def _mlp(
    tensors: ModuleTensors, tracer: Tracer, names: list[str], node: Node, first: Node, units: Tensor, gate: Side | None
) -> MLPPart | None:
    weights, biases = {}, {}
    matrices: dict[str, tuple[Node, Tensor | None]] = {"fc1": (first, units), "fc2": (node, None)}
    matrices |= {"gate": gate} if gate is not None else {}
    for key, (one, rows) in matrices.items():
        assert one.weight is not None
        lines = one.weight if rows is None else Weight(one.weight.first[rows], one.weight.step, one.weight.columns)
        found = tracer.rows_of(lines)
        if found is None:
            return None
        number, chosen, transposed = found
        total = tensors.shape(names[number])[1 if transposed else 0]
        weights[key] = Slot(names[number], span(chosen, total), transposed)
        bias = one.bias if one.bias is None or rows is None else one.bias[rows]
        owners = [] if bias is None else (bias >> BITS).unique().tolist()
        if bias is not None and len(owners) == 1 and owners[0] >= 0:
            name = names[owners[0]]
            biases[key] = Slot(name, span(bias & ENTRY, tensors.shape(name)[0]), vector=True)
    path = module_of([weights["fc1"].name, weights["fc2"].name])
    kind: Any = "plain" if gate is None else "gated"
    return MLPPart(0, path, kind, first.weight.columns, len(units), tensors, weights, biases)  # type: ignore[union-attr]
