"""The named parameters of functions that users can supply, and which function each given parameter is for."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightscope._util.names import unknown
from weightscope.errors import UsageError

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Signature:
    """The parameters of a function after its first, positional one.

    Attributes:
        name: of the function, for error messages.
        defaults: parameter -> default, `REQUIRED` where it has none.
        open: whether it takes any other parameter, too (`**parameters`).
        text: the parameters as they are written, for error messages.
        positional: whether the first parameter can be passed by position.
    """

    name: str
    defaults: dict[str, Any]
    open: bool
    text: str
    positional: bool

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Signature":
        """Read a function's signature.

        Raises:
            UsageError: if it has none, as some functions written in C.
        """
        try:
            found = list(inspect.signature(function).parameters.values())
        except ValueError as error:
            raise UsageError(f"{name}: its signature cannot be read ({error}); wrap it in a function") from error
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        first = [p for p in found[:1] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: p.default for p in found[len(first) :] if p.kind not in variadic}
        any_name = any(p.kind is p.VAR_KEYWORD for p in found)
        return cls(name, named, any_name, ", ".join(map(str, found)), bool(first))

    def require(self, given: Mapping[str, Any]) -> None:
        """Check that every required parameter is given.

        Raises:
            UsageError: naming those that are missing.
        """
        missing = [key for key, default in self.defaults.items() if default is REQUIRED and key not in given]
        if missing:
            raise UsageError(f"{self.name}: missing {', '.join(missing)}")


def label_of(item: Any) -> str:
    """The name of a function, a callable object, or a registered name or reference, for error messages."""
    return item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)


def distribute(signatures: Sequence[Signature], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each function's share of the given parameters.

    Raises:
        UsageError: if no function has a parameter of that name (names the nearest one), or several have.
    """
    shares: list[dict[str, Any]] = [{} for _ in signatures]
    joined = "+".join(signature.name for signature in signatures)
    for key, value in given.items():
        owners = [i for i, s in enumerate(signatures) if key in s.defaults]
        owners = owners or [i for i, s in enumerate(signatures) if s.open]
        if not owners:
            known = [name for s in signatures for name in s.defaults]
            near = unknown("parameter", key, known) if known else f"no parameter {key!r}"
            each = "; ".join(f"{s.name}({', '.join(s.defaults)})" for s in signatures)
            raise UsageError(f"{joined}: {near} (parameters: {each})")
        if len(owners) > 1:
            names = " and ".join(signatures[i].name for i in owners)
            raise UsageError(f"{joined}: {key!r} is a parameter of {names}; pass them one by one")
        shares[owners[0]][key] = value
    return shares
