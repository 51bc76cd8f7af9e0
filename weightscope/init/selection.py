"""Weight selection: start a small network from some of the weights of a larger one of the same family."""

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

LAYERS = ("first", "spaced", "linspace")
ELEMENTS = ("uniform", "linspace", "consecutive", "random", "random-inconsistent", "l1", "magnitude")
_DEFAULT = ("embedding", "attention", "mlp", "convolution", "norm", "other")


def spaced(large: int, small: int) -> Tensor:
    """`floor(i * large / small)` for i = 0 .. small - 1: of 4, the 1st and 3rd; of 6, the 1st, 3rd and 5th."""
    return torch.arange(small) * large // small


def end_to_end(large: int, small: int) -> Tensor:
    """`round(i * (large - 1) / (small - 1))`: from the first to the last, as public code often does."""
    return torch.linspace(0, large - 1, small, dtype=torch.float64).round().long()


def squeezed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The entries of largest magnitude, in their order, filled into a smaller shape (unstructured pruning)."""
    flat = tensor.reshape(-1)
    size = int(torch.Size(shape).numel())
    kept = flat.abs().topk(size).indices.sort().values
    return flat[kept].reshape(tuple(shape))


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
    """Fill a network with chosen layers and chosen elements of a larger one.

    Layers: "first" takes the first N (of every stage, in hierarchical networks); "spaced" takes
    `floor(i * T / N)`; "linspace" spaces them from the first to the last. Elements, along every axis that is
    smaller in the student (t -> s):

        uniform               floor(i * t / s), from all heads alike
        linspace              evenly from the first to the last
        consecutive           the first s: whole heads
        random                one random set for each pair (t, s) of sizes, the same in all tensors
        random-inconsistent   a random set for every axis of every tensor
        l1                    the slices of largest L1 norm, tensor by tensor (structured pruning)
        magnitude             the largest entries, squeezed into the smaller shape (unstructured pruning)

    The first four choose the same indices for every tensor that reads or writes one residual stream. Queries, keys
    and values that are stored in one tensor (and gates with the layers that they gate) are selected one by one.
    Position tables of images are selected by rows and columns of the grid, those of sequences from the start.

    Args:
        module: the student, changed in place: parameters and floating-point buffers of the components.
        teacher: a module, a mapping of tensors, a checkpoint, or the path of one.
        layers: "first", "spaced" or "linspace".
        elements: one of the seven above.
        components: "all", or some of "embedding", "attention", "mlp", "convolution", "norm", "head", "other"; all
            but the head by default, since classes rarely agree.
        exclude: shell patterns of student tensors to leave alone, separated by commas.
        generator: of the CPU; None for torch's global one.

    Raises:
        SpecError: if a tensor has no counterpart, has another number of axes, is larger than its counterpart, or is
            a filter of another size.
        UsageError: if an argument cannot be meant, or nothing is selected.

    Source: selection paper, sections 3.1, 3.2 (Algorithm 1), Tables 2, 5 and 6.

    Example:
        >>> select_weights_(vit_tiny, vit_small, generator=torch.Generator().manual_seed(0))
    """
    choice("layers", layers, LAYERS)
    choice("elements", elements, ELEMENTS)
    allowed = _trained.chosen_components(components)
    student = _trained.weights(module)
    kinds = _trained.components(module)
    skipped = [p.strip() for p in exclude.split(",")] if exclude is not None else []
    wanted = {
        name: value
        for name, value in student.items()
        if kinds[name] in allowed and not any(fnmatchcase(name, p) for p in skipped)
    }
    if not wanted:
        raise UsageError(f"nothing of the module is in {sorted(allowed)} and not in {exclude!r}")
    source = _trained.tensors(teacher)
    counterpart = _counterparts(wanted, student, source, layers)
    chooser = _Chooser(elements, cpu_generator(generator))
    layout = _Layout(module, teacher)
    chosen = {
        name: chooser.select(name, torch.as_tensor(source[counterpart[name]]).cpu(), tuple(value.shape), layout)
        for name, value in wanted.items()
    }
    for name, value in chosen.items():
        put(wanted[name], value)
    return module


def _counterparts(
    wanted: Mapping[str, Tensor], student: Mapping[str, Tensor], source: Mapping[str, Any], rule: str
) -> dict[str, str]:
    """Student tensor -> teacher tensor: the same name, with the numbers of layers mapped where the teacher has more.

    Raises:
        SpecError: if there is none, or the student has more layers.
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
            f"the teacher has no counterpart of {listing(missing)}; leave them out by exclude= or components="
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
    here: list[str] = []
    there: list[str] = []
    for word in name.split("."):
        mapped = word
        if word.isdigit():
            small, big = mine[".".join(here)], large.get(".".join(there), [])
            if len(small) > len(big):
                raise SpecError(
                    f"`{name}`: the student has {len(small)} layers in `{'.'.join(here)}`, the teacher {len(big)}; "
                    "weights are selected from a larger network"
                )
            pick = {"first": torch.arange(len(small)), "spaced": spaced(len(big), len(small))}
            order = pick.get(rule, end_to_end(len(big), len(small)))
            mapped = str(big[int(order[small.index(int(word))])])
        here.append(word)
        there.append(mapped)
    return ".".join(there)


