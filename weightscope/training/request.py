"""What a call of `collect` asks for, checked before anything is written."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weightscope._util import plugins
from weightscope._util.environment import environment
from weightscope.data.config import FOLDER
from weightscope.data.folder import located
from weightscope.data.sequence_config import TaskConfig, TextConfig
from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.population.manifest import Manifest
from weightscope.recipe import DataConfig, Recipe
from weightscope.training.references import references
from weightscope.training.weight_hashes import weight_hashes

if TYPE_CHECKING:
    from weightscope.training.devices import Choice  # imports torch

_log = logging.getLogger(__name__)
_FIRST_SHARE = 0.1  # of the first step's weights in an average, above which it is reported


def requested(
    recipe: Recipe, path: Path, networks: int | None, data: str | Path | None, device: str
) -> tuple[Manifest, str, "Choice"]:
    """The manifest of the requested population, device and kernels; raises every error that can be detected beforehand.

    `kernels = "auto"` takes those of an existing population.
    """
    from weightscope import training
    from weightscope.data import load
    from weightscope.networks import build_for
    from weightscope.training import own_networks
    from weightscope.training.devices import choose_kernels, resolve_device
    from weightscope.training.initial_weights import check_initialisers
    from weightscope.training.tile_size import choose_tile

    if networks is not None:
        recipe = recipe.replace({"population.networks": networks})
    recipe = with_classes(recipe, data)
    resolved = resolve_device(device)
    device = str(resolved)
    own_code = own_code_hashes(recipe)
    there = manifests.read(path) if (path / manifests.NAME).exists() else None
    if there is None and isinstance(recipe.data, TaskConfig):
        recipe.data.check_answers()
    if there is not None:
        _refuse_changed_code(path, there.inputs, own_code)
    spec = training.spec_of(recipe)
    inputs = manifests.artifact_hashes(recipe) | own_code | weight_hashes(recipe)
    check_initialisers(recipe, lambda: build_for(recipe))
    source = load(recipe.data, data, **recipe.data.counts)
    inputs[f"data {recipe.data.name}"] = source.fingerprint
    if there is None and recipe.training.ema:
        _warn_of_short_average(recipe, path, source.examples)
    there_kernels = None if there is None else there.recipe.training.kernels
    if recipe.training.kernels == "auto" and there_kernels == "torch":
        recipe = recipe.replace({"training.kernels": "torch"})
    kernels = choose_kernels(recipe, resolved)
    own_networks.check(recipe, kernels.kernels)
    if recipe.training.kernels == "auto":
        recipe = _recorded(recipe, path, there_kernels, kernels)
    if recipe.population.tile is None:
        tile = choose_tile(recipe, source, resolved) if there is None else there.tile
        recipe = recipe.replace({"population.tile": tile})
    return Manifest(recipe, spec, environment(device), (recipe.population.networks,), inputs), device, kernels


def with_classes(recipe: Recipe, data: str | Path | None) -> Recipe:
    """The recipe with the classes of its folder or the vocabulary of its text, so that networks are built without it.

    Raises:
        DataError: if the folder is missing or has no classes, or the text is damaged.
        UsageError: if the text is shorter than a sequence.
    """
    from weightscope.data import SequenceSource
    from weightscope.data.catalog import dataset_info

    if isinstance(recipe.data, TextConfig) and recipe.data.vocabulary is None:
        return recipe.replace({"data.vocabulary": SequenceSource.of(recipe.data, data).vocabulary})
    if not isinstance(recipe.data, DataConfig):
        return recipe
    if recipe.data.name != FOLDER or recipe.data.classes is not None:
        return recipe
    return recipe.replace({"data.classes": dataset_info(recipe.data, data).classes})


def _recorded(recipe: Recipe, path: Path, there: str | None, kernels: "Choice") -> Recipe:
    """The recipe with what the manifest records in place of "auto"."""
    kept = there or ("torch" if kernels.kernels == "torch" else "compiled")
    if (kept, kernels.kernels) == ("compiled", "torch"):
        _log.warning(
            "%s: its kernels are compiled ones; what is trained here uses torch's, which round differently: %s",
            path,
            kernels.checked,
        )
    return recipe.replace({"training.kernels": kept})


def _warn_of_short_average(recipe: Recipe, path: Path, examples: int) -> None:
    """Warn where the average of the weights, which is what is stored, still holds much of those of the first step."""
    training = recipe.training
    steps = training.epochs * (examples // min(training.batch_size, examples))
    share = training.ema ** (steps - 1)
    if steps > 1 and share > _FIRST_SHARE:
        _log.warning(
            "%s: training.ema = %g in %d steps: %.0f %% of the average that is evaluated and stored are the weights of "
            "the first step; an average over a tenth of the steps has ema = %g",
            path,
            training.ema,
            steps,
            100 * share,
            max(0.0, 1 - float(f"{10 / steps:.1g}")),
        )


def own_code_hashes(recipe: Recipe) -> dict[str, str]:
    """`"network package.module:factory"` -> hash of the source, for each function of one's own that a recipe names.

    A data set's images are hashed in place of its source.
    """
    return {
        f"{kind} {name}": plugins.source_hash(plugins.imported(name), name)
        for kind, name in references(recipe)
        if kind != "data"
    }


def _refuse_changed_code(path: Path, there: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, digest in found.items():
        if there.get(name, digest) != digest:
            raise DataError(
                f"{path}: the source of {name} has changed since the population was created: expected hash "
                f"{there[name]}, found {digest}; restore it, or collect into another folder"
            )


def portable(recipe: Recipe, kernels: "Choice | None", data: str | Path | None) -> Recipe:
    """The recipe with absolute paths and the kernels to use, for a worker that runs in another folder."""
    values = recipe.to_dict()
    if values["training"]["kernels"] == "compiled":
        actual = "auto" if kernels is None else "torch" if kernels.kernels == "torch" else "compiled"
        values["training"]["kernels"] = actual
    if isinstance(recipe.data, TextConfig):
        values["data"]["path"] = str(recipe.data.located(data).absolute())
    elif isinstance(recipe.data, DataConfig) and recipe.data.path is not None:
        values["data"]["path"] = str(located(recipe.data, None if data is None else Path(data)).absolute())
    for init in values["init"]:
        if "artifact" in init:
            init["artifact"] = os.path.abspath(init["artifact"])
    if "distillation" in values and "://" not in values["distillation"]["teacher"]:
        values["distillation"]["teacher"] = os.path.abspath(values["distillation"]["teacher"])
    return Recipe.parse(values)
