"""Small ViTs drawn from the distribution of a pretrained one: reads analyses/pretrained_distribution/results.json."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "pretrained_distribution"
TITLES = {
    "digits": "Digits",
    "digits, parts": "Digits, other seeds",
    "fashion": "Fashion-MNIST, width 48",
    "fashion, parts": "Fashion-MNIST, width 32",
    "cifar10, parts": "CIFAR-10 at 16 x 16",
}
WORDS = {  # results.json has all arms
    "mimetic": "mimetic attention",
    "population": "distribution of ViTs trained on the digits",
    "distribution": "distribution of DINOv2, correlations times 4",
    "uncorrelated": "... without correlations",
    "distribution, VO only": "... values and outputs only",
    "distribution, QK only": "... queries and keys only",
    "distribution, VO turned": "... values and outputs, sign turned",
}


def kind(arm: str) -> int:
    """Colour and marker: the distribution of DINOv2 and its controls, that of a population, mimetic attention."""
    return 2 if arm == "mimetic" else 1 if arm.startswith("population") else 0


def main(study: Path = STUDY, out: Path = HERE / "pretrained_distribution.png") -> None:
    results = json.loads((study / "results.json").read_text())
    found = [name for name in TITLES if name in results]
    over = {
        name: {arm.replace(", gain 4", ""): row for arm, row in results[name]["over_default"].items()} for name in found
    }
    rows = [arm for arm in WORDS if any(arm in over[name] for name in found)]
    figure, axes = plots.subplots(1, len(found), width=2.4 * len(found) + 2.4, height=0.3 * len(rows) + 1.3)
    for i, (ax, name) in enumerate(zip(axes[0], found, strict=True)):
        for y, arm in enumerate(rows):
            if (row := over[name].get(arm)) is None:
                continue
            style = {"color": theme.PALETTE[kind(arm)]}
            ax.plot(100 * np.array(row["difference_ci95"]), [y, y], lw=1.6, **style)
            ax.plot(100 * row["difference"], y, theme.MARKERS[kind(arm)], ms=5, **style)
        ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
        ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="points over the default start")
        ax.set_yticklabels([WORDS[arm] for arm in rows] if i == 0 else [""] * len(rows))
        base = 100 * np.mean(results[name]["accuracies"]["default"])
        ax.set_title(f"{TITLES[name]}\nn = {results[name]['n']}, default {base:.1f} %", fontsize=9)
        ax.grid(axis="y", lw=0.4, alpha=0.4)
    figure.suptitle(
        "The distribution of DINOv2 helps by its values and outputs; its queries and keys do not", fontsize=10
    )
    plots.save(figure, out)


if __name__ == "__main__":
    main()
