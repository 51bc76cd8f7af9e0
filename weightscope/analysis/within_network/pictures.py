"""Figures of covariances within networks: which layers are drawn where on the page."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope import plots
from weightscope.analysis.within_network.layers import Layer, distinct, series
from weightscope.errors import UsageError
from weightscope.plots import Curve, Panel, Statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 8  # panels in a row
_FOCUS = (
    Statistic("relative_spread", "spread of the variance about the centre ÷ that of even variances", 1.0),
    Statistic("central_ratio", "variance of the central pixel ÷ mean over pixels", 1.0, log=True),
    Statistic("variance", "variance, mean over pixels", None, log=True),
)
_MATRIX = (
    Statistic("mean_ratio", "squared mean of the samples ÷ that of independent entries", 1.0, log=True),
    Statistic("edge_ratio", "largest eigenvalue ÷ edge of independent entries", 1.0, log=True),
    Statistic("relative_rank", "effective rank ÷ coordinates"),
)
_Row = list[Panel | None]


def maps(layers: Sequence[Layer], title: str) -> "Figure":
    """The covariances in block form (thesis Fig. 3.1).

    Raises:
        UsageError: if no covariance was kept.
    """
    large = sorted({f"{x.group or x.name} ({x.shape[-1]:,} coordinates)" for x in layers if _unkept(x)})
    drawn = [x for x in layers if not _unkept(x)]
    if not any(x.moments is not None for x in drawn):
        raise UsageError(f"picture: no covariance was kept of {', '.join(large)}; increase keep, or choose depth")
    rows, labels, notes = _rows(drawn, _map)
    notes += [f"not kept: {', '.join(large)}"] if large else []
    return plots.covariance_page(rows, row_labels=labels, title=title, note="; ".join([*notes, *_excluded(layers)]))


def samples(layers: Sequence[Layer], part: str, title: str) -> "Figure":
    """Some of the filters or patches (thesis Fig. 2.4-2.6).

    Raises:
        UsageError: if samples are rows or columns, not images.
    """
    if all(x.focus is None for x in layers):
        raise UsageError(f"picture: {part} are not images; choose maps or depth")
    rows, labels, notes = _rows(layers, _sample)
    most = max(len(row.examples) for row in layers if row.examples is not None)
    notes += [f"at most {most} filters of a layer, drawn at random"] if part == "filters" else []
    return plots.filter_page(rows, row_labels=labels, title=title, note="; ".join([*notes, *_excluded(layers)]))


def depth(layers: Sequence[Layer], title: str) -> "Figure":
    """The statistics against depth."""
    focused = any(x.focus is not None for x in layers)
    found = series(layers)
    depths = {rows[0].depth for _, rows in found}
    statistics = _FOCUS if focused else _MATRIX
    curves = []
    for name, rows in found:
        values = {s.key: _values(rows, s.key) for s in statistics}
        errors = {
            s.key: _values(rows, f"{s.key}_se")
            for s in statistics
            if any(f"{s.key}_se" in row.statistics for row in rows)
        }
        places = [row.layer if len(depths) == 1 else row.relative_depth for row in rows]
        curves.append(Curve(name or rows[0].source, places, values, errors, _kinds(rows) if focused else ()))
    axis = "layer" if len(depths) == 1 else "relative depth"
    notes = ["bars are 95 % intervals"] if any(c.errors for c in curves) else []
    return plots.depth_curves(curves, statistics, axis=axis, title=title, note="; ".join([*notes, *_excluded(layers)]))


def _values(rows: Sequence[Layer], key: str) -> list[float]:
    return [row.statistics.get(key, np.nan) for row in rows]


def _unkept(row: Layer) -> bool:
    return row.moments is not None and row.moments.covariance is None


def _excluded(layers: Sequence[Layer]) -> list[str]:
    bad = sum(row.nonfinite > 0 for row in layers)
    return [f"samples with NaN or infinite weights are left out, in {bad} of {len(layers)} layers"] if bad else []


def _rows(layers: Sequence[Layer], panel: Callable[[Layer], Panel]) -> tuple[list[_Row], list[str], list[str]]:
    """Panels in rows, row labels and notes: one network fills several rows, several networks have one row each."""
    found = series(layers)
    if len(found) == 1:
        rows: list[_Row] = [[panel(x) for x in layers[i : i + ACROSS]] for i in range(0, len(layers), ACROSS)]
        group = layers[0].group
        return rows, [group] * len(rows) if group else [], []
    groups = distinct(row.group for row in layers)
    found.sort(key=lambda item: groups.index(item[1][0].group))  # the same matrix of all networks below each other
    most = max(len(mine) for _, mine in found)
    chosen = np.unique(np.linspace(0, most - 1, min(most, ACROSS)).round().astype(int))
    rows = []
    for _, mine in found:
        here = [round(float(i) * (len(mine) - 1) / max(most - 1, 1)) for i in chosen]
        rows.append([panel(mine[i]) for i in dict.fromkeys(here)])
    return rows, [name for name, _ in found], [f"{len(chosen)} of {most} layers"] if len(chosen) < most else []


def _label(row: Layer) -> str:
    sizes = "×".join(map(str, row.shape[1:])) if len(row.shape) == 3 else str(row.shape[0])
    return f"layer {row.layer}, {sizes}"


def _map(row: Layer) -> Panel:
    shape: Any = row.shape if len(row.shape) == 3 else None
    if row.moments is None:
        return Panel(None, _label(row), reason="not finite")
    return Panel(row.moments.covariance, _label(row), shape)


def _sample(row: Layer) -> Panel:
    return Panel(row.examples, _label(row), reason="not finite")


def _kinds(layers: Sequence[Layer]) -> list[str]:
    """The kernel, and the stride where it is more than 1: filters before a smaller image look different."""
    strides = [f", stride {row.stride}" if row.stride is not None and row.stride > 1 else "" for row in layers]
    return ["×".join(map(str, row.shape[1:])) + stride for row, stride in zip(layers, strides, strict=True)]
