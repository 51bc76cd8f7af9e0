"""Keep freed memory in the process while networks train, so that steps do not page it in again. Affects only the speed.

By default glibc returns large freed blocks to the system. A training step allocates and frees the same activations over
and over, and where page faults are slow (mainly in virtual machines) they can take most of its time. A notebook, on the
other hand, should not keep the memory of every array that it has ever freed, so the setting ends with the training.
"""

import ctypes
import sys
from functools import cache

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
