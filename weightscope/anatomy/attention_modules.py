"""Queries, keys, values and output projections, per layer and head, independent of their names and packing.

The names of weights are in `architectures/names.toml`. The order of packed rows, and whether a norm acts before the
attention, follow from the architecture, which the config or a whole set of names tells; what does not follow is not
read, and head counts are never guessed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from weightscope._util.checks import choice
from weightscope._util.names import block_of, joined
from weightscope.anatomy.architectures import Architecture, known, names, stated
from weightscope.anatomy.attention_part import AttentionPart, Gain
from weightscope.anatomy.places import unit_offset
from weightscope.anatomy.tensors import (
    NamedTensors,
    Parts,
    Rows,
    Slot,
    Unread,
    deepest,
    in_layers,
    of_part,
    path_of,
    places,
)
from weightscope.errors import AnatomyError, DataError, UsageError

Scheme = tuple[str, str, str]  # names of weights; equal ones denote packed rows

_CROSS = re.compile(
    r"cross|\bpre_assign_attn|\bassign$|\bencoder_attn\b|\bencdec|\benc_dec|\bencoder_decoder|\battn_pool|"
    r"\bmultihead_attn$",
    re.IGNORECASE,
)


def schemes() -> dict[Scheme, tuple[str, ...]]:
    """The names of queries, keys and values, and all that have to be there."""
    return {(q, k, v): tuple(dict.fromkeys((q, k, v, *more))) for q, k, v, *more in names("projections")}


def find(tensors: NamedTensors) -> Parts[AttentionPart]:
    """All attention modules, in order; the cross-attention of a block is in the layer of its self-attention."""
    reader = _Reader(tensors)
    found = reader.of_one_width(places(tensors, schemes(), reader.part))
    reader.check_given()
    return in_layers(found + reader.nameless(set(map(path_of, found))), tensors, same_block, owner)


class _Reader:
    """Reads the attention modules of a model, and what was given or stated for them."""

    def __init__(self, tensors: NamedTensors) -> None:
        self.tensors = tensors
        self.packed: list[str] = []  # paths with packed weights
        self.by_names: set[str] = set()  # paths whose order of rows follows from a part of the names
        self.scopes: dict[str, Any] = {}  # path -> where one number of heads is stated for all of a config's part
        self.used: set[str] = set()  # of the given `heads`
        layout = tensors.config.get("layout")
        self.layout = None if layout is None else choice("layout", layout, tuple(LAYOUTS))

    def part(self, prefix: str, scheme: Scheme) -> AttentionPart | None:
        """The part at a prefix; None if shapes are not those of an attention module."""
        tensors, path = self.tensors, prefix.removesuffix(".")
        slots = {
            part: slot
            for part, name in zip("qkv", scheme, strict=True)
            if (slot := _matrix(tensors, prefix, name, scheme))
        }
        if len(slots) < 3:
            return None
        given = self._given(path)
        for name, why in names("others").items():
            if prefix + name in tensors:
                raise AnatomyError(f"`{path}`: {why} (`{name}`)")
        triple, pair = scheme[0] == scheme[1] == scheme[2], scheme[0] != scheme[1] == scheme[2]
        rows = {part: slot.size(tensors)[0] for part, slot in slots.items()}
        out = _output(tensors, prefix, slots["v"], None if triple or pair else rows["v"])
        out = out or _output(tensors, prefix, slots["v"], None)
        if out is None:
            return None
        inner, width = out.size(tensors)[0], slots["q"].size(tensors)[1]
        kin = known(tensors, path)
        heads = self._heads(path, kin, inner if triple else rows["q"], width, inner, given)
        if triple or pair:
            spans = self._rows(path, scheme[2], kin, rows["v"], inner, heads, width, pair, slots["v"].transposed)
            slots = {part: replace(slot, rows=span) for (part, slot), span in zip(slots.items(), spans, strict=True)}
        elif rows["q"] == 2 * inner and not inner % heads:
            raise AnatomyError(
                f"`{path}`: `{scheme[0]}` has {rows['q']} rows for an output of {inner}: it packs a gate of the output "
                "with the queries, and gated attention is not read"
            )
        slots["o"] = out
        part = _part(tensors, prefix, slots, _biases(tensors, prefix, scheme, slots, rows), heads, kin)
        return replace(part, by_names=path in self.by_names)

    def _rows(
        self,
        path: str,
        name: str,
        kin: list[Architecture],
        rows: int,
        inner: int,
        heads: int,
        width: int,
        pair: bool,
        conv1d: bool,
    ) -> tuple[Rows, Rows, Rows]:
        """The rows of q, k and v in a packed tensor."""
        self.packed.append(path)
        chosen = next((one for one in kin if name in one.packed), None)
        layout = self.layout or (chosen.rows if chosen else "blocks" if conv1d else None)  # all Conv1Ds have blocks
        if self.layout is None and chosen is not None and chosen.untyped:
            self.by_names.add(path)
        if layout is None or (pair and layout != "blocks"):
            fits = fitting(rows + inner * pair, inner, heads)
            found = next(filter(None, stated(self.tensors, path)), "")
            raise AnatomyError(
                f"`{path}`: the order of the {rows} rows of `{name}` is not known, found "
                f"{f'the architecture {found!r}' if found else 'no architecture'} in the config and the names; of the "
                f"known ones {' or '.join(fits) or 'none'} fit: choose with --layout (config={{'layout': ...}})"
            )
        if layout == "blocks" and not pair and self.layout is None and rows != 3 * inner:
            stated_keys, _ = self.tensors.of_width(path, names("key_heads"), width)
            keys = 1 if self.tensors.hint(path, ("multi_query",), bool) else stated_keys
            if keys is None or rows != inner + 2 * keys * (inner // heads):
                raise AnatomyError(
                    f"`{path}`: `{name}` has {rows} rows for an output of {inner} from {heads} heads, and the config "
                    f"states {keys} key heads"
                )
        try:
            if pair:
                return None, slice(0, rows // 2), slice(rows // 2, rows)
            return LAYOUTS[layout](rows, inner, heads)
        except AnatomyError as error:
            raise AnatomyError(f"`{path}`: {heads} heads do not divide the projections: {error}") from None

    def _heads(self, path: str, kin: list[Architecture], units: int, width: int, inner: int, given: int | None) -> int:
        """The number of heads: of the file's own tables, given, or stated for this part of the model."""
        tensors, prefix = self.tensors, f"{path}." if path else ""
        table, own = _own_heads(tensors, prefix, units)
        heads, scope = given, None
        if heads is None:
            keys = next((one.heads for one in kin if one.heads), None)
            heads, scope = tensors.of_width(path, keys or names("heads"), width)
            scope = None if keys else scope
            own_widths = [n for key in names("head_widths") if (n := tensors.of_width(path, [key], width)[0])]
            if heads and own_widths and not {units, inner} & {heads * n for n in own_widths}:
                raise AnatomyError(
                    f"`{path}`: found {units} query rows, and the config states {heads} heads of width {own_widths[0]}"
                    "; pass --heads PART=H,PART=H (config={'heads': {PART: H}})"
                )
        if heads is None:
            widths = [*names("head_widths"), *(key for one in kin for key in one.head_widths)]
            each, _ = tensors.of_width(path, widths, width)
            each = each or next((one.head_width for one in kin if one.head_width), None)
            heads = units // each if each else None
        if own and table != "q_norm" and heads not in (None, own):
            raise AnatomyError(f"`{path}`: expected {own} as of `{table}`, found {heads} heads; leave --heads out")
        heads = heads or own
        if not heads:
            raise AnatomyError(
                f"`{path}`: found {units} query rows, and no attribute or config with the number of heads of this part "
                f"of width {width}; pass --heads H (PART=H,PART=H), --code timm:NAME or MODULE:FUNCTION, or "
                "config={'num_attention_heads': H}"
            )
        if inner % heads:
            raise AnatomyError(f"`{path}`: {heads} heads do not divide the {inner} columns of the output")
        self.scopes[path] = scope if own is None else None
        return int(heads)

    def _given(self, path: str) -> int | None:
        """The number of `heads` given for the longest beginning, component or part of a path."""
        given = self.tensors.config.get("heads")
        if not isinstance(given, Mapping):
            return None
        fit = [key for key in given if f"{path}.".startswith(f"{key}.") or key in path.split(".") or of_part(path, key)]
        self.used.update(fit)
        return given[max(fit, key=len)] if fit else None

    def check_given(self) -> None:
        """UsageError if what was given applies to nothing."""
        given = self.tensors.config.get("heads")
        if isinstance(given, Mapping) and (unused := [key for key in given if key not in self.used]):
            raise UsageError(
                f"heads: expected parts of paths of attention modules, found {joined(map(repr, unused), 4)}"
            )
        if self.layout is not None and not self.packed:
            raise UsageError(f"layout={self.layout!r}: the model has no packed projections that it could be about")

    def of_one_width(self, found: list[Any]) -> list[Any]:
        """What was found, without the parts of several widths for which one number of heads is stated."""
        widths: dict[Any, set[int]] = {}
        for one in found:
            if isinstance(one, AttentionPart):
                widths.setdefault(self.scopes[one.name], set()).add(one.width)
        out = []
        for one in found:
            scope = self.scopes.get(one.name)
            if isinstance(one, AttentionPart) and scope is not None and len(widths[scope]) > 1:
                why = (
                    f"one number of heads is stated for layers of widths {joined(map(str, sorted(widths[scope])), 4)}; "
                    "give --heads PART=H,PART=H (config={'heads': {PART: H}})"
                )
                one = Unread(one.name, f"({why})", path=one.name)
            out.append(one)
        return out

    def nameless(self, paths: set[str]) -> list[Any]:
        """Modules with norms of queries and without projections."""
        out = {}
        for name in self.tensors.names:
            for norm in names("query_norms"):
                path = name.removesuffix(norm).removesuffix(".")
                if name.endswith(f".{norm}") and path not in paths:
                    out[path] = "(norms queries and keys, whose projections have no known names)"
        return [Unread(path, why, path=path) for path, why in out.items()]


