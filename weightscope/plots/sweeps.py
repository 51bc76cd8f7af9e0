"""Benchmarks over epochs and over parameters: curves, lines along an axis, and maps over two."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy import stats

from weightscope._util.arm_labels import CONTROL, FROZEN, LEVEL
from weightscope._util.divergence import count_range
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.plots import theme, typography
from weightscope.plots.arms import difference_label, ends, seeds_note, value_axis

_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (8, 2, 1, 2)), (0, (2, 4)))  # of arms without the parameter, by cell
Row = Mapping[str, Any]


@theme.themed
def metric_curves(
    runs: Sequence[Row], ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """Mean of the test metric after each epoch, one line for each initialiser, with paired intervals.

    A line is the mean of the initialiser's networks with a finite last value. Its band is the 95 % interval of the
    difference from the first one, on the seeds of both, drawn around its own mean, and not beyond the metric's bounds;
    the first one has none. Bands are of single epochs and initialisers: the more there are, the more often one does not
    reach the first one's line by chance.

    Args:
        runs: rows of a benchmark's `results.json` of one cell and one training length: `init`, `seed`, `epochs` and
            `curve`, the metric (fractions for accuracies) after each epoch.
        ax: axes to draw on; a new figure if None.
        metric: of the curves.
        title: figure title.

    Raises:
        UsageError: if there is no curve, or the runs are of several cells or lengths.

    Example:
        >>> metric_curves(json.load(open("results.json"))["runs"])
    """
    curves = _curves(runs)
    canvas = theme.Canvas.on(ax, 6.8, 4.4)
    ax = canvas.ax
    first = next(iter(curves))
    length = next(iter(curves[first].values())).size
    epochs = np.arange(1, length + 1)
    handles = []
    for order, (init, mine) in enumerate(curves.items()):
        shared = [k for k in mine if k in curves[first]]
        mean = np.mean(list(mine.values()), axis=0)  # (E,)
        style = {"color": theme.PALETTE[order % len(theme.PALETTE)], "ls": theme.LINES[order % len(theme.LINES)]}
        if init != first and len(shared) > 1:
            differences = np.array([mine[k] - curves[first][k] for k in shared])  # (N, E)
            half = stats.t.ppf(0.975, len(shared) - 1) * stats.sem(differences, axis=0)
            low, high = (np.clip(mean + end, *metric.bounds) for end in (-half, half))
            ax.fill_between(epochs, low, high, color=style["color"], alpha=0.18, lw=0, gid="band")
        marker = theme.MARKERS[order % len(theme.MARKERS)] if length <= 30 else None
        ax.plot(epochs, mean, marker=marker, ms=4.5, **style, zorder=3, label=init)
        room = 72 * 0.8 * canvas.size[0] - 44
        handles.append(Line2D([], [], **style, marker=marker, ms=4.5, label=typography.wrap(init, room)))
    _epoch_axis(ax, length)
    ax.grid(axis="both")
    value_axis(ax.yaxis, ax.get_ylim(), metric)
    ax.set_ylabel(metric.title + metric.direction)
    note = f"mean of {count_range([len(mine) for mine in curves.values()])} seeds"
    if left_out := len(runs) - sum(map(len, curves.values())):
        note += f", {left_out} diverged networks left out"
    canvas.legend(handles, note + (f"; bands: 95 % CI of the difference from {first}" if len(curves) > 1 else ""))
    canvas.finish(title)
    return ax


def _curves(runs: Sequence[Row]) -> dict[str, dict[int, np.ndarray]]:
    """Initialiser -> seed -> values (E,), of the networks with a finite last one."""
    places = {(repr(run.get("cell", {})), run["epochs"]) for run in runs}
    if len(places) != 1:
        raise UsageError(f"curves: expected runs of one cell and one training length, found {len(places)}")
    curves: dict[str, dict[int, np.ndarray]] = {}
    for run in runs:
        mine = curves.setdefault(run["init"], {})
        values = np.array([np.nan if v is None else v for v in run.get("curve") or []], dtype=float)
        if values.size and np.isfinite(values[-1]):
            mine[run["seed"]] = values
    if not curves or not all(set(mine) & set(next(iter(curves.values()))) for mine in curves.values()):
        raise UsageError('curves: expected a value after each epoch (training.evaluate = "epoch"), found none')
    return curves


def _epoch_axis(ax: Axes, length: int) -> None:
    ax.set_xlabel("epoch")
    if length == 1:
        ax.xaxis.set_major_locator(FixedLocator([1]))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=2))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


@theme.themed
def metric_along(
    summary: Sequence[Row], axis: str, ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """The test metric against a parameter, one line for each initialiser, with paired intervals.

    The parameter is a field of the recipe or a number of an initialiser. Bars are the 95 % interval of the difference
    from the reference on the same seeds, drawn around the mean, inside the metric's bounds; a single initialiser has
    the intervals of its means. An initialiser without the parameter is a horizontal line.

    Args:
        summary: rows of a benchmark's `results.json`: `init`, `cell`, `numbers`, `epochs`, `n`, `mean`, `ci95`,
            `difference`, `difference_ci95` (fractions for accuracies), `reference`.
        axis: the parameter, such as `"network.kernel_size"` or `"mimetic_mlp.sigma"`.
        ax: axes to draw on; a new figure if None.
        metric: that is drawn.
        title: figure title.

    Raises:
        UsageError: if no row has the parameter.

    Example:
        >>> metric_along(result.arms, "network.kernel_size")
    """
    lines, flat, values = _lines(summary, axis)
    canvas = theme.Canvas.on(ax, 6.8, 4.4)
    ax = canvas.ax
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    at = {repr(v): float(v) if numeric else float(i) for i, v in enumerate(values)}
    handles = []
    everything = [*flat.items(), *lines.items()]
    inits = list(dict.fromkeys(initialiser_without(rows[0], axis) for _, rows in everything))
    places = list(dict.fromkeys(name.removeprefix(initialiser_without(rows[0], axis)) for name, rows in everything))
    for name, rows in everything:
        init = initialiser_without(rows[0], axis)
        order = inits.index(init) if len(places) == 1 else places.index(name.removeprefix(init))
        style: dict[str, Any] = {"color": theme.PALETTE[inits.index(init) % len(theme.PALETTE)]}
        if name in flat:
            style["ls"] = _DASHES[order % len(_DASHES)] if len(places) > 1 else _DASHES[0]
            ax.axhline(rows[0]["mean"], lw=1.4, **style, zorder=2, gid="without the parameter")
        else:
            style |= {"ls": theme.LINES[order % len(theme.LINES)], "marker": theme.MARKERS[order % len(theme.MARKERS)]}
            rows = sorted(rows, key=lambda row: at[repr(_value(row, axis))])
            x = [at[repr(_value(row, axis))] for row in rows]
            mean = np.array([row["mean"] for row in rows])
            low, high = ends(rows, summary, metric)
            bars = [(mean - low).tolist(), (high - mean).tolist()]
            ax.errorbar(x, mean, yerr=bars, ms=5, lw=1.5, capsize=2.5, elinewidth=1.1, zorder=3, **style)
        room = 72 * 0.8 * canvas.size[0] - 44
        handles.append(Line2D([], [], **style, lw=1.5, ms=5, label=typography.wrap(name, room)))
    _parameter_axis(ax, axis, values, at, numeric)
    ax.grid(axis="both")
    value_axis(ax.yaxis, ax.get_ylim(), metric)
    lengths = sorted({row["epochs"] for row in summary})
    after = f" after {lengths[0]} epoch{'s' * (lengths[0] != 1)}" if len(lengths) == 1 else ""
    ax.set_ylabel(f"{metric.title}{after}{metric.direction}")
    canvas.legend(handles, seeds_note(summary))
    canvas.finish(title)
    return ax


def _value(row: Row, axis: str) -> Any:
    return {**row.get("cell", {}), **row.get("numbers", {})}[axis]


def _lines(summary: Sequence[Row], axis: str) -> tuple[dict[str, list[Row]], dict[str, list[Row]], list[Any]]:
    """Lines over the axis, arms without it, and the axis's values in order."""
    lines: dict[str, list[Row]] = {}
    flat: dict[str, list[Row]] = {}
    values: list[Any] = []
    several = len({row["epochs"] for row in summary}) > 1
    for row in summary:
        place = {**row.get("cell", {}), **row.get("numbers", {})}
        others = {key: value for key, value in row.get("cell", {}).items() if key != axis}
        name = ", ".join(
            [initialiser_without(row, axis), *(f"{k.rpartition('.')[2]}={_text(v, k)}" for k, v in others.items())]
        )
        name += f", {row['epochs']} epoch{'s' * (row['epochs'] != 1)}" if several else ""
        (lines if axis in place else flat).setdefault(name, []).append(row)
        if axis in place and place[axis] not in values:
            values.append(place[axis])
    if not lines:
        known = sorted({key for row in summary for key in (*row.get("cell", {}), *row.get("numbers", {}))})
        raise UsageError(
            f"axis: expected one of {', '.join(known) or 'a benchmark with --vary or --grid'}, found {axis!r}"
        )
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    return lines, flat, values


