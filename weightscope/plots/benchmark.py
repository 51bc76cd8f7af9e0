"""Comparisons of initialisers: accuracy against training length, and differences on paired seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy import stats

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography

_FROZEN = " (frozen)"  # how `bench` marks an arm whose filters are frozen
_ROW = 0.34  # inches


@dataclass(frozen=True)
class _Style:
    """Colour, marker and line of an initialiser; a frozen arm has those of its counterpart, with open markers."""

    colour: str
    marker: str
    line: Any
    frozen: bool

    @property
    def face(self) -> str:
        return "white" if self.frozen else self.colour


def _styles(inits: Sequence[str]) -> dict[str, _Style]:
    bases = list(dict.fromkeys(name.removesuffix(_FROZEN) for name in inits))
    styles = {}
    for name in inits:
        i, frozen = bases.index(name.removesuffix(_FROZEN)), name.endswith(_FROZEN)
        line = (0, (1, 1.5)) if frozen else theme.LINES[i % len(theme.LINES)]
        styles[name] = _Style(
            theme.PALETTE[i % len(theme.PALETTE)], theme.MARKERS[i % len(theme.MARKERS)], line, frozen
        )
    return styles


@theme.themed
def convergence(summary: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Test accuracy against training length with paired 95 % intervals, one line for each initialiser.

    Every point is a full schedule of its length, so the ticks are the lengths that were run; the axis is
    logarithmic (base 2) if they span a factor of 4. With a single length the initialisers are rows, with the
    difference from the first. The interval around a mean is that of the paired difference from the first initialiser,
    which has none itself; a single initialiser has that of its mean. No interval leaves 0 to 100 %.

    Args:
        summary: rows of a benchmark's `results.json`: `init`, `epochs`, `n`, `mean` and `ci95` (fractions),
            `difference` and `p` (None for the reference).
        ax: axes to draw on; a new figure if None.
        title: figure title.

    Raises:
        UsageError: if there are no rows, or a pair of initialiser and length is duplicated.
        DataError: if a mean is not a fraction.

    Example:
        >>> save(convergence(json.load(open("results.json"))["summary"]), "convergence.png")
    """
    rows = _checked(summary)
    inits = list(dict.fromkeys(row["init"] for row in rows))
    lengths = sorted({row["epochs"] for row in rows})
    styles = _styles(inits)
    if len(lengths) == 1:
        return _single_length(rows, styles, ax, title)
    canvas = theme.Canvas.on(ax, 6.8, 4.4)
    ax = canvas.ax
    for order, init in enumerate(inits):
        mine = sorted((row for row in rows if row["init"] == init), key=lambda row: row["epochs"])
        _line(ax, init, styles[init], (mine, *_ends(mine, rows)), order)
    if lengths[-1] >= 4 * lengths[0]:
        ax.set_xscale("log", base=2)
        margin = (lengths[-1] / lengths[0]) ** 0.05
        ax.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    shown = _without_collisions(lengths, ax, 72 * 0.75 * canvas.size[0])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in shown else ""))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="both")
    theme.percent(ax.yaxis, *ax.get_ylim())
    ax.set_xlabel("training length (epochs" + (", log scale)" if ax.get_xscale() == "log" else ")"))
    ax.set_ylabel("test accuracy (%)")
    room = 72 * 0.8 * canvas.size[0] - 44
    handles = [_handle(style, typography.wrap(init, room)) for init, style in styles.items()]
    canvas.legend(handles, _seeds(rows))
    canvas.finish(title)
    return ax


