"""Keep freed memory in the process, so that steps do not page it in again. Affects only the speed.

By default glibc returns large freed blocks to the system. A training step allocates and frees the same activations over
and over, and where page faults are slow (mainly in virtual machines) they can take most of its time.
"""

import ctypes
import sys
from functools import cache

# From glibc's malloc.h: blocks are never mapped by themselves, which would be unmapped when freed, and never trimmed.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


@cache
def keep_freed_memory() -> bool:
    """Keep freed blocks for reuse; returns whether it took effect, which needs glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_MAX, _NONE)
    return bool(kept and library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
