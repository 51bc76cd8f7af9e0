"""Import rules that import-linter (`make lint`, pyproject.toml) cannot express: which package needs which library."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import weightscope

ROOT = Path(weightscope.__file__).parent

ONLY_IN = {
    "h5py": {"population"},
    "matplotlib": {"plots"},
    "seaborn": {"plots"},
    "huggingface_hub": {"benchmarking", "checkpoint", "data"},
}
NUMPY_ONLY = (
    "fits/__init__.py",
    "fits/fitting.py",
    "fits/exchangeable.py",
    "fits/resizing.py",
    "analysis/across_networks",
)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path, *, at_import_time_only: bool = False) -> set[str]:
    """Dotted names of what a file imports; `if TYPE_CHECKING` blocks do not count."""
    tree = ast.parse(path.read_text())
    out: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if at_import_time_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            out.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return out


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_has_one_home(package: str) -> None:
    users = {part_of(path) for path in FILES if any(n.split(".")[0] == package for n in imports(path))}
    assert users <= ONLY_IN[package]


@pytest.mark.parametrize("part", NUMPY_ONLY)
def test_the_statistics_need_no_torch_to_import(part: str) -> None:
    there = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(part)]
    assert there
    for path in there:
        names = imports(path, at_import_time_only=True)
        assert not any(name.split(".")[0] == "torch" for name in names), path


HEAVY = ["matplotlib", "h5py", "seaborn", "pandas", "scipy", "sklearn", "timm", "transformers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("import weightscope", [*HEAVY, "torch"]),
        ("import weightscope.cli", [*HEAVY, "torch"]),
        ("from weightscope.recipe import Recipe", [*HEAVY, "torch"]),
        ("import weightscope.init", [*HEAVY, "pydantic"]),
        (
            "import weightscope.plots, weightscope.analysis.across_networks",
            ["torch", "seaborn", "pandas", "scipy.stats"],
        ),
    ],
)
def test_light_imports_stay_light(command: str, heavy: list[str]) -> None:
    code = f"{command}; import sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
