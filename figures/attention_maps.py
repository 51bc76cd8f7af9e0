"""Attention maps of a pretrained ViT-S beside default and mimetic initialisation, its heads, and stable ranks."""

import json
from pathlib import Path

import numpy as np

from weightscope import plots

ROOT = Path(__file__).parent
STUDY = ROOT.parent / "analyses" / "attention_maps"
ARMS = ("pretrained", "default", "mimetic")


def main(study: Path = STUDY, out: Path = ROOT / "attention_maps.png") -> None:
    result = json.loads((study / "results.json").read_text())
    arrays = {name: value.astype(np.float64) for name, value in np.load(study / "maps.npz").items()}
    first = {arm: next(run for run in result["runs"] if run["arm"] == arm and run["seed"] == 0) for arm in ARMS}
    near = {arm: np.array([[h["near"]] for h in first[arm]["heads"]]).mean() for arm in ARMS}
    layers, tokens = len(first["pretrained"]["layers"]), first["pretrained"]["tokens"]
    count = tokens["special"] + tokens["rows"] * tokens["columns"]
    labels = [f"layer {i}" for i in range(layers)]
    maps = [*(arrays[f"{arm}/maps"] for arm in ARMS), arrays["mimetic/expected"]]
    share = {arm: f"{100 * value:.0f} %" for arm, value in near.items()}
    figure = plots.attention_grid(
        count * np.stack(maps),
        row_labels=[*ARMS, "Eq. 3.19"],
        column_labels=labels,
        note="patch tokens, means over heads and over cells of 2 × 2",
        title=f"Share of attention on the 3 × 3 tokens around a query: {share['pretrained']} pretrained, "
        f"{share['default']} from the default start, {share['mimetic']} from mimetic initialisation, which is less "
        "sharp than Eq. 3.19 says",
    )
    plots.save(figure, out)
    heads = arrays["pretrained/offsets"]
    entropy = np.array([h["entropy"] for h in first["pretrained"]["heads"]]).reshape(layers, -1).mean(axis=1)
    figure = plots.attention_grid(
        count * heads.transpose(1, 0, 2, 3),
        row_labels=[f"head {h}" for h in range(heads.shape[1])],
        column_labels=labels,
        note=f"means over queries, up to {tokens['rows'] - 1} tokens away",
        title="Pretrained attention by relative place, the query in the middle: sharpest in layer "
        f"{entropy.argmin()} (entropy {entropy.min():.2f} of uniform attention's), broadest in layer "
        f"{entropy.argmax()} ({entropy.max():.2f})",
    )
    plots.save(figure, out.with_name(f"{out.stem}_places{out.suffix}"))
    figure, axes = plots.subplots(1, len(ARMS), width=11.5, height=3.4)
    width = first["pretrained"]["layers"][0]["width"]
    for ax, arm in zip(axes[0], ARMS, strict=True):
        rows = first[arm]["layers"]
        largest = min(row["largest_f"] for row in rows)
        title = f"{arm}: D < k f² in a layer from f = {largest + 2} on"
        plots.rank_condition(arrays[f"{arm}/ranks"], width, ax, filter_sizes=(5, 7, 9, 11), title=title)
    plots.save(figure, out.with_name(f"{out.stem}_ranks{out.suffix}"))


if __name__ == "__main__":
    main()
