"""Cache on disk of byte ranges of files at a hub.

    ROOT/ENDPOINT/ORG--NAME/refs/HASH.json          revision -> commit
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.json        size and hash of a file
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.START-STOP  bytes of the file, then their SHA-256 (32 bytes)

A part is compared with its SHA-256 whenever it is used.

HASH is the first 24 digits of the SHA-256 of the file's or the revision's name, so that no server chooses a path.
Everything under a commit is immutable: nothing expires.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from weightscope._util import atomic
from weightscope.checkpoint.files import LocalFile
from weightscope.errors import DataError

_MAX_NOTE = 100 << 20
_DIGEST = hashlib.sha256().digest_size

log = logging.getLogger(__name__)


class RangeCache:
    """The cached byte ranges of one model, in `$WEIGHTSCOPE_CACHE`, by default `weightscope` in `$HF_HOME`.

    Args:
        endpoint: the hub's address; two hubs share nothing.
        repository: `org/name`, already checked.
    """

    def __init__(self, endpoint: str, repository: str) -> None:
        root = Path(os.environ.get("WEIGHTSCOPE_CACHE") or Path(constants.HF_HOME, "weightscope")).expanduser()
        self.folder = root / _hash(endpoint)[:12] / repository.replace("/", "--")

    def note(self, group: str, name: str) -> Any | None:
        """The JSON value stored under a name; None if it is missing or damaged."""
        path = self._path(group, name, ".json")
        try:
            if path.stat().st_size > _MAX_NOTE:
                return None
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def keep_note(self, group: str, name: str, value: Any) -> None:
        """Store a JSON value under a name."""
        self._write(self._path(group, name, ".json"), (json.dumps(value).encode(),))

    def has(self, commit: str, name: str, start: int, stop: int) -> bool:
        """Whether those bytes of a file are cached, by the size of the part; its digest is not compared."""
        try:
            return self._path(commit, name, f".{start}-{stop}").stat().st_size == stop - start + _DIGEST
        except OSError:
            return False

    def part(self, commit: str, name: str, start: int, stop: int, where: str) -> LocalFile | None:
        """Those bytes of a file, compared with their digest; None if they are not cached or damaged.

        A damaged part is removed, and a warning is logged.

        Args:
            commit: of the file.
            name: of the file.
            start: first byte.
            stop: byte after the last.
            where: the file's name in messages.
        """
        path = self._path(commit, name, f".{start}-{stop}")
        if not self.has(commit, name, start, stop):
            return None
        file = LocalFile(path, where, base=start, counted=False)
        if _intact(file, start, stop):
            file.size = stop - start
            return file
        log.warning("%s: checksum mismatch of cached bytes %d-%d in %s; they were removed", where, start, stop, path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def keep_part(self, commit: str, name: str, start: int, stop: int, pieces: Iterable[bytes]) -> None:
        """Store bytes of a file as they arrive, followed by their SHA-256."""
        self._write(self._path(commit, name, f".{start}-{stop}"), _with_digest(pieces))

    def cached(self, commit: str, name: str) -> list[tuple[int, int]]:
        """The ranges (start, stop) of a file that are cached, in ascending order; old parts without digest are not."""
        prefix = self._path(commit, name, ".")
        places = (path.name.removeprefix(prefix.name) for path in prefix.parent.glob(f"{prefix.name}*"))
        spans = (re.fullmatch(r"(\d{1,18})-(\d{1,18})", place) for place in places)
        found = sorted((int(span[1]), int(span[2])) for span in spans if span)
        return [span for span in found if span[0] < span[1] and self.has(commit, name, *span)]

    def forget(self, commit: str, name: str) -> None:
        """Remove every part of a file."""
        prefix = self._path(commit, name, ".")
        for path in prefix.parent.glob(f"{prefix.name}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, group: str, name: str, suffix: str) -> Path:
        return self.folder / group / f"{_hash(name)[:24]}{suffix}"

    def _write(self, path: Path, pieces: Iterable[bytes]) -> None:
        atomic.make_folder(path.parent)
        atomic.write(path, pieces)


def _intact(file: LocalFile, start: int, stop: int) -> bool:
    digest, stated = hashlib.sha256(), bytearray(_DIGEST)
    try:
        for piece in file.pieces(start, stop):
            digest.update(piece)
        file.read_into(memoryview(stated), stop)
    except DataError:  # truncated since its size was read
        return False
    return digest.digest() == bytes(stated)


def _with_digest(pieces: Iterable[bytes]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    yield digest.digest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
