"""The distribution: versions, names and files that are declared are those that are used and shipped."""

import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import weightscope

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins(file: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)$", d).groups() for d in PROJECT["dependencies"])
    pins = _pins("constraints-oldest.txt")
    for name, bound in bounds.items():
        if name != "torch":
            parts = (*pins[name].split("."), "0", "0")[:3]
            assert parts == (*bound.split("."), "0", "0")[:3], name
    assert pins["torch"] == _pins("constraints.txt")["torch"]


@pytest.mark.slow
def test_a_wheel_holds_the_recipes_and_the_other_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("weightscope", "populations"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("weightscope_*.whl")
    shutil.unpack_archive(wheel, unpacked, "zip")
    shipped = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
    for file in (ROOT / "weightscope").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert file.relative_to(ROOT).as_posix() in shipped
    for recipe in (ROOT / "populations").glob("*.toml"):
        assert f"weightscope/populations/{recipe.name}" in shipped
    code = (
        "import weightscope; from weightscope._util.sources import recipes\n"
        "for name in recipes(): print(weightscope.Recipe.load(name).data.name)\n"
        "print(weightscope.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, env={"PYTHONPATH": str(unpacked)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert len(lines) - 1 == len(list((ROOT / "populations").glob("*.toml")))
    assert lines[-1].startswith(str(unpacked))


def test_the_public_names_exist_and_are_few() -> None:
    assert len(weightscope.__all__) <= 27
    assert set(dir(weightscope)) == set(weightscope.__all__)
    for name in weightscope.__all__:
        found = getattr(weightscope, name)
        assert not isinstance(found, ModuleType), name
    with pytest.raises(AttributeError, match="no attribute 'covarianec'"):
        weightscope.covarianec  # noqa: B018


def test_no_function_shadows_a_module() -> None:
    """`import weightscope.a.b as b` gives the module for every module b."""
    for info in pkgutil.walk_packages(weightscope.__path__, "weightscope."):
        if info.name.endswith("__main__"):
            continue
        parent, _, name = info.name.rpartition(".")
        module = importlib.import_module(info.name)
        assert getattr(importlib.import_module(parent), name) is module, info.name
    for name in weightscope.__all__:
        assert not (ROOT / "weightscope" / f"{name}.py").exists()
        assert not (ROOT / "weightscope" / name / "__init__.py").exists()
