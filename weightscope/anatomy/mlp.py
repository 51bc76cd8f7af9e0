"""The two (or three) matrices of each MLP: linear layers, 1x1 convolutions or Conv1D, gated or plain."""

import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from weightscope.anatomy.architectures import names
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.convolution import find as find_depthwise
from weightscope.anatomy.tensors import (
    InSlots,
    NamedTensors,
    Parts,
    Slot,
    Unread,
    deepest,
    in_layers,
    module_of,
    places,
)
from weightscope.errors import AnatomyError, UsageError

MLPName = Literal["fc1", "fc2", "gate"]


Scheme = tuple[str, str, str | None]  # names of fc1, fc2 and the gate, equal to fc1's if packed with it, of one family

# MLPs that compute relative position biases, and those of MLP-Mixers over tokens, do not read the residual stream.
POSITIONAL = re.compile(r"(^|\.)(rel_pos\w*|pos_mlp|cpb_mlp|position_bias\w*|mlp_tokens|token_mixing\w*|tokens_mlp)\.")


@dataclass(frozen=True, eq=False)
class MLPPart(InSlots):
    """One MLP: `y = act(x fc1^T + b1) fc2^T + b2`, or gated, `y = (act(x gate^T) * (x fc1^T)) fc2^T`.

    `read` and `write` take "fc1", "gate" (p, n) and "fc2" (n_out, p), and so do `read_bias` and `write_bias`.
    """

    layer: int  # over the whole model, from 0
    name: str  # path of the module with the matrices
    kind: Literal["plain", "gated"]
    width: int  # n, input features
    hidden: int  # p, hidden units
    _tensors: NamedTensors = field(repr=False)
    _weights: dict[str, Slot] = field(repr=False)
    _biases: dict[str, Slot] = field(repr=False)

    def shape(self, part: MLPName) -> tuple[int, int]:
        """(out, in) of one matrix, without reading it."""
        return self._slot(part).size(self._tensors)


def find(tensors: NamedTensors) -> Parts[MLPPart]:
    """All MLPs, in order."""

    def build(prefix: str, scheme: Scheme) -> MLPPart | None:
        weights = None if POSITIONAL.search(prefix) else _slots(tensors, prefix, scheme)
        if weights is None:
            return None
        own = {part: slot.name.removesuffix("weight") + "bias" for part, slot in weights.items()}
        biases = {part: Slot(name, weights[part].rows, vector=True) for part, name in own.items() if name in tensors}
        hidden, width = weights["fc1"].size(tensors)
        kind: Literal["plain", "gated"] = "gated" if "gate" in weights else "plain"
        path = module_of([weights["fc1"].name, weights["fc2"].name])
        return MLPPart(0, path, kind, width, hidden, tensors, weights, biases)

    rows = [(fc1, fc2, *gate, None)[:3] for fc1, fc2, *gate in names("mlps")]
    schemes = {row: tuple(f"{name}.weight" for name in dict.fromkeys(row) if name) for row in rows}
    return in_layers(places(tensors, schemes, build), tensors, owner=owner)


def _slots(tensors: NamedTensors, prefix: str, scheme: Scheme) -> dict[str, Slot] | None:
    """The slots of fc1, fc2 (and gate); None if the shapes are not those of an MLP that returns to its stream."""
    fc1, fc2, gate = scheme
    first, second = f"{prefix}{fc1}.weight", f"{prefix}{fc2}.weight"
    shapes = tensors.shape(first), tensors.shape(second)
    if any(len(s) < 2 or any(n != 1 for n in s[2:]) for s in shapes):
        return None
    transposed = f"{fc1}.weight" in names("conv1d") and _is_conv1d(tensors, f"{prefix}{fc1}")
    (rows, columns), (back, inner) = (s[1::-1] if transposed else s[:2] for s in shapes)
    gated = gate == fc1
    packed = gated or (gate is None and rows == 2 * inner)  # timm's GluMlp packs under the name of a plain fc1
    if rows != inner * (1 + packed) or back != columns:
        return None
    if len(shapes[0]) == 4 and rows < columns:
        return None  # a squeeze-and-excitation bottleneck, not an MLP of the residual stream
    if not packed:
        slots = {"fc1": Slot(first, None, transposed), "fc2": Slot(second, None, transposed)}
        return slots | ({"gate": Slot(f"{prefix}{gate}.weight")} if gate else {})
    # GluMlp states which half is the gate; the other packed families put it first.
    gate_last = False if gated else tensors.hint(prefix.removesuffix("."), ("gate_last",), bool)
    if gate_last is None:
        raise AnatomyError(
            f"`{prefix}fc1.weight` packs a gate, and its names do not say in which half; pass the module"
        )
    halves = slice(0, inner), slice(inner, rows)
    up, active = halves if gate_last else halves[::-1]
    return {"fc1": Slot(first, up), "fc2": Slot(second), "gate": Slot(first, active)}


