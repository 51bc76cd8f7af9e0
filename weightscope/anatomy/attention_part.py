"""`AttentionPart`: the four projections of one attention module, with an axis for the heads."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from weightscope.anatomy.slots import InSlots, Slot
from weightscope.anatomy.tensors import NamedTensors
from weightscope.errors import SpecError, UsageError

PartName = Literal["q", "k", "v", "o"]


@dataclass(frozen=True, eq=False)
class AttentionPart(InSlots):
    """One attention module: its four projections, as tensors with an axis for the heads.

    Row-vector convention: tokens are the rows of X (n, d_in), so the logits of head h are
    `X_q q[h] k[g]^T X_k^T * scale` and its contribution to the output is `A X_v v[g] o[h]`, where g is the
    key/value head that query head h uses (`kv_head`).

    Attributes:
        layer: number of the layer over the whole model, from 0; self- and cross-attention of one block share it.
        name: path of the attention module, including the components that wrappers add.
        kind: "self" or "cross".
        heads: H, number of query heads.
        kv_heads: number of key/value heads; less than H for grouped queries.
        width: d, of the residual stream that queries read.
        kv_width: of the stream that keys and values read; d, except in some cross-attention.
        head_width: k, of queries and keys.
        value_width: of values; usually k.
        rotary: queries and keys are rotated by position, so that `q k^T` is the product at relative position 0.
        causal: whether later tokens are masked; None if unknown.
        normalised: queries and keys are normalised before the product (`q_norm`), so that its scale is arbitrary.
        scale: factor on the logits; 1/sqrt(k), unless the module states another.
        positional: gates, positional maps or convolutions of its own enter the attention map, so that it is not the
            softmax of the logits alone.
        numbers: of the query heads within the module; not all of them in a part made by `only`.
    """

    layer: int
    name: str
    kind: Literal["self", "cross"]
    heads: int
    kv_heads: int
    width: int
    kv_width: int
    head_width: int
    value_width: int
    rotary: bool
    causal: bool | None
    normalised: bool
    scale: float
    positional: bool
    numbers: tuple[int, ...]
    _total: tuple[int, int] = field(repr=False)  # query heads and key/value heads of the module
    _tensors: NamedTensors = field(repr=False)
    _weights: dict[str, Slot] = field(repr=False)
    _biases: dict[str, Slot] = field(repr=False)

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` uses."""
        return head // (self.heads // self.kv_heads)

    def only(self, heads: Sequence[int]) -> "AttentionPart":
        """The module's part in some query heads, with the key/value heads that these use; the others stay as they are.

        Args:
            heads: numbers from 0, negative ones from the end.

        Raises:
            UsageError: if there is no such head, or some of the heads that share a key are missing.
        """
        wanted = [head + self.heads if isinstance(head, int) and head < 0 else head for head in heads]
        if not wanted or any(isinstance(h, bool) or h not in range(self.heads) for h in wanted):
            found = f"heads: expected some of 0 to {self.heads - 1} in `{self.name}`, found {list(heads)}"
            raise UsageError(found)
        numbers = tuple(sorted(set(wanted)))
        groups = {self.kv_head(h) for h in numbers}
        if len(numbers) * self.kv_heads != len(groups) * self.heads:
            each = self.heads // self.kv_heads
            raise UsageError(f"heads: `{self.name}` has a key for every {each} heads; choose all that share one")
        chosen = tuple(self.numbers[h] for h in numbers)
        return replace(self, heads=len(numbers), kv_heads=len(groups), numbers=chosen)

    def _groups(self, part: str) -> tuple[int, int, list[int]]:
        """Heads of the module, the width of one, and the numbers of those that this part has."""
        if part not in ("q", "k", "v", "o"):
            raise UsageError(f"part: expected one of 'q', 'k', 'v', 'o', found {part!r}")
        inner = self.head_width if part in "qk" else self.value_width
        heads, kv_heads = self._total
        if part in "qo":
            return heads, inner, list(self.numbers)
        return kv_heads, inner, sorted({head // (heads // kv_heads) for head in self.numbers})

    def read(self, part: PartName) -> Tensor:
        """A copy of one projection, float32 or better.

        Shapes: q (H, d, k); k (kv_heads, kv_width, k); v (kv_heads, kv_width, value_width); o (H, value_width, d).
        """
        chosen = self._groups(part)[2]
        whole = self._whole(part)
        return whole if len(chosen) == len(whole) else whole[chosen]

    def _whole(self, part: PartName) -> Tensor:
        """`read` of all heads of the module."""
        heads, inner, _ = self._groups(part)
        matrix = self._weights[part].read(self._tensors)  # (out, in)
        if part == "o":
            return matrix.T.reshape(heads, inner, -1)
        return matrix.reshape(heads, inner, -1).mT

    def write(self, part: PartName, value: Tensor) -> None:
        """Write a projection in place; the exact inverse of `read`, same shapes.

        Raises:
            SpecError: if the shape differs from that of `read`.
            DataError: if a finite number overflows in the parameter's data type, or the model is a read-only file.
        """
        heads, inner, chosen = self._groups(part)
        if value.ndim != 3 or value.shape[0] != len(chosen) or value.shape[1 if part == "o" else 2] != inner:
            raise SpecError(
                f"`{self.name}` {part}: expected {len(chosen)} heads of width {inner}, found shape {tuple(value.shape)}"
            )
        if len(chosen) < heads:
            whole = self._whole(part)
            whole[chosen] = value.to(whole)
            value = whole
        matrix = value.reshape(heads * inner, -1).T if part == "o" else value.mT.reshape(heads * inner, -1)
        self._weights[part].write(self._tensors, matrix)

    def read_bias(self, part: PartName) -> Tensor | None:
        """A copy of a part's bias: (heads, width of a head) for q, k and v, (d,) for o; None if the model has none."""
        heads, inner, chosen = self._groups(part)
        if part not in self._biases:
            return None
        vector = self._biases[part].read(self._tensors)
        return vector if part == "o" else vector.reshape(heads, inner)[chosen]

    def write_bias(self, part: PartName, value: Tensor) -> None:
        """Write a bias in place; the exact inverse of `read_bias`.

        Raises:
            SpecError: if the model has no such bias, or the shape differs from that of `read_bias`.
        """
        heads, inner, chosen = self._groups(part)
        if part not in self._biases:
            raise SpecError(f"`{self.name}` has no bias for {part}")
        if part != "o":
            if tuple(value.shape) != (len(chosen), inner):
                shape = f"({len(chosen)}, {inner})"
                raise SpecError(f"`{self.name}` {part} bias: expected {shape}, found {tuple(value.shape)}")
            whole = self._biases[part].read(self._tensors).reshape(heads, inner)
            whole[chosen] = value.to(whole)
            value = whole.reshape(-1)
        self._biases[part].write(self._tensors, value)


def chosen_heads(parts: Sequence[AttentionPart], heads: int | Sequence[int] | None) -> list[AttentionPart]:
    """The parts reduced to some heads: all for None, one number, or several; see `AttentionPart.only`."""
    if heads is None:
        return list(parts)
    wanted = [heads] if isinstance(heads, int) else heads
    return [part.only(wanted) for part in parts]
