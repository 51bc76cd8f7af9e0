"""Weight selection: initialise a small network with a subset of the weights of a larger one of the same family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import named_tensors
from weightscope.anatomy.places import Source
from weightscope.errors import SpecError
from weightscope.init import _trained
from weightscope.init.base import INITIALISERS, Generator, M, permutation, put

LAYERS = ("first", "spaced", "linspace")
ELEMENTS = ("uniform", "linspace", "consecutive", "random", "random-inconsistent", "l1", "magnitude")
POSITIONS = ("select", "interpolate")
_DEFAULT = ("embedding", "attention", "mlp", "convolution", "norm", "other")


@INITIALISERS.register("select_weights", source="selection paper", needs="a larger network of the same family")
def select_weights_(
    module: M,
    teacher: Any,
    *,
    layers: str = "first",
    elements: str = "uniform",
    components: str | Sequence[str] = _DEFAULT,
    exclude: str | Sequence[str] | None = None,
    positions: str = "select",
    generator: Generator = None,
) -> M:
    """Initialise a network with selected layers and selected elements of a larger one.

    Layers: "first" selects the first N (of every stage, in hierarchical networks); "spaced" selects
    `floor(i * T / N)`; "linspace" spaces them from the first to the last. Elements, along every axis that is smaller
    in the student (t -> s):

        uniform               floor(i * t / s), from all heads alike
        linspace              evenly from the first to the last
        consecutive           the first s: whole heads
        random                one random set for each pair (t, s) of sizes, the same in all tensors
        random-inconsistent   a random set for every axis of every tensor
        l1                    the slices of largest L1 norm, tensor by tensor (structured pruning)
        magnitude             the largest entries, in the smaller shape (unstructured pruning)

    The first four select the same indices in every tensor that reads or writes one residual stream. Queries, keys and
    values in one tensor (and gates with the layers that they gate) are selected separately. Position embeddings of
    images are selected by rows and columns of the grid, those of sequences from the start, unless interpolated.

    Tensors are matched by name, those of Hugging Face's transformers with timm's (and ours), 1 x 1 convolutions with
    linear layers.

    Args:
        module: the student, changed in place: parameters and floating-point buffers of the components.
        teacher: see `source` of `weightscope.init`.
        components: by default all but the head, since the classes rarely agree.
        exclude: shell patterns of student tensors to leave unchanged, comma-separated or a sequence.
        positions: "select", or "interpolate" to another grid (bicubic, as in timm) before channels are selected.

    Raises:
        SpecError: if a tensor has no counterpart, another number of axes, a larger size or another filter size.

    Source: selection paper, sections 3.1, 3.2 (Algorithm 1), Tables 2, 5 and 6.

    Example:
        >>> select_weights_(vit_tiny, vit_small, generator=torch.Generator().manual_seed(0))
    """
    choice("layers", layers, LAYERS)
    choice("elements", elements, ELEMENTS)
    choice("positions", positions, POSITIONS)
    options: dict[str, Any] = {"layers": layers, "components": components, "exclude": exclude, "positions": positions}
    pairs = matched(module, teacher, **options)
    selection = Selection(elements, generator)
    for pair, value in [(pair, selection.select(pair)) for pair in pairs]:
        put(pair.value, value)
    return module


@dataclass(frozen=True)
class Pair:
    """A tensor of the student and its counterpart in the teacher."""

    name: str  # of the student's
    value: Tensor  # the student's
    teacher: Tensor  # the teacher's with the student's positions, and no axis shorter than the student's
    blocks: int  # number of matrices (queries, keys, values) that the tensors pack along `packed`
    packed: int  # the axis


def matched(
    student: Any,
    teacher: Any,
    *,
    layers: str = "first",
    components: str | Sequence[str] = _DEFAULT,
    exclude: str | Sequence[str] | None = None,
    positions: str = "select",
) -> Iterator[Pair]:
    """The pairs of tensors from which `select_weights_` selects elements; arguments and errors as there."""
    wanted = _trained.chosen(student, components, exclude=exclude)
    teacher = _trained.open_network(teacher)
    source, (blocks, uneven) = Source(_trained.tensors(teacher)), _packed(student)
    filters = _trained.layers_of(student, *_trained.CONVOLUTIONS)
    tables = (_trained.found_parts("position embeddings", model) for model in (student, teacher))
    mine, theirs = ({table.name: _trained.token_grid(table) for table in some} for some in tables)
    theirs = {source.places[name].name: grid for name, grid in theirs.items()}
    for name, place in _trained.counterparts(wanted, _trained.weights(student), source, layers).items():
        shape = tuple(wanted[name].shape)
        tensor = source.read(place, shape)
        if tensor.ndim == len(shape) and name in mine and place.name in theirs:
            grids = mine[name], theirs[place.name]
            if grids[0] != grids[1] and positions == "interpolate":
                tensor = _trained.interpolated(name, tensor, *grids[::-1])
            elif grids[0] != grids[1]:
                tensor = tensor.index_select(tensor.ndim - 2, _trained.selected_tokens(name, *grids))
        large = tuple(tensor.shape)
        if len(large) != len(shape) or any(s > t for s, t in zip(shape, large, strict=True)):
            raise SpecError(
                f"`{name}`: expected at most the teacher's shape {large}, found {shape}; is the student larger?"
            )
        if name in filters and shape[2:] != large[2:]:
            raise SpecError(
                f"`{name}`: filters of {shape[2:]} cannot be selected from {large[2:]}; leave it out with exclude="
            )
        if shape != large and name in uneven:
            raise SpecError(
                f"`{name}` packs queries, keys and values head by head or in unequal blocks; leave it out with exclude="
            )
        packed = max(range(min(2, len(shape))), key=shape.__getitem__, default=0)  # the axis of 3 d, not that of d
        yield Pair(name, wanted[name], tensor, blocks.get(name, 1), packed)


def _packed(student: Any) -> tuple[dict[str, int], set[str]]:
    """Tensors that pack several matrices, with their number, and those of which these are not equal blocks of rows."""
    blocks, uneven, layers = dict[str, int](), set[str](), _trained.found_parts("attention modules", student)
    for part in layers:
        if (name := _uneven(part, student)) is not None:
            uneven |= {name, name.removesuffix("weight") + "bias"}
    for part in [*layers, *_trained.found_parts("MLPs", student)]:
        for named in (part.parameters, part.bias_parameters):
            inner = [group[0] for key, group in named.items() if key not in ("o", "fc2")]
            blocks |= {name: inner.count(name) for name in inner if inner.count(name) > 1}
    return blocks, uneven


def _uneven(part: Any, student: Any) -> str | None:
    """The tensor of a part that packs queries, keys and values, unless as three equal blocks of rows; else None."""
    (name,), inputs = part.parameters["q"], part.read("q").shape[1]
    sharing = [key for key in "kv" if part.parameters[key] == (name,)]
    if not sharing:
        return None
    tensor = named_tensors(student).get(name).float()
    blocks = (tensor if tensor.shape[1] == inputs else tensor.T).chunk(1 + len(sharing))
    query = part.read("q").mT.reshape(-1, inputs).to(tensor)
    return None if part.heads == part.kv_heads and torch.equal(blocks[0], query) else name


class Selection:
    """Selects indices along the axes of tensors, by one of the rules in `ELEMENTS`."""

    def __init__(self, rule: str, generator: Generator) -> None:
        self.rule, self.generator = rule, generator
        self.kept: dict[tuple[int, int], Tensor] = {}

    def select(self, pair: Pair) -> Tensor:
        """The selected elements of the teacher's tensor, in the shape of the student's."""
        tensor, shape = pair.teacher, tuple(pair.value.shape)
        if self.rule == "magnitude":
            flat = tensor.reshape(-1)
            return flat[flat.abs().topk(pair.value.numel()).indices.sort().values].reshape(shape)
        picks = [self._axis(tensor, i, n, pair.blocks if i == pair.packed else 1) for i, n in enumerate(shape)]
        for i, pick in enumerate(picks):
            tensor = tensor if pick is None else tensor.index_select(i, pick)
        return tensor

    def _axis(self, tensor: Tensor, axis: int, small: int, blocks: int) -> Tensor | None:
        """The selected indices of one axis of the teacher's tensor; None for all."""
        large = tensor.shape[axis]
        if large == small:
            return None
        picks = (self._indices(piece, axis, small // blocks) for piece in tensor.chunk(blocks, dim=axis))
        return torch.cat([pick + large // blocks * i for i, pick in enumerate(picks)])

    def _indices(self, tensor: Tensor, axis: int, small: int) -> Tensor:
        large = tensor.shape[axis]
        if self.rule == "uniform":
            return _trained.spaced(large, small)
        if self.rule == "linspace":
            return _trained.end_to_end(large, small)
        if self.rule == "consecutive":
            return torch.arange(small)
        if self.rule == "l1":
            norms = tensor.float().abs().transpose(0, axis).reshape(large, -1).sum(1)
            return norms.topk(small).indices.sort().values
        if self.rule == "random-inconsistent":
            return permutation(large, self.generator)[:small].sort().values
        if (large, small) not in self.kept:
            self.kept[large, small] = permutation(large, self.generator)[:small].sort().values
        return self.kept[large, small]
