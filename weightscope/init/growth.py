"""Growth: initialise a large network with the weights of a smaller trained one of the same family."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weightscope._util.checks import choice, number
from weightscope._util.names import block_of, listing
from weightscope.anatomy import named_tensors
from weightscope.anatomy.matrices import matrices
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.anatomy.places import Source, unit_offset
from weightscope.errors import SpecError
from weightscope.init import _trained
from weightscope.init.base import INITIALISERS, Generator, M, normal, put
from weightscope.networks.layers import SumLinear
from weightscope.statistics.permutations import PermutationSpec, View, bare

WIDTHS, DEPTHS = ("split", "select"), ("identity", "repeat")


@INITIALISERS.register(
    "grow",
    source="thesis 4.1; Net2Net, Chen et al. 2016",
    needs="a smaller network of the family, of known names or with `permutations`",
)
def grow_(
    module: M,
    source: Any,
    *,
    width: str = "split",
    depth: str = "identity",
    noise: float = 0.01,
    exclude: str | Sequence[str] | None = None,
    permutations: PermutationSpec | None = None,
    generator: Generator = None,
) -> M:
    """Initialise a network with the weights of a smaller one, in width and in depth.

        split      W'[i, j] = W[g(i), h(j)] / c(j) + noise std(W') z,   g(i) = i mod m, z ~ N(0, 1)
        select     W'[g(i), h(j)] = W[i, j],   g(i) = floor(i m' / m);  the other entries as they are in the module

    for m outputs and m' in the larger network. In "split" each unit of the larger network is one of the smaller, and
    what reads it (axis j of linear layers and convolutions) is divided by c(j), how many are the same unit. The
    permutation specification (`weightscope.anatomy.permutation_groups.permutation_spec`) tells which axes are of the
    same units. Heads are repeated whole, g(h) = h mod H, and within heads of a larger width k' the units: queries and
    keys are then multiplied by (k' / k)^(1/4) / sqrt(c), so that their product keeps its size over sqrt(k').

    Blocks are those of nearest relative depth, block i of L' block i (L - 1) / (L' - 1), rounded. Where several are the
    same, all after the first are added ones: "identity" sets the last matrices of their residual branches (output
    projections of attention, second layers of MLPs) and their biases to zero, "repeat" leaves them as they are.

    Without noise, "split" with "identity" keeps the function, in evaluation mode, if all units of an axis that
    LayerNorm or RMSNorm normalises are repeated equally often, which is when its length is a multiple of the smaller
    one. Channels under BatchNorm, hidden units and heads may have any number. It is not kept by "identity" in blocks
    that normalise after the addition (BERT), and where embeddings are scaled by the width (Gemma). If the embedding of
    tokens is also the last matrix, the last norm is divided by c in its place.

    Args:
        module: the larger network, changed in place: parameters and floating-point buffers.
        source: the smaller network, whose names are matched as by `select_weights_`.
        noise: standard deviation, relative to that of each widened matrix, in "split", which lets equal units become
            different; z is drawn for these alone.
        exclude: shell patterns of tensors to leave unchanged, comma-separated or a sequence.
        permutations: of the module's tensors, where their names are not known: `permutation_spec(module, inputs)`.

    Raises:
        AnatomyError: if no permutation specification is known for the names of the module, and none is given.
        SpecError: if a tensor has no counterpart; if units, heads or blocks are more in the smaller network; if an axis
            that is not one of units (tokens, classes, filter positions) has another length; for "identity" if an added
            block has no branch that ends in such a matrix (ConvMixer, ResNet).

    Source: thesis 4.1 ("train small models to initialize larger ones"), which gives no formulas; Chen, Goodfellow and
    Shlens 2016, Eq. 2 (Net2WiderNet, with i mod m in place of a random mapping) and section 2.3 (Net2DeeperNet).

    Example:
        >>> grow_(ViT(32, 4, 128, 12, 8, 10), ViT(32, 4, 64, 6, 4, 10), noise=0.0)
    """
    choice("width", width, WIDTHS)
    choice("depth", depth, DEPTHS)
    number("noise", noise, least=0)
    wanted, small = _trained.chosen(module, "all", exclude=exclude), _trained.open_network(source)
    tensors = Source(_trained.tensors(small))
    places = _trained.counterparts(wanted, _trained.weights(module), tensors, "repeat")
    theirs = {n: tensors.read(place, tuple(wanted[n].shape)).double().numpy() for n, place in places.items()}
    new = {name: wanted[name].detach().double().cpu().numpy().copy() for name in theirs}
    whole, inputs = permutations or permutation_spec(module), _inputs(module)
    spec = whole.restrict(wanted)
    origins = PermutationSpec(tuple(_smaller(view, new[view.tensor].shape, theirs) for view in spec.views))
    sources = {name: tuple(tensors.names[place.name].values()) for name, place in places.items()}
    heads = _heads(small, sources, spec), _heads(module, {name: (name,) for name in new}, spec)
    units = {group: _units(group, n, spec, *heads, width) for group, n in origins.sizes.items()}
    norm: Mapping[str, float] = {}
    if width == "split":
        _refuse_products(whole, inputs, {group for group, n in origins.sizes.items() if n < spec.sizes[group]})
        norm = _last_norm(module, whole)
    for view, origin in zip(spec.views, origins.views, strict=True):
        part, target, offset = origin.of(theirs[view.tensor]), new[view.tensor], norm.get(view.tensor, 0.0)
        if width == "split":
            axis = 0 if view.tensor in norm else inputs.get(view.tensor)
            view.write(target, _split(view, part + offset, units, axis) - offset)
        else:
            view.write(target, _selected(view, part, units, view.of(target)))
    if width == "split":
        for path, layer in module.named_modules():
            if isinstance(layer, SumLinear) and {f"{path}.weight", f"{path}.sum_weight"} <= new.keys():
                new[f"{path}.sum_weight"] *= theirs[f"{path}.weight"].shape[1] / layer.in_features
        for name in (name for name in new if name in inputs and theirs[name].shape != new[name].shape):
            new[name] += noise * new[name].std() * normal(*new[name].shape, generator=generator).numpy()
    if depth == "identity":
        first = {place: name for name, place in reversed(places.items())}
        _zero_branches(module, new, [name for name, place in places.items() if first[place] != name])
    for name, value in new.items():
        put(wanted[name], torch.from_numpy(value))
    return module


class _Units(NamedTuple):
    """How the m' units of a group come from m ones; see `grow_`."""

    taken: np.ndarray  # "split": (m',), the smaller network's units; "select": (m,), their places in the larger one
    share: np.ndarray  # (m',), of what reads them: 1 / c
    factor: np.ndarray  # (m',), of what writes them: 1, but for queries and keys


