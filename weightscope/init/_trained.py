"""Sources of trained weights, and the component of a network to which each tensor belongs."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightscope.anatomy import (
    AttentionPart,
    NamedTensors,
    attention,
    depthwise,
    mlps,
    patch_embeddings,
    positions,
)
from weightscope.errors import AnatomyError, UsageError

COMPONENTS = ("embedding", "attention", "mlp", "convolution", "norm", "head", "other")
_HEAD = re.compile(r"(^|\.)(heads?|head_dist|classifier|cls_classifier|distillation_classifier|fc|lm_head|score)(\.|$)")
_NORM = re.compile(r"norm|(^|\.)(bn|ln)(_?[0-9a-z]+)?$", re.IGNORECASE)
_TOKEN = re.compile(r"(^|\.)(\w*_token|\w*_tokens|class_embedding)$")


def open_network(source: Any) -> Any:
    """`weightscope.population.open_network`, imported here: it needs h5py, which other initialisers do not."""
    from weightscope.population import open_network

    return open_network(source)


def tensors(source: Any) -> Mapping[str, Any]:
    """Named tensors of a module, a state dict, a checkpoint, the path of one, or a network of a population.

    Raises:
        UsageError: for anything else.
    """
    model = open_network(source)
    if isinstance(model, nn.Module):
        return model.state_dict()
    if isinstance(model, Mapping):
        return model
    raise UsageError(f"expected a module, a mapping of tensors, or a path, found {type(source).__name__}")


def fingerprint(source: Any) -> str:
    """16 hex digits of the SHA-256 of the names, shapes, types and values of a source's tensors; see `tensors`."""
    named, digest = tensors(source), hashlib.sha256()
    for name in sorted(named):
        value = named[name]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def weights(module: nn.Module | NamedTensors) -> dict[str, Tensor]:
    """Parameters and floating-point buffers of a module by name, tied ones once; or the named tensors."""
    if isinstance(module, NamedTensors):
        return {name: module.get(name) for name in module.names}
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_floating_point() and id(value) not in seen:
            seen.add(id(value))
            out[name] = value
    persistent = module.state_dict().keys()
    return {name: value for name, value in out.items() if name in persistent}


def components(module: nn.Module | NamedTensors) -> dict[str, str]:
    """Name of each parameter and buffer -> its component, one of `COMPONENTS`; without modules, norms are named so."""
    out: dict[str, str] = {}
    for kind, found in _anatomical(module):
        for name in found:
            out.setdefault(name, kind)
    named = isinstance(module, NamedTensors)
    layers: dict[str, nn.Module] = {}
    names: Sequence[str] = ()
    if isinstance(module, NamedTensors):
        names = module.names
    else:
        layers = dict(module.named_modules())
        names = (*dict(module.named_parameters()), *dict(module.named_buffers()))
    for name in names:
        path = name.rpartition(".")[0]
        kind = type(layers.get(path)).__name__
        if "Norm" in kind or (named and _NORM.search(path)):
            out[name] = "norm"
        elif isinstance(layers.get(path), nn.Embedding) or _TOKEN.search(name):
            out.setdefault(name, "embedding")
        elif _HEAD.search(path):
            out.setdefault(name, "head")
        out.setdefault(name, "other")
    return out


def _anatomical(module: nn.Module | NamedTensors) -> list[tuple[str, list[str]]]:
    """(component, tensor names) of each part of the anatomy; a bias has the component of its weight."""
    out: list[tuple[str, list[str]]] = []
    finders: tuple[tuple[str, Callable[[Any], Sequence[Any]]], ...] = (
        ("attention", attention),
        ("mlp", mlps),
        ("convolution", depthwise),
        ("embedding", patch_embeddings),
        ("embedding", positions),
    )
    for kind, finder in finders:
        try:
            parts = finder(module)
        except AnatomyError:
            continue
        for part in parts:
            groups = part.parameters.values() if isinstance(part.parameters, Mapping) else [part.parameters]
            names = [name for group in groups for name in group]
            names += [name.removesuffix("weight") + "bias" for name in names if name.endswith("weight")]
            if isinstance(part, AttentionPart):
                names += [name for group in part.bias_parameters.values() for name in group]
            out.append((kind, names))
    return out


def chosen_components(wanted: str | Sequence[str]) -> set[str]:
    """The set of components of a name or several; "all" for all.

    Raises:
        UsageError: if one is unknown (lists the known ones), or none is given.
    """
    names = COMPONENTS if wanted == "all" else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in names:
        if name not in COMPONENTS:
            raise UsageError(f"components: expected 'all' or some of {', '.join(COMPONENTS)}, found {name!r}")
    if not names:
        raise UsageError("components: expected at least one, found none")
    return set(names)
