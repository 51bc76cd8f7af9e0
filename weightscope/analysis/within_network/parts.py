"""Samples within a network: filters, rows, columns and patches of any network that `anatomy` knows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from weightscope import anatomy
from weightscope._util.checks import choice
from weightscope.anatomy.convolution import strides
from weightscope.errors import AnatomyError

Part = Literal["filters", "mlp-rows", "mlp-columns", "patch", "patch-channels"]


@dataclass(frozen=True)
class Slices:
    """The samples of one matrix or layer, read on demand.

    Attributes:
        name: path of the layer.
        group: which of several matrices of a layer: `"fc1"`, `"fc2"`, `"gate"`, `"channel 0"`; empty if there is one.
        layer: index of the layer among those of the same kind, from 0.
        depth: number of these layers.
        stage: of a depthwise layer, from 0; None elsewhere.
        stride: of a depthwise layer of a module; None where it is unknown.
        tensors: names of the tensors that contain the samples.
        image: (channels, kh, kw) of one sample that is a filter or a patch; None for a row or a column.
        read: the samples (n, P), in the precision in which they are stored.
    """

    name: str
    group: str
    layer: int
    depth: int
    stage: int | None
    stride: int | None
    tensors: tuple[str, ...]
    image: tuple[int, int, int] | None
    read: Callable[[], np.ndarray]


def _filters(source: anatomy.NamedTensors) -> Iterator[Slices]:
    for p in anatomy.depthwise(source):
        group = "" if p.ndim == 2 else "1-D"  # each dimension counts its own layers
        stride = strides(source, p.name)
        step = max(stride) if stride else None
        yield Slices(p.name, group, p.layer, p.depth, p.stage, step, p.parameters, (1, *p.kernel), partial(_whole, p))


def _matrices(source: anatomy.NamedTensors, *, columns: bool) -> Iterator[Slices]:
    parts = anatomy.mlps(source)
    for p in parts:
        for matrix in p.parameters:
            read = partial(_matrix, p, matrix, columns)
            yield Slices(p.name, matrix, p.layer, len(parts), None, None, p.parameters[matrix], None, read)


def _patches(source: anatomy.NamedTensors, *, channels: bool) -> Iterator[Slices]:
    parts = anatomy.patch_embeddings(source)
    for i, p in enumerate(parts):
        if not channels:
            image, read = (p.channels, *p.patch), partial(_whole, p)
            yield Slices(p.name, "", i, len(parts), None, None, p.parameters, image, read)
            continue
        for c in range(p.channels):
            read = partial(_channel, p, c)
            yield Slices(p.name, f"channel {c}", i, len(parts), None, None, p.parameters, (1, *p.patch), read)


def _whole(part: Any) -> np.ndarray:
    return _flat(part.read())


def _channel(part: Any, channel: int) -> np.ndarray:
    return _flat(part.read()[:, channel])


def _matrix(part: Any, matrix: str, columns: bool) -> np.ndarray:
    values = _flat(part.read(matrix))
    return values.T if columns else values


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy().reshape(len(tensor), -1)


PARTS: Mapping[str, Callable[[anatomy.NamedTensors], Iterator[Slices]]] = {
    "filters": _filters,
    "mlp-rows": lambda source: _matrices(source, columns=False),
    "mlp-columns": lambda source: _matrices(source, columns=True),
    "patch": lambda source: _patches(source, channels=False),
    "patch-channels": lambda source: _patches(source, channels=True),
}


def first_part(source: Any, config: Mapping[str, Any] | None = None) -> Part:
    """The first of `PARTS` that a network has.

    Raises:
        AnatomyError: if it has none of them; lists what it has.
    """
    missing = None
    for part in PARTS:
        try:
            find(source, part, config)
        except AnatomyError as error:
            missing = missing or error
        else:
            return cast(Part, part)
    raise missing or AnatomyError("expected a network with parts, found none")


def find(source: Any, part: str, config: Mapping[str, Any] | None = None) -> list[Slices]:
    """The slices of a part, in depth order.

    Raises:
        UsageError: for an unknown part; lists the known ones.
        AnatomyError: if the network has no such part; lists the parts it has.
    """
    choice("part", part, PARTS)
    return list(PARTS[part](anatomy.named_tensors(source, config)))


def skeleton(
    source: Any, part: Part | None = None, *, seed: int = 0, config: Mapping[str, Any] | None = None
) -> nn.Module:
    """Layers of the same names and shapes as those of one part of a network, with torch's default initialisation.

    A baseline to compare trained weights with, and a module for initialisers: `conv_covariance_(skeleton(path), ...)`.
    It has no forward pass. Torch's global generator does not change.

    Args:
        source: as for `covariance_within`.
        part: see `covariance_within`.
        seed: of the default initialisation.
        config: hints for a mapping.

    Raises:
        UsageError: for an unknown part.
        AnatomyError: if the network has no such part.

    Example:
        >>> covariance_within(path, skeleton(path), labels=["trained", "default"])
    """
    where = anatomy.named_tensors(source, config)
    part = first_part(where) if part is None else part
    root = nn.Module()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in dict.fromkeys(name for piece in find(where, part) for name in piece.tensors):
            path = name.rpartition(".")[0]
            holder = root
            *above, last = path.split(".")
            for word in above:
                if word not in holder._modules:
                    holder.add_module(word, nn.Module())
                holder = holder.get_submodule(word)
            holder.add_module(last, _layer(where.shape(name), filters=part == "filters"))
    return root


def _layer(shape: tuple[int, ...], *, filters: bool) -> nn.Module:
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    out, inner, *kernel = shape
    # Anatomy recognises a patch embedding by its stride.
    groups, stride = (out, [1] * len(kernel)) if filters else (1, kernel)
    kind: Any = nn.Conv1d if len(kernel) == 1 else nn.Conv2d
    return kind(inner * groups, out, tuple(kernel), tuple(stride), groups=groups, bias=False)
