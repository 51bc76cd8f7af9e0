"""Atomic writes: temporary file in the same folder, fsync, rename, fsync of the folder.

A temporary file is locked with `flock` while it is written. The lock is released when the process ends, so a temporary
file that can be locked is abandoned, and `sweep` removes it. Every folder is swept before this process first writes to
it.

In an object store a write is atomic by itself.
"""

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from weightscope._util.remote import is_remote, is_there, put
from weightscope._util.sources import as_path
from weightscope.errors import WeightscopeError

_DIGITS = 16
_OURS = re.compile(rf"\..+\.weightscope-\d+-[0-9a-f]{{{_DIGITS}}}\.tmp")  # name of the file, process, random digits

_swept: set[Path] = set()  # folders that this process has swept


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A temporary binary file that replaces `path` when the block ends without an error.

    `path` always is either unchanged or the complete new file. A temporary file remains only if the process is killed
    (see `sweep`). WeightscopeError if the file cannot be written.
    """
    path = as_path(path)
    with _one_line(path, "no partial file is left; free space or change permissions and run the same command again"):
        temporary, file = _open_temporary(path)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):  # after a failed write, closing tries to write the buffer again
                file.close()
            temporary.unlink(missing_ok=True)


def write(path: str | Path, data: bytes | memoryview | Iterable[bytes]) -> None:
    """Write `data`, bytes or an iterable of bytes, to `path` atomically; see `replacing`."""
    if is_remote(path):
        put(path, data if isinstance(data, bytes) else b"".join(data))  # type: ignore[arg-type]
        return
    with replacing(path) as file:
        for piece in (data,) if isinstance(data, bytes | memoryview) else data:
            file.write(piece)


def check_writable(path: str | Path) -> None:
    """Check that a file can be written at `path`, by creating a temporary one beside it and removing it."""
    if is_remote(path):
        return
    with _one_line(Path(path), "change permissions, or name another place"):
        temporary, file = _open_temporary(Path(path))
        file.close()
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_line(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightscopeError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def create(path: Path, data: bytes) -> bool:
    """Write a new file atomically; returns whether it is new. An existing file is left as it is.

    Of several processes that create one path at the same time, one succeeds; in a store, or without locks, all do.
    """
    with locked(path.parent):
        if is_there(path):
            return False
        write(path, data)
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others that ask for it out of a block that reads and then writes; not in a store, nor without locks."""
    if is_remote(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    if is_remote(path):
        return
    as_path(path)
    new = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in new:
            sync_folder(folder.parent)
    except OSError as error:
        raise WeightscopeError(f"cannot make the folder {path}: {error.strerror or error}") from error


def sweep(folder: Path) -> list[Path]:
    """Remove temporary files of weightscope in `folder` that were abandoned, and nothing else; their paths."""
    swept: list[Path] = []
    if is_remote(folder):  # which has no temporary files
        return swept
    for path in sorted(path for path in folder.glob(".*.tmp") if _OURS.fullmatch(path.name)):
        # being written, without locks, removed meanwhile, or of another user in a folder such as /tmp
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            swept.append(path)
    return swept


def remove_folder(folder: Path) -> None:
    """Remove a folder and the files in it."""
    for file in folder.glob("*"):
        file.unlink()
    if not is_remote(folder):  # a store has no empty ones
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that renames in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    folder = path.parent.absolute()
    if folder not in _swept:
        _swept.add(folder)
        sweep(folder)
    while True:
        ours = f"weightscope-{os.getpid()}-{secrets.token_hex(_DIGITS // 2)}.tmp"
        temporary = path.with_name(f".{path.name[:200]}.{ours}")
        file = open(temporary, "x+b")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)  # a process that sweeps holds it briefly
        if os.fstat(file.fileno()).st_nlink:  # else another process swept it between creation and lock
            return temporary, file
        file.close()
