"""Devices, the choice of kernels, and the number of threads and the memory while networks train."""

import contextlib
import ctypes
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from weightscope import networks
from weightscope._util import plugins
from weightscope._util.names import unknown
from weightscope.data.image_section import dataset_info
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.training import network_check
from weightscope.training.kernels import build
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import DEFAULT_TILE, networks_for
from weightscope.training.optimiser import BatchedAdamW

_log = logging.getLogger(__name__)
_LONGEST = 240  # characters; a shard's texts have at most 256
_TIMED_SECONDS, _ROUNDS = 0.5, 5  # of steps with both kinds of kernels
_MUCH = 0.9  # of the compiled kernels' time: torch's are chosen below
_MEANT = {"gpu": "cuda", "nvidia": "cuda"}  # "gpu" is spelt more like "cpu"


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; `"auto"` is the GPU if there is one.

    Raises:
        UsageError: if the device does not exist.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        if device.lower() in _MEANT:
            raise UsageError(f"no device {device!r}; did you mean {_MEANT[device.lower()]!r}?") from error
        raise UsageError(unknown("device", device, ("auto", "cpu", "cuda"))) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: torch finds no GPU; use --device cpu")
    return resolved


@dataclass(frozen=True)
class Choice:
    """The kernels that train a recipe on a device.

    Attributes:
        kernels: the backend.
        build: what else their results depend on: the build of kernels in C or the version of Triton; "" for torch's.
        checked: what was compared with torch's kernels, or why compiled kernels are not used; "" if neither.
    """

    kernels: Kernels
    build: str = ""
    checked: str = ""


def choose_kernels(recipe: Recipe, device: torch.device) -> Choice:
    """The kernels that train the recipe on a device: C on a CPU and `torch.compile` on a GPU, or torch's.

    On first use in a process, the recipe's network and compiled kernels are checked, see `network_check`. With "auto",
    torch's are taken for sequences and where there is no C compiler or no Triton, and with a warning where compiled
    kernels cannot be built or launched, or do not agree.

    Raises:
        RecipeError: if `training.frozen` leaves nothing to be trained.
        UsageError: if the recipe's engine cannot train the network; if the recipe asks for compiled kernels and they
            are not available, do not support the precision, or do not agree.
    """
    key = _key(recipe, device)
    if key not in _choices:
        _choices[key] = _choose(recipe, device)
    found = _choices[key]
    if isinstance(found, Choice):
        return found
    if recipe.training.kernels != "auto":
        raise found
    if key not in _warned:
        _warned.add(key)
        _log.warning("compiled kernels are not used, torch's are: %s", _why(found))
    return Choice("torch", checked=_why(found))


_choices: dict[tuple[Any, ...], Choice | UsageError] = {}
_warned: set[tuple[Any, ...]] = set()


def _choose(recipe: Recipe, device: torch.device) -> Choice | UsageError:
    """The compiled kernels after a comparison, or the error of one that fails."""
    training = recipe.training
    network_check.check_network(recipe)
    if training.kernels == "torch" or training.engine == "loop" or recipe.data.stacked:
        return Choice("torch")
    try:
        _refuse(recipe, device)
    except UsageError as error:
        if training.kernels == "auto":
            return Choice("torch", checked=_why(error))
        raise
    kernels: Kernels = "inductor" if device.type == "cuda" else "c"
    try:
        made = build.build_id() if kernels == "c" else f"triton {version('triton')}"
        choice = Choice(kernels, made, network_check.check_kernels(recipe, kernels, device))
    except UsageError as error:
        return error
    network_check.check_network(recipe, kernels)
    return choice


def _refuse(recipe: Recipe, device: torch.device) -> None:
    """Raise UsageError for what compiled kernels do not support, and where there is no compiler."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"kernels 'compiled' are for a CPU or CUDA, found device {device}; use kernels 'torch'")
    if device.type == "cuda":
        if not has_triton():
            raise UsageError(
                "kernels = 'compiled' need Triton on a GPU; `pip install triton` (part of torch for CUDA on Linux), or "
                "use kernels = 'torch'"
            )
        return
    if recipe.training.precision != "float32":
        raise UsageError(
            f"kernels 'compiled' compute in float32 on a CPU, found precision {recipe.training.precision!r}; "
            "use kernels 'torch' or float32"
        )
    build.compiler()


def _why(error: UsageError) -> str:
    """An error in one line of ASCII, as a shard's header can hold it."""
    text = " ".join(str(error).split()).encode("ascii", "replace").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _key(recipe: Recipe, device: torch.device) -> tuple[Any, ...]:
    """What the checks depend on."""
    network = plugins.imported(recipe.network.type) if plugins.is_reference(recipe.network.type) else None
    return network, str(device), os.environ.get("CC"), json.dumps(_settings(recipe))


