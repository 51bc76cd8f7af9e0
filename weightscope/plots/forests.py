"""Rows of points with intervals: held-out likelihoods, paired differences, scale and structure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from weightscope._util.arms import CONTROLS, epochs_text, point_text
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.plots import theme
from weightscope.plots.comparisons import CI, difference_label, row_height, styles_of, value_axis
from weightscope.plots.text import LABEL, interval, number, p_value, places, signed, wrap

_TOTAL = "(all)"  # name of the sum over groups in `PopulationFit.table`
_FARTHEST = 40.0  # ratio of differences beyond which the axis is symmetric-logarithmic
Row = Mapping[str, Any]


@theme.themed()
def heldout_scores(
    table: Sequence[Row], ax: Axes | None = None, *, group: str | None = None, title: str | None = None
) -> Axes:
    """Held-out log-likelihood per network of each structure, relative to the best, with standard errors.

    Differences are paired over the held-out networks, so their standard errors are those of the differences and not
    of the scores. The exact numbers are printed at the right; where they span orders of magnitude the axis is
    symmetric-logarithmic, as its label states. Structures that could not be fitted are listed with the reason.

    `table` is `PopulationFit.table`: `structure`, `parameters`, `difference` (<= 0), `difference_se`, `failed` (None or
    the reason) and `group`; the `group` drawn is by default the only one, or `(all)`, the sum over groups.
    """
    groups = list(dict.fromkeys(row.get("group") for row in table))
    if group is None:
        group = _TOTAL if _TOTAL in groups else groups[0] if len(groups) == 1 else None
    if group not in groups:
        named = ", ".join(map(str, groups)) or "none (the table is empty)"
        raise UsageError(f"held-out scores: expected group to be one of {named}, found {group}")
    rows = [row for row in table if row.get("group") == group]
    fitted, failed = [row for row in rows if not row.get("failed")], [row for row in rows if row.get("failed")]
    fitted.sort(key=lambda row: -row["difference"])
    canvas, ax = theme.canvas(ax, 7.4, 1.0 + 0.26 * (len(rows) + 1))
    texts = []
    for y, row in enumerate(fitted):
        value, error = row["difference"], row["difference_se"]
        bar: dict[str, Any] = {"fmt": "o" if y else "D", "color": theme.MUTED if y else theme.PALETTE[0]}
        theme.bar(ax, y, value, (value - error, value + error), ms=5.5, lw=1.4, **bar)
        texts.append(f"{signed(value, places(4 * error))} ± {error:,.{places(4 * error)}f}" if value else "best")
    sizes, scale = [abs(row["difference"]) for row in fitted if row["difference"]], ""
    if sizes and max(sizes) > _FARTHEST * min(sizes):
        linear = 10.0 ** np.floor(np.log10(min(sizes)))
        ax.set_xscale("symlog", linthresh=linear, linscale=0.6)
        ax.xaxis.set_minor_locator(NullLocator())
        scale = f"; logarithmic beyond ±{linear:g}"
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    theme.reference(ax, 0)
    reasons = [
        wrap(f"{row['structure']} is not fitted: {row['failed']}".replace("`", ""), canvas.width) for row in failed
    ]
    ax.set_xlabel("\n".join([f"held-out log-likelihood per network, relative to the best (nats{scale})", *reasons]))
    for y in range(len(fitted), len(rows)):
        theme.outside(ax, 0, y, "not fitted", 4, color=theme.MUTED)
    names, blank = [wrap(row["structure"], 2.1) for row in (*fitted, *failed)], [""] * len(failed)
    theme.list_axis(ax, range(len(names)), names, len(names))
    parameters = [f"{row['parameters']:,}" for row in fitted] + blank
    theme.columns(ax, range(len(names)), -0.85, [("difference ± s.e.", texts + blank), ("parameters", parameters)])
    return canvas.finish(title)


@theme.themed()
def paired_differences(
    arms: Sequence[Row], ax: Axes | None = None, *, metric: Metric = ACCURACY, title: str | None = None
) -> Axes:
    """Each seed's metric minus the reference's on the same seed, with the mean and its adjusted interval.

    Paired seeds share initial weights, batches and augmentation, so their differences vary far less than the
    values do. Points are seeds, diverged ones are crosses. Rows are those of
    `weightscope.benchmarking.seed_differences`: `init`, `epochs`, `reference`, `differences` (n,), `diverged` (n,),
    `interval` of their mean or None, and `left_out`, the number of seeds without a finite value.
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
            why = "one seed" if len(values) == 1 else "all equal" if row["interval"] is None else "too few seeds"
            means.append(f"{signed(mean, metric.decimals - 1)} ({why})")
        else:
            means.append(f"{signed(mean, places(ends[1] - ends[0]))} ({interval(*ends)})")
        equal = int((values == 0).sum())
        more = f"{int((metric.sign * values > 0).sum())} of {len(values)}"
        better.append(more + (f" ({equal} equal)" if equal else ""))
    theme.reference(ax, 0)
    theme.list_axis(ax, range(len(rows)), names, len(rows))
    value_axis(ax.xaxis)
    theme.columns(ax, range(len(rows)), -0.8, [(f"mean, {CI}", means), ("better on", better)])
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
    reference.
    Rows are those of `weightscope.benchmarking.summarise`.
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
        if row[key] is None:  # the control of the reference itself
            texts.append(("reference", ""))
            continue
        value = metric.factor * row[key]
        low, high = (metric.factor * end for end in row[f"{key}_ci_holm"] or (row[key], row[key]))
        theme.bar(ax, y, value, (low, high), **theme.look(i % 2, ls="none", marker=marker, ms=5.5, lw=1.6, gid=key))
        p = row["p_holm" if key == "difference" else f"{key}_p_holm"]
        texts.append((f"{signed(value, places(high - low))} ({interval(low, high)})", p_value(p)))
    theme.reference(ax, 0)
    several = len({row["epochs"] for row, _ in pairs}) > 1
    names = [wrap(_named(row, several=several), 2.3) for row, _ in pairs]
    theme.list_axis(ax, [(at[2 * i] + at[2 * i + 1]) / 2 for i in range(len(pairs))], names, at[-1] + 1)
    heads = zip((f"mean, {CI}", "adjusted"), map(list, zip(*texts, strict=True)), strict=True)
    theme.columns(ax, at, -0.8, list(heads))
    value_axis(ax.xaxis)
    counts = [n for row, other in pairs for n in (row.get(f"{beyond}_pairs"), other.get("pairs"))]
    drawn = {_place(row, str(row.get(key))) for row, _ in pairs for key in ("init", name, "reference")}
    shown = [row for place, row in found.items() if place in drawn]
    label = difference_label(metric, f"difference of test {metric.label} on the same seed", counts, shown)
    ax.set_xlabel(wrap(label, 0.62 * canvas.width, LABEL))
    canvas.legend([Line2D([], [], **theme.look(i, ls="none", marker=m, label=n)) for i, (n, _, m) in enumerate(parts)])
    return canvas.finish(title)


def _place(row: Row, init: str) -> tuple[str, Any, str]:
    return repr(row.get("cell", {})), row["epochs"], init


def _named(row: Row, *, several: bool) -> str:
    cell, length = point_text(row.get("cell", {})), epochs_text(row["epochs"]) * several
    return ", ".join(filter(None, [row["init"], cell, length]))
