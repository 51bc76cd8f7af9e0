"""Filters of many layers: covariances in block form, and the filters themselves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography
from weightscope.plots.grids import averaged
from weightscope.plots.mosaic import mosaic

_SIDE = 1.62  # inches of a panel; eight in a row are 14 inches wide
_GAP, _OVER, _UNDER = 0.13, 0.22, 0.2  # inches between panels, and for the texts above and below them
_FINE = 4  # cells per weight
_CELLS = 240  # cells across a panel: 1.62 inches at 150 dots per inch


@dataclass(frozen=True)
class Panel:
    """One layer of a page.

    Attributes:
        values: a covariance (P, P) for `covariance_page`; filters (m, c, kh, kw) for `filter_page`; None if missing.
        label: above the panel, such as `"layer 3"`.
        shape: (channels, kh, kw) of the filters whose covariance it is; None for any other matrix.
        reason: text in an empty panel.
    """

    values: Any
    label: str = ""
    shape: tuple[int, int, int] | None = None
    reason: str = "no values"


@theme.themed
def covariance_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    quantile: float = 0.98,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Covariances of filters in block form, layer by layer (thesis, Fig. 3.1 and 3.15).

    Block (i, j) of a panel is the k x k map of the covariances of pixel (i, j) with every pixel; heavier lines separate
    the channels of a patch embedding. Each panel has its own colour scale, centred at zero, whose limit is printed
    below it: the `quantile` of its absolute values, rounded up. A matrix that is not of filters is averaged over cells
    if it has more than 240 coordinates.

    Args:
        rows: panels from left to right; None leaves a gap.
        row_labels: one for each row, or none.
        quantile: fraction of a panel's absolute values within its colour scale.
        note: printed below the panels.
        title: figure title.

    Raises:
        DataError: if a matrix does not match its shape or is not symmetric, or there are no panels.
        UsageError: if the number of labels is wrong.

    Example:
        >>> panels = [Panel(row.covariance, row.name, (1, *row.kernel)) for row in filter_covariances(path)]
        >>> save(covariance_page([panels[:8], panels[8:]]), "covariances.png")
    """
    if not 0 < quantile <= 1:
        raise UsageError(f"quantile: expected above 0 and at most 1, found {quantile}")
    drawn = [p for row in rows for p in row if p is not None and p.values is not None]

    def draw(ax: Axes, panel: Panel) -> str:
        blocks, borders = _blocks(panel)
        limit = typography.rounded_up(
            float(np.quantile(np.abs(blocks), quantile)) or float(np.abs(blocks).max()) or 1.0
        )
        factor = _factor(panel)
        shown = averaged(blocks, factor) if factor > 1 else blocks
        extent = (0, blocks.shape[1], blocks.shape[0], 0)
        ax.imshow(
            shown,
            **theme.colours(limit),
            interpolation="nearest",
            aspect="auto",
            extent=extent,
        )
        for at, width, upright in borders:
            (ax.axvline if upright else ax.axhline)(at, color=theme.INK, lw=width, gid="border")
        return f"±{typography.number(limit)}"

    text = f"each panel has its own colours, zero is white; ± below it holds {100 * quantile:g} % of its values"
    if any(p.shape is not None for p in drawn):
        text = "block (i, j): covariance of pixel (i, j) with every pixel; " + text
    coarse = sorted({f for p in drawn if (f := _factor(p)) > 1})
    cells = f"cells are means over {' or '.join(f'{f} × {f}' for f in coarse)}" if coarse else ""
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, cells, note])), side=_side(rows))


