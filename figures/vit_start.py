"""What mimetic attention's start of small ViTs does: reads analyses/vit_start/results.json."""

import json
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from weightscope import plots
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "vit_start"
TITLES = {
    "digits": "Digits, 4 epochs",
    "learned positions": "Digits, learned positions",
    "16 epochs": "Digits, 16 epochs",
    "cifar10": "CIFAR-10 at 16 x 16, 5 epochs",
}
WORDS = {  # results.json has all arms
    "mimetic": "mimetic attention",
    "vo": "its values and outputs only",
    "qk": "its queries and keys only",
    "vo, sign turned": "values and outputs, positive diagonal",
    "uniform, c = 0.4": "uniform attention, $W_V W_O = -0.4\\,I$",
    "uniform, default vo": "uniform attention, default $W_V W_O$",
    "centred in every block": "token mean subtracted in every block",
}


def kind(arm: str) -> int:
    """Colour and marker: a start of queries and keys or values and outputs, uniform attention, or another network."""
    return 2 if arm.startswith("centred") else 1 if arm.startswith("uniform") else 0


def main(study: Path = STUDY, out: Path = HERE / "vit_start.png") -> None:
    results = json.loads((study / "results.json").read_text())
    found = [name for name in TITLES if name in results]
    rows = [arm for arm in WORDS if any(arm in results[name]["accuracies"] for name in found)]
    figure, axes = plots.subplots(1, len(found), width=3.1 * len(found) + 2.6, height=0.3 * len(rows) + 1.3)
    figure.suptitle(
        "Subtracting the tokens' mean in every block gives at least as much as mimetic attention", fontsize=11
    )
    for i, (ax, name) in enumerate(zip(axes[0], found, strict=True)):
        accuracy = {arm: 100 * np.array(values) for arm, values in results[name]["accuracies"].items()}
        base = accuracy["default"]
        for arm in rows:
            if arm not in accuracy:
                continue
            difference = accuracy[arm] - base
            half = student.ppf(0.975, len(base) - 1) * difference.std(ddof=1) / len(base) ** 0.5
            y, style = rows.index(arm), {"color": theme.PALETTE[kind(arm)]}
            ax.plot([difference.mean() - half, difference.mean() + half], [y, y], lw=1.6, **style)
            ax.plot(difference.mean(), y, theme.MARKERS[kind(arm)], ms=5, **style)
        ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
        ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="points over the default start")
        ax.set_yticklabels([WORDS[arm] for arm in rows] if i == 0 else [""] * len(rows))
        ax.set_title(f"{TITLES[name]}\n{len(base)} networks an arm, default {base.mean():.1f} %", fontsize=9)
        ax.grid(axis="y", lw=0.4, alpha=0.4)
    plots.save(figure, out)


if __name__ == "__main__":
    main()
