"""[network]: one section for each type of network, which says what a recipe may set, and which class it builds.

Does not import torch, so a section repeats those arguments of the class that recipes set, with their bounds and the
defaults of recipes. What depends on sizes of the data is checked by the section [data].
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, SerializeAsAny, Tag, model_validator

from weightscope._util.checks import divided
from weightscope._util.names import unknown
from weightscope._util.plugins import Registry, is_reference
from weightscope.data.task import (
    Depth,
    Finite,
    Fraction,
    FromList,
    NonNegative,
    Positive,
    Section,
    Width,
    check_numbers,
)

_MOST_STAGES = 16  # each halves the image


_PER_STAGE = Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number")
_List = (Field(max_length=_MOST_STAGES), Tag("list"))
Widths = Annotated[Annotated[Width, Tag("number")] | Annotated[tuple[Width, ...], *_List], _PER_STAGE, FromList]
Depths = Annotated[Annotated[Depth, Tag("number")] | Annotated[tuple[Depth, ...], *_List], _PER_STAGE, FromList]

Sizes = Annotated[Annotated[Width, Tag("number")] | Annotated[tuple[Width, ...], Tag("list")], _PER_STAGE, FromList]


class NetworkConfig(Section):
    """What all sections of networks have."""

    takes: ClassVar[str | None]  # `Task.what`; None if that is up to the user's own factory
    network: ClassVar[str]  # its class, "package.module:class"

    type: str

    @classmethod
    def of(cls, value: Any) -> Any:
        """The class of a section by its type; ValueError for an unknown one."""
        kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        if is_reference(kind):
            return OwnNetworkConfig
        if isinstance(kind, str) and kind in SECTIONS:
            return SECTIONS[kind]
        if kind is None:
            raise ValueError(f"type is missing; expected one of {', '.join(map(repr, SECTIONS))}")
        raise ValueError(unknown("network type", kind, SECTIONS, "'package.module:factory' for a network of your own"))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the class."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}

    @property
    def reduction(self) -> int:
        """The factor by which the network reduces the side of an image, which must be a multiple of it."""
        return getattr(self, "patch_size", 1)

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence, if there is a limit."""
        return None


SECTIONS: Registry[type[NetworkConfig]] = Registry("network type")
"""Sections by the type of network that they describe."""


@SECTIONS.register("convmixer")
class ConvMixerConfig(NetworkConfig):
    """ConvMixer-width/depth (thesis 2.1.1); `kernel_size` may be a list with one entry per layer."""

    takes = "images"
    network = "weightscope.networks.convmixer:ConvMixer"

    type: Literal["convmixer"]
    width: Width
    depth: Depth
    kernel_size: Sizes = 7
    patch_size: Width = 2
    dilations: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "A"
    residual: Literal["none", "first", "both"] = "first"
    norm: Literal["batch", "layer"] = "batch"
    activation: Literal["gelu", "relu"] = "gelu"

    @model_validator(mode="after")
    def _one_size_per_layer(self) -> "ConvMixerConfig":
        if isinstance(self.kernel_size, tuple) and len(self.kernel_size) != self.depth:
            raise ValueError(
                f"kernel_size: expected a number or one for each of {self.depth} layers, found {len(self.kernel_size)}"
            )
        return self


@SECTIONS.register("convnext")
class ConvNeXtConfig(NetworkConfig):
    """ConvNeXt: isotropic if `width` and `depth` are numbers, hierarchical if they are lists of equal length."""

    takes = "images"
    network = "weightscope.networks.convnext:ConvNeXt"

    type: Literal["convnext"]
    width: Widths
    depth: Depths
    kernel_size: Width = 7
    patch_size: Width = 2
    expansion: Width = 2
    layer_scale: Positive | None = None
    drop_path: Fraction = 0.0
    learned_sum: Finite | None = None

    @model_validator(mode="after")
    def _same_stages(self) -> "ConvNeXtConfig":
        stages = [len(v) if isinstance(v, tuple) else None for v in (self.width, self.depth)]
        if stages[0] != stages[1]:
            raise ValueError("width and depth must both be numbers, or lists with one entry per stage")
        return self

    @property
    def reduction(self) -> int:
        """The patch, and a factor of 2 for each stage after the first."""
        return self.patch_size * 2 ** (len(self.width) - 1 if isinstance(self.width, tuple) else 0)


