"""`population.json`: recipe or sources, spec and history of a population. Does not import h5py."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from weightscope._util import atomic
from weightscope._util.names import shortened
from weightscope._util.remote import is_there
from weightscope._util.sources import POPULATION_FILE, read_bytes
from weightscope.errors import DataError, RecipeError, UsageError, WeightscopeError
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec

_log = logging.getLogger(__name__)
NAME = POPULATION_FILE
WEIGHTS = "weights "  # of the inputs that are sources of initialisers
SHARDS = "shards"
_FORMAT = "weightscope-population"
_SCHEMA = 3
_NAMED = 4  # tiles of a message


class NoRecipe(UsageError, AttributeError):
    """An imported population has no recipe (exit code 2)."""


@dataclass(frozen=True)
class Import:
    """Where the networks of an imported population are from."""

    tile: int  # T
    # Path or hf:// address of each network, and of its snapshots in order; empty if they were objects in memory.
    sources: tuple[tuple[str, ...], ...] = ()
    snapshots: tuple[int, ...] = ()  # epochs or steps of training, beside the last
    rename: tuple[str, ...] = ()  # "OLD=NEW" beginnings of tensor names
    network: str = ""  # "package.module:function" that builds the network
    recipe: Recipe | None = None  # in place of `network`
    key: str | None = None  # of the dictionary of weights in files that have several
    config: dict[str, Any] = field(default_factory=dict)  # what all networks' config.json have in common

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**vars(self), "recipe": self.recipe and self.recipe.to_dict()}


@dataclass(frozen=True)
class Manifest:
    """Recipe or sources, spec and history of a population."""

    made: Recipe | Import  # what the networks were trained with, or imported from
    spec: WeightSpec  # of one network
    environment: dict[str, Any]  # of the machine that created it; see `weightscope._util.environment`
    networks: int  # N of the complete population
    # Hashes of what the recipe refers to: the data set's images, files of initialisers, source of users' functions.
    inputs: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # reference to a user's code -> text of its module

    @property
    def recipe(self) -> Recipe:
        """What the networks were trained with; NoRecipe, a UsageError, if they were imported without one."""
        recipe = self.made if isinstance(self.made, Recipe) else self.made.recipe
        if recipe is None:
            raise NoRecipe(
                "this needs the recipe of a population that was imported without one; import with --network RECIPE, a "
                "recipe with this network and its data, or name another population"
            )
        return recipe

    @property
    def imported(self) -> Import | None:
        """Where the networks are from; None if they were trained here."""
        return self.made if isinstance(self.made, Import) else None

    @property
    def again(self) -> str:
        """The command that adds missing networks."""
        return "run `weightscope import` again" if self.imported else "run `weightscope collect` again to train them"

    @cached_property  # asked for a million times where there are as many networks
    def tile(self) -> int:
        """T, the number of networks in a tile."""
        tile = self.made.tile if isinstance(self.made, Import) else self.made.population.tile
        if tile is None:
            raise ValueError("expected population.tile in a population's recipe, found none")
        return tile

    @cached_property
    def tiles(self) -> int:
        """The number of tiles, ceil(N / T)."""
        return -(-self.networks // self.tile)

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The epochs (of sequences, steps), ascending, after which weights are stored beside the last; S of them."""
        return self.made.snapshots if isinstance(self.made, Import) else self.made.population.snapshots or ()

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of what a network's bits depend on: recipe without N, or how it was imported; spec, inputs."""
        made, recipe = self.made, self.made if isinstance(self.made, Recipe) else self.made.recipe
        values = replace(made, sources=(), config={}).to_dict() if isinstance(made, Import) else made.to_dict()
        if recipe is not None:
            (values["recipe"] if isinstance(made, Import) else values)["population"].pop("networks")
        text = json.dumps([values, self.spec.to_json(), self.inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rows(self, tile: int) -> int:
        """The number of networks that the population uses of tile `tile`: T, or fewer of the last one."""
        return min(self.tile, self.networks - tile * self.tile)

    def described(self, tiles: Sequence[int]) -> str:
        """The first few tiles with their networks, and the number of the others, for a message."""
        first = [(t, t * self.tile, t * self.tile + self.rows(t) - 1) for t in sorted(tiles)[:_NAMED]]
        text = ", ".join(f"tile {t} (networks {start} to {last})" for t, start, last in first)
        return text + (f" and {len(tiles) - _NAMED} more tiles" if len(tiles) > _NAMED else "")

    def resized(self, networks: int) -> "Manifest":
        """The same population with another number of networks."""
        made = self.made if self.imported else self.recipe.replace({"population.networks": networks})
        return replace(self, made=made, networks=networks)

    def to_bytes(self) -> bytes:
        """The text of `population.json`."""
        values: dict[str, Any] = {"format": _FORMAT, "schema": _SCHEMA, "networks": self.networks, "tile": self.tile}
        if self.imported:
            values["import"] = self.imported.to_dict()
        else:
            recipe = self.recipe.to_dict()
            values |= {"seed": self.recipe.population.seed, "recipe": recipe, "recipe_toml": tomli_w.dumps(recipe)}
        values |= {"inputs": self.inputs, "spec": json.loads(self.spec.to_json()), "environment": self.environment}
        values |= {"sources": self.sources} if self.sources else {}
        return f"{json.dumps(values, indent=1)}\n".encode()


def read(path: Path) -> Manifest:
    """The manifest of the population in folder `path`."""
    file = path / NAME
    try:
        data = read_bytes(file)
    except (FileNotFoundError, NotADirectoryError):
        what = "no such folder" if not path.exists() else f"a folder without {NAME}"
        raise DataError(f"{path}: expected a population, found {what}; `collect` and `import` make them") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        values = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: damaged, expected JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise DataError(f'{file}: expected "format": "{_FORMAT}", found another file')
    if (found := values.get("schema")) != _SCHEMA:
        raise DataError(
            f"{file}: expected schema version {_SCHEMA}, found {found}, of another version of weightscope: with an "
            "older one, upgrade; a population of an older one is collected or imported again, into another folder"
        )
    try:
        return Manifest(
            made=_import(values["import"]) if "import" in values else Recipe.parse(values["recipe"], where="recipe"),
            spec=WeightSpec.from_json(json.dumps(values["spec"])),
            environment=values["environment"],
            networks=values["networks"],
            inputs=values["inputs"],
            sources=values.get("sources", {}),
        )
    except KeyError as error:
        raise DataError(f"{file}: damaged, {error} is missing") from error
    except (WeightscopeError, TypeError, ValueError) as error:
        raise DataError(f"{file}: damaged: {shortened(str(error), 400)}") from error


def _import(values: dict[str, Any]) -> Import:
    """What `Import.to_dict` gave."""
    tuples = {name: tuple(values[name]) for name in ("snapshots", "rename")}
    recipe = values["recipe"] and Recipe.parse(values["recipe"], where="import.recipe")
    return Import(**values | tuples | {"recipe": recipe, "sources": tuple(map(tuple, values["sources"]))})


def create_or_match(path: Path, wanted: Manifest, *, resize: bool) -> tuple[Manifest, bool]:
    """Create `population.json` in folder `path`, or compare it with the existing one.

    A larger number of networks is not recorded before it is reached (`record_size`), so that an unfinished growth
    leaves a complete population. A smaller one is recorded at once, if it was asked for (`resize`); the shards beyond
    it stay and are used again if the population grows. Returns the manifest with the number of networks to train, and
    whether this call created the population.
    """
    # Looked at before the manifest is searched for: another process may create the population at any time.
    error = None if is_there(path / NAME) else _other_folder(path)
    if not is_there(path / NAME):
        if error is not None:
            raise error
        atomic.make_folder(path / SHARDS)
        if atomic.create(path / NAME, wanted.to_bytes()):
            return wanted, True
    with atomic.locked(path):
        there = read(path)
        match(path, there, wanted)
        if wanted.networks == there.networks or (wanted.networks < there.networks and not resize):
            return there, False
        resized = there.resized(wanted.networks)
        if resized.networks < there.networks:
            atomic.write(path / NAME, resized.to_bytes())
    if resized.networks < there.networks:
        removed = there.networks - resized.networks
        text = "%s: this run asks for %d networks and removes %d of %d; their shards stay for a run that asks for them"
        _log.warning(text, path, resized.networks, removed, there.networks)
    return resized, False


def record_size(path: Path, reached: Manifest) -> None:
    """Record that the population has grown, when all its tiles are on disk."""
    with atomic.locked(path):  # another run may record a larger one
        there = read(path)
        match(path, there, reached)
        if there.networks < reached.networks:
            atomic.write(path / NAME, there.resized(reached.networks).to_bytes())


def sweep(path: Path) -> None:
    """Remove what killed processes left in a population's folder."""
    for folder in (path, path / SHARDS):
        atomic.sweep(folder)


def remove(path: Path, existed: bool) -> None:
    """Remove a population that was just created, and its folder unless it existed before."""
    sweep(path)
    atomic.remove_folder(path / SHARDS)
    (path / NAME).unlink()
    if not existed:
        atomic.remove_folder(path)


def match(path: Path, there: Manifest, wanted: Manifest) -> None:
    """Refuse to add networks of `wanted` to the population `there`; only N may differ, and "auto" takes its kernels."""
    if there.imported or wanted.imported:
        if there.spec == wanted.spec and there.fingerprint == wanted.fingerprint:
            return
        if not wanted.imported:
            raise UsageError(f"{path} was imported, and cannot grow by training; give another folder")
        was = "imported from other networks or with other options" if there.imported else "collected"
        raise UsageError(f"{path} was {was}; give another folder, or the same sources and options")
    recipe = wanted.recipe
    if recipe.training.kernels == "auto":
        recipe = recipe.replace({"training.kernels": there.recipe.training.kernels})
    lines = [line for line in there.recipe.differences(recipe) if not line.startswith("population.networks:")]
    if lines:
        raise RecipeError(
            f"{path} was collected with another recipe (population -> recipe given): {'; '.join(lines)}; "
            "give the population's recipe, or collect into another folder"
        )
    if lines := there.spec.differences(wanted.spec):
        raise DataError(
            f"{path}: this version of weightscope builds another network from the same recipe: "
            f"{'; '.join(lines[:3])}; collect into another folder"
        )
    for name in sorted(there.inputs.keys() | wanted.inputs.keys()):
        expected, found = there.inputs.get(name, "none"), wanted.inputs.get(name, "none")
        if expected != found:
            raise DataError(
                f"{path} was collected with another {shortened(name)}: expected hash {shortened(expected)}, "
                f"found {found}; restore the original, or collect into another folder"
            )


def _other_folder(path: Path) -> WeightscopeError | None:
    """Why no population can be created at a path, which holds something else, as an error; None if one can."""
    if path.exists() and not path.is_dir():
        return UsageError(f"{path} is a file; give the folder of a population")
    folder = path / SHARDS
    inside = [p for p in folder.glob("*") if not p.name.startswith(".")]
    if inside:
        return DataError(f"{path} holds shards but no {NAME}; restore it, or collect into another folder")
    others = (p for p in path.glob("*") if p not in (folder, path / NAME) and not p.name.startswith("."))
    if (other := next(others, None)) is None:
        return None
    return UsageError(f"{path} holds {other.name} but no {NAME}; give a new folder or that of a population")
