"""What was fetched from a hub, on disk: complete files only, under names that no server chooses.

    ROOT/ENDPOINT/ORG--NAME/refs/HASH.json          revision -> commit
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.json        what is known of a file
    ROOT/ENDPOINT/ORG--NAME/COMMIT/HASH.START-STOP  bytes of it

HASH is the first 24 digits of the SHA-256 of the file's or the revision's name. Everything under a commit is
immutable, so nothing ever becomes stale.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weightscope._util import atomic

_MAX_NOTE = 100 << 20


def default_root() -> Path:
    """`$WEIGHTSCOPE_CACHE`, else `weightscope` in `$HF_HOME`, else in `~/.cache/huggingface`."""
    own = os.environ.get("WEIGHTSCOPE_CACHE")
    if own:
        return Path(own).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "weightscope"


class Cache:
    """The files of one model.

    Args:
        endpoint: the hub's address; two hubs never share a file.
        repository: `org/name`, already checked.
        root: see `default_root`.
    """

    def __init__(self, endpoint: str, repository: str, root: Path | None = None) -> None:
        self.folder = (root or default_root()) / _hash(endpoint)[:12] / repository.replace("/", "--")

    def note(self, group: str, name: str) -> Any | None:
        """What was noted under a name; None if nothing, or nothing sound."""
        path = self._path(group, name, ".json")
        try:
            if path.stat().st_size > _MAX_NOTE:
                return None
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def keep_note(self, group: str, name: str, value: Any) -> None:
        """Note a JSON value under a name."""
        self._write(self._path(group, name, ".json"), (json.dumps(value).encode(),))

    def part(self, commit: str, name: str, start: int, stop: int) -> Path | None:
        """The file that holds those bytes of a file; None if it is not here."""
        path = self._path(commit, name, f".{start}-{stop}")
        try:
            return path if path.stat().st_size == stop - start else None
        except OSError:
            return None

    def keep_part(self, commit: str, name: str, start: int, stop: int, pieces: Iterable[bytes]) -> Path:
        """Store bytes of a file as they come."""
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
