"""The parts of a module as its forward pass shows them, and what is only called like one."""

import inspect
from collections.abc import Callable, Iterator
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
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, Parts, Place, in_layers, resembling
from weightscope.anatomy.tracing import Tracer
from weightscope.errors import AnatomyError

Reading = tuple[dict[str, list[Place]], set[str], dict[str, str]]
_KINDS: dict[str, Callable[[ModuleTensors, Tracer, str], Iterator[Place]]] = {"attention": attentions, "mlp": mlps}
_READ: dict[Any, Reading] = {}  # structure of a module -> what was read of it


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
    found = _places(tensors, "attention", attention_modules.owner, shows)
    stated = next((n for key in known_names("heads") if isinstance(n := tensors.config.get(key), int)), None)
    if wrong := [place.part for place in found if place.part and stated not in (None, place.part.heads)]:
        raise AnatomyError(f"`{wrong[0].name}`: config= says {stated} heads, its forward pass has {wrong[0].heads}")
    return in_layers(found, tensors, attention_modules.same_block)


def find_mlps(tensors: NamedTensors) -> Parts[MLPPart]:
    """All MLPs, in order; of a file by their names."""
    if not isinstance(tensors, ModuleTensors):
        return mlp.find(tensors)
    shows = "no function of each unit between two linear maps, of which the second returns to the stream"
    return in_layers(_places(tensors, "mlp", mlp.owner, shows), tensors)


def _places(tensors: ModuleTensors, kind: str, owner: Callable[[str], str | None], shows: str) -> list[Place]:
    """The places of a kind in the model's order, and the modules that are called like it and are no such part."""
    found, used, failed = read(tensors)
    places = [place for place in found[kind] if place.part or place.why]
    for path, names in resembling(tensors, found[kind], owner).items():
        why = f"(its forward pass shows {shows})"
        if not used.intersection(names):
            words = path.split(".")
            coded = next((p for n in range(len(words), -1, -1) if _has_code(tensors, p := ".".join(words[:n]))), path)
            said = f" on random inputs: {failed[coded]}" if coded in failed else " on random inputs"
            why = f"(`{coded}` could not be run{said}; give the model an attribute example_input_array)"
        places.append(Place(path, None, why, names[0], sure=True))
    order = {name: i for i, name in enumerate(tensors.every)}
    return sorted(places, key=lambda place: order.get(place.name, len(order)))


def _has_code(tensors: ModuleTensors, path: str) -> bool:
    return type(tensors.module.get_submodule(path)).forward is not nn.Module.forward
