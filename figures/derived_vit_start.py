"""The start that is drawn from trained ViTs by rate and by step: reads analyses/derived_vit_start."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from weightscope import plots
from weightscope.benchmarking.statistics import mean_interval
from weightscope.data.metrics import ACCURACY
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "derived_vit_start"
RATES = {
    "rates": "4 epochs, sinusoidal positions",
    "rates, learned positions": "4 epochs, learned positions",
    "rates, 16 epochs": "16 epochs, sinusoidal positions",
}
TITLE = "At each start's own rate three fifths of the gain stay, and centring the tokens gives more"
STARTS = (
    "default",
    "derived",
    "derived, uncorrelated",
    "derived, scale",
    "mimetic",
    "centred once",
    "centred in every block",
)


STYLED = (*STARTS, "mimetic, VO only", "derived, VO only", "uniform, c = 0", "uniform, c = 0.4")
NAMES = {"uniform, c = 0": "no attention at the start", "uniform, c = 0.4": "uniform attention, W_V W_O = −0.4 I"}


def style_of(arm: str) -> dict[str, Any]:
    """The colour and marker of a start; what is no start of the first panel is dashed."""
    i = STYLED.index(arm)
    style = {"color": theme.PALETTE[i % len(theme.PALETTE)], "marker": theme.MARKERS[i % len(theme.MARKERS)]}
    return style | {"ls": "-" if arm in STARTS else "--"}


def draw_curves(ax: Axes, found: dict[str, Any], title: str) -> None:
    """Accuracy of each start by rate on the seeds that choose, and filled at its own rate on those that test."""
    for start in (start for start in STARTS if start in found["accuracies"]):
        place, style = STARTS.index(start), style_of(start)
        curve = {
            float(arm.rpartition(" ")[2]): 100 * np.mean(values)
            for arm, values in found["choice"]["accuracies"].items()
            if arm.startswith(f"{start}, rate ")
        }
        ax.plot(list(curve), list(curve.values()), lw=1, ms=4, mfc="white", **style)
        test = mean_interval(np.array(found["accuracies"][start]), ACCURACY)
        rate, mean = found["choice"]["chosen"][start] * 1.03 ** (place - 3), 100 * test["mean"]
        ends = 100 * np.array(test["ci95"])
        ax.plot([rate, rate], ends, lw=1.6, color=style["color"])
        ax.plot(rate, mean, ms=7, label=start, **style | {"ls": ""})
    rates = sorted({float(arm.rpartition(" ")[2]) for arm in found["choice"]["accuracies"]})
    ax.set(xscale="log", xticks=rates, xlabel="learning rate", ylabel="test accuracy (%)")
    ax.set_xticklabels([f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    ax.set_title(title, fontsize=9)


def draw_steps(ax: Axes, found: dict[str, Any]) -> None:
    """The share of the tokens' common component before the last block."""
    for arm, values in found["arms"].items():
        shares = [100 * row[-1] for row in values["common"]]
        ax.plot(range(len(shares)), shares, lw=1.2, ms=4, label=NAMES.get(arm, arm), **style_of(arm))
    ax.set(xticks=range(len(found["steps"])), xlabel="training steps", ylabel="common component, last block (%)")
    ax.set_xticklabels([str(step) for step in found["steps"]])
    ax.set_title(f"share of the tokens' mean in their square, {found['n']} networks", fontsize=9)


def main(study: Path = STUDY, out: Path = HERE / "derived_vit_start_rates.png") -> None:
    results = json.loads((study / "results.json").read_text())
    found = [name for name in RATES if name in results]
    figure, axes = plots.subplots(1, len(found) + 1, width=5.2 * (len(found) + 1), height=5.2, title=TITLE)
    for ax, name in zip(axes[0], found, strict=False):
        choice, n = results[name]["choice"]["n"], results[name]["n"]
        draw_curves(ax, results[name], f"{RATES[name]}\nopen: {choice} seeds that chose; filled: {n} others, 95 %")
    draw_steps(axes[0][-1], results["by step"])
    for ax in (axes[0][0], axes[0][-1]):
        ax.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    plots.save(figure, out)


if __name__ == "__main__":
    main()
