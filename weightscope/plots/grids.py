"""Grids of small matrices, such as products of attention weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography

_PAGE = 1500  # pixels: width of all panels, at 150 dots per inch
_LEAST, _MOST = 24, 260  # pixels: smallest and largest panel
GAP = 10  # pixels
_LINE = 17  # pixels: height of a line of the footer


@dataclass(frozen=True)
class Grid:
    """Layout in pixels, so that every entry of a matrix is a whole number of pixels."""

    panel: tuple[int, int]  # height, width
    rows: int
    columns: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the figure."""
        width = self.left + self.columns * self.panel[1] + (self.columns - 1) * GAP + self.right
        height = self.top + self.rows * self.panel[0] + (self.rows - 1) * GAP + self.bottom
        return width, height

    def axes(self, figure: Figure, row: int, column: int) -> Axes:
        """Axes of one panel."""
        width, height = self.size
        x = self.left + column * (self.panel[1] + GAP)
        y = height - self.top - (row + 1) * self.panel[0] - row * GAP
        return figure.add_axes((x / width, y / height, self.panel[1] / width, self.panel[0] / height))


@theme.themed
def matrix_grid(
    matrices: Any,
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    clip: int | None = 64,
    share: Literal["row", "all"] = "row",
    quantile: float = 0.995,
    quantity: str = "value",
    title: str | None = None,
) -> Figure:
    """Matrices in rows and columns, such as Q K^T of every head (down) and layer (across) (thesis, Fig. 3.17 and 3.23).

    A row shares one colour scale, centred at zero and printed beside it. It ends at the median over the row's matrices
    of the `quantile` of their absolute values, rounded up, so that one outlying layer does not wash out the others.
    Entries are drawn as whole pixels. Matrices that are too large after clipping are averaged over cells of f x f
    entries, which keeps the contrast of a diagonal; a note says so. A matrix that is not finite is drawn as a grey
    panel and ignored by the colour scale.

    Args:
        matrices: (R, C, m, n), or R sequences of C matrices, some of which may be None (left empty).
        row_labels: R labels, or none.
        column_labels: C labels, or none.
        clip: show the upper left `clip` rows and columns only; None for all.
        share: one colour scale for each `"row"` or for `"all"`.
        quantile: fraction of a typical matrix's absolute values within the colour scale.
        quantity: label of the colour bar: `"entries of W_Q W_K^T"`.
        title: figure title.

    Raises:
        UsageError: if the number of labels is wrong, or an option is invalid.
        DataError: if there are no matrices, or their shapes differ.

    Example:
        >>> save(matrix_grid(qk, column_labels=[f"layer {i}" for i in range(12)]), "qk.png")
    """
    panels, full = clipped_panels(matrices, clip)
    rows, columns = len(panels), len(panels[0])
    for name, labels, count in (("row", row_labels, rows), ("column", column_labels, columns)):
        if labels and len(labels) != count:
            raise UsageError(f"{name}_labels: expected {count} or none, found {len(labels)}")
    if share not in ("row", "all") or not 0 < quantile <= 1:
        raise UsageError(f"expected share row or all and 0 < quantile <= 1, found {share} and {quantile}")
    panels, factor, scale = _sized(panels, columns)
    limits = _limits(panels, share, quantile)
    shape = next(p.shape for line in panels for p in line if p is not None)
    note = f"{quantity}; colours hold {100 * quantile:g} % of a typical matrix{' of the row' if share == 'row' else ''}"
    if full != (shape[0] * factor, shape[1] * factor):
        shown = f"{min(full[0], clip or full[0])} × {min(full[1], clip or full[1])}"
        note += f"; upper left {shown} of {full[0]} × {full[1]}" if clip and clip < max(full) else ""
    note += f"; cells are means over {factor} × {factor}" if factor > 1 else ""
    grid = _layout(panels, (shape[0] * scale, shape[1] * scale), row_labels, limits, title)
    lines = typography.wrap(note, (grid.size[0] - grid.left - 160) * 72 / theme.DPI).split("\n")
    grid = replace(grid, bottom=grid.bottom + _LINE * max(0, len(lines) - 2))
    width, height = grid.size
    figure = Figure(figsize=(width / theme.DPI, height / theme.DPI), dpi=theme.DPI, facecolor="white")
    for i, line in enumerate(panels):
        for j, panel in enumerate(line):
            if panel is not None:
                _panel(grid.axes(figure, i, j), panel, limits[i])
    _margins(figure, grid, row_labels, column_labels, limits)
    _footer(figure, grid, lines)
    if title is not None:
        text = typography.wrap(title, width * 72 / theme.DPI - 16, typography.TITLE, bold=True)
        figure.suptitle(text, x=12 / width, y=1 - 12 / height, ha="left", va="top", linespacing=1.25)
    return figure


_Panels = list[list[np.ndarray | None]]


def clipped_panels(matrices: Any, clip: int | None) -> tuple[_Panels, tuple[int, int]]:
    """Clipped matrices as float64, and the shape before clipping."""
    if clip is not None and clip < 1:
        raise UsageError(f"clip: expected at least 1 or None, found {clip}")
    lines = [[None if m is None else np.asarray(m) for m in line] for line in matrices]
    shapes = {m.shape for line in lines for m in line if m is not None}
    if (
        len(shapes) != 1
        or len(shape := next(iter(shapes))) != 2
        or 0 in shape
        or len({len(line) for line in lines}) != 1
    ):
        raise DataError(
            f"matrix grid: expected (R, C, m, n) with one shape of matrices, found {sorted(shapes) or 'none'}"
        )
    clipped = [[None if m is None else m[:clip, :clip].astype(np.float64) for m in line] for line in lines]
    return clipped, shape


