"""Hashes of the trained weights that a recipe takes: sources of its initialisers, and the teacher of distillation.

They are recorded in the manifest. A benchmark, which calls `collect` for each tile, reads and hashes each source twice,
before and after, and passes the hashes on (`hashed_once`), also to its worker processes.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.training.references import references

_TEACHER = "teacher "  # before its path, in the names of the manifest
_passed: dict[tuple[str, str], str] = {}  # (name in the manifest, what else the hash depends on) -> hash


def weight_hashes(recipe: Recipe) -> dict[str, str]:
    """`"weights PATH"` -> 16 hex digits of the SHA-256 of the tensors of each source; `"teacher PATH"` for the teacher.

    Raises:
        WeightscopeError: if one cannot be read.
    """
    return {name: _passed[name, how] if (name, how) in _passed else _hash(recipe, name) for name, how in _named(recipe)}


@contextlib.contextmanager
def hashed_once(recipes: Iterable[Recipe]) -> Iterator[None]:
    """Within the block, `weight_hashes` does not read the sources of these recipes again.

    Raises:
        DataError: at the end, if one of them has changed meanwhile.
    """
    firsts = {key: recipe for recipe in recipes for key in _named(recipe)}  # one recipe of each
    before = {key: _hash(recipe, key[0]) for key, recipe in firsts.items()}
    with restored(before):
        yield
    for key, recipe in firsts.items():
        if (found := _hash(recipe, key[0])) != before[key]:
            raise DataError(
                f"{key[0]} has changed while networks were trained: expected hash {before[key]}, found {found}; "
                "restore the original and begin again in another folder"
            )


def passed() -> dict[tuple[str, str], str]:
    """The hashes that hold here; see `restored`."""
    return dict(_passed)


@contextlib.contextmanager
def restored(hashes: Mapping[tuple[str, str], str]) -> Iterator[None]:
    """Within the block, the hashes of another process's `passed()`, or of `hashed_once`, hold."""
    before = dict(_passed)
    _passed.update(hashes)
    try:
        yield
    finally:
        _passed.clear()
        _passed.update(before)


def _named(recipe: Recipe) -> list[tuple[str, str]]:
    """Names in the manifest, each with what else its hash depends on."""
    own = {name for section, name in references(recipe) if section == "init"}
    ours = [init for init in recipe.init if own.isdisjoint(part.strip() for part in init.name.split("+"))]
    given = [init.parameters.get(key) for init in ours for key in ("source", "teacher")]
    named = [(f"{manifests.WEIGHTS}{name}", "") for name in sorted({name for name in given if isinstance(name, str)})]
    teacher = recipe.distillation
    if teacher is not None and teacher.alpha != 0:
        network = teacher.network or recipe.network
        named.append((f"{_TEACHER}{teacher.teacher}", f"{network.model_dump_json()} {recipe.data.model_dump_json()}"))
    return named


def _hash(recipe: Recipe, name: str) -> str:
    from weightscope.init import _trained  # these import torch
    from weightscope.training.distillation import teacher_of

    source = teacher_of(recipe) if name.startswith(_TEACHER) else name.removeprefix(manifests.WEIGHTS)
    return _trained.fingerprint(source)
