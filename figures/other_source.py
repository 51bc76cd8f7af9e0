"""ViTs from a distribution fitted on other images, and mimetic attention: reads analyses/other_source/results.json."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots
from weightscope.benchmarking.statistics import paired
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "other_source"


def main(study: Path = STUDY, out: Path = HERE / "other_source.png") -> None:
    results = json.loads((study / "results.json").read_text())
    names = ("short", "long")
    rows = list(results["short"]["over_default"])
    figure, axes = plots.subplots(1, 2, width=8.4, height=0.36 * len(rows) + 1.3)
    for i, (ax, name) in enumerate(zip(axes[0], names, strict=True)):
        found = results[name]
        accuracy = {arm: np.array(values) for arm, values in found["accuracies"].items()}
        for arm in rows:
            if arm not in accuracy:
                continue
            row = paired(accuracy[arm], accuracy["default"])
            y, kind = rows.index(arm), int(arm.startswith("mimetic"))
            ax.plot(100 * np.array(row["difference_ci95"]), [y, y], lw=1.6, color=theme.PALETTE[kind])
            ax.plot(100 * row["difference"], y, theme.MARKERS[kind], ms=5, color=theme.PALETTE[kind])
        ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
        ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="points over the default start")
        ax.set_yticklabels(rows if i == 0 else [""] * len(rows))
        base = 100 * accuracy["default"].mean()
        ax.set_title(f"{found['epochs']} epochs, n = {found['n']}, default {base:.1f} %", fontsize=9)
        ax.grid(axis="y", lw=0.4, alpha=0.4)
    plots.save(figure, out)


if __name__ == "__main__":
    main()
