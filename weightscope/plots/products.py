"""Products of attention weights: corners of the matrices, and their statistics against depth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from weightscope.errors import DataError
from weightscope.plots import theme, typography
from weightscope.plots.grids import matrix_grid

_PARTS = ("qk", "vo", "cb")
_APART = 8.0  # ratio of the sources' magnitudes beyond which an axis is logarithmic
_NAMES = {"qk": "W_Q W_K^T, heads", "vo": "W_V W_O, layers", "cb": "W_C^T W_B, groups"}


@theme.themed
def product_grid(
    corners: Mapping[Any, Any],
    *,
    widths: Sequence[int] = (),
    heads: int = 8,
    values: str = "layers",
    title: str | None = None,
) -> Figure:
    """Upper left entries of W_Q W_K^T (heads down, layers across) above W_V W_O (layers) (thesis, Fig. 3.17 and 3.23).

    Each row has its own colour scale, centred at zero and printed beside it.

    Args:
        corners: named tuples (source, layer, part, head, kind) -> (n, n); head is None for a whole layer.
        widths: d of the whole matrices, for the caption.
        heads: maximum number of heads drawn for each source.
        values: W_V W_O of whole "layers", of "heads" (a row each), or "both".
        title: figure title.

    Raises:
        DataError: if there are no products.

    Example:
        >>> save(product_grid(found.corners, heads=3), "products.png")
    """
    if not corners:
        raise DataError("product grid: expected at least one product, found none")
    sources = list(dict.fromkeys(key.source for key in corners))
    columns = sorted({(key.layer, key.kind != "self") for key in corners})
    side = min(min(np.asarray(c).shape) for c in corners.values())
    lines, labels, most = [], [], 0
    for source in sources:
        mine = {(k.layer, k.kind != "self", k.part, k.head): v for k, v in corners.items() if k.source == source}
        there = sorted({head for *_, part, head in mine if part == "qk" and head is not None})
        most = max(most, len(there))
        prefix = f"{source} " if len(sources) > 1 else ""
        whole = [] if values == "heads" else [("vo", None)]
        single = [("vo", head) for head in there[:heads] if values != "layers"]
        groups = sorted({head for *_, part, head in mine if part == "cb" and head is not None})
        most = max(most, len(groups))
        scans = [("cb", group) for group in groups[:heads]]
        for part, head in [*(("qk", head) for head in there[:heads]), *single, *whole, *scans]:
            found = [mine.get((*column, part, head)) for column in columns]
            if any(panel is not None for panel in found):
                lines.append([None if panel is None else np.asarray(panel)[:side, :side] for panel in found])
                one = "layer" if head is None else f"{'group' if part == 'cb' else 'head'} {head}"
                labels.append(f"{prefix}{part.upper()} {one}")
    formulas = {"qk": "W_Q W_K^T (QK)", "vo": "W_V W_O (VO)", "cb": "W_C^T W_B (CB)"}
    shown = {key.part for key in corners}
    quantity = "entries of " + " and ".join(text for part, text in formulas.items() if part in shown)
    if any(width > side for width in widths):
        quantity += f", upper left {side} × {side} of {' or '.join(f'{w} × {w}' for w in widths)}"
    if most > heads:
        quantity += f", first {heads} of {most} heads"
    names = [f"{layer}{' cross' if cross else ''}" for layer, cross in columns]
    names[0] = f"layer {names[0]}"
    return matrix_grid(lines, row_labels=labels, column_labels=names, clip=None, quantity=quantity, title=title)


@theme.themed
def products_by_depth(rows: Sequence[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Alpha and beta of M ~ alpha Z + beta I against depth, for queries and keys and for values and outputs.

    Lines connect the layers' means over heads; small points are single heads. Sources with different numbers of layers
    are drawn against relative depth. A layer without finite values leaves a gap. Where the magnitudes of sources differ
    by more than a factor of 8, the axis is logarithmic (for beta: linear between the first ticks on either side of
    zero).

    Args:
        rows: with `source`, `part`, `layer`, `head` (None for whole layers), `alpha`, `beta`.
        title: figure title.

    Raises:
        DataError: if there are no rows.

    Example:
        >>> save(products_by_depth(found.rows), "depth.png")
    """
    if not rows:
        raise DataError("products by depth: expected rows, found none")
    sources = list(dict.fromkeys(row["source"] for row in rows))
    parts = [part for part in _PARTS if any(row["part"] == part for row in rows)]
    panels = [(part, quantity) for part in parts for quantity in ("beta", "alpha")]
    figure, grid = theme.subplots(len(parts), 2, width=10.5, height=3.3 * len(parts), title=title)
    same = len({len({row["layer"] for row in rows if row["source"] == source}) for source in sources}) == 1
    for ax, (part, quantity) in zip([ax for line in grid for ax in line], panels, strict=True):
        for i, source in enumerate(sources):
            found = [r for r in rows if (r["source"], r["part"]) == (source, part)]
            found = [r for r in found if (r["head"] is None) == (part == "vo")]
            _curve(ax, found, quantity, i, relative=not same)
        if quantity == "beta":
            ax.axhline(0, color=theme.MUTED, lw=0.8, zorder=1)
        _scale(ax, quantity)
        ax.grid(axis="y")
        ax.set_title(f"{quantity} of {_NAMES[part]}")
        ax.set_xlabel("layer" if same else "depth (first layer 0, last layer 1)")
        if same:
            ax.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    handles = [
        Line2D([], [], color=_colour(i), ls=_line(i), marker=theme.MARKERS[i % len(theme.MARKERS)], label=source)
        for i, source in enumerate(sources)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def _curve(ax: Axes, rows: Sequence[Mapping[str, Any]], quantity: str, index: int, *, relative: bool) -> None:
    """Draw one source: a point for each row, a line through the layers' means."""
    if not rows:
        return
    layers = sorted({row["layer"] for row in rows})
    last = max(1, len(layers) - 1)
    places = {layer: i / last if relative else layer for i, layer in enumerate(layers)}
    values = {layer: [r[quantity] for r in rows if r["layer"] == layer and r[quantity] is not None] for layer in layers}
    means = [np.mean(v) if v else np.nan for v in values.values()]
    style: dict[str, Any] = {"color": _colour(index), "marker": theme.MARKERS[index % len(theme.MARKERS)]}
    if any(len(v) > 1 for v in values.values()):
        points = np.array([(places[layer], value) for layer, v in values.items() for value in v])
        ax.plot(*points.T, ls="", alpha=0.28, ms=2.6, mew=0, zorder=2, gid="heads", **style)
    ax.plot([places[layer] for layer in layers], means, ls=_line(index), zorder=3, gid="mean", **style)


def _scale(ax: Axes, quantity: str) -> None:
    """Use a logarithmic axis where the sources differ too much for a linear one."""
    sizes = [np.abs(np.asarray(line.get_ydata(), dtype=float)) for line in ax.lines if line.get_gid() == "mean"]
    sizes = [float(np.nanmedian(size)) for size in sizes if np.isfinite(size).any()]
    if len(sizes) > 1 and min(sizes) > 0 and max(sizes) > _APART * min(sizes):
        if quantity == "alpha":
            ax.set_yscale("log")
        else:
            exponent = math.floor(math.log10(min(sizes)))
            ax.set_yscale("symlog", linthresh=10.0**exponent)
            largest = np.nanmax([np.nanmax(np.abs(line.get_ydata())) for line in ax.lines if line.get_gid() == "mean"])
            powers = [10.0**e for e in range(exponent, math.ceil(math.log10(largest)) + 1)]
            ax.set_yticks([*(-p for p in reversed(powers)), 0, *powers])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: typography.number(value)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif quantity == "alpha":
        ax.set_ylim(bottom=0)


def _colour(index: int) -> str:
    return theme.PALETTE[index % len(theme.PALETTE)]


def _line(index: int) -> Any:
    return theme.LINES[index % len(theme.LINES)]
