"""Filters of many layers on one page: covariances in block form, the filters themselves, statistics against depth."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from weightscope.errors import DataError, UsageError
from weightscope.plots import _style, _text
from weightscope.plots.covariance import _map
from weightscope.plots.grids import _averaged

_SIDE = 1.62  # inches of a panel; with eight in a row the page is 14 inches wide
_GAP, _OVER, _UNDER = 0.13, 0.22, 0.2  # inches between panels, and for the texts over and under them
_FINE = 4  # cells of a picture for one weight
_CELLS = 240  # cells across a panel: what 1.62 inches show at 150 dots per inch


@dataclass(frozen=True)
class Panel:
    """One layer of a page.

    Attributes:
        values: a covariance (P, P) for `covariance_page`; filters (m, c, kh, kw) for `filter_page`; None if there is
            none to show.
        label: over the panel, such as `"layer 3"`.
        shape: (channels, kh, kw) of the filters a covariance is of; None for a plain matrix.
        reason: what stands in an empty panel.
    """

    values: Any
    label: str = ""
    shape: tuple[int, int, int] | None = None
    reason: str = "no values"


@_style.themed
def covariance_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    quantile: float = 0.98,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Covariances of filters in block form, layer by layer (thesis, Fig. 3.1 and 3.15).

    Block (i, j) of a panel is the k x k map of the covariances of pixel (i, j) with every pixel; channels of a patch
    embedding are ruled off heavily. Each panel has its own colours, centred at zero; under it stands where they end:
    at the `quantile` of its absolute values, rounded up. A plain matrix of more than 240 coordinates is averaged over
    cells.

    Args:
        rows: panels from left to right; None leaves a place empty.
        row_labels: a text for each row, or none.
        quantile: share of a panel's absolute values within its colours.
        note: under the page.
        title: the finding.

    Raises:
        DataError: if a matrix does not fit its shape, is not symmetric, or there is no panel.
        UsageError: if labels do not fit.

    Example:
        >>> panels = [Panel(row.covariance, row.name, (1, *row.kernel)) for row in filter_covariances(path)]
        >>> save(covariance_page([panels[:8], panels[8:]]), "covariances.png")
    """
    if not 0 < quantile <= 1:
        raise UsageError(f"quantile: expected above 0 and at most 1, found {quantile}")
    drawn = [p for row in rows for p in row if p is not None and p.values is not None]

    def draw(ax: Axes, panel: Panel) -> str:
        blocks, borders = _blocks(panel)
        limit = _text.rounded_up(float(np.quantile(np.abs(blocks), quantile)) or float(np.abs(blocks).max()) or 1.0)
        factor = _factor(panel)
        shown = _averaged(blocks, factor) if factor > 1 else blocks
        extent = (0, blocks.shape[1], blocks.shape[0], 0)
        ax.imshow(shown, cmap=_map(), norm=_style.centred(limit), interpolation="nearest", aspect="auto", extent=extent)
        for at, width, upright in borders:
            (ax.axvline if upright else ax.axhline)(at, color=_style.INK, lw=width, gid="border")
        return f"±{_text.number(limit)}"

    text = f"each panel has its own colours, zero is white; ± under it holds {100 * quantile:g} % of its values"
    if any(p.shape is not None for p in drawn):
        text = "block (i, j): covariance of pixel (i, j) with every pixel; " + text
    coarse = sorted({f for p in drawn if (f := _factor(p)) > 1})
    cells = f"cells are means over {' or '.join(f'{f} × {f}' for f in coarse)}" if coarse else ""
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, cells, note])), side=_side(rows))


