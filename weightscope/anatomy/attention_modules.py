"""Queries, keys, values and output projections, per layer and head, independent of their names and packing.

An adapter is a row of `SCHEMES`: the names that a model family gives to the three input projections,
and how they are packed. Head counts come from attributes or the config; they are never guessed.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.tensors import (
    NamedTensors,
    Parts,
    Place,
    Rows,
    Slot,
    deepest,
    in_layers,
    places,
)
from weightscope.errors import AnatomyError


@dataclass(frozen=True)
class Scheme:
    """How one family names and packs its projections, relative to the attention module."""

    q: str  # names of weights; equal names denote packed rows, in the order q, k, v
    k: str
    v: str
    interleaved: bool = False  # packed rows are ordered by head (q, k, v of head 0, then of head 1, ...)
    conv1d: bool = False  # may be those of transformers' Conv1D, stored (in, out), to be seen from the packed shape
    bias: str | None = None  # packed, of all three; None derives their names from those of the weights


def _packed(name: str, **options: Any) -> Scheme:
    return Scheme(name, name, name, **options)


def _separate(q: str, k: str, v: str) -> Scheme:
    return Scheme(f"{q}.weight", f"{k}.weight", f"{v}.weight")


SCHEMES: tuple[Scheme, ...] = (
    _packed("qkv.weight"),  # timm, ours, SAM
    _packed("Wqkv.weight"),  # ModernBERT, MPT
    _packed("to_qkv.weight"),  # lucidrains
    _packed("qkv_proj.weight"),  # Phi-3: rows q, k, v with fewer k and v
    _packed("in_proj_weight", bias="in_proj_bias"),  # nn.MultiheadAttention
    Scheme("q_proj_weight", "k_proj_weight", "v_proj_weight", bias="in_proj_bias"),  # the same with kdim or vdim
    Scheme("q_attn.weight", "c_attn.weight", "c_attn.weight", conv1d=True),  # GPT-2's cross-attention
    _packed("c_attn.weight", conv1d=True),  # GPT-2; nanoGPT keeps it as Linear
    _packed("query_key_value.weight", interleaved=True),  # GPT-NeoX, BLOOM
    _separate("q_proj", "k_proj", "v_proj"),  # Llama, CLIP, Whisper, transformers' ViT from 5.0
    _separate("query", "key", "value"),  # BERT, transformers' ViT before 5.0
    _separate("query_proj", "key_proj", "value_proj"),  # DeBERTa
    _separate("q_lin", "k_lin", "v_lin"),  # DistilBERT
    _separate("to_q", "to_k", "to_v"),  # diffusers
    _separate("wq", "wk", "wv"),  # Llama as published
    _separate("q", "k", "v"),  # T5, CaiT
    Scheme("q.weight", "kv.weight", "kv.weight"),  # PVT, Segformer, timm's attention pooling
    Scheme("to_q.weight", "to_kv.weight", "to_kv.weight"),
)

# The output projection, relative to the attention module; ^ denotes its parent.
OUTPUTS = (
    *(f"{n}.weight" for n in ("proj", "out_proj", "o_proj", "to_out.0", "to_out", "Wo", "wo", "dense", "c_proj")),
    *(f"{n}.weight" for n in ("o", "out_lin", "out", "^output.dense", "^dense")),
)

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_kv", "key_value_proj_dim", "dim_head", "head_width")


_CROSS = re.compile(
    r"cross|\bencoder_attn\b|\bencdec|\benc_dec|\bencoder_decoder|\battn_pool|\bmultihead_attn$", re.IGNORECASE
)


def find(tensors: NamedTensors) -> Parts[AttentionPart]:
    """All attention modules, in order; the cross-attention of a block is in the layer of its self-attention."""

    def build(prefix: str, scheme: Scheme) -> AttentionPart | None:
        slots = _slots(tensors, prefix, scheme)
        return slots and _part(tensors, prefix, *slots)

    schemes = {scheme: tuple(dict.fromkeys((scheme.q, scheme.k, scheme.v))) for scheme in SCHEMES}
    return in_layers(places(tensors, schemes, build), tensors, _same_block)


def _output(tensors: NamedTensors, prefix: str, transposed: bool, columns: int | None) -> str | None:
    parent = prefix[:-1].rpartition(".")[0]
    for candidate in OUTPUTS:
        base = prefix if candidate[0] != "^" else (f"{parent}." if parent else "")
        name = base + candidate.lstrip("^")
        if why := tensors.every.get(name):
            raise AnatomyError(f"`{name}` ({why})")
        if name in tensors:
            shape = tensors.shape(name)
            if len(shape) >= 2 and 0 not in shape and columns in (None, shape[0 if transposed else 1]):
                return name
    return None


def _slots(tensors: NamedTensors, prefix: str, scheme: Scheme) -> tuple[dict[str, Slot], dict[str, Slot]] | None:
    """Slots of weights and of biases; None if the names are not those of an attention module."""
    if f"{prefix}temperature" in tensors:  # XCiT attends between channels, not between tokens
        return None
    names = {"q": prefix + scheme.q, "k": prefix + scheme.k, "v": prefix + scheme.v}
    shapes = {part: tensors.shape(name) for part, name in names.items()}
    if any(len(shape) < 2 or any(n != 1 for n in shape[2:]) for shape in shapes.values()):
        return None
    packed_shape = shapes["k"]
    transposed = scheme.conv1d and packed_shape[1] > packed_shape[0]
    rows = {part: shape[1 if transposed else 0] for part, shape in shapes.items()}
    triple, pair = names["q"] == names["k"] == names["v"], names["q"] != names["k"] == names["v"]
    named = functools.partial(_output, tensors, prefix, transposed)
    if (out := named(None if triple or pair else rows["v"]) or named(None)) is None:
        return None
    columns = tensors.shape(out)[0 if transposed else 1]
    if (triple and (rows["q"] - columns) % 2) or (pair and rows["k"] % 2):
        return None  # rows would be left over
    spans: list[Rows] = [None, None, None]
    if scheme.interleaved:
        spans = [*_interleaved(tensors, rows["q"], prefix)]
    elif triple:
        spans = [*_spans((columns, (rows["q"] - columns) // 2, (rows["q"] - columns) // 2))]
    elif pair:
        spans = [None, *_spans((rows["k"] // 2, rows["k"] // 2))]
    weights = {part: Slot(names[part], span, transposed) for part, span in zip("qkv", spans, strict=True)}
    weights["o"] = Slot(out, None, not transposed)  # (in, out): its rows are those of heads
    return weights, _biases(tensors, prefix, scheme, weights, rows)


def _spans(sizes: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _interleaved(tensors: NamedTensors, rows: int, prefix: str) -> tuple[Tensor, ...]:
    """The rows of q, k and v where each key head follows the queries that use it (GPT-NeoX, BLOOM, Falcon)."""
    path = prefix[:-1]
    heads = tensors.hint(path, HEADS)
    kv_heads = heads if heads is None else _kv_heads(tensors, path, heads)
    if not heads or heads < 0 or not kv_heads or heads % kv_heads or rows % (heads + 2 * kv_heads):
        raise AnatomyError(
            f"`{path}`: unpacking {rows} rows needs the number of heads, found {heads} with {kv_heads} key heads; "
            "pass config={'num_attention_heads': H, 'num_kv_heads': G}"
        )
    each = torch.arange(rows).reshape(kv_heads, heads // kv_heads + 2, -1)
    return each[:, :-2].reshape(-1), each[:, -2].reshape(-1), each[:, -1].reshape(-1)


def _kv_heads(tensors: NamedTensors, path: str, heads: int) -> int:
    """The number of key heads of interleaved rows. Falcon's config states more for multi-query than are used."""
    own = next((n for key in KV_HEADS if isinstance(n := tensors.own(path, key), int)), None)
    if own is not None:
        return own
    if tensors.hint(path, ("multi_query",), bool) and not tensors.hint(path, ("new_decoder_architecture",), bool):
        return 1
    return int(tensors.hint(path, KV_HEADS) or heads)


