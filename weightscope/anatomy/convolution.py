"""Depthwise filters, in depth order, with their stage."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightscope.anatomy.tensors import NamedTensors, OneTensor, unread

# The stem of a network for grayscale images has the shape of a depthwise convolution. A file does not tell them apart,
# so the first tensor of such a name is taken for the stem, unless another one of them reads colour images.
_STEM = re.compile(
    r"(^|[._])(stem|patch_embed\w*|conv_stem|conv_proj|projection|downsample\w*)([._]|$)|^features\.0\.0\."
)
_STAGES = (
    re.compile(r"(?:^|\.)(stages?[._]?\d+)(?:\.|$)"),  # timm and transformers ConvNeXt
    re.compile(r"(?:^|\.)(blocks\.\d+)\.\d+\.(?:conv_dw|dw_\w+)\."),  # timm EfficientNet and MobileNet
    re.compile(r"(?:^|\.)(features\.\d+)\.\d+\.block\."),  # torchvision ConvNeXt and EfficientNet
)


@dataclass(frozen=True, eq=False)
class DepthwisePart(OneTensor):
    """One depthwise convolution, groups == channels; `read` and `write` take filters (C, kh, kw).

    Attributes:
        layer: position among the depthwise layers (of this `ndim`) of the model, from 0.
        depth: number of depthwise layers (of this `ndim`).
        stage: number of the stage, from 0; from the name (`stages.2`), else a new one where the channels change.
        name: path of the convolution.
        channels: C, number of filters.
        kernel: (kh, kw); (1, k) in one dimension.
        dilation: of the filter; 1 if unknown.
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
    _tensors: NamedTensors = field(repr=False)
    _tensor: str = field(repr=False)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.channels, *self.kernel)

    @property
    def square(self) -> bool:
        """Whether the filters are two-dimensional, square and of odd size, so that they have a centre pixel."""
        return self.ndim == 2 and self.kernel[0] == self.kernel[1] and self.kernel[0] % 2 == 1

    @property
    def expected_square(self) -> str:
        """What is wrong where the filters are not `square`, for error messages."""
        kh, kw = self.kernel
        if self.ndim != 2:
            return f"two-dimensional filters, found {self.ndim}-D of size {kw}"
        return f"square filters of odd size, found {kh} x {kw}"


def find(tensors: NamedTensors) -> list[DepthwisePart]:
    """All depthwise convolutions, in depth order."""
    found = list(_depthwise(tensors))
    stages = _stages(tensors, [name for name, _ in found])
    parts = []
    for i, (name, ndim) in enumerate(found):
        shape = tensors.shape(name)
        path = name.rpartition(".")[0]
        dilation = tensors.own(path, "dilation")
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
                _tensors=tensors,
                _tensor=name,
            )
        )
    return parts


def _depthwise(tensors: NamedTensors) -> Iterator[tuple[str, int]]:
    seen: set[Any] = set()
    stems = [name for name in tensors.names if len(tensors.shape(name)) == 4 and _STEM.search(name)]
    colour = any(2 <= tensors.shape(name)[1] <= 4 for name in stems)
    stem = stems[0] if stems and not colour else None
    for name in tensors.names:
        shape = tensors.shape(name)
        # By shape, under any name; sequences' filters only as `weight`, since many tables are (n, 1, m).
        if len(shape) not in (3, 4) or (len(shape) == 3 and not name.endswith("weight")):
            continue
        if shape[1] != 1 or shape[0] < 2 or min(shape) < 1 or all(n == 1 for n in shape[2:]):
            continue
        path = name.rpartition(".")[0]
        groups, transposed = tensors.own(path, "groups"), tensors.own(path, "transposed")
        if (
            transposed is True
            or (groups < 2 if isinstance(groups, int) else name == stem)
            or _weight_norm(tensors, name)
        ):
            continue
        if tensors.identity(name) not in seen:
            seen.add(tensors.identity(name))
            yield name, len(shape) - 2


def _weight_norm(tensors: NamedTensors, name: str) -> bool:
    """Whether a tensor is the direction v of weight normalisation, whose filter is g v / |v|."""
    magnitude = {"weight_v": "weight_g", "original1": "original0"}.get(name.rpartition(".")[2])
    return magnitude is not None and f"{name.rpartition('.')[0]}.{magnitude}".lstrip(".") in tensors


def _stages(tensors: NamedTensors, names: list[str]) -> list[int]:
    keys: list[Any] = []
    for name in names:
        match = next((m.group(1) for pattern in _STAGES if (m := pattern.search(name))), None)
        keys.append(match if match is not None else ("channels", tensors.shape(name)[0]))
    out, stage = [], 0
    for i, key in enumerate(keys):
        stage += i > 0 and key != keys[i - 1]
        out.append(stage)
    return out


def listed(parts: Sequence[DepthwisePart]) -> str:
    """The first few layers with their filters' sizes."""
    some = ", ".join(f"`{part.name}` {part.kernel[0]} x {part.kernel[1]}" for part in parts[:3])
    return some + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def strides(tensors: NamedTensors, path: str) -> tuple[int, ...] | None:
    """The stride of the convolution at `path`; None if unknown."""
    stride = tensors.own(path, "stride")
    return tuple(stride) if isinstance(stride, (tuple, list, torch.Size)) else None


_NAMED = re.compile(r"(^|[._])(dw_?conv|conv_?dw|depth_?wise(_conv)?)[._\d]")


def unparsed(tensors: NamedTensors, parts: Sequence[DepthwisePart]) -> tuple[str, ...]:
    """What looks like depthwise filters and was not read.

    Filters of the shapes (C, 1, k, k, k) and (C, 1, 0, 0), those of weight normalisation, and tensors named `dwconv`,
    `conv_dw` or `depthwise` with a kernel.
    """
    return tuple(name for name in unread(tensors, parts) if _alike(tensors, name))


def _alike(tensors: NamedTensors, name: str) -> bool:
    shape = tensors.shape(name)
    if len(shape) < 3 or all(n == 1 for n in shape[2:]):
        return False
    if len(shape) == 4 and shape[1] == 1 and 0 in shape:
        return True
    path = name.rpartition(".")[0]
    if tensors.own(path, "transposed") is True:
        return False
    volume = len(shape) == 5 and shape[1] == 1 and shape[0] > 1 and (tensors.own(path, "groups") or shape[0]) > 1
    normed = len(shape) == 4 and shape[1] == 1 and shape[0] > 1 and _weight_norm(tensors, name)
    return volume or normed or _NAMED.search(name) is not None
