"""Attention probabilities of many heads and layers, and stable ranks of their inputs."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography
from weightscope.plots.grids import GAP, Grid, averaged, clipped_panels

_SEQUENTIAL = "magma"
_PAGE, _LEAST, _MOST = 1660, 60, 260  # pixels: width of all panels, smallest and largest panel
_FLOOR = 0.25  # lower end of the colour scale, relative to uniform attention
_QUANTILE = 0.998


@theme.themed
def attention_grid(
    maps: Any,
    *,
    uniform: float,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Attention maps in rows (heads) and columns (layers), as in thesis Fig. 3.18.

    All panels share one sequential, logarithmic colour scale in units of uniform attention, from a quarter of it (dark)
    to the 99.8 % quantile of all entries. Maps larger than their panel are averaged over cells of f x f entries, which
    a note states.

    Args:
        maps: (R, C, m, n), nonnegative.
        uniform: the weight of uniform attention, 1 / number of tokens.
        row_labels: R labels, or none.
        column_labels: C labels, or none.
        note: printed below the panels, after the unit.
        title: figure title.

    Raises:
        DataError: if there are no maps, or an entry is negative or not finite.
        UsageError: if the number of labels is wrong, or `uniform` is not a probability.

    Example:
        >>> save(attention_grid(maps.transpose(1, 0, 2, 3), uniform=1 / 65), "maps.png")
    """
    if not 0 < uniform <= 1:
        raise UsageError(f"uniform: expected a probability > 0, found {uniform}")
    panels, full = clipped_panels(maps, None)
    lines = [[panel for panel in line if panel is not None] for line in panels]
    if any(not (np.isfinite(p).all() and (p >= 0).all()) for line in lines for p in line):
        raise DataError("attention grid: expected probabilities, found negative or non-finite entries")
    for name, labels, count in (("row", row_labels, len(lines)), ("column", column_labels, len(lines[0]))):
        if labels and len(labels) != count:
            raise UsageError(f"{name}_labels: expected {count} or none, found {len(labels)}")
    shown, factor, scale = _sized(lines)
    high = max(2.0, float(np.quantile(np.stack([p for line in shown for p in line]), _QUANTILE)) / uniform)
    norm = LogNorm(_FLOOR, top := typography.rounded_up(high))
    shape = shown[0][0].shape
    grid = _layout(len(lines), len(lines[0]), (shape[0] * scale, shape[1] * scale), row_labels, title)
    width, height = grid.size
    figure = Figure(figsize=(width / theme.DPI, height / theme.DPI), dpi=theme.DPI, facecolor="white")
    for i, line in enumerate(shown):
        for j, panel in enumerate(line):
            ax = grid.axes(figure, i, j)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            inside = np.clip(panel / uniform, _FLOOR, None)
            ax.imshow(inside, cmap=matplotlib.colormaps[_SEQUENTIAL], norm=norm, interpolation="nearest", aspect="auto")
    _margins(figure, grid, row_labels, column_labels)
    note = "weight in units of uniform attention" + (f"; {note}" if note else "")
    if factor > 1:
        note += f"; cells are means over {factor} × {factor} of {full[0]} × {full[1]}"
    _footer(figure, grid, top, note)
    if title is not None:
        text = typography.wrap(title, width * 72 / theme.DPI - 16, typography.TITLE, bold=True)
        figure.suptitle(text, x=12 / width, y=1 - 12 / height, ha="left", va="top", linespacing=1.25)
    return figure