def _matrix(tensors: NamedTensors, prefix: str, name: str, scheme: Scheme) -> Slot | None:
    """The slot of a weight, all of its rows; None if it is no matrix."""
    shape = tensors.shape(prefix + name)
    if len(shape) < 2 or any(n != 1 for n in shape[2:]):
        return None
    packed = tensors.shape(prefix + scheme[1])
    return Slot(prefix + name, None, scheme[1] in names("conv1d") and packed[1] > packed[0])


def _output(tensors: NamedTensors, prefix: str, values: Slot, columns: int | None) -> Slot | None:
    """The slot of the output projection, seen as (in, out), so that its rows are those of heads."""
    parent = prefix[:-1].rpartition(".")[0]
    for candidate in names("outputs"):
        base = prefix if candidate[0] != "^" else (f"{parent}." if parent else "")
        name = base + candidate.lstrip("^")
        if why := tensors.every.get(name):
            raise AnatomyError(f"`{name}` ({why})")
        if name in tensors:
            shape = tensors.shape(name)
            slot = Slot(name, None, not values.transposed)
            if len(shape) >= 2 and 0 not in shape and columns in (None, slot.size(tensors)[0]):
                return slot
    return None


def _own_heads(tensors: NamedTensors, prefix: str, units: int) -> tuple[str, int | None]:
    """The tensor of a file that has an axis of the heads, and their number."""
    inside = tensors.under(prefix.removesuffix("."))
    for key, axis in names("per_head"):
        for name in inside:
            shape = tensors.known_shape(prefix + name)
            if name.split(".")[-1] == key and len(shape) > 1:
                return name, shape[axis if len(shape) == 2 else 0]
    for name in names("query_norms"):
        shape = tensors.known_shape(prefix + name) if f"{prefix}{name}" in tensors else ()
        if len(shape) == 1 and 1 < shape[0] < units and not units % shape[0]:
            return "q_norm", units // shape[0]
    return "", None


