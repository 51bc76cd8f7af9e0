"""When in training correlations appear, and what early ones give as a start: reads analyses/emergence/results.json."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots
from weightscope._util.arms import CONTROLS
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "emergence"
KINDS = {"convnext": "ConvNeXt", "vit": "ViT"}
STRIPES = ("stripes of fc1, column means", "stripes of fc2, row means")
ARMS = {"end": "distribution of epoch {}", "early": "distribution of epoch {}"}
KINDS_OF_ARM = ("", *(control.suffix for control in CONTROLS.values()))


def main(study: Path = STUDY, out: Path = HERE / "emergence.png") -> None:
    """Draw three panels: correlations and stripes against training, and both distributions as initialisers."""
    results = json.loads((study / "results.json").read_text())
    epochs = results["snapshots"]
    figure, (axes,) = plots.subplots(1, 3, width=13.5, height=4.3)
    order = 0
    for kind, word in KINDS.items():
        rows = results[kind]["rows"]
        for what in dict.fromkeys(row["what"] for row in rows):
            stripes = what.startswith("stripes")
            if stripes and what not in STRIPES:
                continue
            ax, style = axes[int(stripes)], theme.style(order, ls="-", ms=4.5)
            order += 1
            curves = [[one["value"] if one else np.nan for one in r["curve"]] for r in rows if r["what"] == what]
            values = np.exp(curves) if stripes else np.array(curves)
            ax.plot(epochs, values.T, **style | {"lw": 0.6, "alpha": 0.45, "marker": None})
            label = f"{word}: {what.removeprefix('stripes of ')}"
            ax.plot(epochs, values.mean(0), label=label, **style)
    titles = (
        "Norms against fc1 correlate, QK and VO hardly",
        "Stripes of fc1 appear by epoch 4",
        "As a start, only the last epoch's helps",
    )
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    for ax, level, text in ((axes[0], 0, "correlation"), (axes[1], 1, "variance of means / of independent entries")):
        ax.axhline(level, color=theme.INK, lw=0.8, zorder=0)
        ax.set_xscale("symlog", base=2, linthresh=1)
        ax.set_xticks(epochs, [str(epoch) for epoch in epochs])
        ax.minorticks_off()
        ax.set(xlabel="epoch", ylabel=text)
        ax.legend(frameon=False, fontsize=theme.SMALL)
    axes[1].set_yscale("log", base=2)
    axes[1].yaxis.set_major_formatter("{x:g}")
    initialisers = results["initialisers"]
    found, shown = initialisers["against default"], []
    for arm, words in ARMS.items():
        for kind, suffix in enumerate(KINDS_OF_ARM):
            if arm + suffix in found:
                row, y, style = found[arm + suffix], len(shown), {"color": theme.PALETTE[kind]}
                axes[2].plot(100 * np.array(row["difference_ci95"]), [y, y], lw=1.6, **style)
                axes[2].plot(100 * row["difference"], y, theme.MARKERS[kind], ms=5, **style)
                shown.append(words.format(initialisers["gains"][arm]["epoch"]) + suffix.replace(" (", ", ").strip(")"))
    axes[2].axvline(0, color=theme.INK, lw=0.8, zorder=0)
    axes[2].set_yticks(range(len(shown)), shown)
    axes[2].set_ylim(len(shown) - 0.4, -0.6)
    axes[2].set_xlabel(f"points over the default start, {initialisers['n']} paired seeds, 95 %")
    plots.save(figure, out)


if __name__ == "__main__":
    main()
