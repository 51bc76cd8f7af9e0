"""Panels of one size on a page: matrices such as products of attention weights, attention maps, filters, covariances.

Panels have exact sizes, so that every entry of a matrix is a whole number of pixels, which no layout engine ensures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from weightscope._util.checks import choice, count
from weightscope.errors import DataError, UsageError
from weightscope.plots import theme
from weightscope.plots.covariance import checked_square
from weightscope.plots.theme import LABEL, SMALL, TITLE, inches, number, rounded_up, wrap

_MOST = 260  # pixels: largest panel, at 150 dots per inch
_GAP = 10  # pixels
_FOOT = 0.3  # inches from the panels to the note
_SEQUENTIAL = "magma"
_FLOOR = 0.25  # lower end of the colour scale of attention maps, relative to uniform attention
_QUANTILE = 0.998  # of the weights, where it ends
_TYPICAL = 0.995  # of the entries of a matrix, within the colours of the median one
_Side = Literal["left", "right", "above", "below"]
_Panels = list[list[np.ndarray | None]]


def panel_figure(
    rows: int,
    columns: int,
    size: tuple[float, float],
    *,
    gap: tuple[float, float],
    labels: Sequence[str] = (),
    note: str = "",
    note_left: float = 0.0,
    title: str | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with axes of one size (height, width) and gap in inches, row labels, a title, and a note below.

    `note_left` is the room for a colour bar beside the note.
    """
    if labels and len(labels) != rows:
        raise UsageError(f"row_labels: expected {rows} or none, found {len(labels)}")
    height, width = size
    texts = [wrap(label, 1.6, LABEL) for label in labels]
    left = 0.1 + max((inches(text, LABEL) + 0.12 for text in texts), default=0.0)
    across, down = columns * width + (columns - 1) * gap[1], rows * height + (rows - 1) * gap[0]
    whole = max(left + across + 0.6, left + note_left + 2.0)
    heading = "" if title is None else wrap(title, whole - 0.3, TITLE)
    foot = wrap(note, whole - left - note_left - 0.3)
    top = 0.3 + (heading.count("\n") + 1) * 0.2 * bool(heading)
    bottom = 0.45 + max(2, foot.count("\n") + 1) * 0.15
    left, top, bottom, whole = (round(x * theme.DPI) / theme.DPI for x in (left, top, bottom, whole))
    tall = top + down + bottom
    figure = Figure(figsize=(whole, tall), dpi=theme.DPI, facecolor="white")
    spec = {"left": left / whole, "right": (left + across) / whole, "top": 1 - top / tall, "bottom": bottom / tall}
    spec |= {"wspace": gap[1] / width, "hspace": gap[0] / height}
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=spec, subplot_kw={"xticks": [], "yticks": []})
    for ax in axes.flat:
        ax.spines[:].set(visible=True, linewidth=0.5, color=theme.MUTED)
    for line, text in zip(axes, texts, strict=False):
        beside(line[0], text, "left")
    y = (bottom - _FOOT) / tall
    figure.text((left + note_left) / whole, y, foot, va="top", fontsize=SMALL, color=theme.MUTED)
    if heading:
        figure.suptitle(heading, x=0.1 / whole, y=1 - 0.06 / tall, ha="left", va="top", linespacing=1.25)
    return figure, axes.tolist()


def beside(ax: Axes, text: str, side: _Side, **options: Any) -> None:
    """A text beside a panel of `panel_figure`."""
    box, (width, height) = ax.get_position(), ax.figure.figure.get_size_inches()
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    x, y, ha, va = {
        "left": (box.x0 - 0.07 / width, middle[1], "right", "center"),
        "right": (box.x1 + 0.07 / width, middle[1], "left", "center"),
        "above": (middle[0], box.y1 + 0.04 / height, "center", "bottom"),
        "below": (middle[0], box.y0 - 0.04 / height, "center", "top"),
    }[side]
    ax.figure.figure.text(x, y, text, ha=ha, va=va, **{"fontsize": SMALL, "color": theme.INK, **options})


def missing(ax: Axes, reason: str) -> None:
    """A grey panel with a text."""
    ax.set_facecolor(theme.GREY)
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", fontsize=SMALL)


def _labelled(axes: Sequence[Axes], labels: Sequence[str]) -> None:
    """Labels above panels: every one, or the first of as many as one has room for."""
    if not labels:
        return
    box, width = axes[0].get_position(), axes[0].figure.figure.get_size_inches()[0]
    room = box.width * width + _GAP / theme.DPI
    every = next(n for n in range(1, len(labels) + 1) if n == len(labels) or max(map(inches, labels[::n])) < n * room)
    for ax, label in list(zip(axes, labels, strict=True))[::every]:
        beside(ax, label, "above")