def initialiser_without(row: Row, *axes: str) -> str:
    """The initialiser without the numbers on the axes."""
    numbers = row.get("numbers", {})
    if not set(numbers) & set(axes):
        return str(row["init"])
    bare = str(row["init"]).removesuffix(FROZEN)
    suffix = FROZEN if bare != row["init"] else ""
    control = CONTROL if bare.endswith(CONTROL) else ""
    name = "+".join(dict.fromkeys(key.rpartition(".")[0] for key in numbers))
    rest = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in numbers.items() if key not in axes)
    return name + (f" ({rest})" if rest else "") + control + suffix


def _text(value: Any, name: str) -> str:
    if value is None:
        return "all" if name.startswith("data.") else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parameter_axis(ax: Axes, axis: str, values: Sequence[Any], at: Mapping[str, float], numeric: bool) -> None:
    places = [at[repr(value)] for value in values]
    if numeric and min(places) > 0 and max(places) >= 16 * min(places):
        ax.set_xscale("log", base=2)
    shown = places if len(places) <= 9 else places[:: -(-len(places) // 9)]
    texts = {at[repr(v)]: _text(v, axis) for v in values}
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: texts.get(value, f"{value:g}").replace("-", "−")))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(axis + (" (log scale)" if ax.get_xscale() == "log" else ""))


