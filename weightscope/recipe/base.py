"""TOML text to values, and errors to messages."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from weightscope._util.names import fitted, nearest, shortened
from weightscope._util.sources import read_regular, reason
from weightscope.errors import RecipeError

_MOST_ERRORS = 3
_LARGEST = 2**20  # bytes; recipes have about 1000
_DEEPEST = 16  # tables and lists inside one another
_TOO_DEEP = f"nested too deeply, expected at most {_DEEPEST} levels"

_Model = TypeVar("_Model", bound=BaseModel)


def check_numbers(values: Mapping[str, Any], *, tables: bool = False, depth: int = 1) -> None:
    """Raise ValueError unless the values are what TOML can hold, and finite."""
    for key, value in values.items():
        if depth > _DEEPEST:
            raise ValueError(f"{shortened(key)}: {_TOO_DEEP}")
        if isinstance(value, list | tuple):
            check_numbers({f"{key}[{i}]": item for i, item in enumerate(value)}, tables=tables, depth=depth + 1)
        elif isinstance(value, dict) and tables:
            check_numbers({f"{key}.{name}": item for name, item in value.items()}, tables=True, depth=depth + 1)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, found {value}")
        elif isinstance(value, int) and abs(value) >= 2**63:  # more than JSON, HDF5 and torch hold
            raise ValueError(f"{key}: expected an integer below 2^63, found one of {value.bit_length()} bits")
        elif not isinstance(value, int | float | str):
            raise ValueError(
                f"{key}: expected a number, a text, true, false, or a list of these, found {shortened(repr(value))}"
            )


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of TOML text; raises RecipeError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RecipeError(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:  # tomllib's own, or Python's for an integer of thousands of digits
        raise RecipeError(f"{where}: not TOML: {error}") from error


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file; raises RecipeError."""
    try:
        text = read_regular(path, _LARGEST).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {path}: expected a TOML file in UTF-8, found other bytes") from error
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {reason(error)}") from error
    return parse_toml(text, str(path))


def validated(model: type[_Model], values: Any, where: str) -> _Model:
    """The values as a model; RecipeError with the first few errors as `path: what is allowed, found what`."""
    try:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            errors: Sequence[Any] = error.errors()
            # which keys a section has may depend on its name, so they are not judged where that is wrong
            misnamed = {error["loc"][:-1] for error in errors if error["loc"][-1:] == ("name",)}
            told = [e for e in errors if e["type"] != "extra_forbidden" or e["loc"][:-1] not in misnamed]
            lines = [_explain(error, model, values) for error in told[:_MOST_ERRORS]]
            more = [f"and {len(told) - len(lines)} more"] * (len(told) > len(lines))
    except RecursionError:
        lines, more = [_TOO_DEEP], []
    raise RecipeError(f"{where}: {'; '.join(lines + more)}")


def _explain(error: Any, model: type[BaseModel], values: Any) -> str:
    parts, known = _path(error["loc"], model, values)
    path = shortened(".".join(parts)) or "(top level)"
    if error["type"] == "extra_forbidden":
        near = nearest(parts[-1], known)
        return f"{path}: unknown key, " + (f"did you mean {near!r}?" if near else f"there are {fitted(known)}")
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = "" if isinstance(error["input"], dict) else f", found {shortened(repr(error['input']))}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"


def _path(loc: Sequence[str | int], model: type[BaseModel], values: Any) -> tuple[list[str], list[str]]:
    """The path of an error in the recipe, without pydantic's tags of unions, and the keys of the section there."""
    models, path = [model], []
    known: list[str] = []
    for part in loc:
        models = [m.of(values) if hasattr(m, "of") else m for m in models]
        known = list(dict.fromkeys(key for m in models for key in m.model_fields))
        if isinstance(part, str) and part not in known and not (isinstance(values, Mapping) and part in values):
            continue
        path.append(str(part))
        if isinstance(part, int):
            continue
        values = values.get(part) if isinstance(values, Mapping) else None
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [inner for field in fields for inner in _models(field.annotation)]
    return path, known


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
