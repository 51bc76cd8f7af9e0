"""Depthwise filters, in depth order, with the stage they belong to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy.tensors import NamedTensors, exact_float, put

# A grayscale image has one channel, so its stem looks like a depthwise filter bank to a shape test.
_STEM = re.compile(
    r"(^|[._])(stem|patch_embed\w*|conv_stem|conv_proj|projection|downsample\w*)([._]|$)|^features\.0\.0\."
)
_STAGES = (
    re.compile(r"(?:^|\.)(stages?[._]?\d+)(?:\.|$)"),  # timm and transformers ConvNeXt
    re.compile(r"(?:^|\.)(blocks\.\d+)\.\d+\.(?:conv_dw|dw_\w+)\."),  # timm EfficientNet and MobileNet
    re.compile(r"(?:^|\.)(features\.\d+)\.\d+\.block\."),  # torchvision ConvNeXt and EfficientNet
)


@dataclass(frozen=True, eq=False)
class DepthwisePart:
    """One depthwise convolution, groups == channels.

    Attributes:
        layer: depth order over all depthwise layers of the model, from 0.
        depth: how many depthwise layers (of this `ndim`) there are.
        stage: number of the stage, from 0; from the name (`stages.2`), else a new one where the channels change.
        name: path of the convolution.
        channels: C, number of filters.
        kernel: (kh, kw); (1, k) in one dimension.
        dilation: of the filter, 1 where unknown.
        ndim: 1 or 2.
    """

    layer: int
    depth: int
    stage: int
    name: str
    channels: int
    kernel: tuple[int, int]
    dilation: int
    ndim: int
    _source: NamedTensors = field(repr=False)
    _tensor: str = field(repr=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the tensors that `read` and `write` touch."""
        return (self._tensor,)

    def read(self) -> Tensor:
        """A copy of the filters (C, kh, kw), float32 or better."""
        return exact_float(self._source.get(self._tensor)).reshape(self.channels, *self.kernel)

    def write(self, value: Tensor) -> None:
        """Put filters (C, kh, kw) back in place; the exact inverse of `read`."""
        put(self._source, self._tensor, value, (self.channels, *self.kernel))


def find(source: NamedTensors) -> list[DepthwisePart]:
    """All depthwise convolutions, in depth order; an empty list when there is none."""
    found = list(_depthwise(source))
    stages = _stages(source, [name for name, _ in found])
    parts = []
    for i, (name, ndim) in enumerate(found):
        shape = source.shape(name)
        path = name.rpartition(".")[0]
        dilation = source.own(path, "dilation")
        alike = [other for other, n in found if n == ndim]
        parts.append(
            DepthwisePart(
                layer=alike.index(name),
                depth=len(alike),
                stage=stages[i],
                name=path,
                channels=shape[0],
                kernel=(1, shape[2]) if ndim == 1 else (shape[2], shape[3]),
                dilation=dilation[-1] if isinstance(dilation, tuple) else 1,
                ndim=ndim,
                _source=source,
                _tensor=name,
            )
        )
    return parts


def _depthwise(source: NamedTensors) -> Iterator[tuple[str, int]]:
    seen: set[Any] = set()
    for name in source.names:
        shape = source.shape(name) if name.endswith("weight") else ()
        if len(shape) not in (3, 4) or shape[1] != 1 or shape[0] < 2 or all(n == 1 for n in shape[2:]):
            continue
        path = name.rpartition(".")[0]
        groups, transposed = source.own(path, "groups"), source.own(path, "transposed")
        known = isinstance(groups, int)
        if (known and groups < 2) or transposed is True or (not known and _STEM.search(name)):
            continue
        if source.identity(name) not in seen:
            seen.add(source.identity(name))
            yield name, len(shape) - 2


def _stages(source: NamedTensors, names: list[str]) -> list[int]:
    keys: list[Any] = []
    for name in names:
        match = next((m.group(1) for pattern in _STAGES if (m := pattern.search(name))), None)
        keys.append(match if match is not None else ("channels", source.shape(name)[0]))
    out, stage = [], 0
    for i, key in enumerate(keys):
        stage += i > 0 and key != keys[i - 1]
        out.append(stage)
    return out


def strides(source: NamedTensors, path: str) -> tuple[int, ...] | None:
    """The stride of the convolution at `path`, None where the source has no modules."""
    stride = source.own(path, "stride")
    return tuple(stride) if isinstance(stride, (tuple, list, torch.Size)) else None
