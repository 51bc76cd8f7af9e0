"""The studies that compare initialisers on paired seeds: reads analyses/*_inits/results.json."""

import json
from pathlib import Path

from weightscope import plots

HERE = Path(__file__).parent
ANALYSES = HERE.parent / "analyses"
NETWORKS = {"vit": "ViT", "convmixer": "ConvMixer", "convnext": "ConvNeXt"}


def main(results: Path, out: Path) -> None:
    result = json.loads(results.read_text())
    recipe = result["environment"]["recipe"]
    network, data = recipe["network"], recipe["data"]
    figure, ((left, right),) = plots.subplots(1, 2, width=12, height=4.6)
    title = (
        f"{NETWORKS[network['type']]}-{network['width']}/{network['depth']}, {data['train']:,} images of {data['name']}"
    )
    plots.convergence(result["summary"], left, title=title)
    plots.paired_differences(result["runs"], right, title="Paired differences to the default")
    plots.save(figure, out)


if __name__ == "__main__":
    for study in sorted(ANALYSES.glob("*_inits")):
        main(study / "results.json", HERE / f"{study.name}.png")
