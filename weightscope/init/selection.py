"""Weight selection: initialise a small network with a subset of the weights of a larger one of the same family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope._util.names import listing, unwrapped
from weightscope.anatomy import attention, mlps, positions
from weightscope.errors import AnatomyError, SpecError, UsageError
from weightscope.init import _trained
from weightscope.init._common import M, cpu_generator, put
from weightscope.init.registry import INITIALISERS

LAYERS = ("first", "spaced", "linspace")
ELEMENTS = ("uniform", "linspace", "consecutive", "random", "random-inconsistent", "l1", "magnitude")
_DEFAULT = ("embedding", "attention", "mlp", "convolution", "norm", "other")


def spaced(large: int, small: int) -> Tensor:
    """`floor(i * large / small)` for i = 0 .. small - 1."""
    return torch.arange(small) * large // small


def end_to_end(large: int, small: int) -> Tensor:
    """`round(i * (large - 1) / (small - 1))` for i = 0 .. small - 1: from the first to the last."""
    return torch.linspace(0, large - 1, small, dtype=torch.float64).round().long()


def squeezed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The entries of largest magnitude, in their order, in a smaller shape (unstructured pruning)."""
    flat = tensor.reshape(-1)
    size = int(torch.Size(shape).numel())
    kept = flat.abs().topk(size).indices.sort().values
    return flat[kept].reshape(tuple(shape))


