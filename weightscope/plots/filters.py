"""Filters of many layers on one page, and their covariances in block form."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightscope.errors import DataError
from weightscope.plots import theme
from weightscope.plots.covariance import checked_square
from weightscope.plots.grids import averaged, beside, missing, panel_figure
from weightscope.plots.text import number, wrap

_SIDE = 1.62  # inches of a panel; eight in a row are 14 inches wide
_SHOWN = 0.98  # of the values of a panel, within its colours
_FINE = 4  # cells per weight
_CELLS = 240  # cells across a panel: 1.62 inches at 150 dots per inch


@dataclass(frozen=True)
class Panel:
    """One layer of a page."""

    values: Any  # a covariance (P, P) for `covariance_page`, filters (m, c, kh, kw) for `filter_page`; None if missing
    label: str = ""  # above the panel, such as "layer 3"
    shape: tuple[int, int, int] | None = None  # (channels, kh, kw) of a covariance of filters; None for other matrices
    reason: str = "no values"  # text in an empty panel


def mosaic(filters: np.ndarray, columns: int, *, fine: int = 1) -> np.ndarray:
    """Filters (n, k, l[, 3]) row by row, with a cell of NaN between them: (rows (fine k + 1) - 1, ...).

    With `fine` cells along a side of a pixel, the gap is a fraction 1 / fine of it.
    """
    n, height, width = len(filters), fine * filters.shape[1] + 1, fine * filters.shape[2] + 1
    out = np.full((-(-n // columns) * height - 1, columns * width - 1, *filters.shape[3:]), np.nan)
    for index, tile in enumerate(filters):
        y, x = (index // columns) * height, (index % columns) * width
        out[y : y + height - 1, x : x + width - 1] = tile.repeat(fine, axis=0).repeat(fine, axis=1)
    return out


@theme.themed()
def covariance_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Covariances of filters in block form, layer by layer (thesis, Fig. 3.1 and 3.15).

    Block (i, j) of a panel is the k x k map of the covariances of pixel (i, j) with every pixel; heavier lines separate
    the channels of a patch embedding. Each panel has its own colour scale, centred at zero, whose limit is printed
    below it: the 98 % quantile of its absolute values, rounded up. A matrix that is not of filters is averaged over
    cells if it has more than 240 coordinates. None leaves a gap.

    Example:
        >>> panels = [Panel(row.covariance, row.name, (1, *row.kernel)) for row in filter_covariances(path)]
        >>> save(covariance_page([panels[:8], panels[8:]]), "covariances.png")
    """

    def draw(ax: Axes, panel: Panel) -> str:
        blocks, borders = _blocks(panel)
        limit, shown = theme.colour_limit(blocks, _SHOWN), averaged(blocks, _factor(panel))
        extent = (0, blocks.shape[1], blocks.shape[0], 0)
        ax.imshow(shown, **theme.colours(limit), interpolation="nearest", aspect="auto", extent=extent)
        for at, width, upright in borders:
            (ax.axvline if upright else ax.axhline)(at, color=theme.INK, lw=width, gid="border")
        return f"±{number(limit)}"

    drawn = [p for row in rows for p in row if p is not None and p.values is not None]
    blocks = "block (i, j): covariance of pixel (i, j) with every pixel" * any(p.shape is not None for p in drawn)
    text = f"each panel has its own colours, zero is white; ± below it holds {100 * _SHOWN:g} % of its values"
    coarse = sorted({f for p in drawn if (f := _factor(p)) > 1})
    cells = f"cells are means over {' or '.join(f'{f} × {f}' for f in coarse)}" if coarse else ""
    across = max((len(row) for row in rows), default=0)
    side = {1: 3.6, 2: 2.4}.get(across, _SIDE)  # larger if there are few: a patch embedding has hundreds of pixels
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [blocks, text, cells, note])), side)


