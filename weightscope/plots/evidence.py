"""Forest plots of stripe ratios and of held-out likelihoods."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography
from weightscope.plots.tensor_names import short_names

_ROW = 0.23  # inches
_TOTAL = "(all)"  # name of the sum over groups in `PopulationFit.table`
_FARTHEST = 40.0  # ratio of differences beyond which the axis is symmetric-logarithmic


@theme.themed
def stripe_ratios(
    rows: Sequence[tuple[str, str, float, float, float]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Variances of group means relative to those of independent entries, with 95 % intervals.

    Above 1, group means vary more than those of independent entries: the matrix is striped (MLP paper, Fig. 1). The
    axis is logarithmic, so that 1/2 and 2 are equally far from 1. A ratio of 0 (means removed exactly) is an arrow at
    the left edge.

    Args:
        rows: (label, group, ratio, low, high): a tensor's name, the kind of mean, and the ratio with its interval.
            Rows of one label are adjacent; a group has one colour and marker.
        ax: axes to draw on; a new figure if None.
        title: figure title.

    Raises:
        DataError: if a number is not finite or negative, or a ratio is outside its interval.
        UsageError: if there are no rows, or a pair of label and group is duplicated.

    Example:
        >>> stripe_ratios([("fc1.weight", "column means", 1.52, 1.44, 1.60)])
    """
    for label, group, ratio, low, high in rows:
        if not (np.isfinite([ratio, low, high]).all() and 0 <= low <= ratio <= high):
            raise DataError(f"`{label}`, {group}: expected 0 <= low <= ratio <= high, found {low}, {ratio}, {high}")
    if not rows or len({row[:2] for row in rows}) < len(rows):
        raise UsageError("stripe ratios: expected rows that differ in label or group, found none or a repeated one")
    labels, groups = list(dict.fromkeys(r[0] for r in rows)), list(dict.fromkeys(r[1] for r in rows))
    places, centres = _rows_of(labels, rows)
    canvas = theme.Canvas.on(ax, 7.4, 1.35 + _ROW * (max(places.values()) + 1))
    ax = canvas.ax
    positive = [v for row in rows for v in row[2:] if v > 0]
    low, high = min([*positive, 0.8]), max([*positive, 1.25])
    edge = low / (high / low) ** 0.05
    for group in groups:
        _group(ax, group, groups.index(group), [row for row in rows if row[1] == group], places, edge)
    ax.axvline(1, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    ax.set_xscale("log")
    ax.set_xlim(edge, high * (high / low) ** 0.05)
    ticks = _ratio_ticks(*ax.get_xlim())
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    for stripe in range(1, len(labels), 2):
        mine = [y for (label, _), y in places.items() if label == labels[stripe]]
        ax.axhspan(min(mine) - 0.75, max(mine) + 0.75, color="#f3f5f7", lw=0, zorder=0)
    short, remark = short_names(labels)
    theme.list_axis(ax, centres, short, max(places.values()) + 1)
    ax.set_xlabel("variance of the means ÷ that of independent entries (log scale)" + (f"\n{remark}" if remark else ""))
    texts = ["0 exactly" if r[2] == 0 else f"{r[2]:.2f} ({r[3]:.2f}–{r[4]:.2f})" for r in rows]
    theme.columns(ax, [places[row[0], row[1]] for row in rows], -0.9, [("ratio (95 % CI)", texts)])
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    ax.text(1, -0.9, "independent", fontsize=typography.SMALL, color=theme.MUTED, ha="center", va="center", bbox=box)
    if len(groups) > 1:
        looks = [
            (theme.PALETTE[i % len(theme.PALETTE)], theme.MARKERS[i % len(theme.MARKERS)]) for i in range(len(groups))
        ]
        canvas.legend(
            [Line2D([], [], color=c, marker=m, ls="none", label=g) for g, (c, m) in zip(groups, looks, strict=True)]
        )
    canvas.finish(title)
    return ax


def _rows_of(
    labels: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> tuple[dict[tuple[str, str], float], list[float]]:
    """Vertical positions, with half a row between labels; and the labels' centres."""
    places, centres, at = {}, [], 0.0
    for label in labels:
        mine = [row for row in rows if row[0] == label]
        for row in mine:
            places[row[0], row[1]] = at
            at += 1
        centres.append(at - 0.5 - len(mine) / 2)
        at += 0.5 if len(mine) > 1 else 0.0
    return places, centres


def _group(
    ax: Axes,
    name: str,
    index: int,
    rows: Sequence[tuple[Any, ...]],
    places: Mapping[tuple[str, str], float],
    edge: float,
) -> None:
    colour, marker = theme.PALETTE[index % len(theme.PALETTE)], theme.MARKERS[index % len(theme.MARKERS)]
    drawn = [row for row in rows if row[2] > 0]
    y = [places[row[0], row[1]] for row in drawn]
    ratio, low, high = (np.array([row[i] for row in drawn]) for i in (2, 3, 4))
    low = np.maximum(low, edge)
    bars = ax.errorbar(
        ratio,
        y,
        xerr=[(ratio - low).tolist(), (high - ratio).tolist()],
        fmt=marker,
        color=colour,
        ms=5,
        capsize=2.5,
        lw=1.4,
        label=name,
    )
    bars.lines[0].set_gid(name)
    for row in rows:
        y_row = places[row[0], row[1]]
        if row[2] == 0:
            ax.plot([edge], [y_row], marker="<", color=colour, ms=6, clip_on=False, gid="zero")


def _ratio_ticks(low: float, high: float) -> list[float]:
    """At most nine ticks at round ratios, 1 included."""
    for steps in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        # Decimals below 1 as well; reciprocals would print as 0.667.
        ticks = [round(s * 10.0**e, 6) for e in range(-7, 8) for s in steps]
        if steps[1:2] == (1.2,):
            ticks += [0.9, 0.7]
        inside = sorted({t for t in ticks if low <= t <= high} | {1.0})
        if len(inside) <= 9 and all(np.diff(np.log(inside)) > 0.06 * np.log(high / low)):
            return inside
    return [1.0]


@theme.themed
def heldout_scores(
    table: Sequence[Mapping[str, Any]], ax: Axes | None = None, *, group: str | None = None, title: str | None = None
) -> Axes:
    """Held-out log-likelihood per network of each structure, relative to the best, with standard errors.

    Differences are paired over the held-out networks, so their standard errors are those of the differences and not
    of the scores. The exact numbers are printed at the right; where they span orders of magnitude the axis is
    symmetric-logarithmic, as its label states. Structures that could not be fitted are listed with the reason.

    Args:
        table: rows of `PopulationFit.table`: `structure`, `parameters`, `difference` (<= 0) and `difference_se`,
            `failed` (None or the reason), and `group`.
        ax: axes to draw on; a new figure if None.
        group: the group to draw; if None the only one, or `(all)`, the sum over groups.
        title: figure title.

    Raises:
        UsageError: if the table is empty, has several groups and no sum, or no such group.
        DataError: if a row that did not fail has numbers that are not finite.

    Example:
        >>> heldout_scores(result.table, group="stages.0.blocks.0.mlp")
    """
    rows = _one_group(table, group)
    fitted = sorted((row for row in rows if not row.get("failed")), key=lambda row: -row["difference"])
    failed = [row for row in rows if row.get("failed")]
    ordered = [*fitted, *failed]
    canvas = theme.Canvas.on(ax, 7.4, 1.0 + 1.15 * _ROW * (len(ordered) + 1))
    ax = canvas.ax
    for y, row in enumerate(fitted):
        best = y == 0
        bar: dict[str, Any] = {
            "fmt": "D" if best else "o",
            "color": theme.PALETTE[0] if best else theme.MUTED,
            "gid": "score",
        }
        ax.errorbar([row["difference"]], [y], xerr=[row["difference_se"]], ms=5.5, capsize=2.5, lw=1.4, **bar)
    _score_axis(ax, fitted)
    room = 72 * 0.5 * canvas.size[0]
    for y, row in enumerate(failed, len(fitted)):
        reason = typography.wrap(f"not fitted: {row['failed']}", room).split("\n")
        text = reason[0] + (" …" if len(reason) > 1 else "")
        style: dict[str, Any] = {"fontsize": typography.SMALL, "color": theme.MUTED, "va": "center"}
        ax.text(0.01, y, text, transform=ax.get_yaxis_transform(), gid="failed", **style)
    names = [typography.wrap(row["structure"], 150) for row in ordered]
    theme.list_axis(ax, range(len(names)), names, len(names))
    parameters = ["" if row.get("failed") else f"{row['parameters']:,}" for row in ordered]
    heads = [("difference ± s.e.", [_in_words(row) for row in ordered]), ("parameters", parameters)]
    theme.columns(ax, range(len(ordered)), -0.85, heads)
    canvas.finish(title)
    return ax


def _in_words(row: Mapping[str, Any]) -> str:
    if row.get("failed"):
        return ""
    if row["difference"] == 0:
        return "best"
    places = typography.places(4 * row["difference_se"])
    return f"{typography.signed(row['difference'], places)} ± {row['difference_se']:,.{places}f}"


def _one_group(table: Sequence[Mapping[str, Any]], group: str | None) -> list[Mapping[str, Any]]:
    groups = list(dict.fromkeys(row.get("group") for row in table))
    if group is None:
        group = _TOTAL if _TOTAL in groups else groups[0] if len(groups) == 1 else None
    if group not in groups:
        named = ", ".join(map(str, groups)) or "none (the table is empty)"
        raise UsageError(f"held-out scores: expected group to be one of {named}, found {group}")
    rows = [row for row in table if row.get("group") == group]
    for row in rows:
        numbers = [] if row.get("failed") else [row["difference"], row["difference_se"]]
        if not np.isfinite(numbers).all():
            found = " ± ".join(map(str, numbers))
            raise DataError(f"held-out scores: `{row['structure']}`: expected finite numbers, found {found}")
    return rows


def _score_axis(ax: Axes, fitted: Sequence[Mapping[str, Any]]) -> None:
    sizes = [abs(row["difference"]) for row in fitted if row["difference"]]
    scale = ""
    if sizes and max(sizes) > _FARTHEST * min(sizes):
        linear = 10.0 ** np.floor(np.log10(min(sizes)))
        ax.set_xscale("symlog", linthresh=linear, linscale=0.6)
        ax.xaxis.set_minor_locator(NullLocator())
        scale = f"; logarithmic beyond ±{linear:g}"
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: typography.number(value)))
    ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")
    ax.set_xlabel(f"held-out log-likelihood per network, relative to the best (nats{scale})")
