"""The parts of a module as its forward pass shows them; those of containers, which have none, by their names."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from weightscope.anatomy import attention_modules, mlp
from weightscope.anatomy.architectures import names as known_names
from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.attention_trace import attentions
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.mlp_trace import mlps
from weightscope.anatomy.running import traces
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, Parts, Place, in_layers
from weightscope.anatomy.traced_rows import shared
from weightscope.anatomy.tracing import Tracer
from weightscope.errors import AnatomyError

Reading = tuple[dict[str, list[Place]], set[str], dict[str, str]]
_KINDS: dict[str, Callable[[ModuleTensors, Tracer, str], Iterator[Place]]] = {"attention": attentions, "mlp": mlps}
_READ: dict[Any, Reading] = {}  # structure of a module -> what was read of it
_FOUND: dict[Any, list[Place]] = {}  # kind, structure and config -> the places of the kind


def read(tensors: ModuleTensors) -> Reading:
    """The parts of each kind that run, or why they are not read; the names of all parameters that were used; the errors
    of modules that could not be run, by path.

    What was read of a module holds for others of the same structure.
    """
    key = tensors.structure
    if key not in _READ:
        if len(_READ) > 100:
            _READ.clear()
        _READ[key] = _read(tensors)
    found, used, failed = _READ[key]
    own = {kind: [_with(place, tensors) for place in places] for kind, places in found.items()}
    return own, used, failed


def _with(place: Place, tensors: Any) -> Place:
    return replace(place, part=place.part and replace(place.part, _tensors=tensors))


def _read(tensors: ModuleTensors) -> Reading:
    found: dict[str, dict[Any, Place]] = {kind: {} for kind in _KINDS}
    used: set[str] = set()
    failed: dict[str, str] = {}
    for path, tracer in traces(tensors.module, "", failed, tensors.example):
        prefix = f"{path}." if path else ""
        used |= {prefix + tracer.names[n] for node in tracer.nodes if node is not None for n in node.parameters}
        masked = _takes_a_mask(tensors.module.get_submodule(path))
        for kind, find in _KINDS.items():
            for place in find(tensors, tracer, prefix):
                if masked and isinstance(place.part, AttentionPart) and place.part.causal is False:
                    place = replace(place, part=replace(place.part, causal=None))
                found[kind].setdefault(_identity(place), place)
    return {kind: [_with(place, None) for place in places.values()] for kind, places in found.items()}, used, failed


def _takes_a_mask(module: nn.Module) -> bool:
    """Whether the caller of a layer decides which tokens are masked; whole models of transformers decide themselves."""
    named = inspect.signature(module.forward).parameters
    return not hasattr(module, "main_input_name") and any("mask" in name or name == "is_causal" for name in named)


def _identity(place: Place) -> Any:
    """Equal for two runs of one part."""
    if place.part is None:
        return place.path, place.why
    return tuple((slot.name, str(slot.rows)) for slot in place.part._weights.values())


def find_attention(tensors: ModuleTensors) -> Parts[AttentionPart]:
    """All attention modules, in order."""
    shows = "no softmax of queries and keys applied to values"
    found = _found(tensors, "attention", lambda: attention_modules.candidates(tensors), shows)
    stated = next((n for key in known_names("heads") if isinstance(n := tensors.config.get(key), int)), None)
    if wrong := [place.part for place in found if place.part and stated not in (None, place.part.heads)]:
        raise AnatomyError(f"`{wrong[0].name}`: config= says {stated} heads, its forward pass has {wrong[0].heads}")
    return in_layers(found, tensors, attention_modules.same_block)


def find_mlps(tensors: NamedTensors) -> Parts[MLPPart]:
    """All MLPs, in order; of a file by their names."""
    if not isinstance(tensors, ModuleTensors):
        return mlp.find(tensors)
    shows = "no function of each unit between two linear maps, of which the second returns to the stream"
    found = _found(tensors, "mlp", lambda: [Place(part.name, part) for part in mlp.find(tensors)], shows)
    return in_layers(found, tensors)


def _found(tensors: ModuleTensors, kind: str, named: Callable[[], list[Place]], shows: str) -> list[Place]:
    """The places of a kind in the model's order, and what has known names and is no such part, or never ran.

    They hold for others of the same structure, as in `read`.
    """
    key = kind, tensors.structure, repr(tensors.config)
    if key not in _FOUND:
        if len(_FOUND) > 100:
            _FOUND.clear()
        _FOUND[key] = [_with(place, None) for place in _ordered(tensors, kind, named(), shows)]
    return [_with(place, tensors) for place in _FOUND[key]]


def _ordered(tensors: ModuleTensors, kind: str, named: Iterable[Place], shows: str) -> list[Place]:
    found, used, failed = read(tensors)
    every = found[kind]
    places = [place for place in every if place.part or place.why]
    seen = {slot.name for place in places if place.part for slot in place.part._weights.values()}
    for known in named:
        part = known.part
        own = {slot.name for slot in part._weights.values()} if part else set()
        own = own or {f"{known.path}.{name}".lstrip(".") for name in tensors.under(known.path)}
        name = next(iter(part._weights.values())).name if part else known.name
        if not own & used and (path := _with_code(tensors, own)) is None:
            places.append(replace(known, name=name))
        elif not own & used:
            said = f": {failed[path]}" if path in failed else ""
            why = f"(`{path}` could not be run on random inputs{said}; give the model an attribute example_input_array)"
            places.append(Place(known.path, None, why, name, sure=True))
        elif not own & seen and not any(place.path == known.path for place in every):
            places.append(Place(known.path, None, f"(its forward pass shows {shows})", name, sure=True))
    order = {name: i for i, name in enumerate(tensors.every)}
    return sorted(places, key=lambda place: order.get(place.name, len(order)))


def _with_code(tensors: ModuleTensors, names: Iterable[str]) -> str | None:
    """The path of the smallest module with a forward pass that has all these parameters."""
    words = shared(name.split(".")[:-1] for name in names)
    paths = [".".join(words[:end]) for end in range(len(words), -1, -1)]
    coded = (p for p in paths if type(tensors.module.get_submodule(p)).forward is not nn.Module.forward)
    return next(coded, None)
