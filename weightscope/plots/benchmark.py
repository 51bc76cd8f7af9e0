"""Comparisons of initialisers: a metric against training length and against the gain of correlations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.plots import theme, typography
from weightscope.plots.arms import (
    Style,
    draw_line,
    ends,
    handle,
    p_value,
    row_height,
    seeds_note,
    styles_of,
    value_axis,
)


@theme.themed
def convergence(
    summary: Sequence[Mapping[str, Any]],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """The test metric against training length with paired 95 % intervals, one line for each initialiser.

    Every point is a full schedule of its length, so the ticks are the lengths that were run; the axis is
    logarithmic (base 2) if they span a factor of 4. With a single length the initialisers are rows, with the
    difference from the first. The interval around a mean is that of the paired difference from the first initialiser,
    which has none itself; a single initialiser has that of its mean. No interval leaves the metric's bounds.

    Args:
        summary: rows of a benchmark's `results.json`: `init`, `epochs`, `n`, `mean` and `ci95` (fractions for
            accuracies), `difference` and `p` (None for the reference).
        ax: axes to draw on; a new figure if None.
        metric: that is drawn.
        title: figure title.

    Raises:
        UsageError: if there are no rows, or a pair of initialiser and length is duplicated.
        DataError: if a mean is outside the metric's bounds.

    Example:
        >>> save(convergence(json.load(open("results.json"))["summary"]), "convergence.png")
    """
    rows = _checked(summary, metric)
    inits = list(dict.fromkeys(row["init"] for row in rows))
    lengths = sorted({row["epochs"] for row in rows})
    styles = styles_of(inits)
    if len(lengths) == 1:
        return _single_length(rows, styles, ax, metric, title)
    canvas = theme.Canvas.on(ax, 6.8, 4.4)
    ax = canvas.ax
    for order, init in enumerate(inits):
        mine = sorted((row for row in rows if row["init"] == init), key=lambda row: row["epochs"])
        _line(ax, init, styles[init], (mine, *ends(mine, rows, metric)), order)
    if lengths[-1] >= 4 * lengths[0]:
        ax.set_xscale("log", base=2)
        margin = (lengths[-1] / lengths[0]) ** 0.05
        ax.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    shown = _without_collisions(lengths, ax, 72 * 0.75 * canvas.size[0])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in shown else ""))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="both")
    value_axis(ax.yaxis, ax.get_ylim(), metric)
    ax.set_xlabel("training length (epochs" + (", log scale)" if ax.get_xscale() == "log" else ")"))
    ax.set_ylabel(metric.title + metric.direction)
    room = 72 * 0.8 * canvas.size[0] - 44
    handles = [handle(style, typography.wrap(init, room)) for init, style in styles.items()]
    canvas.legend(handles, seeds_note(rows))
    canvas.finish(title)
    return ax


@theme.themed
def gain_curve(
    curve: Sequence[Mapping[str, Any]],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """The metric of candidate gains relative to the smallest, with standard errors of the paired differences.

    Candidates stand at equal distances; the chosen one is marked.

    Args:
        curve: rows with `gain`, `difference` and `difference_se` (fractions for accuracies; None is not drawn), `n` and
            `chosen`.
        ax: axes to draw on; a new figure if None.
        metric: that is drawn.
        title: figure title.

    Raises:
        UsageError: unless exactly one row is chosen.

    Example:
        >>> gain_curve(choose_gain("digits.pop").rows())
    """
    rows = list(curve)
    if sum(bool(row["chosen"]) for row in rows) != 1:
        raise UsageError(f"gain curve: expected one chosen gain, found {sum(bool(row['chosen']) for row in rows)}")
    canvas = theme.Canvas.on(ax, 5.6, 3.8)
    ax = canvas.ax
    columns = [[row[key] for row in rows] for key in ("difference", "difference_se")]
    y, error = (metric.factor * np.array(column, dtype=float) for column in columns)  # None is NaN
    places = np.arange(len(rows))
    line: dict[str, Any] = {"color": theme.PALETTE[0], "marker": "o", "ms": 5.5, "lw": 1.5, "capsize": 2.5}
    ax.errorbar(places, y, yerr=error, mfc="white", mew=1.2, elinewidth=1.1, zorder=3, **line)
    at = next(i for i, row in enumerate(rows) if row["chosen"])
    ax.plot([at], [y[at]], "D", ms=8, color=theme.INK, mfc=theme.PALETTE[0], zorder=4, gid="chosen")
    ax.axhline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    ax.set_xticks(places, [f"{row['gain']:g}" for row in rows])
    ax.grid(axis="y")
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    ax.set_xlabel("gain of the correlations")
    unit = f"({metric.difference_unit})" if metric.difference_unit else ""
    ax.set_ylabel(f"{metric.label} minus that at gain {rows[0]['gain']:g}\n{unit}{metric.direction}".strip("\n; "))
    handles = [
        Line2D(
            [], [], color=line["color"], marker="o", mfc="white", mew=1.2, label=f"{rows[0]['n']} paired seeds, ± SE"
        ),
        Line2D([], [], color=theme.INK, marker="D", mfc=line["color"], ls="none", label="chosen"),
    ]
    canvas.legend(handles)
    canvas.finish(title)
    return ax


def _checked(summary: Sequence[Mapping[str, Any]], metric: Metric) -> list[Mapping[str, Any]]:
    rows = list(summary)
    if not rows or len({(row["init"], row["epochs"]) for row in rows}) < len(rows):
        raise UsageError("convergence: expected rows that differ in init or epochs, found none or a repeated one")
    for row in rows:
        metric.check([row["mean"]], f"`{row['init']}` after {row['epochs']} epochs, mean")
    return rows


def _line(ax: Axes, init: str, style: Style, drawn: tuple[Any, np.ndarray, np.ndarray], order: int) -> None:
    """One initialiser: its rows and the lower and upper ends of their intervals."""
    rows, low, high = drawn
    epochs = np.array([row["epochs"] for row in rows], dtype=float)
    mean = np.array([row["mean"] for row in rows])
    ax.fill_between(epochs, low, high, color=style.colour, alpha=0.15, lw=0, zorder=2 + 0.01 * order, gid="band")
    draw_line(ax, epochs, mean, (low, high), style, label=init, zorder=3 + 0.01 * order)


def _without_collisions(lengths: Sequence[float], ax: Axes, points: float) -> set[float]:
    """The lengths whose labels do not overlap, the first and the last included."""
    place = np.log2 if ax.get_xscale() == "log" else np.asarray
    low, high = place(np.array(ax.get_xlim()))
    at = {length: (float(place(np.float64(length))) - low) / (high - low) * points for length in lengths}
    shown = [lengths[0]]
    for length in lengths[1:]:
        width = typography.text_width(f"{length:g}") + 5
        fits_last = length == lengths[-1] or at[lengths[-1]] - at[length] >= width
        if at[length] - at[shown[-1]] >= width and fits_last:
            shown.append(length)
    return {*shown, lengths[-1]}


def _single_length(
    rows: Sequence[Mapping[str, Any]],
    styles: Mapping[str, Style],
    ax: Axes | None,
    metric: Metric,
    title: str | None,
) -> Axes:
    """Initialisers as rows: the mean with its interval, and the difference from the first as text."""
    names = [typography.wrap(row["init"], 165) for row in rows]
    canvas = theme.Canvas.on(ax, 7.4, 1.0 + row_height(names) * (len(rows) + 0.75))
    ax = canvas.ax
    low, high = ends(rows, rows, metric)
    for y, row in enumerate(rows):
        style = styles[row["init"]]
        bar: dict[str, Any] = {"color": style.colour, "marker": style.marker, "mfc": style.face, "label": row["init"]}
        error = [[row["mean"] - low[y]], [high[y] - row["mean"]]]
        ax.errorbar([row["mean"]], [y], xerr=error, ms=6.5, mew=1.2, capsize=3, lw=1.5, **bar)
        if row.get("difference") is None and len(rows) > 1:
            ax.axvline(row["mean"], color=style.colour, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    theme.list_axis(ax, range(len(rows)), names, len(rows))
    means = [f"{metric.factor * row['mean']:.{metric.decimals - 1}f}" for row in rows]
    words = [_difference(row, metric) for row in rows]
    heads = [("mean", means)] + ([("difference", words)] if len(rows) > 1 else [])
    theme.columns(ax, range(len(rows)), -0.8, heads)
    value_axis(ax.xaxis, ax.get_xlim(), metric)
    epochs = rows[0]["epochs"]
    label = f"{metric.title} after {epochs:g} epoch{'s' * (epochs != 1)}{metric.direction}; {seeds_note(rows)}"
    ax.set_xlabel(typography.wrap(label, 72 * 0.6 * canvas.size[0], typography.LABEL))
    canvas.finish(title)
    return ax


def _difference(row: Mapping[str, Any], metric: Metric) -> str:
    if row.get("difference") is None:
        return "reference"
    interval = row.get("difference_ci95")
    width = metric.factor * (interval[1] - interval[0]) if interval else 0.0
    text = typography.signed(metric.factor * row["difference"], typography.places(width))
    p = row["p_holm"] if row.get("p_holm") is not None else row.get("p")
    return text if p is None else f"{text}, {p_value(p)}"