def _bar(ax: Axes, norm: Normalize, cmap: Any, ticks: Mapping[float, str], width: float) -> None:
    """A horizontal colour bar of `width` inches in the lower left corner, below a panel of the first column."""
    figure, place = ax.figure.figure, ax.get_position()
    whole, tall = figure.get_size_inches()
    bar = figure.add_axes((place.x0, place.y0 - (_FOOT + 0.1) / tall, width / whole, 0.09 / tall))
    colours = figure.colorbar(ScalarMappable(norm, cmap), cax=bar, orientation="horizontal")
    colours.set_ticks(list(ticks), labels=list(ticks.values()))
    colours.minorticks_off()
    colours.outline.set_visible(False)
    theme.pin(bar)
    bar.tick_params(length=0, pad=1)


@theme.themed()
def matrix_grid(
    matrices: Any,
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    clip: int | None = 64,
    share: Literal["row", "all"] = "row",
    quantity: str = "value",
    title: str | None = None,
) -> Figure:
    """Matrices in rows and columns, such as Q K^T of every head (down) and layer (across) (thesis, Fig. 3.17 and 3.23).

    `matrices` (R, C, m, n), or R sequences of C matrices and None, are shown up to row and column `clip`. A `"row"`, or
    `"all"`, share one colour scale, centred at zero and printed beside it. It ends at the median over the matrices of
    the 99.5 % quantile of their absolute values, rounded up, so that one outlying layer does not wash out the others.
    Entries are drawn as whole pixels. Matrices that are too large after clipping are averaged over cells of f x f
    entries, which keeps the contrast of a diagonal; a note says so, with the `quantity`. A matrix that is not finite is
    drawn as a grey panel and ignored by the colour scale.

    Example:
        >>> save(matrix_grid(qk, column_labels=[f"layer {i}" for i in range(12)]), "qk.png")
    """
    panels, full = _clipped(matrices, None if clip is None else count("clip", clip))
    rows, columns = len(panels), len(panels[0])
    choice("share", share, ("row", "all"))
    panels, factor, size = _sized(panels, 1500, 24)
    limits = _limits(panels, share)
    note = f"{quantity}; colours hold {100 * _TYPICAL:g} % of a typical matrix{' of the row' if share == 'row' else ''}"
    if clip is not None and clip < max(full):
        note += f"; upper left {min(full[0], clip)} × {min(full[1], clip)} of {full[0]} × {full[1]}"
    note += f"; cells are means over {factor} × {factor}" if factor > 1 else ""
    gap = (_GAP / theme.DPI,) * 2
    figure, axes = panel_figure(rows, columns, size, gap=gap, labels=row_labels, note=note, note_left=1.0, title=title)
    for line, drawn, limit in zip(axes, panels, limits, strict=True):
        for ax, panel in zip(line, drawn, strict=True):
            if panel is None:
                ax.set_axis_off()
            elif np.isfinite(panel).all():
                ax.imshow(panel, **theme.colours(limit), interpolation="nearest", aspect="auto")
            else:
                missing(ax, "not\nfinite")
        beside(line[-1], f"±{number(limit)}" if limit else "", "right", gid="limit")
    _labelled(axes[0], column_labels)
    _bar(axes[-1][0], Normalize(-1, 1), theme.DIVERGING, {-1: "−", 0: "0", 1: "+"}, 0.85)
    return figure


def _clipped(matrices: Any, clip: int | None) -> tuple[_Panels, tuple[int, int]]:
    """Clipped matrices as float64, and the shape before clipping."""
    lines = [[None if m is None else np.asarray(m) for m in line] for line in matrices]
    shapes = {m.shape for line in lines for m in line if m is not None}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 2 or 0 in shape or len({len(line) for line in lines}) != 1:
        found = sorted(shapes) or "none"
        raise DataError(f"matrix grid: expected (R, C, m, n) with one shape of matrices, found {found}")
    return [[None if m is None else m[:clip, :clip].astype(np.float64) for m in line] for line in lines], shape


