"""What a call of `collect` asks for, checked before anything is written."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weightscope._util import plugins
from weightscope._util.environment import environment
from weightscope.data.config import FOLDER
from weightscope.data.folder import located
from weightscope.data.sequence_config import TaskConfig, TextConfig
from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.manifest import Manifest
from weightscope.population.shard_format import header_text
from weightscope.recipe import DataConfig, Recipe

if TYPE_CHECKING:
    from weightscope.training.devices import Choice  # imports torch

_log = logging.getLogger(__name__)
_TEACHER = "teacher "  # before its path, in the names of the manifest
_passed: dict[tuple[str, str], str] = {}  # (name in the manifest, what else the hash depends on) -> hash
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
    from weightscope.training.devices import choose_kernels, faster_kernels, resolve_device
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
    if recipe.training.kernels == "auto":
        kernels = faster_kernels(recipe, resolved, kernels) if there is None else kernels
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
        for kind, name in recipe.references
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


def made_on(choice: "Choice", device: str) -> str:
    """The device for a shard's header: GPU models and builds of kernels round differently."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return f"{name}, kernels {choice.build}" if choice.build else name


def warn_of_other_builds(path: Path, manifest: Manifest, device: str) -> None:
    """Say so if existing shards were trained by something else than this process would use."""
    for tile in shards.tiles_on_disk(path, manifest):
        try:
            with shards.opened(shards.shard_file(path, tile), manifest, tile) as h5:
                there = header_text(h5, "device")
        except (DataError, FileNotFoundError):  # reported by `_scan`, or replaced by another process
            continue
        if there != device:
            _log.warning(
                "%s: tile %d was trained on %s, new ones are on %s, whose results are rounded differently",
                path,
                tile,
                there,
                device,
            )
        return


def weight_hashes(recipe: Recipe) -> dict[str, str]:
    """`"weights PATH"` -> 16 hex digits of the SHA-256 of the tensors of each source; `"teacher PATH"` for the teacher.

    Raises:
        WeightscopeError: if one cannot be read.
    """
    return {name: _passed[name, how] if (name, how) in _passed else _hash(recipe, name) for name, how in _named(recipe)}


@contextlib.contextmanager
def hashed_once(recipes: Iterable[Recipe]) -> Iterator[None]:
    """Within the block, `weight_hashes` does not read the sources of these recipes again.

    Raises:
        DataError: at the end, if one of them has changed meanwhile.
    """
    firsts = {key: recipe for recipe in recipes for key in _named(recipe)}  # one recipe of each
    before = {key: _hash(recipe, key[0]) for key, recipe in firsts.items()}
    with restored(before):
        yield
    for key, recipe in firsts.items():
        if (found := _hash(recipe, key[0])) != before[key]:
            raise DataError(
                f"{key[0]} has changed while networks were trained: expected hash {before[key]}, found {found}; "
                "restore the original and begin again in another folder"
            )


def passed() -> dict[tuple[str, str], str]:
    """The hashes that hold here; see `restored`."""
    return dict(_passed)


@contextlib.contextmanager
def restored(hashes: Mapping[tuple[str, str], str]) -> Iterator[None]:
    """Within the block, the hashes of another process's `passed()`, or of `hashed_once`, hold."""
    before = dict(_passed)
    _passed.update(hashes)
    try:
        yield
    finally:
        _passed.clear()
        _passed.update(before)


def _named(recipe: Recipe) -> list[tuple[str, str]]:
    """Names in the manifest, each with what else its hash depends on."""
    own = {name for section, name in recipe.references if section == "init"}
    ours = [init for init in recipe.init if own.isdisjoint(part.strip() for part in init.name.split("+"))]
    given = [init.parameters.get(key) for init in ours for key in ("source", "teacher")]
    named = [(f"{manifests.WEIGHTS}{name}", "") for name in sorted({name for name in given if isinstance(name, str)})]
    teacher = recipe.distillation
    if teacher is not None and teacher.alpha != 0:
        network = teacher.network or recipe.network
        named.append((f"{_TEACHER}{teacher.teacher}", f"{network.model_dump_json()} {recipe.data.model_dump_json()}"))
    return named


def _hash(recipe: Recipe, name: str) -> str:
    from weightscope.init import _trained  # these import torch
    from weightscope.training.distillation import teacher_of

    source = teacher_of(recipe) if name.startswith(_TEACHER) else name.removeprefix(manifests.WEIGHTS)
    return _trained.fingerprint(source)
