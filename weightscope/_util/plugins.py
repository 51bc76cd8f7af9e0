"""Things by name: registered ones, references `"package.module:name"` to other people's code, and plain callables."""

import contextlib
import hashlib
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from weightscope._util.names import unknown
from weightscope.errors import UsageError

T = TypeVar("T")

# Objects that were passed in Python and that importing does not find again: functions of a notebook or a script.
_passed: dict[str, Any] = {}


class Registry(Mapping[str, T], Generic[T]):
    """Registered objects of one kind, by name, in the order of registration.

    Args:
        kind: what they are, for messages: "initialiser".

    Example:
        >>> STRUCTURES: Registry[type[Structure]] = Registry("structure")
        >>> @STRUCTURES.register("isotropic")
        ... class Isotropic(Structure): ...
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self.details: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **details: Any) -> Callable[[T], T]:
        """A decorator that registers a function or class under `name`.

        Args:
            name: unique among those of this kind.
            details: what `weightscope list` shows beside it, such as `source="thesis 3.2"`.

        Raises:
            ValueError: if another object has the name.
        """

        def decorate(item: T) -> T:
            if self._entries.get(name, item) is not item:
                raise ValueError(f"there are two {self.kind}s of the name {name!r}")
            self._entries[name] = item
            self.details[name] = details
            return item

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UsageError(f"{unknown(self.kind, name, self._entries)}; or 'package.module:name' for one of your own")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, wanted: Any) -> T:
        """The object that is meant: a registered name, a reference `"package.module:name"`, or itself.

        Raises:
            UsageError: if there is none of that name, or the reference cannot be imported.
        """
        if not isinstance(wanted, str):
            return wanted
        return imported(wanted) if is_reference(wanted) else self[wanted]


def is_reference(text: Any) -> bool:
    """Whether a text has the form `"package.module:name"`."""
    module, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def imported(reference: str) -> Any:
    """The object that `"package.module:name"` refers to; modules in the working directory are found, too.

    Raises:
        UsageError: if the module cannot be imported or has no such name; says why.
    """
    if reference in _passed:
        return _passed[reference]
    module_name, _, path = reference.partition(":")
    try:
        with _working_directory_importable():
            found: Any = importlib.import_module(module_name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{reference}: cannot import {module_name} ({why}); run where it can be imported") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise UsageError(f"{reference}: {unknown('name', part, names)}")
        found = getattr(found, part)
    return found


def reference_to(item: Any) -> str:
    """`"package.module:name"` for a function or class, such that `imported` gives it back in this process.

    Raises:
        UsageError: for what has no name of its own, such as a lambda or a `functools.partial`.
    """
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if not module or not name or "<lambda>" in name:
        raise UsageError(f"expected a function or class with a name of its own, found {item!r}; define it with `def`")
    reference = f"{module}:{name.replace('<locals>.', '')}"
    if _findable(module, name) is not item:
        _passed[reference] = item
    return reference


def passed() -> dict[str, Any]:
    """Objects that other processes cannot import, by reference; hand them over with `restore`."""
    return dict(_passed)


def restore(objects: Mapping[str, Any]) -> None:
    """Make the objects of another process's `passed()` known here."""
    _passed.update(objects)


def source_hash(item: Any) -> str:
    """16 hex digits of the sha256 of the source of a function or class.

    An imported module counts as a whole, since the function may use the rest of it; of a script or a notebook, which
    also hold what is done with the function, the function alone counts.

    Raises:
        UsageError: if there is no source.
    """
    try:
        module = inspect.getmodule(item)
        file = getattr(module, "__file__", None)
        if module is not None and module.__name__ != "__main__" and file is not None:
            source = Path(file).read_bytes()
        else:
            source = textwrap.dedent(inspect.getsource(item)).encode()
    except (OSError, TypeError) as error:
        raise UsageError(f"{item!r}: its source cannot be read ({error}); put it into a file") from error
    return hashlib.sha256(source).hexdigest()[:16]


def _findable(module: str, qualified_name: str) -> Any:
    found: ModuleType | Any | None = sys.modules.get(module)
    if module == "__main__":
        return None  # another one in every process
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found


@contextlib.contextmanager
def _working_directory_importable() -> Iterator[None]:
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
