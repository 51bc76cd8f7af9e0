"""Users' code: what it is, and whether it may run.

What a user's code is: the source of a module and of those that it imports, or all that a callable depends on.

A module of a user's runs if this user trusts its source; see docs/what-runs-when.md. It may run if the caller passed
the object itself, or says `trust`, or did one of these before on this machine, which a private file in the user's state
folder records by the SHA-256 of the source.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import stat
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from weightscope.errors import UsageError

_log = logging.getLogger(__name__)
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)
_approved: set[str] = set()  # lines of the file, of this process
_LIBRARIES = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1])
_MOST_MODULES = 300
_seen: dict[str, tuple[Any, bytes]] = {}  # module -> its spec and its source, which were found to agree


# --- whether it may run -----------------------------------------------------------------------------------------------


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


# --- what it is -------------------------------------------------------------------------------------------------------


def is_own(module: str) -> bool:
    """Whether a module is a user's own: neither Python's, nor installed, nor a part of weightscope."""
    if module == "__main__":
        return True
    try:
        file = source_file(module)
    except (ImportError, ValueError):
        return False
    if file is None or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return not any(file.is_relative_to(folder) for folder in _LIBRARIES)


def sources(module: str) -> dict[Path, tuple[str, bytes]]:
    """File -> name and source of a module, and of those of the user's own that it imports; nothing of them runs."""
    found: dict[Path, tuple[str, bytes]] = {}
    waiting = [module]
    while waiting and len(found) < _MOST_MODULES:
        name = waiting.pop(0)
        if found and not (is_own(name.partition(".")[0]) and is_own(name)):
            continue
        file = source_file(name)
        if file is None:
            raise ImportError("no Python file of this name")
        if file not in found:
            found[file] = name, file.read_bytes()
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [*_imports(found[file][1], package), *([package] if package else [])]
    return found


