"""Reading files that somebody else made: regular ones only, and no more of them than expected.

Opening a pipe without a writer waits forever, and a device such as /dev/zero has no end.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def open_regular(path: str | Path) -> BufferedReader:
    """A regular file, open for reading in binary.

    Raises:
        OSError: if it cannot be opened, or is a pipe, a socket or a device.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would wait.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        found = next((kind for test, kind in _KINDS if test(mode)), "a device")
        raise OSError(errno.EINVAL, f"expected a regular file, found {found}", str(path))
    return file


def read_regular(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: as `open_regular`, or if the file is larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            found = max(os.fstat(file.fileno()).st_size, len(data))
            raise OSError(errno.EFBIG, f"expected at most {most:,} bytes, found {found:,}", str(path))
    return data


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