def _sized(panels: _Panels, columns: int) -> tuple[_Panels, int, int]:
    """Average large matrices over f x f entries; returns them, f, and pixels per cell."""
    largest = max(max(p.shape) for line in panels for p in line if p is not None)
    target = min(_MOST, max(_LEAST, _PAGE // columns - GAP))
    factor = -(-largest // target)
    if factor > 1:
        panels = [[None if p is None else averaged(p, factor) for p in line] for line in panels]
    return panels, factor, max(1, round(target / -(-largest // factor)))


def averaged(panel: np.ndarray, factor: int) -> np.ndarray:
    """Means over cells of factor x factor entries; smaller cells at the lower and right edges."""
    rows, columns = (np.arange(0, n, factor) for n in panel.shape)
    sums = np.add.reduceat(np.add.reduceat(panel, rows, axis=0), columns, axis=1)
    heights, widths = (np.diff(np.append(s, n)) for s, n in zip((rows, columns), panel.shape, strict=True))
    return sums / np.outer(heights, widths)


def _limits(panels: _Panels, share: str, quantile: float) -> list[float]:
    """One colour limit for each row; 0 for a row without a finite matrix."""
    finite = [[np.abs(p) for p in line if p is not None and np.isfinite(p).all()] for line in panels]
    if share == "all":
        finite = [[p for line in finite for p in line]] * len(panels)
    out = []
    for line in finite:
        limit = float(np.median([np.quantile(p, quantile) for p in line])) if line else 0.0
        out.append(
            typography.rounded_up(limit or max((float(p.max()) for p in line), default=0.0) or float(bool(line)))
        )
    return out


def _layout(
    panels: _Panels, panel: tuple[int, int], labels: Sequence[str], limits: Sequence[float], title: str | None
) -> Grid:
    pixels = theme.DPI / 72
    left = 14 + max(
        (int(typography.text_width(typography.wrap(t, 110).split("\n")[0]) * pixels) + 14 for t in labels), default=0
    )
    right = 30 + int(max(typography.text_width(f"±{typography.number(v)}") for v in limits) * pixels)
    right = max(right, 30 + int(typography.text_width("colours") * pixels))
    grid = Grid(panel, len(panels), len(panels[0]), left, right, 40, 62)
    width = grid.size[0] * 72 / theme.DPI - 16
    if width < 230:  # room for the footer
        grid = Grid(panel, len(panels), len(panels[0]), left, right + int((230 - width) * pixels), 40, 62)
        width = 230
    lines = 0 if title is None else typography.wrap(title, width, typography.TITLE, bold=True).count("\n") + 1
    return Grid(panel, grid.rows, grid.columns, grid.left, grid.right, 40 + 34 * lines, 62)


def _panel(ax: Axes, panel: np.ndarray, limit: float) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)
    ax.spines[:].set(linewidth=0.5, color=theme.MUTED)
    if np.isfinite(panel).all():
        ax.imshow(panel, **theme.colours(limit), interpolation="nearest", aspect="auto")
        return
    ax.set_facecolor(theme.GREY)
    ax.text(0.5, 0.5, "not\nfinite", transform=ax.transAxes, ha="center", va="center", fontsize=typography.SMALL)


def _margins(figure: Figure, grid: Grid, rows: Sequence[str], columns: Sequence[str], limits: Sequence[float]) -> None:
    """Row labels at the left, limits at the right, column labels at the top."""
    width, height = grid.size
    small: dict[str, Any] = {"fontsize": typography.SMALL, "color": theme.INK}
    right = (grid.left + grid.columns * (grid.panel[1] + GAP)) / width
    for i, limit in enumerate(limits):
        y = 1 - (grid.top + i * (grid.panel[0] + GAP) + grid.panel[0] / 2) / height
        if rows:
            figure.text((grid.left - 10) / width, y, typography.wrap(rows[i], 110), ha="right", va="center", **small)
        figure.text(right, y, f"±{typography.number(limit)}" if limit else "", va="center", gid="limit", **small)
    top = 1 - (grid.top - 7) / height
    figure.text(right, top, "colours", va="bottom", fontsize=typography.SMALL, color=theme.MUTED)
    room = (grid.panel[1] + GAP) * 72 / theme.DPI - 4
    every = 1
    while columns and every < len(columns) and max(typography.text_width(t) for t in columns[::every]) > room * every:
        every += 1
    for j in range(0, len(columns), every):
        x = (grid.left + j * (grid.panel[1] + GAP) + grid.panel[1] / 2) / width
        figure.text(x, top, columns[j], ha="center", va="bottom", **small)


def _footer(figure: Figure, grid: Grid, lines: Sequence[str]) -> None:
    """The colour bar and the lines of its label."""
    width, height = grid.size
    bar = figure.add_axes((grid.left / width, 22 / height, 130 / width, 12 / height))
    bar.imshow(np.linspace(-1, 1, 255)[None], cmap=theme.colour_map(), aspect="auto")
    bar.set_xticks([-0.5, 127, 254.5], ["−", "0", "+"])
    bar.set_yticks([])
    bar.tick_params(length=0, pad=1, labelsize=typography.SMALL, labelfontfamily=typography.FONT)
    bar.xaxis.tick_top()
    figure.text(
        (grid.left + 150) / width,
        (28 + _LINE / 2 * max(0, len(lines) - 2)) / height,
        "\n".join(lines),
        va="center",
        fontsize=typography.SMALL,
        color=theme.MUTED,
    )
