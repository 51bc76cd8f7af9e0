"""Files whose architecture has code: a small network of the class is traced, and its layout holds for the file.

The class is that of the config (`model_type` of transformers, `architecture` of timm), if the library is installed, or
the user's own (`code`). Of transformers, one or two layers are built at their real width, with few words and experts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightscope._util.names import unknown
from weightscope._util.plugins import imported, is_reference
from weightscope.anatomy import traced
from weightscope.anatomy.attention_modules import find, owner, same_block
from weightscope.anatomy.attention_part import AttentionPart, Gain
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, Parts, Unread, in_layers, shared, tensor_of
from weightscope.errors import UsageError, WeightscopeError

_LARGEST = 1_500_000_000  # parameters of a network that is built, 6 GB
# What the layout of attention does not depend on.
_FEW = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "moe_intermediate_size"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 256),
}
_FREE = ("pad_token_id", "bos_token_id", "eos_token_id", "layer_types", "max_window_layers")


class _NotBuiltError(Exception):
    """A class refuses the file's config."""


def find_attention(tensors: NamedTensors) -> Parts[AttentionPart]:
    """All attention modules, in order: those that the forward pass of a module shows; of a file, by its architecture.

    What the table of architectures does not tell about a file is read from code, if there is some.
    """
    if isinstance(tensors, ModuleTensors):
        return traced.find_attention(tensors)
    parts = Parts[AttentionPart]()
    if "code" not in tensors.config:
        parts = find(tensors)
        if all(one.layer is None for one in parts.unread):  # only called like parts
            return parts
    try:
        coded = places_of_code(tensors)
    except _NotBuiltError as error:
        coded = []
        parts.unread = tuple(replace(one, why=f"{one.why}; {error}") for one in parts.unread)
    if not coded and "code" in tensors.config:
        raise UsageError("code: none of the attention modules that its forward pass shows has the names of the file")
    if not coded:
        return parts
    return in_layers(coded, tensors, same_block, owner)


def places_of_code(tensors: NamedTensors) -> list[AttentionPart | Unread]:
    """The attention modules of a file as its own code runs them; none without code."""
    code = tensors.config.get("code")
    module = _own(code) if code is not None else _of_config(tensors.config)
    if module is None:
        return []
    layers: dict[str, list[AttentionPart | Unread]] = {}
    for one in traced.read(ModuleTensors(module))[0]["attention"]:
        layers.setdefault(re.sub(r"\d+", r"\\d+", re.escape(tensor_of(one))), []).append(one)
    sizes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    patterns = sorted(layers, key=len, reverse=True)  # those of a tower before those of a part of it
    out = []
    for name in tensors.names:
        found = ((p, m[1]) for p in patterns if (m := re.fullmatch(rf"((?:.*\.)?){p}", name)))
        pattern, before = next(found, ("", ""))
        alike = sorted(layers.get(pattern, ()), key=lambda one: tensor_of(one) != name)  # the same layer first
        moved = (_moved(one, before, name.removeprefix(before), tensors, sizes) for one in alike)
        out += [one for one in moved if one is not None][:1]
    return out


def _moved(
    part: AttentionPart | Unread, before: str, name: str, tensors: NamedTensors, sizes: Mapping[str, tuple[int, ...]]
) -> AttentionPart | Unread | None:
    """What was traced, for the layer with the tensor `before` + `name` of a file; None if it has other shapes."""
    here = name.split(".")

    def renamed(own: str) -> str:
        """A name of the traced network, in the file."""
        n = len(shared((own.split("."), tensor_of(part).split("."))))
        return before + ".".join([*here[:n], *own.split(".")[n:]])

    def gain(one: Gain | str | None) -> Any:
        return replace(one, name=renamed(one.name)) if isinstance(one, Gain) else one

    if isinstance(part, Unread):
        return Unread(before + name, part.why, path=renamed(part.path))
    own = {slot.name for slot in (*part._weights.values(), *part._biases.values())}
    if any(renamed(one) not in tensors or tensors.shape(renamed(one)) != sizes[one] for one in own):
        return None
    weights, biases = (
        {key: replace(slot, name=renamed(slot.name)) for key, slot in slots.items()}
        for slots in (part._weights, part._biases)
    )
    path, norm, scale = renamed(part.name), gain(part.norm), gain(part.layer_scale)
    return replace(part, name=path, norm=norm, layer_scale=scale, _tensors=tensors, _weights=weights, _biases=biases)


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm, untrained; UsageError if it has none of the name."""
    import timm

    if ":" not in name and not timm.is_model(name):
        raise UsageError(unknown("model of timm", name.partition(".")[0], timm.list_models()))
    return timm.create_model(name, **options)


def _own(code: str | Callable[[], nn.Module]) -> nn.Module:
    try:
        if isinstance(code, str) and code.startswith("timm:"):
            return timm_model(code.removeprefix("timm:")).eval()
        make: Any = imported(code) if isinstance(code, str) and is_reference(code) else code
        module = make() if callable(make) and not isinstance(make, nn.Module) else make
    except WeightscopeError:
        raise
    except Exception as error:  # of foreign code
        hint = "; docs/troubleshooting.md says how to install timm" if str(code).startswith("timm:") else ""
        raise UsageError(f"{code}: it raised {type(error).__name__}: {error}{hint}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"code: expected timm:NAME or a `package.module:function` of a module, found {code!r}")
    return module


def _of_config(config: Mapping[str, Any]) -> nn.Module | None:
    """A network of the class that a config names; None if the library is not installed or does not know it."""
    if isinstance(config.get("architecture"), str):
        return _of_timm(config["architecture"], config.get("model_args") or {})
    if isinstance(config.get("model_type"), str):
        return _of_transformers(config)
    return None


def _of_timm(architecture: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    try:
        from timm import create_model

        return create_model(architecture, pretrained=False, **arguments).eval()
    except (ImportError, RuntimeError):  # not installed, or it does not know it
        return None


def _of_transformers(config: Mapping[str, Any]) -> nn.Module | None:
    try:
        from transformers import AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except (ImportError, RuntimeError):
        return None
    if config["model_type"] not in CONFIG_MAPPING:
        return None
    kind, why = CONFIG_MAPPING[config["model_type"]], ""
    for few in (True, False):
        try:
            made = kind.from_dict(dict(config))
            made = kind.from_dict(_small(made.to_dict())) if few else made
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModel.from_config(made).parameters())
            if size < _LARGEST:
                return AutoModel.from_config(made, dtype=torch.float32).eval()
        except Exception as error:  # noqa: BLE001 - a foreign class refuses these sizes
            why = f"{type(error).__name__}: {error}".splitlines()[0]
    if why:
        raise _NotBuiltError(f"model_type {config['model_type']!r} could not be built to see its layout: {why}")
    return None


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with few layers, words and experts, and those in it."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if key in _FREE:
            continue
        if isinstance(value, Mapping):
            out[key] = _small(value)
        else:
            few = _FEW.get(key)
            out[key] = min(few, value) if few is not None and isinstance(value, int) else value
    return out
