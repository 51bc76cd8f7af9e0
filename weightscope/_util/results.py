"""Base class of results: text for the terminal, records for pandas, a short `repr`, HTML for notebooks."""

import html
import math
from abc import abstractmethod
from typing import Any

from weightscope._util.tables import html_table
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