def _biases(
    tensors: NamedTensors, prefix: str, scheme: Scheme, weights: dict[str, Slot], rows: dict[str, int]
) -> dict[str, Slot]:
    out = {}
    start = 0
    for i, (part, weight) in enumerate(weights.items()):
        key = weight.name.removeprefix(prefix)
        name, span = weight.name.removesuffix("weight") + "bias", weight.rows
        if (packed := names("biases").get(key)) is not None:
            name = prefix + packed
            if len(set(scheme)) == 3 and packed == "in_proj_bias":  # separate weights and one bias
                span = slice(start, start + rows["qkv"[i]])
                start += rows["qkv"[i]]
        elif part in "qv" and name not in tensors:
            name, span = f"{prefix}{part}_bias", None  # BEiT and EVA have two separate biases, and none for keys
        if name in tensors and len(tensors.shape(name)) == 1:
            out[part] = Slot(name, span, vector=True)
    return out


def _kind(tensors: NamedTensors, path: str, sizes: dict[str, tuple[int, int]]) -> Literal["self", "cross", "pooled"]:
    words = path.split(".")
    parent = ".".join(words[:-1])
    above = f"{parent}." if parent else ""
    beside = {"multihead_attn": "self_attn", "attn2": "attn1"}.get(words[-1])
    if any(_CROSS.search(word) for word in words[-2:] if word != "multihead_attn"):
        return "cross"
    if beside is not None and any(name.startswith(f"{above}{beside}.") for name in tensors.names):
        return "cross"
    if any(f"{path}.{name}".lstrip(".") in tensors for name in ("latent", *names("reduced"))):
        return "cross"  # keys and values are of fewer tokens
    if any(above + probe in tensors for probe in ("probe", "latent")):
        return "pooled"  # by a learned query
    return "self" if sizes["q"][1] == sizes["k"][1] == sizes["v"][1] else "cross"


