"""Statistics of layers against depth: of filters, of attention products, and stable ranks of the inputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from weightscope.errors import UsageError
from weightscope.plots import theme
from weightscope.plots.theme import LABEL, SMALL, number, wrap

_PARTS = {"qk": "W_Q W_K^T, heads", "vo": "W_V W_O, layers", "cb": "W_C^T W_B, groups"}
_APART = 8.0  # ratio of the sources' magnitudes beyond which an axis is logarithmic


@dataclass(frozen=True)
class Curve:
    """One network against depth."""

    label: str
    depth: Any  # (L,) horizontal positions
    values: dict[str, Any]  # statistic -> (L,), NaN where missing
    errors: dict[str, Any]  # statistic -> (L,) standard errors, where known
    kinds: Sequence[str] = ()  # (L,) kind of each layer, such as "5 × 5", each with its own marker; empty for one kind


@dataclass(frozen=True)
class Statistic:
    """A panel of `depth_curves`: key in `Curve.values`, label, value for independent entries, scale."""

    key: str
    label: str
    even: float | None = None
    log: bool = False  # logarithmic
    linear: float | None = None  # the size up to which a scale is linear, and logarithmic beyond


@theme.themed()
def depth_curves(
    curves: Sequence[Curve],
    statistics: Sequence[Statistic],
    *,
    axis: str = "layer",
    note: str = "",
    title: str | None = None,
) -> Figure:
    """Statistics of layers against depth, a line for each network, a panel for each statistic.

    Bars are 95 % intervals (1.96 standard errors). A grey line marks the value for independent entries of equal
    variance. `axis` is the label of the horizontal axis.
    """
    if not curves or not statistics:
        raise UsageError("depth: expected at least one network and one statistic to draw, found none")
    kinds = list(dict.fromkeys(kind for curve in curves for kind in curve.kinds))
    across = len(statistics) if len(statistics) <= 3 else 2
    down = -(-len(statistics) // across)
    figure, grid = theme.subplots(down, across, width=max(4.4 * across, 6.0), height=0.7 + 3.3 * down)
    even: dict[str, Any] = {"color": theme.MUTED, "lw": 1.0, "ls": (0, (4, 2))}
    for ax, statistic in zip(chain(*grid), statistics, strict=False):
        drawn = np.concatenate([_curve(ax, curve, statistic, i, kinds) for i, curve in enumerate(curves)])
        if statistic.even is not None:
            ax.axhline(statistic.even, zorder=1, gid="even", **even)
            drawn = np.append(drawn, statistic.even)
        if statistic.log and (drawn > 0).any():
            low, high = float(drawn[drawn > 0].min()), float(drawn.max())
            ax.set_yscale("log")
            ax.set_ylim(low / 1.25, high * 1.25)
            theme.log_ticks(ax.yaxis, low, high)
        if statistic.linear is not None:
            ax.set_yscale("symlog", linthresh=statistic.linear)
            ax.margins(y=0.08)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(axis)
        ax.set_title(wrap(statistic.label, 3.7, LABEL), fontsize=LABEL, fontweight="normal")
        steps = FixedLocator([0, 0.25, 0.5, 0.75, 1]) if "depth" in axis else None  # of relative depth
        ax.xaxis.set_major_locator(steps or MaxNLocator(8, integer=axis in ("layer", "block"), min_n_ticks=1))
        ax.grid(axis="y")
    several = curves if len(curves) > 1 else ()
    handles = [Line2D([], [], label=each.label, **theme.style(i, marker=None)) for i, each in enumerate(several)]
    handles += [Line2D([], [], label=kind, **_kind(j, theme.INK)) for j, kind in enumerate(kinds) if len(kinds) > 1]
    if any(s.even is not None for s in statistics):
        handles.append(Line2D([], [], label="independent entries", **even))
    width = figure.get_size_inches()[0] - 0.3
    if handles:
        columns = theme.legend_columns(handles, width)
        figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6, title=wrap(note, width)
        )
    elif note:
        figure.supxlabel(wrap(note, width), fontsize=SMALL, color=theme.MUTED, x=0.012, ha="left")
    theme.head(figure, title)
    return figure


def _kind(index: int, colour: str) -> dict[str, Any]:
    """The markers of a kind of layers: those of the first are filled."""
    return theme.style(index, color=colour, mfc="white" if index else colour, ls="")


def _curve(ax: Axes, curve: Curve, statistic: Statistic, index: int, kinds: Sequence[str]) -> np.ndarray:
    """Draw one line with its markers; returns the finite values, or the ends of their bars."""
    depth, values = (np.asarray(a, dtype=np.float64) for a in (curve.depth, curve.values[statistic.key]))
    style, order = theme.style(index, marker=None), np.argsort(depth, kind="stable")
    ax.plot(depth[order], values[order], zorder=2, gid="mean", **style)
    half = 1.96 * np.asarray(curve.errors.get(statistic.key, np.zeros(len(values))), dtype=np.float64)
    if half.any():
        ax.errorbar(depth, values, yerr=half, fmt="none", ecolor=style["color"], elinewidth=1.0, zorder=2)
    for j, kind in enumerate(kinds or [""]):
        here = np.array([not curve.kinds or curve.kinds[i] == kind for i in range(len(depth))])
        ax.plot(depth[here], values[here], ms=5, zorder=3, **_kind(j, style["color"]))
    ends = np.concatenate([values - half, values + half])
    return ends[np.isfinite(ends)]


def products_by_depth(rows: Sequence[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Alpha and beta of M ~ alpha Z + beta I against depth, for queries and keys and for values and outputs.

    Lines connect the layers' means over heads, with 95 % intervals over these. Sources with different numbers of layers
    are drawn against relative depth. A layer without finite values leaves a gap. Where the magnitudes of sources differ
    by more than a factor of 8, the axis is logarithmic (for beta: linear between the first ticks on either side of
    zero). Rows have `source`, `part`, `layer`, `head` (None for whole layers), `alpha`, `beta`.

    Example:
        >>> save(products_by_depth(found.rows), "depth.png")
    """
    import pandas as pd

    frame = pd.DataFrame([dict(row) for row in rows], columns=["source", "part", "layer", "head", "alpha", "beta"])
    drawn = frame[frame["head"].isna() == (frame["part"] == "vo")].astype({"alpha": float, "beta": float})
    means, errors = (drawn.groupby(["source", "part", "layer"])[["alpha", "beta"]].agg(how) for how in ("mean", "sem"))
    layers = {str(source): sorted(set(found)) for source, found in frame.groupby("source", sort=False)["layer"]}
    same = len({len(found) for found in layers.values()}) == 1
    curves = [Curve(s, found if same else np.linspace(0, 1, len(found)), {}, {}) for s, found in layers.items()]
    statistics = []
    for part, quantity in product((p for p in _PARTS if p in set(frame["part"])), ("beta", "alpha")):
        key, sizes = f"{quantity} of {_PARTS[part]}", []
        for curve in curves:
            places = pd.MultiIndex.from_product([[curve.label], [part], layers[curve.label]])
            curve.values[key] = means[quantity].reindex(places).to_numpy()
            curve.errors[key] = errors[quantity].reindex(places).fillna(0.0).to_numpy()
            if np.isfinite(curve.values[key]).any():
                sizes.append(float(np.nanmedian(np.abs(curve.values[key]))))
        apart = len(sizes) > 1 and min(sizes) > 0 and max(sizes) > _APART * min(sizes)
        even = linear = None
        if quantity == "beta":
            even, linear = 0.0, 10.0 ** math.floor(math.log10(min(sizes))) if apart else None
        statistics.append(Statistic(key, key, even, log=apart and quantity == "alpha", linear=linear))
    axis = "layer" if same else "depth (first layer 0, last layer 1)"
    return depth_curves(curves, statistics, axis=axis, title=title)


