"""Devices, backends of kernels, and the number of threads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from weightscope._util.names import unknown
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.training.kernels import functions
from weightscope.training.kernels.c import build
from weightscope.training.kernels.functions import Kernels
from weightscope.training.memory import keep_freed_memory

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


def kernels_on(recipe: Recipe, device: torch.device) -> Kernels:
    """The backend that trains the recipe on a device: "compiled" means C on a CPU and Triton on a GPU.

    Raises:
        UsageError: if it is not available (no C compiler, no Triton), or does not support the precision.
    """
    training = recipe.training
    if training.kernels == "torch":
        return "torch"
    if device.type == "cuda":
        functions.backend("triton").probe(device)
        return "triton"
    if device.type != "cpu":
        raise UsageError(f"kernels 'compiled' are for a CPU or CUDA, found device {device}; use kernels 'torch'")
    if training.precision != "float32":
        raise UsageError(
            f"kernels 'compiled' compute in float32 on a CPU, found precision {training.precision!r}; "
            "use kernels 'torch' or float32"
        )
    build.library()
    return "c"


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
