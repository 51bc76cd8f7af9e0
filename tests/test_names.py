"""Every `weightscope.module.name` in code, docstrings and documents exists, but for blocks that are not run."""

import importlib
import re
from pathlib import Path

import pytest

import weightscope

ROOT = Path(weightscope.__file__).parents[1]
FOLDERS = ("weightscope", "docs", "analyses", "benchmarks", "figures")
FILES = [p for folder in FOLDERS for kind in ("*.py", "*.md", "*.toml") for p in sorted((ROOT / folder).rglob(kind))]
FILES += sorted(ROOT.glob("*.md"))


NOT_RUN = re.compile(r"<!-- not run: [^\n]+ -->\n *```.*?```", re.DOTALL)


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute or annotated field of what a module contains."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("weightscope"):
                return True  # a module that needs a package which is not installed here, such as Triton
            continue
        for name in parts[cut:]:
            if name in getattr(found, "__annotations__", {}):
                return True
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_a_wrong_name_is_found() -> None:
    assert exists("weightscope.fits.Structure.fit")
    assert exists("weightscope.fits")
    assert not exists("weightscope.fits.Struct")
    assert not exists("weightscope.none.at_all")


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_every_dotted_name_exists(folder: str) -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == folder or path.parent == ROOT / folder]
    assert files
    wrong = {
        f"{path.relative_to(ROOT)}: {dotted}"
        for path in files
        for dotted in re.findall(r"\bweightscope(?:\.[A-Za-z_]\w*)+", NOT_RUN.sub("", path.read_text(encoding="utf-8")))
        if not dotted.endswith((".py", ".git")) and not exists(dotted)
    }
    assert not wrong
