"""Trained networks as sources: their tensors by the names of a family, components, counterparts and position tables."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.names import listing, matching
from weightscope.anatomy import AttentionPart, NamedTensors, PositionEmbedding, named_tensors, parts_of
from weightscope.anatomy.embedding import TokenGrid
from weightscope.anatomy.places import Place, Source, places, tensors_of
from weightscope.errors import AnatomyError, SpecError, UsageError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
COMPONENTS = ("embedding", "attention", "mlp", "convolution", "norm", "head", "other")
_HEAD = re.compile(r"(^|\.)(heads?|head_dist|classifier|cls_classifier|distillation_classifier|fc|lm_head|score)(\.|$)")
_NORM = re.compile(r"norm|(^|\.)(bn|ln)(_?[0-9a-z]+)?$", re.IGNORECASE)
_TOKEN = re.compile(r"(^|\.)(\w*_token|\w*_tokens|class_embedding)$")
_REPEATED = ("blocks", "block", "layers", "layer", "resblocks", "h")
_KINDS = {"attention modules": "attention", "MLPs": "mlp", "depthwise convolutions": "convolution"}
_KINDS |= dict.fromkeys(("patch embeddings", "position embeddings"), "embedding")


def open_network(source: Any) -> Any:
    """`weightscope.population.open_network`, imported here: it needs h5py, which other initialisers do not."""
    from weightscope.population import open_network

    return open_network(source)


def tensors(source: Any) -> Mapping[str, Any]:
    """Named tensors of a module, a state dict, a checkpoint, the path of one, or a network of a population."""
    return tensors_of(open_network(source))


def fingerprint(source: Any) -> str:
    """16 hex digits of the SHA-256 of the names, shapes, types and values of a source's tensors; see `tensors`."""
    named, digest = tensors(source), hashlib.sha256()
    for name in sorted(named):
        value = named[name]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def weights(module: nn.Module | NamedTensors) -> dict[str, Tensor]:
    """Parameters and floating-point buffers that a module stores by name, tied ones once; or the named tensors."""
    if isinstance(module, NamedTensors):
        return {name: module.get(name) for name in module.names}
    stored, named = module.state_dict().keys(), (*module.named_parameters(), *module.named_buffers())
    return {name: value for name, value in named if value.is_floating_point() and name in stored}


def layers_of(module: Any, *kinds: type[nn.Module]) -> dict[str, Any]:
    """Name of the weight -> the layer, of every layer of some kinds."""
    layers = module.named_modules() if isinstance(module, nn.Module) else ()
    return {f"{path}.weight".lstrip("."): layer for path, layer in layers if isinstance(layer, kinds)}


def found_parts(kind: str, model: Any) -> Sequence[Any]:
    """The parts of a kind of a model, none if some cannot be read."""
    try:
        return parts_of(kind, model if isinstance(model, nn.Module | NamedTensors) else tensors(model))
    except AnatomyError:
        return []


def components(module: nn.Module | NamedTensors) -> dict[str, str]:
    """Name of each parameter and buffer -> its component, one of `COMPONENTS`; without modules, norms are named so."""
    out, tensors = dict[str, str](), named_tensors(module)
    for kind, component in _KINDS.items():
        for part in found_parts(kind, tensors):
            groups = part.parameters.values() if isinstance(part.parameters, Mapping) else [part.parameters]
            names = [name for group in groups for name in group]
            names += [name.removesuffix("weight") + "bias" for name in names if name.endswith("weight")]
            if isinstance(part, AttentionPart):
                names += [name for group in part.bias_parameters.values() for name in group]
            for name in names:
                out.setdefault(name, component)
    layers = dict(module.named_modules()) if isinstance(module, nn.Module) else {}
    for name in tensors.names:
        path = name.rpartition(".")[0]
        if "Norm" in type(layers.get(path)).__name__ or (not layers and _NORM.search(path)):
            out[name] = "norm"
        elif isinstance(layers.get(path), nn.Embedding) or _TOKEN.search(name):
            out.setdefault(name, "embedding")
        out.setdefault(name, "head" if _HEAD.search(path) else "other")
    return out


