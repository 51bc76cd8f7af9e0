"""TOML text to values, and validation errors to messages."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from weightscope._util.names import fitted, nearest, shortened
from weightscope._util.sources import read_regular, reason
from weightscope.errors import RecipeError
from weightscope.recipe.networks import NETWORK_TYPES

_DATA_TAGS = {"images": "DataConfig", "task": "TaskConfig", "text": "TextConfig", "markov": "MarkovConfig"}
_TAGS = {*NETWORK_TYPES, *_DATA_TAGS, "own", "range", "number", "list"}  # of unions, not of the recipe
_MOST_ERRORS = 3
_LARGEST = 2**20  # bytes; recipes have about 1000
_DEEPEST = 16  # tables and lists inside one another
_MOST_DIGITS = 4300
_LARGEST_INTEGER = 2**63 - 1  # TOML 1.0; also what JSON, HDF5 and torch hold


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of TOML text; raises RecipeError."""
    dotted = re.search(r"(?:\w++\.){64}", text)
    if dotted:  # the parser's time is quadratic in the number of dots
        place = shortened(dotted[0])
        raise RecipeError(f"{where}: {place}: nested too deeply, expected at most {_DEEPEST} levels")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise RecipeError(f"{where}: {_too_deep(text)}nested too deeply, expected at most {_DEEPEST} levels") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: not TOML: {error}") from error
    except ValueError as error:  # Python converts at most 4300 digits
        long = next((m for m in re.finditer(r"\d[\d_]*", text) if len(m[0]) > _MOST_DIGITS), None)
        if long is None:
            raise RecipeError(f"{where}: not TOML: {error}") from error
        found = f"found one of {len(long[0])} digits"
        raise RecipeError(f"{where}: {_key_at(text, long.start())}: expected an integer below 2^63, {found}") from None
    check_bounds(values, where)
    return values


def check_bounds(values: Any, where: str, path: str = "", depth: int = 0) -> None:
    """Check the depth of nested values and the size of integers.

    Raises:
        RecipeError: naming the path of the first value that is too deep or too large.
    """
    if depth > _DEEPEST:
        raise RecipeError(f"{where}: {shortened(path)}: nested too deeply, expected at most {_DEEPEST} levels")
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_bounds(value, where, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(values, list | tuple):
        for i, value in enumerate(values):
            check_bounds(value, where, f"{path}.{i}", depth + 1)
    elif isinstance(values, int) and abs(values) > _LARGEST_INTEGER:
        digits = round(values.bit_length() * math.log10(2))
        raise RecipeError(
            f"{where}: {shortened(path)}: expected an integer below 2^63, found one of about {digits} digits"
        )


def _too_deep(text: str) -> str:
    """The key at which brackets are nested too deeply, for a message; empty if there is none."""
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _DEEPEST:
            return f"{_key_at(text, bracket.start())}: "
    return ""


def _key_at(text: str, position: int) -> str:
    """The path of the key whose value contains a position of a text that cannot be parsed."""
    before = text[:position].splitlines()
    key = next((line.partition("=")[0].strip() for line in reversed(before) if "=" in line), "")
    section = next((line.strip().strip("[]") for line in reversed(before[:-1]) if line.lstrip().startswith("[")), "")
    return shortened(f"{section}.{key}".strip("."))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file; raises RecipeError."""
    try:
        text = read_regular(path, _LARGEST).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {path}: expected a TOML file in UTF-8, found other bytes") from error
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {reason(error)}") from error
    return parse_toml(text, str(path))


def explain(errors: Sequence[Any], model: type[BaseModel]) -> str:
    """Pydantic's errors about a model as `path: what is allowed, found what`, joined; the first few of them.

    Which keys a section has may depend on its name, so they are not judged where that is wrong.
    """
    misnamed = {error["loc"][:-1] for error in errors if error["loc"][-1:] == ("name",)}
    told = [error for error in errors if error["type"] != "extra_forbidden" or error["loc"][:-1] not in misnamed]
    lines = [_explain(error, model) for error in told[:_MOST_ERRORS]]
    more = len(told) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _explain(error: Any, model: type[BaseModel]) -> str:
    parts = [str(part) for part in error["loc"]]
    path = shortened(".".join(part for part in parts if part not in _TAGS)) or "(top level)"
    if error["type"] == "extra_forbidden":
        known = _keys(model, parts[:-1])
        near = nearest(parts[-1], known)
        return f"{path}: unknown key, " + (f"did you mean {near!r}?" if near else f"there are {fitted(known)}")
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = "" if isinstance(error["input"], dict) else f", found {shortened(repr(error['input']))}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"


def _keys(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the section at a path of a model; of all members of a union unless the path names one by its tag."""
    models = [model]
    for part in path:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        if fields:
            models = [inner for field in fields for inner in _models(field.annotation)]
        elif part in _TAGS:
            models = [m for m in models if part in _tags(m)] or models
    return list(dict.fromkeys(key for m in models for key in m.model_fields))


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    """The tags of a model in its union."""
    if "type" in model.model_fields:
        return get_args(model.model_fields["type"].annotation)
    return tuple(tag for tag, name in _DATA_TAGS.items() if name == model.__name__)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
