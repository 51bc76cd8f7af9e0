"""What a call of `collect` asks for, checked before anything is written."""

import os
from collections.abc import Mapping
from pathlib import Path

from weightscope._util import plugins
from weightscope._util.environment import environment
from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.recipe import Recipe


def requested(
    recipe: Recipe, path: Path, networks: int | None, data: str | Path | None, device: str
) -> tuple[Manifest, str]:
    """The manifest of the requested population, and the device; raises every error that can be detected beforehand."""
    from weightscope import training
    from weightscope.data import load
    from weightscope.training import own_networks
    from weightscope.training.devices import kernels_on, resolve_device
    from weightscope.training.initial_weights import resolve as resolve_init
    from weightscope.training.tile_size import choose_tile

    if networks is not None:
        recipe = recipe.replace({"population.networks": networks})
    resolved = resolve_device(device)
    kernels = kernels_on(recipe, resolved)
    device = str(resolved)
    own_code = _own_code_hashes(recipe)
    there = manifests.read(path) if (path / manifests.NAME).exists() else None
    if there is not None:
        _refuse_changed_code(path, there.inputs, own_code)
    spec = training.spec_of(recipe)
    inputs = manifests.artifact_hashes(recipe) | own_code
    for init in recipe.init:
        resolve_init(init)
    images = load(recipe.data.name, data, train=recipe.data.train, test=recipe.data.test)
    inputs[f"data {recipe.data.name}"] = images.fingerprint
    own_networks.check(recipe, kernels)
    if recipe.population.tile is None:
        tile = choose_tile(recipe, images, resolved) if there is None else there.tile
        recipe = recipe.replace({"population.tile": tile})
    return Manifest(recipe, spec, environment(device), (recipe.population.networks,), inputs), device


def _own_code_hashes(recipe: Recipe) -> dict[str, str]:
    """`"network package.module:factory"` -> hash of the source, for each function of one's own that a recipe names.

    A data set's images are hashed in place of its source.
    """
    return {
        f"{kind} {name}": plugins.source_hash(plugins.imported(name), name)
        for kind, name in references(recipe)
        if kind != "data"
    }


def references(recipe: Recipe) -> list[tuple[str, str]]:
    """The references to one's own code in a recipe, with the section of each."""
    named = [("network", recipe.network.type), ("data", recipe.data.name)]
    named += [("init", part.strip()) for init in recipe.init for part in init.name.split("+")]
    return [(section, name) for section, name in named if plugins.is_reference(name)]


def _refuse_changed_code(path: Path, there: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, digest in found.items():
        if there.get(name, digest) != digest:
            raise DataError(
                f"{path}: the source of {name} has changed since the population was created: expected hash "
                f"{there[name]}, found {digest}; restore it, or collect into another folder"
            )


def portable(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, for a worker that runs in another folder."""
    values = recipe.to_dict()
    for init in values["init"]:
        if "artifact" in init:
            init["artifact"] = os.path.abspath(init["artifact"])
    return Recipe.parse(values)
