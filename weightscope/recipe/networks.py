"""[network]: one class per network type."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from weightscope._util.names import unknown
from weightscope._util.plugins import is_reference
from weightscope.recipe.base import Depth, Finite, Fraction, NonNegative, Positive, Section, Width, check_numbers
from weightscope.recipe.sequence_networks import SEQUENCE_TYPES, Mamba2Config, MambaConfig, TransformerConfig

_MOST_STAGES = 16  # each halves the image
_PER_STAGE = Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number")


class ConvMixerConfig(Section):
    """ConvMixer-width/depth (thesis 2.1.1)."""

    takes: ClassVar[str] = "images"

    type: Literal["convmixer"]
    width: Width
    depth: Depth
    kernel_size: Width = 7
    patch_size: Width = 2
    dilations: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "A"
    residual: Literal["none", "first", "both"] = "first"
    norm: Literal["batch", "layer"] = "batch"
    activation: Literal["gelu", "relu"] = "gelu"


class ConvNeXtConfig(Section):
    """ConvNeXt: isotropic if `width` and `depth` are numbers, hierarchical if they are lists of equal length."""

    takes: ClassVar[str] = "images"

    type: Literal["convnext"]
    width: Annotated[
        Annotated[Width, Tag("number")] | Annotated[tuple[Width, ...], Field(max_length=_MOST_STAGES), Tag("list")],
        _PER_STAGE,
    ]
    depth: Annotated[
        Annotated[Depth, Tag("number")] | Annotated[tuple[Depth, ...], Field(max_length=_MOST_STAGES), Tag("list")],
        _PER_STAGE,
    ]
    kernel_size: Width = 7
    patch_size: Width = 2
    expansion: Width = 2
    layer_scale: Positive | None = None
    drop_path: Fraction = 0.0
    learned_sum: Finite | None = None

    @field_validator("width", "depth", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _same_stages(self) -> "ConvNeXtConfig":
        stages = [len(v) if isinstance(v, tuple) else None for v in (self.width, self.depth)]
        if stages[0] != stages[1]:
            raise ValueError("width and depth must both be numbers, or lists with one entry per stage")
        return self

    @property
    def reduction(self) -> int:
        """The factor between the image's side length and the last stage's."""
        return self.patch_size * 2 ** (len(self.width) - 1 if isinstance(self.width, tuple) else 0)


class ViTConfig(Section):
    """Vision transformer."""

    takes: ClassVar[str] = "images"

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
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, found width {self.width} and heads {self.heads}")
        if self.layer_scale is None and self.layer_scale_on != "both":
            raise ValueError(f"layer_scale_on = {self.layer_scale_on!r} needs a number for layer_scale")
        if self.filter_size is not None and not self.attention.startswith("conv-"):
            raise ValueError(f"filter_size is of convolutions in attention; leave it out for {self.attention!r}")
        return self


class OwnNetworkConfig(BaseModel):
    """A network of one's own: `type = "package.module:factory"`, and numbers for the factory.

    The factory is called as `factory(in_channels, image_size, num_classes, **numbers)`, for sequences as
    `factory(vocabulary, **numbers)`, and returns an `nn.Module`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    takes: ClassVar[None] = None  # images or sequences, as the factory expects

    type: str

    @model_validator(mode="after")
    def _numbers(self) -> "OwnNetworkConfig":
        check_numbers(self.numbers)
        return self

    @property
    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of the factory."""
        return dict(self.model_extra or {})


NETWORK_TYPES = ("convmixer", "convnext", "vit", *SEQUENCE_TYPES)


def _network_type(value: Any) -> str:
    """The tag of a [network] section, for the union's discriminator."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "own" if is_reference(kind) else str(kind)


def _network(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, Mapping) and _network_type(value) not in (*NETWORK_TYPES, "own"):
        if "type" not in value:
            raise ValueError(f"type is missing; expected one of {', '.join(map(repr, NETWORK_TYPES))}")
        raise ValueError(
            unknown("network type", value["type"], NETWORK_TYPES, "'package.module:factory' for a network of your own")
        )
    return handler(value)


NetworkConfig = Annotated[
    Annotated[ConvMixerConfig, Tag("convmixer")]
    | Annotated[ConvNeXtConfig, Tag("convnext")]
    | Annotated[ViTConfig, Tag("vit")]
    | Annotated[MambaConfig, Tag("mamba")]
    | Annotated[Mamba2Config, Tag("mamba2")]
    | Annotated[TransformerConfig, Tag("transformer")]
    | Annotated[OwnNetworkConfig, Tag("own")],
    Discriminator(_network_type),
    WrapValidator(_network),
]


def network_types(takes: str) -> list[str]:
    """The registered types of networks for images, or for sequences."""
    union = get_args(get_args(NetworkConfig)[0])
    sections = [get_args(member)[0] for member in union]
    return [section.model_fields["type"].annotation.__args__[0] for section in sections if section.takes == takes]
