"""The arguments of `collect`: checked before anything is written, and completed by measured choices.

A tile is part of a population's identity (its padding is trained, too, and a GPU sums in an order that depends on
sizes), so its size is chosen once, when the population is created, and recorded in its recipe. So are the kernels.
"""

import hashlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch

from weightscope import training
from weightscope._util import plugins
from weightscope._util.environment import environment
from weightscope._util.remote import is_there
from weightscope._util.sources import as_path, location
from weightscope._util.trust import trusted
from weightscope.data.task import DataSource
from weightscope.errors import DataError, RecipeError, UsageError
from weightscope.init import _trained
from weightscope.networks import build_for
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.manifest import Manifest
from weightscope.population.shards import header_text
from weightscope.recipe import Recipe
from weightscope.training.devices import (
    DEFAULT_TILE,
    check_memory,
    current,
    resolve_device,
    unaffected,
)
from weightscope.training.distillation import teacher_of
from weightscope.training.engine import TileRun
from weightscope.training.initial_weights import check_initialisers
from weightscope.training.kernels.functions import Kernels
from weightscope.training.network_check import Choice, choose_kernels

T = TypeVar("T")

_log = logging.getLogger(__name__)
_FIRST_SHARE = 0.1  # of the first step's weights in an average, above which it is reported
_THIS_PROCESS = uuid.uuid4().hex
_LARGEST = 1024
_SHARE = 0.8  # of the free memory; the rest is for fragmentation and other processes
_TRIED = (4, 8)  # sizes of tiles whose memory is measured; it is linear in the size
_BATCHES = 2
_LOADED: dict[str, str] = {}  # reference -> the hash of the source that was imported in this process


@dataclass(frozen=True)
class OwnCode:
    """A user's own functions, made known to a worker process."""

    hashes: Mapping[str, str]  # reference -> the hash of its source, which a worker must have, too
    path: tuple[str, ...]  # working directory and `sys.path` of the launching process, with their modules
    passed: bytes  # cloudpickle of those of `plugins.passed()`, which cannot be imported
    process: str  # the launching process, where there is nothing to do

    @classmethod
    def of(cls, references: Iterable[str]) -> "OwnCode":
        """What another process needs to use these references."""
        references = tuple(references)
        passed = plugins.passed(references)
        hashes = {name: plugins.source_hash(name) for name in references if name not in passed}
        return cls(hashes, (os.getcwd(), *filter(None, sys.path)), cloudpickle.dumps(passed), _THIS_PROCESS)

    def load(self) -> None:
        """Import the references, unless this is the launching process, and compare their sources."""
        if self.process == _THIS_PROCESS:
            return
        plugins.restore(cloudpickle.loads(self.passed))
        before = list(sys.path)
        sys.path[:] = dict.fromkeys((self.path[0], *before, *self.path))
        try:
            for reference, expected in self.hashes.items():
                if (found := plugins.source_hash(reference)) != expected:
                    raise UsageError(f"{reference}: expected source hash {expected} in a worker, found {found}")
                if _LOADED.setdefault(reference, expected) != expected:  # a worker outlives a call
                    sys.modules.pop(reference.partition(":")[0], None)
                    _LOADED[reference] = expected
                plugins.imported(reference)
        finally:
            sys.path[:] = before


