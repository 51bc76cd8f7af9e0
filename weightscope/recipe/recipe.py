"""`Recipe`: all sections together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from weightscope._util.names import shortened
from weightscope._util.plugins import is_reference, reference_to
from weightscope._util.sources import recipe_path
from weightscope.data.image_section import DataConfig
from weightscope.data.section import Section
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe.base import parse_toml, read_toml, validated
from weightscope.recipe.networks import SECTIONS, NetworkField
from weightscope.recipe.sections import (
    BenchConfig,
    DataSection,
    DistillationConfig,
    InitConfig,
    PopulationConfig,
    TrainingConfig,
)


class Recipe(Section):
    """A population as data, made by `Recipe.load(path)` or `Recipe.parse(text_or_dict)`.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> recipe.replace({"population.networks": 64, "training.epochs": 3})
    """

    network: NetworkField
    data: DataSection
    training: TrainingConfig
    distillation: DistillationConfig | None = None
    init: tuple[InitConfig, ...] = (InitConfig(),)
    population: PopulationConfig = PopulationConfig()
    bench: BenchConfig | None = None

    @field_validator("init", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value in ([], ()):
            raise ValueError("expected at least one table")
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @model_validator(mode="after")
    def _one_kind(self) -> "Recipe":
        """A network for what the task has, and nothing that is of other tasks only."""
        takes, has = self.network.takes, self.data.what
        if takes not in (None, has):
            fitting = [name for name, section in SECTIONS.items() if section.takes == has]
            named = ", ".join((*fitting, "'package.module:function'"))
            raise ValueError(
                f"network.type: {self.network.type} takes {takes}, {self.data.name} has {has}; expected one of "
                f"{named}, or data that have {takes}"
            )
        self.data.check(self)
        return self

    @property
    def images(self) -> DataConfig:
        """The section [data] of images; UsageError if it has sequences."""
        if not isinstance(self.data, DataConfig):
            raise UsageError(f"data.name: expected images, found {self.data.name}, which has {self.data.what}")
        return self.data

    def completed(self, root: str | Path | None = None) -> "Recipe":
        """The recipe with the sizes of its folder or the vocabulary of its text, so that networks are built without."""
        return self.model_copy(update={"data": self.data.completed(root)})

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
        references. RecipeError with the field's path, what is allowed and what was found; UsageError for a callable
        without a name, such as a lambda.
        """
        values = parse_toml(source, where) if isinstance(source, str) else _with_references(source)
        return validated(cls, values, where)

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe from a TOML file, or one of the package by its name (`weightscope list recipes`).

        RecipeError if the file is missing or no valid recipe, or no recipe has this name.

        Example:
            >>> Recipe.load("digits-convnext").population.networks
            384
        """
        return cls.parse(read_toml(recipe_path(path)), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries of JSON types, defaults included; `Recipe.parse` is the inverse."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with some fields changed, each given by its path: `{"training.epochs": 3, "init": my_initialiser}`."""
        values = self.to_dict()
        for path, value in changes.items():
            *parents, last = path.split(".")
            section = values
            for depth, key in enumerate(parents, 1):
                section = section.setdefault(key, {})
                if not isinstance(section, dict):
                    whole, found = ".".join(parents[:depth]), shortened(repr(section))
                    raise RecipeError(f"{path}: expected a table at `{whole}`, found {found}; replace it as a whole")
            section[last] = value
        return Recipe.parse(values)

    def differences(self, other: "Recipe") -> list[str]:
        """One line `path: mine -> theirs` for each field in which two recipes differ."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        pairs = ((path, mine.get(path, "absent"), theirs.get(path, "absent")) for path in sorted({*mine, *theirs}))
        return [f"{path}: {here} -> {there}" for path, here, there in pairs if here != there]


def _with_references(values: Any) -> Any:
    """The values of a recipe with callables replaced by references."""
    keys = {"network": "type", "data": "name", "init": "name"}

    def named(value: Any, key: str) -> Any:
        if isinstance(value, list | tuple):
            return [named(item, key) for item in value]
        if callable(value):
            return {key: reference_to(value)}
        if isinstance(value, Mapping) and callable(value.get(key)):
            return {**value, key: reference_to(value[key])}
        return value

    if not isinstance(values, Mapping):
        return values
    return {section: named(value, keys[section]) if section in keys else value for section, value in values.items()}


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    parts = (_flatten(inner, f"{path}.{key}" if path else key) for key, inner in value.items())
    return {key: inner for part in parts for key, inner in part.items()}
