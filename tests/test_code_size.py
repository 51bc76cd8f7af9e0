"""The limits of CONTRIBUTING.md on the length of modules, functions and signatures."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightscope

PACKAGE = Path(weightscope.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
LINES, CODE, PARAMETERS = 400, 60, 10
# Parameters of networks and initialisers are keywords of recipes; a Triton kernel takes every pointer and size.
PUBLISHED = ("networks/", "init/", "training/kernels/triton/")
UNROLLED = ("training/kernels/triton/",)


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, lines without the docstring, and named parameters of each function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield node.name, lines, sum(argument.arg not in ("self", "cls") for argument in named)


def too_large(name: str, source: str) -> list[str]:
    """What of a module, with its path within the package, is beyond the limits."""
    found = [f"{name}: {len(source.splitlines())} lines"] if len(source.splitlines()) > LINES else []
    for function, lines, parameters in functions(source):
        if lines > CODE and not name.startswith(UNROLLED):
            found.append(f"{name}: {function} has {lines} lines of code")
        if parameters > PARAMETERS and not name.startswith(PUBLISHED):
            found.append(f"{name}: {function} has {parameters} parameters")
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("\n" * 401, "a.py: 401 lines"),
        ("def f():\n" + "    pass\n" * 60, "a.py: f has 61 lines of code"),
        (f"class A:\n    def f(self, {', '.join(f'a{i}' for i in range(11))}): ...", "a.py: f has 11 parameters"),
    ],
)
def test_what_is_too_large_is_found(source: str, found: str) -> None:
    assert too_large("a.py", source) == [found]


def test_docstrings_do_not_count() -> None:
    assert too_large("a.py", 'def f():\n    """One.\n' + "\n" * 100 + '    """\n' + "    pass\n" * 59) == []


def test_the_package_is_within_the_limits() -> None:
    found = [
        line for path in MODULES for line in too_large(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))
    ]
    assert len(MODULES) > 300
    assert found == []
