"""ONNX models: initialisers by the names that the parameters had, as far as the graph tells them.

Exporters fold the transpose of a linear layer into its weight and rename it (`onnx::MatMul_193`, `val_7`). The graph
says where such a weight is used: the layer's name is that of the bias added next, of the node, or of the exporter's
note. It is then listed as the layer's `weight` in torch's orientation (outputs, inputs). Paddle's `linear_0.w_0`
becomes `linear_0.weight`, and so on. Weights whose names end in `.weight` are read as they are.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from weightscope.checkpoint.tensors import (
    SAFETENSORS_TYPES,
    ByteReader,
    FileTensor,
    LocalFile,
    MemoryTensor,
    Store,
    checked_shape,
    printable,
    read_bytes,
)
from weightscope.errors import DataError, UsageError

_MAX_FILE = (1 << 31) - 1  # bytes of a protobuf message; larger models keep their weights in other files

# ONNX's names of data types -> those of safetensors.
_TYPES = {f"{sign}INT{bits}": f"{sign or 'I'}{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)}
_TYPES |= {"FLOAT16": "F16", "BFLOAT16": "BF16", "FLOAT": "F32", "DOUBLE": "F64", "BOOL": "BOOL", "COMPLEX64": "C64"}
_TYPES |= {f"FLOAT8{kind}": f"F8_{kind.replace('FN', '', 1)}" for kind in ("E4M3FN", "E5M2")}
_TYPES |= {f"FLOAT8{kind}": f"F8_{kind}" for kind in ("E4M3FNUZ", "E5M2FNUZ")}
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_LINEAR = ("MatMul", "Gemm")
_PADDLE = re.compile(r"(?P<path>.+)\.(?P<kind>[wb])_(?P<number>\d)(_deepcopy_\d+)?")
_PADDLE_PARTS = {"w_0": "weight", "b_0": "bias", "w_1": "running_mean", "w_2": "running_var"}


@dataclass
class _Graph:
    """All nodes and initialisers of a model, those of subgraphs included."""

    tensors: dict[str, Any] = field(default_factory=dict)  # name -> TensorProto
    nodes: list[Any] = field(default_factory=list)  # in topological order of their graphs
    consumers: dict[str, list[Any]] = field(default_factory=dict)  # name of a value -> the nodes that take it


def open_onnx(file: LocalFile, beside: Callable[[str], ByteReader]) -> Store:
    """The tensors of an ONNX model; `beside` opens a file of external data in the same folder."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UsageError(
            f'{file.where}: reading ONNX needs the package onnx; `pip install ".[onnx]"` in the clone of weightscope'
        ) from error
    if file.size > _MAX_FILE:
        raise DataError(f"{file.where}: expected an ONNX model of at most {_MAX_FILE:,} bytes, found {file.size:,}")
    try:
        model = onnx.load_model_from_string(read_bytes(file, 0, file.size))
        graph = _Graph()
        _collect(model.graph, graph)
    except (DecodeError, ValueError) as error:
        raise DataError(f"{file.where}: damaged ONNX model: {ascii(str(error))[:150]}; download it again") from error
    if not graph.tensors:
        raise DataError(f"{file.where}: expected an ONNX model with weights, found none")
    names, transposed, attributes = _named(graph)
    store = Store(file.where, {}, attributes=attributes)
    beside, known = cache(beside), set(onnx.TensorProto.DataType.values())
    for old, tensor in graph.tensors.items():
        new = printable(names.get(old, old), file.where)
        if new != old:
            store.metadata[f"onnx {new}"] = old
        kind = onnx.TensorProto.DataType.Name(tensor.data_type) if tensor.data_type in known else "unknown"
        dtype = SAFETENSORS_TYPES.get(_TYPES.get(kind, ""))
        where = f"{file.where}: `{new[:200]}`"
        shape = checked_shape(list(tensor.dims), where)
        if dtype is None:
            store.unreadable[new] = f"stored as {kind}, for which torch has no data type"
            continue
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            store.tensors[new] = _external(where, new, tensor, _TYPES[kind], shape, old in transposed, beside)
        else:
            store.tensors[new] = _in_memory(where, new, tensor, dtype, shape, old in transposed)
    return store


def _collect(graph: Any, out: _Graph) -> None:
    """Add a graph and its subgraphs; ValueError if a text is not UTF-8, which protobuf returns as bytes."""
    for tensor in graph.initializer:
        _utf8(tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))
        out.tensors.setdefault(tensor.name, tensor)
    for node in graph.node:
        _utf8(node.name, node.op_type, *node.input, *node.output, *(a.name for a in node.attribute))
        _utf8(*(text for note in node.metadata_props for text in (note.key, note.value)))
        out.nodes.append(node)
        for name in node.input:
            out.consumers.setdefault(name, []).append(node)
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value" and len(attribute.t.dims) > 1:
                out.tensors.setdefault((*node.output, "")[0], attribute.t)
            for inner in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():  # GRAPH, GRAPHS
                _collect(inner, out)


def _utf8(*texts: str | bytes) -> None:
    if any(isinstance(text, bytes) for text in texts):
        raise ValueError("it has texts that are not UTF-8")


