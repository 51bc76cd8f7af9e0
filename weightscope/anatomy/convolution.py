"""Depthwise filters, in depth order, with their stage."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightscope._util.names import joined
from weightscope.anatomy.tensors import NamedTensors, OneTensor, Parts, Slot, Unread, in_layers

# The stem of a network for grayscale images has the shape of a depthwise convolution. A file does not tell them apart,
# so the first tensor of such a name is taken for the stem, unless another convolution reads colour images; and without
# such a name one that is alone of its kind is not read.
_MAY_BE_STEM = "is depthwise, or the first convolution of a network for grey images, which a file does not tell"
_STEM = re.compile(
    r"(^|[._])(stem|patch_embed\w*|conv_stem|conv_proj|projection|downsample\w*)([._]|$)|^features\.0\.0\."
)
_NAMED = re.compile(r"(^|[._])(dw_?conv|conv_?dw|depth_?wise(_conv)?)[._\d]")
_STAGES = (
    re.compile(r"(?:^|\.)(stages?[._]?\d+)(?:\.|$)"),  # timm and transformers ConvNeXt
    re.compile(r"(?:^|\.)(blocks\.\d+)\.\d+\.(?:conv_dw|dw_\w+)\."),  # timm EfficientNet and MobileNet
    re.compile(r"(?:^|\.)(features\.\d+)\.\d+\.block\."),  # torchvision ConvNeXt and EfficientNet
)


@dataclass(frozen=True, eq=False)
class DepthwisePart(OneTensor):
    """One depthwise convolution, groups == channels; `read` and `write` take filters (C, kh, kw)."""

    layer: int  # position among the depthwise layers (of this `ndim`) of the model, from 0
    depth: int  # number of depthwise layers (of this `ndim`)
    stage: int  # from 0; from the name (`stages.2`), else a new one where the channels change
    name: str  # path of the convolution
    channels: int  # C, number of filters
    kernel: tuple[int, int]  # (kh, kw); (1, k) in one dimension
    ndim: int  # 1 or 2
    _tensors: NamedTensors = field(repr=False)
    _slot: Slot = field(repr=False)

    @property
    def relative_depth(self) -> float:
        """From 0 to 1; layers that cannot be read count."""
        return self.layer / max(1, self.depth - 1)

    @property
    def square(self) -> bool:
        """Whether the filters are two-dimensional, square and of odd size, so that they have a centre pixel."""
        return self.ndim == 2 and self.kernel[0] == self.kernel[1] and self.kernel[0] % 2 == 1


def find(tensors: NamedTensors) -> Parts[DepthwisePart]:
    """All depthwise convolutions, in depth order."""
    seen: set[Any] = set()
    (stem, unknown), rows = _stem(tensors), list[tuple[int, DepthwisePart | Unread]]()
    stage, last, more = -1, None, list[Unread]()
    good = {_template(name): len(tensors.shape(name)) - 2 for name in tensors.names if _fits(tensors, name, stem)}
    lost = {f"{n.removesuffix('bias')}weight": "missing" for n in tensors.names if n.endswith("bias")}
    for name, bad in (lost | dict(tensors.every)).items():
        path, shape = name.rpartition(".")[0], tensors.known_shape(name)
        bad = _MAY_BE_STEM if name in unknown and tensors.own(path, "groups") is None else bad
        fits = not bad and _fits(tensors, name, stem)
        alike = len(shape) - 2 if fits or (bad and _is_shape(shape, name)) else 0
        ndim = alike if fits else good.get(_template(name), alike)
        # Another convolution, as its module says; one of 1 x 1 where others have depthwise filters.
        other = tensors.own(path, "groups") is not None or (len(shape) == ndim + 2 and all(n == 1 for n in shape[2:]))
        if not ndim or (not fits and not bad and other):
            more += [Unread(name, str(shape))] * (not bad and _alike(tensors, name))
            continue
        identity = tensors.identity(name) if fits else name
        if identity in seen:
            continue
        seen.add(identity)
        key = next((m.group(1) for pattern in _STAGES if (m := pattern.search(name))), shape[0] if fits else last)
        stage, last = stage + (key != last), key
        if not fits:
            why = bad or f"expected the shape of depthwise filters, found {shape}"
            rows.append((ndim, Unread(name, f"({why})", path=path)))
            continue
        kernel = (1, shape[2]) if ndim == 1 else (shape[2], shape[3])
        slot = Slot(name, vector=True, shape=(shape[0], *kernel))
        rows.append((ndim, DepthwisePart(0, 0, stage, path, shape[0], kernel, ndim, tensors, slot)))
    found = {ndim: in_layers((one for n, one in rows if n == ndim), tensors) for ndim in (1, 2)}
    numbered = {part.name: replace(part, depth=found[part.ndim].layers) for ndim in found for part in found[ndim]}
    out = Parts(numbered[one.name] for _, one in rows if isinstance(one, DepthwisePart))
    out.unread, out.layers = (*found[1].unread, *found[2].unread, *more), found[1].layers + found[2].layers
    return out


def _template(name: str) -> str:
    """A name without the numbers of layers; those at the end are places in a sequence, as of a convolution's norm."""
    return re.sub(r"\d+(?=.*[a-z].*\.)", "#", name)