@theme.themed
def gain_curve(curve: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Accuracy of candidate gains relative to the smallest, with standard errors of the paired differences.

    Candidates stand at equal distances; the chosen one is marked.

    Args:
        curve: rows with `gain`, `difference` and `difference_se` (fractions), `n` and `chosen`.
        ax: axes to draw on; a new figure if None.
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
    y, error = (100 * np.array([row[key] for row in rows]) for key in ("difference", "difference_se"))
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
    ax.set_ylabel(f"accuracy minus that at gain {rows[0]['gain']:g}\n(percentage points)")
    handles = [
        Line2D(
            [], [], color=line["color"], marker="o", mfc="white", mew=1.2, label=f"{rows[0]['n']} paired seeds, ± SE"
        ),
        Line2D([], [], color=theme.INK, marker="D", mfc=line["color"], ls="none", label="chosen"),
    ]
    canvas.legend(handles)
    canvas.finish(title)
    return ax


def _handle(style: _Style, label: str) -> Line2D:
    return Line2D(
        [], [], color=style.colour, ls=style.line, marker=style.marker, mfc=style.face, mew=1.2, lw=1.5, label=label
    )


def _checked(summary: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    rows = list(summary)
    if not rows or len({(row["init"], row["epochs"]) for row in rows}) < len(rows):
        raise UsageError("convergence: expected rows that differ in init or epochs, found none or a repeated one")
    for row in rows:
        if not 0 <= row["mean"] <= 1:
            where = f"`{row['init']}` after {row['epochs']} epochs"
            raise DataError(f"{where}: expected a fraction between 0 and 1 as mean, found {row['mean']}")
    return rows


def _seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({row["n"] for row in rows})
    if counts == [1]:
        return "1 seed, so no interval"
    text = f"mean of {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") + " seeds"
    compared = [row for row in rows if row.get("difference_ci95") is not None]
    if not compared:
        return f"{text} with 95 % CI"
    references = " or ".join(dict.fromkeys(row.get("reference") or rows[0]["init"] for row in compared))
    return f"{text}; bars: 95 % CI of the paired difference from {references}"


def _line(ax: Axes, init: str, style: _Style, drawn: tuple[Any, np.ndarray, np.ndarray], order: int) -> None:
    """One initialiser: its rows and the lower and upper ends of their intervals."""
    rows, low, high = drawn
    epochs = np.array([row["epochs"] for row in rows], dtype=float)
    mean = np.array([row["mean"] for row in rows])
    ax.fill_between(epochs, low, high, color=style.colour, alpha=0.15, lw=0, zorder=2 + 0.01 * order, gid="band")
    options: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "mfc": style.face}
    options |= {"ms": 5.5, "lw": 1.5, "mew": 1.2, "elinewidth": 1.1, "capsize": 2.5, "zorder": 3 + 0.01 * order}
    ax.errorbar(epochs, mean, yerr=[(mean - low).tolist(), (high - mean).tolist()], label=init, **options)


