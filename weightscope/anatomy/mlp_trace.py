"""MLPs as a forward pass shows them: a linear map, a function of each unit, and a linear map back to the stream."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.tensors import ModuleTensors, Place, Slot
from weightscope.anatomy.traced_rows import owner, rows_of, span
from weightscope.anatomy.tracing import BITS, ENTRY, Node, Origin, Tracer, Weight


def mlps(tensors: ModuleTensors, tracer: Tracer, prefix: str) -> Iterator[Place]:
    """The MLPs of one trace, in the order in which they run."""
    streams = any(node is not None and node.kind == "sum" for node in tracer.nodes)
    names = [f"{prefix}{name}" for name in tracer.names]
    for node in tracer.nodes:
        if node is None or node.kind != "linear" or node.weight is None or node.inputs is None or node.scales:
            continue
        if streams and node.after is None:
            continue  # a head or an embedding: nothing is added to a stream
        found = _sides(tracer, node)
        if found is None:
            continue
        (first, units), gate = found
        assert first.weight is not None
        if first.weight.columns != node.rows or not _reads_channels(tracer, first) or first.scales:
            continue
        part = _part(tensors, tracer, names, node, first, units, gate)
        if part is not None:
            yield Place(part.name, part, "", part._weights["fc1"].name)


Side = tuple[Node, Tensor]


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


def _part(
    tensors: ModuleTensors, tracer: Tracer, names: list[str], node: Node, first: Node, units: Tensor, gate: Side | None
) -> MLPPart | None:
    weights, biases = {}, {}
    matrices: dict[str, tuple[Node, Tensor | None]] = {"fc1": (first, units), "fc2": (node, None)}
    matrices |= {"gate": gate} if gate is not None else {}
    for key, (one, rows) in matrices.items():
        assert one.weight is not None
        lines = one.weight if rows is None else Weight(one.weight.first[rows], one.weight.step, one.weight.columns)
        found = rows_of(tracer, lines)
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
    path = owner([weights["fc1"].name, weights["fc2"].name])
    kind: Any = "plain" if gate is None else "gated"
    return MLPPart(0, path, kind, first.weight.columns, len(units), tensors, weights, biases)  # type: ignore[union-attr]
