"""Initialisers, structures and populations compared: lines over what varies, and rows of points with intervals.

Functions take the rows of a benchmark's `results.json`. A frozen arm looks like the other one of its initialiser, with
open markers and a dotted line.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from weightscope._util.arms import (
    CI,
    CONTROLS,
    FROZEN,
    bars_note,
    divergence,
    epochs_text,
    point_of,
    point_text,
    seeds_text,
    value_text,
)
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import DataError, UsageError
from weightscope.plots import theme
from weightscope.plots.theme import LABEL, decimals, interval, p_value, signed, wrap

_MOST_TICKS = 12  # of an axis of epochs
LEVEL = 0.05  # of adjusted p-values; differences below it are drawn as significant
_APART = 3.0  # points between the bars of two initialisers at one value
_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (8, 2, 1, 2)), (0, (2, 4)))  # of arms without the parameter, by cell
_WITHOUT = "without the parameter"
Row = Mapping[str, Any]


def styles_of(inits: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The style of each initialiser, in order."""
    bases = {init: init.removesuffix(FROZEN) for init in inits}
    order = list(dict.fromkeys(bases.values()))
    return {init: theme.style(order.index(base), hollow=init != base) for init, base in bases.items()}


def row_height(names: Sequence[str]) -> float:
    """Height of a row in inches."""
    return max(0.34, 0.16 * (1 + max(name.count("\n") for name in names)) + 0.05)


def ends(rows: Sequence[Row], everything: Sequence[Row], metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper ends of the intervals of some rows, inside the bounds; the mean where there is no interval.

    The adjusted interval of a paired difference is drawn around the mean of its arm. It includes the mean of the
    reference if and only if the adjusted p-value is at least 0.05. The reference has no interval, and intervals as wide
    as the bounds are not drawn. Means that are compared with nothing have the interval of the mean.
    """
    compared = any(row.get("difference") is not None for row in everything)
    found = []
    for row in rows:
        interval = row.get("difference_ci_holm" if compared else "ci95")
        shift = row["mean"] - (row.get("difference") or 0)
        if row["n"] == 1 or interval is None or (compared and not metric.tells(interval)):
            found.append((row["mean"], row["mean"]))
        else:
            found.append(tuple(np.clip(np.asarray(interval) + shift * compared, *metric.bounds)))
    low, high = np.array(found).T
    return low, high


def value_axis(axis: Any, factor: float = 1.0) -> None:
    """Tick labels of an axis of stored values or of differences, times a factor to the unit of the axis label."""
    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))  # 2.5 needs a decimal more
    axis.set_major_formatter(_Alike(factor))


class _Alike(Formatter):
    """Tick labels of values times a factor, all with the decimals that one of them needs: 22.5, 25.0."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: float, position: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        texts = [f"{self.factor * value:.6g}" for value in values]
        decimals = 0 if "e" in "".join(texts) else max(len(text.partition(".")[2]) for text in texts or [""])
        return [(f"{float(text):.{decimals}f}" if decimals else text).replace("-", "−") for text in texts]


def difference_label(metric: Metric, what: str, pairs: Sequence[int | None] = (), rows: Sequence[Row] = ()) -> str:
    """What differs, with its unit, number of seeds, direction, and how many networks diverged."""
    unit = f" ({metric.difference_unit})" if metric.difference_unit else ""
    text = f"{what}{unit}{seeds_text(pairs)}{metric.direction}"
    return f"{text}; {lost}" if (lost := divergence(rows)) else text


def _means(
    ax: Axes | None,
    lines: Mapping[str, tuple[dict[str, Any], Sequence[float] | None, Sequence[Row]]],
    metric: Metric,
    label: str,
    title: str | None,
    *,
    text: Mapping[float, str] | None = None,
    after: str = "",
    log_from: float = 4.0,
) -> Axes:
    """Lines of means with intervals, by label: style, positions (None: horizontal), rows; `log_from` is max / min."""
    canvas, ax = theme.canvas(ax, 6.8, 4.4)
    everything = [row for _, _, rows in lines.values() for row in rows]
    values = sorted({value for _, x, _ in lines.values() for value in x or ()})
    if values[0] > 0 and values[-1] >= log_from * values[0]:
        ax.set_xscale("log", base=2)
        label += " (log scale)"
    drawn = [name for name, (_, x, _) in lines.items() if x is not None]
    for order, (name, (style, x, rows)) in enumerate(lines.items()):
        if x is None:
            ax.axhline(rows[0]["mean"], color=style["color"], ls=style["ls"], lw=1.4, zorder=2, gid=_WITHOUT)
            continue
        mean, (low, high) = np.array([row["mean"] for row in rows]), ends(rows, everything, metric)
        options = {"ms": 5, "elinewidth": 1.1, "capsize": 2.5, "label": name, "zorder": 3 + 0.01 * order, **style}
        bars = ax.errorbar(np.asarray(x, dtype=float), mean, yerr=[mean - low, high - mean], **options)
        aside = _APART * (drawn.index(name) - (len(drawn) - 1) / 2) / 72
        for artist in bars.get_children():
            artist.set_transform(ax.transData + ScaledTranslation(aside, 0, ax.figure.figure.dpi_scale_trans))
    ax.margins(x=0.07)
    _value_ticks(ax, values, text)
    ax.set_xlabel(label)
    styles = {name: style for name, (style, _, _) in lines.items()}
    return _finished(canvas, metric, styles, everything, bars_note(everything), title, after)


def _value_ticks(ax: Axes, values: Sequence[float], text: Mapping[float, str] | None = None) -> None:
    """Ticks at the values that were run, with labels where they do not touch."""
    place = np.log2 if ax.get_xscale() == "log" else np.asarray
    low, high = place(np.array(ax.get_xlim()))
    shown = [values[-1]]
    for value in reversed(values[:-1]):
        if place(np.float64(shown[-1])) - place(np.float64(value)) >= 0.055 * (high - low):
            shown.append(value)
    names = {value: (text or {}).get(value, f"{value:g}") for value in shown}
    ax.xaxis.set_major_locator(FixedLocator(list(values)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, "").replace("-", "−")))
    ax.xaxis.set_minor_locator(NullLocator())


