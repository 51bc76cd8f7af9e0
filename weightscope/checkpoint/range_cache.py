"""Cache on disk of byte ranges of files at a hub.

    ROOT/ENDPOINT/ORG--NAME/refs/HASH.json          revision -> commit
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.json        size and hash of a file
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.START-STOP  bytes of the file

HASH is the first 24 digits of the SHA-256 of the file's or the revision's name, so that no server chooses a path.
Everything under a commit is immutable: nothing expires.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from weightscope._util import atomic

_MAX_NOTE = 100 << 20


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

    def part(self, commit: str, name: str, start: int, stop: int) -> Path | None:
        """The path of the file with those bytes of a file; None if they are not cached."""
        path = self._path(commit, name, f".{start}-{stop}")
        try:
            return path if path.stat().st_size == stop - start else None
        except OSError:
            return None

    def keep_part(self, commit: str, name: str, start: int, stop: int, pieces: Iterable[bytes]) -> Path:
        """Store bytes of a file as they arrive."""
        path = self._path(commit, name, f".{start}-{stop}")
        self._write(path, pieces)
        return path

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


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
