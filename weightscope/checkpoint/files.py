"""Byte ranges of files on disk; files are never memory-mapped, so that a truncated one is an error and not a crash."""

import io
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from weightscope.errors import DataError

_PIECE = 1 << 20


class Region(Protocol):
    """Available bytes, addressed by their position in the file that they belong to."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`.

        Raises:
            DataError: if the file ends before.
        """


class ByteReader(Protocol):
    """A file of a checkpoint that is read by byte range, on disk or at the hub.

    Attributes:
        where: its name in errors.
        size: in bytes.
    """

    where: str
    size: int

    def prepare(self, start: int, stop: int) -> Region:
        """Make these bytes available, fetching no others."""

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """Announce the ranges that will be read, in the order in which they make up the file."""

    def whole(self) -> "LocalFile":
        """The whole file, on disk."""


class LocalFile:
    """A regular file on disk, kept open, so that replacing it under its name does not mix two files.

    Args:
        path: of the file.
        where: its name in errors; None for the path.
        base: position of this file's first byte in the original file, for a cached part of one.
        counted: whether reads count in `bytes_read`.

    Attributes:
        bytes_read: so far.

    Raises:
        DataError: if it does not exist, or is a folder, a device or a pipe.
    """

    def __init__(self, path: str | Path, where: str | None = None, base: int = 0, counted: bool = True) -> None:
        self.where = where or str(path)
        self.base = base
        self.counted = counted
        self.bytes_read = 0
        try:
            # Without O_NONBLOCK, opening a pipe without a writer would wait forever.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{self.where}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{self.where}: expected a file, found a folder, a pipe or a device")
        self.size = status.st_size

    def prepare(self, start: int, stop: int) -> Region:
        """See `ByteReader.prepare`."""
        return self

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `ByteReader.expect`; nothing to do."""

    def whole(self) -> "LocalFile":
        """See `ByteReader.whole`."""
        return self

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Region.read_into`."""
        self._fill(buffer, start)
        self.bytes_read += len(buffer) * self.counted

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `start` to `stop` in pieces, for checksums; they do not count in `bytes_read`.

        Raises:
            DataError: if the file ends before.
        """
        buffer = memoryview(bytearray(min(_PIECE, stop - start)))
        for first in range(start, stop, _PIECE):
            piece = buffer[: stop - first]
            self._fill(piece, first)
            yield piece

    def _fill(self, buffer: memoryview, start: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], start - self.base + done)
            except OSError as error:
                raise DataError(f"{self.where}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise DataError(f"{self.where}: it ends before byte {start + len(buffer)}: it is truncated")
            done += count

    def stream(self) -> io.BufferedReader:
        """The file as a buffered stream with its own position, for parsers."""
        return io.BufferedReader(_Stream(self), 1 << 16)


def read_bytes(file: ByteReader, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop` of a file."""
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

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size - self._position))
        if count:
            self._file.read_into(memoryview(buffer)[:count], self._position)
        self._position += count
        return count