def chance_line(ax: Axes, rows: Sequence[Row], *, upright: bool = False) -> str:
    """Draw the chance level of the rows, if they have one and it is near what is drawn; returns a remark on it."""
    levels = {float(row["chance"]) for row in rows if row.get("chance") is not None}
    if len(levels) != 1:
        return ""
    (level,) = levels
    low, high = ax.get_xlim() if upright else ax.get_ylim()
    if level > low - (high - low) / 2:
        (ax.axvline if upright else ax.axhline)(level, color=theme.MUTED, lw=1, ls=":", zorder=1, gid="chance")
    return f"; {'dotted' if level > low - (high - low) / 2 else 'far below'}: chance, {100 * level:.3g} %"


def _finished(
    canvas: theme.Canvas,
    metric: Metric,
    styles: Mapping[str, Any],
    rows: Sequence[Row],
    note: str,
    title: str | None,
    after: str = "",
) -> Axes:
    """Axes with the metric along y, a grid, a legend of the styles by label, and a title."""
    note += chance_line(canvas.ax, rows)
    canvas.ax.grid(axis="both")
    value_axis(canvas.ax.yaxis, metric.factor)
    canvas.ax.set_ylabel(f"{metric.title}{after}{metric.direction}")
    canvas.legend([Line2D([], [], label=label, **style) for label, style in styles.items()], note)
    return canvas.finish(title)


