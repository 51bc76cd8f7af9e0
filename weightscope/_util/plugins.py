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
from typing import Any, Generic, TypeVar

from weightscope._util import trust
from weightscope._util.names import unknown
from weightscope.errors import DataError, UsageError

T = TypeVar("T")

REQUIRED = inspect.Parameter.empty

# Objects passed in Python that cannot be imported again: functions of a notebook or a script.
_passed: dict[str, Any] = {}
_hashes: dict[str, str] = {}  # of the sources of what another process passed
_loaded: dict[str, str] = {}  # module -> SHA-256 of the source that was run for it here


class Registry(Mapping[str, T], Generic[T]):
    """Registered objects of one kind, such as "initialiser", by name, in the order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self.details: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **details: Any) -> Callable[[T], T]:
        """A decorator that registers a function or class; `weightscope list` shows the details beside its name."""

        def decorate(item: T) -> T:
            if self._entries.get(name, item) is not item:
                raise ValueError(f"there are two {self.kind}s with the name {name!r}")
            self._entries[name] = item
            self.details[name] = details
            return item

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UsageError(unknown(self.kind, name, self._entries, "'package.module:name' for one of your own"))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

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
    """The object of a user's reference `"package.module:name"`, if its code may run (`weightscope._util.trust`).

    The working directory is searched, too. What runs is the source that was checked, not a bytecode file beside it.
    """
    if reference in _passed:
        return _passed[reference]
    name = reference.partition(":")[0]
    with _working_directory_importable():
        source, file = source_of(reference)
        trust.check(reference, source, file)
        digest = hashlib.sha256(source).hexdigest()
        if name not in sys.modules or _loaded.get(name, digest) != digest:
            try:
                _run(name, source, file)
            except Exception as error:
                raise _cannot_import(reference, f"{type(error).__name__}: {error}") from error
            _loaded[name] = digest
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
    """Run the source as a module, or again in the module that there is, as `importlib.reload` does."""
    parent, _, last = name.rpartition(".")
    package = importlib.import_module(parent) if parent else None
    code = compile(source, str(file), "exec")
    if name in sys.modules:
        exec(code, vars(sys.modules[name]))
        return
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    if package is not None:
        setattr(package, last, module)


def _cannot_import(reference: str, why: str) -> trust.CannotRun:
    return trust.CannotRun(
        f"{reference}: cannot import {reference.partition(':')[0]} ({why}); run where it can be imported"
    )


def source_of(reference: str) -> tuple[bytes, Path]:
    """The source of a user's reference, and its file, without running it: that of the whole module.

    The function may use the rest of it. Of a function of a script or a notebook it is the function's alone.
    """
    if reference in _passed:
        item = _passed[reference]
        file = getattr(sys.modules.get(getattr(item, "__module__", "")), "__file__", None)
        try:
            if file is None or item.__module__ == "__main__":
                return textwrap.dedent(inspect.getsource(item)).encode(), Path(reference)
            return Path(file).read_bytes(), Path(file)
        except (OSError, TypeError, SyntaxError) as error:
            raise UsageError(f"{item!r}: its source cannot be read ({error}); put it into a file") from error
    with _working_directory_importable():
        try:
            found = trust.source_file(reference.partition(":")[0])
            if found is None:
                raise _cannot_import(reference, "no Python file of this name")
            return found.read_bytes(), found
        except (OSError, ImportError, ValueError) as error:
            raise _cannot_import(reference, str(error)) from error


def reference_to(item: Any) -> str:
    """`"package.module:name"` for any callable, such that `imported` gives it back in this process.

    The name ends in a hash of its source and values where these are not those of a name: of a lambda, a
    `functools.partial`, a bound method, an instance, and of what depends on variables of the function around it.
    """
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if module and name and "<lambda>" not in name:
        reference = f"{module}:{name.replace('<locals>.', '')}"
        found: Any = sys.modules.get(module) if module != "__main__" else None  # which differs between processes
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is item:
            with contextlib.suppress(UsageError):  # of the standard library, written in C
                trust.approve(reference, source_of(reference)[0])
            return reference
        if not _captured(item):
            _passed[reference] = item
            return reference
    digest = hashlib.sha256()
    for part in _contents(item, {}):
        digest.update(len(part).to_bytes(8) + part)
    label = re.sub("[^0-9A-Za-z_]", "_", name_of(item))
    reference = f"{module or type(item).__module__}:{label}_{digest.hexdigest()[:8]}"
    _passed[reference], _hashes[reference] = item, digest.hexdigest()[:16]
    return reference


def name_of(item: Any) -> str:
    """A short name of any callable: that of the function, `lambda`, `Class.method`, or the class of an instance."""
    if isinstance(item, functools.partial):
        return name_of(item.func)
    if inspect.ismethod(item) and not inspect.isclass(item.__self__):
        return f"{type(item.__self__).__name__}.{item.__name__}"
    return str(getattr(item, "__name__", type(item).__name__)).strip("<>")


def _contents(item: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """What makes a value what it is: sources of functions and classes, and the values that they hold."""
    yield type(item).__qualname__.encode()
    if item is None or isinstance(item, bool | int | float | complex | str | bytes | os.PathLike):
        yield repr(item).encode()
        return
    if id(item) in seen:
        yield str(list(seen).index(id(item))).encode()
        return
    seen[id(item)] = item  # also keeps the id from being used again
    held: list[Any] = []
    if isinstance(item, functools.partial):
        held = [item.func, item.args, item.keywords]
    elif inspect.ismethod(item):
        held = [item.__self__, item.__func__]
    elif inspect.isfunction(item) or inspect.isclass(item):
        yield _source(item)
        cells = [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
        members = [m for m in vars(item).values() if getattr(m, "__closure__", None)]
        held = [getattr(item, "__defaults__", None), getattr(item, "__kwdefaults__", None), *cells, *members]
    elif isinstance(item, Mapping):
        held = [part for pair in item.items() for part in pair]
    elif isinstance(item, list | tuple | set | frozenset):
        held = sorted(item, key=repr) if isinstance(item, set | frozenset) else list(item)
    elif hasattr(item, "detach"):  # a tensor
        held = [item.detach().cpu().numpy()]
    elif hasattr(item, "tobytes"):  # an array
        yield repr((item.dtype, item.shape)).encode() + item.tobytes()
    elif hasattr(item, "__dict__") and not inspect.ismodule(item):
        held = [type(item), vars(item)]
    elif " at 0x" in repr(item):
        raise UsageError(f"{item!r:.80} cannot be recorded; expected a callable that holds numbers, texts and arrays")
    else:
        yield repr(item).encode()
    for part in held:
        yield from _contents(part, seen)


def _source(item: Any) -> bytes:
    """The source of a function or class, or its name; two lambdas of one line differ in their column."""
    try:
        code = getattr(item, "__code__", None)
        columns = [place[2] for place in code.co_positions()] if code and code.co_name == "<lambda>" else ""
        return f"{columns} {textwrap.dedent(inspect.getsource(item))}".encode()
    except (OSError, TypeError, SyntaxError):
        return f"{item.__module__}:{item.__qualname__}".encode() + getattr(code, "co_code", b"")


def passed(references: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Those of the objects that other processes cannot import, and hashes of their sources; see `restore`."""
    return {name: (_passed[name], source_hash(name)) for name in references if name in _passed}


