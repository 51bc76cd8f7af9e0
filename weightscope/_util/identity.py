"""What a user's code is: the source of a module and of those that it imports, or all that a callable depends on."""

import ast
import functools
import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from weightscope._util.trust import source_file
from weightscope.errors import UsageError

_LIBRARIES = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1])
_MOST_MODULES = 300
_seen: dict[str, tuple[Any, bytes]] = {}  # module -> its spec and its source, which were found to agree


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