@theme.themed()
def filter_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Filters, layer by layer (thesis, Fig. 2.4-2.6), on colour scales centred at zero.

    The filters of a panel share one scale, which holds 98 % of their weights and is printed below it. Three channels
    are drawn as colours, each filter on its own scale; other numbers of channels are summed. None leaves a gap.

    Example:
        >>> save(filter_page([[Panel(filters[:, None], "layer 0")]]), "filters.png")
    """

    def draw(ax: Axes, panel: Panel) -> str:
        array = np.asarray(panel.values, dtype=np.float64)
        if array.ndim != 4 or 0 in array.shape:
            raise DataError(f"filter page: expected filters (m, c, kh, kw), found {array.shape}")
        array = np.where(np.isfinite(array).all(axis=(1, 2, 3), keepdims=True), array, 0.0)
        colour, across = array.shape[1] == 3, math.ceil(math.sqrt(len(array)))
        peak = np.abs(array).max(axis=(1, 2, 3), keepdims=True)
        array = np.moveaxis(array / np.where(peak > 0, peak, 1), 1, -1) if colour else array.sum(axis=1)
        around = [(1, 1), (1, 1)] + [(0, 0)] * colour
        picture = np.pad(mosaic(array, across, fine=_FINE), around, constant_values=np.nan)
        if colour:
            picture = np.where(np.isnan(picture), 1.0, 0.5 + 0.5 * picture)  # zero is grey, gaps are white
            ax.imshow(picture, interpolation="nearest", aspect="equal")
            return "each on its own scale"
        limit = theme.colour_limit(array, _SHOWN)
        ax.imshow(np.ma.masked_invalid(picture), **theme.colours(limit), interpolation="nearest", aspect="equal")
        return f"±{number(limit)}"

    drawn = [p for row in rows for p in row if p is not None]
    text = "zero is white; ± is the end of a panel's colours and holds 98 % of its weights"
    if any(p.values is not None and np.shape(p.values)[1] == 3 for p in drawn):
        text = "colours are the three channels, grey is zero"
    side = 7.0 if len(drawn) == 1 else 3.2 if max(map(len, rows), default=0) == 2 else _SIDE
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, note])), side)


def _blocks(panel: Panel) -> tuple[np.ndarray, list[tuple[float, float, bool]]]:
    """The matrix in block form, and its borders: position, line width, whether vertical."""
    array = checked_square(np.asarray(panel.values, dtype=np.float64), panel.label)
    if not np.isfinite(array).all():
        raise DataError(f"{panel.label}: expected finite covariances, found others")
    if panel.shape is None:
        return array, []
    c, h, w = panel.shape
    if h == 1:  # in one dimension, block form is the matrix itself
        return array, [(n * w, 1.2, upright) for n in range(1, c) for upright in (False, True)]
    # Covariance of pixels (a, i, j) and (b, l, m): channel block (a, b), block (i, j) within it, entry (l, m).
    blocks = array.reshape(c, h, w, c, h, w).transpose(0, 1, 4, 3, 2, 5).reshape(c * h * h, c * w * w)
    light = 0.6 if max(h, w) <= 9 and c == 1 else 0.25
    borders: list[tuple[float, float, bool]] = [(n * h, 1.4 if n % h == 0 else light, False) for n in range(1, c * h)]
    return blocks, borders + [(n * w, 1.4 if n % w == 0 else light, True) for n in range(1, c * w)]


def _factor(panel: Panel) -> int:
    """Coordinates per cell side; block form is not averaged."""
    return -(-len(panel.values) // _CELLS) if panel.shape is None else 1


def _page(
    rows: Sequence[Sequence[Panel | None]],
    labels: Sequence[str],
    draw: Callable[[Axes, Panel], str],
    title: str | None,
    note: str,
    side: float,
) -> Figure:
    """Square panels with their labels above and the texts of `draw` below."""
    if not any(p is not None for row in rows for p in row):
        raise DataError("expected at least one layer to draw, found none")
    across = max(len(row) for row in rows)
    size, gap = (side, side), (0.48, 0.13)
    figure, axes = panel_figure(len(rows), across, size, gap=gap, labels=labels, note=note, title=title)
    for line, row in zip(axes, rows, strict=True):
        for ax, panel in zip(line, [*row, *[None] * (across - len(row))], strict=True):
            if panel is None:
                ax.set_axis_off()
                continue
            if panel.values is None:
                missing(ax, wrap(panel.reason, 1.2))
            else:
                beside(ax, draw(ax, panel), "below", color=theme.MUTED, gid="limit")
            beside(ax, wrap(panel.label, side + 0.1).split("\n")[0], "above")
    return figure
