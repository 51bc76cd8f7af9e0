"""Views of the parts of a network for reading and writing, independent of naming, packing and transposition.

    for part in attention(model):
        q = part.read("q")                    # (heads, d, k), tokens are rows: X @ q[h]
        part.write("q", q * 0.5)

A model is an `nn.Module`, a mapping of tensors (state dict, `Checkpoint`), or a path or `hf://org/name`, which is read
lazily. If it has no such part, `AnatomyError` lists the parts that it has.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from weightscope._util.checks import flag
from weightscope.anatomy import attention_modules as _attention
from weightscope.anatomy import convolution as _convolution
from weightscope.anatomy import embedding as _embedding
from weightscope.anatomy import mlp as _mlp
from weightscope.anatomy import ssm as _ssm
from weightscope.anatomy.attention_modules import AttentionPart
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.embedding import PatchEmbedding, PositionEmbedding
from weightscope.anatomy.mlp import FilterMLP, MLPPart
from weightscope.anatomy.probing import find_attention
from weightscope.anatomy.ssm import SSMPart
from weightscope.anatomy.tensors import MappingTensors, Model, ModuleTensors, NamedTensors, Parts, Unread, named_tensors
from weightscope.errors import AnatomyError, UsageError

__all__ = [
    "AttentionPart",
    "DepthwisePart",
    "FilterMLP",
    "MLPPart",
    "MappingTensors",
    "Model",
    "ModuleTensors",
    "NamedTensors",
    "Parts",
    "PatchEmbedding",
    "PositionEmbedding",
    "SSMPart",
    "Unread",
    "attention",
    "chosen_layers",
    "depthwise",
    "filter_mlps",
    "inventory",
    "mlps",
    "named_tensors",
    "patch_embeddings",
    "positions",
    "require_read",
    "self_attention",
    "ssms",
]

P = TypeVar("P")

FINDERS: dict[str, Callable[[NamedTensors], Parts[Any]]] = {
    "attention modules": find_attention,
    "depthwise convolutions": _convolution.find,
    "MLPs": _mlp.find,
    "patch embeddings": _embedding.find_patches,
    "position embeddings": _embedding.find_positions,
    "state-space layers": _ssm.find,
}
"""Kind of parts -> the function that finds them."""
_ALIKE: dict[str, Callable[[NamedTensors, list[Any]], tuple[str, ...]]] = {
    "attention modules": _attention.unparsed,
    "depthwise convolutions": _convolution.unparsed,
    "MLPs": _mlp.unparsed,
}


def inventory(model: Model, config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The number of parts of each kind; 0 for a kind that cannot be read."""
    tensors, out = named_tensors(model, config), {}
    for kind, finder in FINDERS.items():
        try:
            out[kind] = len(finder(tensors))
        except AnatomyError:
            out[kind] = 0
    return out


def _unread(kind: str, tensors: NamedTensors, parts: Parts[Any]) -> tuple[Unread, ...]:
    """What cannot be read: parts found by their place, and what resembles one by names and shapes alone.

    An initialiser that sets the parts that it recognises and leaves the others would make a network that is initialised
    in part, without a word. So what resembles a part is found independently of the adapters.
    """
    places = tuple(unread.name.rpartition(".")[0] for unread in parts.unread)
    names = _ALIKE[kind](tensors, parts) if kind in _ALIKE else ()
    others = (name for name in names if not any(name.startswith(f"{place}.") for place in places))
    return (*parts.unread, *(Unread(name, str(tensors.shape(name))) for name in others))


def _first(unread: Sequence[Unread]) -> str:
    return ", ".join(map(str, unread[:3])) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")


def _refusal(kind: str, unread: Sequence[Unread], parts: int) -> str:
    """The error message for what looks like parts of a kind and was not read, with what to do next."""
    step = (
        f"strict=False uses the {parts} that were read and lists the others"
        if parts
        else "none can be used; write an initialiser for this layout (docs: Your own initialiser)"
    )
    return (
        f"expected {kind} that can be read, found {len(unread)} tensors that look like them and were not: "
        f"{_first(unread)}; {step}"
    )


def _some(
    kind: str,
    finder: Callable[[NamedTensors], Parts[P]],
    model: Model,
    config: Mapping[str, Any] | None,
    strict: bool | None = None,
    caller: str = "",
) -> Parts[P]:
    tensors = named_tensors(model, config)
    parts = finder(tensors)
    parts.unread = left = _unread(kind, tensors, parts)
    refused = strict is not None and flag("strict", strict)
    if left and refused:
        raise AnatomyError(f"{caller}: {_refusal(kind, left, len(parts))}")
    if left and strict is not None:
        text = f"{len(left)} tensors look like {kind} and are left as they are: {_first(left)}"
        warnings.warn(f"{caller}: {text}", stacklevel=4)
    if parts:
        return parts
    if left:
        raise AnatomyError(_refusal(kind, left, 0))
    there = ", ".join(f"{n} {what}" for what, n in inventory(tensors).items() if n) or "no known parts"
    names = ", ".join(f"`{n}` {tensors.shape(n)}" for n in tensors.names[:4]) + ", ..." * (len(tensors.names) > 4)
    raise AnatomyError(
        f"expected {kind}, found {there} among {len(tensors.names)} tensors ({names}); "
        "is this the right model? Its naming may be unknown to weightscope"
    )