@dataclass(frozen=True)
class Request:
    """A population to train. All that is asked for is checked once, here; workers get it and trust it."""

    path: Path  # the population's folder
    manifest: Manifest
    recipe: Recipe  # the manifest's, with absolute paths
    device: str  # "cpu" or "cuda"
    kernels: Choice | None  # None if each machine of a cluster chooses them
    made_on: str  # device and kernels, as in the headers of shards
    data: Path | None  # the first folder to look for the data set in, absolute
    own_code: OwnCode  # the functions that the recipe refers to
    trust: bool  # whether code runs that artifacts of the recipe name

    @classmethod
    @unaffected()
    def of(
        cls,
        recipe: Recipe | Mapping[str, Any],
        path: str | Path,
        *,
        networks: int | None = None,
        data: str | Path | None = None,
        device: str = "auto",
        cluster: bool = False,
        shared: dict[Any, Any] | None = None,
    ) -> "Request":
        """Check everything that can be known before a network is trained; nothing is written. Arguments: see `collect`.

        An existing population keeps its tile and its kernels. The machines of a cluster choose their kernels where the
        recipe leaves it open. `shared` has results of checks, for requests that have much in common.
        """
        results: dict[Any, Any] = {} if shared is None else shared

        def once(work: Callable[[], Any], what: str, *about: Any) -> Any:
            key = what, json.dumps(about)
            if key not in results:
                results[key] = work()
            return results[key]

        path = location(path)
        wanted = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
        wanted = wanted.model_copy(update={"bench": None})  # which says nothing about the networks
        if networks is not None:
            wanted = wanted.replace({"population.networks": networks})
        root = None if data is None else as_path(data).absolute()
        wanted = wanted.completed(root)
        again = cluster and wanted.training.kernels == "auto"
        where = resolve_device(device)
        values = wanted.to_dict()
        sizes = [values[key] for key in ("network", "data", "population")], wanted.training.batch_size
        if not cluster:  # whose machines have memory of their own
            once(lambda: check_memory(wanted, where), "memory", str(where), sizes, wanted.training.ema)
        there = manifests.read(path) if is_there(path / manifests.NAME) else None
        if there is not None:
            for kind, name in wanted.references:
                if kind != "data" and f"{kind} {name}" in there.inputs:  # images are hashed, not what makes them
                    plugins.check_source(name, there.inputs[f"{kind} {name}"], path)
        sources = plugins.texts_of(name for _, name in wanted.references)
        inputs = input_hashes(wanted, results)  # before code of users' own is run, which may be edited meanwhile
        spec = once(lambda: training.spec_of(wanted), "spec", values["network"], values["data"], wanted.training.engine)
        check_initialisers(wanted, partial(build_for, wanted))
        source = once(lambda: wanted.data.load(root), "data", values["data"], str(root))
        inputs[f"data {wanted.data.name}"] = source.fingerprint
        _check_snapshots(wanted, source.examples)
        if there is None and wanted.training.ema:
            _warn_of_short_average(wanted, path, source.examples)
        if there is not None:
            tile = there.tile
        else:
            tile = min(wanted.population.tile or choose_tile(wanted, source, where), wanted.population.networks)
        wanted = wanted.replace({"population.tile": tile})
        there_kernels = None if there is None else there.recipe.training.kernels
        if wanted.training.kernels == "auto" and there_kernels == "torch":
            wanted = wanted.replace({"training.kernels": "torch"})
        kernels = choose_kernels(wanted, where)
        if wanted.training.kernels == "auto":
            kept = there_kernels or ("torch" if kernels.kernels == "torch" else "compiled")
            if (kept, kernels.kernels) == ("compiled", "torch"):
                other = "its kernels are compiled ones; what is trained here uses torch's, which round differently"
                _log.warning("%s: %s: %s", path, other, kernels.comparison)
            wanted = wanted.replace({"training.kernels": kept})
        machine = once(lambda: environment(str(where)), "environment", str(where))
        return cls(
            path=path,
            manifest=Manifest(wanted, spec, machine, wanted.population.networks, inputs, sources),
            recipe=_absolute(wanted, root, again and wanted.training.kernels != "torch"),
            device=str(where),
            kernels=None if again else kernels,
            made_on=made_on(kernels, str(where)),
            data=root,
            own_code=OwnCode.of(name for _, name in wanted.references),
            trust=trusted(),
        )

    def kernels_here(self) -> tuple[Choice, str]:
        """What trains the networks in this process, and device and kernels for the headers of shards."""
        with current(torch.device(self.device)):  # GPUs of one machine may be of several models
            kernels = self.kernels or choose_kernels(self.recipe, torch.device(self.device))
            return kernels, made_on(kernels, self.device)


def _check_snapshots(recipe: Recipe, examples: int) -> None:
    """Refuse snapshots after the end of training."""
    last, unit = recipe.training.epochs, recipe.data.snapshot_unit
    if unit == "step":
        last *= examples // min(recipe.training.batch_size, examples)
    if max(recipe.population.snapshots or (0,)) > last:
        found = list(recipe.population.snapshots or ())
        raise RecipeError(f"population.snapshots: expected at most {last}, the last {unit} of training, found {found}")


