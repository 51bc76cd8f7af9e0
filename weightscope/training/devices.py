"""Devices, and the number of threads and the memory while networks train."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from weightscope._util.names import unknown
from weightscope.errors import UsageError

_MEANT = {"gpu": "cuda", "nvidia": "cuda"}  # "gpu" is spelt more like "cpu"


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
