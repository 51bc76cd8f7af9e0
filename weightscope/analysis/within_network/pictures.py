"""Pictures of a `Within`: which layers go where on the page."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope import plots
from weightscope.errors import UsageError
from weightscope.plots import Curve, Panel, Statistic

if TYPE_CHECKING:
    from weightscope.analysis.within_network.result import Layer, Within

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


def draw(found: "Within", picture: str, title: str | None) -> Any:
    """The figure of a picture; see `Within.plot`.

    Raises:
        UsageError: if samples are to be drawn that are no images.
    """
    note = _note(found)
    if title is None:
        title = f"Filters of {', '.join(found.labels)}" if picture == "samples" else found.finding()
    if picture == "depth":
        return _depth(found, title, note)
    if picture == "samples":
        if not found.focused:
            raise UsageError(f"picture: {found.part} are no images; choose maps or depth")
        rows, labels, more = _rows(found, _sample)
        most = max(len(row.examples) for row in found.layers if row.examples is not None)
        more += [f"at most {most} filters of a layer, drawn at random"] if found.part == "filters" else []
        return plots.filter_page(rows, row_labels=labels, title=title, note="; ".join([*more, *note]))
    large = sorted({f"{x.group or x.name} ({x.shape[-1]:,} coordinates)" for x in found.layers if _unkept(x)})
    drawn = dataclasses.replace(found, layers=tuple(x for x in found.layers if not _unkept(x)))
    if not any(x.moments is not None for x in drawn.layers):
        raise UsageError(f"picture: no covariance was kept of {', '.join(large)}; raise keep, or choose depth")
    rows, labels, more = _rows(drawn, _map)
    more += [f"not kept: {', '.join(large)}"] if large else []
    return plots.covariance_page(rows, row_labels=labels, title=title, note="; ".join([*more, *note]))


def _unkept(row: "Layer") -> bool:
    return row.moments is not None and row.moments.covariance is None


def _note(found: "Within") -> list[str]:
    bad = sum(row.nonfinite > 0 for row in found.layers)
    return [f"samples with NaN or infinite weights are left out, in {bad} of {len(found.layers)} layers"] if bad else []


def _rows(found: "Within", panel: Any) -> tuple[list[list[Panel | None]], list[str], list[str]]:
    """Panels in rows: one network goes on in the next row, several have a row each, with the same layers."""
    blocks = [(label, group) for group in found.groups for label in found.labels if found.of(label, group)]
    if len(blocks) == 1:
        layers = found.of(*blocks[0])
        rows = [[panel(x) for x in layers[i : i + ACROSS]] for i in range(0, len(layers), ACROSS)]
        return rows, [blocks[0][1]] * len(rows) if blocks[0][1] else [], []
    most = max(len(found.of(*block)) for block in blocks)
    chosen = np.unique(np.linspace(0, most - 1, min(most, ACROSS)).round().astype(int))
    rows = []
    for block in blocks:
        layers = found.of(*block)
        here = [round(float(i) * (len(layers) - 1) / max(most - 1, 1)) for i in chosen]
        rows.append([panel(layers[i]) for i in dict.fromkeys(here)])
    names = [" ".join(filter(None, (label if len(found.labels) > 1 else "", group))) for label, group in blocks]
    return rows, names, [f"{len(chosen)} of {most} layers"] if len(chosen) < most else []


def _label(row: "Layer") -> str:
    sizes = "×".join(map(str, row.shape[1:])) if len(row.shape) == 3 else str(row.shape[0])
    return f"layer {row.layer}, {sizes}"


def _map(row: "Layer") -> Panel:
    shape = row.shape if len(row.shape) == 3 else None
    if row.moments is None:
        return Panel(None, _label(row), reason="not finite")
    return Panel(row.moments.covariance, _label(row), shape)  # type: ignore[arg-type]


def _sample(row: "Layer") -> Panel:
    return Panel(row.examples, _label(row), reason="not finite")


def _depth(found: "Within", title: str | None, note: list[str]) -> Any:
    groups = found.groups
    blocks = [(label, group) for label in found.labels for group in groups if found.of(label, group)]
    depths = {found.of(*block)[0].depth for block in blocks}
    statistics = _FOCUS if found.focused else _MATRIX
    curves = []
    for label, group in blocks:
        layers = found.of(label, group)
        name = " ".join(filter(None, (label if len(found.labels) > 1 or not group else "", group)))
        values = {s.key: [row.statistics.get(s.key, np.nan) for row in layers] for s in statistics}
        errors = {
            s.key: [row.statistics.get(f"{s.key}_se", np.nan) for row in layers]
            for s in statistics
            if any(f"{s.key}_se" in row.statistics for row in layers)
        }
        places = [row.layer if len(depths) == 1 else row.relative_depth for row in layers]
        curves.append(Curve(name, places, values, errors, _kinds(layers) if found.focused else ()))
    axis = "layer" if len(depths) == 1 else "relative depth"
    bars = ["bars are 95 % intervals"] if any(c.errors for c in curves) else []
    return plots.depth_curves(curves, statistics, axis=axis, title=title, note="; ".join([*bars, *note]))


def _kinds(layers: Sequence["Layer"]) -> list[str]:
    """The kernel, and the stride where it is more than 1: filters before a smaller image look different."""
    strides = [f", stride {row.stride}" if row.stride is not None and row.stride > 1 else "" for row in layers]
    return ["×".join(map(str, row.shape[1:])) + stride for row, stride in zip(layers, strides, strict=True)]
