"""Statistics of layers against depth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography


@dataclass(frozen=True)
class Curve:
    """One network against depth.

    Attributes:
        label: for the legend.
        depth: (L,) horizontal positions.
        values: statistic -> (L,), NaN where missing.
        errors: statistic -> (L,) standard errors, where known.
        kinds: (L,) kind of each layer, such as `"5 × 5"`, each with its own marker; empty for one kind.
    """

    label: str
    depth: Any
    values: Mapping[str, Any]
    errors: Mapping[str, Any]
    kinds: Sequence[str] = ()


@dataclass(frozen=True)
class Statistic:
    """A panel of `depth_curves`: key in `Curve.values`, label, value for independent entries, logarithmic scale."""

    key: str
    label: str
    even: float | None = None
    log: bool = False


@theme.themed
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
    variance.

    Args:
        curves: the networks.
        statistics: the panels, from left to right.
        axis: label of the horizontal axis.
        note: printed below the panels.
        title: figure title.

    Raises:
        UsageError: if there are no curves or statistics, or a curve lacks a statistic.
        DataError: if lengths differ.
    """
    if not curves or not statistics:
        raise UsageError(f"expected curves and statistics, found {len(curves)} and {len(statistics)}")
    kinds = list(dict.fromkeys(kind for curve in curves for kind in curve.kinds))
    figure, (axes,) = theme.subplots(1, len(statistics), width=max(4.4 * len(statistics), 6.0), height=4.0)
    for ax, statistic in zip(axes, statistics, strict=True):
        drawn = [_curve(ax, curve, statistic, i, len(curves), kinds) for i, curve in enumerate(curves)]
        _scale(ax, statistic, drawn)
        ax.set_xlabel(axis)
        if axis == "layer":  # integer ticks, even for a single layer
            ends = [float(end) for curve in curves for end in (min(curve.depth), max(curve.depth))]
            ax.set_xlim(min(ends) - 0.5, max(ends) + 0.5)
        ax.set_title(
            typography.wrap(statistic.label, 72 * 3.7, typography.LABEL), fontsize=typography.LABEL, fontweight="normal"
        )
        if statistic.even is not None:
            ax.axhline(statistic.even, color=theme.MUTED, lw=1.0, ls=(0, (4, 2)), zorder=1, gid="even")
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=axis == "layer", min_n_ticks=1))
        ax.grid(axis="y")
    handles = [_handle(curve.label, i, None) for i, curve in enumerate(curves)] if len(curves) > 1 else []
    handles += [_handle(kind, None, j) for j, kind in enumerate(kinds)] if len(kinds) > 1 else []
    if any(s.even is not None for s in statistics):
        handles.append(Line2D([], [], color=theme.MUTED, lw=1.0, ls=(0, (4, 2)), label="independent entries"))
    text = typography.wrap(note, 72 * (figure.get_size_inches()[0] - 0.3))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 6), handlelength=2.6, title=text
        )
    elif note:
        figure.supxlabel(text, fontsize=typography.SMALL, color=theme.MUTED, x=0.012, ha="left")
    if title is not None:
        width, height = figure.get_size_inches()
        text = typography.wrap(title, 72 * (width - 0.2), typography.TITLE, bold=True)
        figure.set_size_inches(width, height + (text.count("\n") + 1) * 1.3 * typography.TITLE / 72)
        figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)
    return figure


def _curve(ax: Axes, curve: Curve, statistic: Statistic, index: int, count: int, kinds: Sequence[str]) -> np.ndarray:
    """Draw one line with its markers; returns the finite values, or the ends of their bars."""
    if statistic.key not in curve.values:
        raise UsageError(f"{curve.label}: no {statistic.key!r}; there are {', '.join(curve.values)}")
    depth, values = (np.asarray(a, dtype=np.float64) for a in (curve.depth, curve.values[statistic.key]))
    if depth.shape != values.shape or depth.ndim != 1 or (curve.kinds and len(curve.kinds) != len(depth)):
        raise DataError(f"{curve.label}: expected {statistic.key} at {depth.shape} depths, found {values.shape}")
    colour = theme.PALETTE[index % len(theme.PALETTE)]
    order = np.argsort(depth, kind="stable")
    ax.plot(depth[order], values[order], color=colour, lw=1.4, ls=theme.LINES[index % len(theme.LINES)], zorder=2)
    errors = curve.errors.get(statistic.key)
    ends = values
    if errors is not None:
        half = 1.96 * np.asarray(errors, dtype=np.float64)
        ax.errorbar(depth, values, yerr=half, fmt="none", ecolor=colour, elinewidth=1.0, zorder=2)
        ends = np.concatenate([values - half, values + half])
    for j, kind in enumerate(kinds or [""]):
        here = np.array([k == kind for k in curve.kinds]) if curve.kinds else np.ones(len(depth), dtype=bool)
        face = colour if j == 0 else "white"
        marker = theme.MARKERS[j % len(theme.MARKERS)]
        ax.plot(depth[here], values[here], marker, color=colour, mfc=face, ms=5, mew=1.2, zorder=3)
    return ends[np.isfinite(ends)]


def _scale(ax: Axes, statistic: Statistic, drawn: Sequence[np.ndarray]) -> None:
    values = np.concatenate([*drawn, [] if statistic.even is None else [statistic.even]])
    positive = values[values > 0]
    if not statistic.log or not positive.size:
        return
    ax.set_yscale("log")
    ax.set_ylim(positive.min() / 1.25, positive.max() * 1.25)
    spread = positive.max() / positive.min()
    logarithmic = LogLocator(subs=(1.0, 2.0, 5.0) if spread < 200 else (1.0,))
    ax.yaxis.set_major_locator(MaxNLocator(4) if spread < 5 else logarithmic)  # 1, 2 and 5 may leave one tick or none
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: typography.number(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _handle(label: str, colour: int | None, kind: int | None) -> Line2D:
    shade = theme.INK if colour is None else theme.PALETTE[colour % len(theme.PALETTE)]
    if kind is None:
        return Line2D([], [], color=shade, lw=1.6, ls=theme.LINES[(colour or 0) % len(theme.LINES)], label=label)
    face = shade if kind == 0 else "white"
    return Line2D([], [], color=shade, marker=theme.MARKERS[kind % len(theme.MARKERS)], mfc=face, ls="", label=label)
