"""Panels of one size on a page: products of attention weights, attention maps, filters and their covariances."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme
from weightscope.plots.covariance import checked_square
from weightscope.plots.theme import LABEL, SMALL, inches, number, rounded_up, wrap

_SMALLEST, _LARGEST, _PAGE = 0.45, 1.7, 10.0  # inches: sides of a panel, and panels in a row
_FLOOR = 0.25  # lower end of the colour scale of attention maps, relative to uniform attention
_QUANTILE = 0.998  # of the weights, where it ends
_TYPICAL = 0.995  # of the entries of a matrix, within the colours of the median one
_Panels = list[list[np.ndarray | None]]


def panel_figure(
    rows: int,
    columns: int,
    size: tuple[float, float],
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    note: str = "",
    title: str | None = None,
) -> tuple[Figure, np.ndarray]:
    """A figure with axes of about one size (height, width) in inches, their labels, a title, and a note below."""
    if row_labels and len(row_labels) != rows:
        raise UsageError(f"row_labels: expected {rows} or none, found {len(row_labels)}")
    height, width = size
    texts = [wrap(label, 1.6, LABEL) for label in row_labels]
    whole = max(columns * (width + 0.07) + max((inches(text, LABEL) for text in texts), default=0.0) + 0.9, 2.6)
    foot = wrap(note, whole - 0.2)
    figure = theme.new_figure(whole, rows * (height + 0.07) + 0.3 + 0.15 * (foot.count("\n") + 1))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.035, h_pad=0.025, wspace=0, hspace=0))
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for ax in axes.flat:
        ax.yaxis.set_visible(ax in axes[:, 0])
        ax.spines[:].set(visible=True, linewidth=0.5, color=theme.MUTED)
    for line, text in zip(axes, texts, strict=False):
        line[0].set_ylabel(text, rotation=0, ha="right", va="center")
    every = math.ceil(max(map(inches, column_labels), default=0.0) / (width + 0.07)) or 1  # labels that have room
    for ax, label in list(zip(axes[0], column_labels, strict=False))[::every]:
        panel_title(ax, label)
    figure.supxlabel(foot, x=0.012, ha="left", fontsize=SMALL, color=theme.MUTED)
    theme.head(figure, title)
    return figure, axes


def panel_title(ax: Axes, text: str) -> None:
    """A label above a panel."""
    ax.set_title(text, loc="center", fontsize=SMALL, fontweight="normal", pad=3)


def missing(ax: Axes, reason: str) -> None:
    """A grey panel with a text."""
    ax.set_facecolor(theme.GREY)
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", fontsize=SMALL)


def _bar(axes: np.ndarray, ticks: Mapping[float, str], **colours: Any) -> None:
    """A colour bar beside a row of panels, or beside all of them."""
    bar = axes.flat[0].figure.figure.colorbar(ScalarMappable(**colours), ax=axes, fraction=0.08, pad=0.01, aspect=12)
    bar.ax.set_box_aspect(12)
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.minorticks_off()
    bar.outline.set_visible(False)
    theme.pin(bar.ax)


@theme.themed()
def matrix_grid(
    matrices: Any,
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    quantity: str = "value",
    title: str | None = None,
) -> Figure:
    """Matrices in rows and columns, such as Q K^T of every head (down) and layer (across) (thesis, Fig. 3.17 and 3.23).

    A row of `matrices` (R, C, m, n), or R sequences of C matrices and None, shares one colour scale, centred at zero.
    It ends at the median over the matrices of the 99.5 % quantile of their absolute values, rounded up, so that one
    outlying layer does not wash out the others. Matrices that are too large are averaged over cells of f x f entries,
    which keeps the contrast of a diagonal; a note says so, with the `quantity`. A matrix that is not finite is drawn as
    a grey panel and ignored by the colour scale.

    Example:
        >>> save(matrix_grid(qk, column_labels=[f"layer {i}" for i in range(12)]), "qk.png")
    """
    panels, factor, size = _sized(_checked(matrices)[0])
    limits = _limits(panels)
    note = f"{quantity}; colours hold {100 * _TYPICAL:g} % of a typical matrix{' of the row' * (len(panels) > 1)}"
    note += f"; cells are means over {factor} × {factor}" if factor > 1 else ""
    labels: dict[str, Any] = {"row_labels": row_labels, "column_labels": column_labels}
    figure, axes = panel_figure(len(panels), len(panels[0]), size, note=note, title=title, **labels)
    for line, drawn, limit in zip(axes, panels, limits, strict=True):
        _draw(line, drawn, **theme.colours(limit))
    for beside, limit in zip(axes, limits, strict=True):
        if limit:
            _bar(beside, {x: number(x) for x in (-limit, 0, limit)}, **theme.colours(limit))
    return figure


def _draw(axes: Sequence[Axes], panels: Sequence[np.ndarray | None], **colours: Any) -> None:
    """A row of matrices; nothing for None, a grey panel for one that is not finite."""
    for ax, panel in zip(axes, panels, strict=True):
        ax.xaxis.set_visible(False)
        if panel is None:
            ax.spines[:].set_visible(False)
        elif np.isfinite(panel).all():
            ax.imshow(panel, **colours)
        else:
            missing(ax, "not\nfinite")


def _checked(matrices: Any, *, same: bool = True) -> tuple[_Panels, tuple[int, int]]:
    """Matrices as float64, of the same shape unless not `same`, and the largest shape."""
    lines = [[None if m is None else np.asarray(m) for m in line] for line in matrices]
    shapes = {m.shape for line in lines for m in line if m is not None}
    shape = max(shapes, default=())
    odd = (same and len(shapes) > 1) or not shapes or any(len(one) != 2 or 0 in one for one in shapes)
    if odd or len({len(line) for line in lines}) != 1:
        found = sorted(shapes) or "none"
        raise DataError(f"matrix grid: expected (R, C, m, n) with one shape of matrices, found {found}")
    return [[None if m is None else m.astype(np.float64) for m in line] for line in lines], shape


def _sized(panels: _Panels) -> tuple[_Panels, int, tuple[float, float]]:
    """Panels averaged over f x f entries, to at least a pixel each; f; and a panel's height and width in inches."""
    side = min(_LARGEST, max(_SMALLEST, _PAGE / len(panels[0])))
    height, width = max((p.shape for line in panels for p in line if p is not None), key=max)
    longest, cells = max(height, width), int(side * theme.DPI)
    panels = [[None if p is None else averaged(p, -(-max(p.shape) // cells)) for p in line] for line in panels]
    return panels, -(-longest // cells), (side * height / longest, side * width / longest)


def averaged(panel: np.ndarray, factor: int) -> np.ndarray:
    """Means over cells of factor x factor entries; smaller cells at the lower and right edges."""
    rows, columns = (np.arange(0, n, factor) for n in panel.shape)
    sums = np.add.reduceat(np.add.reduceat(panel, rows, axis=0), columns, axis=1)
    heights, widths = (np.diff(np.append(s, n)) for s, n in zip((rows, columns), panel.shape, strict=True))
    return sums / np.outer(heights, widths)


def _limits(panels: _Panels) -> list[float]:
    """One colour limit for each row; 0 for a row without a finite matrix."""
    finite = [[np.abs(p) for p in line if p is not None and np.isfinite(p).all()] for line in panels]
    out = []
    for line in finite:
        limit = float(np.median([np.quantile(p, _TYPICAL) for p in line])) if line else 0.0
        out.append(rounded_up(limit or max((float(p.max()) for p in line), default=0.0) or float(bool(line))))
    return out


_HEADS = 8  # of a model, in a grid of products
_PARTS = {"qk": "head", "vo": "layer", "cb": "group"}


def product_grid(corners: Mapping[Any, Any], *, widths: Sequence[int] = (), title: str | None = None) -> Figure:
    """Upper left entries of W_Q W_K^T (heads down, layers across) above W_V W_O (layers) (thesis, Fig. 3.17 and 3.23).

    `corners` are named tuples (source, layer, part, head) -> (n, n), where head is None for a whole layer, and
    `widths` d of the whole matrices, for the caption. At most 8 heads are drawn for each source. Of a single layer, all
    are in one row, each in units of its standard deviation.

    Example:
        >>> save(product_grid(found.corners), "products.png")
    """
    if not corners:
        raise DataError("product grid: expected at least one product, found none")
    layers, side = sorted({key.layer for key in corners}), min(min(corner.shape) for corner in corners.values())
    sources, parts = list(dict.fromkeys(key.source for key in corners)), list(_PARTS)
    lines: dict[str, list[Any]] = {}
    for key in sorted(corners, key=lambda k: (sources.index(k.source), parts.index(k.part), k.head or 0)):
        if (key.head is None) == (key.part == "vo") and (key.head or 0) < _HEADS:
            head = "" if key.head is None else f" {key.head}"
            label = f"{key.source} " * (len(sources) > 1) + f"{key.part.upper()} {_PARTS[key.part]}{head}"
            line = lines.setdefault(label, [None] * len(layers))
            line[layers.index(key.layer)] = corners[key][:side, :side]
    formulas = {"qk": "W_Q W_K^T (QK)", "vo": "W_V W_O (VO)", "cb": "W_C^T W_B (CB)"}
    shown = {key.part for key in corners}
    quantity = "entries of " + " and ".join(text for part, text in formulas.items() if part in shown)
    if any(width > side for width in widths):
        quantity += f", upper left {side} × {side} of {' or '.join(f'{w} × {w}' for w in widths)}"
    most = len({key.head for key in corners} - {None})
    quantity += f", first {_HEADS} of {most} heads" if most > _HEADS else ""
    names = [f"layer {layers[0]}", *map(str, layers[1:])]
    if len(layers) == 1:  # across, where a page has room; scales of heads differ more than those of layers
        across = [[line[0] / (np.std(line[0]) or 1.0) for line in lines.values()]]
        quantity += ", in units of their std"
        return matrix_grid(across, row_labels=names, column_labels=list(lines), quantity=quantity, title=title)
    return matrix_grid(
        list(lines.values()), row_labels=list(lines), column_labels=names, quantity=quantity, title=title
    )


@theme.themed()
def attention_grid(
    maps: Any,
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    corner: int | None = None,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Attention maps in rows (heads or models) and columns (layers), as in thesis Fig. 3.18.

    All panels share one sequential, logarithmic colour scale from a quarter of uniform attention (dark) to the 99.8 %
    quantile of all entries. Maps larger than their panel are averaged over cells of f x f entries, which a note states.

    `maps`, R sequences of C matrices (m, n) or None, are nonnegative and in units of uniform attention, the map times
    the number of tokens; sizes may differ between rows. Below each row its upper left `corner` x `corner` entries are
    drawn again, and framed in it (impulse paper, Fig. 3).

    Example:
        >>> save(attention_grid(65 * maps.transpose(1, 0, 2, 3)), "maps.png")
    """
    panels, full = _checked(maps, same=False)
    every = np.concatenate([panel.ravel() for line in panels for panel in line if panel is not None])
    top = rounded_up(max(2.0, float(np.quantile(every, _QUANTILE))))
    if corner is not None:
        panels = [[p if p is None else p[:end, :end] for p in line] for line in panels for end in (None, corner)]
        row_labels = [text for label in row_labels for text in (label, f"first {corner} tokens")]
    sides = [[0 if panel is None else len(panel) for panel in line] for line in panels]
    panels, factor, size = _sized(panels)
    text = "weight in units of uniform attention" + (f"; {note}" if note else "")
    text += f"; cells are means over {factor} × {factor} of {full[0]} × {full[1]}" if factor > 1 else ""
    labels: dict[str, Any] = {"row_labels": row_labels, "column_labels": column_labels}
    figure, axes = panel_figure(len(panels), len(panels[0]), size, note=text, title=title, **labels)
    colours: dict[str, Any] = {"cmap": matplotlib.colormaps["magma"], "norm": LogNorm(_FLOOR, top)}
    for i, (line, drawn) in enumerate(zip(axes, panels, strict=True)):
        _draw(line, [None if panel is None else np.maximum(panel, _FLOOR) for panel in drawn], **colours)
        for ax, panel, side in zip(line, drawn, sides[i], strict=True):
            if corner is not None and i % 2 == 0 and panel is not None:
                cells = corner * len(panel) / side
                ax.add_patch(Rectangle((-0.5, -0.5), cells, cells, fill=False, ec="red", lw=1.2, gid="corner"))
    _bar(axes, {_FLOOR: f"≤{number(_FLOOR)}", 1.0: "1", top: f"≥{number(top)}"}, **colours)
    return figure


# --- filters and their covariances ------------------------------------------------------------------------------------

_SIDE = 1.62  # inches of a panel; eight in a row are 14 inches wide
_SHOWN = 0.98  # of the values of a panel, within its colours
_FINE = 4  # cells per weight
_MANY = 150  # weights across a panel, above which they have one cell, and the panel more room
_CELLS = 240  # cells across a panel: 1.62 inches at 150 dots per inch


@dataclass(frozen=True)
class Panel:
    """One layer of a page."""

    values: Any  # a covariance (P, P) for `covariance_page`, filters (m, c, kh, kw) for `filter_page`; None if missing
    label: str = ""  # above the panel, such as "layer 3"
    shape: tuple[int, int, int] | None = None  # (channels, kh, kw) of a covariance of filters; None for other matrices
    reason: str = "no values"  # text in an empty panel


def mosaic(filters: np.ndarray, columns: int) -> np.ndarray:
    """Filters (n, k, l[, 3]) row by row, with a cell of NaN around each; a pixel is 4 x 4 cells, of many 1 x 1."""
    fine = 1 if columns * filters.shape[2] > _MANY else _FINE
    n, height, width = len(filters), fine * filters.shape[1] + 1, fine * filters.shape[2] + 1
    out = np.full((-(-n // columns) * height + 1, columns * width + 1, *filters.shape[3:]), np.nan)
    for index, tile in enumerate(filters):
        y, x = (index // columns) * height + 1, (index % columns) * width + 1
        out[y : y + height - 1, x : x + width - 1] = tile.repeat(fine, axis=0).repeat(fine, axis=1)
    return out


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
        ax.imshow(shown, **theme.colours(limit), aspect="auto", extent=(0, blocks.shape[1], blocks.shape[0], 0))
        for at, width, upright in borders:
            (ax.axvline if upright else ax.axhline)(at, color=theme.INK, lw=width, gid="border")
        return f"±{number(limit)}"

    drawn = [p for row in rows for p in row if p is not None and p.values is not None]
    blocks = "block (i, j): covariance of pixel (i, j) with every pixel" * any(p.shape is not None for p in drawn)
    text = f"each panel has its own colours, zero is white; ± below it holds {100 * _SHOWN:g} % of its values"
    coarse = sorted({f for p in drawn if (f := _factor(p)) > 1})
    cells = f"cells are means over {' or '.join(f'{f} × {f}' for f in coarse)}" if coarse else ""
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [blocks, text, cells, note])))


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
        array = np.where(np.isfinite(array).all(axis=(1, 2, 3), keepdims=True), array, 0.0)
        across = math.ceil(math.sqrt(len(array)))
        if array.shape[1] == 3:
            peak = np.abs(array).max(axis=(1, 2, 3), keepdims=True)
            picture = mosaic(np.moveaxis(array / np.where(peak > 0, peak, 1), 1, -1), across)
            ax.imshow(np.where(np.isnan(picture), 1.0, 0.5 + 0.5 * picture))  # zero is grey, gaps are white
            return "each on its own scale"
        limit = theme.colour_limit(array.sum(axis=1), _SHOWN)
        ax.imshow(np.ma.masked_invalid(mosaic(array.sum(axis=1), across)), **theme.colours(limit))
        return f"±{number(limit)}"

    text = f"zero is white; ± is the end of a panel's colours and holds {100 * _SHOWN:g} % of its weights"
    if any(p is not None and p.values is not None and np.shape(p.values)[1] == 3 for row in rows for p in row):
        text = "colours are the three channels, grey is zero"
    shapes = [np.shape(p.values) for row in rows for p in row if p is not None and p.values is not None]
    many = any(math.ceil(math.sqrt(shape[0])) * shape[3] > _MANY for shape in shapes)
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, note])), 7.2 if many else 3.6)


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


@theme.themed()
def _page(
    rows: Sequence[Sequence[Panel | None]],
    labels: Sequence[str],
    draw: Callable[[Axes, Panel], str],
    title: str | None,
    note: str,
    alone: float = 3.6,
) -> Figure:
    """Square panels with their labels above and the texts of `draw` below; a single one has `alone` inches."""
    if not any(p is not None for row in rows for p in row):
        raise DataError("expected at least one layer to draw, found none")
    across = max(len(row) for row in rows)
    side = {1: alone, 2: 2.8}.get(across, _SIDE)  # larger if there are few: a patch embedding has hundreds of pixels
    figure, axes = panel_figure(len(rows), across, (side + 0.35, side), row_labels=labels, note=note, title=title)
    for line, row in zip(axes, rows, strict=True):
        for ax, panel in zip(line, [*row, *[None] * (across - len(row))], strict=True):
            if panel is None:
                ax.set_axis_off()
                continue
            if panel.values is None:
                missing(ax, wrap(panel.reason, 1.2))
            else:
                ax.set_xlabel(draw(ax, panel), fontsize=SMALL, color=theme.MUTED, gid="limit")
            panel_title(ax, wrap(panel.label, side + 0.1).split("\n")[0])
            ax.set_box_aspect(1)
    return figure
