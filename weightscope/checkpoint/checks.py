"""Comparing files with the hashes that are stated for them: by a hub, by the name of a cached blob."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightscope.checkpoint.files import LocalFile, Region
from weightscope.errors import DataError

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A SHA-256, or the SHA-1 by which git names a file."""


@dataclass(frozen=True)
class FileCheck:
    """What is known of one file's integrity.

    Attributes:
        name: of the file.
        status: `"verified"`: equal to what `compared` states; `"unverified"`: not compared as a whole; `"damaged"`.
        compared: what it was compared with: `"sha256"`, `"sha1"`, `"crc32"`, `"digest"`, or empty.
        detail: why it is unverified or damaged, and what to do; or empty.
    """

    name: str
    status: Literal["verified", "unverified", "damaged"]
    compared: str = ""
    detail: str = ""


def kind(stated: str) -> str:
    """`"sha256"` or `"sha1"`, by the number of digits."""
    return "sha256" if len(stated) == 64 else "sha1"


def mismatch(stated: str, size: int, pieces: Iterable[bytes | memoryview]) -> str | None:
    """None if the bytes have the stated hash, else the hash found.

    Args:
        stated: a match of `HASH`; a SHA-1 is that of git, of `blob SIZE`, a zero byte and the content, or that of the
            content alone.
        size: of the file.
        pieces: its bytes.
    """
    if kind(stated) == "sha256":
        digests = [hashlib.sha256()]
    else:
        digests = [hashlib.sha1(start, usedforsecurity=False) for start in (b"blob %d\0" % size, b"")]
    for piece in pieces:
        for digest in digests:
            digest.update(piece)
    found = [digest.hexdigest() for digest in digests]
    return None if stated in found else found[0]


def mismatch_error(where: str, stated: str, found: str, advice: str) -> DataError:
    """The error of a file that does not have its stated hash."""
    return DataError(
        f"{where}: checksum mismatch: expected {kind(stated)} {stated[:16]}..., found {found[:16]}...; {advice}"
    )


def blob_hash(path: Path) -> str | None:
    """The hash that names a file in huggingface_hub's cache (`blobs/HASH`); None for other files."""
    real = path.resolve()
    return real.name if real.parent.name == "blobs" and HASH.fullmatch(real.name) else None


class BlobFile(LocalFile):
    """A file that huggingface_hub downloaded, compared as a whole with its hash before its tensors are read.

    Args:
        path: in the snapshot, a link to the blob.
        where: its name in errors.
        known: the state of the blob when it was compared last; None if it never was.
        remember: is called with the state once it was compared.

    Raises:
        DataError: if it cannot be opened.
    """

    def __init__(self, path: Path, where: str, known: object, remember: Callable[[list[int]], None]) -> None:
        super().__init__(path, where, counted=False)
        self.stated = blob_hash(path)
        self.path = path.resolve()
        status = self.path.stat()
        self._state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        self.verified = self.stated is not None and known == self._state
        self._remember = remember
        self._expected = False

    def prepare(self, start: int, stop: int) -> Region:
        """See `ByteReader.prepare`; a header alone, which is read of every shard, does not cost a comparison."""
        if self._expected or (start, stop) == (0, self.size):
            self.verify()
        return self

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `ByteReader.expect`."""
        self._expected = True

    def whole(self) -> LocalFile:
        """See `ByteReader.whole`; its hash is compared."""
        self.verify()
        return self

    def verify(self) -> None:
        """Compare the file with the hash that names it, once.

        Raises:
            DataError: on a checksum mismatch.
        """
        if self.verified or self.stated is None:
            return
        if found := mismatch(self.stated, self.size, self.pieces(0, self.size)):
            raise mismatch_error(self.where, self.stated, found, f"delete {self.path}")
        self.verified = True
        self._remember(self._state)