@theme.themed()
def convergence(
    summary: Sequence[Row], ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """The test metric against training length with paired intervals, one line for each initialiser.

    Every point is a full schedule of its length, so the ticks are the lengths that were run; the axis is
    logarithmic (base 2) if they span a factor of 4. With a single length the initialisers are rows, with the
    difference from the first. The interval around a mean is that of the paired difference from the first initialiser,
    at its level in Holm's procedure, so that it agrees with the adjusted p-value; the first one has none, and a single
    one that of its mean. No interval leaves the metric's bounds. Rows are those of `benchmarking.summarise`.
    """
    rows = list(summary)
    if not rows or len({(row["init"], row["epochs"]) for row in rows}) < len(rows):
        raise UsageError("convergence: expected rows that differ in init or epochs, found none or a repeated one")
    styles = styles_of(row["init"] for row in rows)
    if len({row["epochs"] for row in rows}) == 1:
        return _single_length(rows, styles, ax, metric, title)
    lines = {}
    for init, style in styles.items():
        mine = sorted((row for row in rows if row["init"] == init), key=lambda row: row["epochs"])
        lines[init] = style, [row["epochs"] for row in mine], mine
    return _means(ax, lines, metric, "training length in epochs", title)


def _single_length(
    rows: Sequence[Row], styles: Mapping[str, dict[str, Any]], ax: Axes | None, metric: Metric, title: str | None
) -> Axes:
    """Initialisers as rows: the mean with its interval, and the difference from the first as text."""
    names = [wrap(row["init"], 2.3) for row in rows]
    canvas, ax = theme.canvas(ax, 7.4, 1.0 + row_height(names) * (len(rows) + 0.75))
    low, high = ends(rows, rows, metric)
    for y, row in enumerate(rows):
        style = styles[row["init"]] | {"ms": 6.5, "ls": "none", "label": row["init"]}
        theme.bar(ax, y, row["mean"], (low[y], high[y]), **style)
        if row.get("difference") is None and row.get("p_holm") is None and len(rows) > 1:
            ax.axvline(row["mean"], color=style["color"], lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    columns = {"mean": [f"{metric.factor * row['mean']:.{metric.decimals - 1}f}" for row in rows]}
    columns |= {"difference": [_difference(row, metric) for row in rows]} if len(rows) > 1 else {}
    theme.list_axis(ax, range(len(rows)), names, columns)
    value_axis(ax.xaxis, metric.factor)
    after = f" after {epochs_text(rows[0]['epochs'])}" if rows[0]["epochs"] else ""
    label = f"{metric.title}{after}{metric.direction}; {bars_note(rows)}"
    label += chance_line(ax, rows, upright=True)
    ax.set_xlabel(wrap(label, 0.7 * canvas.width, LABEL))
    return canvas.finish(title)


def _difference(row: Row, metric: Metric) -> str:
    p = row["p_holm"] if row.get("p_holm") is not None else row.get("p")
    if row.get("difference") is None:
        return "reference" if p is None else p_value(p)
    low, high = row.get("difference_ci_holm") or (0.0, 0.0)
    text = signed(metric.factor * row["difference"], decimals(metric.factor * (high - low)))
    return text if p is None else f"{text}, {p_value(p)}"


@theme.themed()
def accuracy_by_length(
    by_length: Mapping[int, Sequence[Row]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Test accuracy against the length of the sequences, one line for each initialiser, with paired intervals.

    Bars are those of `convergence`, of the seeds at the same length. An initialiser is drawn at the lengths that it has
    rows for. `by_length` is a multiple of the training length -> rows of `summarise` with that length's metric, of one
    cell and one number of epochs.
    """
    found = [(length, row) for length in sorted(by_length) for row in by_length[length]]
    lines = {}
    for init, style in styles_of(row["init"] for _, row in found).items():
        mine = [(length, row) for length, row in found if row["init"] == init]
        lines[init] = style, [length for length, _ in mine], [row for _, row in mine]
    text: dict[float, str] = {length: f"{length:g}x" for length in by_length}
    return _means(ax, lines, ACCURACY, "length of the sequences, relative to training", title, text=text, log_from=1)


@theme.themed()
def metric_along(
    summary: Sequence[Row], axis: str, ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """The test metric against a parameter, one line for each initialiser, with paired intervals.

    The parameter `axis` is a field of the recipe or a number of an initialiser, such as `"network.kernel_size"` or
    `"mimetic_mlp.sigma"`. Bars and rows are those of `convergence`. An initialiser without the parameter is a
    horizontal line.
    """
    grouped = _lines(summary, axis)
    values = _in_order([place[axis] for row in summary if axis in (place := point_of(row))])
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    at = {repr(v): float(v) if numeric else float(i) for i, v in enumerate(values)}
    inits, others = (list(dict.fromkeys(key[i] for key in grouped)) for i in (0, 1))
    lines: dict[str, tuple[dict[str, Any], list[float] | None, list[Row]]] = {}
    styles = styles_of(inits)
    for (init, rest), rows in grouped.items():
        order = inits.index(init) if len(others) == 1 else others.index(rest)
        style = styles[init]
        if len(others) > 1:
            style = theme.style(order) | {key: style[key] for key in ("color", "mfc")}
        x = None
        if axis in point_of(rows[0]):
            rows.sort(key=lambda row: at[repr(point_of(row)[axis])])
            x = [at[repr(point_of(row)[axis])] for row in rows]
            style |= {} if numeric else {"ls": "none"}  # nothing lies between two names
        else:
            style |= {"ls": _DASHES[order % len(_DASHES)] if len(others) > 1 else _DASHES[0], "marker": None}
        lines[", ".join(filter(None, [init, rest]))] = style, x, rows
    lengths = {row["epochs"] for row in summary}
    text = {at[repr(value)]: value_text(value, axis) for value in values}
    after = f" after {epochs_text(min(lengths))}" if len(lengths) == 1 else ""
    words = "data set" if axis == "data.name" else axis.rpartition(".")[2].replace("_", " ")
    return _means(ax, lines, metric, words, title, text=text, after=after, log_from=16 if numeric else np.inf)


def _lines(summary: Sequence[Row], axis: str) -> dict[tuple[str, str], list[Row]]:
    """(initialiser without its number on the axis, what else varies) -> rows; arms without the parameter come first."""
    lines: dict[tuple[str, str], list[Row]] = {}
    several = len({row["epochs"] for row in summary}) > 1
    for row in sorted(summary, key=lambda row: axis in point_of(row)):
        rest = point_text({key: value for key, value in row.get("cell", {}).items() if key != axis})
        others = ", ".join(filter(None, [rest, epochs_text(row["epochs"]) * several]))
        lines.setdefault((label_without(row["init"], axis), others), []).append(row)
    if not any(axis in point_of(row) for row in summary):
        known = ", ".join(sorted({key for row in summary for key in point_of(row)}))
        raise UsageError(f"axis: expected one of {known or 'fields that vary'}, found {axis!r}")
    return lines


def label_without(label: str, *numbers: str) -> str:
    """The label of an initialiser without some of its numbers: `a (x=1, y=2)` without `a.x` is `a (y=2)`."""
    for name in numbers:
        label = re.sub(rf"(?<=[(\s]){re.escape(name.rpartition('.')[2])}=[^,()]*(?:, )?", "", label)
    return label.replace(", )", ")").replace(" ()", "")


@theme.themed()
def difference_map(
    summary: Sequence[Row],
    axes: tuple[str, str],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
    of: str = "",
) -> Axes:
    """Paired differences of one initialiser from the reference over two parameters, as a map centred at zero.

    Entries are percentage points for accuracies; those that differ from zero at an adjusted level of 0.05 are bold, and
    the best of them is framed if it is an improvement. Combinations that were not run are grey. Rows are of one
    initialiser at one length, `axes` the parameters along x and y; `of` is written below the map.
    """
    import seaborn

    found: dict[tuple[str, str], Row] = {}
    for row in summary:
        if row.get("difference") is not None and set(axes) <= set(point_of(row)):
            found[repr(point_of(row)[axes[0]]), repr(point_of(row)[axes[1]])] = row
    if not found:
        raise UsageError(f"difference map: expected rows with {' and '.join(axes)} and a difference, found none")
    columns, rows = (_in_order([point_of(row)[axis] for row in found.values()]) for axis in axes)
    at = {(i, j): found.get((repr(x), repr(y)), {}) for i, y in enumerate(rows) for j, x in enumerate(columns)}
    grid = metric.factor * np.reshape([row.get("difference", np.nan) for row in at.values()], (len(rows), len(columns)))
    height = max(0.36 * len(rows), 1.8)
    canvas, ax = theme.canvas(ax, max(0.5 * len(columns), 2.0) + 1.9, height + 0.8)
    colours, texts = theme.colours(limit := theme.colour_limit(grid[np.isfinite(grid)], 1.0)), {"size": 7}
    seaborn.heatmap(grid, ax=ax, annot=True, fmt=f"+.{metric.decimals - 1}f", annot_kws=texts, cbar=False, **colours)
    ax.set_facecolor(theme.GREY)  # of combinations that were not run
    for text, row in zip(ax.texts, (row for row in at.values() if row), strict=True):
        text.set(text=signed(metric.factor * row["difference"], metric.decimals - 1))
        text.set_fontweight("bold" if _sure(row) else "normal")
    shown = list(found.values())
    whole = [row for row in shown if row.get("networks") in (None, row.get("pairs"))]  # else p may be of the others
    better = [row for row in whole if _sure(row) and metric.better(row["difference"])]
    best = max(better, key=lambda row: abs(row["difference"]), default=None)
    for i, j in (place for place, row in at.items() if row is best):
        ax.add_patch(Rectangle((j, i), 1, 1, fill=False, ec=theme.INK, lw=1.6, gid="largest"))
    ax.set_xticks(np.arange(len(columns)) + 0.5, [value_text(value, axes[0]) for value in columns])
    ax.set_yticks(np.arange(len(rows)) + 0.5, [value_text(value, axes[1]) for value in rows], rotation=0)
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.set(xlabel="\n".join(filter(None, (axes[0], of))), ylabel=axes[1])
    what = f"{metric.label} minus that of {shown[0]['reference']}"
    label = difference_label(metric, what, [row.get("pairs") for row in shown], shown)
    theme.colour_bar(ax, ax.collections[0], limit, label, height=height, beyond=False)
    return canvas.finish(title)


def _sure(row: Row) -> bool:
    return row.get("p_holm") is not None and row["p_holm"] < LEVEL


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Distinct values, numbers first and in order."""
    distinct = list({repr(value): value for value in values}.values())
    return sorted(distinct, key=lambda v: (not isinstance(v, int | float), v if isinstance(v, int | float) else 0.0))


@theme.themed()
def training_curves(
    per_epoch: Any,
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """The median over networks at each epoch, with the central 90 % shaded.

    `per_epoch` (N, E) has the values after each epoch; networks with values that are not finite are excluded and
    counted.
    """
    import seaborn

    values = np.asarray(per_epoch, dtype=np.float64)
    kept = values[np.isfinite(values).all(axis=1)]
    if not len(kept):
        raise DataError(f"training curves: none of {len(values)} networks is finite at every epoch")
    canvas, ax = theme.canvas(ax, 6.4, 3.9)
    epochs = np.tile(np.arange(1, values.shape[1] + 1), len(kept))
    text = f"median of {len(kept):,}" + ", 5 to 95 % shaded" * (len(kept) > 1)
    text += f", {len(values) - len(kept):,} diverged" if len(kept) < len(values) else ""
    style: dict[str, Any] = {"color": theme.PALETTE[0], "marker": "o" if values.shape[1] == 1 else None, "gid": "curve"}
    band = ("pi", 90) if len(kept) > 1 else None
    seaborn.lineplot(x=epochs, y=kept.ravel(), estimator="median", errorbar=band, ax=ax, label=text, **style)
    ax.grid(axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    ax.set_xlabel("epoch")
    ax.set_ylabel(metric.title.removeprefix("test "))
    value_axis(ax.yaxis, metric.factor)
    ax.margins(x=0.02)
    ax.legend(loc="best")
    return canvas.finish(title)


@theme.themed()
def emergence_curves(
    epochs: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    limits: Sequence[float],
    ax: Axes | None = None,
    *,
    unit: str = "epoch",
    title: str | None = None,
) -> Axes:
    """Correlations against the epochs of snapshots, on a logarithmic axis with 0; dashed, +- the limits of chance.

    `lines` has the values of each entry, `limits` one number for each snapshot; NaN is not drawn.
    """
    canvas, ax = theme.canvas(ax, 6.8, 3.4 + 0.2 * len(lines))
    handles = []
    for order, (label, values) in enumerate(lines.items()):
        handles += ax.plot(epochs, values, label=label, zorder=3, gid="curve", **theme.style(order, ms=4.5, ls="-"))
    chance: dict[str, Any] = {"color": theme.MUTED, "ls": "--", "lw": 1.0, "zorder": 2, "gid": "limit"}
    ax.plot(epochs, -np.array(limits), **chance)
    handles += ax.plot(epochs, np.array(limits), label="p = 0.05, adjusted for all pairs", **chance)
    ax.axhline(0, color=theme.INK, lw=0.8, zorder=1)
    ax.set_xscale("symlog", base=2, linthresh=next((epoch for epoch in epochs if epoch), 1))
    shown = epochs[:: -(-len(epochs) // _MOST_TICKS)]
    ax.set_xticks(shown, [str(epoch) for epoch in shown])
    ax.minorticks_off()
    ax.grid(axis="y")
    ax.set(xlabel=unit, ylabel="correlation")
    canvas.legend(handles)
    return canvas.finish(title)


# --- rows of points with intervals ------------------------------------------------------------------------------------


@theme.themed()
def paired_differences(
    arms: Sequence[Row], ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """Each seed's metric minus the reference's on the same seed, with the mean and its adjusted interval.

    Paired seeds share initial weights, batches and augmentation, so their differences vary far less than the
    values do. Points are seeds, diverged ones are crosses. Rows are those of
    `weightscope.benchmarking.seed_differences`: `init`, `epochs`, `reference`, `differences` (n,), `diverged` (n,),
    `interval` of their mean or None and `why` not, and `left_out`, the number of seeds without a finite value.
    """
    if not arms:
        raise UsageError("paired differences: expected a second initialiser with seeds of the first, found none")
    rows = sorted(arms, key=lambda row: row["epochs"])
    styles = styles_of([arms[0]["reference"], *(row["init"] for row in arms)])
    several = len({row["epochs"] for row in rows}) > 1
    names = [wrap(_named(row, several=several), 2.3) for row in rows]
    height = max(row_height(names), 0.5 if max(len(row["differences"]) for row in rows) > 16 else 0)
    canvas, ax = theme.canvas(ax, 7.4, 1.0 + height * (len(rows) + 0.75))
    means, better = [], []
    point: dict[str, Any] = {"fmt": "D", "color": theme.INK, "ms": 5, "mew": 1.2, "lw": 1.8, "zorder": 4, "gid": "mean"}
    for y, row in enumerate(rows):
        style, values = styles[row["init"]], metric.factor * np.asarray(row["differences"], dtype=float)
        apart = y + 0.1 * (np.arange(len(values)) % 5 - 2)  # so that few seeds hide others
        lost, points = np.asarray(row["diverged"], dtype=bool), {"color": style["color"], "alpha": 0.55, "zorder": 3}
        ax.plot(values[~lost], apart[~lost], "o", ms=3.2, mfc=style["mfc"], gid="seeds", **points)
        if lost.any():
            ax.plot(values[lost], apart[lost], "x", ms=4.5, gid="diverged", **points)
        mean = float(values.mean())
        ends = [metric.factor * end for end in row["interval"]] if metric.tells(row["interval"]) else None
        theme.bar(ax, y, mean, ends or (mean, mean), mfc=style["mfc"], **point)
        if ends is None:
            why = "one seed" if len(values) == 1 else row["why"] if row["interval"] is None else "too few seeds"
            means.append(f"{signed(mean, metric.decimals - 1)} ({why})")
        else:
            means.append(f"{signed(mean, decimals(ends[1] - ends[0]))} ({interval(*ends)})")
        equal = int((values == 0).sum())
        more = f"{int((metric.sign * values > 0).sum())} of {len(values)}"
        better.append(more + (f" ({equal} equal)" if equal else ""))
    theme.reference(ax, 0)
    theme.list_axis(ax, range(len(rows)), names, {f"mean, {CI}": means, "better on": better})
    value_axis(ax.xaxis)
    references = " or ".join(dict.fromkeys(row["reference"] for row in arms))
    label = difference_label(metric, f"{metric.label} minus that of {references} on the same seed")
    label += "; × diverged" if any(np.any(row["diverged"]) for row in rows) else ""
    if left_out := sum(row.get("left_out", 0) for row in rows):
        label += f"; {left_out} diverged networks left out"
    ax.set_xlabel(wrap(label, 0.6 * canvas.width, LABEL))
    return canvas.finish(title)


@theme.themed()
def scale_and_structure(
    summary: Sequence[Row],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    control: str = "scale",
    title: str | None = None,
) -> Axes:
    """The two parts of what an initialiser changes: its scale, and the structure beyond it.

        effect of scale         metric(control) - metric(reference)
        structure beyond scale  metric(initialiser) - metric(control)

    The control has the initialiser's mean and variance of each tensor and independent Gaussian entries; with
    `control="uncorrelated"`, its means and variances of every part, so that the second part is that of correlations.
    Both are means of differences on the same seed, with adjusted intervals; their sum is the difference from the
    reference. Rows are those of `weightscope.benchmarking.summarise`.
    """
    name, beyond = CONTROLS[control].arm, CONTROLS[control].key
    parts = tuple(zip(CONTROLS[control].parts, ("difference", beyond), "sD", strict=True))
    found = {_place(row, row["init"]): row for row in summary}
    pairs = [(row, found[_place(row, row[name])]) for row in summary if row.get(name) is not None]
    if not pairs:
        raise UsageError("scale and structure: expected initialisers with controls (bench's `control`), found none")
    at = [i + 0.4 * (i // 2) for i in range(2 * len(pairs))]
    canvas, ax = theme.canvas(ax, 7.4, 1.2 + 0.3 * (at[-1] + 1.75))
    texts = []
    for i, y in enumerate(at):
        _, key, marker = parts[i % 2]
        row = pairs[i // 2][1 - i % 2]  # the effect of scale is the difference of the control
        p = row["p_holm" if key == "difference" else f"{key}_p_holm"]
        if row[key] is None:  # the control of the reference itself, or one whose networks all diverged
            texts.append(("reference", "") if p is None else ("", p_value(p)))
            continue
        value, bounds = metric.factor * row[key], row[f"{key}_ci_holm"]
        low, high = (metric.factor * end for end in bounds or (row[key], row[key]))
        theme.bar(ax, y, value, (low, high), **theme.style(i % 2, ls="none", marker=marker, ms=5.5, lw=1.6, gid=key))
        around = f" ({interval(low, high)})" if bounds else ""
        texts.append((f"{signed(value, decimals(high - low))}{around}", p_value(p)))
    theme.reference(ax, 0)
    several = len({row["epochs"] for row, _ in pairs}) > 1
    names = [wrap(_named(row, several=several), 2.3) for row, _ in pairs]
    values, ps = zip(*texts, strict=True)
    middles = [(at[2 * i] + at[2 * i + 1]) / 2 for i in range(len(pairs))]
    theme.list_axis(ax, middles, names, {f"mean, {CI}": values, "adjusted": ps}, at)
    value_axis(ax.xaxis)
    counts = [n for row, other in pairs for n in (row.get(f"{beyond}_pairs"), other.get("pairs"))]
    drawn = {_place(row, str(row.get(key))) for row, _ in pairs for key in ("init", name, "reference")}
    shown = [row for place, row in found.items() if place in drawn]
    label = difference_label(metric, f"difference of test {metric.label} on the same seed", counts, shown)
    ax.set_xlabel(wrap(label, 0.62 * canvas.width, LABEL))
    canvas.legend([Line2D([], [], **theme.style(i, ls="none", marker=m, label=n)) for i, (n, _, m) in enumerate(parts)])
    return canvas.finish(title)


def _place(row: Row, init: str) -> tuple[str, Any, str]:
    return repr(row.get("cell", {})), row["epochs"], init


def _named(row: Row, *, several: bool) -> str:
    cell, length = point_text(row.get("cell", {})), epochs_text(row["epochs"]) * several
    return ", ".join(filter(None, [row["init"], cell, length]))