@dataclass(frozen=True)
class _Table:
    """TokenGrid of a position table: special ones, then a grid (or a sequence, one row)."""

    prefix: int
    rows: int
    columns: int


class _Layout:
    """What the shapes do not tell: tensors that hold several matrices, and the grids of position tables."""

    def __init__(self, student: nn.Module, teacher: Any) -> None:
        self.blocks: dict[str, int] = {}
        self.uneven: set[str] = set()
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.filters = {f"{n}.weight".lstrip(".") for n, m in student.named_modules() if isinstance(m, convolutions)}
        for part in _found(attention, student):
            for named in (part.parameters, part.bias_parameters):
                of_qkv = [group[0] for key, group in named.items() if key != "o"]
                self.blocks |= {name: of_qkv.count(name) for name in of_qkv if of_qkv.count(name) > 1}
            if (name := _uneven(part, student)) is not None:
                self.uneven |= {name, name.removesuffix("weight") + "bias"}
        for part in _found(mlps, student):
            for named in (part.names, part.bias_names):
                firsts = [group[0] for key, group in named.items() if key != "fc2"]
                self.blocks |= {name: firsts.count(name) for name in firsts if firsts.count(name) > 1}
        self.tables = {p.name: _table(p) for p in _found(positions, student)}
        self.larger = {unwrapped(p.name): _table(p) for p in _found(positions, teacher)}


def _uneven(part: Any, student: nn.Module) -> str | None:
    """The tensor of a part that packs queries, keys and values other than as equal blocks, one below the other."""
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


class _Chooser:
    """Which indices of which axis, by one of the rules."""

    def __init__(self, rule: str, generator: torch.Generator | None) -> None:
        self.rule, self.generator = rule, generator
        self.kept: dict[tuple[int, int], Tensor] = {}

    def select(self, name: str, tensor: Tensor, shape: tuple[int, ...], layout: _Layout) -> Tensor:
        """The part of a teacher's tensor that fills a student's tensor of the shape."""
        large = tuple(tensor.shape)
        if len(large) != len(shape) or any(s > t for s, t in zip(shape, large, strict=True)):
            raise SpecError(f"`{name}`: expected at most the teacher's {large}, found {shape}; is the student larger?")
        if name in layout.filters and shape[2:] != large[2:]:
            raise SpecError(
                f"`{name}`: filters of {shape[2:]} cannot be selected from {large[2:]}; leave it out by exclude="
            )
        if shape != large and name in layout.uneven:
            raise SpecError(
                f"`{name}` packs queries, keys and values head by head or unevenly; leave it out by exclude="
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
        """Indices of one axis of the teacher's tensor; None to keep it whole."""
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
    """Rows of a larger position table for the tokens of a smaller one: evenly spaced on the grid, or the first."""
    if small.prefix > large.prefix or small.rows > large.rows or small.columns > large.columns:
        raise SpecError(f"`{name}`: expected a grid of at most {large.rows} x {large.columns} tokens, found {small}")
    if large.rows == 1:
        places = torch.arange(small.columns)
    else:
        places = (
            spaced(large.rows, small.rows)[:, None] * large.columns + spaced(large.columns, small.columns)
        ).reshape(-1)
    return torch.cat([torch.arange(small.prefix), places + large.prefix])
