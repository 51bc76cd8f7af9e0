"""Views of a network's parts that read and write, whatever the family's names, packing and transposition.

    for part in attention(model):
        q = part.read("q")                    # (heads, d, k), tokens are rows: X @ q[h]
        part.write("q", q * 0.5)

The same functions take a module, a state dict with its config, or anything that maps names to tensors. A model
without the part raises `AnatomyError` and lists what there is.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weightscope.anatomy import attention as _attention
from weightscope.anatomy import convolution as _convolution
from weightscope.anatomy import embedding as _embedding
from weightscope.anatomy import mlp as _mlp
from weightscope.anatomy import ssm as _ssm
from weightscope.anatomy.attention import AttentionPart
from weightscope.anatomy.convolution import DepthwisePart
from weightscope.anatomy.embedding import PatchEmbedding, PositionEmbedding
from weightscope.anatomy.mlp import MLPPart
from weightscope.anatomy.ssm import SSMPart
from weightscope.anatomy.tensors import MappingTensors, ModuleTensors, NamedTensors, named_tensors
from weightscope.errors import AnatomyError

__all__ = [
    "AttentionPart",
    "DepthwisePart",
    "MLPPart",
    "MappingTensors",
    "ModuleTensors",
    "NamedTensors",
    "PatchEmbedding",
    "PositionEmbedding",
    "SSMPart",
    "attention",
    "depthwise",
    "inventory",
    "mlps",
    "named_tensors",
    "patch_embeddings",
    "positions",
    "ssms",
]

Model = Any  # an nn.Module, a mapping of named tensors, or a NamedTensors
P = TypeVar("P")

_FINDERS: dict[str, Callable[[NamedTensors], list[Any]]] = {
    "attention modules": _attention.find,
    "depthwise convolutions": _convolution.find,
    "MLPs": _mlp.find,
    "patch embeddings": _embedding.find_patches,
    "position embeddings": _embedding.find_positions,
    "state-space layers": _ssm.find,
}


def inventory(model: Model, config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """How many parts of each kind a model has; a kind whose adapter refuses the model counts 0."""
    source = named_tensors(model, config)
    out = {}
    for kind, finder in _FINDERS.items():
        try:
            out[kind] = len(finder(source))
        except AnatomyError:
            out[kind] = 0
    return out


def _some(
    kind: str, finder: Callable[[NamedTensors], list[P]], model: Model, config: Mapping[str, Any] | None
) -> list[P]:
    source = named_tensors(model, config)
    parts = finder(source)
    if parts:
        return parts
    there = ", ".join(f"{n} {what}" for what, n in inventory(source).items() if n) or "none of the parts it knows"
    names = ", ".join(f"`{n}` {tuple(source.shape(n))}" for n in source.names[:4]) + ", ..." * (len(source.names) > 4)
    raise AnatomyError(
        f"expected {kind}, found {there} among {len(source.names)} tensors ({names}); "
        "is this the right model, or are its names of a family that weightscope does not know?"
    )


def attention(model: Model, config: Mapping[str, Any] | None = None) -> list[AttentionPart]:
    """Every attention module of a model, in order.

    Args:
        model: an `nn.Module`, a mapping name -> tensor (state dict, checkpoint), or a `NamedTensors`.
        config: the model's config, for a mapping; `{"num_attention_heads": H}` is enough.

    Raises:
        AnatomyError: if there is none (lists what there is), or the number of heads cannot be known.

    Example:
        >>> [part.heads for part in attention(torch.nn.TransformerEncoderLayer(8, nhead=2))]
        [2]
    """
    return _some("attention modules", _attention.find, model, config)


def depthwise(model: Model, config: Mapping[str, Any] | None = None) -> list[DepthwisePart]:
    """Every depthwise convolution, in depth order; arguments and errors as `attention`."""
    return _some("depthwise convolutions", _convolution.find, model, config)


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
