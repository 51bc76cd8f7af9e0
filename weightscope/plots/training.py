"""Training of a population: curves over epochs, and the distribution of a metric."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import DataError, UsageError
from weightscope.plots import theme
from weightscope.plots.comparisons import value_axis

_CURVE = "curve"


@theme.themed()
def training_curves(
    per_epoch: Any,
    ax: Axes | None = None,
    label: str | None = None,
    *,
    metric: Metric = ACCURACY,
    band: tuple[float, float] = (0.05, 0.95),
    title: str | None = None,
) -> Axes:
    """The median over networks at each epoch, with a band of quantiles. Call again on the same axes to add a curve.

    Args:
        per_epoch: (N, E), column e after epoch e + 1. Networks with values that are not finite are
            excluded; the legend counts them.
        label: name of the curve, such as `"test"`.
        band: lower and upper quantile.

    Example:
        >>> ax = training_curves(population.metrics["train_accuracy"], label="train")
        >>> training_curves(population.metrics["test_accuracy"], ax, "test")
    """
    values = np.asarray(per_epoch, dtype=np.float64)
    if values.ndim != 2 or values.size == 0:
        raise DataError(f"training curves: expected (networks, epochs), found {values.shape}")
    if not 0 <= band[0] < band[1] <= 1:
        raise UsageError(f"band: expected two increasing quantiles between 0 and 1, found {band}")
    kept = values[np.isfinite(values).all(axis=1)]
    if not len(kept):
        raise DataError(f"training curves: none of {len(values)} networks is finite at every epoch")
    metric.check(kept.ravel(), "training curves")
    canvas, ax = theme.canvas(ax, 6.4, 3.9)
    drawn = sum(line.get_gid() == _CURVE for line in ax.lines)
    colour = theme.colour(drawn)
    epochs = np.arange(1, values.shape[1] + 1)
    low, median, high = np.quantile(kept, [band[0], 0.5, band[1]], axis=0)
    text = f"{label}: " if label else ""
    text += f"median of {len(kept):,}"
    if len(kept) > 1:
        text += f", {100 * band[0]:g} to {100 * band[1]:g} % shaded"
    if len(kept) < len(values):
        text += f", {len(values) - len(kept):,} diverged"
    line_style = theme.line(drawn)
    marker = "o" if len(epochs) == 1 else None
    if len(kept) > 1:
        ax.fill_between(epochs, low, high, color=colour, alpha=0.18, lw=0, zorder=2 + 0.01 * drawn)
    ax.plot(epochs, median, color=colour, ls=line_style, marker=marker, label=text, gid=_CURVE, zorder=3 + 0.01 * drawn)
    ax.grid(axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    ax.set_xlabel("epoch")
    ax.set_ylabel(metric.title.removeprefix("test "))
    value_axis(ax.yaxis, metric)
    longest = max(np.size(line.get_xdata()) for line in ax.lines if line.get_gid() == _CURVE)
    if longest > 1:
        ax.set_xlim(1 - 0.02 * longest, longest * 1.02)
    ax.legend(loc="best")
    return canvas.finish(title)


@theme.themed()
def metric_distribution(
    values: Any, ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """Histogram of a metric of N networks, with the central 90 % shaded and the median marked.

    Accuracies are multiples of 1 / (number of test examples). The bin width is a multiple of that step, since bins with
    unequal numbers of steps would show spurious peaks. Values (N,) that are not finite are excluded and counted.

    Example:
        >>> metric_distribution(population.metrics["test_accuracy"])
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise DataError(f"{metric.name}: expected (networks,), found {values.shape}")
    kept = values[np.isfinite(values)]
    if not len(kept):
        raise DataError(f"{metric.name}: none of {len(values)} is finite")
    metric.check(kept, metric.name)
    canvas, ax = theme.canvas(ax, 6.4, 3.4)
    colour = theme.PALETTE[0]
    edges = _edges(kept)
    ax.hist(kept, bins=list(edges), color=colour, alpha=0.75, edgecolor="white", linewidth=0.6)
    low, median, high = np.quantile(kept, [0.05, 0.5, 0.95])
    left_out = len(values) - len(kept)
    ends = [f"{metric.factor * value:.{metric.decimals - 1}f}" for value in (low, median, high)]
    middle = f"90 % of networks: {ends[0]} to {ends[2]} {metric.unit}".strip()
    span = ax.axvspan(low, high, color=theme.FAINT, alpha=0.45, lw=0, zorder=0, label=middle)
    line = ax.axvline(
        median, color=theme.PALETTE[3], lw=1.6, label=f"median: {ends[1]} {metric.unit}".strip(), gid="median"
    )
    ax.set_xlabel(metric.title.removeprefix("test "))
    ax.set_ylabel("networks")
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    value_axis(ax.xaxis, metric)
    ax.grid(axis="y")
    heading = f"{len(kept):,} networks" + (f", {left_out:,} diverged and excluded" if left_out else "")
    canvas.legend([line, span], heading)
    return canvas.finish(title)


def _edges(values: np.ndarray) -> np.ndarray:
    """Bin edges half a step away from the values, of Freedman-Diaconis width (1981)."""
    distinct = np.unique(values.round(9))
    step = float(np.diff(distinct).min(initial=1.0)) if len(distinct) > 1 else 0.01
    spread = np.subtract(*np.quantile(values, [0.75, 0.25]))
    wanted = 2 * spread / len(values) ** (1 / 3)
    wanted = max(wanted, np.ptp(values) / 60)
    width = max(1, round(wanted / step)) * step
    # From the top down, so that no bin exceeds the largest possible accuracy.
    top = values.max() + step / 2
    return top - width * np.arange(int(np.ceil((top - values.min()) / width - 1e-9)), -1, -1)