def chosen(
    module: nn.Module | NamedTensors,
    wanted: str | Sequence[str],
    select: str = "*",
    exclude: str | Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The tensors of the wanted components whose names match the selection and not the exclusion."""
    allowed = COMPONENTS if wanted == "all" else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for component in allowed:
        if component not in COMPONENTS:
            raise UsageError(f"components: expected 'all' or some of {', '.join(COMPONENTS)}, found {component!r}")
    if not allowed:
        raise UsageError("components: expected at least one, found none")
    everything, kinds = weights(module), components(module)
    skipped = [] if exclude is None else matching(exclude, everything, "exclude")
    names = [name for name in matching(select, everything) if kinds[name] in allowed]
    out = {name: everything[name] for name in names if name not in skipped}
    if not out:
        left = (f" that matches select={select!r}" if select != "*" else "") + (
            "" if exclude is None else f" after exclude={exclude!r}"
        )
        raise UsageError(f"components: the module has no tensor of {', '.join(sorted(set(allowed)))}{left}")
    return out


def spaced(large: int, small: int) -> Tensor:
    """`floor(i * large / small)` for i = 0 .. small - 1."""
    return torch.arange(small) * large // small


def end_to_end(large: int, small: int) -> Tensor:
    """`round(i * (large - 1) / (small - 1))` for i = 0 .. small - 1: from the first to the last."""
    return torch.linspace(0, large - 1, small, dtype=torch.float64).round().long()


def counterparts(wanted: Iterable[str], student: Iterable[str], source: Source, rule: str) -> dict[str, Place]:
    """Student tensor -> place in the teacher: the same name, with layer numbers mapped where their numbers differ.

    The rule is "first", "spaced" or "linspace", of a larger teacher, or "repeat", of one with at most as many blocks:
    those of nearest relative depth.
    """
    mine = places(student)
    refuse_prefix(mine, source)
    small, large = layer_numbers(place.name for place in mine.values()), layer_numbers(source.names)
    out, missing = {}, []
    for name in wanted:
        place = Place(_path(name, mine[name].name, small, large, rule), mine[name].part)
        if source.has(place):
            out[name] = place
        else:
            missing.append(name)
    if missing:
        raise SpecError(
            f"the teacher has no counterpart of {listing(missing)}; leave them out with exclude= or components="
        )
    return out


def refuse_prefix(mine: Mapping[str, Place], source: Source) -> None:
    """A SpecError that names what stands before a module's names in all those of a source, if that is why none fit."""
    if any(map(source.has, mine.values())):
        return
    ends = (there.removesuffix(f".{place.name}") for place in mine.values() for there in source.names)
    if prefix := next((start for start in ends if start not in source.names), ""):
        raise SpecError(
            f"the names of the trained network begin with `{prefix}.`, the module's do not; give its tensors without "
            f"this, {{name.removeprefix('{prefix}.'): value for name, value in weightscope.Checkpoint(file).items()}}"
        )


def layer_numbers(names: Iterable[str]) -> dict[str, list[int]]:
    """Path -> the numbers that follow it in any name: `blocks` -> [0, 1, 2]."""
    found: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdecimal():
                found.setdefault(".".join(words[:i]), set()).add(int(word))
    return {path: sorted(numbers) for path, numbers in found.items()}


def _path(name: str, place: str, mine: Mapping[str, list[int]], large: Mapping[str, list[int]], rule: str) -> str:
    """The place of a student's tensor with its layer numbers replaced by the teacher's."""
    here: list[str] = []
    there: list[str] = []
    for word in place.split("."):
        mapped = word
        if word.isdecimal():
            small, big = mine[".".join(here)], large.get(".".join(there), [])
            i = small.index(int(word))
            more, fewer = len(small) > len(big), len(small) < len(big)
            added = more and big and here[-1] in _REPEATED
            if (fewer or (more and not added)) if rule == "repeat" else more:
                size = "smaller network, in blocks only" if rule == "repeat" else "larger network"
                raise SpecError(
                    f"`{name}`: the student has {len(small)} layers in `{'.'.join(here)}`, the teacher {len(big)}; "
                    f"the teacher must be the {size}"
                )
            pick = {"first": torch.arange(len(small)), "spaced": spaced(len(big), len(small))}
            mapped = str(big[int(pick.get(rule, end_to_end(len(big), len(small)))[i])])
        here.append(word)
        there.append(mapped)
    return ".".join(there)


def token_grid(part: PositionEmbedding) -> TokenGrid:
    """The tokens of a position embedding: special ones, then a grid (one row for a sequence)."""
    return TokenGrid(*(part.grid or (1, part.tokens - part.prefix)), part.prefix)


def selected_tokens(name: str, small: TokenGrid, large: TokenGrid) -> Tensor:
    """The rows of a larger position embedding for a smaller one: evenly spaced on the grid, or the first."""
    if small.prefix > large.prefix or small.rows > large.rows or small.columns > large.columns:
        theirs, mine = (f"{grid.prefix} + {grid.rows} x {grid.columns}" for grid in (large, small))
        raise SpecError(
            f"`{name}`: expected at most the teacher's tokens, {theirs}, found {mine}; use positions='interpolate'"
        )
    if large.rows == 1:
        found = torch.arange(small.columns)
    else:
        found = (
            spaced(large.rows, small.rows)[:, None] * large.columns + spaced(large.columns, small.columns)
        ).reshape(-1)
    return torch.cat([torch.arange(small.prefix), found + large.prefix])


def interpolated(name: str, table: Tensor, there: TokenGrid, wanted: TokenGrid) -> Tensor:
    """A position embedding (..., tokens, d) on another grid, smaller or larger, by bicubic interpolation.

    Special tokens are copied; pixels are aligned by their edges and smaller grids are filtered (antialias), as in
    `timm.layers.resample_abs_pos_embed`.
    """
    if wanted.prefix > there.prefix:
        raise SpecError(f"`{name}`: expected at most {there.prefix} special tokens, found {wanted.prefix}")
    special, grid = table[..., : wanted.prefix, :], table[..., there.prefix :, :]
    lead, width = table.shape[:-2], table.shape[-1]
    pictures = grid.reshape(-1, there.rows, there.columns, width).permute(0, 3, 1, 2).float()
    size = (wanted.rows, wanted.columns)
    if size != (there.rows, there.columns):
        pictures = F.interpolate(pictures, size=size, mode="bicubic", antialias=True, align_corners=False)
    tokens = pictures.permute(0, 2, 3, 1).reshape(*lead, wanted.rows * wanted.columns, width)
    return torch.cat([special, tokens.to(table.dtype)], dim=-2)