def _is_conv1d(tensors: NamedTensors, path: str) -> bool:
    """Whether the matrix at `path` is stored (in, out), from its bias or its shape, since fc1 expands."""
    rows, columns = tensors.shape(f"{path}.weight")[:2]
    bias = tensors.shape(f"{path}.bias") if f"{path}.bias" in tensors else None
    if bias is not None and rows != columns:
        return bias[0] == columns
    if rows == columns:
        return tensors.hint(path, ("model_type",), str) in ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
    return columns > rows


_MODULE = re.compile(r"(^|_)(mlp|ffn|feed_?forward|ff|experts)s?\d*$", re.IGNORECASE)


def owner(name: str) -> str | None:
    """The module `..mlp`, `..ffn`, `..feed_forward`, `..ff` or `..experts` that a tensor is of."""
    return None if POSITIONAL.search(name) else deepest(name, _MODULE)


@dataclass(frozen=True, eq=False)
class FilterMLP:
    """One depthwise convolution with filters of odd side, and the plain MLP of its block, from C channels to C."""

    layer: int  # number of the block, from 0
    filters: DepthwisePart
    mlp: MLPPart

    def diagonal(self) -> Tensor:
        """diag(W2 W1), (C,), float64: what the MLP, without its activation, does to each channel itself."""
        return torch.einsum("cp,pc->c", self.mlp.read("fc2").double(), self.mlp.read("fc1").double())

    def centres(self) -> Tensor:
        """A copy of the central pixels of the filters, (C,), float32 or better."""
        return self.filters.read()[self._centre()]

    def write_centres(self, value: Tensor) -> None:
        """Write the central pixels (C,) in place; the exact inverse of `centres`."""
        filters = self.filters.read()
        filters[self._centre()] = value.to(filters)
        self.filters.write(filters)

    def _centre(self) -> tuple[slice, int, int]:
        height, width = self.filters.kernel
        if height % 2 == 0 or width % 2 == 0:
            raise UsageError(f"`{self.filters.name}`: expected filters of odd side, found {height} x {width}")
        return slice(None), height // 2, width // 2


def find_filter_mlps(tensors: NamedTensors, found: Parts[MLPPart]) -> Parts[FilterMLP]:
    """All such blocks, in depth order; a convolution belongs to the one MLP in its own block, by their paths."""
    convolutions = find_depthwise(tensors)
    rows: list[DepthwisePart | Unread] = sorted([*convolutions, *convolutions.unread], key=lambda row: row.layer or 0)
    blocks = list[FilterMLP | Unread]()
    for row in rows:
        inside = [part for part in found if part.kind == "plain" and _one_block(row.name, part.name)]
        lost = [row] if isinstance(row, Unread) else [u for u in found.unread if _one_block(row.name, u.name)]
        if lost or isinstance(row, Unread):
            blocks.append(Unread(lost[0].name, lost[0].why, path=row.name))
        elif len(inside) == 1 and row.channels == inside[0].width:
            blocks.append(FilterMLP(0, row, inside[0]))
    return in_layers(blocks, tensors)


def _one_block(filters: str, other: str) -> bool:
    block = filters.rpartition(".")[0]
    return block == other or other.startswith(f"{block}." if block else "") or block.startswith(f"{other}.")