def _biases(
    tensors: NamedTensors, prefix: str, scheme: Scheme, weights: dict[str, Slot], rows: dict[str, int]
) -> dict[str, Slot]:
    out = {}
    whole = _spans((rows["q"], rows["k"], rows["v"]))
    for i, part in enumerate("qkvo"):
        weight = weights[part]
        name = weight.name.removesuffix("weight") + "bias"
        span = weight.rows
        if part != "o" and scheme.bias is not None:
            name = prefix + scheme.bias
            span = weight.rows if weight.rows is not None else whole[i]
        elif part in "qv" and name not in tensors:
            name, span = f"{prefix}{part}_bias", None  # BEiT and EVA have two separate biases, and none for keys
        if name in tensors and len(tensors.shape(name)) == 1:
            out[part] = Slot(name, span, vector=True)
    return out


def _kind(tensors: NamedTensors, path: str, sizes: dict[str, tuple[int, int]]) -> Literal["self", "cross"]:
    words = path.split(".")
    parent = ".".join(words[:-1])
    beside = f"{parent}.self_attn." if parent else "self_attn."
    if (
        any(_CROSS.search(word) for word in words[-2:] if word != "multihead_attn")
        or f"{path}.latent".lstrip(".") in tensors
    ):
        return "cross"
    if words[-1] == "multihead_attn" and any(name.startswith(beside) for name in tensors.names):
        return "cross"
    if any(f"{parent}.{probe}" in tensors for probe in ("probe", "latent")):
        return "cross"  # a learned query pools the tokens
    return "self" if sizes["q"][1] == sizes["k"][1] else "cross"


