"""Views of the parts of a network for reading and writing, independent of naming, packing and transposition.

    for part in attention(model):
        q = part.read("q")                    # (heads, d, k), tokens are rows: X @ q[h]
        part.write("q", q * 0.5)

A model is an `nn.Module`, a mapping of tensors (state dict, `Checkpoint`), or a path or `hf://org/name`, which is read
lazily. If it has no such part, `AnatomyError` lists the parts that it has.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weightscope.anatomy import attention_modules as _attention
from weightscope.anatomy import convolution as _convolution
from weightscope.anatomy import embedding as _embedding
from weightscope.anatomy import filter_mlp as _filter_mlp
from weightscope.anatomy import mlp as _mlp
from weightscope.anatomy import ssm as _ssm
from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.embedding import PatchEmbedding, PositionEmbedding
from weightscope.anatomy.filter_mlp import FilterMLP
from weightscope.anatomy.lookalikes import refusal, unparsed
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.ssm import SSMPart
from weightscope.anatomy.tensors import MappingTensors, Model, ModuleTensors, NamedTensors, named_tensors
from weightscope.errors import AnatomyError

__all__ = [
    "AttentionPart",
    "DepthwisePart",
    "FilterMLP",
    "MLPPart",
    "MappingTensors",
    "Model",
    "ModuleTensors",
    "NamedTensors",
    "PatchEmbedding",
    "PositionEmbedding",
    "SSMPart",
    "attention",
    "depthwise",
    "filter_mlps",
    "inventory",
    "mlps",
    "named_tensors",
    "patch_embeddings",
    "positions",
    "ssms",
    "unparsed",
]

P = TypeVar("P")

FINDERS: dict[str, Callable[[NamedTensors], list[Any]]] = {
    "attention modules": _attention.find,
    "depthwise convolutions": _convolution.find,
    "MLPs": _mlp.find,
    "patch embeddings": _embedding.find_patches,
    "position embeddings": _embedding.find_positions,
    "state-space layers": _ssm.find,
}
"""Kind of parts -> the function that finds them."""


def inventory(model: Model, config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The number of parts of each kind; 0 for a kind that cannot be read."""
    tensors = named_tensors(model, config)
    out = {}
    for kind, finder in FINDERS.items():
        try:
            out[kind] = len(finder(tensors))
        except AnatomyError:
            out[kind] = 0
    return out


def _some(
    kind: str, finder: Callable[[NamedTensors], list[P]], model: Model, config: Mapping[str, Any] | None
) -> list[P]:
    tensors = named_tensors(model, config)
    parts = finder(tensors)
    if parts:
        return parts
    if alike := unparsed(kind, tensors, parts):
        raise AnatomyError(refusal(kind, tensors, alike, 0))
    there = ", ".join(f"{n} {what}" for what, n in inventory(tensors).items() if n) or "no known parts"
    names = ", ".join(f"`{n}` {tensors.shape(n)}" for n in tensors.names[:4]) + ", ..." * (len(tensors.names) > 4)
    raise AnatomyError(
        f"expected {kind}, found {there} among {len(tensors.names)} tensors ({names}); "
        "is this the right model? Its naming may be unknown to weightscope"
    )


def attention(model: Model, config: Mapping[str, Any] | None = None) -> list[AttentionPart]:
    """Every attention module of a model, in order.

    Args:
        model: see `named_tensors`.
        config: the model's config, for a mapping; `{"num_attention_heads": H}` is enough.

    Raises:
        AnatomyError: if the model has no attention module, or the number of heads is unknown.

    Example:
        >>> [part.heads for part in attention(torch.nn.TransformerEncoderLayer(8, nhead=2))]
        [2]
    """
    return _some("attention modules", _attention.find, model, config)


def depthwise(model: Model, config: Mapping[str, Any] | None = None) -> list[DepthwisePart]:
    """Every depthwise convolution, in depth order; arguments and errors as `attention`."""
    return _some("depthwise convolutions", _convolution.find, model, config)


def filter_mlps(model: Model, config: Mapping[str, Any] | None = None) -> list[FilterMLP]:
    """Every depthwise convolution with the plain MLP of its block (ConvNeXts); arguments and errors as `attention`."""
    kind = "depthwise convolutions, each with an MLP of as many channels in its block"
    return _some(kind, _filter_mlp.find, model, config)


def mlps(model: Model, config: Mapping[str, Any] | None = None) -> list[MLPPart]:
    """Every MLP, plain or gated, in order; arguments and errors as `attention`."""
    return _some("MLPs", _mlp.find, model, config)


def patch_embeddings(model: Model, config: Mapping[str, Any] | None = None) -> list[PatchEmbedding]:
    """Every patch embedding; arguments and errors as `attention`."""
    return _some("patch embeddings", _embedding.find_patches, model, config)


def positions(model: Model, config: Mapping[str, Any] | None = None) -> list[PositionEmbedding]:
    """Every table of position embeddings; arguments and errors as `attention`."""
    return _some("position embeddings", _embedding.find_positions, model, config)


def ssms(model: Model, config: Mapping[str, Any] | None = None) -> list[SSMPart]:
    """Every Mamba or Mamba-2 layer, in order; arguments and errors as `attention`."""
    return _some("state-space layers", _ssm.find, model, config)
