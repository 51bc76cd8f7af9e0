"""Differences of arms on paired seeds: one point for each seed, and their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy import stats

from weightscope._util.arm_labels import FROZEN
from weightscope.data.metrics import ACCURACY, Metric, same_differences
from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography
from weightscope.plots.arms import ROW, Style, row_height, styles_of


@theme.themed
def paired_differences(
    runs: Sequence[Mapping[str, Any]],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """Each seed's metric minus the first initialiser's on the same seed, with the mean and its 95 % interval.

    Paired seeds share initial weights, batches and augmentation, so their differences vary far less than the
    values do. Points are seeds; bars are mean +- t(0.975, n - 1) s / sqrt(n), inside what is possible, and none for
    differences that are equal up to rounding. Frozen arms are compared with the first frozen one.

    Args:
        runs: rows of a benchmark's `results.json`: `init`, `epochs`, `seed`, the metric under its key (`accuracy`, a
            fraction; pairs with None are left out), and optionally `diverged`, drawn as a cross.
        ax: axes to draw on; a new figure if None.
        metric: that is drawn.
        title: figure title.

    Raises:
        UsageError: if there is nothing to compare.

    Example:
        >>> paired_differences(json.load(open("results.json"))["runs"])
    """
    arms = _arms(runs, metric)
    styles = styles_of(list(dict.fromkeys(run["init"] for run in runs)))
    names = [typography.wrap(arm.init, 165) for arm in arms]
    places, headings = _arranged(arms)
    height = max(row_height(names), 0.5 if max(len(arm.differences) for arm in arms) > 16 else ROW)
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
    better = [_better_on(arm, metric) for arm in arms]
    theme.columns(ax, places, -0.8, [("mean (95 % CI)", [_mean(arm, metric) for arm in arms]), ("better on", better)])
    references = " or ".join(dict.fromkeys(arm.reference for arm in arms))
    label = f"{metric.label} minus that of {references} on the same seed"
    label += (f" ({metric.difference_unit})" if metric.difference_unit else "") + metric.direction
    label += "; × diverged" if any(arm.diverged.any() for arm in arms) else ""
    if left_out := sum(run.get(metric.key) is None for run in runs):
        label += f"; {left_out} diverged networks left out"
    ax.set_xlabel(typography.wrap(label, 72 * 0.6 * canvas.size[0], typography.LABEL))
    canvas.finish(title)
    return ax


@dataclass(frozen=True)
class _Arm:
    """An initialiser at one length against its reference: differences (n,) as shown, and which pairs diverged.

    `interval` is that of their mean, None if the differences are equal.
    """

    init: str
    epochs: float
    reference: str
    differences: np.ndarray
    diverged: np.ndarray
    interval: tuple[float, float] | None


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


def _better_on(arm: _Arm, metric: Metric) -> str:
    """`5 of 8`, or `5 of 8 (2 equal)`."""
    equal = int((arm.differences == 0).sum())
    text = f"{int((metric.sign * arm.differences > 0).sum())} of {len(arm.differences)}"
    return f"{text} ({equal} equal)" if equal else text


def _mean(arm: _Arm, metric: Metric) -> str:
    if arm.interval is None:
        why = "one seed" if len(arm.differences) == 1 else "all equal"
        return f"{typography.signed(arm.differences.mean(), metric.decimals - 1)} ({why})"
    low, high = arm.interval
    decimals = typography.places(high - low)
    ends = f"{typography.signed(low, decimals)} to {typography.signed(high, decimals)}"
    return f"{typography.signed(arm.differences.mean(), decimals)} ({ends})"


def _arms(runs: Sequence[Mapping[str, Any]], metric: Metric) -> list[_Arm]:
    """All initialisers except the references, by length."""
    found: dict[tuple[float, str], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        mine = found.setdefault((run["epochs"], run["init"]), {})
        if run.get(metric.key) is not None:
            mine[run["seed"]] = run
    reference: dict[tuple[float, bool], str] = {}
    arms = []
    for (epochs, init), mine in found.items():
        first = reference.setdefault((epochs, init.endswith(FROZEN)), init)
        pairs = [(mine[k], found[epochs, first][k]) for k in mine if k in found[epochs, first]]
        if first != init and pairs:
            values, others = np.array([[run[metric.key] for run in pair] for pair in pairs], dtype=float).T
            if not np.isfinite(values - others).all():
                raise DataError(f"`{init}` after {epochs:g} epochs: {metric.label} is not finite")
            diverged = np.array([bool(a.get("diverged") or b.get("diverged")) for a, b in pairs])
            interval = _interval(values, others, metric)
            arms.append(_Arm(init, epochs, first, metric.factor * (values - others), diverged, interval))
    if not arms:
        raise UsageError("paired differences: expected a second initialiser with seeds of the first, found none")
    return sorted(arms, key=lambda arm: arm.epochs)


def _interval(values: np.ndarray, others: np.ndarray, metric: Metric) -> tuple[float, float] | None:
    """The 95 % interval of the mean difference by Student's t, as shown; None for equal ones, of unknown spread."""
    if same_differences(values, others):
        return None
    differences, most = values - others, metric.bounds[1] - metric.bounds[0]
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    low, high = metric.factor * np.clip(differences.mean() + np.array([-half, half]), -most, most)
    return float(low), float(high)


def _mean_bar(ax: Axes, y: float, arm: _Arm, style: Style) -> None:
    mean = arm.differences.mean()
    low, high = arm.interval or (mean, mean)
    options: dict[str, Any] = {"fmt": "D", "color": theme.INK, "mfc": style.face, "zorder": 4, "gid": "mean"}
    ax.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], ms=5, mew=1.2, capsize=4, lw=1.8, **options)


def _seed_points(ax: Axes, y: float, arm: _Arm, style: Style, points: float) -> None:
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
