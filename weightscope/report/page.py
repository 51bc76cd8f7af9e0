"""The page itself: parts as HTML, with numbers looked up in the files beside it."""

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weightscope.errors import DataError, UsageError
from weightscope.report.parts import DPI, KINDS, Column, Number, Piece, Rows, Sourced, complete, png_size

_CSS_PIXELS = 96  # to the inch

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{header}</header>
{body}
</main>
<footer>Dotted underlines lead to the files beside this page that numbers come from. Made with weightscope.</footer>
</body>
</html>
"""


class Page:
    """Turns parts into HTML, looking numbers up in the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Any] = {}

    def inline(self, pieces: Sequence[Piece]) -> str:
        """A text, escaped, in which numbers link to their files."""
        return "".join(html.escape(piece) if isinstance(piece, str) else self._linked(piece) for piece in pieces)

    def facts(self, facts: Mapping[str, Sequence[Piece]]) -> str:
        """Key figures in a row."""
        items = (f"<div><dt>{html.escape(k)}</dt><dd>{self.inline(v)}</dd></div>" for k, v in facts.items())
        return f'<dl class="facts">{"".join(items)}</dl>'

    def _linked(self, piece: Number | Sourced) -> str:
        if isinstance(piece, Sourced):
            return self._link(piece.source, piece.text, piece.source)
        value = self._value(piece)
        text = html.escape(_written(value, piece.format, piece.scale))
        return self._link(piece.source, text, f"{piece.source} {piece.where} = {value!r}", escaped=True)

    def _link(self, source: str, text: str, hint: str, *, escaped: bool = False) -> str:
        if not (self._folder / source).exists():
            raise DataError(
                f"{self._folder / source}: the report names it as a source, but it is not there; write it first"
            )
        words = text if escaped else html.escape(text)
        return f'<a class="from" href="{html.escape(quote(source))}" title="{html.escape(hint)}">{words}</a>'

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
            raise DataError(f"{file}: the report takes numbers from it, but: {error.strerror}") from error
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
                raise DataError(f"{file}: there is nothing at {where}: no {name!r} in {there}")
        return value

    def _caption(self, pieces: Sequence[Piece], sources: Sequence[str]) -> str:
        links = ", ".join(self._link(source, source, source) for source in sources)
        return f'{self.inline(pieces)} <span class="source">Source: {links}</span>'

    def figure(self, kind: str, data: bytes, caption: Sequence[Piece], alt: str, sources: Sequence[str]) -> str:
        """A picture, embedded, in the size that its letters were made for; what is wider than the page scrolls."""
        size = png_size(data) if kind == KINDS[".png"] else None
        width, height = (round(n * _CSS_PIXELS / DPI) for n in size) if size else (0, 0)
        shape = f' width="{width}" height="{height}" style="min-width:{round(0.7 * width)}px"' if size else ""
        image = f'<img src="data:{kind};base64,{base64.b64encode(data).decode()}" alt="{html.escape(alt)}"{shape}>'
        words = self._caption(caption, sources)
        return f'<figure><div class="scroll paper" tabindex="0">{image}</div><figcaption>{words}</figcaption></figure>'

    def table(
        self,
        rows: Rows | Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        caption: Sequence[Piece],
        sources: Sequence[str],
    ) -> str:
        """A table; columns of numbers are aligned at the right."""
        if isinstance(rows, Rows):
            found = self._lookup(rows.source, rows.where)
            if not isinstance(found, list):
                raise DataError(f"{self._folder / rows.source}: expected rows at {rows.where}, found {found!r:.60}")
            rows = complete(found, columns, f"{rows.source} {rows.where}")
        numeric = {c.key: all(_is_number(row[c.key]) or row[c.key] is None for row in rows) for c in columns}

        def cell(tag: str, column: Column, text: str) -> str:
            kind = ' class="number"' if numeric[column.key] else ""
            scope = ' scope="col"' if tag == "th" else ""
            return f"<{tag}{kind}{scope}>{html.escape(text)}</{tag}>"

        head = "".join(cell("th", c, c.head) for c in columns)
        lines = ("".join(cell("td", c, _written(row[c.key], c.format, c.scale)) for c in columns) for row in rows)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        words = self._caption(caption, sources)
        scroll = f'<div class="scroll" tabindex="0">{table}</div>'
        return f'<figure class="table"><figcaption>{words}</figcaption>{scroll}</figure>'


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _written(value: Any, form: str, scale: float) -> str:
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
