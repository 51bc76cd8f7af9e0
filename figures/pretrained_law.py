"""Small ViTs drawn from the distribution of a pretrained one: reads analyses/pretrained_law/results.json."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "pretrained_law"
TITLES = {"digits": "Digits, width 32", "fashion": "Fashion-MNIST, width 48"}


def main(study: Path = STUDY, out: Path = HERE / "pretrained_law.png") -> None:
    results = json.loads((study / "results.json").read_text())
    found = [name for name in TITLES if name in results]
    figure, axes = plots.subplots(1, len(found), width=3.4 * len(found) + 1, height=2.4)
    for i, (ax, name) in enumerate(zip(axes[0], found, strict=True)):
        rows = list(results[name]["over_default"].items())
        for y, (arm, row) in enumerate(rows):
            style = {"color": theme.PALETTE[arm.startswith("law")]}
            ax.plot(100 * np.array(row["difference_ci95"]), [y, y], lw=1.6, **style)
            ax.plot(100 * row["difference"], y, theme.MARKERS[arm.startswith("law")], ms=5, **style)
        ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
        ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="points over the default start")
        ax.set_yticklabels([arm for arm, _ in rows] if i == 0 else [""] * len(rows))
        base = 100 * np.mean(results[name]["accuracies"]["default"])
        ax.set_title(f"{TITLES[name]}\n{results[name]['n']} networks an arm, default {base:.1f} %", fontsize=9)
        ax.grid(axis="y", lw=0.4, alpha=0.4)
    plots.save(figure, out)


if __name__ == "__main__":
    main()