def _warn_of_short_average(recipe: Recipe, path: Path, examples: int) -> None:
    """Warn if the stored average still contains a large share of the weights of the first step."""
    training = recipe.training
    steps = training.epochs * (examples // min(training.batch_size, examples))
    share = training.ema ** (steps - 1)
    if steps > 1 and share > _FIRST_SHARE:
        _log.warning(
            f"{path}: training.ema = {training.ema:g} in {steps} steps: {100 * share:.0f} % of the average that is "
            "evaluated and stored are the weights of the first step; 1 - 10 / steps averages over a tenth of them"
        )


def _absolute(recipe: Recipe, root: Path | None, again: bool) -> Recipe:
    """The recipe with absolute paths, for workers in other folders; with the kernels open if they choose again."""
    values = recipe.model_copy(update={"data": recipe.data.absolute(root)}).to_dict()
    if again:
        values["training"]["kernels"] = "auto"
    for init in values["init"]:
        if "artifact" in init:
            init["artifact"] = os.path.abspath(init["artifact"])
    if "distillation" in values and "://" not in values["distillation"]["teacher"]:
        values["distillation"]["teacher"] = os.path.abspath(values["distillation"]["teacher"])
    return Recipe.parse(values)


def made_on(choice: Choice, device: str) -> str:
    """The device for a shard's header: GPU models and builds of kernels round differently."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return f"{name}, kernels {choice.build}" if choice.build else name


def warn_of_other_builds(request: Request) -> None:
    """Say so if existing shards were trained by something else than this process would use."""
    path, manifest, device = request.path, request.manifest, request.made_on
    for tile in shards.tiles_on_disk(path, manifest):
        try:
            with shards.open_shard(path, manifest, tile, verify=False) as h5:
                there = header_text(h5, "device")
        except (DataError, FileNotFoundError):  # reported by `_scan`, or replaced by another process
            continue
        if there != device:
            message = "%s: tile %d was trained on %s, new ones are on %s, whose results are rounded differently"
            _log.warning(message, path, tile, there, device)
        return


def input_hashes(recipe: Recipe, known: dict[Any, Any] | None = None) -> dict[str, str]:
    """What a recipe refers to -> 16 hex digits of a SHA-256.

    `"init FILE"` for an initialiser's artifact, `"network package.module:factory"` for the source of each function of
    one's own, and the `weight_hashes`; not the data.
    """
    hashes = {}
    for name in sorted({init.artifact for init in recipe.init if init.artifact is not None}):
        try:
            with open(name, "rb") as file:
                hashes[f"init {name}"] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        except OSError as error:
            raise DataError(f"init.artifact: cannot read {name}: {error.strerror or error}") from error
    own = [(kind, name) for kind, name in recipe.references if kind != "data"]  # whose images are hashed
    hashes |= {f"{kind} {name}": plugins.source_hash(name) for kind, name in own}
    return hashes | weight_hashes(recipe, known)


def weight_hashes(recipe: Recipe, known: dict[Any, Any] | None = None) -> dict[str, str]:
    """`"weights PATH"` or `"teacher PATH"` -> 16 hex digits of the SHA-256 of tensors; what is known is not read."""
    known = {} if known is None else known
    own = {name for section, name in recipe.references if section == "init"}
    ours = [init for init in recipe.init if own.isdisjoint(part.strip() for part in init.name.split("+"))]
    given = [init.parameters.get(key) for init in ours for key in ("source", "teacher")]
    sources: list[tuple[str, Any, str]] = [  # name in the manifest, what it is, and what else its hash depends on
        (f"{manifests.WEIGHTS}{name}", name, "") for name in sorted({name for name in given if isinstance(name, str)})
    ]
    if (teacher := recipe.distillation) is not None and teacher.alpha != 0:
        about = f"{(teacher.network or recipe.network).model_dump_json()} {recipe.data.model_dump_json()}"
        sources.append((f"teacher {teacher.teacher}", partial(teacher_of, recipe), about))
    for name, source, about in sources:
        if (name, about) not in known:
            known[name, about] = _trained.fingerprint(source() if callable(source) else source)
    return {name: known[name, about] for name, _, about in sources}


def choose_tile(recipe: Recipe, data: DataSource, device: torch.device) -> int:
    """Choose T for a population on a device.

    On a CPU 32. On a GPU the largest power of two for which an epoch and its evaluation fit into 80 % of the free
    memory, extrapolated from two small tiles, at most 1,024 and no more than the population needs.
    """
    if device.type != "cuda":
        return DEFAULT_TILE
    with current(device):
        kernels = choose_kernels(recipe, device).kernels
        try:
            _peak(recipe, data, device, kernels, 1)  # allocates what is allocated only once, such as workspaces
            small, large = (_peak(recipe, data, device, kernels, tile) for tile in _TRIED)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"cannot choose population.tile: {_TRIED[1]} networks do not fit into the device's memory; set it, or "
                "use a smaller batch_size or another device"
            ) from error
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    each = (large - small) / (_TRIED[1] - _TRIED[0])
    return largest_tile(_SHARE * free, small - _TRIED[0] * each, each, recipe.population.networks)


def largest_tile(memory: float, fixed: float, each: float, networks: int) -> int:
    """The largest power of two T with `fixed + T each <= memory`, at most 1,024, and less than twice `networks`."""
    if fixed + each > memory:
        raise UsageError(
            f"one network takes {(fixed + each) / 2**20:.0f} MiB to train, and {memory / 2**20:.0f} MiB of the "
            "device's memory are available; use a smaller batch_size or another device"
        )
    tile = 1
    while tile < min(_LARGEST, networks) and fixed + 2 * tile * each <= memory:
        tile *= 2
    return tile


def _peak(recipe: Recipe, data: DataSource, device: torch.device, kernels: Kernels, tile: int) -> float:
    """Peak memory of training a tile, in bytes of the device."""
    few = data.shortened(min(_BATCHES * recipe.training.batch_size, data.examples))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    peaks = []
    run = TileRun(recipe.replace({"population.tile": tile}), 0, few, device, kernels)
    for work in (lambda: run.epoch(0), run.evaluate):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    # a CUDA graph keeps the memory of its step during the evaluation
    peak = sum(peaks) if kernels == "inductor" else max(peaks)
    # the random numbers of a whole epoch and all images are on the device, too
    whole = data.examples // run.batch
    more = (whole - run.steps_per_epoch) * sum(values[0].nbytes for values in run.numbers.values())
    return peak + more + data.nbytes


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds and result of some work."""
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found
