"""Base class of results, and tables as text."""

import html
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas


def finite_or_none(value: float) -> float | None:
    """The number, or None if it is NaN or infinite, which JSON has no form for."""
    return float(value) if math.isfinite(value) else None


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.5 days`."""
    if seconds is None:
        return "not measured"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86400:.1f} days"


class Result:
    """Base class of results: a table of records and a line that summarises it, as data frame, JSON, text and HTML.

    A subclass defines `rows`, and usually `summary`, `columns`, `notes` and `plot`. `columns` maps the head of a column
    of the text table to the format of its cells from a row, such as `"{low:+.3f} to {high:+.3f}"`; None and NaN are
    printed as "-". Without, the columns are the keys of the rows.
    """

    columns: ClassVar[Mapping[str, str]] = {}
    left: ClassVar[Collection[int]] = (0,)  # numbers of the left-aligned columns

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The table as records: one flat dictionary for each row, with the same keys."""

    def summary(self) -> str:
        """One line: what this is, and its size."""
        return f"{len(self.rows())} rows"

    def notes(self) -> list[str]:
        """Lines below the table: what was left out, warnings."""
        return []

    def to_pandas(self) -> "pandas.DataFrame":
        """`rows()` as a data frame."""
        import pandas  # half a second

        return pandas.DataFrame(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {"rows": self.rows()}

    def text(self) -> str:
        """The result as text for the terminal: the summary, the table of the rows if there are any, and the notes."""
        table = []
        if rows := self.rows():
            table = ["", row_table(self.columns or {key: f"{{{key}}}" for key in rows[0]}, rows, left=self.left)]
        return "\n".join([self.summary(), *table, *self.notes()])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        """The same text, so that notebooks and terminals show the same numbers."""
        return f"<pre>{html.escape(self.text())}</pre>"


class _Cells(Formatter):
    """Format strings in which None, NaN and missing keys are "-", whatever their format."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, spec: str) -> str:
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "-" if missing else str(super().format_field(value, spec))


def row_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], *, left: Collection[int] = (0,)) -> str:
    """Records as a text table; `columns` and `left` are those of `Result`."""
    cells = ([_Cells().vformat(form, (), row) for form in columns.values()] for row in rows)
    return text_table(list(columns), cells, left=left)


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Collection[int] = (0,)) -> str:
    """A table with columns two spaces apart, right-aligned except for the columns `left`; line breaks are escaped."""
    cells = [[str(cell).replace("\n", "\\n") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = (
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
