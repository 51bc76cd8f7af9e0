"""The studies that compare initialisers on paired seeds: reads analyses/*_inits/results.json."""

from pathlib import Path
from typing import Any

from weightscope import plots
from weightscope.benchmarking import BenchResult, seed_differences
from weightscope.benchmarking.design import point_text

HERE = Path(__file__).parent
ANALYSES = HERE.parent / "analyses"


def main(results: Path, out: Path) -> None:
    """Along what was varied, a panel for each length; of one cell, accuracies and paired differences."""
    result = BenchResult.load(results)
    rows = [_with_one_field(row) for row in result.arms]
    numbers = dict.fromkeys(name for row in rows for name in row.get("numbers", {}))
    axis = next(iter((*numbers, *rows[0].get("cell", {}))), None)
    figure, ((left, right),) = plots.subplots(1, 2, width=14, height=5.6)
    if axis is None:
        plots.convergence(rows, left)
        plots.paired_differences(seed_differences(result.runs), right)
    else:
        for ax, epochs in zip((left, right), sorted({row["epochs"] for row in rows}), strict=True):
            plots.metric_along([row for row in rows if row["epochs"] == epochs], axis, ax, title=f"{epochs} epochs")
    plots.save(figure, out)


def _with_one_field(row: dict[str, Any]) -> dict[str, Any]:
    """The row with fields that vary together as one, whose values are texts, and CIFAR-10's level of chance."""
    cell = row.get("cell", {})
    return {**row, "chance": 0.1, "cell": {"network": point_text(cell)} if len(cell) > 1 else cell}


if __name__ == "__main__":
    for study in sorted(ANALYSES.glob("*_inits")):
        main(study / "results.json", HERE / f"{study.name}.png")
