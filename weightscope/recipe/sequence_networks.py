"""[network] of sequences: one class per network type."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from weightscope.recipe.base import Depth, Fraction, Section, Width

LayerKind = Literal["default", "attention", "linear_attention"]


class _HybridConfig(Section):
    """The keys that Mamba and Mamba-2 share; `layers` has one kind for each layer, all "default" without it."""

    takes: ClassVar[str] = "sequences"

    width: Width
    depth: Depth
    state: Width
    expansion: Width = 2
    tied: bool
    layers: Annotated[tuple[LayerKind, ...], Field(min_length=1)] | None = None
    key_width: Width | None = None

    @field_validator("layers", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _kinds(self) -> "_HybridConfig":
        if self.layers is not None and len(self.layers) != self.depth:
            raise ValueError(f"layers: expected {self.depth} names, one for each layer, found {len(self.layers)}")
        if self.key_width is not None and not {*(self.layers or ())} - {"default"}:
            raise ValueError("key_width is of attention layers; leave it out where `layers` has none")
        return self


class MambaConfig(_HybridConfig):
    """Mamba, or a hybrid with attention, for sequences of tokens."""

    type: Literal["mamba"]
    state: Width = 16
    tied: bool = True


class Mamba2Config(_HybridConfig):
    """Mamba-2, or a hybrid with attention, for sequences of tokens."""

    type: Literal["mamba2"]
    state: Width = 128
    head_width: Width = 64
    groups: Width = 1
    tied: bool = False

    @model_validator(mode="after")
    def _heads(self) -> "Mamba2Config":
        heads, rest = divmod(self.expansion * self.width, self.head_width)
        if rest or heads % self.groups:
            raise ValueError(
                f"head_width must divide the {self.expansion * self.width} inner channels, and groups the heads; found "
                f"head_width {self.head_width} and groups {self.groups}"
            )
        return self


class TransformerConfig(Section):
    """Causal Transformer for sequences of tokens, at most `context` of them with sinusoidal positions."""

    takes: ClassVar[str] = "sequences"

    type: Literal["transformer"]
    width: Width
    depth: Depth
    heads: Width
    positions: Literal["sinusoidal", "rotary"] = "sinusoidal"
    context: Width = 1024
    expansion: Width = 4
    embedding_dropout: Fraction = 0.0

    @model_validator(mode="after")
    def _heads(self) -> "TransformerConfig":
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, found width {self.width} and heads {self.heads}")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(f"rotary positions need heads of even width, found {self.width // self.heads}")
        if self.width % 2:
            raise ValueError(f"width: expected an even number, as the position codes have, found {self.width}")
        return self

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence, if there is a limit."""
        return self.context if self.positions == "sinusoidal" else None


SEQUENCE_TYPES = ("mamba", "mamba2", "transformer")