def _same_block(last: Place, place: Place) -> bool:
    """Whether this is the cross-attention of a block whose self-attention was last."""
    kinds = [p.part.kind if p.part else "cross" if _CROSS.search(p.path) else "self" for p in (last, place)]
    if kinds != ["self", "cross"]:
        return False
    beside = place.path.rpartition(".")[0] == last.path.rpartition(".")[0]
    return beside or (_block(place.path) != "" and _block(place.path) == _block(last.path))


def _block(path: str) -> str:
    """The path up to and including its last number: the block of an attention module."""
    found = re.match(r"(.*(?:^|\.)\d+)(?:\.|$)", path)
    return found.group(1) if found else ""


def _part(tensors: NamedTensors, prefix: str, weights: dict[str, Slot], biases: dict[str, Slot]) -> AttentionPart:
    path = prefix.removesuffix(".")
    sizes = {part: slot.size(tensors) for part, slot in weights.items()}
    heads, kv_heads, k, values = _heads(tensors, path, sizes)
    blocks = {"q": (heads, k), "k": (kv_heads, k), "v": (kv_heads, values), "o": (heads, values)}
    kind = _kind(tensors, path, sizes)
    return AttentionPart(
        layer=0,
        name=path,
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        width=sizes["q"][1],
        kv_width=sizes["k"][1],
        head_width=k,
        value_width=values,
        rotary=kind == "self" and _states_rotation(tensors, path),
        causal=None,
        normalised=any(n in tensors for n in (f"{prefix}{x}.weight" for x in _QK_NORMS))
        or f"{prefix}logit_scale" in tensors,
        scale=1.0 if tensors.hint(path, ("model_type",), str) in _UNSCALED else k**-0.5,
        positional=any(prefix + name in tensors for name in _POSITIONAL),
        numbers=tuple(range(heads)),
        _tensors=tensors,
        _weights={
            name: replace(slot, shape=(*blocks[name], sizes[name][1]), swapped=name != "o")
            for name, slot in weights.items()
        },
        _biases={name: slot if name == "o" else replace(slot, shape=blocks[name]) for name, slot in biases.items()},
    )