def _units(
    group: str, n: int, spec: PermutationSpec, there: Mapping[str, int], here: Mapping[str, int], width: str
) -> _Units:
    """Of a group that has n units in the smaller network; `there` and `here` are the numbers of heads."""
    m = spec.sizes[group]
    if group.startswith("head."):
        before, after = n, m
    elif group in there and group in here:
        before, after = there[group], here[group]
    elif group not in spec.heads or n == m:
        before = after = 1
    else:
        raise SpecError(
            f"{group}: expected a network whose number of attention heads is known, found none; give a module, or a "
            "checkpoint with its config"
        )
    small, large = n // before, m // after  # units of a head, or of the group
    if before > after or small > large:
        sizes = [
            f"{heads} heads of {k}" if group in spec.heads else f"{k}" for heads, k in ((after, large), (before, small))
        ]
        raise SpecError(
            f"{group}: expected at most {sizes[0]} units in the smaller network, as in this one, found {sizes[1]}; "
            "select_weights_ is for a smaller network"
        )
    if width == "select":
        places = np.arange(n)
        heads, inner = (_trained.spaced(*sizes).numpy() for sizes in ((after, before), (large, small)))
        return _Units(heads[places // small] * large + inner[places % small], np.ones(m), np.ones(m))
    units = np.arange(m)
    inner = units % large % small
    index = units // large % before * small + inner
    times = np.bincount(np.arange(large) % small)  # of a unit within its head
    factor = (large / small) ** 0.25 / np.sqrt(times[inner]) if group.startswith("qk.") else np.ones(m)
    return _Units(index, 1 / np.bincount(index)[index], factor)


def _split(view: View, part: np.ndarray, units: Mapping[str, _Units], read: int | None) -> np.ndarray:
    """A part of a tensor with its axes of units in the larger network's numbers; divided along the axis `read`."""
    for axis, label in enumerate(view.axes):
        if label is not None:
            one = units[bare(label)]
            factor = one.share if axis == read else one.factor
            part = part.take(one.taken, axis) * factor.reshape([-1 if i == axis else 1 for i in range(part.ndim)])
    return part


def _selected(view: View, part: np.ndarray, units: Mapping[str, _Units], large: np.ndarray) -> np.ndarray:
    """The larger network's part with the smaller one's entries at the places of its units."""
    places = (np.arange(n) if a is None else units[bare(a)].taken for a, n in zip(view.axes, part.shape, strict=True))
    out = large.copy()
    out[np.ix_(*places)] = part
    return out


def _inputs(module: nn.Module) -> dict[str, int]:
    """Name of each weight of a linear or convolutional layer -> the axis that reads its inputs."""
    return {matrix.name: 0 if matrix.is_transposed else 1 for matrix in matrices(module)}


def _smaller(view: View, large: tuple[int, ...], tensors: Mapping[str, np.ndarray]) -> View:
    """The view of the smaller network's tensor, in which a part has the same share of an axis."""
    small = tensors[view.tensor].shape
    if len(small) != len(large):
        raise SpecError(f"`{view.tensor}`: expected {len(large)} axes {large}, found {small} in the smaller network")

    def scaled(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(n if s == m else n * s // m for n, s, m in zip(numbers, small, large, strict=bool(numbers)))

    found = replace(view, shape=scaled(view.shape), offset=scaled(view.offset))
    if any(n != m for n, m, label in zip(found.shape, view.shape, view.axes, strict=True) if label is None):
        raise SpecError(
            f"`{view.tensor}`: only axes of units can grow, {view.axes}; expected the others as in the smaller "
            f"network's {small}, found {large}; leave it out with exclude="
        )
    return found


def _heads(model: Any, names: Mapping[str, Iterable[str]], spec: PermutationSpec) -> dict[str, int]:
    """Group of units of heads -> how many heads a model has, whose own `names` of the tensors are given."""
    found = _trained.found_parts("attention modules", model)
    heads = {name: part.heads for part in found for key in "qkvo" for name in part.parameters[key]}
    return {
        bare(label): heads[own]
        for view in spec.views
        for own in names[view.tensor]
        for label in view.labels
        if own in heads and bare(label) in spec.heads
    }


def _refuse_products(spec: PermutationSpec, inputs: Mapping[str, int], grown: set[str]) -> None:
    """A SpecError if units are multiplied by each other, as the states of Mamba-2, other than in queries and keys."""
    read = {v.axes[inputs[v.tensor]] for v in spec.views if v.tensor in inputs and len(v.axes) > 1}
    odd = grown - {bare(label) for label in read if label is not None}
    if left := [group for group in sorted(odd) if not group.startswith(("qk.", "head."))]:
        raise SpecError(
            f"width: {listing(left)}: expected units that a linear or convolutional layer reads, found none to divide; "
            "keep this size, or width='select'"
        )


def _last_norm(module: nn.Module, spec: PermutationSpec) -> dict[str, float]:
    """Tensors of the norm before a last matrix that is tied to the embedding of tokens -> what they are added to."""
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    tied = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)} & tables
    own = {name for name, value in module.named_parameters() if id(value) in tied}
    if not own:
        return {}
    streams = {bare(label) for view in spec.views if view.tensor in own for label in view.labels}
    kinds = _trained.components(module)
    norms = [v.tensor for v in spec.views if kinds[v.tensor] == "norm" and set(map(bare, v.labels)) <= streams]
    path = norms[-1].rpartition(".")[0]
    offset = unit_offset(named_tensors(module), f"{path}.weight")
    return {name: float(offset) if name.endswith("weight") else 0.0 for name in norms if name.startswith(f"{path}.")}


def _zero_branches(module: nn.Module, new: dict[str, np.ndarray], added: Sequence[str]) -> None:
    """Set the last matrices and biases of the residual branches of added blocks to zero, scaled skips to one."""
    parts = [part for kind in ("attention modules", "MLPs") for part in _trained.found_parts(kind, module)]
    named = [names for part in parts for names in (part.parameters, part.bias_parameters)]
    ends = {name for names in named for key in ("o", "fc2") for name in names.get(key, ())} & {*added}
    if left := {*map(block_of, added)} - {*map(block_of, ends)}:
        raise SpecError(
            "depth: expected added blocks with residual branches that end in an output projection or the second layer "
            f"of an MLP, found none in {listing(sorted(left))}; use depth='repeat'"
        )
    for name in added:
        if name in ends or name.endswith(".skip_scale"):
            new[name][...] = 0.0 if name in ends else 1.0
