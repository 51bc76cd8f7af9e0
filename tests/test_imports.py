"""The import rules of the architecture, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightscope

ROOT = Path(weightscope.__file__).parent

# Layers from the bottom up: a module imports only from its own layer and from those below.
LAYERS = [
    {"errors", "_checks", "_version", "seeding", "_atomic", "_toml", "_spread", "environment", "safetensors_header"},
    {"spec"},
    {"statistics", "data", "checkpoint", "anatomy"},
    {"recipe", "structures", "covariance", "networks", "within", "products"},
    {"artifact", "portable"},
    {"standalone", "fit", "study", "init", "population"},
    {"train", "audit", "attention_maps", "tracking", "closed_form", "fit_init"},
    {"_spread"},
    {"collect", "inspect"},
    {"bench"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
ALONE = {"plots", "report"}  # these import errors (and _atomic) only, whoever imports them
ONLY_IN = {
    "h5py": {"population"},
    "matplotlib": {"plots"},
    "seaborn": {"plots"},
    "huggingface_hub": {"checkpoint", "data"},
}
NUMPY_ONLY = {"statistics", "structures", "fit", "covariance", "study"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_from_its_layer_and_below(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # public names, imported when they are used
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    assert part in level or part in ALONE, f"{part} stands in no layer"
    used = {name.split(".")[1] for name in imports(path) if name.startswith("weightscope.")} - {part}
    if part in ALONE:
        assert used <= {"errors", "_atomic"}
        return
    above = {name for name in used - ALONE if level[name] > level[part]}
    assert not above, f"{part} imports {above} from above"


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_has_one_home(package: str) -> None:
    users = {part_of(path) for path in FILES if any(n.split(".")[0] == package for n in imports(path))}
    assert users <= ONLY_IN[package]


@pytest.mark.parametrize("part", sorted(NUMPY_ONLY))
def test_the_statistics_need_no_torch_to_import(part: str) -> None:
    for path in FILES:
        if part_of(path) == part:
            names = imports(path, at_import_time_only=True)
            assert not any(name.split(".")[0] == "torch" for name in names), path


@pytest.mark.parametrize(
    "command", ["import weightscope", "import weightscope.cli", "from weightscope.recipe import Recipe"]
)
def test_light_imports_stay_light(command: str) -> None:
    heavy = ["torch", "matplotlib", "h5py", "seaborn", "scipy", "sklearn"]
    code = f"{command}; import sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
