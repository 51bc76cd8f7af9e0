"""Figures as files: complete or not there, and the same bytes every time."""

import io
from pathlib import Path

from matplotlib.figure import Figure, SubFigure

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.plots._style import DPI, themed

# No dates and no versions: a picture changes only if what it shows does.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}


@themed
def render(figure: Figure | SubFigure, kind: str = "png") -> bytes:
    """A figure as the bytes of a `png` (150 dots per inch), `pdf` or `svg` file.

    Raises:
        UsageError: for another kind.
    """
    if kind not in _METADATA:
        raise UsageError(f"figures are written as {', '.join(_METADATA)}, found {kind!r}")
    buffer = io.BytesIO()
    whole = figure.get_figure(root=True)
    whole.savefig(buffer, format=kind, dpi=DPI, metadata=_METADATA[kind])  # type: ignore[union-attr]
    return buffer.getvalue()


def save(figure: Figure | SubFigure, path: str | Path) -> None:
    """Write a figure; the suffix .png, .pdf or .svg says how.

    The file appears only when it is complete, and the same figure gives the same bytes.

    Raises:
        UsageError: if the suffix is another one.
        WeightscopeError: if the file cannot be written.

    Example:
        >>> save(convergence(result.summary).figure, "bench.png")
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in _METADATA:
        raise UsageError(f"{path}: a figure's name must end in {', '.join('.' + s for s in _METADATA)}")
    atomic.write(path, render(figure, suffix))
