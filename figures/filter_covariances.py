"""Depthwise filters of EfficientNet-Lite0, their covariances and focus: reads analyses/filter_covariances."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from weightscope import plots
from weightscope.plots.theme import p_value

HERE = Path(__file__).parent
STUDY = HERE.parent / "analyses" / "filter_covariances"
STATISTICS = (
    plots.Statistic("relative_spread", "spread of the variance about the centre ÷ that of even variances", 1.0),
    plots.Statistic("offset", "offset of the variance up and left of the centre (pixels)", 0.0),
    plots.Statistic("central_ratio", "variance of the central pixel ÷ mean over pixels", 1.0, log=True),
)
FAR = plots.Statistic("from_centre", "mean correlation of the centre with pixels that do not touch it", 0.0)


def main(study: Path = STUDY, out: Path = HERE / "filter_covariances.png") -> None:
    result = json.loads((study / "results.json").read_text())
    rows, networks = result["rows"], result["networks"]
    trained = [row for row in rows if row["source"] == "trained"]

    def save(figure: Any, name: str) -> None:
        plots.save(figure, out.with_name(f"{out.stem}{name}{out.suffix}"))

    with np.load(study / "covariances.npz") as stored:
        maps = [panel(row, stored[f"covariance/trained/{row['layer']}"]) for row in trained]
        filters = [panel(row, stored[f"filters/trained/{row['layer']}"]) for row in trained]
        large = [row for row in trained if row["shape"][-1] == 5 and not row["halves"]]
        compared = [[panel(row, stored[f"covariance/{name}/{row['layer']}"]) for row in large] for name in networks]
    counts = result["filters"]
    shifts = [s for row in trained if row["halves"] and row["shape"][-1] == 5 for s in offsets(row)]
    title = (
        "Filters of EfficientNet-Lite0 co-vary about their centre; 5×5 layers that halve the image (↓) lie "
        f"{min(shifts):.1f} to {max(shifts):.1f} pixels up and left of it ({counts['3']:,} filters of 3×3, "
        f"{counts['5']:,} of 5×5)"
    )
    save(plots.covariance_page(pages(maps), title=title), "")
    title = "Up to 64 depthwise filters of each layer of EfficientNet-Lite0: dots early, checkerboards late"
    save(plots.filter_page(pages(filters), note="↓ halves the image", title=title), "_samples")
    early, late = (x["cosine"]["conv_covariance"] for x in (large[0], large[-1]))
    title = (
        f"The closed form covers the 5×5 layers, early ones best (cosine {early:.2f} in layer {large[0]['layer']}, "
        f"{late:.2f} in layer {large[-1]['layer']}): the checkerboards of later ones are not in it"
    )
    save(plots.covariance_page(compared, row_labels=networks, title=title), "_compared")
    trend = next(t for t in result["trends"] if (t["kernel"], t["statistic"]) == (5, "relative_spread"))
    title = (
        "5×5 filters become more diffuse with depth where the image keeps its size (rank correlation "
        f"{trend['rank_correlation']:.2f}, {p_value(trend['p'])}, {len(trend['layers'])} layers); default "
        "initialisation is even everywhere"
    )
    curves = [curve(name, [row for row in rows if row["source"] == name]) for name in networks]
    save(plots.depth_curves(curves, STATISTICS, note="bars at the spread are 95 % intervals", title=title), "_depth")
    curves = []
    for name, layers in pandas.read_csv(study / "sizes.csv").groupby("source"):
        values = {key: layers[key].tolist() for key in ("relative_spread", "central_ratio", "from_centre")}
        errors = {"relative_spread": layers["relative_spread_se"].tolist()}
        places = (layers["layer"] / (layers["depth"] - 1)).tolist()
        kinds = [shape.removeprefix("1x").replace("x", "×") for shape in layers["shape"]]
        curves.append(plots.Curve(f"EfficientNet-{name.capitalize()}", places, values, errors, kinds))
    title = "Three sizes of EfficientNet-Lite are alike at equal depth: focused on the centre in all but the last layer"
    statistics = (STATISTICS[0], STATISTICS[2], FAR)
    note = "bars at the spread are 95 % intervals"
    save(plots.depth_curves(curves, statistics, axis="relative depth", note=note, title=title), "_sizes")


def panel(row: dict[str, Any], values: np.ndarray) -> plots.Panel:
    label = f"layer {row['layer']}, {row['shape'][-1]}×{row['shape'][-1]}{' ↓' if row['halves'] else ''}"
    return plots.Panel(values, label, tuple(row["shape"]))


def offsets(row: dict[str, Any]) -> tuple[float, float]:
    """Offset of the variance up and left of the centre."""
    return -row["offset_down"], -row["offset_right"]


def pages(panels: list[plots.Panel]) -> list[list[plots.Panel]]:
    return [panels[i : i + 8] for i in range(0, len(panels), 8)]


def curve(name: str, rows: list[dict[str, Any]]) -> plots.Curve:
    values = {s.key: [row.get(s.key) for row in rows] for s in STATISTICS}
    values["offset"] = [sum(offsets(row)) / 2 for row in rows]
    kinds = [f"{row['shape'][-1]}×{row['shape'][-1]}{', halves the image' if row['halves'] else ''}" for row in rows]
    errors = {"relative_spread": [row["relative_spread_se"] for row in rows]}
    return plots.Curve(name, [row["layer"] for row in rows], values, errors, kinds)


if __name__ == "__main__":
    main()
