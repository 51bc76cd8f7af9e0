"""Views of the parts of a network for reading and writing, independent of naming, packing and transposition.

    for part in attention(model):
        q = part.read("q")                    # (heads, d, k), tokens are rows: X @ q[h]
        part.write("q", q * 0.5)

A model is an `nn.Module`, a mapping of tensors (state dict, `Checkpoint`), or a path or `hf://org/name`, which is read
lazily. If it has no such part, `AnatomyError` lists the parts that it has.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from weightscope._util.checks import chosen, flag
from weightscope._util.names import joined
from weightscope.anatomy import convolution as _convolution
from weightscope.anatomy import embedding as _embedding
from weightscope.anatomy import mlp as _mlp
from weightscope.anatomy import ssm as _ssm
from weightscope.anatomy.attention_part import OTHERS, AttentionPart
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.embedding import PatchEmbedding, PositionEmbedding
from weightscope.anatomy.from_code import find_attention, find_mlps
from weightscope.anatomy.mlp import FilterMLP, MLPPart
from weightscope.anatomy.ssm import SSMPart
from weightscope.anatomy.tensors import (
    Model,
    ModuleTensors,
    NamedTensors,
    Parts,
    Unread,
    named_tensors,
)
from weightscope.anatomy.traced import shown
from weightscope.errors import AnatomyError, UsageError

__all__ = [
    "AttentionPart",
    "DepthwisePart",
    "FilterMLP",
    "MLPPart",
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
    "no_self_attention",
    "parts_of",
    "patch_embeddings",
    "positions",
    "self_attention",
    "ssms",
    "unreadable",
]

FINDERS: dict[str, Callable[[NamedTensors], Parts[Any]]] = {
    "attention modules": find_attention,
    "depthwise convolutions": _convolution.find,
    "MLPs": find_mlps,
    "patch embeddings": _embedding.find_patches,
    "position embeddings": _embedding.find_positions,
    "state-space layers": _ssm.find,
}
"""Kind of parts -> the function that finds them; see `parts_of`."""


def inventory(model: Model, config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The number of parts of each kind; 0 for a kind that cannot be read."""
    tensors = named_tensors(model, config)
    return {kind: len(finder(tensors)) for kind, finder in FINDERS.items()}


def _refusal(kind: str, unread: Sequence[Unread], parts: int, caller: str) -> str:
    """The error message for what looks like parts of a kind and was not read, with what to do next."""
    step = "store them as plain floating-point numbers of the usual shape"
    if not parts:
        step = "none can be used"
    elif caller:
        step = f"strict=False uses the {parts} that were read and lists the others"
    n = len(unread)
    found = f"{n} tensors that look like them and were not" if n > 1 else "one tensor that looks like them and was not"
    return f"expected {kind} that can be read, found {found}: {joined(map(str, unread), 3 if parts else 1)}; {step}"


def parts_of(
    kind: str,
    model: Model,
    config: Mapping[str, Any] | None = None,
    *,
    strict: bool | None = True,
    caller: str = "",
    finder: Callable[[NamedTensors], Parts[Any]] | None = None,
    some: bool = False,
) -> Parts[Any]:
    """The parts of a kind, one of `FINDERS`, which may be none unless `some` are needed; `strict` as in `attention`."""
    tensors = named_tensors(model, config)
    found = {} if tensors.found is None else tensors.found
    if kind not in found:
        found[kind] = (finder or FINDERS[kind])(tensors)
    parts = copy.copy(found[kind])
    left, prefix = parts.unread, f"{caller}: " if caller else ""
    if strict is not None and flag("strict", strict) and left:
        raise AnatomyError(f"{prefix}{_refusal(kind, left, len(parts), caller)}")
    if left and strict is not None:
        text = f"{len(left)} tensors look like {kind} and are left as they are: {joined(map(str, left), 3)}"
        warnings.warn(f"{prefix}{text}", stacklevel=3)
    if parts or not some:
        return parts
    if left:
        raise AnatomyError(_refusal(kind, left, 0, ""))
    there = ", ".join(f"{n} {what}" for what, n in inventory(tensors).items() if n) or "no known parts"
    names = ", ".join(f"`{n}` {tensors.shape(n)}" for n in tensors.names[:4]) + ", ..." * (len(tensors.names) > 4)
    why = shown(tensors, kind) or "is this the right model? Its naming may be unknown to weightscope"
    raise AnatomyError(f"expected {kind}, found {there} among {len(tensors.names)} tensors ({names}); {why}")


