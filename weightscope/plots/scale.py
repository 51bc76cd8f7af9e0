"""What an initialiser's scale does and what its structure adds, on paired seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightscope._util.divergence import divergence
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.plots import theme, typography
from weightscope.plots.arms import p_value, seeds_text

_ROW = 0.3  # inches
_PARTS = (("effect of scale", "difference", "s"), ("structure beyond scale", "beyond_scale", "D"))


@theme.themed
def scale_and_structure(
    summary: Sequence[Mapping[str, Any]],
    ax: Axes | None = None,
    *,
    metric: Metric = ACCURACY,
    title: str | None = None,
) -> Axes:
    """The two parts of what an initialiser changes: its scale, and the structure beyond it.

        effect of scale         metric(control) - metric(reference)
        structure beyond scale  metric(initialiser) - metric(control)

    The control has the initialiser's mean and variance of each tensor and independent Gaussian entries. Both parts are
    means of differences on the same seed, with 95 % intervals; their sum is the difference from the reference.

    Args:
        summary: rows of a benchmark's `results.json` with controls: `init`, `epochs`, `control`, `difference`,
            `beyond_scale`, their `_ci95` (fractions for accuracies), adjusted p-values, `pairs`, `beyond_scale_pairs`.
        ax: axes to draw on; a new figure if None.
        metric: that is drawn.
        title: figure title.

    Raises:
        UsageError: if no initialiser has a control.

    Example:
        >>> save(scale_and_structure(json.load(open("results.json"))["summary"]), "scale.png")
    """
    found = {_place(row, row["init"]): row for row in summary}
    pairs = [(row, found[_place(row, row["control"])]) for row in summary if row.get("control") is not None]
    if not pairs:
        raise UsageError("scale and structure: expected initialisers with controls (bench's `control`), found none")
    lengths = {row["epochs"] for row, _ in pairs}
    places = [i + 0.4 * (i // 2) for i in range(2 * len(pairs))]
    canvas = theme.Canvas.on(ax, 7.4, 1.2 + _ROW * (places[-1] + 1.75))
    ax = canvas.ax
    texts, ps = [], []
    for y, (row, control, part) in zip(places, [(*pair, i) for pair in pairs for i in (0, 1)], strict=True):
        text, p = _bar(ax, y, control if part == 0 else row, part, metric)
        texts.append(text)
        ps.append(p)
    ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    names = [_named(row, several=len(lengths) > 1) for row, _ in pairs]
    labels = [typography.wrap(name, 165) for name in names]
    centres = [(places[2 * i] + places[2 * i + 1]) / 2 for i in range(len(pairs))]
    theme.list_axis(ax, centres, labels, places[-1] + 1)
    theme.columns(ax, places, -0.8, [("mean (95 % CI)", texts), ("adjusted", ps)])
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    label = f"difference of test {metric.label} on the same seed"
    label += f" ({metric.difference_unit})" if metric.difference_unit else ""
    counts = [n for row, control in pairs for n in (row.get("beyond_scale_pairs"), control.get("pairs"))]
    label += seeds_text(counts) + metric.direction
    drawn = {_place(row, str(row.get(key))) for row, _ in pairs for key in ("init", "control", "reference")}
    label += f"; {lost}" if (lost := divergence([found[place] for place in found if place in drawn])) else ""
    ax.set_xlabel(typography.wrap(label, 72 * 0.5 * canvas.size[0], typography.LABEL))
    canvas.legend(
        [
            Line2D([], [], color=theme.PALETTE[i], marker=marker, ls="none", label=name)
            for i, (name, _, marker) in enumerate(_PARTS)
        ]
    )
    canvas.finish(title)
    return ax


def _place(row: Mapping[str, Any], init: str) -> tuple[str, Any, str]:
    return repr(row.get("cell", {})), row["epochs"], init


def _named(row: Mapping[str, Any], *, several: bool) -> str:
    cell = [
        f"{key.rpartition('.')[2]}={'all' if value is None else value}" for key, value in row.get("cell", {}).items()
    ]
    return ", ".join([row["init"], *cell, *([f"{row['epochs']} epoch{'s' * (row['epochs'] != 1)}"] if several else [])])


def _bar(ax: Axes, y: float, row: Mapping[str, Any], part: int, metric: Metric) -> tuple[str, str]:
    """Draw one part; returns its value with interval, and its p-value, as text."""
    _, key, marker = _PARTS[part]
    if row[key] is None:  # the control of the reference itself
        return "reference", ""
    value = metric.factor * row[key]
    low, high = (metric.factor * end for end in row[f"{key}_ci95"] or (row[key], row[key]))
    bar: dict[str, Any] = {"fmt": marker, "color": theme.PALETTE[part], "ms": 5.5, "capsize": 3, "lw": 1.6, "gid": key}
    ax.errorbar([value], [y], xerr=[[value - low], [high - value]], **bar)
    decimals = typography.places(high - low)
    ends = f"{typography.signed(low, decimals)} to {typography.signed(high, decimals)}"
    p = row["p_holm" if key == "difference" else f"{key}_p_holm"]
    return f"{typography.signed(value, decimals)} ({ends})", p_value(p)