@INITIALISERS.register("select_weights", source="selection paper", needs="a larger network of the same family")
def select_weights_(
    module: M,
    teacher: Any,
    *,
    layers: str = "first",
    elements: str = "uniform",
    components: str | Sequence[str] = _DEFAULT,
    exclude: str | None = None,
    generator: torch.Generator | None = None,
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
    images are selected by rows and columns of the grid, those of sequences from the start.

    Args:
        module: the student, changed in place: parameters and floating-point buffers of the components.
        teacher: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.
        layers: "first", "spaced" or "linspace".
        elements: one of the seven above.
        components: "all", or some of "embedding", "attention", "mlp", "convolution", "norm", "head", "other"; by
            default all but the head, since the classes rarely agree.
        exclude: shell patterns of student tensors to leave unchanged, comma-separated.
        generator: a CPU generator; None for torch's global one.

    Raises:
        SpecError: if a tensor has no counterpart, another number of axes, a larger size or another filter size.
        UsageError: if an argument is invalid, or nothing is selected.

    Source: selection paper, sections 3.1, 3.2 (Algorithm 1), Tables 2, 5 and 6.

    Example:
        >>> select_weights_(vit_tiny, vit_small, generator=torch.Generator().manual_seed(0))
    """
    choice("layers", layers, LAYERS)
    choice("elements", elements, ELEMENTS)
    student = _trained.weights(module)
    wanted = _included(module, student, components, exclude)
    source, layout = _trained.tensors(teacher), _Layout(module, teacher)
    selection = _Selection(elements, cpu_generator(generator))
    selected = {
        name: selection.select(name, torch.as_tensor(source[other]).cpu(), tuple(wanted[name].shape), layout)
        for name, other in _counterparts(wanted, student, source, layers).items()
    }
    for name, value in selected.items():
        put(wanted[name], value)
    return module


def _included(
    module: nn.Module, student: Mapping[str, Tensor], components: str | Sequence[str], exclude: str | None
) -> dict[str, Tensor]:
    """The student's tensors of the components that are not excluded.

    Raises:
        UsageError: if there are none.
    """
    allowed, kinds = _trained.chosen_components(components), _trained.components(module)
    skipped = [p.strip() for p in exclude.split(",")] if exclude is not None else []
    out = {
        name: value
        for name, value in student.items()
        if kinds[name] in allowed and not any(fnmatchcase(name, p) for p in skipped)
    }
    if not out:
        left = "" if exclude is None else f" after exclude={exclude!r}"
        raise UsageError(f"components: the module has no tensor of {', '.join(sorted(allowed))}{left}")
    return out


def _counterparts(
    wanted: Mapping[str, Tensor], student: Mapping[str, Tensor], source: Mapping[str, Any], rule: str
) -> dict[str, str]:
    """Student tensor -> teacher tensor: the same name, with layer numbers mapped where the teacher has more layers.

    Raises:
        SpecError: if the teacher has no such tensor, or the student has more layers.
    """
    theirs = {unwrapped(name): name for name in source}
    mine, large = _numbered(map(unwrapped, student)), _numbered(theirs)
    out = {}
    missing = []
    for name in wanted:
        path = _path(unwrapped(name), mine, large, rule)
        if path not in theirs:
            missing.append(name)
        else:
            out[name] = theirs[path]
    if missing:
        raise SpecError(
            f"the teacher has no counterpart of {listing(missing)}; leave them out with exclude= or components="
        )
    return out


def _numbered(names: Any) -> dict[str, list[int]]:
    """Path -> the numbers that follow it in any name: `blocks` -> [0, 1, 2]."""
    found: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdigit():
                found.setdefault(".".join(words[:i]), set()).add(int(word))
    return {path: sorted(numbers) for path, numbers in found.items()}


def _path(name: str, mine: Mapping[str, list[int]], large: Mapping[str, list[int]], rule: str) -> str:
    """A student tensor's name with its layer numbers replaced by the teacher's."""
    here: list[str] = []
    there: list[str] = []
    for word in name.split("."):
        mapped = word
        if word.isdigit():
            small, big = mine[".".join(here)], large.get(".".join(there), [])
            if len(small) > len(big):
                raise SpecError(
                    f"`{name}`: the student has {len(small)} layers in `{'.'.join(here)}`, the teacher {len(big)}; "
                    "the teacher must be the larger network"
                )
            pick = {"first": torch.arange(len(small)), "spaced": spaced(len(big), len(small))}
            order = pick.get(rule, end_to_end(len(big), len(small)))
            mapped = str(big[int(order[small.index(int(word))])])
        here.append(word)
        there.append(mapped)
    return ".".join(there)


@dataclass(frozen=True)
class _Table:
    """The tokens of a position embedding: special ones, then a grid (one row for a sequence)."""

    prefix: int
    rows: int
    columns: int


class _Layout:
    """What shapes alone do not show: tensors that pack several matrices, and the grids of position embeddings."""

    def __init__(self, student: nn.Module, teacher: Any) -> None:
        self.blocks: dict[str, int] = {}
        self.uneven: set[str] = set()
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.filters = {f"{n}.weight".lstrip(".") for n, m in student.named_modules() if isinstance(m, convolutions)}
        layers = _found(attention, student)
        for part in layers:
            if (name := _uneven(part, student)) is not None:
                self.uneven |= {name, name.removesuffix("weight") + "bias"}
        for part in [*layers, *_found(mlps, student)]:
            for named in (part.parameters, part.bias_parameters):
                inner = [group[0] for key, group in named.items() if key not in ("o", "fc2")]
                self.blocks |= {name: inner.count(name) for name in inner if inner.count(name) > 1}
        self.tables = {p.name: _table(p) for p in _found(positions, student)}
        self.larger = {unwrapped(p.name): _table(p) for p in _found(positions, teacher)}


def _uneven(part: Any, student: nn.Module) -> str | None:
    """The tensor of a part that packs queries, keys and values, unless as three equal blocks of rows; else None."""
    (name,), inputs = part.parameters["q"], part.read("q").shape[1]
    sharing = [key for key in "kv" if part.parameters[key] == (name,)]
    if not sharing:
        return None
    tensor = student.state_dict()[name].float()
    blocks = (tensor if tensor.shape[1] == inputs else tensor.T).chunk(1 + len(sharing))
    query = part.read("q").mT.reshape(-1, inputs).to(tensor)
    return None if part.heads == part.kv_heads and torch.equal(blocks[0], query) else name


def _found(finder: Any, model: Any) -> list[Any]:
    try:
        return finder(model if isinstance(model, nn.Module) else _trained.tensors(model))
    except AnatomyError:
        return []


def _table(part: Any) -> _Table:
    return _Table(part.prefix, *(part.grid or (1, part.tokens - part.prefix)))


class _Selection:
    """Selects indices along the axes of tensors, by one of the rules in `ELEMENTS`."""

    def __init__(self, rule: str, generator: torch.Generator | None) -> None:
        self.rule, self.generator = rule, generator
        self.kept: dict[tuple[int, int], Tensor] = {}

    def select(self, name: str, tensor: Tensor, shape: tuple[int, ...], layout: _Layout) -> Tensor:
        """The selected elements of a teacher's tensor, in the shape of the student's."""
        large = tuple(tensor.shape)
        if len(large) != len(shape) or any(s > t for s, t in zip(shape, large, strict=True)):
            raise SpecError(
                f"`{name}`: expected at most the teacher's shape {large}, found {shape}; is the student larger?"
            )
        if name in layout.filters and shape[2:] != large[2:]:
            raise SpecError(
                f"`{name}`: filters of {shape[2:]} cannot be selected from {large[2:]}; leave it out with exclude="
            )
        if shape != large and name in layout.uneven:
            raise SpecError(
                f"`{name}` packs queries, keys and values head by head or in unequal blocks; leave it out with exclude="
            )
        table, bigger = layout.tables.get(name), layout.larger.get(unwrapped(name))
        tokens = None
        if table is not None and bigger is not None and table != bigger:
            tokens = _tokens(name, table, bigger)
            tensor = tensor.index_select(len(shape) - 2, tokens)
        if self.rule == "magnitude":
            return squeezed(tensor, shape)
        blocks = layout.blocks.get(name, 1)
        packed = max(range(min(2, len(shape))), key=shape.__getitem__, default=0)  # the axis of 3 d, not that of d
        picks = [self._axis(tensor, i, n, blocks if i == packed else 1) for i, n in enumerate(shape)]
        for i, pick in enumerate(picks):
            tensor = tensor if pick is None else tensor.index_select(i, pick)
        return tensor

    def _axis(self, tensor: Tensor, axis: int, small: int, blocks: int) -> Tensor | None:
        """The selected indices of one axis of the teacher's tensor; None for all."""
        large = tensor.shape[axis]
        if large == small:
            return None
        if blocks > 1:
            pieces = tensor.chunk(blocks, dim=axis)
            starts = [large // blocks * i for i in range(blocks)]
            picks = [self._indices(piece, axis, small // blocks) for piece in pieces]
            return torch.cat([pick + start for pick, start in zip(picks, starts, strict=True)])
        return self._indices(tensor, axis, small)

    def _indices(self, tensor: Tensor, axis: int, small: int) -> Tensor:
        large = tensor.shape[axis]
        if self.rule == "uniform":
            return spaced(large, small)
        if self.rule == "linspace":
            return end_to_end(large, small)
        if self.rule == "consecutive":
            return torch.arange(small)
        if self.rule == "l1":
            norms = tensor.float().abs().transpose(0, axis).flatten(1).sum(1) if tensor.ndim > 1 else tensor.abs()
            return norms.topk(small).indices.sort().values
        if self.rule == "random-inconsistent":
            return torch.randperm(large, generator=self.generator)[:small].sort().values
        if (large, small) not in self.kept:
            self.kept[large, small] = torch.randperm(large, generator=self.generator)[:small].sort().values
        return self.kept[large, small]


def _tokens(name: str, small: _Table, large: _Table) -> Tensor:
    """The rows of a larger position embedding for a smaller one: evenly spaced on the grid, or the first."""
    if small.prefix > large.prefix or small.rows > large.rows or small.columns > large.columns:
        raise SpecError(f"`{name}`: expected at most the teacher's tokens {large}, found {small}")
    if large.rows == 1:
        places = torch.arange(small.columns)
    else:
        places = (
            spaced(large.rows, small.rows)[:, None] * large.columns + spaced(large.columns, small.columns)
        ).reshape(-1)
    return torch.cat([torch.arange(small.prefix), places + large.prefix])
