"""The stripes of the MLP paper's Fig. 1a in a population of 512 ConvNeXts: reads analyses/mlp_stripes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from weightscope import plots
from weightscope.analysis.across_networks import over_hidden_units
from weightscope.plots import theme
from weightscope.plots.theme import SMALL, short_names

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "mlp_stripes"


def main(study: Path = STUDY, out: Path = HERE / "mlp_stripes.png") -> None:
    result = json.loads((study / "results.json").read_text())
    n = result["networks"] - result["diverged"]
    with np.load(study / "correlation.npz") as stored:
        shapes = stored["shapes"].tolist()
        matrix = stored["correlation"] * float(stored["step"])
        block, stops = int(stored["block"]), [0, *stored["stops"].tolist()]
        blocks = {str(name): slice(a, b) for name, a, b in zip(stored["names"], stops, stops[1:], strict=False)}
    np.fill_diagonal(matrix, 1.0)  # the diagonal does not fit into the stored bytes
    title = f"Correlation of [vec fc1, vec fc2] in block {block}, {n} networks"
    whole = plots.covariance_map(matrix, blocks, kind="correlation", title=title, diagonal="mask", cells=300)
    plots.save(whole.figure, out.with_name(f"{out.stem}_whole{out.suffix}"))

    figure, ((left, right),) = plots.subplots(1, 2, width=13, height=6.2)
    groups = {name: over_hidden_units(shape) for name, shape in zip(blocks, shapes, strict=True)}
    title = f"fc1 is striped, fc2 is not (block {block})"
    plots.covariance_map(matrix, blocks, left, kind="correlation", title=title, groups=groups, diagonal="mask")
    kinds = {
        ("fc1", "column"): "fc1, over hidden units",
        ("fc2", "row"): "fc2, over hidden units",
        ("fc1", "row"): "fc1, over inputs",
        ("fc2", "column"): "fc2, over outputs",
    }
    rows = [
        (f"block {row['block']}", kinds[row["matrix"], row["means"]], row["ratio"], *row["ci95"])
        for row in result["stripes"]
        if (row["matrix"], row["means"]) in kinds
    ]
    title = "Variance of group means, relative to independent entries"
    stripe_ratios(rows, right, title=title)
    plots.save(figure, out)


@theme.themed()
def stripe_ratios(
    rows: Sequence[tuple[str, str, float, float, float]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Variances of group means relative to those of independent entries, with 95 % intervals.

    Above 1, group means vary more than those of independent entries: the matrix is striped (MLP paper, Fig. 1). The
    axis is logarithmic, so that 1/2 and 2 are equally far from 1.

    Rows are (label, group, ratio, low, high): a tensor's name, the kind of mean, and the ratio with its interval. Rows
    of one label are adjacent; a group has one colour and marker.
    """
    labels, groups = list(dict.fromkeys(r[0] for r in rows)), list(dict.fromkeys(r[1] for r in rows))
    gap = 0.5 * (len(rows) > len(labels))  # between labels
    at = [i + gap * labels.index(row[0]) for i, row in enumerate(rows)]
    mine = {label: [y for y, row in zip(at, rows, strict=True) if row[0] == label] for label in labels}
    canvas, ax = theme.canvas(ax, 7.4, 1.35 + 0.23 * (at[-1] + 1))
    low, high = min(0.8, *(row[3] for row in rows)), max(1.25, *(row[4] for row in rows))
    for i, group in enumerate(groups):
        drawn = np.array([(y, *row[2:]) for y, row in zip(at, rows, strict=True) if row[1] == group])
        where, ratio, least, most = drawn.T
        style = theme.style(i, ls="none", ms=5, label=group, capsize=2.5, elinewidth=1.4)
        ax.errorbar(ratio, where, xerr=[ratio - least, most - ratio], **style)
    theme.reference(ax, 1)
    ax.set_xscale("log")
    ax.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    theme.log_ticks(ax.xaxis, *ax.get_xlim())
    for label in labels[1::2]:
        ax.axhspan(mine[label][0] - 0.75, mine[label][-1] + 0.75, color="#f3f5f7", lw=0, zorder=0)
    short, remark = short_names(labels)
    ax.set_xlabel("variance of the means ÷ that of independent entries (log scale)" + (f"\n{remark}" if remark else ""))
    texts = [f"{ratio:.2f} ({low:.2f}–{high:.2f})" for *_, ratio, low, high in rows]
    theme.list_axis(ax, [float(np.mean(mine[label])) for label in labels], short, {"ratio (95 % CI)": texts}, at)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    ax.text(1, -0.9, "independent", fontsize=SMALL, color=theme.MUTED, ha="center", va="center", bbox=box)
    if len(groups) > 1:
        canvas.legend([Line2D([], [], label=name, **theme.style(i, ls="none")) for i, name in enumerate(groups)])
    return canvas.finish(title)


if __name__ == "__main__":
    main()
