"""Devices, and the number of threads while networks train."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope import networks
from weightscope._util import threads
from weightscope._util.environment import available_memory
from weightscope._util.names import unknown
from weightscope._util.torch_random import seeded
from weightscope.errors import UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec

DEFAULT_TILE = 32  # networks, on a CPU
_CPU: Any = torch.backends.mkldnn
_IN_FLOAT32: tuple[Any, ...] = _CPU.matmul, _CPU.conv, _CPU.rnn, torch.backends.cuda.matmul
_ATTENTION = [getattr(SDPBackend, f"{name}_ATTENTION") for name in ("FLASH", "EFFICIENT", "CUDNN")] + [SDPBackend.MATH]
_OF_A_GPU = re.compile(r"out of memory|CUDA (driver )?error|cuDNN error|No CUDA GPUs|HIP error", re.IGNORECASE)
_MEANT = {"gpu": "cuda", "nvidia": "cuda"}  # "gpu" is spelt more like "cpu"


class DeviceFailed(WeightscopeError):
    """A GPU failed, or has no memory left."""


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; `"auto"` is the GPU if there is one. UsageError if the device does not exist."""
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


def check_memory(recipe: Recipe, device: torch.device) -> None:
    """Refuse a recipe of which one tile does not fit into the memory, before anything is allocated.

    It needs more than what is counted: weights, gradients and two moments, T D numbers each, a fifth such matrix for an
    average, one for each snapshot (on a GPU, not in its memory), and the inputs and outputs of a batch.
    A user's own network is not built for this; its weights count as 0.
    """
    population = recipe.population
    tile = min(population.tile or (DEFAULT_TILE if device.type == "cpu" else 1), population.networks)
    size = 0
    if not isinstance(recipe.network, OwnNetworkConfig):
        with seeded(0), torch.device("meta"):
            size = WeightSpec.of(networks.build_for(recipe)).size
    training, data = recipe.training, recipe.data
    each = math.prod(data.input_shape()) + math.prod(data.output_shape())
    batch = min(training.batch_size, getattr(data, "train", None) or 1)
    copies = (5 if training.ema else 4) + (device.type == "cpu") * len(recipe.population.snapshots or ())
    needs = {
        f"weights, gradients, moments and snapshots of {tile:,} networks with {size:,} weights": copies * tile * size,
        f"inputs and outputs of {batch:,} examples of each": tile * batch * each,
    }
    cuda = device.type == "cuda"
    there = torch.cuda.get_device_properties(device).total_memory if cuda else available_memory()
    total = sum(needs.values())
    if 4 * total > there:
        parts = [f"{4 * count / 2**30:,.1f} GiB for {what}" for what, count in needs.items() if 100 * count > total]
        raise UsageError(
            f"training a tile takes more than {' and '.join(parts)}; {there / 2**30:,.1f} GiB of memory are there: use "
            "a smaller network, population.tile or training.batch_size"
        )


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Launch kernels on `device` within the block; does nothing for a CPU. DeviceFailed if a GPU fails."""
    if device.type != "cuda":
        yield
        return
    try:
        if not torch.cuda.is_available():
            raise DeviceFailed("torch finds no GPU")
        with torch.cuda.device(device):
            yield
    except RuntimeError as error:  # those of libraries have no class of their own
        if not _OF_A_GPU.search(str(error)):
            raise
        raise DeviceFailed(f"its GPU failed: {' '.join(str(error).split())[:200]}") from error


@contextmanager
def unaffected() -> Iterator[None]:
    """Leave the caller's autocast, `no_grad`, inference mode, reduced precision and attention kernels within the block.

    Each changes the bits of training. The last two belong to the process, so other threads are affected meanwhile.

    UsageError if torch's default data type is not float32: it is one for all threads, so it is not changed here.
    """
    if torch.get_default_dtype() != torch.float32:
        raise UsageError(
            f"training needs torch's default data type float32, found {torch.get_default_dtype()}; "
            "call torch.set_default_dtype(torch.float32)"
        )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(sdpa_kernel(_ATTENTION))
        for operation in _IN_FLOAT32:
            stack.callback(setattr, operation, "fp32_precision", operation.fp32_precision)
        with suppress(RuntimeError):  # of a caller who has used both of torch's interfaces
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        for operation in _IN_FLOAT32:
            operation.fp32_precision = "ieee"
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run `unaffected` on one CPU thread within the block: the number of threads changes the bits of reductions."""
    torch.set_flush_denormal(True)
    try:
        with threads.one_thread(), unaffected():
            yield
    finally:
        torch.set_flush_denormal(False)