def _on_a_grid(
    summary: Sequence[Row], axes: tuple[str, str]
) -> tuple[dict[tuple[str, str], Row], tuple[list[Any], list[Any]]]:
    """The rows with a difference by their values of both parameters, and the values of each in order."""
    found: dict[tuple[str, str], Row] = {}
    places: tuple[list[Any], list[Any]] = ([], [])
    for row in summary:
        both = {**row.get("cell", {}), **row.get("numbers", {})}
        if row.get("difference") is None or not set(axes) <= set(both):
            continue
        for values, name in zip(places, axes, strict=True):
            values += [both[name]] * (both[name] not in values)
        key = repr(both[axes[0]]), repr(both[axes[1]])
        if key in found:
            raise UsageError(
                f"difference map: expected one row at {', '.join(key)}, found {found[key]['init']} and {row['init']}"
            )
        found[key] = row
    if not found:
        raise UsageError(f"difference map: expected rows with {' and '.join(axes)} and a difference, found none")
    for values in places:
        values.sort(key=lambda v: (not isinstance(v, int | float), v if isinstance(v, int | float) else 0.0))
    return found, places


@theme.themed
def difference_map(
    summary: Sequence[Row],
    axes: tuple[str, str],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """Paired differences of one initialiser from the reference over two parameters, as a map centred at zero.

    Entries are percentage points for accuracies; those that differ from zero at an adjusted level of 0.05 are bold, and
    the best is framed. Combinations that were not run are grey.

    Args:
        summary: rows of a benchmark's `results.json` of one initialiser at one length: `cell`, `numbers`, `difference`
            (a fraction for accuracies; rows without one are left out), `p_holm`, `reference`, `pairs`.
        axes: the parameters along x and y.
        ax: axes to draw on; a new figure if None.
        metric: of the differences.
        title: figure title.

    Raises:
        UsageError: if no row has both parameters, or two have the same values of them.

    Example:
        >>> difference_map(result.arms, ("mimetic_attention.alpha_qk", "mimetic_attention.beta_qk"))
    """
    found, places = _on_a_grid(summary, axes)
    columns, rows = places
    grid = np.full((len(rows), len(columns)), np.nan)  # as shown
    for i, y in enumerate(rows):
        for j, x in enumerate(columns):
            if (repr(x), repr(y)) in found:
                grid[i, j] = metric.factor * found[repr(x), repr(y)]["difference"]
    width, height = 0.5 * len(columns), 0.36 * len(rows)
    canvas = theme.Canvas.on(ax, width + 2.5, height + 1.5)
    ax = canvas.ax
    limit = theme.colour_limit(grid[np.isfinite(grid)], 1.0)
    image = ax.imshow(grid, origin="lower", aspect="auto", **theme.colours(limit))
    bold = {key for key, row in found.items() if row.get("p_holm") is not None and row["p_holm"] < LEVEL}
    _write_numbers(ax, grid, limit, metric.decimals - 1, [[(repr(x), repr(y)) in bold for x in columns] for y in rows])
    best = np.unravel_index(np.nanargmax(metric.sign * grid), grid.shape)
    corner = float(best[1]) - 0.5, float(best[0]) - 0.5
    ax.add_patch(Rectangle(corner, 1, 1, fill=False, ec=theme.INK, lw=1.6, gid="largest"))
    for axis, values, name in ((ax.xaxis, columns, axes[0]), (ax.yaxis, rows, axes[1])):
        axis.set_ticks(range(len(values)), [_text(value, name) for value in values])
        axis.set_label_text(name)
        axis.set_tick_params(length=0)
    ax.spines[:].set_visible(False)
    label = difference_label(metric, list(found.values()))
    theme.colour_bar(ax, image, limit, label, room=72 * max(height, 1.8), beyond=False)
    canvas.finish_sized(max(width, 2.0), max(height, 1.8), title)
    return ax


def _write_numbers(ax: Axes, grid: np.ndarray, limit: float, decimals: int, bold: Sequence[Sequence[bool]]) -> None:
    """The finite numbers of a map in their cells, white where the colour is dark."""
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            colour = "white" if abs(value) > 0.65 * limit else theme.INK
            weight = "bold" if bold[i][j] else "normal"
            text = typography.signed(value, decimals)
            ax.text(j, i, text, ha="center", va="center", size=7, color=colour, weight=weight)