def _ends(rows: Sequence[Mapping[str, Any]], everything: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper ends of the intervals of some rows, within [0, 1]; the mean where there is no interval.

    The interval of a paired difference is drawn around the mean of its initialiser, and the reference has none; means
    that are compared with nothing have their own.
    """
    compared = any(row.get("difference_ci95") is not None for row in everything)
    ends = []
    for row in rows:
        interval, centre = (None if compared else row["ci95"]), row["mean"]
        if row.get("difference_ci95") is not None:
            interval, centre = row["difference_ci95"], row["difference"]
        if interval is None or None in interval or not np.isfinite(interval).all():
            interval, centre = (row["mean"], row["mean"]), row["mean"]
        ends.append(np.clip(np.asarray(interval) + row["mean"] - centre, 0, 1))
    low, high = np.array(ends).T
    return low, high


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
    rows: Sequence[Mapping[str, Any]], styles: Mapping[str, _Style], ax: Axes | None, title: str | None
) -> Axes:
    """Initialisers as rows: the mean with its interval, and the difference from the first as text."""
    names = [typography.wrap(row["init"], 165) for row in rows]
    canvas = theme.Canvas.on(ax, 7.4, 1.0 + _row_height(names) * (len(rows) + 0.75))
    ax = canvas.ax
    low, high = _ends(rows, rows)
    for y, row in enumerate(rows):
        style = styles[row["init"]]
        bar: dict[str, Any] = {"color": style.colour, "marker": style.marker, "mfc": style.face, "label": row["init"]}
        ends = [[row["mean"] - low[y]], [high[y] - row["mean"]]]
        ax.errorbar([row["mean"]], [y], xerr=ends, ms=6.5, mew=1.2, capsize=3, lw=1.5, **bar)
        if row.get("difference") is None and len(rows) > 1:
            ax.axvline(row["mean"], color=style.colour, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    theme.list_axis(ax, range(len(rows)), names, len(rows))
    means = [f"{100 * row['mean']:.1f}" for row in rows]
    words = [_difference(row) for row in rows]
    heads = [("mean", means)] + ([("difference", words)] if len(rows) > 1 else [])
    theme.columns(ax, range(len(rows)), -0.8, heads)
    theme.percent(ax.xaxis, *ax.get_xlim())
    epochs = rows[0]["epochs"]
    label = f"test accuracy (%) after {epochs:g} epoch{'s' * (epochs != 1)}; {_seeds(rows)}"
    ax.set_xlabel(typography.wrap(label, 72 * 0.6 * canvas.size[0], typography.LABEL))
    canvas.finish(title)
    return ax


def _row_height(names: Sequence[str]) -> float:
    """Height of a row in inches."""
    return max(_ROW, 0.16 * (1 + max(name.count("\n") for name in names)) + 0.05)


def _difference(row: Mapping[str, Any]) -> str:
    if row.get("difference") is None:
        return "reference"
    interval = row.get("difference_ci95")
    width = 100 * (interval[1] - interval[0]) if interval else 0.0
    text = typography.signed(100 * row["difference"], typography.places(width))
    p = row["p_holm"] if row.get("p_holm") is not None else row.get("p")
    return text if p is None else f"{text}, {p_value(p)}"


def p_value(p: float) -> str:
    """A p-value as text: `p = 0.012`, `p = 2×10⁻⁹`, `p < 10⁻³⁰⁰`."""
    if p < 1e-300:
        return "p < 10⁻³⁰⁰"
    return f"p = {p:.2g}" if p >= 1e-3 else f"p = {typography.number(p, 1)}"


@theme.themed
def paired_differences(runs: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Each seed's accuracy minus the first initialiser's on the same seed, with the mean and its 95 % interval.

    Paired seeds share initial weights, batches and augmentation, so their differences vary far less than the
    accuracies do. Points are seeds; bars are mean +- t(0.975, n - 1) s / sqrt(n). Frozen arms are compared with
    the first frozen one.

    Args:
        runs: rows of a benchmark's `results.json`: `init`, `epochs`, `seed`, `accuracy` (a fraction), and optionally
            `diverged`, drawn as a cross.
        ax: axes to draw on; a new figure if None.
        title: figure title.

    Raises:
        UsageError: if there is nothing to compare.

    Example:
        >>> paired_differences(json.load(open("results.json"))["runs"])
    """
    arms = _arms(runs)
    styles = _styles(list(dict.fromkeys(run["init"] for run in runs)))
    names = [typography.wrap(arm.init, 165) for arm in arms]
    places, headings = _arranged(arms)
    height = max(_row_height(names), 0.5 if max(len(arm.differences) for arm in arms) > 16 else _ROW)
    canvas = theme.Canvas.on(ax, 7.4, 1.0 + height * (places[-1] + 1.75))
    ax = canvas.ax
    for y, arm in zip(places, arms, strict=True):
        _seed_points(ax, y, arm, styles[arm.init], 72 * height)
        _mean_bar(ax, y, arm, styles[arm.init])
    ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    theme.list_axis(ax, places, names, places[-1] + 1)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    for y, epochs in headings:
        side: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        text = f"{epochs:g} epoch{'s' * (epochs != 1)}"
        ax.annotate(text, (0, y), (-6, 0), ha="right", va="center", fontsize=typography.SMALL, weight="bold", **side)
    better = [f"{int((arm.differences > 0).sum())} of {len(arm.differences)}" for arm in arms]
    theme.columns(ax, places, -0.8, [("mean (95 % CI)", [_mean(arm) for arm in arms]), ("better on", better)])
    references = " or ".join(dict.fromkeys(arm.reference for arm in arms))
    label = f"accuracy minus that of {references} on the same seed (percentage points)"
    label += "; × diverged" if any(arm.diverged.any() for arm in arms) else ""
    ax.set_xlabel(typography.wrap(label, 72 * 0.6 * canvas.size[0], typography.LABEL))
    canvas.finish(title)
    return ax


@dataclass(frozen=True)
class _Arm:
    """An initialiser at one length against its reference: differences (n,) in points, and which pairs diverged."""

    init: str
    epochs: float
    reference: str
    differences: np.ndarray
    diverged: np.ndarray


def _arranged(arms: Sequence[_Arm]) -> tuple[list[float], list[tuple[float, float]]]:
    """Vertical positions of the arms, and (position, epochs) of a heading for each length if there are several."""
    if len({arm.epochs for arm in arms}) == 1:
        return [float(y) for y in range(len(arms))], []
    places: list[float] = []
    headings: list[tuple[float, float]] = []
    y = -1.0
    for i, arm in enumerate(arms):
        y += 1.0
        if i == 0 or arm.epochs != arms[i - 1].epochs:
            headings.append((y, arm.epochs))
            y += 0.8
        places.append(y)
    return places, headings


def _mean(arm: _Arm) -> str:
    low, high = _interval(arm.differences)
    decimals = typography.places(high - low)
    if len(arm.differences) == 1:
        return f"{typography.signed(arm.differences[0], decimals)} (one seed)"
    ends = f"{typography.signed(low, decimals)} to {typography.signed(high, decimals)}"
    return f"{typography.signed(arm.differences.mean(), decimals)} ({ends})"


def _arms(runs: Sequence[Mapping[str, Any]]) -> list[_Arm]:
    """All initialisers except the references, by length."""
    found: dict[tuple[float, str], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["epochs"], run["init"]), {})[run["seed"]] = run
    reference: dict[tuple[float, bool], str] = {}
    arms = []
    for (epochs, init), mine in found.items():
        first = reference.setdefault((epochs, init.endswith(_FROZEN)), init)
        pairs = [(mine[k], found[epochs, first][k]) for k in mine if k in found[epochs, first]]
        if first != init and pairs:
            values = np.array([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs])
            if not np.isfinite(values).all():
                raise DataError(f"`{init}` after {epochs:g} epochs: an accuracy is not finite")
            diverged = np.array([bool(a.get("diverged") or b.get("diverged")) for a, b in pairs])
            arms.append(_Arm(init, epochs, first, values, diverged))
    if not arms:
        raise UsageError("paired differences: expected a second initialiser with seeds of the first, found none")
    return sorted(arms, key=lambda arm: arm.epochs)


