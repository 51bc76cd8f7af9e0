"""Published schemes as entries of one covariance, and initialisers drawn from it: reads analyses/one_structure."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from weightscope import plots
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "one_structure"
NAMES = {"convnext": "ConvNeXt", "vit": "ViT", "convmixer": "ConvMixer"}
CONDITIONS = {
    "short": "short training",
    "long": "long training",
    "other data": "on Fashion-MNIST",
    "other width": "at twice the width",
}
KINDS = ("derived", "scale only", "hand-made")
TITLES = {"correlation": "correlations within and across layers", "variance ratio": "stripes"}


def entries(axes: Axes, rows: list[dict[str, Any]], what: str, title: str) -> None:
    """One line for each scheme, one point with its interval for each block or pair of blocks."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows if row["what"] == what))
    for place, scheme in enumerate(schemes):
        found = [row for row in rows if row["scheme"] == scheme and row["what"] == what]
        for i, row in enumerate(found):
            y = place + (0 if len(found) == 1 else 0.6 * (i / (len(found) - 1) - 0.5))
            clear = not row["ci95"][0] <= (0 if what == "correlation" else 1) <= row["ci95"][1]
            colour = theme.PALETTE[0] if clear else theme.MUTED
            axes.plot(row["ci95"], [y, y], color=colour, lw=1.2)
            axes.plot(row["value"], y, "o", ms=3.5, color=colour)
    axes.axvline(0 if what == "correlation" else 1, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
    axes.set(yticks=range(len(schemes)), yticklabels=schemes, ylim=(len(schemes) - 0.4, -0.6), title=title)
    axes.set_xlabel("correlation" if what == "correlation" else "variance relative to independent entries")


def in_words(init: str, gain: str) -> tuple[str, int]:
    """The label of an arm in words, and its kind; `gain` is that of the derived initialiser."""
    name, kind = init.replace(" (preset=cifar-patch2)", ""), 2
    words = {
        "gain-1": "derived, not amplified",
        gain: "derived",
        "shrunk": "derived, shrunk covariance",
        "within-blocks": "derived, no correlations across blocks",
        "scale": "variances only",
    }
    first, _, second = name.removesuffix(" (scale only)").partition("+")
    if first in words:
        name, kind = words[first] + (f", {second} on top" if second else ""), 2 if first == "scale" else 0
    return (f"{name.removesuffix(' (scale only)')}, scale only", 1) if init.endswith("(scale only)") else (name, kind)


def differences(axes: Axes, arms: list[dict[str, Any]], title: str) -> None:
    """Difference from the default of each arm, in points of accuracy, with its adjusted interval."""
    shown = [row for row in arms if row["difference"] is not None]
    gain = next(row["init"] for row in shown if row["init"].startswith("gain-"))
    labels = [in_words(row["init"], gain) for row in shown]
    for y, (row, (_, kind)) in enumerate(zip(shown, labels, strict=True)):
        low, high = (100 * value for value in row["difference_ci_holm"])
        axes.plot([low, high], [y, y], color=theme.PALETTE[kind], lw=1.4)
        axes.plot(100 * row["difference"], y, theme.MARKERS[kind], ms=4.5, color=theme.PALETTE[kind])
    axes.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
    axes.set(yticks=range(len(shown)), ylim=(len(shown) - 0.4, -0.6), title=title)
    axes.set(yticklabels=[label for label, _ in labels], xlabel="accuracy minus that of the default (points)")


def main(study: Path = STUDY, out: Path = HERE / "one_structure.png") -> None:
    table = json.loads((study / "table.json").read_text())
    found = [name for name in NAMES if name in table]
    figure, axes = plots.subplots(len(found), 2, width=13, height=3.6 * len(found))
    for line, name in zip(axes, found, strict=True):
        networks, rows = table[name]["networks"], table[name]["rows"]
        for ax, what in zip(line, ("correlation", "variance ratio"), strict=True):
            entries(ax, rows, what, f"{NAMES[name]}: {TITLES[what]} ({networks} networks)")
    plots.save(figure, out)

    results = json.loads((study / "results.json").read_text())
    derived = [
        [row for row in found["arms"] if row["init"].startswith("gain-")][:1]
        for name in NAMES
        if name in results
        for found in results[name]["conditions"].values()
    ]
    panels = [(name, condition) for name in NAMES if name in results for condition in results[name]["conditions"]]
    better = sum(row["difference_ci_holm"][0] > 0 for arms in derived for row in arms)
    title = f"The derived initialiser is better than the default in {better} of {len(derived)} comparisons"
    title += "; bars are 95 % intervals, adjusted in each panel (Holm)"
    size = {"width": 14.0, "height": 3.1 * -(-len(panels) // 2)}
    figure, axes = plots.subplots(-(-len(panels) // 2), 2, **size, title=title)
    flat = [ax for line in axes for ax in line]
    for ax, (name, condition) in zip(flat, panels, strict=False):
        arms = results[name]["conditions"][condition]["arms"]
        differences(ax, arms, f"{NAMES[name]}, {CONDITIONS[condition]} ({arms[0]['n']} seeds)")
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    handles = [
        Line2D([], [], label=kind, **theme.look(i, ls="-", marker=theme.MARKERS[i])) for i, kind in enumerate(KINDS)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    plots.save(figure, out.with_name(f"{out.stem}_benchmarks{out.suffix}"))


if __name__ == "__main__":
    main()
