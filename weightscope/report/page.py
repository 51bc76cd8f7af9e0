"""Contents of a page: numbers looked up in the files beside it and formatted, for the template."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weightscope.errors import DataError, UsageError
from weightscope.report.parts import DPI, KINDS, Column, Number, Piece, Rows, Sourced, complete, png_size

_CSS_PIXELS = 96  # per inch
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Link:
    """A text that links to the file it was made from."""

    source: str
    text: str
    hint: str


def render(title: str, lead: Sequence[str | Link], parts: Iterable[dict[str, Any]]) -> str:
    """The page as HTML; a part is a dictionary with its `kind`, the name of a macro of the template."""
    return _TEMPLATES.get_template("page.html").render(title=title, lead=lead, parts=parts)


class Page:
    """Looks up what the parts of a report refer to in the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def inline(self, pieces: Sequence[Piece]) -> list[str | Link]:
        """Text, with numbers replaced by links to their files."""
        return [piece if isinstance(piece, str) else self._linked(piece) for piece in pieces]

    def captioned(self, caption: Sequence[Piece], sources: Sequence[str]) -> dict[str, Any]:
        """The caption of a figure or table, and links to its sources."""
        return {"caption": self.inline(caption), "sources": [self._link(s, s, s) for s in sources]}

    def _linked(self, piece: Number | Sourced) -> Link:
        if isinstance(piece, Sourced):
            return self._link(piece.source, piece.text, piece.source)
        value = self._value(piece)
        text = _formatted(value, piece.format, piece.scale)
        return self._link(piece.source, text, f"{piece.source} {piece.where} = {value!r}")

    def _link(self, source: str, text: str, hint: str) -> Link:
        if not (self._folder / source).exists():
            raise DataError(f"{self._folder / source}: a source of the report, not found; write it first")
        return Link(source, text, hint)

    def _value(self, number: Number) -> Any:
        value = self._lookup(number.source, number.where)
        if not _is_number(value):
            raise DataError(f"{self._folder / number.source}: expected a number at {number.where}, found {value!r:.60}")
        return value

    def _lookup(self, source: str, where: str) -> Any:
        file = self._folder / source
        try:
            if source not in self._read:
                self._read[source] = json.loads(file.read_bytes())
        except OSError as error:
            raise DataError(f"{file}: cannot read this source of the report: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{file}: expected JSON, found: {error}") from error
        value = self._read[source]
        for key in where.split("/")[1:]:
            name: Any = key.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                there = f"{len(value)} rows" if isinstance(value, list) else f"{value!r:.60}"
                raise DataError(f"{file}: nothing at {where}: no {name!r} in {there}")
        return value

    def table(self, rows: Rows | Sequence[dict[str, Any]], columns: Sequence[Column]) -> dict[str, Any]:
        """Formatted cells, and columns of which numeric ones are aligned to the right."""
        if isinstance(rows, Rows):
            found = self._lookup(rows.source, rows.where)
            if not isinstance(found, list):
                raise DataError(f"{self._folder / rows.source}: expected rows at {rows.where}, found {found!r:.60}")
            rows = complete(found, columns, f"{rows.source} {rows.where}")
        numeric = [all(_is_number(row[c.key]) or row[c.key] is None for row in rows) for c in columns]
        return {
            "columns": [{"head": c.head, "numeric": n} for c, n in zip(columns, numeric, strict=True)],
            "rows": [[_formatted(row[c.key], c.format, c.scale) for c in columns] for row in rows],
        }


def embedded(media_type: str, data: bytes) -> dict[str, Any]:
    """An embedded picture, at the size for which its text was set; the page scrolls if it is wider."""
    size = png_size(data) if media_type == KINDS[".png"] else None
    width, height = (round(n * _CSS_PIXELS / DPI) for n in size) if size else (0, 0)
    return {
        "media_type": media_type,
        "base64": base64.b64encode(data).decode(),
        "size": (width, height) if size else None,
        "min_width": round(0.7 * width),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _formatted(value: Any, form: str, scale: float) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        return str(value)
    if not math.isfinite(value):
        return "not finite"
    scaled = value * scale if scale != 1 else value
    try:
        text = format(scaled, form or ("," if isinstance(scaled, int) else ".4g"))
    except ValueError as error:
        raise UsageError(f"format: {form!r} does not suit {scaled!r}: {error}") from error
    return "−" + text[1:] if text.startswith("-") else text
