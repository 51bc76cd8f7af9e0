"""`Recipe`: a population of networks, or one arm of a benchmark, as data.

A recipe is a TOML file with the sections [network] [data] [training] [init] [population]. It is validated
strictly: an unknown key, a wrong type or a value out of range is an error that names the field's path.
"""

import math
import tomllib
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

from weightscope._util.recipes import recipe_path
from weightscope.data.catalog import dataset_info
from weightscope.data.config import AugmentConfig
from weightscope.errors import RecipeError, UsageError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ConvMixerConfig(_Section):
    """ConvMixer-width/depth (thesis 2.1.1)."""

    type: Literal["convmixer"]
    width: Count
    depth: Count
    kernel_size: Count = 7
    patch_size: Count = 2
    dilations: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "A"


class ConvNeXtConfig(_Section):
    """ConvNeXt: isotropic when `width` and `depth` are numbers, hierarchical when they are lists of equal length."""

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
            raise ValueError("width and depth must both be numbers, or lists with one entry for each stage")
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


NetworkConfig = Annotated[ConvMixerConfig | ConvNeXtConfig | ViTConfig, Field(discriminator="type")]


class DataConfig(_Section):
    """Which images; `train` and `test` take only the first so many."""

    name: str
    train: Count | None = None
    test: Count | None = None
    augment: AugmentConfig = AugmentConfig()

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            dataset_info(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _sizes(self) -> "DataConfig":
        info = dataset_info(self.name)
        for field, there in (("train", info.train), ("test", info.test)):
            wanted = getattr(self, field)
            if wanted is not None and wanted > there:
                raise ValueError(f"{field} may be at most {there} for {self.name}, found {wanted}")
        return self


class Range(_Section):
    """A hyper-parameter drawn log-uniformly from [low, high], anew for each network."""

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
    """AdamW with a schedule. `learning_rate` and `weight_decay` may be a number, a list (network k takes item
    k mod its length) or a range `{low, high}`, so that a sweep is a population too. `clip_norm = 0` clips nothing.

    `kernels = "compiled"` trains ConvNeXts on a CPU with AVX-512 1.7 to 2.1 times as fast where there is a C compiler,
    ViTs and ConvMixers 1.2 and 1.3 times; on a GPU it stands for Triton kernels and CUDA graphs, in either precision.
    It is part of the recipe because it rounds differently.
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

    @field_validator("betas", "frozen", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class InitConfig(BaseModel):
    """An initialiser by its registered name, or `artifact = "FILE"`; other keys are its named parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "default"
    artifact: str | None = None

    @model_validator(mode="after")
    def _numbers(self) -> "InitConfig":
        for key, value in (self.model_extra or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} must be finite, found {value}")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The initialiser's named parameters."""
        return dict(self.model_extra or {})

    @classmethod
    def load(cls, path: str | Path) -> "InitConfig":
        """An initialiser with its numbers from a TOML file that holds what an [init] table does.

        Raises:
            RecipeError: if the file cannot be read or is not such a table.
        """
        values = _read_toml(path)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{path}: " + "; ".join(_explain(e) for e in error.errors())) from None


class PopulationConfig(_Section):
    """How many networks, from which root seed, in tiles of how many.

    Without `tile`, the number is chosen when a population is begun, and then kept: 32 on a CPU, on a GPU as many as its
    free memory holds.
    """

    networks: Count = 256
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tile: Count | None = None


class Recipe(_Section):
    """A population as data. Make one with `Recipe.load(path)` or `Recipe.parse(text_or_dict)`.

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
        size = dataset_info(self.data.name).size
        step = getattr(self.network, "reduction", self.network.patch_size)
        if size % step:
            raise ValueError(
                f"network.patch_size: the network reduces the image {step} times, which must divide "
                f"{self.data.name}'s {size} pixels"
            )
        return self

    @classmethod
    def parse(cls, source: str | dict[str, Any], where: str = "recipe") -> "Recipe":
        """A recipe from TOML text or nested dictionaries.

        Raises:
            RecipeError: naming the field's path, what is allowed and what was found.
        """
        values = _parse_toml(source, where) if isinstance(source, str) else source
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from None

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """A recipe from a TOML file, or one of the package by its name (`weightscope list recipes`).

        Raises:
            RecipeError: if the file is missing, is not TOML, or is not a valid recipe; or there is none of that name.

        Example:
            >>> Recipe.load("digits-convnext").population.networks
            384
        """
        return cls.parse(_read_toml(recipe_path(path)), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries (JSON types), defaults included; `Recipe.parse` takes them back."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with some fields changed, each given by its path: `{"training.epochs": 3}`."""
        values = self.to_dict()
        for path, value in changes.items():
            *parents, last = path.split(".")
            section = values
            for key in parents:
                section = section.setdefault(key, {})
            section[last] = value
        return Recipe.parse(values)

    def differences(self, other: "Recipe") -> list[str]:
        """`path: mine -> theirs` for each field in which two recipes differ."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        return [
            f"{path}: {mine.get(path, 'absent')} -> {theirs.get(path, 'absent')}"
            for path in sorted(mine.keys() | theirs.keys())
            if mine.get(path, "absent") != theirs.get(path, "absent")
        ]


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
    tags = {"convmixer", "convnext", "vit", "range", "number", "list"}  # of unions, not of the recipe
    path = ".".join(str(part) for part in error["loc"] if part not in tags) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = "" if isinstance(error["input"], dict) else f", found {error['input']!r}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"
