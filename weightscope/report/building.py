"""`Report`: collects the parts of a page and writes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.report.page import Page, embedded, render
from weightscope.report.parts import (
    Column,
    Drawing,
    Number,
    Piece,
    Rows,
    Sourced,
    checked,
    complete,
    picture_bytes,
    source_list,
)


@dataclass
class Report:
    """A page, built part by part; `save` writes it.

    Attributes:
        title: page title.
        lead: one or two sentences below the title that state the finding.
    """

    title: str
    lead: str | Sequence[Piece] = ""
    _parts: list[Callable[[Page], dict[str, Any]]] = field(default_factory=list, repr=False)

    def heading(self, text: str, level: int = 2) -> "Report":
        """Add a heading of level 2 or 3."""
        if level not in (2, 3):
            raise UsageError(f"heading: expected level 2 or 3, found {level}")
        self._parts.append(lambda page: {"kind": "heading", "level": level, "text": text})
        return self

    def text(self, *pieces: Piece) -> "Report":
        """Add a paragraph of strings, `Number`s and `Sourced` texts."""
        kept = checked(pieces)
        self._parts.append(lambda page: {"kind": "text", "pieces": page.inline(kept)})
        return self

    def numbers(self, facts: Mapping[str, Number | Sourced | Sequence[Piece]]) -> "Report":
        """Add a row of key figures: name -> number, alone or with text around it."""
        kept = {name: checked([v] if isinstance(v, str | Number | Sourced) else v) for name, v in facts.items()}
        self._parts.append(
            lambda page: {"kind": "numbers", "facts": {name: page.inline(pieces) for name, pieces in kept.items()}}
        )
        return self

    def command(self, text: str) -> "Report":
        """Add a command to copy."""
        self._parts.append(lambda page: {"kind": "command", "text": text})
        return self

    def figure(
        self,
        picture: Drawing | bytes | str | Path,
        caption: str | Sequence[Piece],
        *,
        alt: str,
        source: str | Sequence[str],
    ) -> "Report":
        """Add a picture with a caption that links to its sources.

        Args:
            picture: an object with `savefig`, the bytes of a PNG, or the path of a .png or .svg file, read immediately.
            caption: what the picture shows.
            alt: alternative text; must not be empty.
            source: the files beside the report from which the picture was drawn.

        Raises:
            UsageError: if the alternative text or the source is missing, or the picture is of another kind.
            DataError: if the picture file is missing or not a picture.
        """
        if not alt.strip():
            raise UsageError("figure: expected an alternative text, found an empty alt")
        kind, data = picture_bytes(picture)
        sources, pieces = source_list(source), checked([caption] if isinstance(caption, str) else caption)
        drawn = embedded(kind, data)
        self._parts.append(lambda page: {"kind": "figure", "alt": alt, **drawn, **page.captioned(pieces, sources)})
        return self

    def table(
        self,
        rows: Rows | Sequence[Mapping[str, Any]],
        columns: Sequence[Column] | Mapping[str, str],
        caption: str | Sequence[Piece],
        *,
        source: str | Sequence[str] = (),
    ) -> "Report":
        """Add a table; None is shown as a dash.

        Args:
            rows: `Rows` of a file, or dictionaries, which need a `source`.
            columns: `Column`s, or key -> header.
            caption: what the table shows.
            source: the files beside the report from which dictionaries were taken.

        Raises:
            UsageError: if there are no columns or no source, or a row lacks a key.
        """
        kept = [Column(*item) for item in columns.items()] if isinstance(columns, Mapping) else list(columns)
        if not kept:
            raise UsageError("table: expected columns, found none")
        sources = source_list(rows.source if isinstance(rows, Rows) else source)
        body = rows if isinstance(rows, Rows) else complete([dict(row) for row in rows], kept, "table")
        pieces = checked([caption] if isinstance(caption, str) else caption)
        self._parts.append(lambda page: {"kind": "table", **page.table(body, kept), **page.captioned(pieces, sources)})
        return self

    def save(self, path: str | Path) -> Path:
        """Write the page atomically.

        Raises:
            DataError: if a source is missing beside the report, or a number is missing in its file.
            WeightscopeError: if the file cannot be written.
        """
        path = Path(path)
        page = Page(path.parent)
        lead = checked([self.lead] if isinstance(self.lead, str) else self.lead)
        text = render(self.title, page.inline(lead) if any(lead) else [], [part(page) for part in self._parts])
        atomic.write(path, text.encode())
        return path
