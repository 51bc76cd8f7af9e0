"""`Report`: parts in their order, and the page that they make."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.report.page import TEMPLATE, Page
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
from weightscope.report.style import CSS


@dataclass
class Report:
    """Parts of a page in their order; `save` makes the page.

    Attributes:
        title: of the page.
        lead: one or two sentences under the title, which say what was found.
    """

    title: str
    lead: str | Sequence[Piece] = ""
    _parts: list[Callable[[Page], str]] = field(default_factory=list, repr=False)

    def heading(self, text: str, level: int = 2) -> "Report":
        """A heading of level 2 or 3."""
        if level not in (2, 3):
            raise UsageError(f"heading: expected level 2 or 3, found {level}")
        self._parts.append(lambda page: f"<h{level}>{html.escape(text)}</h{level}>")
        return self

    def text(self, *pieces: Piece) -> "Report":
        """One paragraph of strings (escaped), `Number`s and `Sourced` words."""
        kept = checked(pieces)
        self._parts.append(lambda page: f"<p>{page.inline(kept)}</p>")
        return self

    def numbers(self, facts: Mapping[str, Number | Sourced | Sequence[Piece]]) -> "Report":
        """Key figures in a row: what it is -> the number, alone or with words around it."""
        kept = {name: checked([v] if isinstance(v, str | Number | Sourced) else v) for name, v in facts.items()}

        self._parts.append(lambda page: page.facts(kept))
        return self

    def command(self, text: str) -> "Report":
        """A command to copy, in its own scrolling box."""
        self._parts.append(lambda page: f'<pre tabindex="0"><code>{html.escape(text)}</code></pre>')
        return self

    def figure(
        self,
        picture: Drawing | bytes | str | Path,
        caption: str | Sequence[Piece],
        *,
        alt: str,
        source: str | Sequence[str],
    ) -> "Report":
        """A picture with a caption that names its sources.

        Args:
            picture: something with `savefig`, the bytes of a PNG, or the path of a .png or .svg file. It is read now.
            caption: what one sees.
            alt: the same for who cannot see it; must not be empty.
            source: the files beside the report that the picture was drawn from.

        Raises:
            UsageError: if there is no alternative text or source, or the picture is of another kind.
            DataError: if the picture's file is missing or no picture.
        """
        if not alt.strip():
            raise UsageError("figure: expected a text for those who cannot see it, found an empty alt")
        kind, data = picture_bytes(picture)
        sources, pieces = source_list(source), checked([caption] if isinstance(caption, str) else caption)
        self._parts.append(lambda page: page.figure(kind, data, pieces, alt, sources))
        return self

    def table(
        self,
        rows: Rows | Sequence[Mapping[str, Any]],
        columns: Sequence[Column] | Mapping[str, str],
        caption: str | Sequence[Piece],
        *,
        source: str | Sequence[str] = (),
    ) -> "Report":
        """A table that scrolls when it is wider than the page. None is a dash.

        Args:
            rows: `Rows` of a file, or plain values; then `source` says where they come from.
            columns: `Column`s, or key -> head.
            caption: what it shows.
            source: the files beside the report that plain rows come from.

        Raises:
            UsageError: if there are no columns or no source, or a plain row lacks a key.
        """
        kept = [Column(*item) for item in columns.items()] if isinstance(columns, Mapping) else list(columns)
        if not kept:
            raise UsageError("table: expected columns, found none")
        sources = source_list(rows.source if isinstance(rows, Rows) else source)
        body = rows if isinstance(rows, Rows) else complete([dict(row) for row in rows], kept, "table")
        pieces = checked([caption] if isinstance(caption, str) else caption)
        self._parts.append(lambda page: page.table(body, kept, pieces, sources))
        return self

    def save(self, path: str | Path) -> Path:
        """Write the page; it appears only when it is complete.

        Raises:
            DataError: if a source is not beside the report, or a number is not where it should be in its file.
            WeightscopeError: if the file cannot be written.
        """
        path = Path(path)
        page = Page(path.parent)
        lead = checked([self.lead] if isinstance(self.lead, str) else self.lead)
        header = f"<header><h1>{html.escape(self.title)}</h1>"
        header += f'<p class="lead">{page.inline(lead)}</p>' if any(lead) else ""
        body = "\n".join(part(page) for part in self._parts)
        text = TEMPLATE.format(title=html.escape(self.title), style=CSS, header=header, body=body)
        atomic.write(path, text.encode())
        return path
