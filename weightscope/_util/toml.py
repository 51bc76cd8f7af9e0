"""Recipes as canonical TOML text: the same values give the same bytes, and `tomllib` reads them back."""

import json
from typing import Any


def dumps(values: dict[str, Any]) -> str:
    """TOML text of nested dictionaries of strings, numbers, booleans and lists.

    Keys keep their order; tables follow the plain values of their parent; a list of dictionaries becomes an
    array of tables when it is a section of its own (at the top level) and inline tables elsewhere.

    Example:
        >>> print(dumps({"data": {"name": "digits"}}), end="")
        [data]
        name = "digits"
    """
    blocks: list[str] = []
    _table(values, (), blocks, "[{}]")
    return "\n".join(blocks)


def _table(values: dict[str, Any], path: tuple[str, ...], blocks: list[str], header: str) -> None:
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in values.items() if not path and _is_tables(v)}
    plain = {k: v for k, v in values.items() if k not in tables and k not in arrays}
    lines = [f"{_key(k)} = {_value(v)}\n" for k, v in plain.items()]
    if path and (lines or not tables):
        lines.insert(0, header.format(".".join(map(_key, path))) + "\n")
    if lines:
        blocks.append("".join(lines))
    for key, inner in tables.items():
        _table(inner, (*path, key), blocks, "[{}]")
    for key, items in arrays.items():
        for item in items:
            _table(item, (*path, key), blocks, "[[{}]]")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_flat(v) for v in value)


def _is_flat(value: Any) -> bool:
    # A nested table inside an array of tables would need its own header; it is written inline instead.
    return isinstance(value, dict) and not any(isinstance(v, dict) for v in value.values())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _key(key: str) -> str:
    return key if key and key.isascii() and key.replace("-", "_").isidentifier() else _string(key)


def _string(text: str) -> str:
    # JSON and TOML escape alike, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