@theme.themed
def filter_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    columns: int | None = None,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Filters, layer by layer (thesis, Fig. 2.4-2.6), on colour scales centred at zero.

    The filters of a panel share one scale, which holds 98 % of their weights and is printed below it. Three channels
    are drawn as colours, each filter on its own scale; other numbers of channels are summed.

    Args:
        rows: panels with filters (m, c, kh, kw), from left to right; None leaves a gap.
        row_labels: one for each row, or none.
        columns: filters per row of a panel; roughly a square if None.
        note: printed below the panels.
        title: figure title.

    Raises:
        DataError: if filters have another shape, or there are no panels.
        UsageError: if the number of labels is wrong.

    Example:
        >>> save(filter_page([[Panel(filters[:, None], "layer 0")]]), "filters.png")
    """
    single = sum(p is not None for row in rows for p in row) == 1

    def draw(ax: Axes, panel: Panel) -> str:
        array = np.asarray(panel.values, dtype=np.float64)
        if array.ndim != 4 or 0 in array.shape:
            raise DataError(f"filter page: expected filters (m, c, kh, kw), found {array.shape}")
        finite = np.isfinite(array).all(axis=(1, 2, 3))
        colour = array.shape[1] == 3
        array = array if colour else array.sum(axis=1)
        array = np.where(finite.reshape(-1, *[1] * (array.ndim - 1)), array, 0.0)
        across = columns or math.ceil(math.sqrt(len(array)))
        if colour:
            peak = np.abs(array).reshape(len(array), -1).max(axis=1)
            array = np.moveaxis(array / np.where(peak > 0, peak, 1)[:, None, None, None], 1, -1)
            picture = _tiles(array, across)
            ax.imshow(np.where(np.isnan(picture), 1.0, 0.5 + 0.5 * picture), interpolation="nearest", aspect="equal")
            return "each on its own scale"
        limit = theme.colour_limit(array, 0.98)
        ax.imshow(
            np.ma.masked_invalid(_tiles(array, across)), **theme.colours(limit), interpolation="nearest", aspect="equal"
        )
        return f"±{typography.number(limit)}"

    text = "zero is white; ± is the end of a panel's colours and holds 98 % of its weights"
    if any(p is not None and p.values is not None and np.shape(p.values)[1] == 3 for row in rows for p in row):
        text = "colours are the three channels, grey is zero"
    side = 7.0 if single else _SIDE
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, note])), side=side)


def _blocks(panel: Panel) -> tuple[np.ndarray, list[tuple[float, float, bool]]]:
    """The matrix in block form, and its borders: position, line width, whether vertical."""
    array = np.asarray(panel.values, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise DataError(f"{panel.label}: expected a covariance (P, P), found {array.shape}")
    if not np.isfinite(array).all():
        raise DataError(f"{panel.label}: the covariance is not finite")
    if np.abs(array - array.T).max() > 1e-6 * np.abs(array).max():
        raise DataError(f"{panel.label}: expected a symmetric matrix")
    if panel.shape is None:
        return array, []
    c, h, w = panel.shape
    if len(array) != c * h * w:
        raise DataError(f"{panel.label}: expected a covariance of {c} x {h} x {w} filters, found {array.shape}")
    if h == 1:  # in one dimension, block form is the matrix itself
        return array, [(n * w, 1.2, upright) for n in range(1, c) for upright in (False, True)]
    # Covariance of pixels (a, i, j) and (b, l, m): channel block (a, b), block (i, j) within it, entry (l, m).
    blocks = array.reshape(c, h, w, c, h, w).transpose(0, 1, 4, 3, 2, 5).reshape(c * h * h, c * w * w)
    light = 0.6 if max(h, w) <= 9 and c == 1 else 0.25
    borders: list[tuple[float, float, bool]] = [(n * h, 1.4 if n % h == 0 else light, False) for n in range(1, c * h)]
    return blocks, borders + [(n * w, 1.4 if n % w == 0 else light, True) for n in range(1, c * w)]


def _side(rows: Sequence[Sequence[Panel | None]]) -> float:
    """Width of a panel in inches; larger if there are few, since a patch embedding has hundreds of pixels."""
    return {1: 3.6, 2: 2.4}.get(max((len(row) for row in rows), default=0), _SIDE)


def _factor(panel: Panel) -> int:
    """Coordinates per cell side; block form is not averaged."""
    return -(-len(panel.values) // _CELLS) if panel.shape is None else 1


def _tiles(array: np.ndarray, columns: int) -> np.ndarray:
    """Filters (m, k, l[, 3]) side by side, with NaN gaps of a quarter of a pixel between and around them."""
    inner = mosaic(array, min(columns, len(array)), fine=_FINE)
    return np.pad(inner, [(1, 1), (1, 1)] + [(0, 0)] * (inner.ndim - 2), constant_values=np.nan)


def _page(
    rows: Sequence[Sequence[Panel | None]],
    labels: Sequence[str],
    draw: Callable[[Axes, Panel], str],
    title: str | None,
    note: str,
    *,
    side: float = _SIDE,
) -> Figure:
    """Panels of one size with texts above and below each, row labels, a title and a note."""
    across = max((len(row) for row in rows), default=0)
    if not any(p is not None for row in rows for p in row):
        raise DataError("expected at least one layer to draw, found none")
    if labels and len(labels) != len(rows):
        raise UsageError(f"row_labels: expected {len(rows)} or none, found {len(labels)}")
    wrapped = [typography.wrap(label, 110, typography.LABEL, bold=True) for label in labels]
    widest = max(
        (typography.text_width(t, typography.LABEL, bold=True) for label in wrapped for t in label.split("\n")),
        default=0,
    )
    left = 0.12 + (widest / 72 + 0.14 if labels else 0)
    width = max(left + across * side + (across - 1) * _GAP + 0.12, 4.2)
    heading = "" if title is None else typography.wrap(title, 72 * (width - 0.24), typography.TITLE, bold=True)
    top = 0.1 + (heading.count("\n") + 1) * 1.3 * typography.TITLE / 72 if heading else 0.06
    cell = side + _OVER + _UNDER
    foot = typography.wrap(note, 72 * (width - left - 0.12))
    bottom = 0.2 + (foot.count("\n") + 1) * 1.35 * typography.SMALL / 72
    height = top + len(rows) * cell + (len(rows) - 1) * 0.06 + bottom
    figure = Figure(figsize=(width, height), dpi=theme.DPI, facecolor="white")
    for i, row in enumerate(rows):
        y = height - top - i * (cell + 0.06) - _OVER - side
        if labels:
            figure.text(
                (left - 0.12) / width,
                (y + side / 2) / height,
                wrapped[i],
                ha="right",
                va="center",
                fontsize=typography.LABEL,
                fontweight="bold",
            )
        for j, panel in enumerate(row):
            if panel is not None:
                _place(figure, panel, draw, left + j * (side + _GAP), y, side)
    figure.text(left / width, 0.08 / height, foot, va="bottom", fontsize=typography.SMALL, color=theme.MUTED)
    if heading:
        figure.suptitle(heading, x=0.12 / width, y=1 - 0.08 / height, ha="left", va="top", linespacing=1.25)
    return figure


def _place(figure: Figure, panel: Panel, draw: Callable[[Axes, Panel], str], x: float, y: float, side: float) -> None:
    """One panel whose lower left corner is at (x, y) inches, with its label above and the text of `draw` below."""
    width, height = figure.get_size_inches()
    ax = figure.add_axes((x / width, y / height, side / width, side / height))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(True)
    ax.spines[:].set(linewidth=0.6, color=theme.MUTED)
    under = _drawn(ax, panel, draw)
    middle = (x + side / 2) / width
    label = typography.wrap(panel.label, 72 * (side + 0.1)).split("\n")[0]
    small: dict[str, Any] = {"fontsize": typography.SMALL, "ha": "center"}
    figure.text(middle, (y + side + 0.05) / height, label, va="bottom", **small)
    figure.text(middle, (y - 0.05) / height, under, va="top", color=theme.MUTED, gid="limit", **small)


def _drawn(ax: Axes, panel: Panel, draw: Callable[[Axes, Panel], str]) -> str:
    if panel.values is not None:
        return draw(ax, panel)
    ax.set_facecolor(theme.GREY)
    text = typography.wrap(panel.reason, 90)
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=typography.SMALL)
    return ""
