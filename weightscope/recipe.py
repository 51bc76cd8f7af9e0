"""`Recipe`: a population of networks, or one arm of a benchmark, as data.

A recipe is a TOML file with the sections [network] [data] [training] [init] [population]. It is validated
strictly: an unknown key, a wrong type or a value out of range is an error that names the field's path.

`[network] type`, `[data] name` and `[init] name` may be references `"package.module:function"` to code of one's own. A
recipe is parsed without importing it; what depends on it is checked when it is used.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from weightscope._util.names import unknown
from weightscope._util.plugins import is_reference, reference_to
from weightscope.data.catalog import dataset_info
from weightscope.errors import RecipeError, UsageError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless the values are what TOML can hold, and finite."""
    for key, value in values.items():
        if isinstance(value, list | tuple):
            _check_numbers({f"{key}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, found {value}")
        elif not isinstance(value, int | float | str):
            raise ValueError(f"{key}: expected a number, a text, true, false, or a list of these, found {value!r}")


class ConvMixerConfig(_Section):
    """ConvMixer-width/depth (thesis 2.1.1)."""

    type: Literal["convmixer"]
    width: Count
    depth: Count
    kernel_size: Count = 7
    patch_size: Count = 2
    dilations: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "A"


class ConvNeXtConfig(_Section):
    """ConvNeXt: isotropic if `width` and `depth` are numbers, hierarchical if they are lists of equal length."""

    type: Literal["convnext"]
    width: Count | tuple[Count, ...]
    depth: Count | tuple[Count, ...]
    kernel_size: Count = 7
    patch_size: Count = 2
    expansion: Count = 2
    layer_scale: Positive | None = None

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


class ViTConfig(_Section):
    """Vision transformer."""

    type: Literal["vit"]
    width: Count
    depth: Count
    heads: Count
    patch_size: Count = 4
    expansion: Count = 4
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    position_scale: Positive = 1.0
    pool: Literal["average", "token"] = "average"
    layer_scale: Positive | None = None

    @model_validator(mode="after")
    def _heads(self) -> "ViTConfig":
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, found width {self.width} and heads {self.heads}")
        return self


class OwnNetworkConfig(BaseModel):
    """A network of one's own: `type = "package.module:factory"`, and numbers for the factory.

    The factory is called as `factory(in_channels, image_size, num_classes, **numbers)` and returns an `nn.Module`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: str

    @model_validator(mode="after")
    def _numbers(self) -> "OwnNetworkConfig":
        _check_numbers(self.numbers)
        return self

    @property
    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of the factory."""
        return dict(self.model_extra or {})


_NETWORK_TYPES = ("convmixer", "convnext", "vit")


def _network_type(value: Any) -> str:
    """The tag of a [network] section, for the union's discriminator."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "own" if is_reference(kind) else str(kind)


def _network(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, Mapping) and _network_type(value) not in (*_NETWORK_TYPES, "own"):
        if "type" not in value:
            raise ValueError(f"type is missing; expected one of {', '.join(map(repr, _NETWORK_TYPES))}")
        known = unknown("network type", value["type"], map(repr, _NETWORK_TYPES))
        raise ValueError(f"{known}; or 'package.module:factory' for a network of your own")
    return handler(value)


NetworkConfig = Annotated[
    Annotated[ConvMixerConfig, Tag("convmixer")]
    | Annotated[ConvNeXtConfig, Tag("convnext")]
    | Annotated[ViTConfig, Tag("vit")]
    | Annotated[OwnNetworkConfig, Tag("own")],
    Discriminator(_network_type),
    WrapValidator(_network),
]


class AugmentConfig(_Section):
    """Augmentation of training images; none by default.

    `crop` is the padding in pixels around the image before a random crop, `flip` a horizontal flip with
    probability 1/2, `cutout` the side length of an erased square, `operations` the number of
    RandAugment-style operations of strength `magnitude` in [0, 1].
    """

    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0
    operations: Annotated[int, Field(ge=0, le=8)] = 0
    magnitude: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.3


class DataConfig(_Section):
    """The data set by name or reference; `train` and `test` limit the number of images."""

    name: str
    train: Count | None = None
    test: Count | None = None
    augment: AugmentConfig = AugmentConfig()

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if not is_reference(value):
            try:
                dataset_info(value)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _sizes(self) -> "DataConfig":
        if is_reference(self.name):
            return self
        info = dataset_info(self.name)
        for field, there in (("train", info.train), ("test", info.test)):
            wanted = getattr(self, field)
            if wanted is not None and wanted > there:
                raise ValueError(f"{field} may be at most {there} for {self.name}, found {wanted}")
        return self


class Range(_Section):
    """A hyperparameter drawn log-uniformly from [low, high] for each network."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _order(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, found {self.low} > {self.high}")
        return self