def _named(graph: _Graph) -> tuple[dict[str, str], set[str], dict[str, dict[str, Any]]]:
    """Initialiser -> its parameter's name, initialisers to transpose, and path of a convolution -> its attributes."""
    wanted: dict[str, str] = {}
    transposed: set[str] = set()
    attributes: dict[str, dict[str, Any]] = {}
    for old in graph.tensors:
        if match := _PADDLE.fullmatch(old):
            part = _PADDLE_PARTS.get(f"{match['kind']}_{match['number']}")
            wanted |= {old: f"{match['path']}.{part}"} if part else {}
    for node in graph.nodes:
        inputs = [name for name in node.input if name in graph.tensors]
        if node.op_type in _LINEAR and len(node.input) > 1 and node.input[1] in inputs:
            _linear(graph, node, wanted, transposed)
        elif node.op_type in _CONVOLUTIONS and len(node.input) > 1 and node.input[1] in inputs:
            path = _path(graph, node, wanted)
            for name, part in zip(node.input[1:3], ("weight", "bias"), strict=False):
                if path and name in graph.tensors and not name.endswith(f".{part}"):
                    wanted.setdefault(name, f"{path}.{part}")
            weight = wanted.get(node.input[1], node.input[1])
            attributes[weight.rpartition(".")[0]] = _convolution(node)
    # Two tensors of one name (a module that is used twice, functions with two products) keep their own names.
    every = [wanted.get(old, old) for old in graph.tensors]
    unclear = {old for old, new in wanted.items() if every.count(new) > 1}
    names = {old: new for old, new in wanted.items() if old not in unclear}
    return names, transposed - unclear, attributes


def _linear(graph: _Graph, node: Any, wanted: dict[str, str], transposed: set[str]) -> None:
    """Name the weight of a product with one, stored (inputs, outputs) unless transB says otherwise."""
    weight = node.input[1]
    if weight.endswith(".weight") or len(graph.tensors[weight].dims) != 2:
        return  # a parameter as it was: the name survived
    if path := _path(graph, node, wanted):
        wanted.setdefault(weight, f"{path}.weight")
    if weight in wanted and not any(a.name == "transB" and a.i for a in node.attribute):
        transposed.add(weight)


def _path(graph: _Graph, node: Any, wanted: Mapping[str, str]) -> str:
    """The module that a node belongs to: by its weight, its bias, the exporter's note, or its own name; or empty."""
    added = [user for name in node.output for user in graph.consumers.get(name, []) if user.op_type == "Add"]
    beside = [*node.input[1:3], *(name for user in added for name in user.input)]
    for name in beside:
        name = wanted.get(name, name)
        if name.endswith((".weight", ".bias")) and name in {*graph.tensors, *wanted.values()}:
            return name.rpartition(".")[0]
    notes = {note.key: note.value for note in node.metadata_props}
    scopes = [part.partition(": ")[0] for part in notes.get("namespace", "").split("/")]
    if len(scopes) > 2:
        return scopes[-2].strip()
    if not node.name.startswith("/") or node.name.rpartition("/")[2] != node.op_type:
        return ""
    out: list[str] = []
    for part in node.name.split("/")[1:-1]:
        if out and part.startswith(f"{out[-1]}."):  # "/blocks/blocks.0": an item of a list names the list again
            out.pop()
        out.append(part)
    return ".".join(out)


def _convolution(node: Any) -> dict[str, Any]:
    given = {a.name: a for a in node.attribute}
    groups = given["group"].i if "group" in given else 1
    out: dict[str, Any] = {"groups": groups, "transposed": node.op_type == "ConvTranspose"}
    return out | ({"stride": tuple(given["strides"].ints)} if "strides" in given else {})


def _in_memory(
    where: str, name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...], turn: bool
) -> MemoryTensor:
    from onnx import numpy_helper

    size = math.prod(shape)
    if tensor.HasField("raw_data"):
        needed, found = size * dtype.itemsize, len(tensor.raw_data)
        if found != needed:
            raise DataError(f"{where}: expected {needed:,} bytes for {dtype} of shape {shape}, found {found:,}")
        value = torch.frombuffer(bytearray(tensor.raw_data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    else:
        try:
            value = torch.tensor(numpy_helper.to_array(tensor).tolist(), dtype=dtype)
        except (ValueError, TypeError) as error:  # fewer or more numbers than the shape has
            raise DataError(f"{where}: damaged: {ascii(str(error))[:150]}") from error
    value = value.reshape(shape)
    return MemoryTensor(name, value.T.contiguous() if turn else value)


def _external(
    where: str, name: str, tensor: Any, kind: str, shape: tuple[int, ...], turn: bool, beside: Callable[..., ByteReader]
) -> FileTensor:
    """A tensor in another file of the same folder, transposed if `turn`."""
    dtype = SAFETENSORS_TYPES[kind]
    given = {entry.key: entry.value for entry in tensor.external_data}
    expected = math.prod(shape) * dtype.itemsize
    numbers = [given.get("offset", "0"), given.get("length", str(expected))]
    if not all(re.fullmatch(r"\d{1,18}", n) for n in numbers) or int(numbers[1]) != expected:
        raise DataError(f"{where}: expected {expected:,} bytes of external data, found {ascii(given)[:150]}")
    location = given.get("location", "")
    file = beside(location)
    start = int(numbers[0])
    if start + expected > file.size:
        raise DataError(
            f"{where}: bytes {start}-{start + expected} are outside {ascii(location)[1:-1]} of {file.size:,} "
            "bytes; it is truncated or of another model"
        )
    stride = (1, shape[1]) if turn else None
    return FileTensor(name, kind, dtype, shape[::-1] if turn else shape, file, start, start + expected, stride)