def _heads(tensors: NamedTensors, path: str, sizes: dict[str, tuple[int, int]]) -> tuple[int, int, int, int]:
    """(heads, kv_heads, head width, value width) from hints, checked against the shape of every projection."""
    (q, width), (keys, _), (rows, _), (inner, out) = (sizes[part] for part in "qkvo")
    heads = tensors.hint(path, HEADS)
    if heads is None:
        each = tensors.hint(path, HEAD_WIDTHS)
        if not each:
            raise AnatomyError(
                f"`{path}`: found {q} query rows, and no attribute or config with the number of heads; "
                "give the module an attribute num_heads, pass config={'num_attention_heads': H}, or --num-heads H"
            )
        heads = q // each
    k = q // heads if heads > 0 else 0
    kv_heads = keys // k if k else 0
    good = heads * k == q and kv_heads and kv_heads * k == keys and heads % kv_heads == 0
    values = rows // kv_heads if good else 0
    if not good or values * kv_heads != rows or values * heads != inner:
        raise AnatomyError(
            f"`{path}`: {heads} heads do not divide the projections: q {q}, k {keys}, v {rows} rows, "
            f"o {inner} columns; check the number of heads"
        )
    if out != width:
        raise AnatomyError(f"`{path}`: the output has {out} rows, the stream a width of {width}")
    return heads, kv_heads, k, values


# Parameters of gated positional self-attention and of convolutions in attention, ours and (gates) timm's.
_POSITIONAL = ("gating_param", "filter_scale")
_QK_NORMS = ("q_norm", "query_norm", "norm_q", "q_layernorm", "q_ln")


# What configs say, for models without code.
_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_dim", "rotary_pct", "rotary_emb_base")
_ROPE_TYPES = (
    *("llama", "mistral", "mixtral", "gpt_neox", "gptj", "codegen", "qwen2", "gemma", "phi", "stablelm", "olmo"),
)
_ROPE_TABLES = re.compile(r"(rotary_emb|rope)\b.*(inv_freq|freqs)")
_UNSCALED = ("t5", "mt5", "umt5", "gpt_neo")  # 1/sqrt(k) is in their initial weights


def _states_rotation(tensors: NamedTensors, path: str) -> bool:
    """Whether queries and keys at `path` are rotated by position, by the config and tables of rotations."""
    kind = tensors.hint(path, ("position_embedding_type", "position_embeddings_type"), str)
    if kind is not None:
        return kind in ("rotary", "rope")
    tower = path.split(".")[0]
    return (
        tensors.hint(path, _ROPE_KEYS, (int, float, Mapping)) is not None
        or tensors.hint(path, ("model_type",), str) in _ROPE_TYPES
        or any(name.split(".")[0] == tower and _ROPE_TABLES.search(name) for name in tensors.every)
    )


_NAMES = (
    *("ls1.gamma", "layer_scale1.lambda1", "layer_scale_1.lambda1", "layer_scale1.gamma", "layer_scale_1.gamma"),
    *("ls_1.gamma", "ls1", "self_attn_layer_scale.scale"),
    *("gamma_1", "gamma1", "lambda_1", "layer_scale_1"),
)


def layer_scale(tensors: NamedTensors, part: AttentionPart) -> str | None:
    """The name of the tensor (d,) that scales the output of an attention module, LayerScale; None if there is none."""
    block = part.name.rpartition(".")[0]
    for parent in (block, block.rpartition(".")[0]):
        for candidate in _NAMES:
            name = f"{parent}.{candidate}" if parent else candidate
            if name in tensors and tensors.shape(name)[-1:] == (math.prod(tensors.shape(name)),) == (part.width,):
                return name
    return None


_MODULE = re.compile(r"(attn|attention)s?\d*$", re.IGNORECASE)
# Projections of queries, keys and values under any module's name.
_PROJECTIONS = {"qk", "kv"} | {name.split(".")[0] for s in SCHEMES for name in (s.q, s.k, s.v)}


def owner(name: str) -> str | None:
    """The module `..attn`, `..attention`, or one with projections of queries and keys, that a tensor is of."""
    found = deepest(name, _MODULE)
    words = name.split(".")
    if found is None and any(word in _PROJECTIONS for word in words[-3:]):
        at = next(i for i, word in enumerate(words) if i >= len(words) - 3 and word in _PROJECTIONS)
        return ".".join(words[:at])
    return found
