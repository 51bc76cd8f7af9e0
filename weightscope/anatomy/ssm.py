"""The parameters of Mamba and Mamba-2 layers, as named by transformers and by mamba_ssm.

Which rows of a projection are which, the forward pass of a module decides if it runs; else the usual order is taken.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weightscope.anatomy.running import first_run, without_hooks
from weightscope.anatomy.tensors import (
    InSlots,
    ModuleTensors,
    NamedTensors,
    Parts,
    Slot,
    Unread,
    in_layers,
    path_of,
    places,
    span,
)
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
        part = _BUILD[version](tensors, prefix) if fits else None
        return part if part is None or not isinstance(tensors, ModuleTensors) else _as_run(tensors, part)

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


# -- what a forward pass shows


def _as_run(tensors: ModuleTensors, part: SSMPart) -> SSMPart:
    """The part with those rows of B and C that its forward pass uses so; AnatomyError if it has no such rows."""
    found = _reach(tensors.module.get_submodule(part.name), part)
    if found is None:
        return part
    slots = dict(part._weights)
    for name, (own, later) in found.items():
        rows = torch.arange(len(own))
        mine = {key: rows[slot.rows] for key, slot in slots.items() if slot.name.endswith(f"{name}.weight")}
        if name == "x_proj":  # the step is 0 for all
            mine = {"B": rows[later], "C": rows[own & ~later]}
            slots |= {key: replace(slots[key], rows=span(lines, len(rows))) for key, lines in mine.items()}
        reached = {key: later[lines] for key, lines in mine.items()}
        seen = {key: bool(one.any() if key == "C" else not one.all()) for key, one in reached.items()}
        if len(mine.get("B", ())) != len(mine.get("C", ())) or any(seen.values()):
            raise AnatomyError(
                f"`{part.name}`: its forward pass shows rows of `{name}` in another order than that of "
                f"Mamba{'-2' * (part.version == 2)}, for which weightscope has no names"
            )
    return replace(part, _weights=slots)


def _reach(mixer: nn.Module, part: SSMPart) -> dict[str, tuple[Tensor, Tensor]] | None:
    """The rows of projections that act on their own token, and on later ones through the state; None if it cannot run.

    Derivatives of the outputs of the first and the last token with respect to what called projections give, with random
    weights and steps that are the same for all tokens. C acts on its own token only, B and the input on later ones.
    """
    run, draw = without_hooks(mixer), torch.Generator().manual_seed(0)
    for inner in run.modules():
        for name, p in inner._parameters.items():
            if p is not None and p.is_floating_point():
                drawn = torch.ones(p.shape)  # float32, whatever the precision of the parameter
                if p.ndim > 1:
                    drawn = torch.randn(p.shape, generator=draw) / p[0].numel() ** 0.5
                inner._parameters[name] = nn.Parameter(drawn.to(p.device), requires_grad=False)
    given: dict[str, Tensor] = {}
    taps = part._tensors.shape(part._weights["conv_weight"].name)[-1]
    apart = {"x_proj": 1, "in_proj": taps} if part.version == 1 else {"in_proj": taps}
    for name in apart:

        def leaf(_: Any, __: Any, out: Tensor, name: str = name) -> Tensor:
            given[name] = out.detach().requires_grad_()
            return given[name]

        run.get_submodule(name).register_forward_hook(leaf)
    if part.version == 1:
        run.get_submodule("dt_proj")._parameters["weight"].zero_()  # type: ignore[union-attr]

    def derivatives(args: Any, kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        with torch.enable_grad():
            out = next(x for x in tree_leaves(run(*args, **kwargs)) if isinstance(x, Tensor)).flatten(0, -2)
        return {name: _derivatives(out, here, apart[name]) for name, here in given.items()}

    return first_run(run, derivatives)[0]


def _derivatives(out: Tensor, given: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Which rows act on their own token, and on one at least `distance` later or earlier."""
    own, later = torch.zeros(2, given.shape[-1], dtype=torch.bool)
    for token in (0, len(out) - 1):
        found = torch.autograd.grad(out[token].square().sum(), given, retain_graph=True)[0].flatten(0, -2).cpu() != 0
        far = (torch.arange(len(out)) - token).abs() >= distance
        own, later = own | found[token], later | found[far].any(0)
    return own, later