def _stem(tensors: NamedTensors) -> tuple[str | None, set[str]]:
    """The first convolution of a network for grayscale images, by its name; without one, what may be it."""
    images = [name for name in tensors.names if len(tensors.shape(name)) == 4]
    if any(2 <= tensors.shape(name)[1] <= 4 for name in images):
        return None, set()
    stem = next((name for name in images if _STEM.search(name)), None)
    alike = [name for name in images if _is_shape(tensors.shape(name), name)] if stem is None else []
    kinds = Counter(map(_template, alike))
    return stem, {name for name in alike if kinds[_template(name)] == 1 and not _NAMED.search(name)}


def _is_shape(shape: tuple[int, ...], name: str) -> bool:
    """By shape, under any name; sequences' filters only as `weight`, since many tables are (n, 1, m).

    The directions of weight normalisation are no filters.
    """
    if len(shape) not in (3, 4) or (len(shape) == 3 and not name.endswith("weight")):
        return False
    if name.endswith(("weight_v", "original1")):
        return False
    return shape[1] == 1 and shape[0] > 1 and min(shape) > 0 and any(n != 1 for n in shape[2:])


def _fits(tensors: NamedTensors, name: str, stem: str | None) -> bool:
    path = name.rpartition(".")[0]
    groups = tensors.own(path, "groups")
    if not _is_shape(tensors.shape(name), name) or tensors.own(path, "transposed") is True:
        return False
    return groups > 1 if isinstance(groups, int) else name != stem


def listed(parts: Sequence[DepthwisePart]) -> str:
    """The first few layers with their filters' sizes."""
    return joined((f"`{p.name}` {'1-D ' * (p.ndim == 1)}{p.kernel[0]} x {p.kernel[1]}" for p in parts), 3)


def strides(tensors: NamedTensors, path: str) -> tuple[int, ...] | None:
    """The stride of the convolution at `path`; None if unknown."""
    stride = tensors.own(path, "stride")
    return tuple(stride) if isinstance(stride, (tuple, list, torch.Size)) else None


def _alike(tensors: NamedTensors, name: str) -> bool:
    """Whether filters are (C, 1, k, k, k), (C, 1, 0, 0), or named `dwconv` or `depthwise`."""
    shape, path = tensors.shape(name), name.rpartition(".")[0]
    if len(shape) < 3 or all(n == 1 for n in shape[2:]) or tensors.own(path, "transposed") is True:
        return False
    volume = len(shape) == 5 and shape[1] == 1 and shape[0] > 1 and (tensors.own(path, "groups") or shape[0]) > 1
    empty = len(shape) == 4 and shape[1] == 1 and 0 in shape
    return volume or empty or _NAMED.search(name) is not None