def same_block(last: Any, this: Any) -> bool:
    """Whether this is the cross-attention of a block whose self-attention was last."""
    paths = [path_of(last), path_of(this)]
    named = ["cross" if _CROSS.search(path) else "self" for path in paths]
    if [getattr(one, "kind", kind) for one, kind in zip((last, this), named, strict=True)] != ["self", "cross"]:
        return False
    return len({path.rpartition(".")[0] for path in paths}) == 1 or block_of(paths[0]) == block_of(paths[1]) != ""


def _part(
    tensors: NamedTensors,
    prefix: str,
    weights: dict[str, Slot],
    biases: dict[str, Slot],
    heads: int,
    kin: list[Architecture],
) -> AttentionPart:
    path = prefix.removesuffix(".")
    sizes = {part: slot.size(tensors) for part, slot in weights.items()}
    kv_heads, k, values = _head_sizes(path, sizes, heads)
    blocks = {"q": (heads, k), "k": (kv_heads, k), "v": (kv_heads, values), "o": (heads, values)}
    kind, width = _kind(tensors, path, sizes), sizes["q"][1]
    slots = {x: replace(slot, shape=(*blocks[x], sizes[x][1]), swapped=x != "o") for x, slot in weights.items()}
    return AttentionPart(
        layer=0,
        name=path,
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        kv_width=sizes["k"][1],
        head_width=k,
        value_width=values,
        rotary=kind == "self" and _states_rotation(tensors, path),
        causal=None,
        normalised=any(prefix + name in tensors for name in (*names("query_norms"), "logit_scale"))
        or any(one.normalised for one in kin),
        scale=next((one.logits for one in kin if one.logits is not None), _stated_scale(tensors, path) or k**-0.5),
        positional=any(prefix + name in tensors for name in _POSITIONAL),
        numbers=tuple(range(heads)),
        notes=frozenset(note for one in kin for note in one.notes),
        norm=_norm(tensors, path, width, kin) if kind == "self" else "queries and keys read two streams",
        layer_scale=_layer_scale(tensors, path, width),
        _tensors=tensors,
        _weights=slots,
        _biases={name: slot if name == "o" else replace(slot, shape=blocks[name]) for name, slot in biases.items()},
    )