def _settings(recipe: Recipe) -> list[Any]:
    training = recipe.training
    settings = [recipe.network.model_dump(mode="json"), recipe.data.model_dump(mode="json"), training.batch_size]
    return [*settings, training.betas, training.precision, training.engine, training.frozen, training.kernels]


def trust(recipe: Recipe, device: torch.device, choice: Choice) -> None:
    """Use a choice that another process of this machine has made, without checking again."""
    _choices[_key(recipe, device)] = choice


def faster_kernels(recipe: Recipe, device: torch.device, choice: Choice) -> Choice:
    """The choice, or torch's kernels if they train a tile of the recipe faster; for `kernels = "auto"`.

    Steps of both are timed in turns, for about a second, once on a machine: the first result is kept beside the
    compiled kernels.
    """
    if choice.kernels == "torch":
        return choice
    about = [choice.build, torch.__version__, str(device), recipe.population.tile, _settings(recipe)]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    file = build.cache_folder() / f"timed-{name}.txt"
    if not file.exists():
        with one_thread(), current(device):
            text = _timed(recipe, device, choice.kernels)
        with contextlib.suppress(OSError), file.open("x") as new:  # of two processes, the first one decides
            new.write(text)
    text = file.read_text() if file.exists() else text
    return Choice("torch", checked=text) if text else choice


def _timed(recipe: Recipe, device: torch.device, compiled: Kernels) -> str:
    """What says that torch's kernels are faster, or "" if they are not."""
    each: tuple[Kernels, Kernels] = (compiled, "torch")
    steps, best = [_step(recipe, device, kernels) for kernels in each], [math.inf, math.inf]
    end = time.perf_counter() + _TIMED_SECONDS
    for _ in range(_ROUNDS):
        for k, step in enumerate(steps):
            begun = time.perf_counter()
            step()
            best[k] = min(best[k], time.perf_counter() - begun)
        if time.perf_counter() > end:
            break
    mine, torchs = (f"{1000 * seconds:.3g}" for seconds in best)
    return (
        f"torch's kernels are faster: {torchs} ms for a step, compiled ones {mine}" if best[1] < _MUCH * best[0] else ""
    )


def _step(recipe: Recipe, device: torch.device, kernels: Kernels) -> Callable[[], None]:
    """A training step of a tile with random images."""
    info, training = dataset_info(recipe.images), recipe.training
    batch = min(training.batch_size, recipe.images.train or info.train or training.batch_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = networks.build_for(recipe)
        images = torch.randn(batch, info.channels, info.size, info.size).to(device)
    nets = networks_for(recipe, network, range(recipe.population.tile or DEFAULT_TILE), device, kernels)
    values = {name: value.numpy() for name, value in network.state_dict().items() if name in nets.spec.names}
    nets.weights[:] = torch.from_numpy(nets.spec.pack(values))
    ones = torch.ones(nets.count, device=device)
    trained = torch.ones(nets.spec.size, dtype=torch.bool, device=device)
    optimiser = BatchedAdamW(
        nets.weights, nets.gradient, trained, learning_rate=1e-3 * ones, weight_decay=0 * ones, kernels=kernels
    )
    scalars = torch.ones(3, device=device)
    each = images.expand(nets.count, *images.shape)

    def losses() -> Tensor:
        return -nets(each).float().log_softmax(2)[:, :, 0].mean(1)

    forward, update = (by_kernels(part, kernels) for part in (losses, optimiser.step))

    def step() -> None:
        nets.backward(forward().sum())
        update(scalars, training.clip_norm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    nets.train()
    step()  # compiles, and allocates what is allocated once
    return step


def current(device: torch.device) -> AbstractContextManager[None]:
    """Launch kernels on `device` within the block; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one CPU thread within the block: the number of threads changes the bits of reductions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        return_freed_memory()


# By default glibc returns large freed blocks to the system. A training step allocates and frees the same activations
# over and over, and where page faults are slow (mainly in virtual machines) they can take most of its time. A notebook,
# on the other hand, should not keep the memory of every array that it has ever freed: the setting ends with training.

# From glibc's malloc.h: blocks are never mapped by themselves, which would be unmapped when freed, and never trimmed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER, _NONE = -1, 0
# What glibc's thresholds grow to by themselves, which they no longer do once one of them was set.
_MAPPED, _LARGE = 65_536, 32 << 20


def keep_freed_memory() -> bool:
    """Keep freed blocks for reuse; returns whether it took effect, which needs glibc."""
    library = _glibc()
    if library is None or not library.mallopt(_M_MMAP_MAX, _NONE):
        return False
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def return_freed_memory() -> None:
    """End `keep_freed_memory`: freed blocks go back to the system, now and from now on."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_MAX, _MAPPED)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "gnu_get_libc_version") else None