@functools.lru_cache
def _imports(source: bytes, package: str) -> list[str]:
    """The modules that import statements name; of `from a import b` also a.b, which may be one."""
    names = []
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _parsed(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # said when it is run
        return ast.Module([], [])


def edited(files: Mapping[Path, tuple[str, bytes]]) -> str:
    """How a module that was imported here differs from its file; empty if none does, as far as can be seen."""
    for file, (name, source) in files.items():
        module = sys.modules.get(name)
        if module is None or not is_own(name):
            continue
        spec = getattr(module, "__spec__", None)  # another one after `importlib.reload`
        codes, constants = _definitions(source)
        if name in _seen and _seen[name][0] is spec:
            same = _seen[name][1] == source
        else:  # a loader of another kind, such as pytest's, may have changed the code
            same = type(getattr(module, "__loader__", None)) is not SourceFileLoader or _codes_of(module) <= codes
        if not same:
            return f"{file} was edited after it was imported"
        _seen[name] = spec, source
        for key, value in constants.items():
            if key in vars(module) and repr(vars(module)[key]) != value:
                return f"{name}.{key} is {vars(module)[key]!r:.60}, but {value:.60} in {file}"
    return ""


def refuse_edited(files: Mapping[Path, tuple[str, bytes]]) -> None:
    """Raise UsageError if what would run is not what the files say."""
    if difference := edited(files):
        raise UsageError(f"{difference}; restart Python, so that what runs is what is recorded")


def _codes_of(module: ModuleType) -> set[CodeType]:
    """The code of the functions and methods that a module defines."""
    found, waiting = set(), [vars(module)]
    while waiting:
        for item in list(waiting.pop().values()):
            for part in (item, *(getattr(item, name, None) for name in ("__func__", "fget", "__wrapped__"))):
                code = getattr(part, "__code__", None)
                if isinstance(code, CodeType) and code.co_filename == module.__file__:
                    found.add(code)
            if inspect.isclass(item) and item.__module__ == module.__name__ and "." not in item.__qualname__:
                waiting.append({key: value for key, value in vars(item).items() if not inspect.isclass(value)})
    return found


@functools.lru_cache
def _definitions(source: bytes) -> tuple[frozenset[CodeType], dict[str, str]]:
    """All code in a source, and the global names that it gives a value once, by a number or a text."""
    tree = _parsed(source)
    try:
        codes = frozenset(_nested(compile(tree, "", "exec", dont_inherit=True)))
    except SyntaxError:  # such as a return outside a function
        codes = frozenset()
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in 2 * node.names]
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            constants |= {name: repr(node.value.value) for name in names if stored.count(name) == 1}
    return codes, constants


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def contents(item: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """What makes a value what it is: sources of functions and classes, what they hold, and the globals that they read.

    UsageError if it holds something that has no value, such as `object()`.
    """
    yield type(item).__qualname__.encode()
    if item is None or isinstance(item, bool | int | float | complex | str | bytes | os.PathLike):
        yield repr(item).encode()
        return
    if id(item) in seen:
        yield str(seen[id(item)][0]).encode()
        return
    seen[id(item)] = len(seen), item  # also keeps the id from being used again
    held: list[Any] = []
    used: list[Any] = []  # of which what has no value counts by its type: a logger, a lock
    if inspect.ismodule(item):
        yield item.__name__.encode()
    elif isinstance(item, functools.partial):
        held = [item.func, item.args, item.keywords]
    elif inspect.ismethod(item):
        held = [item.__self__, item.__func__]
    elif inspect.isclass(item) or inspect.isfunction(item):
        yield f"{item.__module__ if item.__module__ != '__main__' else ''}:{item.__qualname__}".encode()
        if is_own(item.__module__) or "<" in item.__qualname__:
            yield _source(item)
            if inspect.isclass(item):
                used = [*item.__bases__, *(v for k, v in vars(item).items() if not k.startswith("__") or callable(v))]
            else:
                held = [item.__defaults__, item.__kwdefaults__, [cell.cell_contents for cell in item.__closure__ or ()]]
                used = _globals(item)
    elif isinstance(item, staticmethod | classmethod):
        held = [item.__func__]
    elif isinstance(item, property):
        held = [item.fget, item.fset]
    elif isinstance(item, Mapping):
        held = [part for pair in item.items() for part in pair]
    elif isinstance(item, list | tuple | set | frozenset):
        held = sorted(item, key=repr) if isinstance(item, set | frozenset) else list(item)
    elif hasattr(item, "detach"):  # a tensor
        held = [item.detach().cpu().numpy()]
    elif hasattr(item, "tobytes"):  # an array
        yield repr((item.dtype, item.shape)).encode() + item.tobytes()
    elif hasattr(item, "__dict__"):
        held = [type(item), vars(item)]
    elif " at 0x" in repr(item):
        raise UsageError(f"{item!r:.80} cannot be recorded; expected a callable that holds numbers, texts and arrays")
    else:
        yield repr(item).encode()
    for part in held:
        yield from contents(part, seen)
    for part in used:
        try:
            yield from list(contents(type(part) if isinstance(part, logging.Logger) else part, seen))
        except UsageError:
            yield type(part).__qualname__.encode()


def _source(item: Any) -> bytes:
    """The source of a function or class, else its code; two lambdas of one line differ in their column."""
    file = source_file(item.__module__) if item.__module__ in sys.modules else None
    if file is not None and item.__module__ != "__main__":
        refuse_edited({file: (item.__module__, file.read_bytes())})
    code = getattr(item, "__code__", None)
    try:
        columns = [place[2] for place in code.co_positions()] if code and code.co_name == "<lambda>" else ""
        return f"{columns} {textwrap.dedent(inspect.getsource(item))}".encode()
    except (OSError, TypeError, SyntaxError):
        codes = _nested(code) if code else ()
        kept = [(c.co_code, c.co_names, [x for x in c.co_consts if not isinstance(x, CodeType)]) for c in codes]
        return repr(kept).encode()


def _globals(function: Any) -> list[Any]:
    """The values of the globals that a function reads; of the user's own modules the attributes that it names."""
    names = sorted({name for code in _nested(function.__code__) for name in code.co_names})
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    own = [vars(module) for module in found if inspect.ismodule(module) and is_own(module.__name__)]
    return found + [values[name] for values in own for name in names if name in values]