def _interval(values: np.ndarray) -> tuple[float, float]:
    """The mean's 95 % interval by Student's t; the mean itself for one value."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def _mean_bar(ax: Axes, y: float, arm: _Arm, style: _Style) -> None:
    low, high = _interval(arm.differences)
    mean = arm.differences.mean()
    options: dict[str, Any] = {"fmt": "D", "color": theme.INK, "mfc": style.face, "zorder": 4, "gid": "mean"}
    ax.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], ms=5, mew=1.2, capsize=4, lw=1.8, **options)


def _seed_points(ax: Axes, y: float, arm: _Arm, style: _Style, points: float) -> None:
    """One point per seed; points that would overlap are stacked, deterministically."""
    values = arm.differences
    step = max(float(np.ptp(values)) / 60, 1e-9)
    column = np.round(values / step).astype(int)
    offsets = np.zeros(len(values))
    for where in np.unique(column):
        same = np.flatnonzero(column == where)
        offsets[same] = np.arange(len(same)) - (len(same) - 1) / 2
    reach = max(np.abs(offsets).max(), 1.0)
    height = y + offsets * min(5.0 / points, 0.4 / reach)
    options: dict[str, Any] = {"color": style.colour, "mec": style.colour, "alpha": 0.55, "ls": "none", "zorder": 3}
    ok = ~arm.diverged
    ax.plot(values[ok], height[ok], "o", ms=3.2, mfc=style.face, gid="seeds", **options)
    if arm.diverged.any():
        ax.plot(values[~ok], height[~ok], "x", ms=4.5, gid="diverged", **options)