def restore(objects: Mapping[str, tuple[Any, str]]) -> None:
    """Register the objects of another process's `passed()`, whose sources may be out of reach here."""
    for reference, (item, digest) in objects.items():
        _passed[reference], _hashes[reference] = item, digest


def texts_of(references: Iterable[str]) -> dict[str, str]:
    """The sources of users' references as text, of those that have one."""
    texts = {}
    for name in references:
        with contextlib.suppress(UsageError):
            texts[name] = source_of(name)[0].decode(errors="replace")
    return texts


def source_hash(reference: str) -> str:
    """16 hex digits of the SHA-256 of the source of a user's reference, which does not run."""
    return _hashes.get(reference) or hashlib.sha256(source_of(reference)[0]).hexdigest()[:16]


def check_source(reference: str, expected: str, where: object) -> None:
    """Raise DataError if the source is not the one that a population records; nothing of it runs."""
    if (found := source_hash(reference)) != expected:
        raise DataError(
            f"{where}: the source of {reference} has changed since the population was created: expected hash "
            f"{expected}, found {found}; `weightscope inspect --source {where}` shows the original: restore it, or "
            "collect into another folder"
        )


def _captured(item: Any) -> list[str]:
    """The names of what a function, or a method of a class, takes from the scope around it."""
    if inspect.ismethod(item) and not inspect.isclass(item.__self__):
        return ["self"]
    members = [getattr(m, "__func__", m) for m in vars(item).values()] if inspect.isclass(item) else [item]
    # a decorator such as `torch.no_grad()` captures the function that it wraps
    codes = [getattr(inspect.unwrap(m) if callable(m) else m, "__code__", None) for m in members]
    return sorted({name for code in codes if code is not None for name in code.co_freevars} - {"__class__"})


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


def label_of(item: Any) -> str:
    """The name of a function, a callable object, or a registered name or reference, for error messages."""
    return item if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)


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
