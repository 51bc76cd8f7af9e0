"""Devices, backends of kernels, and the number of threads."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from weightscope._util import plugins
from weightscope._util.names import unknown
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.training import kernel_check
from weightscope.training.kernels import functions
from weightscope.training.kernels.c import build
from weightscope.training.kernels.functions import Kernels
from weightscope.training.memory import keep_freed_memory, return_freed_memory

_log = logging.getLogger(__name__)
_LONGEST = 240  # characters; a shard's texts have at most 256
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


def kernels_on(recipe: Recipe, device: torch.device) -> Kernels:
    """The backend that trains the recipe on a device; see `choose_kernels`."""
    return choose_kernels(recipe, device).kernels


def choose_kernels(recipe: Recipe, device: torch.device) -> Choice:
    """The kernels that train the recipe on a device: C on a CPU and Triton on a GPU, or torch's.

    On first use in a process, compiled kernels are compared with torch's on the recipe's own shapes. With "auto",
    torch's are taken for sequences and where there is no C compiler or no Triton, and with a warning where compiled
    kernels cannot be built or launched, or do not agree.

    Raises:
        UsageError: if the recipe asks for compiled kernels and they are not available, do not support the precision,
            or do not agree.
    """
    training, auto = recipe.training, recipe.training.kernels == "auto"
    if training.kernels == "torch" or training.engine == "loop" or recipe.data.stacked:
        return Choice("torch")
    kernels: Kernels = "triton" if device.type == "cuda" else "c"
    try:
        _refuse(recipe, device)
    except UsageError as error:
        if auto:
            return Choice("torch", checked=_why(error))
        raise
    key = _key(recipe, device)
    if key not in _choices:
        _choices[key] = _checked(recipe, kernels, device)
    found = _choices[key]
    if isinstance(found, Choice):
        return found
    if not auto:
        raise found
    if key not in _warned:
        _warned.add(key)
        _log.warning("compiled kernels are not used, torch's are: %s", _why(found))
    return Choice("torch", checked=_why(found))


_choices: dict[tuple[Any, ...], Choice | UsageError] = {}
_warned: set[tuple[Any, ...]] = set()


def _key(recipe: Recipe, device: torch.device) -> tuple[Any, ...]:
    """What the kernels' shapes and code depend on."""
    network = plugins.imported(recipe.network.type) if plugins.is_reference(recipe.network.type) else None
    training = recipe.training
    settings = [recipe.network.model_dump(mode="json"), recipe.data.model_dump(mode="json"), training.batch_size]
    settings += [training.betas, training.precision, training.mixup > 0, training.cutmix > 0]
    return network, str(device), os.environ.get("CC"), json.dumps(settings)


def trust(recipe: Recipe, device: torch.device, choice: Choice) -> None:
    """Use a choice that another process of this machine has made, without comparing the kernels again."""
    if choice.kernels != "torch":
        _choices[_key(recipe, device)] = choice


def _refuse(recipe: Recipe, device: torch.device) -> None:
    """Raise UsageError for what compiled kernels do not support, and where there is no compiler."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"kernels 'compiled' are for a CPU or CUDA, found device {device}; use kernels 'torch'")
    if device.type == "cuda":
        functions.backend("triton")
        return
    if recipe.training.precision != "float32":
        raise UsageError(
            f"kernels 'compiled' compute in float32 on a CPU, found precision {recipe.training.precision!r}; "
            "use kernels 'torch' or float32"
        )
    build.compiler()


def _checked(recipe: Recipe, kernels: Kernels, device: torch.device) -> Choice | UsageError:
    """The compiled kernels after a comparison, or the error of one that fails."""
    calls = kernel_check.plan(recipe, kernels)
    dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
    try:
        if kernels == "triton":
            functions.backend("triton").probe(device)
            made = f"triton {functions.backend('triton').VERSION}"
        else:
            made = build.build_id()
        return Choice(kernels, made, kernel_check.check(calls, kernels, device, dtype))
    except UsageError as error:
        return error


def _why(error: UsageError) -> str:
    """An error in one line of ASCII, as a shard's header can hold it."""
    text = " ".join(str(error).split()).encode("ascii", "replace").decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


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
