"""Names for the shell's completion, found without importing torch, which would take seconds for each key press."""

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path


def _registered(registry: str, package: str) -> list[str]:
    """The names that `@REGISTRY.register("name", ...)` gives in the files of a package, in alphabetical order."""
    spec = find_spec("weightscope")  # does not import its parts
    folder = Path(spec.origin or "").parent / package if spec is not None else Path(package)
    pattern = re.compile(rf'^@{registry}\.register\(\s*"(\w[\w-]*)"', re.MULTILINE)
    return sorted({name for file in folder.glob("*.py") for name in pattern.findall(file.read_text(encoding="utf-8"))})


def _recipes() -> list[str]:
    from weightscope._util.sources import recipes

    return list(recipes())


_NAMES: Mapping[str, Callable[[], list[str]]] = {
    "initialisers": lambda: _registered("INITIALISERS", "init"),
    "structures": lambda: ["auto", *_registered("STRUCTURES", "structures"), *_registered("NETWORK_FITS", "fitting")],
    "recipes": _recipes,
    "datasets": lambda: _registered("DATASETS", "data"),
    "tasks": lambda: [f"{name}:" for name in _registered("TASKS", "data/sequences")],
    "devices": lambda: ["auto", "cpu", "cuda"],
    "parts": lambda: ["filters", "mlp-rows", "mlp-columns", "patch", "patch-channels"],
    "kinds": lambda: ["initialisers", "structures", "networks", "datasets", "recipes"],
}


def names(kind: str) -> list[str]:
    """The names of one kind."""
    return _NAMES[kind]()
