"""The parameters of Mamba and Mamba-2 layers, under the names of transformers and mamba_ssm alike."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from weightscope.anatomy.tensors import NamedTensors, Slot
from weightscope.errors import AnatomyError, SpecError, UsageError

SSMName = Literal["A_log", "dt_weight", "dt_bias", "B", "C", "D", "conv_weight", "conv_bias"]

_STATE = ("ssm_state_size", "d_state", "state_size", "mamba_d_state")
_GROUPS = ("n_groups", "ngroups", "mamba_n_groups")


@dataclass(frozen=True, eq=False)
class SSMPart:
    """One selective state-space layer.

    Attributes:
        layer: number of the layer, from 0.
        version: 1 (Mamba: A per channel and state) or 2 (Mamba-2: A per head).
        name: path of the mixer.
        state: N, state size.
        channels: d_inner, channels of the scan.
        heads: heads of Mamba-2; `channels` for Mamba-1.
        groups: groups that share B and C; 1 for Mamba-1.
    """

    layer: int
    version: Literal[1, 2]
    name: str
    state: int
    channels: int
    heads: int
    groups: int
    _source: NamedTensors = field(repr=False)
    _slots: dict[str, Slot] = field(repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names that `read` and `write` know for this layer."""
        return tuple(self._slots)

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The tensors that each part lies in: part -> names."""
        return {part: (slot.name,) for part, slot in self._slots.items()}

    def _slot(self, part: str) -> Slot:
        if part not in self._slots:
            raise UsageError(f"`{self.name}` has the parts {', '.join(self._slots)}, found {part!r}")
        return self._slots[part]

    def read(self, part: SSMName) -> Tensor:
        """A copy of one parameter, float32 or better.

        Shapes for Mamba-1: A_log (channels, N), dt_weight (channels, rank), dt_bias (channels,), B and C (N, channels).
        For Mamba-2: A_log (heads,), dt_weight (heads, d), dt_bias (heads,), B and C (groups * N, d).
        Both: D, conv_weight (convolved channels, taps), the *last* tap being the current token, conv_bias.
        """
        return self._slot(part).read(self._source)

    def write(self, part: SSMName, value: Tensor) -> None:
        """Put a parameter back in place; the exact inverse of `read`.

        Raises:
            SpecError: if the shape is another than `read`'s.
        """
        slot = self._slot(part)
        if slot.vector:
            shape = tuple(slot.read(self._source).shape)
            if tuple(value.shape) != shape:
                raise SpecError(f"`{slot.name}`: expected {shape}, found {tuple(value.shape)}")
        slot.write(self._source, value)


def find(source: NamedTensors) -> list[SSMPart]:
    """All Mamba layers, in order; an empty list when there is none."""
    parts: list[SSMPart] = []
    seen: set[Any] = set()
    for name in source.names:
        prefix = name.removesuffix("A_log")
        if not name.endswith("A_log") or (prefix and not prefix.endswith(".")) or source.identity(name) in seen:
            continue
        seen.add(source.identity(name))
        build = _mamba2 if len(source.shape(name)) == 1 else _mamba1
        parts.append(build(source, prefix, len(parts)))
    return parts


def _need(source: NamedTensors, prefix: str, *names: str) -> None:
    missing = [f"`{prefix}{n}`" for n in names if prefix + n not in source]
    if missing:
        raise AnatomyError(f"`{prefix}A_log` says that this is a Mamba layer, but {', '.join(missing)} is missing")


def _common(source: NamedTensors, prefix: str) -> dict[str, Slot]:
    optional = {"D": Slot(f"{prefix}D", vector=True), "conv_bias": Slot(f"{prefix}conv1d.bias", vector=True)}
    slots = {"conv_weight": Slot(f"{prefix}conv1d.weight")}
    return slots | {part: slot for part, slot in optional.items() if slot.name in source}


def _mamba1(source: NamedTensors, prefix: str, layer: int) -> SSMPart:
    _need(source, prefix, "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "conv1d.weight")
    channels, state = source.shape(f"{prefix}A_log")
    rank = source.shape(f"{prefix}dt_proj.weight")[1]
    rows = source.shape(f"{prefix}x_proj.weight")[0]
    if rows != rank + 2 * state:
        raise AnatomyError(f"`{prefix}x_proj.weight`: expected rank + 2 N = {rank} + 2 * {state} rows, found {rows}")
    slots = {
        "A_log": Slot(f"{prefix}A_log", vector=True),
        "dt_weight": Slot(f"{prefix}dt_proj.weight"),
        "dt_bias": Slot(f"{prefix}dt_proj.bias", vector=True),
        "B": Slot(f"{prefix}x_proj.weight", slice(rank, rank + state)),
        "C": Slot(f"{prefix}x_proj.weight", slice(rank + state, rows)),
    }
    slots |= _common(source, prefix)
    return SSMPart(layer, 1, prefix.removesuffix("."), state, channels, channels, 1, source, slots)


def _mamba2(source: NamedTensors, prefix: str, layer: int) -> SSMPart:
    """in_proj's rows are [.. | z | x | B | C | dt] with x, B and C convolved, so shapes alone place B, C and dt."""
    _need(source, prefix, "in_proj.weight", "out_proj.weight", "dt_bias", "conv1d.weight")
    path = prefix.removesuffix(".")
    heads = source.shape(f"{prefix}A_log")[0]
    rows = source.shape(f"{prefix}in_proj.weight")[0]
    channels = source.shape(f"{prefix}out_proj.weight")[1]
    groups = source.hint(path, _GROUPS) or 1
    state = source.hint(path, _STATE)
    shared = source.shape(f"{prefix}conv1d.weight")[0] - channels  # 2 groups * N
    if shared <= 0 or shared % (2 * groups) or (state is not None and state * groups * 2 != shared):
        raise AnatomyError(
            f"`{prefix}conv1d.weight`: expected {channels} + 2 groups * N channels with {groups} groups and "
            f"N = {state}, found {shared + channels}"
        )
    end = rows - heads
    half = shared // 2
    slots = {
        "A_log": Slot(f"{prefix}A_log", vector=True),
        "dt_weight": Slot(f"{prefix}in_proj.weight", slice(end, rows)),
        "dt_bias": Slot(f"{prefix}dt_bias", vector=True),
        "B": Slot(f"{prefix}in_proj.weight", slice(end - shared, end - half)),
        "C": Slot(f"{prefix}in_proj.weight", slice(end - half, end)),
    }
    slots |= _common(source, prefix)
    return SSMPart(layer, 2, path, half // groups, channels, heads, groups, source, slots)
