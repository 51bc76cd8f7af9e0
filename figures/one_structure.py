"""Published schemes as entries of one covariance, and initialisers drawn from it: reads analyses/one_structure."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.stats import norm

from weightscope import plots
from weightscope._util.arms import CONTROLS
from weightscope.benchmarking.statistics import holm
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
KINDS = ("derived", "scale only", "hand-made", "uncorrelated")
TITLES = {"correlation": "correlations within and across layers", "variance ratio": "stripes"}
UNCORRELATED = CONTROLS["uncorrelated"].suffix
NULLS = {"correlation": 0.0, "variance ratio": 1.0}
CLEAR = {True: (theme.PALETTE[0], "adjusted p < 0.05"), False: (theme.MUTED, "not significant")}


def adjusted(rows: list[dict[str, Any]]) -> list[float]:
    """The p-value of each row: of pairs as stored, adjusted for all pairs of the network; of others by Holm over them.

    Where a row has an interval alone, its p-value is the normal one.
    """
    others = [row for row in rows if "p" not in row]
    errors = [(row["ci95"][1] - row["ci95"][0]) / (2 * norm.isf(0.025)) for row in others]
    normal = [2 * norm.sf(abs(row["value"] - NULLS[row["what"]]) / e) for row, e in zip(others, errors, strict=True)]
    found = iter(holm([row.get("p_unadjusted", float(p)) for row, p in zip(others, normal, strict=True)]))
    return [row["p"] if "p" in row else next(found) for row in rows]


def entries(axes: Axes, rows: list[dict[str, Any]], what: str, title: str) -> None:
    """One line for each scheme, one point with its interval for each block or pair of blocks, and for all blocks."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows if row["what"] == what))
    for place, scheme in enumerate(schemes):
        found = [row for row in rows if row["scheme"] == scheme and row["what"] == what]
        for i, row in enumerate(found):
            y = place + (0 if len(found) == 1 else 0.6 * (i / (len(found) - 1) - 0.5))
            colour, _ = CLEAR[row["adjusted"] < 0.05]
            axes.plot(row["ci95"], [y, y], color=colour, lw=1.2)
            axes.plot(row["value"], y, "o", ms=3.5, color=colour, mfc=colour if row["adjusted"] < 0.05 else "white")
    axes.axvline(NULLS[what], color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
    axes.set(yticks=range(len(schemes)), ylim=(len(schemes) - 0.4, -0.6), title=title)
    axes.set_yticklabels([scheme.removeprefix("beyond covariances: ") for scheme in schemes])
    axes.set_xlabel("correlation" if what == "correlation" else "variance relative to independent entries")


def in_words(init: str, gain: str) -> tuple[str, int]:
    """The label of an arm in words, and its kind; `gain` is that of the derived initialiser."""
    name, kind = init.replace(" (preset=cifar-patch2)", ""), 2
    words = {
        "gain-1": "derived, not amplified",
        gain: "derived",
        "gain-0": "derived, gain 0",
        "shrunk": "derived, shrunk covariance",
        "within-blocks": "derived, no correlations across blocks",
        "scale": "variances only",
    }
    control = next((c for c in CONTROLS.values() if init.endswith(c.suffix)), None)
    name = name.removesuffix(control.suffix) if control else name
    first, _, second = name.partition("+")
    if first in words:
        name, kind = words[first] + (f", {second} on top" if second else ""), {"scale": 2, "gain-0": 3}.get(first, 0)
    if control is None:
        return name, kind
    return f"{name},{control.suffix.replace('(', '').replace(')', '')}", 1 if control is CONTROLS["scale"] else 3


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
    title = "Published schemes are entries of one covariance, not all with the published sign; bars are 95 % intervals"
    figure, axes = plots.subplots(len(found), 2, width=13, height=4.0 * len(found), title=title)
    for line, name in zip(axes, found, strict=True):
        networks, rows = table[name]["networks"], [row for row in table[name]["rows"] if row["what"] in NULLS]
        rows = [row | {"adjusted": p} for row, p in zip(rows, adjusted(rows), strict=True)]
        rows = [row for row in rows if not row["scheme"].endswith("(folded)")]  # within 0.01 of what is not folded
        for ax, what in zip(line, ("correlation", "variance ratio"), strict=True):
            entries(ax, rows, what, f"{NAMES[name]}: {TITLES[what]} ({networks} networks)")
    handles = [
        Line2D([], [], marker="o", color=colour, mfc=colour if clear else "white", label=word)
        for clear, (colour, word) in CLEAR.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
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
        earlier = "" if any(row["init"].endswith(UNCORRELATED) for row in arms) else ", earlier run"
        differences(ax, arms, f"{NAMES[name]}, {CONDITIONS[condition]} ({arms[0]['n']} seeds{earlier})")
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    handles = [
        Line2D([], [], label=kind, **theme.style(i, ls="-", marker=theme.MARKERS[i])) for i, kind in enumerate(KINDS)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(KINDS))
    plots.save(figure, out.with_name(f"{out.stem}_benchmarks{out.suffix}"))


if __name__ == "__main__":
    main()
