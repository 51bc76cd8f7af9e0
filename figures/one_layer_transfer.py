"""Students with one layer of a trained ViT in all places: reads analyses/one_layer_transfer/results.json."""

from pathlib import Path

import numpy as np
from scipy import stats

from weightscope import plots
from weightscope.benchmarking import BenchResult
from weightscope.plots import theme

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "one_layer_transfer"
ARMS = {
    **{f"repeated_ (layer={i})": f"layer {i}" for i in range(8)},
    "repeated_ (layer=4) (scale only)": "scale of\nlayer 4",
    "tied_": "default,\none layer",
    "placed_ (own=True)": "all, own\nplaces",
    "placed_ (own=False)": "all, other\nplaces",
    "mimetic_attention": "mimetic\nattention",
}


def main(study: Path = STUDY, out: Path = HERE / "one_layer_transfer.png") -> None:
    found: dict[str, list[float]] = {}
    for run in sorted(BenchResult.load(study).runs, key=lambda run: run["seed"]):
        found.setdefault(run["init"], []).append(100 * run["accuracy"])
    base = np.array(found["default"])
    figure, ((ax,),) = plots.subplots(1, 1, width=9, height=4)
    for x, arm in enumerate(ARMS):
        kind = 0 if x < 8 else 1
        difference, n = np.array(found[arm]) - base, len(base)
        half = stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / n**0.5
        style = {"color": theme.PALETTE[kind], "marker": theme.MARKERS[kind]}
        ax.plot(np.linspace(x - 0.25, x + 0.25, n), difference, ls="", ms=2.5, alpha=0.5, mew=0, **style)
        ax.errorbar(x, difference.mean(), half, ms=6, lw=1.6, **style)
    ax.axhline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
    ax.axvline(7.5, color=theme.INK, lw=0.5)
    ax.set(xticks=range(len(ARMS)), ylabel="test accuracy, points over the default")
    ax.set_xticklabels(ARMS.values())
    ax.set_xlabel("left: one layer of a trained network in all places; right: other starts")
    said = "One layer in all places is not shown to help; all layers are, even out of place"
    ax.set_title(f"{said}\n({n} seeds, pointwise 95 % intervals; default {base.mean():.1f} %)")
    plots.save(figure, out)


if __name__ == "__main__":
    main()