def _stated_scale(tensors: NamedTensors, path: str) -> float | None:
    """The factor of the logits that a config states: of Gemma by a width, of Granite itself."""
    width = tensors.hint(path, ("query_pre_attn_scalar",), (int, float))
    return width**-0.5 if width else tensors.hint(path, ("attention_multiplier",), (int, float))


def _head_sizes(path: str, sizes: dict[str, tuple[int, int]], heads: int) -> tuple[int, int, int]:
    """(key heads, width of a head's keys, of its values), checked against the shape of every projection."""
    (q, width), (keys, _), (rows, _), (inner, out) = (sizes[part] for part in "qkvo")
    k = q // heads
    kv_heads = keys // k if k > 0 else 0
    good = heads * k == q and kv_heads and kv_heads * k == keys and heads % kv_heads == 0
    values = rows // kv_heads if good else 0
    if not good or values * kv_heads != rows or values * heads != inner:
        raise AnatomyError(
            f"`{path}`: {heads} heads do not divide the projections: q {q}, k {keys}, v {rows} rows, "
            f"o {inner} columns; check the number of heads"
        )
    if out != width:
        raise AnatomyError(f"`{path}`: the output has {out} rows, the stream a width of {width}")
    return kv_heads, k, values


# Parameters of gated positional self-attention and of convolutions in attention, ours and (gates) timm's.
_POSITIONAL = ("gating_param", "filter_scale")


# What configs say, for models without code.
_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_dim", "rotary_pct", "rotary_emb_base")
_ROPE_TYPES = (
    *("llama", "mistral", "mixtral", "gpt_neox", "gptj", "codegen", "qwen2", "gemma", "phi", "stablelm", "olmo"),
)
_ROPE_TABLES = re.compile(r"(rotary_emb|rope)\b.*(inv_freq|freqs)")


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


def _beside(tensors: NamedTensors, path: str, candidates: Sequence[str], width: int) -> str | None:
    """The first of some tensors (width,) in the parent of a module, or in its parent."""
    block = path.rpartition(".")[0]
    for parent in dict.fromkeys((block, block.rpartition(".")[0])):
        for name in (f"{parent}.{candidate}" if parent else candidate for candidate in candidates):
            if name in tensors and tensors.shape(name)[-1:] == (math.prod(tensors.shape(name)),) == (width,):
                return name
    return None


def _norm(tensors: NamedTensors, path: str, width: int, kin: list[Architecture]) -> Gain | str:
    """The gain of the norm whose output a module reads, or why it is not known."""
    first = tensors.hint(path, ("norm_first",), bool)
    for one in kin:
        if (name := _beside(tensors, path, [f"{norm}.weight" for norm in one.norm], width)) is not None:
            first = not one.after
            break
    else:
        name = _beside(tensors, path, [f"{norm}.weight" for norm in names("norms")], width)
        if first is None and name is not None:
            return (
                f"whether `{name}` acts before it is not known without a known model type; state 'norm_first' and "
                "'norm_offset' in config.json or config="
            )
    if name is None:
        return "no norm before it has a known name"
    if first is False or f"{path}.logit_scale" in tensors:
        return f"`{name}` normalises after the attention, so that it has no gain to fold"
    try:
        return Gain(name, unit_offset(tensors, name))
    except DataError as error:
        return str(error)