def attention(
    model: Model, config: Mapping[str, Any] | None = None, *, strict: bool | None = True, caller: str = ""
) -> Parts[AttentionPart]:
    """Every attention module of a model, in order; `unread` of the list is what looks like one and cannot be read.

    What was read of a module with code is compared with its own forward pass, on random tokens and weights.

    Args:
        model: see `named_tensors`.
        config: the model's config, for a mapping; `{"num_attention_heads": H}` is enough.
        strict: what to do about modules that cannot be read: an error (True), a warning (False), or nothing, for
            callers that say themselves what is in `unread` (None).
        caller: name of the initialiser, for that message.

    Raises:
        AnatomyError: if the model has no attention module, or the number of heads is unknown; if strict, names the
            tensors that cannot be read.

    Example:
        >>> [part.heads for part in attention(torch.nn.TransformerEncoderLayer(8, nhead=2))]
        [2]
    """
    return parts_of("attention modules", model, config, strict=strict, caller=caller, some=True)


def self_attention(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[AttentionPart]:
    """The self-attention parts of a model; as `attention`, and a UsageError if it has other attention only."""
    everything = attention(model, config, **options)
    found = Parts(part for part in everything if part.kind == "self")
    if not found:
        raise UsageError(no_self_attention(everything))
    found.unread, found.layers = everything.unread, everything.layers
    return found


def no_self_attention(parts: Sequence[AttentionPart]) -> str:
    """The error message for attention of other kinds only."""
    kinds = " and ".join(dict.fromkeys(OTHERS[part.kind] for part in parts))
    return f"expected self-attention, found {kinds} only: `{parts[0].parameters['q'][0]}`"


def depthwise(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[DepthwisePart]:
    """Every depthwise convolution, in depth order; as `attention`."""
    return parts_of("depthwise convolutions", model, config, **options, some=True)


def filter_mlps(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[FilterMLP]:
    """Every depthwise convolution with the plain MLP of its block (ConvNeXts); as `attention`."""
    kind = "depthwise convolutions, each with an MLP of as many channels in its block"

    def find(tensors: NamedTensors) -> Parts[FilterMLP]:
        return _mlp.find_filter_mlps(tensors, find_mlps(tensors))

    return parts_of(kind, model, config, **options, finder=find, some=True)


def mlps(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[MLPPart]:
    """Every MLP, plain or gated, in order; as `attention`."""
    return parts_of("MLPs", model, config, **options, some=True)


def patch_embeddings(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[PatchEmbedding]:
    """Every patch embedding; as `attention`."""
    return parts_of("patch embeddings", model, config, **options, some=True)


def positions(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[PositionEmbedding]:
    """Every table of position embeddings; as `attention`."""
    return parts_of("position embeddings", model, config, **options, some=True)


def ssms(model: Model, config: Mapping[str, Any] | None = None, **options: Any) -> Parts[SSMPart]:
    """Every Mamba or Mamba-2 layer, in order; as `attention`."""
    return parts_of("state-space layers", model, config, **options, some=True)


def unreadable(model: Model, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What looks like a part of any kind and cannot be read: name of a tensor or a module -> why."""
    tensors, out = named_tensors(model, config), dict[str, str]()
    for kind in FINDERS:
        for one in parts_of(kind, tensors, strict=None).unread:
            out[one.name] = f"{kind}{'' if one.layer is None else f' of layer {one.layer}'} {one.why}"
    return out


L = TypeVar("L", bound="AttentionPart | DepthwisePart | MLPPart | SSMPart | FilterMLP")


def chosen_layers(parts: Sequence[L], layers: int | Iterable[int] | None) -> list[L]:
    """The parts in the layers selected: all for None, one number, or several; negative ones count from the end.

    UsageError if the model has no such layer, or none is selected.
    """
    if layers is None:
        return list(parts)
    numbers = chosen("layers", layers, (part.layer for part in parts))
    return [part for part in parts if part.layer in numbers]
