"""Whether code runs that data name: populations, artifacts and models do not run anything of a user's without `trust`.

What a user types or writes into a recipe that she runs is not asked for; see docs/architecture.md.
"""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from weightscope.errors import UsageError

_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


class CannotRun(UsageError):
    """A user's code cannot run: it cannot be imported, or data name it without `trust`."""


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
    """Within the block, what populations and artifacts name may run."""
    token = _trusting.set(trust or _trusting.get())
    try:
        yield
    finally:
        _trusting.reset(token)


def trusted() -> bool:
    """Whether this is within a block of `trusting`."""
    return _trusting.get()


def require_trust(references: Iterable[str], where: object) -> None:
    """Raise CannotRun if data name code, `"package.module:name"`, and this is no block of `trusting`."""
    if (names := ", ".join(dict.fromkeys(references))) and not trusted():
        raise CannotRun(f"{where}: this would run {names}; read it, then add --trust (in Python trust=True)")
