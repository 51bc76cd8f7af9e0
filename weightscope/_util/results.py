"""Base class of results, and tables as text for the terminal and as HTML for notebooks."""

import html
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from weightscope.errors import UsageError


def finite_or_none(value: float) -> float | None:
    """The number, or None if it is NaN or infinite, which JSON has no form for."""
    return float(value) if math.isfinite(value) else None


class Result:
    """Base class of results. Subclasses define `text`, `rows` and `summary`; most also `to_dict` and `plot`."""

    @abstractmethod
    def text(self) -> str:
        """The result as text for the terminal."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The table as records: one flat dictionary for each row, with the same keys."""

    @abstractmethod
    def summary(self) -> str:
        """One line: what this is, and its size."""

    def to_pandas(self) -> Any:
        """`rows()` as a `pandas.DataFrame`.

        Raises:
            UsageError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError("to_pandas: pandas is not installed; `pip install pandas`") from error
        return pandas.DataFrame(self.rows())

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.summary())}</p>{html_table(self.rows())}"


def text_table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Collection[int] = (0,)) -> str:
    """A table with columns two spaces apart; numbers are right-aligned.

    Args:
        header: the columns' names.
        rows: cells; converted with `str`.
        left: indices of left-aligned columns.

    Example:
        >>> print(text_table(("layer", "alpha"), [("blocks.0", "0.41")]))
        layer     alpha
        blocks.0   0.41
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = (
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Sequence[dict[str, Any]], most: int = 20) -> str:
    """Records as an HTML table of at most `most` rows, and the number of the others."""
    if not rows:
        return "<p>no rows</p>"
    columns = list(rows[0])
    head = "".join(f"<th>{html.escape(str(column))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(column)))}</td>" for column in columns) + "</tr>"
        for row in rows[:most]
    )
    more = f"<p>{len(rows) - most} more rows; <code>.to_pandas()</code> has all</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
