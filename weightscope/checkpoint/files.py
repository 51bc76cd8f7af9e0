"""Bytes of files on disk, read by position: never mapped, so that a file that shrinks is an error and no crash."""

import io
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from weightscope.errors import DataError


class Region(Protocol):
    """Bytes that are here, addressed by their position in the file that they belong to."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`.

        Raises:
            DataError: if they are not all there.
        """


class SourceFile(Protocol):
    """A file of a checkpoint, on disk or at the hub.

    Attributes:
        where: what errors call it.
        size: in bytes.
        bytes_read: what has been read of it, unless its folder counts that.
    """

    where: str
    size: int
    bytes_read: int

    def prepare(self, start: int, stop: int) -> Region:
        """Bring those bytes here, and nothing else."""

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """Be told the parts in which it will be asked for; in their order they make up the file."""

    def whole(self) -> "LocalFile":
        """The whole file on disk."""


class LocalFile:
    """A regular file on disk, kept open: replacing it under its name does not mix two files.

    Args:
        path: of the file.
        where: what errors call it; None for the path.
        base: the position in the original file of this file's first byte (for a cached part of one).
        counted: reading it counts in `bytes_read`.

    Raises:
        DataError: if there is none, or it is a folder, a device or a pipe.
    """

    def __init__(self, path: str | Path, where: str | None = None, base: int = 0, counted: bool = True) -> None:
        self.where = where or str(path)
        self.base = base
        self.counted = counted
        self.bytes_read = 0
        try:
            # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{self.where}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{self.where}: expected a file, found a folder, a pipe or a device")
        self.size = status.st_size

    def prepare(self, start: int, stop: int) -> Region:
        """See `SourceFile.prepare`."""
        return self

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `SourceFile.expect`; all of it is here."""

    def whole(self) -> "LocalFile":
        """See `SourceFile.whole`."""
        return self

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Region.read_into`."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], start - self.base + done)
            except OSError as error:
                raise DataError(f"{self.where}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise DataError(f"{self.where}: it ends before byte {start + len(buffer)}: it is truncated")
            done += count
        self.bytes_read += done * self.counted

    def stream(self) -> io.BufferedReader:
        """The file as a stream of its own position, for parsers; buffered, so a few bytes more may be read."""
        return io.BufferedReader(_Stream(self), 1 << 16)


def read_bytes(file: SourceFile, start: int, stop: int) -> bytes:
    """Those bytes of a file."""
    out = bytearray(stop - start)
    if out:
        file.prepare(start, stop).read_into(memoryview(out), start)
    return bytes(out)


class _Stream(io.RawIOBase):
    def __init__(self, file: LocalFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise ValueError("a position before the beginning of the file")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        count = max(0, min(len(buffer), self._file.size - self._position))
        if count:
            self._file.read_into(memoryview(buffer)[:count], self._position)
        self._position += count
        return count
