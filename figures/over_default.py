"""Points of starts over the default one, a panel for each setting: reads analyses/NAME/results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope import plots
from weightscope.benchmarking.statistics import paired
from weightscope.plots import theme

HERE = Path(__file__).parent
ANALYSES = HERE.parent / "analyses"


class Picture(NamedTuple):
    """What is drawn of a study."""

    title: str
    panels: Mapping[str, str]  # key of results.json -> title
    arms: Mapping[str, str]  # name -> in words; others are not drawn. Those of the first panel if empty
    kinds: tuple[str, ...]  # beginnings of names with colours and markers of their own


PICTURES = {
    "vit_start": Picture(
        "Subtracting the tokens' mean in every block gives at least as much as mimetic attention",
        {
            "digits": "Digits, 4 epochs",
            "learned positions": "Digits, learned positions",
            "16 epochs": "Digits, 16 epochs",
            "cifar10": "CIFAR-10 at 16 × 16, 5 epochs",
        },
        {
            "mimetic": "mimetic attention",
            "vo": "its values and outputs only",
            "qk": "its queries and keys only",
            "vo, sign turned": "values and outputs, positive diagonal",
            "uniform, c = 0.4": "uniform attention, W_V W_O = −0.4 I",
            "uniform, default vo": "uniform attention, default W_V W_O",
            "centred in every block": "token mean subtracted in every block",
        },
        ("uniform", "centred"),
    ),
    "derived_vit_start": Picture(
        "Start drawn from trained ViTs: values and outputs, then the rest; permuted keys change nothing",
        {"parts": "sinusoidal positions", "parts, learned positions": "learned positions"},
        {},
        ("mimetic", "uniform"),
    ),
    "pretrained_distribution": Picture(
        "The distribution of DINOv2 helps by its values and outputs; its queries and keys do not",
        {
            "digits": "Digits",
            "digits, parts": "Digits, other seeds",
            "fashion": "Fashion-MNIST, width 48",
            "fashion, parts": "Fashion-MNIST, width 32",
            "cifar10, parts": "CIFAR-10 at 16 × 16",
        },
        {
            "mimetic": "mimetic attention",
            "population": "distribution of ViTs trained on the digits",
            "distribution": "distribution of DINOv2, correlations times 4",
            "uncorrelated": "... without correlations",
            "distribution, VO only": "... values and outputs only",
            "distribution, QK only": "... queries and keys only",
            "distribution, VO turned": "... values and outputs, sign turned",
        },
        ("population", "mimetic"),
    ),
    "other_source": Picture(
        "The distribution of trained ViTs beats tuned mimetic attention after 2 epochs; after 8 it is undecided",
        {"short": "2 epochs", "long": "8 epochs"},
        {},
        ("mimetic",),
    ),
}
NAMES = {
    "derived, rest only": "derived, all but VO and QK",
    "derived, K turned": "derived, sign of K turned",
    "derived, V turned": "derived, sign of V turned",
    "uniform, c = 0": "no attention at the start",
    "uniform, c = 0.4": "uniform attention, W_V W_O = −0.4 I",
}


def main(name: str, study: Path | None = None, out: Path | None = None) -> None:
    about, results = PICTURES[name], json.loads(((study or ANALYSES / name) / "results.json").read_text())
    found = {key: _accuracies(results[key]) for key in about.panels if key in results}
    arms = about.arms or {arm: NAMES.get(arm, arm) for arm in results[next(iter(found))]["over_default"]}
    rows = [arm for arm in arms if any(arm in accuracy for accuracy in found.values())]
    size = {"width": 3.1 * len(found) + 2.6, "height": 0.3 * len(rows) + 1.4}
    figure, (axes,) = plots.subplots(1, len(found), title=about.title, **size)
    for i, (ax, (key, accuracy)) in enumerate(zip(axes, found.items(), strict=True)):
        for y, arm in enumerate(rows):
            if arm not in accuracy:
                ax.text(0.5, y, "not run", transform=ax.get_yaxis_transform(), va="center", ha="center", fontsize=8)
                continue
            row = paired(accuracy[arm], accuracy["default"])
            kind = next((k for k, start in enumerate(about.kinds, 1) if arm.startswith(start)), 0)
            style: dict[str, Any] = {"color": theme.PALETTE[kind], "fmt": theme.MARKERS[kind], "ms": 5, "lw": 1.6}
            theme.bar(ax, y, 100 * row["difference"], 100 * np.array(row["difference_ci95"]), **style)
        theme.reference(ax, 0)
        ax.set(
            yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="points over the default\n(pointwise 95 %)"
        )
        ax.set_yticklabels([arms[arm] for arm in rows] if i == 0 else [""] * len(rows))
        base = accuracy["default"]
        ax.set_title(f"{about.panels[key]}\nn = {len(base)}, default {100 * base.mean():.1f} %", fontsize=9)
        ax.grid(axis="y", lw=0.4, alpha=0.4)
    plots.save(figure, out or HERE / f"{name}.png")


def _accuracies(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The networks of each arm; the factor of correlations is said once, in the words of the arms."""
    return {arm.replace(", gain 4", ""): np.array(values) for arm, values in found["accuracies"].items()}


if __name__ == "__main__":
    for name in PICTURES:
        main(name)
