"""Devices, and the number of threads while networks train."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope import networks
from weightscope._util import threads
from weightscope._util.environment import available_memory
from weightscope._util.torch_random import seeded
from weightscope.errors import UsageError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec

DEFAULT_TILE = 32  # networks, on a CPU
_CPU: Any = torch.backends.mkldnn
_IN_FLOAT32: tuple[Any, ...] = _CPU.matmul, _CPU.conv, _CPU.rnn, torch.backends.cuda.matmul
_ATTENTION = [getattr(SDPBackend, f"{name}_ATTENTION") for name in ("FLASH", "EFFICIENT", "CUDNN")] + [SDPBackend.MATH]


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; `"auto"` is the GPU if there is one. UsageError if the device does not exist."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"no device {device!r}; expected auto, cpu or cuda") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: torch finds no GPU; use --device cpu")
    return resolved


def check_memory(recipe: Recipe, device: torch.device) -> None:
    """Refuse a recipe of which one tile does not fit into the memory, before anything is allocated.

    It needs more than what is counted: weights, gradients and two moments, T D numbers each, a fifth such matrix for an
    average, and one for each snapshot (on a GPU, not in its memory). A user's own network is not built for this.
    """
    population = recipe.population
    if isinstance(recipe.network, OwnNetworkConfig):
        return
    tile = min(population.tile or (DEFAULT_TILE if device.type == "cpu" else 1), population.networks)
    with seeded(0), torch.device("meta"):
        size = WeightSpec.of(networks.build_for(recipe)).size
    copies = (5 if recipe.training.ema else 4) + (device.type == "cpu") * len(population.snapshots or ())
    there = available_memory() if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory
    if (needed := 4 * copies * tile * size) > there:
        raise UsageError(
            f"training a tile takes more than {needed / 2**30:,.1f} GiB for weights, gradients, moments and snapshots "
            f"of {tile:,} networks with {size:,} weights; {there / 2**30:,.1f} GiB of memory are there: use a smaller "
            "network or population.tile"
        )


def current(device: torch.device) -> AbstractContextManager[None]:
    """Launch kernels on `device` within the block; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    _allocate(mapped=0, trimmed=-1)
    try:
        with threads.one_thread(), unaffected():
            yield
    finally:
        torch.set_flush_denormal(False)
        _allocate(mapped=65_536, trimmed=64 << 20)


def _allocate(mapped: int, trimmed: int) -> None:
    """How many blocks glibc maps by themselves, and how many free bytes it keeps; by default it returns large blocks.

    A training step allocates the same activations as the last one: page faults take up to a fifth of its time.
    """
    library: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(-4, mapped)  # M_MMAP_MAX
        library.mallopt(-1, trimmed)  # M_TRIM_THRESHOLD