def _sized(lines: list[list[np.ndarray]]) -> tuple[list[list[np.ndarray]], int, int]:
    """Averaged panels, entries per cell, and pixels per cell."""
    largest = max(lines[0][0].shape)
    target = min(_MOST, max(_LEAST, _PAGE // len(lines[0]) - GAP))
    factor = -(-largest // target)
    shown = [[averaged(p, factor) for p in line] for line in lines] if factor > 1 else lines
    return shown, factor, max(1, round(target / -(-largest // factor)))


def _layout(rows: int, columns: int, panel: tuple[int, int], labels: Sequence[str], title: str | None) -> Grid:
    pixels = theme.DPI / 72
    left = 14 + max((int(typography.text_width(t) * pixels) + 14 for t in labels), default=0)
    right = max(14, int(230 * pixels) - left - columns * (panel[1] + GAP))  # room for the footer
    grid = Grid(panel, rows, columns, left, right, 40, 84)
    lines = (
        0 if title is None else typography.wrap(title, grid.size[0] * 72 / theme.DPI - 16, typography.TITLE, bold=True)
    )
    count = 0 if title is None else str(lines).count("\n") + 1
    return Grid(panel, rows, columns, left, right, 40 + 34 * count, 84)


def _margins(figure: Figure, grid: Grid, rows: Sequence[str], columns: Sequence[str]) -> None:
    width, height = grid.size
    small: dict[str, Any] = {"fontsize": typography.SMALL, "color": theme.INK}
    for i, text in enumerate(rows):
        y = 1 - (grid.top + i * (grid.panel[0] + GAP) + grid.panel[0] / 2) / height
        figure.text((grid.left - 10) / width, y, text, ha="right", va="center", **small)
    room = (grid.panel[1] + GAP) * 72 / theme.DPI
    short = any(typography.text_width(text) > room for text in columns)
    for j, text in enumerate(columns):
        x = (grid.left + j * (grid.panel[1] + GAP) + grid.panel[1] / 2) / width
        label = text.split()[-1] if short else text
        figure.text(x, 1 - (grid.top - 8) / height, label, ha="center", va="bottom", **small)


def _footer(figure: Figure, grid: Grid, top: float, note: str) -> None:
    """A colour bar with its limits printed, and a note beside it."""
    width, height = grid.size
    bar = figure.add_axes((grid.left / width, 42 / height, 210 / width, 14 / height))
    steps = np.geomspace(_FLOOR, top, 256)[None]
    bar.imshow(
        steps, cmap=matplotlib.colormaps[_SEQUENTIAL], norm=LogNorm(_FLOOR, top), aspect="auto", extent=(0, 1, 0, 1)
    )
    values = [_FLOOR, 1.0, top]
    places = [math.log(v / _FLOOR) / math.log(top / _FLOOR) for v in values]
    texts = [f"≤{typography.number(values[0])}", "1", f"≥{typography.number(values[2])}"]
    bar.set_xticks(places, texts)
    bar.set_yticks([])
    bar.spines[:].set_visible(False)
    bar.tick_params(length=3, pad=2, labelsize=typography.SMALL, labelfontfamily=typography.FONT)
    left = grid.left + 260
    text = typography.wrap(note, (width - left - 10) * 72 / theme.DPI)
    figure.text(left / width, 48 / height, text, va="center", fontsize=typography.SMALL, color=theme.MUTED)


@theme.themed
def rank_condition(
    ranks: Sequence[Any],
    width: int,
    ax: Axes | None = None,
    *,
    filter_sizes: Sequence[int] = (3, 5, 7),
    title: str | None = None,
) -> Axes:
    """Stable ranks k of layers' inputs against depth, with the bounds k <= D / f^2 (impulse paper, Eq. 3).

    Points are means over images, bars the central 90 % of the images. A layer satisfies the condition for f if it is
    below the line of f.

    Args:
        ranks: for each layer (B,) stable ranks.
        width: D.
        ax: axes to draw on; a new figure if None.
        filter_sizes: f of each line.
        title: figure title.

    Raises:
        DataError: if a layer has no ranks, or one is not finite and positive.

    Example:
        >>> rank_condition([layer.stable_ranks for layer in found.layers], 384)
    """
    values = [np.asarray(r, dtype=np.float64) for r in ranks]
    if not values or any(v.ndim != 1 or not len(v) or not np.isfinite(v).all() or (v <= 0).any() for v in values):
        raise DataError("rank condition: expected (B,) stable ranks > 0 for each layer")
    canvas = theme.Canvas.on(ax, 6.4, 3.6)
    ax = canvas.ax
    means = np.array([v.mean() for v in values])
    low, high = (np.array([np.quantile(v, q) for v in values]) for q in (0.05, 0.95))
    x = np.arange(len(values))
    ax.vlines(x, low, high, color=theme.PALETTE[0], linewidth=1.4)
    ax.plot(x, means, marker=theme.MARKERS[0], color=theme.PALETTE[0], linewidth=1.2)
    bounds = [width / f**2 for f in filter_sizes]
    ax.set_yscale("log")
    ax.set_ylim(0.7 * min([*low, *bounds]), 1.4 * max([*high, *bounds]))
    for f in filter_sizes:
        ax.axhline(width / f**2, color=theme.MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        ax.annotate(
            f"D/{f}² = {typography.number(width / f**2)}",
            (1, width / f**2),
            (4, 0),
            xycoords=ax.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            fontsize=typography.SMALL,
            color=theme.MUTED,
            annotation_clip=False,
        )
    bottom, top = ax.get_ylim()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if bottom <= t <= top]
    ax.set_yticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.set_xticks(x)
    ax.set_xlabel("layer")
    ax.set_ylabel("stable rank k of the input")
    canvas.finish(title)
    return ax