def attention(
    model: Model, config: Mapping[str, Any] | None = None, *, strict: bool | None = None, caller: str = ""
) -> Parts[AttentionPart]:
    """Every attention module of a model, in order; `unread` of the list is what cannot be read.

    What was read of a module with code is compared with its own forward pass, on random tokens and weights.

    Args:
        model: see `named_tensors`.
        config: the model's config, for a mapping; `{"num_attention_heads": H}` is enough.
        strict: for initialisers, which must not set a model in part: whether tensors that look like such parts and
            cannot be read are an error (True) or a warning (False); None for neither.
        caller: name of the initialiser, for that message.

    Raises:
        AnatomyError: if the model has no attention module, or the number of heads is unknown; if strict, names the
            tensors that cannot be read.

    Example:
        >>> [part.heads for part in attention(torch.nn.TransformerEncoderLayer(8, nhead=2))]
        [2]
    """
    return _some("attention modules", find_attention, model, config, strict, caller)


def self_attention(
    model: Model, config: Mapping[str, Any] | None = None, *, strict: bool | None = None, caller: str = ""
) -> Parts[AttentionPart]:
    """The self-attention parts of a model; as `attention`, and a UsageError if it has cross-attention only."""
    everything = attention(model, config, strict=strict, caller=caller)
    found = Parts(part for part in everything if part.kind == "self")
    if not found:
        raise UsageError(f"expected self-attention, found cross-attention only: `{everything[0].name}`")
    found.unread, found.layers = everything.unread, everything.layers
    return found


def depthwise(
    model: Model, config: Mapping[str, Any] | None = None, *, strict: bool | None = None, caller: str = ""
) -> Parts[DepthwisePart]:
    """Every depthwise convolution, in depth order; as `attention`."""
    return _some("depthwise convolutions", _convolution.find, model, config, strict, caller)


def filter_mlps(model: Model, config: Mapping[str, Any] | None = None) -> Parts[FilterMLP]:
    """Every depthwise convolution with the plain MLP of its block (ConvNeXts); as `attention`."""
    kind = "depthwise convolutions, each with an MLP of as many channels in its block"
    return _some(kind, _mlp.find_filter_mlps, model, config)


def mlps(
    model: Model, config: Mapping[str, Any] | None = None, *, strict: bool | None = None, caller: str = ""
) -> Parts[MLPPart]:
    """Every MLP, plain or gated, in order; as `attention`."""
    return _some("MLPs", _mlp.find, model, config, strict, caller)


def patch_embeddings(model: Model, config: Mapping[str, Any] | None = None) -> Parts[PatchEmbedding]:
    """Every patch embedding; as `attention`."""
    return _some("patch embeddings", _embedding.find_patches, model, config)


def positions(model: Model, config: Mapping[str, Any] | None = None) -> Parts[PositionEmbedding]:
    """Every table of position embeddings; as `attention`."""
    return _some("position embeddings", _embedding.find_positions, model, config)


def ssms(model: Model, config: Mapping[str, Any] | None = None) -> Parts[SSMPart]:
    """Every Mamba or Mamba-2 layer, in order; as `attention`."""
    return _some("state-space layers", _ssm.find, model, config)


def require_read(kinds: Iterable[str], tensors: NamedTensors, *, strict: bool, caller: str) -> tuple[str, ...]:
    """The names of what looks like parts of some kinds and cannot be read; an AnatomyError if strict."""
    left: list[str] = []
    for kind in kinds:
        parts = FINDERS[kind](tensors)
        if (found := _unread(kind, tensors, parts)) and strict:
            raise AnatomyError(f"{caller}: {_refusal(kind, found, len(parts))}")
        left += [unread.name for unread in found]
    return tuple(left)


L = TypeVar("L", bound="AttentionPart | DepthwisePart | MLPPart | SSMPart | FilterMLP")


def chosen_layers(parts: Sequence[L], layers: int | Iterable[int] | None) -> list[L]:
    """The parts in the layers selected: all for None, one number, or several; negative ones count from the end.

    UsageError if the model has no such layer, or none is selected.
    """
    known = sorted({part.layer for part in parts})
    if layers is None:
        return list(parts)
    out = set()
    for layer in [layers] if isinstance(layers, int) else layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise UsageError(f"layers: expected integers, found {layer!r}")
        number = layer + known[-1] + 1 if layer < 0 else layer
        if number not in known:
            raise UsageError(f"layers: expected some of {known}, found {layer}")
        out.add(number)
    if not out:
        raise UsageError("layers: expected at least one layer, found none")
    return [part for part in parts if part.layer in out]
