"""What pictures of benchmarks share: how arms look, where their paired intervals end, and axes of a metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightscope._util.arm_labels import FROZEN
from weightscope._util.divergence import count_range, divergence
from weightscope.data.metrics import Metric
from weightscope.plots import theme, typography

ROW = 0.34  # inches


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of an initialiser; a frozen arm has those of its counterpart, with open markers."""

    colour: str
    marker: str
    line: Any
    frozen: bool

    @property
    def face(self) -> str:
        """The colour of the inside of a marker."""
        return "white" if self.frozen else self.colour


def styles_of(inits: Sequence[str]) -> dict[str, Style]:
    """The style of each initialiser, in order."""
    bases = list(dict.fromkeys(name.removesuffix(FROZEN) for name in inits))
    styles = {}
    for name in inits:
        i, frozen = bases.index(name.removesuffix(FROZEN)), name.endswith(FROZEN)
        line = (0, (1, 1.5)) if frozen else theme.LINES[i % len(theme.LINES)]
        styles[name] = Style(theme.PALETTE[i % len(theme.PALETTE)], theme.MARKERS[i % len(theme.MARKERS)], line, frozen)
    return styles


def handle(style: Style, label: str) -> Line2D:
    """An entry of the legend."""
    return Line2D(
        [], [], color=style.colour, ls=style.line, marker=style.marker, mfc=style.face, mew=1.2, lw=1.5, label=label
    )


def row_height(names: Sequence[str]) -> float:
    """Height of a row in inches."""
    return max(ROW, 0.16 * (1 + max(name.count("\n") for name in names)) + 0.05)


def p_value(p: float) -> str:
    """A p-value as text: `p = 0.012`, `p = 2×10⁻⁹`, `p < 10⁻³⁰⁰`."""
    if p < 1e-300:
        return "p < 10⁻³⁰⁰"
    return f"p = {p:.2g}" if p >= 1e-3 else f"p = {typography.number(p, 1)}"


def ends(
    rows: Sequence[Mapping[str, Any]], everything: Sequence[Mapping[str, Any]], metric: Metric
) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper ends of the intervals of some rows, inside the bounds; the mean where there is no interval.

    The interval of a paired difference is drawn around the mean of its arm, and the reference has none; means that are
    compared with nothing have their own.

    Args:
        rows: that are drawn, (m,).
        everything: all rows of the picture.
        metric: of the means.
    """
    compared = any(row.get("difference") is not None for row in everything)
    own = [row if compared else {**row, "difference": row["mean"], "difference_ci95": row.get("ci95")} for row in rows]
    low, high = np.array([_around(row, metric) for row in own]).T
    return low, high


def _around(row: Mapping[str, Any], metric: Metric) -> tuple[float, float]:
    interval = row.get("difference_ci95")
    if row["n"] == 1 or interval is None or None in interval or not np.isfinite(interval).all():
        return row["mean"], row["mean"]
    low, high = np.clip(np.asarray(interval) + row["mean"] - row["difference"], *metric.bounds)
    return float(low), float(high)


def draw_line(
    ax: Axes, x: np.ndarray, mean: np.ndarray, between: tuple[np.ndarray, np.ndarray], style: Style, **options: Any
) -> None:
    """A line of means with bars between the lower and the upper ends of their intervals.

    Args:
        ax: axes to draw on.
        x: places (m,).
        mean: (m,).
        between: ends of the bars, two of (m,); see `ends`.
        style: of the line.
        options: of `Axes.errorbar`, such as `label` and `zorder`.
    """
    low, high = between
    look: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "mfc": style.face}
    look |= {"ms": 5.5, "lw": 1.5, "mew": 1.2, "elinewidth": 1.1, "capsize": 2.5}
    ax.errorbar(x, mean, yerr=[(mean - low).tolist(), (high - mean).tolist()], **look, **options)


def seeds_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many seeds a mean has, what its bar is (see `ends`), and how many networks diverged."""
    counts, lost = [row["n"] for row in rows], divergence(rows)
    compared = [row for row in rows if row.get("difference") is not None]
    if set(counts) == {1}:
        text = "1 seed, so no interval"
    elif not compared:
        text = f"mean of {count_range(counts)} seeds with 95 % CI"
    else:
        references = " or ".join(dict.fromkeys(row.get("reference") or rows[0]["init"] for row in compared))
        text = f"mean of {count_range(counts)} seeds; bars: 95 % CI of the paired difference from {references}"
        if any(row["n"] != row["pairs"] for row in compared if row.get("pairs") is not None):
            text += seeds_text([row.get("pairs") for row in compared]) + " of both"
    return f"{text}; {lost}" if lost else text


def seeds_text(pairs: Sequence[int | None]) -> str:
    """`, 2 to 8 seeds`: how many differences are over; empty for old results, whose rows do not have `pairs`."""
    known = [n for n in pairs if n is not None]
    return f", {count_range(known)} seed{'s' * (max(known) != 1)}" if known else ""


def value_axis(axis: Any, limits: tuple[float, float], metric: Metric) -> None:
    """Tick labels of an axis of stored values, in the unit of the axis label."""
    if metric.unit == "%":
        theme.percent(axis, *limits)
    else:
        axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{metric.factor * value:g}".replace("-", "−")))


def difference_label(metric: Metric, rows: Sequence[Mapping[str, Any]]) -> str:
    """`accuracy minus that of default (points), 8 seeds` for arms, where lower is better, and how many diverged."""
    unit = metric.difference_unit.removeprefix("percentage ")
    text = f"{metric.label} minus that of {rows[0]['reference']}" + (f" ({unit})" if unit else "")
    lost = divergence(rows)
    return f"{text}{seeds_text([row.get('pairs') for row in rows])}{metric.direction}" + (f"; {lost}" if lost else "")
