"""The parameters of Mamba and Mamba-2 layers, as named by transformers and by mamba_ssm."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from weightscope.anatomy.tensors import InSlots, NamedTensors, Parts, Slot, Unread, in_layers, path_of, places
from weightscope.errors import AnatomyError

_STATE = ("ssm_state_size", "d_state", "state_size", "mamba_d_state")
_GROUPS = ("n_groups", "ngroups", "mamba_n_groups", "mamba_ngroups")


@dataclass(frozen=True, eq=False)
class SSMPart(InSlots):
    """One selective state-space layer; `read` and `write` take the names in `parts`.

    Shapes for Mamba-1: A_log (channels, N), dt_weight (channels, rank), dt_bias (channels,), B and C (N, channels).
    For Mamba-2: A_log (heads,), dt_weight (heads, d), dt_bias (heads,), B and C (groups * N, d).
    Both: D, in (channels, d), which the scan's inputs are made of before the convolution, conv_weight (convolved
    channels, taps), the *last* tap being the current token, conv_bias.
    """

    layer: int  # from 0
    version: Literal[1, 2]  # 1, Mamba: A per channel and state; 2, Mamba-2: A per head
    name: str  # path of the mixer
    state: int  # N, state size
    channels: int  # d_inner, channels of the scan
    heads: int  # of Mamba-2; `channels` for Mamba
    groups: int  # each has its own B and C; 1 for Mamba
    _tensors: NamedTensors = field(repr=False)
    _weights: dict[str, Slot] = field(repr=False)
    _biases: dict[str, Slot] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names that `read` and `write` accept."""
        return tuple(self._weights)

    @property
    def packed(self) -> dict[str, tuple[int, ...]]:
        """Heights of the matrices that a tensor packs, for those that pack several: name -> rows of each, in order.

        `in_proj` of Mamba packs x and z, of Mamba-2 z, x, B, C and dt; `x_proj` of Mamba packs dt, B and C.
        """
        ends: dict[str, set[int]] = {}
        for slot in self._weights.values():
            if isinstance(slot.rows, slice):
                ends.setdefault(slot.name, {0, self._tensors.shape(slot.name)[0]}).update(
                    (slot.rows.start, slot.rows.stop)
                )
        return {name: tuple(b - a for a, b in pairwise(sorted(found))) for name, found in ends.items()}


# Version -> the tensors that tell it, relative to the mixer, and their numbers of axes.
_NAMES = {
    1: {"A_log": 2, "x_proj.weight": 2, "dt_proj.weight": 2, "dt_proj.bias": 1, "conv1d.weight": 3},
    2: {"A_log": 1, "in_proj.weight": 2, "out_proj.weight": 2, "dt_bias": 1, "conv1d.weight": 3},
}


def find(tensors: NamedTensors) -> Parts[SSMPart]:
    """All Mamba layers, in order."""

    def build(prefix: str, version: int) -> SSMPart | None:
        fits = all(len(tensors.shape(prefix + name)) == axes for name, axes in _NAMES[version].items())
        return _BUILD[version](tensors, prefix) if fits else None

    found = places(tensors, {version: tuple(names) for version, names in _NAMES.items()}, build)
    known = set(map(path_of, found))
    for name in (name for name in tensors.names if name.endswith("A_log")):
        if (path := name.removesuffix("A_log").removesuffix(".")) not in known:
            why = "(expected the other tensors of a Mamba layer beside it, found others or none)"
            found.append(Unread(name, why, path=path))
    return in_layers(found, tensors)


def _common(tensors: NamedTensors, prefix: str) -> dict[str, Slot]:
    optional = {"D": Slot(f"{prefix}D", vector=True), "conv_bias": Slot(f"{prefix}conv1d.bias", vector=True)}
    slots = {"conv_weight": Slot(f"{prefix}conv1d.weight")}
    return slots | {part: slot for part, slot in optional.items() if slot.name in tensors}


def _mamba1(tensors: NamedTensors, prefix: str) -> SSMPart:
    channels, state = tensors.shape(f"{prefix}A_log")
    rank = tensors.shape(f"{prefix}dt_proj.weight")[1]
    rows = tensors.shape(f"{prefix}x_proj.weight")[0]
    slots = {
        "A_log": Slot(f"{prefix}A_log", vector=True),
        "dt_weight": Slot(f"{prefix}dt_proj.weight"),
        "dt_bias": Slot(f"{prefix}dt_proj.bias", vector=True),
        "B": Slot(f"{prefix}x_proj.weight", slice(rank, rank + state)),
        "C": Slot(f"{prefix}x_proj.weight", slice(rank + state, rows)),
    }
    if f"{prefix}in_proj.weight" in tensors:
        slots["in"] = Slot(f"{prefix}in_proj.weight", slice(0, channels))
    slots |= _common(tensors, prefix)
    return SSMPart(0, 1, prefix.removesuffix("."), state, channels, channels, 1, tensors, slots)


def _mamba2(tensors: NamedTensors, prefix: str) -> SSMPart:
    """The rows of in_proj are [.. | z | x | B | C | dt]; x, B and C are convolved, so shapes locate B, C and dt."""
    path = prefix.removesuffix(".")
    heads = tensors.shape(f"{prefix}A_log")[0]
    rows = tensors.shape(f"{prefix}in_proj.weight")[0]
    channels = tensors.shape(f"{prefix}out_proj.weight")[1]
    groups = tensors.hint(path, _GROUPS) or (1 if "ssm_cfg" in tensors.config else None)  # mamba_ssm's default
    if groups is None:
        raise AnatomyError(
            f"`{path}`: found no number of groups of B and C; state 'n_groups' in config.json or config="
        )
    state = tensors.hint(path, _STATE)
    shared = tensors.shape(f"{prefix}conv1d.weight")[0] - channels  # 2 groups * N
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
        "in": Slot(f"{prefix}in_proj.weight", slice(end - shared - channels, end - shared)),
    }
    slots |= _common(tensors, prefix)
    return SSMPart(0, 2, path, half // groups, channels, heads, groups, tensors, slots)


_BUILD = {1: _mamba1, 2: _mamba2}
