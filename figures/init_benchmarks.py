"""The studies that compare initialisers or networks on paired seeds: analyses/*_inits and those of `OTHERS`."""

import re
from pathlib import Path
from typing import Any

from weightscope import plots
from weightscope._util.arms import epochs_text
from weightscope.benchmarking import BenchResult, seed_differences
from weightscope.benchmarking.design import point_text
from weightscope.benchmarking.result import finding
from weightscope.benchmarking.statistics import LEVEL, summarise
from weightscope.data.metrics import ACCURACY

HERE = Path(__file__).parent
ANALYSES = HERE.parent / "analyses"
OTHERS = (
    "shared_terms",
    "stated_terms/convnext",
    "stated_terms/convnext_pairs",
    "stated_terms/vit",
    "convolution_biases",
    "dilation_schedules",
    "frozen_filter_inits/equal_energy",
    "language_markov",
    "mimetic_beyond_scale",
    "mimetic_beyond_scale/fresh_seeds",
    "mimetic_beyond_scale/lower_rate",
    "mlp_wide_inits/photographs",
    "transfer_narrow_inits/trained",
)
NAMED = ("control", "uncorrelated")  # columns with labels of other arms


def main(results: Path, out: Path) -> None:
    """Along what was varied, a panel for each length; of one cell, accuracies and paired differences."""
    result = BenchResult.load(results)
    arms = result.arms
    if {row["init"] for row in arms} == {"default"}:  # networks are compared
        runs = [{**run, "init": value, "cell": {}} for run in result.runs for value in run["cell"].values()]
        result = BenchResult(runs, arms := summarise(runs))
    chance = {"chance": 0.1} if result.metric == ACCURACY else {}
    runs, rows = ([chance | _in_words(row) for row in found] for found in (result.runs, arms))
    numbers = dict.fromkeys(name for row in rows for name in row.get("numbers", {}))
    axis = next(iter((*numbers, *rows[0].get("cell", {}))), None)
    said = finding([new | {"cell": old["cell"]} for new, old in zip(rows, arms, strict=True)], result.metric)
    title = said if axis else declared(result) or said
    lengths = sorted({row["epochs"] for row in rows})
    figure, (axes,) = plots.subplots(1, 2 if axis is None else len(lengths), width=14, height=5.6, title=title)
    if axis is None:
        plots.convergence(rows, axes[0], metric=result.metric)
        plots.paired_differences(seed_differences(runs, result.metric), axes[1], metric=result.metric)
    else:
        for ax, epochs in zip(axes, lengths, strict=True):
            plots.metric_along(
                [row for row in rows if row["epochs"] == epochs],
                axis,
                ax,
                metric=result.metric,
                title=epochs_text(epochs),
            )
    plots.save(figure, out)


def declared(result: BenchResult) -> str | None:
    """The first declared contrast in one sentence, if it is the difference of two arms."""
    arm = r"mean\((?:'([^']+)'|([^,()]+))\)"
    for row in result.contrasts:
        if row["declared"] and (match := re.fullmatch(f"{arm} - {arm}", row["contrast"])):
            one, other = (name for name in match.groups() if name)
            if row["p_holm"] >= LEVEL:
                return f"{one} is not shown to differ from {other}"
            more = "better" if result.metric.better(row["difference"]) else "worse"
            return f"{one} is {result.metric.amount(row['difference'])} {more} than {other}"
    return None


def _in_words(row: dict[str, Any]) -> dict[str, Any]:
    """The row with fields that vary together as one, and initialisers without what they share."""
    cell, named = row.get("cell", {}), {key: row[key] for key in ("init", "reference", *NAMED) if row.get(key)}
    shared = r" \((preset|teacher=teacher)[^()]*\)|mode=rows, |, select=blocks\.\*"
    named = {key: re.sub(shared, "", label) for key, label in named.items()}
    return {**row, **named, "cell": {"network": point_text(cell)} if len(cell) > 1 else cell}


if __name__ == "__main__":
    for study in [
        *sorted(ANALYSES.glob("*_inits/results.json")),
        *(ANALYSES / name / "results.json" for name in OTHERS),
    ]:
        main(study, HERE / f"{study.parent.relative_to(ANALYSES)}.png".replace("/", "_"))
