"""Figures as files, written atomically and byte for byte reproducible."""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.plots.theme import DPI, themed

# Without dates and versions a file changes only if the figure does.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


def root_figure(drawn: Axes | Figure | SubFigure) -> Figure:
    """The whole figure that axes or a subfigure belong to."""
    return drawn.figure.figure


@themed
def render(drawn: Axes | Figure | SubFigure, kind: str = "png") -> bytes:
    """The whole figure as the bytes of a `png` (150 dots per inch), `pdf` or `svg` file.

    Raises:
        UsageError: for another kind.
    """
    if kind not in _METADATA:
        raise UsageError(f"kind: expected one of {', '.join(_METADATA)}, found {kind!r}")
    buffer = io.BytesIO()
    root_figure(drawn).savefig(buffer, format=kind, dpi=DPI, metadata=_METADATA[kind])
    return buffer.getvalue()


def save(drawn: Axes | Figure | SubFigure, path: str | Path) -> None:
    """Write the whole figure as .png, .pdf or .svg, by the file's suffix.

    The file appears only when it is complete. The same figure gives the same bytes.

    Raises:
        UsageError: for another suffix.
        WeightscopeError: if the file cannot be written.

    Example:
        >>> save(convergence(result.arms), "bench.png")
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in _METADATA:
        raise UsageError(f"{path}: expected a file name ending in {', '.join('.' + s for s in _METADATA)}")
    atomic.write(path, render(drawn, suffix))
