"""One attention module of a network: queries, keys, values and output projection, by head."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from weightscope._util.checks import chosen
from weightscope.anatomy.tensors import InSlots, NamedTensors, Slot
from weightscope.errors import AnatomyError, UsageError

_WINDOWS = ("sliding_window", "window_size", "local_window_size", "attention_window", "local_attention")

PartName = Literal["q", "k", "v", "o"]


NOTES = {
    "heads mixed": "maps of several heads are mixed",
    "activated": "a nonlinear function acts between the values and the output projection",
    "gated": "what attention gives is multiplied by other activations",
    "scaled": "factors of channels act on what attention gives, or on the output",
    "widened": "the output is added to other channels than those that queries read",
}
NO_PRODUCT = ("activated", "scaled", "widened")
"""Notes with which W_V W_O is no map of the stream to itself."""


@dataclass(frozen=True)
class Gain:
    """Factors of channels: those that a normalisation multiplies by, a LayerScale, or one number for all."""

    name: str  # of the tensor (d,); empty without one
    offset: float = 0.0  # is added to its numbers: 1 for norms that multiply by 1 + weight
    times: float = 1.0  # multiplies the sum

    def read(self, tensors: NamedTensors) -> Tensor:
        """The factors (d,), or (1,) without a tensor, float64."""
        given = tensors.get(self.name).double().flatten().cpu() + self.offset if self.name else torch.ones(1).double()
        return given * self.times


OTHERS = {  # kinds of attention but self-attention
    "cross": "cross-attention",
    "channels": "attention between channels",
    "pooled": "attention of single queries (a class token, learned ones, or one for each window)",
}


@dataclass(frozen=True, eq=False)
class AttentionPart(InSlots):
    """One attention module: its four projections, as tensors with an axis for the heads.

    Row-vector convention: tokens are the rows of X (n, d_in), so the logits of head h are
    `X_q q[h] k[g]^T X_k^T * scale` and its contribution to the output is `A X_v v[g] o[h]`, where g is the
    key/value head that query head h uses (`kv_head`).

    `read` and `write` take q (H, d, k), k (kv_heads, kv_width, k), v (kv_heads, kv_width, value_width) and
    o (H, value_width, d); `read_bias` and `write_bias` (heads, width of a head) for q, k and v, and (d,) for o.
    """

    layer: int  # over the whole model, from 0; self- and cross-attention of one block share it
    name: str  # path of the attention module, including the components that wrappers add
    # cross: keys and values of another stream than queries; pooled: queries that are learned or of one token.
    kind: Literal["self", "cross", "channels", "pooled"]
    heads: int  # H, number of query heads
    kv_heads: int  # number of key/value heads; less than H for grouped queries
    width: int  # d, of the residual stream that queries read
    kv_width: int  # of the stream that keys and values read; d, except in some cross-attention
    head_width: int  # k, of queries and keys
    value_width: int  # of values; usually k
    # `rotary`, `causal`, `scale` and `positional` are measured if the model has code, else as names and config say.
    rotary: bool  # queries and keys are rotated by position, so that `q k^T` is the product at relative position 0
    causal: bool | None  # whether later tokens are masked; None if unknown
    normalised: bool  # queries and keys are normalised before the product, so that its scale is arbitrary
    scale: float  # factor on the logits
    positional: bool  # gates, convolutions or biases of positions enter the map: it is not the softmax of logits alone
    numbers: tuple[int, ...]  # of the query heads within the module; not all of them in a part made by `only`
    _tensors: NamedTensors = field(repr=False)
    _weights: dict[str, Slot] = field(repr=False)
    _biases: dict[str, Slot] = field(repr=False)
    notes: frozenset[str] = frozenset()  # of `NOTES`
    # What acts on the channels right before q, k and v, and right after o; a text says why it is not known.
    norm: Gain | str = "its normalisation is not known"
    layer_scale: Gain | str | None = None
    by_names: bool = False  # the order of packed rows follows from a part of the names of an architecture

    def norm_gain(self) -> Tensor:
        """The gain (d,) of the normalisation whose output is read, float64; AnatomyError if there is none to fold."""
        return self._factors(self.norm, "fold_norms")

    def layer_scale_factors(self) -> Tensor | None:
        """The factors (d,) or (1,) after the output, float64; None without any, AnatomyError if they are not known."""
        return None if self.layer_scale is None else self._factors(self.layer_scale, "fold_scales")

    def _factors(self, gain: Gain | str, option: str) -> Tensor:
        if isinstance(gain, str):
            raise AnatomyError(f"`{self.name}`: {gain}; compute without {option}, or leave this layer out")
        return gain.read(self._tensors)

    def without(self, *notes: str, caller: str) -> None:
        """UsageError if the module has one of some `NOTES`, or a negative factor, that an initialiser refuses."""
        there = [NOTES[note] for note in notes if note in self.notes]
        if "scaled" in notes and isinstance(self.layer_scale, Gain) and self.layer_scale.times < 0:
            there.append("a negative number multiplies the output")
        if there:
            raise UsageError(f"{caller}: `{self.name}`: {there[0]}, which it does not support; choose other layers")

    @property
    def window(self) -> int | None:
        """How far a query sees (to each side or in a row), as attributes or the config say; None if they state nothing.

        A window of more tokens than are tried is not seen in what is measured.
        """
        return self._tensors.hint(self.name, _WINDOWS) or None

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` uses."""
        return head // (self.heads // self.kv_heads)

    def only(self, heads: int | Sequence[int]) -> "AttentionPart":
        """The part in some query heads, negative ones counted from the end, with the key heads that these use."""
        numbers = chosen(f"heads of `{self.name}`", heads, range(self.heads))
        groups = sorted({self.kv_head(h) for h in numbers})
        if len(numbers) * self.kv_heads != len(groups) * self.heads:
            each = self.heads // self.kv_heads
            raise UsageError(f"heads: `{self.name}` has a key for every {each} heads; choose all that share one")

        def some(part: str, slot: Slot) -> Slot:
            rows = torch.arange(slot.count(self._tensors))
            rows = rows if slot.rows is None else rows[slot.rows]
            kept = numbers if part in "qo" else groups
            assert slot.shape is not None
            return replace(slot, rows=rows.reshape(slot.shape[:2])[kept].flatten(), shape=(len(kept), *slot.shape[1:]))

        weights = {part: some(part, slot) for part, slot in self._weights.items()}
        biases = {part: slot if part == "o" else some(part, slot) for part, slot in self._biases.items()}
        sizes = {"heads": len(numbers), "kv_heads": len(groups)}
        own = tuple(self.numbers[h] for h in numbers)
        return replace(self, **sizes, numbers=own, _weights=weights, _biases=biases)  # type: ignore[arg-type]


def chosen_heads(parts: Sequence[AttentionPart], heads: int | Sequence[int] | None) -> list[AttentionPart]:
    """The parts reduced to some heads: all for None, one number, or several; see `AttentionPart.only`."""
    return list(parts) if heads is None else [part.only(heads) for part in parts]