@SECTIONS.register("vit")
class ViTConfig(NetworkConfig):
    """Vision transformer."""

    takes = "images"
    network = "weightscope.networks.vit:ViT"

    type: Literal["vit"]
    width: Width
    depth: Depth
    heads: Width
    patch_size: Width = 4
    expansion: Width = 4
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    position_scale: Positive = 1.0
    pool: Literal["average", "token"] = "average"
    layer_scale: NonNegative | None = None
    layer_scale_on: Literal["both", "attention", "skip"] = "both"
    attention: Literal["softmax", "gpsa", "conv-logits", "conv-map", "conv-softmax-map"] = "softmax"
    filter_size: Width | None = None
    qkv_bias: bool = True
    drop_path: Fraction = 0.0
    learned_sum: Finite | None = None

    @model_validator(mode="after")
    def _heads(self) -> "ViTConfig":
        divided("width", self.width, "heads", self.heads)
        if self.layer_scale is None and self.layer_scale_on != "both":
            raise ValueError(f"layer_scale_on = {self.layer_scale_on!r} needs a number for layer_scale")
        if self.filter_size is not None and not self.attention.startswith("conv-"):
            raise ValueError(f"filter_size is of convolutions in attention; leave it out for {self.attention!r}")
        return self


LayerKind = Literal["default", "attention", "linear_attention"]


class _HybridConfig(NetworkConfig):
    """The keys that Mamba and Mamba-2 share; `layers` has one kind for each layer, all "default" without it."""

    takes = "sequences"

    width: Width
    depth: Depth
    state: Width
    expansion: Width = 2
    tied: bool
    layers: Annotated[tuple[LayerKind, ...], Field(min_length=1), FromList] | None = None
    key_width: Width | None = None

    @model_validator(mode="after")
    def _kinds(self) -> "_HybridConfig":
        if self.layers is not None and len(self.layers) != self.depth:
            raise ValueError(f"layers: expected {self.depth} names, one for each layer, found {len(self.layers)}")
        if self.key_width is not None and not {*(self.layers or ())} - {"default"}:
            raise ValueError("key_width is of attention layers; leave it out where `layers` has none")
        return self


@SECTIONS.register("mamba")
class MambaConfig(_HybridConfig):
    """Mamba, or a hybrid with attention, for sequences of tokens."""

    network = "weightscope.networks.sequences:Mamba"

    type: Literal["mamba"]
    state: Width = 16
    tied: bool = True


@SECTIONS.register("mamba2")
class Mamba2Config(_HybridConfig):
    """Mamba-2, or a hybrid with attention, for sequences of tokens."""

    network = "weightscope.networks.sequences:Mamba2"

    type: Literal["mamba2"]
    state: Width = 128
    head_width: Width = 64
    groups: Width = 1
    tied: bool = False

    @model_validator(mode="after")
    def _heads(self) -> "Mamba2Config":
        heads = divided("expansion * width", self.expansion * self.width, "head_width", self.head_width)
        divided("heads", heads, "groups", self.groups)
        return self


@SECTIONS.register("transformer")
class TransformerConfig(NetworkConfig):
    """Causal Transformer for sequences of tokens, at most `context` of them with sinusoidal positions."""

    takes = "sequences"
    network = "weightscope.networks.sequences:CausalTransformer"

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
        head_width = divided("width", self.width, "heads", self.heads)
        if self.positions == "rotary" and head_width % 2:
            raise ValueError(f"rotary positions need heads of even width, found {head_width}")
        if self.width % 2:
            raise ValueError(f"width: expected an even number, as the position codes have, found {self.width}")
        return self

    @property
    def longest(self) -> int | None:
        """`context`, with sinusoidal positions."""
        return self.context if self.positions == "sinusoidal" else None


class OwnNetworkConfig(NetworkConfig):
    """A network of one's own: `type = "package.module:factory"`, and numbers for the factory.

    The factory is called as `factory(in_channels, image_size, num_classes, **numbers)`, for sequences as
    `factory(vocabulary, **numbers)`, and returns an `nn.Module`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    takes = None

    @model_validator(mode="after")
    def _numbers(self) -> "OwnNetworkConfig":
        check_numbers(self.numbers)
        return self

    @property
    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of the factory."""
        return dict(self.model_extra or {})


def _section(value: Any) -> Any:
    """The section by its type; errors keep the paths of the fields."""
    return value if isinstance(value, NetworkConfig) else NetworkConfig.of(value).model_validate(value)


NetworkField = Annotated[SerializeAsAny[NetworkConfig], BeforeValidator(_section)]
"""A [network] section in another model."""
