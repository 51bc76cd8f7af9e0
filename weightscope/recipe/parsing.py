"""TOML text to values, and validation errors to messages."""

import tomllib
from pathlib import Path
from typing import Any

from weightscope.errors import RecipeError
from weightscope.recipe.networks import NETWORK_TYPES


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of TOML text; raises RecipeError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: not TOML: {error}") from error


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file; raises RecipeError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    return parse_toml(text, str(path))


def explain(error: Any) -> str:
    """One pydantic error as `path: what is allowed, found what`."""
    tags = {*NETWORK_TYPES, "own", "range", "number", "list"}  # of unions, not of the recipe
    path = ".".join(str(part) for part in error["loc"] if part not in tags) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = "" if isinstance(error["input"], dict) else f", found {error['input']!r}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"
