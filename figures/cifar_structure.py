"""Correlations across layers, and of central pixels with diag(W2 W1), on CIFAR-10: reads analyses/cifar_structure."""

import json
from pathlib import Path

from weightscope import plots
from weightscope.plots import theme

HERE = Path(__file__).parent
RESULTS = HERE.parent / "analyses" / "cifar_structure"


def main(results: Path = RESULTS, out: Path = HERE / "cifar_structure.png") -> None:
    """A panel for W2 of two blocks, and one for filters and MLPs, with 95 % intervals."""
    found = json.loads((results / "results.json").read_text())
    claims = "; ".join(f"{row['claim']}, {row['verdict']}" for row in found["claims"])
    title = f"Anticorrelation in {found['networks']:,} ConvNeXts on CIFAR-10: {claims}"
    figure, (panels,) = plots.subplots(1, 2, width=14, height=5.6, title=title)
    for ax, of_layers in zip(panels, (True, False), strict=True):
        rows = [row for row in found["pointwise"] if row["what"].startswith("W2") == of_layers]
        for y, row in enumerate(rows):
            ax.plot(row["ci"], [y, y], color=theme.PALETTE[0], lw=1.6)
            ax.plot(row["correlation"], y, theme.MARKERS[0], color=theme.PALETTE[0], ms=5)
        ax.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
        ax.set(yticks=range(len(rows)), yticklabels=[row["what"] for row in rows], ylim=(len(rows) - 0.4, -0.6))
        ax.set(xlabel="correlation, 95 % intervals over networks (pointwise)")
        ax.set_title("Row means of W2 in two blocks" if of_layers else "Filters and MLPs")
    plots.save(figure, out)


if __name__ == "__main__":
    main()
