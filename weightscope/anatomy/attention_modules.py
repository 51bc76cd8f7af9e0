"""Queries, keys, values and output projections, per layer and head, independent of their names and packing.

An adapter is a row of `attention_schemes.SCHEMES`: the names that a model family gives to the three input projections,
and how they are packed. Head counts come from attributes or the config; they are never guessed.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.attention_schemes import HEAD_WIDTHS, HEADS, KV_HEADS, OUTPUTS, SCHEMES, Scheme
from weightscope.anatomy.slots import Rows, Slot
from weightscope.anatomy.tensors import NamedTensors
from weightscope.errors import AnatomyError

_CROSS = re.compile(r"cross|^encoder_attn$|^encdec|^enc_dec|^encoder_decoder|^attn_pool", re.IGNORECASE)


def find(tensors: NamedTensors) -> list[AttentionPart]:
    """All attention modules, in order."""
    parts: list[AttentionPart] = []
    seen: set[Any] = set()
    for prefix, scheme in _anchors(tensors):
        slots = _slots(tensors, prefix, scheme)
        if slots is None:
            continue
        key = tuple((tensors.identity(s.name), str(s.rows)) for s in slots[0].values())
        if key in seen:
            continue
        seen.add(key)
        kind = _kind(tensors, prefix, *slots[:1])
        layer = parts[-1].layer + (not _same_block(parts[-1], prefix, kind)) if parts else 0
        parts.append(_part(tensors, prefix, layer, kind, *slots))
    return parts


def _anchors(tensors: NamedTensors) -> Iterator[tuple[str, Scheme]]:
    """Prefix and scheme of each attention module, in order; the first matching scheme is used."""
    taken: set[str] = set()
    for name in tensors.names:
        for scheme in SCHEMES:
            keys = {scheme.q, scheme.k, scheme.v}
            prefix = next((name.removesuffix(key) for key in keys if name.endswith(key)), None)
            if prefix is None or (prefix and not prefix.endswith(".")) or prefix in taken:
                continue
            if all(prefix + key in tensors for key in keys):
                taken.add(prefix)
                yield prefix, scheme
                break


def _output(tensors: NamedTensors, prefix: str, columns: int | None, transposed: bool) -> str | None:
    parent = prefix[:-1].rpartition(".")[0]
    for candidate in OUTPUTS:
        base = prefix if candidate[0] != "^" else (f"{parent}." if parent else "")
        name = base + candidate.lstrip("^")
        if name in tensors:
            shape = tensors.shape(name)
            if len(shape) >= 2 and columns in (None, shape[0 if transposed else 1]):
                return name
    return None


def _slots(tensors: NamedTensors, prefix: str, scheme: Scheme) -> tuple[dict[str, Slot], dict[str, Slot], int] | None:
    """Weight slots, bias slots and the number of query rows; None if the names are not those of an attention module."""
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
    out = _output(tensors, prefix, None if triple or pair else rows["v"], transposed)
    if out is None:
        out = _output(tensors, prefix, None, transposed)
    if out is None:
        return None
    columns = tensors.shape(out)[0 if transposed else 1]
    spans: list[Rows] = [None, None, None]
    if triple:
        spans = [*_spans((columns, (rows["q"] - columns) // 2, (rows["q"] - columns) // 2))]
    elif pair:
        spans = [None, *_spans((rows["k"] // 2, rows["k"] // 2))]
    if scheme.interleaved and triple:
        spans = [*_interleaved(tensors, rows["q"], prefix)]
    weights = {part: Slot(names[part], span, transposed) for part, span in zip("qkv", spans, strict=True)}
    weights["o"] = Slot(out, None, transposed)
    query_rows = columns if triple else rows["q"]
    return weights, _biases(tensors, prefix, scheme, weights, rows), query_rows


def _spans(sizes: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _interleaved(tensors: NamedTensors, rows: int, prefix: str) -> tuple[Tensor, ...]:
    """The rows of q, k and v where each key head follows the queries that use it: q .. q, k, v of key head 0, then 1.

    With as many key heads as heads this is GPT-NeoX's and BLOOM's packing, with fewer Falcon's.
    """
    path = prefix[:-1]
    heads = tensors.hint(path, HEADS)
    kv_heads = heads if heads is None else _kv_heads(tensors, path, heads)
    if heads is None or not kv_heads or heads % kv_heads or rows % (heads + 2 * kv_heads):
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
            name = prefix + scheme.bias[i]
            span = weight.rows if weight.rows is not None else whole[i]
        elif part in "qv" and name not in tensors:
            name, span = f"{prefix}{part}_bias", None  # BEiT and EVA have two separate biases, and none for keys
        if name in tensors and len(tensors.shape(name)) == 1:
            out[part] = Slot(name, span, vector=True)
    return out


def _kind(tensors: NamedTensors, prefix: str, weights: dict[str, Slot]) -> Literal["self", "cross"]:
    words = prefix[:-1].split(".") if prefix else [""]
    parent = ".".join(words[:-1])
    beside = f"{parent}.self_attn." if parent else "self_attn."
    if any(_CROSS.search(word) for word in words[-2:]) or f"{prefix}latent" in tensors:
        return "cross"
    if words[-1] == "multihead_attn" and any(name.startswith(beside) for name in tensors.names):
        return "cross"
    if any(f"{parent}.{probe}" in tensors for probe in ("probe", "latent")):
        return "cross"  # a learned query pools the tokens
    q, k = (tensors.shape(weights[p].name)[0 if weights[p].transposed else 1] for p in "qk")
    return "self" if q == k else "cross"


def _same_block(last: AttentionPart, prefix: str, kind: str) -> bool:
    if kind == "self" or last.kind == "cross":
        return False
    mine, other = prefix[:-1], last.name
    beside = mine.rpartition(".")[0] == other.rpartition(".")[0]
    return beside or (_block(mine) != "" and _block(mine) == _block(other))


def _block(path: str) -> str:
    """The path up to and including its last number: the block of an attention module."""
    found = re.match(r"(.*(?:^|\.)\d+)(?:\.|$)", path)
    return found.group(1) if found else ""


def _part(
    tensors: NamedTensors,
    prefix: str,
    layer: int,
    kind: Literal["self", "cross"],
    weights: dict[str, Slot],
    biases: dict[str, Slot],
    query_rows: int,
) -> AttentionPart:
    path = prefix.removesuffix(".")
    sizes = {part: slot.size(tensors) for part, slot in weights.items()}
    heads, kv_heads, k, values = _heads(tensors, path, query_rows, sizes)
    return AttentionPart(
        layer=layer,
        name=path,
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        width=sizes["q"][1],
        kv_width=sizes["k"][1],
        head_width=k,
        value_width=values,
        rotary=kind == "self" and tensors.rope(path),
        causal=_causal(tensors, path),
        normalised=any(n in tensors for n in (f"{prefix}{x}.weight" for x in _QK_NORMS))
        or f"{prefix}logit_scale" in tensors,
        scale=_scale(tensors, path, k),
        positional=any(prefix + name in tensors for name in _POSITIONAL),
        numbers=tuple(range(heads)),
        _total=(heads, kv_heads),
        _tensors=tensors,
        _weights=weights,
        _biases=biases,
    )


def _heads(
    tensors: NamedTensors, path: str, query_rows: int, sizes: dict[str, tuple[int, int]]
) -> tuple[int, int, int, int]:
    """(heads, kv_heads, head width, value width) from hints, checked against the shape of every projection."""
    heads = tensors.hint(path, HEADS)
    if not heads:
        width = tensors.hint(path, HEAD_WIDTHS)
        if not width:
            raise AnatomyError(
                f"`{path}`: found {query_rows} query rows, and no attribute or config with the number of heads; "
                "pass config={'num_attention_heads': H}"
            )
        heads = query_rows // width
    k = query_rows // heads
    counted = {part: rows for part, (rows, _) in sizes.items()}
    kv_heads = counted["k"] // k if k else 0
    good = heads * k == counted["q"] and kv_heads and kv_heads * k == counted["k"] and heads % kv_heads == 0
    values = counted["v"] // kv_heads if good else 0
    if not good or values * kv_heads != counted["v"] or values * heads != sizes["o"][1]:
        raise AnatomyError(
            f"`{path}`: {heads} heads do not divide the projections: q {counted['q']}, k {counted['k']}, "
            f"v {counted['v']} rows, o {sizes['o'][1]} columns; check the number of heads"
        )
    return heads, kv_heads, k, values


# Parameters of gated positional self-attention and of convolutions in attention, ours and (gates) timm's.
_POSITIONAL = ("gating_param", "filter_scale")
_QK_NORMS = ("q_norm", "query_norm", "norm_q", "q_layernorm", "q_ln")


def _causal(tensors: NamedTensors, path: str) -> bool | None:
    stated = tensors.own(path, "is_causal")
    if stated is True or (f"{path}.bias" in tensors and len(tensors.shape(f"{path}.bias")) == 4):
        return True
    # CLIP's text tower is causal by a mask that is passed to it.
    return False if stated is False and "text_model" not in path.split(".") else None


def _scale(tensors: NamedTensors, path: str, k: int) -> float:
    for key in ("scaling", "scale"):
        value = tensors.own(path, key)
        if isinstance(value, float):
            return value
    unscaled = tensors.hint(path, ("model_type",), str) in ("t5", "mt5", "umt5")  # T5 folds the scale into its weights
    return 1.0 if unscaled else k**-0.5