def _swept(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One message for the union; pydantic's own would list the errors of every alternative."""
    try:
        return handler(value)
    except ValidationError as error:
        if isinstance(value, dict):
            raise
        raise ValueError("expected a finite number >= 0, a list of these, or {low, high}") from error


Swept = Annotated[
    Annotated[Range, Tag("range")]
    | Annotated[NonNegative, Tag("number")]
    | Annotated[Annotated[list[NonNegative], Field(min_length=1)], Tag("list")],
    Discriminator(lambda v: "range" if isinstance(v, dict | Range) else "list" if isinstance(v, list) else "number"),
    WrapValidator(_swept),
]


class TrainingConfig(_Section):
    """AdamW with a learning-rate schedule.

    `learning_rate` and `weight_decay` may be a number, a list (network k takes entry k mod its length) or a range
    `{low, high}`, so a sweep is a population, too. `clip_norm = 0` disables clipping.

    `engine = "batched"` trains the networks of a tile together; "loop" trains any `nn.Module`, one network at a time.

    `kernels = "compiled"` selects kernels in C on a CPU (1.7 to 2.1 times as fast for ConvNeXts with AVX-512, 1.2
    for ViTs and 1.3 for ConvMixers), and Triton kernels with CUDA graphs on a GPU. It is part of the recipe because it
    rounds differently.
    """

    epochs: Count
    batch_size: Count = 64
    learning_rate: Swept = 0.01
    weight_decay: Swept = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["triangular", "cosine", "constant"] = "triangular"
    warmup: Fraction = 0.2
    label_smoothing: Fraction = 0.0
    clip_norm: NonNegative = 1.0
    mixup: NonNegative = 0.0
    frozen: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16"] = "float32"
    kernels: Literal["torch", "compiled"] = "torch"
    evaluate: Literal["end", "epoch"] = "epoch"
    engine: Literal["batched", "loop"] = "batched"

    @model_validator(mode="after")
    def _plain_loop(self) -> "TrainingConfig":
        if self.engine == "loop" and (self.kernels, self.precision) != ("torch", "float32"):
            raise ValueError(
                "engine 'loop' runs plain PyTorch: expected kernels 'torch' and precision 'float32', found "
                f"{self.kernels!r} and {self.precision!r}"
            )
        return self

    @field_validator("betas", "frozen", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class InitConfig(BaseModel):
    """An initialiser by name or reference, or `artifact = "FILE"`; other keys are its named parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "default"
    artifact: str | None = None

    @model_validator(mode="after")
    def _numbers(self) -> "InitConfig":
        _check_numbers(self.parameters)
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The initialiser's named parameters."""
        return dict(self.model_extra or {})

    @classmethod
    def load(cls, path: str | Path) -> "InitConfig":
        """Read an initialiser and its parameters from a TOML file with the keys of an [init] table.

        Raises:
            RecipeError: if the file cannot be read or is invalid.
        """
        values = _read_toml(path)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{path}: " + "; ".join(_explain(e) for e in error.errors())) from None


class PopulationConfig(_Section):
    """The number of networks, the root seed, and the number of networks in a tile.

    Without `tile`, it is chosen when a population is created and then kept: 32 on a CPU, on a GPU as many as its free
    memory holds.
    """

    networks: Count = 256
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tile: Count | None = None


class Recipe(_Section):
    """A population as data, made by `Recipe.load(path)` or `Recipe.parse(text_or_dict)`.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> recipe.replace({"population.networks": 64, "training.epochs": 3})
    """

    network: NetworkConfig
    data: DataConfig
    training: TrainingConfig
    init: Annotated[tuple[InitConfig, ...], Field(min_length=1)] = (InitConfig(),)
    population: PopulationConfig = PopulationConfig()

    @field_validator("init", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @model_validator(mode="after")
    def _patches(self) -> "Recipe":
        if isinstance(self.network, OwnNetworkConfig) or is_reference(self.data.name):
            return self
        size = dataset_info(self.data.name).size
        step = getattr(self.network, "reduction", self.network.patch_size)
        if size % step:
            raise ValueError(
                f"network.patch_size: the network reduces the image by a factor of {step}, which must divide "
                f"{self.data.name}'s {size} pixels"
            )
        return self

    @classmethod
    def parse(cls, source: str | Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """Parse TOML text or nested dictionaries.

        Callables are accepted as `network`, `data` and `init` (or as the `type` or `name` in them) and stored as
        references.

        Raises:
            RecipeError: naming the field's path, what is allowed and what was found.
            UsageError: for a callable without a name, such as a lambda.
        """
        values = _parse_toml(source, where) if isinstance(source, str) else source
        try:
            return cls.model_validate(_with_references(values))
        except ValidationError as error:
            raise RecipeError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from None

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe from a TOML file.

        Raises:
            RecipeError: if the file is missing, is not TOML, or is not a valid recipe.
        """
        return cls.parse(_read_toml(path), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries of JSON types, defaults included; `Recipe.parse` is the inverse."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with some fields changed, each given by its path: `{"training.epochs": 3, "init": my_initialiser}`."""
        values = self.to_dict()
        for path, value in changes.items():
            *parents, last = path.split(".")
            section = values
            for key in parents:
                section = section.setdefault(key, {})
            section[last] = value
        return Recipe.parse(values)

    def differences(self, other: "Recipe") -> list[str]:
        """One line `path: mine -> theirs` for each field in which two recipes differ."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        return [
            f"{path}: {mine.get(path, 'absent')} -> {theirs.get(path, 'absent')}"
            for path in sorted(mine.keys() | theirs.keys())
            if mine.get(path, "absent") != theirs.get(path, "absent")
        ]


def _with_references(values: Any) -> Any:
    """The values of a recipe with callables replaced by references."""

    def named(value: Any, key: str) -> Any:
        if callable(value):
            return {key: reference_to(value)}
        if isinstance(value, Mapping) and callable(value.get(key)):
            return {**value, key: reference_to(value[key])}
        return value

    if not isinstance(values, Mapping):
        return values
    out = dict(values)
    for section, key in (("network", "type"), ("data", "name"), ("init", "name")):
        if isinstance(out.get(section), list | tuple):
            out[section] = [named(item, key) for item in out[section]]
        elif section in out:
            out[section] = named(out[section], key)
    return out


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: not TOML: {error}") from error


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    return _parse_toml(text, str(path))


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        items = ((str(i), v) for i, v in enumerate(value))
    else:
        return {path: value}
    out: dict[str, Any] = {}
    for key, inner in items:
        out |= _flatten(inner, f"{path}.{key}" if path else key)
    return out


def _explain(error: Any) -> str:
    """One pydantic error as `path: what is allowed, found what`."""
    tags = {*_NETWORK_TYPES, "own", "range", "number", "list"}  # of unions, not of the recipe
    path = ".".join(str(part) for part in error["loc"] if part not in tags) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = "" if isinstance(error["input"], dict) else f", found {error['input']!r}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"
