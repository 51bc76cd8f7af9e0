"""Plug-ins: registered names, references `"package.module:name"` to users' code, and the parameters of callables."""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from weightscope._util.names import unknown
from weightscope._util.trust import CannotRun
from weightscope.errors import DataError, UsageError

T = TypeVar("T")


class SourceChanged(DataError):
    """A user's code is not what it was when a population was created."""


REQUIRED = inspect.Parameter.empty

# Objects passed in Python that cannot be imported: functions of a notebook or a script, and what has no name.
_passed: dict[str, tuple[Any, str]] = {}  # reference -> the object and its hash


class Registry(dict[str, T]):
    """Registered objects of one kind, such as "initialiser", by name, in the order of registration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.details: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **details: Any) -> Callable[[T], T]:
        """A decorator that registers a function or class; `weightscope list` shows the details beside its name."""

        def decorate(item: T) -> T:
            if self.get(name, item) is not item:
                raise ValueError(f"there are two {self.kind}s with the name {name!r}")
            self[name] = item
            self.details[name] = details
            return item

        return decorate

    def __missing__(self, name: str) -> T:
        raise UsageError(unknown(self.kind, name, self, "'package.module:name' for one of your own"))

    def find(self, wanted: Any) -> T:
        """The object for a registered name or a reference `"package.module:name"`; other objects unchanged."""
        if not isinstance(wanted, str):
            return wanted
        return imported(wanted) if is_reference(wanted) else self[wanted]


def is_reference(text: Any) -> bool:
    """Whether a text has the form `"package.module:name"`."""
    module, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def underscored(wanted: Any) -> Any:
    """A registered name with underscores in place of hyphens; references and objects unchanged."""
    return wanted.replace("-", "_") if isinstance(wanted, str) and not is_reference(wanted) else wanted


def imported(reference: str) -> Any:
    """The object of a user's reference `"package.module:name"`; the working directory is searched, too."""
    if reference in _passed:
        return _passed[reference][0]
    name = reference.partition(":")[0]
    with _working_directory_importable():
        try:
            importlib.import_module(name)
        except Exception as error:
            raise _cannot_import(reference, f"{type(error).__name__}: {error}") from error
    return _named(reference)


def member(reference: str) -> Any:
    """The object that a file of weightscope names as `"module:name"`."""
    importlib.import_module(reference.partition(":")[0])
    return _named(reference)


def _named(reference: str) -> Any:
    module, _, path = reference.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise UsageError(f"{reference}: {unknown('name', part, names)}")
        found = getattr(found, part)
    return found


def _cannot_import(reference: str, why: str) -> CannotRun:
    module = reference.partition(":")[0]
    return CannotRun(f"{reference}: cannot import {module} ({why}); run where it can be imported")


def _file(reference: str) -> Path:
    """The Python file of the module that a reference names."""
    name = reference.partition(":")[0]
    with _working_directory_importable():
        try:
            module = sys.modules.get(name) or importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise _cannot_import(reference, str(error)) from error
    file = getattr(module, "__file__", None) or getattr(module, "origin", None)
    if file is None or not file.endswith(".py"):
        raise _cannot_import(reference, "no Python file of this name")
    return Path(file)


def source_of(reference: str) -> bytes:
    """The source of the module that a reference names, or of an object that was passed."""
    if reference not in _passed:
        return _file(reference).read_bytes()
    item = _passed[reference][0]
    try:
        return textwrap.dedent(inspect.getsource(item)).encode()
    except (OSError, TypeError) as error:
        raise UsageError(f"{item!r}: its source cannot be read ({error})") from error


