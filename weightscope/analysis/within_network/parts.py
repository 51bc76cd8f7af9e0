"""What counts as a sample: filters, rows, columns and patches of any network that `anatomy` knows."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from weightscope import anatomy
from weightscope.anatomy import opened as opened
from weightscope.anatomy.convolution import strides
from weightscope.errors import UsageError

Part = Literal["filters", "mlp-rows", "mlp-columns", "patch", "patch-channels"]


@dataclass(frozen=True)
class Slices:
    """The samples of one matrix or layer, read when they are asked for.

    Attributes:
        name: path of the layer.
        group: which of several matrices of a layer: `"fc1"`, `"fc2"`, `"gate"`, `"channel 0"`; empty if there is one.
        layer: number of the layer among those of the same kind, from 0.
        depth: how many there are.
        stage: of a depthwise layer, from 0; None elsewhere.
        stride: of a depthwise layer of a module; None where it is not known.
        image: (channels, kh, kw) of one sample that is a filter or a patch; None for a row or a column.
        read: the samples (n, P), in the precision in which they are stored.
    """

    name: str
    group: str
    layer: int
    depth: int
    stage: int | None
    stride: int | None
    image: tuple[int, int, int] | None
    read: Callable[[], np.ndarray]


def _filters(source: anatomy.NamedTensors) -> Iterator[Slices]:
    for p in anatomy.depthwise(source):
        group = "" if p.ndim == 2 else "1-D"  # each dimension counts its own layers
        stride = strides(source, p.name)
        step = max(stride) if stride else None
        yield Slices(p.name, group, p.layer, p.depth, p.stage, step, (1, *p.kernel), lambda p=p: _flat(p.read()))


def _matrices(source: anatomy.NamedTensors, *, columns: bool) -> Iterator[Slices]:
    parts = anatomy.mlps(source)
    for p in parts:
        for matrix in p.names:

            def read(p: Any = p, matrix: Any = matrix) -> np.ndarray:
                values = _flat(p.read(matrix))
                return values.T if columns else values

            yield Slices(p.name, matrix, p.layer, len(parts), None, None, None, read)


def _patches(source: anatomy.NamedTensors, *, channels: bool) -> Iterator[Slices]:
    parts = anatomy.patch_embeddings(source)
    for i, p in enumerate(parts):
        if not channels:
            image = (p.channels, *p.patch)
            yield Slices(p.name, "", i, len(parts), None, None, image, lambda p=p: _flat(p.read()))
            continue
        for c in range(p.channels):
            read = lambda p=p, c=c: _flat(p.read()[:, c])  # noqa: E731 - beside its siblings
            yield Slices(p.name, f"channel {c}", i, len(parts), None, None, (1, *p.patch), read)


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy().reshape(len(tensor), -1)


PARTS: Mapping[str, Callable[[anatomy.NamedTensors], Iterator[Slices]]] = {
    "filters": _filters,
    "mlp-rows": lambda source: _matrices(source, columns=False),
    "mlp-columns": lambda source: _matrices(source, columns=True),
    "patch": lambda source: _patches(source, channels=False),
    "patch-channels": lambda source: _patches(source, channels=True),
}


def find(source: Any, part: str, config: Mapping[str, Any] | None = None) -> list[Slices]:
    """The slices of a part, in depth order.

    Raises:
        UsageError: if there is no such part; lists those that there are.
        AnatomyError: if the network has none of them; lists what it has.
    """
    if part not in PARTS:
        raise UsageError(f"part: expected one of {', '.join(PARTS)}, found {part!r}")
    return list(PARTS[part](anatomy.named_tensors(source, config)))


def skeleton(
    source: Any, part: Part = "filters", *, seed: int = 0, config: Mapping[str, Any] | None = None
) -> nn.Module:
    """Layers of the same names and shapes as those of one part of a network, as torch's constructors make them.

    What to compare trained weights with, and what initialisers take: `conv_covariance_(skeleton(path), ...)`. It
    has no forward pass. Torch's global generator is left as it was.

    Args:
        source: as for `covariance_within`.
        part: which layers.
        seed: of the default initialisation.
        config: hints for a mapping.

    Raises:
        UsageError: if there is no such part.
        AnatomyError: if the network has none of it.

    Example:
        >>> covariance_within(path, skeleton(path), labels=["trained", "default"])
    """
    if part not in PARTS:
        raise UsageError(f"part: expected one of {', '.join(PARTS)}, found {part!r}")
    where = anatomy.named_tensors(source, config)
    root = nn.Module()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in _tensors(where, part):
            path = name.rpartition(".")[0]
            holder = root
            *above, last = path.split(".")
            for word in above:
                if word not in holder._modules:
                    holder.add_module(word, nn.Module())
                holder = holder._modules[word]
            holder.add_module(last, _layer(where.shape(name), filters=part == "filters"))
    return root


def _tensors(source: anatomy.NamedTensors, part: str) -> list[str]:
    if part == "filters":
        return [name for p in anatomy.depthwise(source) for name in p.parameters]
    if part.startswith("patch"):
        return [name for p in anatomy.patch_embeddings(source) for name in p.parameters]
    return list(dict.fromkeys(name for p in anatomy.mlps(source) for names in p.names.values() for name in names))


def _layer(shape: tuple[int, ...], *, filters: bool) -> nn.Module:
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    out, inner, *kernel = shape
    groups = out if filters else 1
    stride = tuple(kernel) if not filters else 1  # by which anatomy knows a patch embedding
    kind = nn.Conv1d if len(kernel) == 1 else nn.Conv2d
    return kind(inner * groups, out, tuple(kernel), stride, groups=groups, bias=False)