def _sized(panels: _Panels, page: int, least: int) -> tuple[_Panels, int, tuple[float, float]]:
    """Panels averaged over f x f entries, to `page` pixels in a row and `least` each; f; a panel's size in inches."""
    largest = max(max(p.shape) for line in panels for p in line if p is not None)
    target = min(_MOST, max(least, page // len(panels[0]) - _GAP))
    factor = -(-largest // target)
    panels = [[None if p is None else averaged(p, factor) for p in line] for line in panels]
    shape = next(p.shape for line in panels for p in line if p is not None)
    pixels = max(1, round(target / max(shape)))  # of an entry
    return panels, factor, (shape[0] * pixels / theme.DPI, shape[1] * pixels / theme.DPI)


def averaged(panel: np.ndarray, factor: int) -> np.ndarray:
    """Means over cells of factor x factor entries; smaller cells at the lower and right edges."""
    if factor == 1:
        return panel
    rows, columns = (np.arange(0, n, factor) for n in panel.shape)
    sums = np.add.reduceat(np.add.reduceat(panel, rows, axis=0), columns, axis=1)
    heights, widths = (np.diff(np.append(s, n)) for s, n in zip((rows, columns), panel.shape, strict=True))
    return sums / np.outer(heights, widths)


def _limits(panels: _Panels, share: str) -> list[float]:
    """One colour limit for each row; 0 for a row without a finite matrix."""
    finite = [[np.abs(p) for p in line if p is not None and np.isfinite(p).all()] for line in panels]
    if share == "all":
        finite = [[p for line in finite for p in line]] * len(panels)
    out = []
    for line in finite:
        limit = float(np.median([np.quantile(p, _TYPICAL) for p in line])) if line else 0.0
        out.append(rounded_up(limit or max((float(p.max()) for p in line), default=0.0) or float(bool(line))))
    return out


_HEADS = 8  # of a model, in a grid of products


@theme.themed()
def product_grid(
    corners: Mapping[Any, Any],
    *,
    widths: Sequence[int] = (),
    title: str | None = None,
) -> Figure:
    """Upper left entries of W_Q W_K^T (heads down, layers across) above W_V W_O (layers) (thesis, Fig. 3.17 and 3.23).

    `corners` are named tuples (source, layer, part, head) -> (n, n), where head is None for a whole layer, and
    `widths` d of the whole matrices, for the caption. At most 8 heads are drawn for each source.

    Example:
        >>> save(product_grid(found.corners), "products.png")
    """
    if not corners:
        raise DataError("product grid: expected at least one product, found none")
    sources = list(dict.fromkeys(key.source for key in corners))
    columns = sorted({key.layer for key in corners})
    side = min(min(np.asarray(c).shape) for c in corners.values())
    lines, labels, most = [], [], 0
    for source in sources:
        mine = {(k.layer, k.part, k.head): v for k, v in corners.items() if k.source == source}
        found = {part: sorted({head for _, name, head in mine if name == part}) for part in ("qk", "cb")}
        most = max(most, *map(len, found.values()))
        wanted = [("qk", head) for head in found["qk"][:_HEADS]]
        wanted += [("vo", None), *(("cb", group) for group in found["cb"][:_HEADS])]
        for part, head in wanted:
            panels = [mine.get((layer, part, head)) for layer in columns]
            if any(panel is not None for panel in panels):
                lines.append([None if panel is None else np.asarray(panel)[:side, :side] for panel in panels])
                one = "layer" if head is None else f"{'group' if part == 'cb' else 'head'} {head}"
                labels.append(f"{source} {part.upper()} {one}" if len(sources) > 1 else f"{part.upper()} {one}")
    formulas = {"qk": "W_Q W_K^T (QK)", "vo": "W_V W_O (VO)", "cb": "W_C^T W_B (CB)"}
    shown = {key.part for key in corners}
    quantity = "entries of " + " and ".join(text for part, text in formulas.items() if part in shown)
    if any(width > side for width in widths):
        quantity += f", upper left {side} × {side} of {' or '.join(f'{w} × {w}' for w in widths)}"
    if most > _HEADS:
        quantity += f", first {_HEADS} of {most} heads"
    names = [f"layer {columns[0]}", *map(str, columns[1:])]
    return matrix_grid(lines, row_labels=labels, column_labels=names, clip=None, quantity=quantity, title=title)


@theme.themed()
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

    `maps` (R, C, m, n) are nonnegative; `uniform` is the weight of uniform attention, 1 / number of tokens.

    Example:
        >>> save(attention_grid(maps.transpose(1, 0, 2, 3), uniform=1 / 65), "maps.png")
    """
    if not 0 < uniform <= 1:
        raise UsageError(f"uniform: expected a probability > 0, found {uniform}")
    panels, full = _clipped(maps, None)
    if any(p is None or not (np.isfinite(p).all() and (p >= 0).all()) for line in panels for p in line):
        raise DataError("attention grid: expected probabilities, found negative or non-finite entries")
    panels, factor, size = _sized(panels, 1660, 60)
    entries = np.stack([p for line in panels for p in line if p is not None])
    top = rounded_up(max(2.0, float(np.quantile(entries, _QUANTILE)) / uniform))
    text = "weight in units of uniform attention" + (f"; {note}" if note else "")
    text += f"; cells are means over {factor} × {factor} of {full[0]} × {full[1]}" if factor > 1 else ""
    gap, (rows, columns) = (_GAP / theme.DPI,) * 2, (len(panels), len(panels[0]))
    figure, axes = panel_figure(rows, columns, size, gap=gap, labels=row_labels, note=text, note_left=1.8, title=title)
    norm, cmap = LogNorm(_FLOOR, top), matplotlib.colormaps[_SEQUENTIAL]
    for line, drawn in zip(axes, panels, strict=True):
        for ax, panel in zip(line, drawn, strict=True):
            ax.spines[:].set_visible(False)
            inside = np.clip(np.asarray(panel) / uniform, _FLOOR, None)
            ax.imshow(inside, cmap=cmap, norm=norm, interpolation="nearest", aspect="auto")
    _labelled(axes[0], column_labels)
    _bar(axes[-1][0], norm, cmap, {_FLOOR: f"≤{number(_FLOOR)}", 1.0: "1", top: f"≥{number(top)}"}, 1.4)
    return figure


# --- filters and their covariances ------------------------------------------------------------------------------------

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