@_style.themed
def filter_page(
    rows: Sequence[Sequence[Panel | None]],
    *,
    row_labels: Sequence[str] = (),
    columns: int | None = None,
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Filters themselves, layer by layer (thesis, Fig. 2.4-2.6), zero in the middle of the colours.

    The filters of a panel share one scale, which holds 98 % of their weights and stands under it. Three channels
    are drawn as colours, each filter on its own scale; another number of channels is added up.

    Args:
        rows: panels with filters (m, c, kh, kw), from left to right; None leaves a place empty.
        row_labels: a text for each row, or none.
        columns: filters in a row of a panel; about a square unless given.
        note: under the page.
        title: the finding.

    Raises:
        DataError: if filters have another shape, or there is no panel.
        UsageError: if labels do not fit.

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
            mosaic = _tiles(array, across)
            ax.imshow(np.where(np.isnan(mosaic), 1.0, 0.5 + 0.5 * mosaic), interpolation="nearest", aspect="equal")
            return "each on its own scale"
        limit = _text.rounded_up(float(np.quantile(np.abs(array), 0.98)) or float(np.abs(array).max()) or 1.0)
        mosaic = np.ma.masked_invalid(_tiles(array, across))
        colours = matplotlib.colormaps[_style.DIVERGING].with_extremes(bad=_style.GREY)
        ax.imshow(mosaic, cmap=colours, norm=_style.centred(limit), interpolation="nearest", aspect="equal")
        return f"±{_text.number(limit)}"

    text = "zero is white; ± is the end of a panel's colours and holds 98 % of its weights"
    if any(p is not None and p.values is not None and np.shape(p.values)[1] == 3 for row in rows for p in row):
        text = "colours are the three channels, grey is zero"
    side = 7.0 if single else _SIDE
    return _page(rows, row_labels, draw, title, "; ".join(filter(None, [text, note])), side=side)


def _blocks(panel: Panel) -> tuple[np.ndarray, list[tuple[float, float, bool]]]:
    """The matrix in block form, and its borders: where, how heavy, upright."""
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
    if h == 1:  # in one dimension block form is the matrix
        return array, [(n * w, 1.2, upright) for n in range(1, c) for upright in (False, True)]
    # Pixel (a, i, j) with pixel (b, l, m) lies in channel block (a, b), there in block (i, j), there at (l, m).
    blocks = array.reshape(c, h, w, c, h, w).transpose(0, 1, 4, 3, 2, 5).reshape(c * h * h, c * w * w)
    light = 0.6 if max(h, w) <= 9 and c == 1 else 0.25
    borders = [(n * h, 1.4 if n % h == 0 else light, False) for n in range(1, c * h)]
    return blocks, borders + [(n * w, 1.4 if n % w == 0 else light, True) for n in range(1, c * w)]


def _side(rows: Sequence[Sequence[Panel | None]]) -> float:
    """Few panels are larger: a channel of a patch embedding has hundreds of pixels."""
    return {1: 3.6, 2: 2.4}.get(max((len(row) for row in rows), default=0), _SIDE)


def _factor(panel: Panel) -> int:
    """Coordinates across a cell; block form is never averaged."""
    return -(-len(panel.values) // _CELLS) if panel.shape is None else 1


def _tiles(array: np.ndarray, columns: int) -> np.ndarray:
    """Filters (m, k, l[, 3]) side by side, with gaps of a quarter of a pixel as NaN."""
    k, l = array.shape[1:3]  # noqa: E741 - the papers' letter
    across, down = min(columns, len(array)), -(-len(array) // min(columns, len(array)))
    height, width = _FINE * k + 1, _FINE * l + 1
    out = np.full((down * height + 1, across * width + 1, *array.shape[3:]), np.nan)
    for index, tile in enumerate(array):
        y, x = (index // across) * height + 1, (index % across) * width + 1
        out[y : y + height - 1, x : x + width - 1] = tile.repeat(_FINE, axis=0).repeat(_FINE, axis=1)
    return out


def _page(
    rows: Sequence[Sequence[Panel | None]],
    labels: Sequence[str],
    draw: Callable[[Axes, Panel], str],
    title: str | None,
    note: str,
    *,
    side: float = _SIDE,
) -> Figure:
    """Panels of one size with a text over and under each, labels at the left, a title and a note."""
    across = max((len(row) for row in rows), default=0)
    if not any(p is not None for row in rows for p in row):
        raise DataError("expected at least one layer to draw, found none")
    if labels and len(labels) != len(rows):
        raise UsageError(f"row_labels: expected {len(rows)} or none, found {len(labels)}")
    wrapped = [_text.wrap(label, 110, _text.LABEL, bold=True) for label in labels]
    widest = max(
        (_text.text_width(t, _text.LABEL, bold=True) for label in wrapped for t in label.split("\n")), default=0
    )
    left = 0.12 + (widest / 72 + 0.14 if labels else 0)
    width = max(left + across * side + (across - 1) * _GAP + 0.12, 4.2)
    heading = "" if title is None else _text.wrap(title, 72 * (width - 0.24), _text.TITLE, bold=True)
    top = 0.1 + (heading.count("\n") + 1) * 1.3 * _text.TITLE / 72 if heading else 0.06
    cell = side + _OVER + _UNDER
    foot = _text.wrap(note, 72 * (width - left - 0.12))
    bottom = 0.2 + (foot.count("\n") + 1) * 1.35 * _text.SMALL / 72
    height = top + len(rows) * cell + (len(rows) - 1) * 0.06 + bottom
    figure = Figure(figsize=(width, height), dpi=_style.DPI, facecolor="white")
    small = {"fontsize": _text.SMALL, "ha": "center"}
    for i, row in enumerate(rows):
        y = height - top - i * (cell + 0.06) - _OVER - side
        if labels:
            figure.text(
                (left - 0.12) / width,
                (y + side / 2) / height,
                wrapped[i],
                ha="right",
                va="center",
                fontsize=_text.LABEL,
                fontweight="bold",
            )
        for j, panel in enumerate(row):
            if panel is None:
                continue
            x = left + j * (side + _GAP)
            ax = figure.add_axes((x / width, y / height, side / width, side / height))
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(True)
            ax.spines[:].set(linewidth=0.6, color=_style.MUTED)
            under = _drawn(ax, panel, draw)
            middle = (x + side / 2) / width
            label = _text.wrap(panel.label, 72 * (side + 0.1)).split("\n")[0]
            figure.text(middle, (y + side + 0.05) / height, label, va="bottom", **small)
            figure.text(middle, (y - 0.05) / height, under, va="top", color=_style.MUTED, gid="limit", **small)
    figure.text(left / width, 0.08 / height, foot, va="bottom", fontsize=_text.SMALL, color=_style.MUTED)
    if heading:
        figure.suptitle(heading, x=0.12 / width, y=1 - 0.08 / height, ha="left", va="top", linespacing=1.25)
    return figure


def _drawn(ax: Axes, panel: Panel, draw: Callable[[Axes, Panel], str]) -> str:
    if panel.values is not None:
        return draw(ax, panel)
    ax.set_facecolor(_style.GREY)
    text = _text.wrap(panel.reason, 90)
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=_text.SMALL)
    return ""


@dataclass(frozen=True)
class Curve:
    """One network against depth.

    Attributes:
        label: for the legend.
        depth: (L,) places on the horizontal axis.
        values: statistic -> (L,), NaN where there is none.
        errors: statistic -> (L,) standard errors, for those that have them.
        kinds: (L,) what a layer is, such as `"5 × 5"`; each gets a marker. Empty for one kind.
    """

    label: str
    depth: Any
    values: Mapping[str, Any]
    errors: Mapping[str, Any]
    kinds: Sequence[str] = ()


@dataclass(frozen=True)
class Statistic:
    """A panel of `depth_curves`: key in `Curve.values`, its axis' label, what independent entries give, log scale."""

    key: str
    label: str
    even: float | None = None
    log: bool = False


@_style.themed
def depth_curves(
    curves: Sequence[Curve],
    statistics: Sequence[Statistic],
    *,
    axis: str = "layer",
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Statistics of layers against depth, a line for each network, a panel for each statistic.

    Bars are 95 % intervals (1.96 standard errors). A grey line is what independent entries of one variance give.

    Args:
        curves: the networks.
        statistics: the panels, from left to right.
        axis: what depth is measured in.
        note: under the panels.
        title: the finding.

    Raises:
        UsageError: if there is no curve, no statistic, or a curve lacks one.
        DataError: if lengths differ.
    """
    if not curves or not statistics:
        raise UsageError(f"expected curves and statistics, found {len(curves)} and {len(statistics)}")
    kinds = list(dict.fromkeys(kind for curve in curves for kind in curve.kinds))
    figure, (axes,) = _style.subplots(1, len(statistics), width=max(4.4 * len(statistics), 6.0), height=4.0)
    for ax, statistic in zip(axes, statistics, strict=True):
        drawn = [_curve(ax, curve, statistic, i, len(curves), kinds) for i, curve in enumerate(curves)]
        _scale(ax, statistic, drawn)
        ax.set_xlabel(axis)
        if axis == "layer":  # whole numbers only, also when there is one
            ends = [float(end) for curve in curves for end in (min(curve.depth), max(curve.depth))]
            ax.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
        ax.set_title(_text.wrap(statistic.label, 72 * 3.7, _text.LABEL), fontsize=_text.LABEL, fontweight="normal")
        if statistic.even is not None:
            ax.axhline(statistic.even, color=_style.MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1, gid="even")
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=axis == "layer", min_n_ticks=1))
        ax.grid(axis="y")
    handles = [_handle(curve.label, i, None) for i, curve in enumerate(curves)] if len(curves) > 1 else []
    handles += [_handle(kind, None, j) for j, kind in enumerate(kinds)] if len(kinds) > 1 else []
    if any(s.even is not None for s in statistics):
        handles.append(Line2D([], [], color=_style.MUTED, lw=1.0, ls=(0, (4, 2)), label="independent entries"))
    text = _text.wrap(note, 72 * (figure.get_size_inches()[0] - 0.3))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 6), handlelength=2.6, title=text
        )
    elif note:
        figure.supxlabel(text, fontsize=_text.SMALL, color=_style.MUTED, x=0.012, ha="left")
    if title is not None:
        width, height = figure.get_size_inches()
        text = _text.wrap(title, 72 * (width - 0.2), _text.TITLE, bold=True)
        figure.set_size_inches(width, height + (text.count("\n") + 1) * 1.3 * _text.TITLE / 72)
        figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)
    return figure


def _curve(ax: Axes, curve: Curve, statistic: Statistic, index: int, count: int, kinds: Sequence[str]) -> np.ndarray:
    """One line with its markers; returns what was drawn, and the ends of its bars."""
    if statistic.key not in curve.values:
        raise UsageError(f"{curve.label}: no {statistic.key!r}; there are {', '.join(curve.values)}")
    depth, values = (np.asarray(a, dtype=np.float64) for a in (curve.depth, curve.values[statistic.key]))
    if depth.shape != values.shape or depth.ndim != 1 or (curve.kinds and len(curve.kinds) != len(depth)):
        raise DataError(f"{curve.label}: expected {statistic.key} at {depth.shape} depths, found {values.shape}")
    colour = _style.PALETTE[index % len(_style.PALETTE)]
    order = np.argsort(depth, kind="stable")
    ax.plot(depth[order], values[order], color=colour, lw=1.4, ls=_style.LINES[index % len(_style.LINES)], zorder=2)
    errors = curve.errors.get(statistic.key)
    ends = values
    if errors is not None:
        half = 1.96 * np.asarray(errors, dtype=np.float64)
        ax.errorbar(depth, values, yerr=half, fmt="none", ecolor=colour, elinewidth=1.0, zorder=2)
        ends = np.concatenate([values - half, values + half])
    for j, kind in enumerate(kinds or [""]):
        here = np.array([k == kind for k in curve.kinds]) if curve.kinds else np.ones(len(depth), dtype=bool)
        face = colour if j == 0 else "white"
        marker = _style.MARKERS[j % len(_style.MARKERS)]
        ax.plot(depth[here], values[here], marker, color=colour, mfc=face, ms=5, mew=1.2, zorder=3)
    return ends[np.isfinite(ends)]


def _scale(ax: Axes, statistic: Statistic, drawn: Sequence[np.ndarray]) -> None:
    values = np.concatenate([*drawn, [] if statistic.even is None else [statistic.even]])
    positive = values[values > 0]
    if not statistic.log or not positive.size:
        return
    ax.set_yscale("log")
    ax.set_ylim(positive.min() / 1.25, positive.max() * 1.25)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if positive.max() < 200 * positive.min() else (1.0,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text.number(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _handle(label: str, colour: int | None, kind: int | None) -> Line2D:
    shade = _style.INK if colour is None else _style.PALETTE[colour % len(_style.PALETTE)]
    if kind is None:
        return Line2D([], [], color=shade, lw=1.6, ls=_style.LINES[(colour or 0) % len(_style.LINES)], label=label)
    face = shade if kind == 0 else "white"
    return Line2D([], [], color=shade, marker=_style.MARKERS[kind % len(_style.MARKERS)], mfc=face, ls="", label=label)
