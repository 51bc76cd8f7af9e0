"""Scatter of the alpha and beta of attention products."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from weightscope._util.arm_labels import LEVEL
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.plots import theme
from weightscope.plots.arms import difference_label

_FAINT = "#c3c9d1"  # edges that show points near zero, which are white
Row = Mapping[str, Any]


@theme.themed
def alpha_beta_frontier(
    points: Sequence[Row],
    ax: Axes | None = None,
    *,
    part: str = "qk",
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """The diagonal beta of products of attention weights against their noise alpha, for each construction.

    Points of a construction whose ratio of beta and alpha is constant are joined by a line. With differences of a
    benchmark, points are coloured by them; those that differ from zero at an adjusted level of 0.05 have a dark edge,
    and the best is framed.

    Args:
        points: rows with `construction`, `alpha`, `beta` and perhaps `difference` (a fraction for accuracies),
            `p_holm`, `reference` and `n`.
        ax: axes to draw on; a new figure if None.
        part: "qk", or "vo" for values and outputs, of whose product beta is minus the diagonal.
        metric: of the differences.
        title: figure title.

    Raises:
        UsageError: if there is no point.

    Example:
        >>> alpha_beta_frontier([svd_point(192, 64, 0.1 * i, 0.7, None) for i in range(11)])
    """
    if not points:
        raise UsageError("alpha-beta frontier: expected at least one product, found none")
    canvas = theme.Canvas.on(ax, 5.6, 5.2)
    ax = canvas.ax
    groups: dict[str, list[Row]] = {}
    for row in points:
        groups.setdefault(row["construction"], []).append(row)
    handles = []
    for order, (name, rows) in enumerate(groups.items()):
        alpha, beta = (np.array([row[key] for row in rows]) for key in ("alpha", "beta"))
        style: dict[str, Any] = {"color": theme.PALETTE[order % len(theme.PALETTE)]}
        compared = [row for row in rows if row.get("difference") is not None]
        if compared:
            _coloured(ax, compared, metric)
            style = {"color": theme.MUTED, "marker": "o", "ls": ""}
            name += "; dark edge: p < 0.05"
        elif _on_a_line(alpha, beta):
            ax.plot([0, *np.sort(alpha)], [0, *beta[np.argsort(alpha)]], lw=1.6, zorder=2, **style)
            style["ls"] = "-"
        else:
            style |= {"marker": theme.MARKERS[order % len(theme.MARKERS)], "ls": ""}
            ax.plot(alpha, beta, ms=3.4, alpha=0.8, zorder=3, **style)
        handles.append(Line2D([], [], **style, label=name))
    ax.set_xlabel("alpha (noise)")
    ax.set_ylabel("beta (diagonal)" if part == "qk" else "beta (minus the diagonal)")
    ax.grid(axis="both")
    ax.margins(0.04)
    canvas.legend(handles)
    canvas.finish(title)
    return ax


def _on_a_line(alpha: np.ndarray, beta: np.ndarray) -> bool:
    """Whether the ratio of beta and alpha is the same everywhere, to 10 %."""
    if (np.abs(alpha) < 1e-9).any() or len(alpha) < 2:
        return False
    ratio = beta / alpha
    return bool(np.ptp(ratio) < 0.1 * np.abs(ratio).max())


def _coloured(ax: Axes, rows: Sequence[Row], metric: Metric) -> None:
    """Points in the colours of their differences, as they are shown."""
    values = metric.factor * np.array([row["difference"] for row in rows])
    limit = theme.colour_limit(values, 1.0)
    sure = [row.get("p_holm") is not None and row["p_holm"] < LEVEL for row in rows]
    edges = [theme.INK if one else _FAINT for one in sure]
    alpha, beta = ([row[key] for row in rows] for key in ("alpha", "beta"))
    drawn = ax.scatter(alpha, beta, c=values, s=46, edgecolors=edges, linewidths=0.9, zorder=4, **theme.colours(limit))
    best = int(np.argmax(metric.sign * values))
    ax.scatter(alpha[best], beta[best], s=150, marker="s", facecolors="none", edgecolors=theme.INK, gid="largest")
    theme.colour_bar(ax, drawn, limit, difference_label(metric, rows), room=72 * 3.4, beyond=False)
