"""Keep freed memory in the process, so that steps do not page it in again. Affects only the speed.

By default glibc returns large freed blocks to the system. A training step allocates and frees the same activations over
and over, and where page faults are slow (mainly in virtual machines) they can take most of its time.
"""

import ctypes
import sys
from functools import cache

# From glibc's malloc.h; 32 MiB is the largest threshold, -1 means "never trim".
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 1 << 25
_NEVER = -1


@cache
def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB for reuse; returns whether it took effect, which needs glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(kept and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
