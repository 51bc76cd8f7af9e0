"""The stripes of the MLP paper's Fig. 1a in a population of 512 ConvNeXts: reads analyses/mlp_stripes."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots
from weightscope.analysis.across_networks import over_hidden_units

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
    whole = plots.covariance_map(matrix, blocks, kind="correlation", title=title, diagonal="mask")
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
    plots.stripe_ratios(rows, right, title=title)
    plots.save(figure, out)


if __name__ == "__main__":
    main()
