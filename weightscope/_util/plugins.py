"""Plug-ins: registered names, references `"package.module:name"` to users' code, and the parameters of callables."""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weightscope._util import trust
from weightscope._util.names import unknown
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


def imported(reference: str, *, again: bool = False) -> Any:
    """The object of a user's reference `"package.module:name"`, if its code may run (`weightscope._util.trust`).

    The working directory is searched, too. What runs is the source that was checked, not a bytecode file beside it. If
    a module was edited after it was imported, UsageError; it is imported `again` in a worker, which outlives a call.
    """
    if reference in _passed:
        return _passed[reference][0]
    name = reference.partition(":")[0]
    with _working_directory_importable():
        files = _files(reference)
        file, (_, source) = next(iter(files.items()))
        trust.check(reference, _joined(files), file)
        if again and trust.edited(files):
            for module, _ in files.values():
                sys.modules.pop(module, None)
        trust.refuse_edited(files)
        if name not in sys.modules:
            try:
                _run(name, source, file)
            except Exception as error:
                raise _cannot_import(reference, f"{type(error).__name__}: {error}") from error
            trust.refuse_edited(files)  # what it imports in other ways, and between reading and running
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


def _run(name: str, source: bytes, file: Path) -> None:
    """Run the source as a module."""
    parent, _, last = name.rpartition(".")
    package = importlib.import_module(parent) if parent else None
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    if package is not None:
        setattr(package, last, module)


def _cannot_import(reference: str, why: str) -> trust.CannotRun:
    return trust.CannotRun(
        f"{reference}: cannot import {reference.partition(':')[0]} ({why}); run where it can be imported"
    )


def _files(reference: str) -> dict[Path, tuple[str, bytes]]:
    """The module of a reference, first, and those of the user's own that it imports; see `trust.sources`."""
    with _working_directory_importable():
        try:
            return trust.sources(reference.partition(":")[0])
        except (OSError, ImportError, ValueError) as error:
            raise _cannot_import(reference, str(error)) from error


def _joined(files: Mapping[Path, tuple[str, bytes]]) -> bytes:
    (_, first), *others = files.values()
    return first + b"".join(b"\n# --- %s\n" % name.encode() + text for name, text in others if text)


def source_of(reference: str) -> bytes:
    """The source of a user's reference, without running it: its module, and those of the user's that this imports.

    Of a callable that cannot be imported it is its own, or that of its module.
    """
    if reference not in _passed:
        return _joined(_files(reference))
    item = _passed[reference][0]
    file = getattr(sys.modules.get(getattr(item, "__module__", "")), "__file__", None)
    try:
        if file is None or item.__module__ == "__main__":
            return textwrap.dedent(inspect.getsource(item)).encode()
        return Path(file).read_bytes()
    except (OSError, TypeError, SyntaxError) as error:
        raise UsageError(f"{item!r}: its source cannot be read ({error})") from error


def reference_to(item: Any) -> str:
    """`"package.module:name"` for any callable, such that `imported` gives it back in this process.

    The name ends in a hash of all that it depends on (`trust.contents`) where the object is not found by its name: a
    local function, a lambda, a `functools.partial`, a bound method, an instance.
    """
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    found: Any = sys.modules.get(module) if module and name else None
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    named = found is not None and found is item
    if named and module != "__main__":  # which differs between processes
        reference = f"{module}:{name}"
        with contextlib.suppress(trust.CannotRun):  # of the standard library, written in C
            files = _files(reference)
            trust.refuse_edited(files)
            trust.approve(reference, _joined(files))
        return reference
    digest = hashlib.sha256()
    try:
        for part in trust.contents(item, {}):
            digest.update(len(part).to_bytes(8) + part)
    except RecursionError as error:
        raise UsageError(f"{item!r:.80} cannot be recorded; what it holds is nested too deeply") from error
    label = re.sub("[^0-9A-Za-z_]", "_", name_of(item))
    reference = f"__main__:{name}" if named else f"{module or type(item).__module__}:{label}_{digest.hexdigest()[:8]}"
    _passed[reference] = item, digest.hexdigest()[:16]
    return reference


def name_of(item: Any) -> str:
    """A short name of any callable: that of the function, `lambda`, `Class.method`, or the class of an instance.

    Registered names and references are their own.
    """
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
    """16 hex digits of a SHA-256: of the source of a user's reference, which does not run, or of what was passed."""
    if reference in _passed:
        return _passed[reference][1]
    return hashlib.sha256(source_of(reference)).hexdigest()[:16]


def check_source(reference: str, expected: str, where: object) -> None:
    """Raise SourceChanged if the source is not the one that a population records; nothing of it runs."""
    if (found := source_hash(reference)) != expected:
        raise SourceChanged(
            f"{where}: the source of {reference} has changed since the population was created: expected hash "
            f"{expected}, found {found}; `weightscope inspect --source {where}` shows the original: restore it, or "
            "collect into another folder"
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
