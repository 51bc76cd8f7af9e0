"""Products of attention weights in a ViT-S and in MiniLM: reads analyses/attention_products."""

import json
from pathlib import Path

import numpy as np
import pandas

from weightscope import plots
from weightscope.analysis.attention_products import Key

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "attention_products"
SIDE = 32  # entries of a panel, of 64 that are stored
DEPTHS = {
    "vit": (
        ["ViT-S", "ViT-S, with LayerScale", "ViT-S shape, default", "ViT-S shape, mimetic"],
        "ViT-S: QK is positive in 65 of 72 heads, VO negative once LayerScale is counted; mimetic diagonals are larger",
    ),
    "minilm": (
        ["MiniLM", "MiniLM shape, default", "MiniLM shape, mimetic"],
        "MiniLM: diagonals of either sign under large noise, unlike both initialisations",
    ),
}
GRIDS = {
    "vit": "ViT-S: QK diagonals positive in 65 of 72 heads, VO with LayerScale negative in 11 of 12 layers",
    "minilm": "MiniLM: QK diagonals positive in 51 of 72 heads, VO negative in 3 of 6 layers (first 3 of 12 heads)",
}


def main(study: Path = STUDY, out: Path = HERE / "attention_products.png") -> None:
    rows = json.loads((study / "results.json").read_text())["rows"]
    with np.load(study / "corners.npz") as stored:
        for name, title in GRIDS.items():
            corners = {}
            for i, line in enumerate(stored[name].astype(np.float32)):
                part, head = ("vo", None) if i == len(stored[name]) - 1 else ("qk", i)
                corners |= {Key(name, layer, part, head): matrix[:SIDE, :SIDE] for layer, matrix in enumerate(line)}
            figure = plots.product_grid(corners, widths=[384], title=title)
            plots.save(figure, out.with_name(f"{out.stem}_{name}{out.suffix}"))
    for name, (labels, title) in DEPTHS.items():
        drawn = [row for label in labels for row in rows if row["source"] == label]
        # LayerScale leaves QK as it is: one curve there.
        drawn = [row for row in drawn if row["part"] == "vo" or "LayerScale" not in row["source"]]
        figure = plots.products_by_depth(drawn, title=title)
        plots.save(figure, out.with_name(f"{out.stem}_{name}_depth{out.suffix}"))
    others = pandas.read_csv(study / "models.csv").astype(object)
    others = others.where(others.notna(), None).to_dict("records")
    figure = plots.products_by_depth(
        [row for row in rows if row["source"] in ("ViT-S, with LayerScale", "MiniLM")] + others,
        title="Models of reactions have a ViT's diagonals, QK positive and VO negative; MiniLM's VO has both signs",
    )
    plots.save(figure, out.with_name(f"{out.stem}_models_depth{out.suffix}"))


if __name__ == "__main__":
    main()