def _layer_scale(tensors: NamedTensors, path: str, width: int) -> Gain | None:
    """The factors (d,) of the output of a module; None if there are none."""
    inside = [f"{path.rpartition('.')[2]}.{name}" for name in names("layer_scales")]
    name = _beside(tensors, path, [*names("layer_scales"), *inside], width)
    return None if name is None else Gain(name)


_MODULE = re.compile(r"(attn|attention)s?\d*$", re.IGNORECASE)


def owner(name: str) -> str | None:
    """The module `..attn`, `..attention`, or one with projections of queries and keys, that a tensor is of."""
    found = deepest(name, _MODULE)
    words = name.split(".")
    projections = {"qk", "kv"} | {key.split(".")[0] for scheme in names("projections") for key in scheme[:3]}
    if found is None and any(word in projections for word in words[-3:]):
        at = next(i for i, word in enumerate(words) if i >= len(words) - 3 and word in projections)
        return ".".join(words[:at])
    return found


# -- orders of the rows of one matrix that packs queries, keys and values

Spans = tuple[Rows, Rows, Rows]


def _blocks(rows: int, inner: int, heads: int) -> Spans:
    keys = (rows - inner) // 2
    if keys <= 0 or inner + 2 * keys != rows:
        raise AnatomyError(f"{rows} rows are not {inner} of queries and as many keys as values")
    return slice(0, inner), slice(inner, inner + keys), slice(inner + keys, rows)


def _by_head(rows: int, inner: int, heads: int, groups: int) -> Spans:
    values, each = inner // heads, heads // groups  # queries of one key
    if inner % heads or rows % groups or (width := rows // groups - values) <= 0 or width % (each + 1):
        raise AnatomyError(f"{rows} rows are not those of {heads} heads with {groups} keys, for an output of {inner}")
    k = width // (each + 1)
    table = torch.arange(rows).reshape(groups, -1)
    return table[:, : each * k].flatten(), table[:, each * k : width].flatten(), table[:, width:].flatten()


def _heads(rows: int, inner: int, heads: int) -> Spans:
    return _by_head(rows, inner, heads, heads)


def _groups(rows: int, inner: int, heads: int) -> Spans:
    groups = (rows * heads // inner - heads) // 2
    if rows * heads % inner or groups < 1 or heads % groups:
        raise AnatomyError(f"{rows} rows are not those of {heads} heads and a divisor of them of keys of one width")
    return _by_head(rows, inner, heads, groups)


def _codegen(rows: int, inner: int, heads: int) -> Spans:
    if rows != 3 * inner or heads % 4:
        raise AnatomyError(f"{rows} rows of {heads} heads are not 4 blocks of q, v and k of {inner} rows each")
    table = torch.arange(rows).reshape(4, 3, -1)
    return table[:, 0].flatten(), table[:, 2].flatten(), table[:, 1].flatten()


def _strided(rows: int, inner: int, heads: int) -> Spans:
    if rows != 3 * inner:
        raise AnatomyError(f"{rows} rows are not {inner} times q, k and v")
    return slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)


LAYOUTS: dict[str, Callable[[int, int, int], Spans]] = {
    "blocks": _blocks,  # all q, then all k, then all v; fewer k and v with grouped queries
    "heads": _heads,  # q, k and v of head 0, then of head 1
    "groups": _groups,  # the queries of the first key, this key, its value, then those of the second
    "codegen": _codegen,  # 4 blocks of q, v, k
    "strided": _strided,  # the first row of q, of k, of v, then the second
}
"""Name of an order -> the rows of q, k and v, of all rows, those of the output projection and the number of heads."""


def fitting(rows: int, inner: int, heads: int) -> list[str]:
    """The orders that so many rows may be in."""
    out = []
    for name, order in LAYOUTS.items():
        try:
            order(rows, inner, heads)
        except AnatomyError:
            continue
        out.append(name)
    return out
