"""Keep freed memory within the process, so that no step pages it in anew. Buys only speed.

By default glibc gives large blocks back to the system when they are freed. A training step allocates and frees
the same activations again and again, and where page faults are slow (in virtual machines above all) most of its
time can go there.
"""

import ctypes
import sys
from functools import cache

# From glibc's malloc.h; 32 MiB is the largest threshold that it takes, -1 stands for "never trim".
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 1 << 25
_NEVER = -1


@cache
def keep_freed_memory() -> bool:
    """Serve blocks of up to 32 MiB from memory that is never given back; True where the C library is glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(kept and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