@theme.themed()
def rank_condition(
    ranks: Sequence[Any],
    width: int,
    ax: Axes | None = None,
    *,
    filter_sizes: Sequence[int] = (3, 5, 7),
    title: str | None = None,
) -> Axes:
    """Stable ranks k of layers' inputs against depth, with the bounds k <= D / f^2 (impulse paper, Eq. 3).

    Points are means over images, bars the central 90 % of the images. A layer above the line of f fails the condition
    for f; one below it may fail too, as the stable rank is at most the rank. `ranks` are (B,) stable ranks for each
    layer, `width` is D.

    Example:
        >>> rank_condition([layer.stable_ranks for layer in found.layers], 384)
    """
    values, x = [np.asarray(r, dtype=np.float64) for r in ranks], range(len(ranks))
    canvas, ax = theme.canvas(ax, 6.4, 3.6)
    low, high = ([float(np.quantile(v, q)) for v in values] for q in (0.05, 0.95))
    ax.vlines(x, low, high, color=theme.PALETTE[0], linewidth=1.4)
    ax.plot(x, [v.mean() for v in values], **theme.style(0))
    bounds = {f: width / f**2 for f in filter_sizes}
    ax.set_yscale("log")
    ax.set_ylim(0.7 * min([*low, *bounds.values()]), 1.4 * max([*high, *bounds.values()]))
    for f, bound in bounds.items():
        ax.axhline(bound, color=theme.MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        theme.outside(ax, 1, bound, f"D/{f}² = {number(bound)}", 4, color=theme.MUTED)
    theme.log_ticks(ax.yaxis, *ax.get_ylim())
    ax.set_xticks(x)
    ax.set_xlabel("layer")
    ax.set_ylabel("stable rank k of the input")
    return canvas.finish(title)
