"""Parts of a report: numbers with their sources, columns of tables, pictures as bytes."""

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

from weightscope.errors import DataError, UsageError

DPI = 150
KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


@runtime_checkable
class Drawing(Protocol):
    """An object that can be written as a picture, such as a matplotlib figure."""

    def savefig(self, file: Any, **options: Any) -> Any: ...  # noqa: D102


@dataclass(frozen=True)
class Number:
    """A number in a JSON file beside the report.

    Attributes:
        source: the file, relative to the report's folder.
        where: position in it, an RFC 6901 pointer such as `/summary/1/difference`.
        format: format specification, as in `format(value, spec)`.
        scale: factor applied first, 100 for a fraction in per cent.
    """

    source: str
    where: str
    format: str = ".3g"
    scale: float = 1.0


@dataclass(frozen=True)
class Sourced:
    """A text with numbers in it, such as a `verdict`, and the file that the numbers are from."""

    text: str
    source: str


@dataclass(frozen=True)
class Rows:
    """The rows of a table, read from a JSON file beside the report when it is saved.

    Attributes:
        source: the file, relative to the report's folder.
        where: position in it, an RFC 6901 pointer to a list of objects, such as `/summary`.
    """

    source: str
    where: str


@dataclass(frozen=True)
class Column:
    """A column of a table: key of the rows, header, and format and scale of numbers."""

    key: str
    head: str
    format: str = ""
    scale: float = 1.0


Piece = str | Number | Sourced


def checked(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of a text, checked to be strings, or numbers with a source.

    Raises:
        UsageError: for anything else.
    """
    for piece in pieces:
        if isinstance(piece, Number | Sourced):
            source_list(piece.source)
        elif not isinstance(piece, str):
            raise UsageError(f"expected text, Number or Sourced, found {type(piece).__name__}; numbers need a source")
        if isinstance(piece, Number) and not piece.where.startswith("/"):
            raise UsageError(f"{piece.source}: expected a pointer like /summary/0/mean, found {piece.where!r}")
    return list(pieces)


def complete(rows: Sequence[Any], columns: Sequence[Column], what: str) -> list[dict[str, Any]]:
    """The rows of a table, checked to have every column.

    Raises:
        UsageError: names the first row that lacks one.
    """
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UsageError(f"{what}: expected row {i} to have keys, found {row!r:.60}")
        if missing := [c.key for c in columns if c.key not in row]:
            raise UsageError(f"{what}: row {i} lacks {', '.join(missing)}; it has {', '.join(map(str, row))}")
    return list(rows)


def source_list(source: str | Sequence[str]) -> list[str]:
    """Relative paths below the report's folder, which remain valid when the folder is moved or published."""
    sources = [source] if isinstance(source, str) else list(source)
    for path in sources:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in path or ":" in parts[0]:
            raise UsageError(
                f"source: expected a path below the report's folder, such as bench/results.json, found {path!r}"
            )
    if not sources:
        raise UsageError("source: expected the file that the values come from, found none")
    return sources


def picture_bytes(picture: Drawing | bytes | str | Path) -> tuple[str, bytes]:
    """Media type and bytes."""
    if isinstance(picture, Drawing):
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        kind, data, name = ".png", buffer.getvalue(), "figure"
    elif isinstance(picture, bytes):
        kind, data, name = ".png", picture, "figure"
    elif isinstance(picture, str | Path):
        kind, name = Path(picture).suffix.lower(), str(picture)
        if kind not in KINDS:
            raise UsageError(f"figure: expected a .png or .svg file, found {picture}")
        try:
            data = Path(picture).read_bytes()
        except OSError as error:
            raise DataError(f"{picture}: cannot read this picture of the report: {error.strerror}") from error
    else:
        raise UsageError(f"figure: expected a figure, PNG bytes or a path, found {type(picture).__name__}")
    if (kind == ".png" and png_size(data) is None) or (kind == ".svg" and b"<svg" not in data):
        raise DataError(f"{name}: expected a {kind[1:].upper()} picture, found bytes that begin with {data[:8]!r}")
    return KINDS[kind], data


def png_size(png: bytes) -> tuple[int, int] | None:
    """Width and height from a PNG header, or None."""
    if len(png) < 24 or png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR":
        return None
    return struct.unpack(">II", png[16:24])