def reference_to(item: Any) -> str:
    """`"package.module:name"` for any callable, such that `imported` gives it back in this process.

    The name ends in a hash of its source and of what it holds where the object is not found by its name: a local
    function, a lambda, a `functools.partial`, a bound method, an instance. Global variables are not part of it.
    """
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    found: Any = sys.modules.get(module) if module and name else None
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    named = found is not None and found is item
    if named and module != "__main__":  # which differs between processes
        return f"{module}:{name}"
    import joblib  # a tenth of a second

    try:
        digest = joblib.hash(_contents(item))
    except (OSError, TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise UsageError(
            f"{item!r:.80} cannot be recorded ({error}); pass a function of a file or a notebook"
        ) from error
    label = re.sub("[^0-9A-Za-z_]", "_", name_of(item))
    reference = f"__main__:{name}" if named else f"{module or type(item).__module__}:{label}_{digest[:8]}"
    _passed[reference] = item, digest[:16]
    return reference


def _contents(item: Any) -> Any:
    """Source and values of a callable, as what can be hashed: numbers, texts and arrays."""
    if isinstance(item, functools.partial):
        held = [item.func, item.args, item.keywords]
    elif inspect.ismethod(item):
        held = [item.__name__, item.__self__]
    elif inspect.isclass(item) or inspect.isfunction(item):
        functions = [item] if inspect.isfunction(item) else [f for f in vars(item).values() if inspect.isfunction(f)]
        cells = [cell.cell_contents for f in functions for cell in f.__closure__ or ()]
        held = [_text(item), *(value for value in cells if value is not item)]
        held += [getattr(item, name, None) for name in ("__defaults__", "__kwdefaults__")]
    elif isinstance(item, Mapping):
        return {key: _contents(value) for key, value in item.items()}
    elif isinstance(item, list | tuple):
        return [_contents(value) for value in item]
    elif callable(item) and hasattr(item, "__dict__"):
        held = [type(item), vars(item)]
    else:
        return item
    return [type(item).__qualname__, *map(_contents, held)]


def _text(item: Any) -> str:
    """The source of a function or class; two lambdas of one line differ in their columns."""
    try:
        text = textwrap.dedent(inspect.getsource(item))
    except TypeError:  # written in C
        return f"{item.__module__}:{item.__qualname__}"
    columns = [place[2] for place in item.__code__.co_positions()] if item.__name__ == "<lambda>" else ""
    return f"{columns} {text}"


def name_of(item: Any) -> str:
    """A short name of a callable: its own, `lambda`, `Class.method` or the class of an instance; texts unchanged."""
    if isinstance(item, str):
        return item
    if isinstance(item, functools.partial):
        return name_of(item.func)
    if inspect.ismethod(item) and not inspect.isclass(item.__self__):
        return f"{type(item.__self__).__name__}.{item.__name__}"
    return str(getattr(item, "__name__", type(item).__name__)).strip("<>")


def passed(references: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Those of the objects that other processes cannot import, and their hashes; see `restore`."""
    return {name: _passed[name] for name in references if name in _passed}


def restore(objects: Mapping[str, tuple[Any, str]]) -> None:
    """Register the objects of another process's `passed()`."""
    _passed.update(objects)


def texts_of(references: Iterable[str]) -> dict[str, str]:
    """The sources of users' references as text, of those that have one."""
    texts = {}
    for name in references:
        with contextlib.suppress(UsageError):
            texts[name] = source_of(name).decode(errors="replace")
    return texts


def source_hash(reference: str) -> str:
    """16 hex digits of the SHA-256 of the file of a reference's module; for an object that was passed, its hash."""
    if reference in _passed:
        return _passed[reference][1]
    return hashlib.sha256(source_of(reference)).hexdigest()[:16]


def check_source(reference: str, expected: str, where: object) -> None:
    """Raise SourceChanged if the source is not the one that a population records; nothing of it runs."""
    if (found := source_hash(reference)) != expected:
        changed = reference if reference in _passed else f"{_file(reference)} ({reference})"
        raise SourceChanged(
            f"{where}: {changed} has changed since the population was created: expected hash {expected}, found "
            f"{found}; `weightscope inspect --source {where}` shows the original: restore it, or collect or import "
            "into another folder"
        )


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


@dataclass(frozen=True)
class Signature:
    """The parameters of a function after its first, positional one."""

    name: str  # of the function, for error messages
    defaults: dict[str, Any]  # parameter -> default, `REQUIRED` where it has none
    open: bool  # whether it takes any other parameter, too (`**parameters`)
    text: str  # the parameters as they are written, for error messages
    positional: bool  # whether the first parameter can be passed by position

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Signature":
        """Read a function's signature; UsageError if it has none, as some functions written in C."""
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
        """Check that every required parameter is given."""
        missing = [key for key, default in self.defaults.items() if default is REQUIRED and key not in given]
        if missing:
            raise UsageError(f"{self.name}: missing {', '.join(missing)}")


def distribute(signatures: Sequence[Signature], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each function's share of the given parameters."""
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


def why_not_imported(error: BaseException) -> str:
    """The first cause of an import error, with what to do about torchvision."""
    while error.__cause__ is not None:
        error = error.__cause__
    if "torchvision" not in str(error):
        return " ".join(str(error).split())[:150]
    found = f"torchvision {version('torchvision')}" if find_spec("torchvision") else "no torchvision"
    return (
        f"expected a torchvision of the build of torch {version('torch')}, found {found}; install that pair as "
        "docs/troubleshooting.md says (transformers without timm also runs without torchvision)"
    )
