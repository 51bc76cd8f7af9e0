"""Files whose architecture has code: a small network of the class is traced, and its layout holds for the file.

The class is that of the config (`model_type` of transformers, `architecture` of timm), if the library is installed, or
the user's own (`code`). Of transformers, one or two layers are built at their real width, with few words and experts.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from weightscope._util.names import joined, unknown
from weightscope._util.plugins import imported, is_reference, why_not_imported
from weightscope.anatomy import mlp, traced
from weightscope.anatomy.attention_modules import find, owner, same_block
from weightscope.anatomy.attention_part import AttentionPart, Gain
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.tensors import (
    ModuleTensors,
    NamedTensors,
    Parts,
    Slot,
    Unread,
    in_layers,
    path_of,
    shared,
    tensor_of,
)
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
        coded = places_of_code(tensors, "attention")
    except _NotBuiltError as error:
        coded = []
        parts.unread = tuple(replace(one, why=f"{one.why}; {error}") for one in parts.unread)
    if not coded and "code" in tensors.config:
        raise UsageError("code: none of the attention modules that its forward pass shows has the names of the file")
    if not coded:
        return parts
    return in_layers(coded, tensors, same_block, owner)


def find_mlps(tensors: NamedTensors) -> Parts[MLPPart]:
    """All MLPs, in order: those that the forward pass of a module or of a file's `code` shows; else by names."""
    if isinstance(tensors, ModuleTensors):
        return traced.find_mlps(tensors)
    coded = places_of_code(tensors, "mlp") if "code" in tensors.config else []
    return in_layers(coded, tensors, owner=mlp.owner) if coded else mlp.find(tensors)


def places_of_code(tensors: NamedTensors, kind: str) -> list[Any]:
    """The parts of a kind in a file as its own code runs them, or what is unread; none without code."""
    code = tensors.config.get("code")
    module = _own(code) if code is not None else _of_config(tensors.config)
    if module is None:
        return []
    layers: dict[str, list[Any]] = {}
    with _random_gains(module):
        for one in traced.read(ModuleTensors(module))[0][kind]:
            layers.setdefault(re.sub(r"\d+", r"\\d+", re.escape(tensor_of(one))), []).append(one)
    sizes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    patterns = sorted(layers, key=len, reverse=True)  # those of a tower before those of a part of it
    out = []
    for name in tensors.names:
        found = ((p, m[1]) for p in patterns if (m := re.fullmatch(rf"((?:.*\.)?){p}", name)))
        pattern, before = next(found, ("", ""))
        alike = layers.get(pattern, [])
        built = [one for one in alike if before + tensor_of(one) == name]
        moved = [(one, here) for one in built or alike if (here := _moved(one, before, name, tensors, sizes))]
        if len({_reading(one) for one, _ in moved}) > 1:
            read = joined([f"`{path_of(one)}`" for one, _ in moved], 3)
            why = f"(its code builds {read}, alike in shapes, which differ in what they do, not this layer; build all)"
            out.append(Unread(name, why, path=path_of(moved[0][1])))
        else:
            out += [here for _, here in moved[:1]]
    return out


def _reading(part: Any) -> Any:
    """Equal for layers that one function reads: the same heads and rows, of the same scale."""
    if isinstance(part, Unread):
        return ()
    slots = (*part._weights.items(), *part._biases.items())
    rows = [(key, str(slot.rows), slot.transposed, slot.shape) for key, slot in slots]
    kept = ("kind", "heads", "kv_heads", "scale", "normalised", "notes")
    return str([rows, *(getattr(part, key, None) for key in kept)])


def _moved(part: Any, before: str, name: str, tensors: NamedTensors, sizes: Mapping[str, tuple[int, ...]]) -> Any:
    """What was traced, for the layer with the tensor `name` of a file, below `before`; None if it has other shapes."""
    here = name.removeprefix(before).split(".")

    def renamed(own: str) -> str:
        """A name of the traced network, in the file."""
        n = len(shared((own.split("."), tensor_of(part).split("."))))
        return before + ".".join([*here[:n], *own.split(".")[n:]])

    def in_file(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: in_file(one) for key, one in value.items()}
        return replace(value, name=renamed(value.name)) if isinstance(value, Slot | Gain) else value

    if isinstance(part, Unread):
        return Unread(name, part.why, path=renamed(part.path))
    own = {slot.name for slot in (*part._weights.values(), *part._biases.values())}
    if any(renamed(one) not in tensors or tensors.shape(renamed(one)) != sizes[one] for one in own):
        return None
    held = {key: in_file(value) for key, value in vars(part).items()}
    return replace(part, **held | {"name": renamed(part.name), "_tensors": tensors})


@contextmanager
def _random_gains(module: nn.Module) -> Iterator[None]:
    """Gains, biases and statistics of a new network other than 0 and 1, so that its numbers show what they act on."""
    held = [p.detach() for p in module.parameters() if max(p.shape, default=0) == p.numel() > 1]
    held += [b for name, b in module.named_buffers() if name.endswith(("running_mean", "running_var"))]
    kept, draw = [one.clone() for one in held], torch.Generator().manual_seed(0)
    for one in held:
        one.copy_(torch.rand(one.shape, generator=draw) + 0.5)
    try:
        yield
    finally:
        for one, value in zip(held, kept, strict=True):
            one.copy_(value)


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
    if find_spec("transformers") is None:
        return None
    try:
        from transformers import AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
            except ImportError:
                raise
            except Exception as error:  # noqa: BLE001 - a foreign class refuses these sizes
                why = f"{type(error).__name__}: {error}".splitlines()[0]
    except ImportError as error:
        raise _NotBuiltError(f"its code cannot be imported: {why_not_imported(error)}") from error
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
