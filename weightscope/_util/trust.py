"""Whose code runs: a module of a user's runs if this user trusts its source; see docs/what-runs-when.md.

It may run if the caller passed the object itself, or says `trust`, or did one of these before on this machine, which a
private file in the user's state folder records by the SHA-256 of the source.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path

from weightscope.errors import UsageError

_log = logging.getLogger(__name__)
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)
_approved: set[str] = set()  # lines of the file, of this process


class CannotRun(UsageError):
    """A user's code cannot run: it is not here, or not trusted."""


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
    """Within the block, what recipes, populations and artifacts name may run, and is remembered."""
    token = _trusting.set(trust or _trusting.get())
    try:
        yield
    finally:
        _trusting.reset(token)


def trusted() -> bool:
    """Whether this is within a block of `trusting`."""
    return _trusting.get()


def source_file(module: str) -> Path | None:
    """The Python file of a module, found without importing anything; None if there is none."""
    if (there := sys.modules.get(module)) is not None:
        file = getattr(there, "__file__", None)
    else:
        top, *inner = module.split(".")
        spec = importlib.util.find_spec(top)
        for i in range(len(inner)):
            folders = None if spec is None else spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join([top, *inner[: i + 1]]), list(folders)) if folders else None
        file = None if spec is None else spec.origin
    return Path(file) if file is not None and file.endswith(".py") else None


def check(reference: str, source: bytes, file: Path) -> None:
    """Raise CannotRun unless the code of `"package.module:name"` with this source may run."""
    line = _line(reference, source)
    if line in _approved or line in _remembered():
        _approved.add(line)
    elif _trusting.get():
        approve(reference, source)
    else:
        module, _, name = reference.partition(":")
        start = _line(f"{module}:", source)
        known = [line.removeprefix(start) for line in sorted(_approved | _remembered()) if line.startswith(start)]
        which = f" (only {', '.join(known[:4])} of it, not {name})" if known else ""
        raise CannotRun(
            f"{reference}: this would run {file} (SHA-256 {line[:16]}), which you have neither run nor trusted before"
            f"{which}; read it, then add --trust (in Python trust=True, or pass the object itself)"
        )


def approve(reference: str, source: bytes, *, remember: bool = True) -> None:
    """Trust this code in the running process and, with `remember`, in the user's later processes on this machine."""
    line = _line(reference, source)
    if line in _approved:
        return
    _approved.add(line)
    if not remember or line in _remembered():
        return
    try:
        file = state_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(file.parent.stat()):
            raise OSError(f"{file.parent} belongs to another user or can be read by others")
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(f"{line}\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        level = logging.WARNING if _trusting.get() else logging.DEBUG
        _log.log(level, "%s: that it is trusted cannot be remembered: %s", reference, error)


def state_file() -> Path:
    """Where it is recorded what a user trusts: `weightscope/trusted` in `$XDG_STATE_HOME` or `~/.local/state`."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "weightscope" / "trusted"


def _line(reference: str, source: bytes) -> str:
    return f"{hashlib.sha256(source).hexdigest()} {reference}"


def _remembered() -> set[str]:
    """The lines of the file; none if anybody else could have written them."""
    try:
        file = state_file()
        if not _private(file.parent.stat()):
            return set()
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "r") as lines:
            found = os.fstat(lines.fileno())
            return set(lines.read().splitlines()) if _private(found) and stat.S_ISREG(found.st_mode) else set()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return set()


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077
