"""`Recipe`: all sections together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from weightscope._util.plugins import is_reference, reference_to
from weightscope._util.sources import recipe_path
from weightscope.data.catalog import dataset_info
from weightscope.data.sequence_config import SEQUENCE_NAMES, SequenceConfig
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe.base import Section
from weightscope.recipe.bench import BenchConfig
from weightscope.recipe.networks import NetworkConfig, OwnNetworkConfig
from weightscope.recipe.parsing import check_bounds, explain, parse_toml, read_toml
from weightscope.recipe.sections import (
    DataConfig,
    DataSection,
    DistillationConfig,
    InitConfig,
    PopulationConfig,
    TrainingConfig,
)
from weightscope.recipe.sequence_networks import SEQUENCE_TYPES, TransformerConfig


class Recipe(Section):
    """A population as data, made by `Recipe.load(path)` or `Recipe.parse(text_or_dict)`.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> recipe.replace({"population.networks": 64, "training.epochs": 3})
    """

    network: NetworkConfig
    data: DataSection
    training: TrainingConfig
    distillation: DistillationConfig | None = None
    init: Annotated[tuple[InitConfig, ...], Field(min_length=1)] = (InitConfig(),)
    population: PopulationConfig = PopulationConfig()
    bench: BenchConfig | None = None

    @field_validator("init", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @model_validator(mode="after")
    def _one_kind(self) -> "Recipe":
        """Images or sequences throughout."""
        kind, data = self.network.type, self.data
        sequences = isinstance(data, SequenceConfig)
        if not isinstance(self.network, OwnNetworkConfig) and (kind in SEQUENCE_TYPES) != sequences:
            if sequences:
                named = ", ".join(SEQUENCE_TYPES)
                raise ValueError(f"network.type: {kind} takes images, {data.name} has none; expected one of {named}")
            named = ", ".join(SEQUENCE_NAMES)
            raise ValueError(f"data.name: {kind} takes sequences, {data.name} has images; expected one of {named}")
        if isinstance(data, SequenceConfig):
            self._check_sequences(data)
        elif self.training.schedule == "plateau" and data.validation is None:
            raise ValueError(
                "training.schedule: 'plateau' follows the loss of validation images; give their number, data.validation"
            )
        return self

    def _check_sequences(self, data: SequenceConfig) -> None:
        """Refuse what images have and sequences do not, and sequences that are longer than a network's positions."""
        training, default = self.training, TrainingConfig(epochs=1)
        for field in ("mixup", "cutmix", "precision"):
            if getattr(training, field) != getattr(default, field):
                raise ValueError(f"training.{field}: of images; leave it out for {data.name}")
        if training.kernels == "compiled":
            raise ValueError(f"training.kernels: expected 'torch' or 'auto' for {data.name}, found 'compiled'")
        if self.distillation is not None:
            raise ValueError(f"distillation: of images; leave it out for {data.name}")
        if isinstance(self.network, TransformerConfig) and data.longest > (self.network.longest or data.longest):
            raise ValueError(
                f"network.context: expected at least {data.longest}, the tokens of the longest sequence that is "
                f"evaluated, found {self.network.context}; or use rotary positions"
            )

    @model_validator(mode="after")
    def _patches(self) -> "Recipe":
        if isinstance(self.network, OwnNetworkConfig) or not isinstance(self.data, DataConfig):
            return self
        if is_reference(self.data.name) and self.data.size is None:
            return self
        size = self.data.size or dataset_info(self.data.name).size
        step = getattr(self.network, "reduction", getattr(self.network, "patch_size", 1))
        if size % step:
            raise ValueError(
                f"network.patch_size: the network reduces the image by a factor of {step}, which must divide "
                f"{self.data.name}'s {size} pixels"
            )
        return self

    @property
    def images(self) -> DataConfig:
        """The section [data], for what is of images only.

        Raises:
            UsageError: if it has sequences.
        """
        if not isinstance(self.data, DataConfig):
            raise UsageError(f"data.name: expected images, found {self.data.name}, which has sequences of tokens")
        return self.data

    @property
    def references(self) -> list[tuple[str, str]]:
        """The references to one's own code, with the section of each."""
        named = [("network", self.network.type), ("data", self.data.name)]
        if self.distillation is not None and self.distillation.network is not None:
            named.append(("distillation", self.distillation.network.type))
        named += [("init", part.strip()) for init in self.init for part in init.name.split("+")]
        return [(section, name) for section, name in named if is_reference(name)]

    @classmethod
    def parse(cls, source: str | Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """Parse TOML text or nested dictionaries.

        Callables are accepted as `network`, `data` and `init` (or as the `type` or `name` in them) and stored as
        references.

        Raises:
            RecipeError: naming the field's path, what is allowed and what was found.
            UsageError: for a callable without a name, such as a lambda.
        """
        if isinstance(source, str):
            values: Any = parse_toml(source, where)
        else:
            values = _with_references(source)
            check_bounds(values, where)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{where}: {explain(error.errors(), cls)}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe from a TOML file, or one of the package by its name (`weightscope list recipes`).

        Raises:
            RecipeError: if the file is missing, is not TOML, or is not a valid recipe; or no recipe has this name.

        Example:
            >>> Recipe.load("digits-convnext").population.networks
            384
        """
        return cls.parse(read_toml(recipe_path(path)), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries of JSON types, defaults included; `Recipe.parse` is the inverse."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with some fields changed, each given by its path: `{"training.epochs": 3, "init": my_initialiser}`.

        Raises:
            RecipeError: if a path leads through something that is no table, or the result is no valid recipe.
        """
        values = self.to_dict()
        for path, value in changes.items():
            *parents, last = path.split(".")
            section = values
            for depth, key in enumerate(parents, 1):
                section = section.setdefault(key, {})
                if not isinstance(section, dict):
                    whole = ".".join(parents[:depth])
                    raise RecipeError(
                        f"{path}: expected a table at `{whole}`, found {section!r}; replace it as a whole"
                    )
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


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {path: value}
    out: dict[str, Any] = {}
    for key, inner in items:
        out |= _flatten(inner, f"{path}.{key}" if path else key)
    return out
