"""Copying and recall of small Mambas by length, and the mimetic start by its components: reads analyses/copying."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from weightscope import plots
from weightscope.benchmarking import BenchResult
from weightscope.benchmarking.design import point_text
from weightscope.benchmarking.result import finding
from weightscope.benchmarking.statistics import summarise
from weightscope.data.metrics import ACCURACY
from weightscope.plots import theme

HERE = Path(__file__).parent
ANALYSES = HERE.parent / "analyses" / "copying"
LAYERS = {
    '["default", "default"]': "two Mamba layers",
    '["default", "attention"]': "a Mamba layer, then attention",
}
SWITCHES = {"a": "A near 0", "delta": "Delta = 1", "cb": "W_C near W_B", "convolution": "convolution = identity"}


def lengths(study: Path, out: Path) -> None:
    """Accuracy at each length: a line of panels for each cell, a panel for each schedule."""
    result = BenchResult.load(study / "results.json")
    cells = list({json.dumps(run["cell"]): run["cell"] for run in result.runs}.values())
    epochs = sorted({run["epochs"] for run in result.runs})
    steps = result.environment["recipe"]["data"]["train"] // result.environment["recipe"]["training"]["batch_size"]
    size = {"width": 7 * len(epochs), "height": 4.8 * len(cells)}
    found = finding(result.arms, result.metric) or ""
    at = f" at {result.metric.length}x the training length".replace(" 1x", "")
    figure, axes = plots.subplots(len(cells), len(epochs), title=found + at if len(cells) == 1 else None, **size)
    for line, cell in zip(axes, cells, strict=True):
        for ax, schedule in zip(line, epochs, strict=True):
            runs = [run for run in result.runs if run["cell"] == cell and run["epochs"] == schedule]
            place = LAYERS.get(json.dumps(cell.get("network.layers"))) or point_text(cell)
            title = ", ".join(filter(None, [place, f"{schedule * steps} steps"]))
            if len(cells) > 1:  # each panel says what it shows, at the training length and at the longest
                ends = [ACCURACY, max(result.metrics, key=lambda metric: metric.length)]
                said = [finding(summarise([run | {"cell": {}} for run in runs], metric), metric) for metric in ends]
                title += f": {said[0]}; at {ends[1].length}x: {said[1]}"
            by_length(result, runs, ax, title)
    plots.save(figure, out)


def by_length(result: BenchResult, runs: list[dict[str, Any]], ax: Axes, title: str) -> None:
    """Accuracy at each length of the runs of one cell and schedule, and of guessing."""
    chance = {"chance": result.arms[0].get("chance")}  # of a token, at every length; none for sorting
    metrics = [metric for metric in result.metrics if metric.key.startswith(ACCURACY.key)]
    rows = {metric.length: [row | chance for row in summarise(runs, metric)] for metric in metrics}
    plots.accuracy_by_length(rows, ax, title=title)


def capacity(study: Path, out: Path) -> None:
    """The area under accuracy over length against the size of the state, and accuracy by length for each size."""
    result = BenchResult.load(study / "results.json")
    sizes = sorted({run["cell"]["network.state"] for run in result.runs})
    columns = (len(sizes) + 2) // 2
    found = finding(result.arms, result.metric)
    title = f"{found}, in accuracy averaged over lengths" if found else None
    figure, axes = plots.subplots(2, columns, width=6.4 * columns, height=9, title=title)
    first, *others = (ax for line in axes for ax in line)
    plots.metric_along(result.arms, "network.state", metric=result.metric, ax=first)
    first.set(xlabel="size of the state N (log scale)", ylabel="accuracy averaged over lengths (%)")
    for ax, size in zip(others, sizes, strict=False):
        by_length(result, [run for run in result.runs if run["cell"]["network.state"] == size], ax, f"N = {size}")
        ax.set_ylim(-0.04, 1.05)
    for ax in others[len(sizes) :]:
        ax.remove()
    plots.save(figure, out)


def components(study: Path, out: Path) -> None:
    """Accuracy of the 16 combinations at the training length, and the effect of each switch and pair."""
    result, rows = BenchResult.load(study / "results.json"), json.loads((study / "effects.json").read_text())
    best = [row for row in rows if row["metric"] == "accuracy" and row["p_holm"] < 0.05]
    said = ", ".join(
        f"{' with '.join(SWITCHES[name] for name in row['switches'])} {100 * row['difference']:+.1f}" for row in best
    )
    title = f"Slow decay and unit steps help, together more than alone: {said} points"
    figure, ((left, right),) = plots.subplots(1, 2, width=14, height=5.6, title=title)
    order = sorted(result.arms, key=lambda row: row["mean"])
    for y, row in enumerate(order):
        _interval(left, y, row["mean"], row["ci95"], 0)
    left.set(yticks=range(len(order)), yticklabels=[_on(row["init"]) for row in order], xlabel="test accuracy (%)")
    left.set_title("Components that are on, best first, with 95 % intervals of the mean")
    shown = [row for row in rows if row["metric"] == "accuracy"]
    for y, row in enumerate(shown):
        _interval(right, y, row["difference"], row["difference_ci_holm"], 0 if row["p_holm"] < 0.05 else 1)
    right.axvline(0, color=theme.INK, lw=1, ls=(0, (4, 2)), zorder=0)
    names = [" x ".join(SWITCHES[name] for name in row["switches"]) for row in shown]
    right.set(yticks=range(len(shown)), yticklabels=names, ylim=(len(shown) - 0.4, -0.6))
    title = "Effect of each, and interactions of pairs, with 95 % intervals (Holm)"
    right.set(xlabel="effect on test accuracy (points); squares: not significant", title=title)
    plots.save(figure, out)


def _interval(ax: Axes, y: int, value: float, ends: tuple[float, float], kind: int) -> None:
    ax.plot([100 * end for end in ends], [y, y], color=theme.PALETTE[kind], lw=1.4)
    ax.plot(100 * value, y, theme.MARKERS[kind], ms=4.5, color=theme.PALETTE[kind])


def _on(init: str) -> str:
    """The switches that a label names as true, in words; `mimetic_ssm` alone has the first three."""
    if init == "default":
        return "none (default)"
    given = "a=True, delta=True, cb=True" if "(" not in init else init.partition("(")[2].rstrip(")")
    return ", ".join(SWITCHES[pair.partition("=")[0]] for pair in given.split(", ") if pair.endswith("=True"))


def main(studies: Path = ANALYSES, out: Path = HERE) -> list[Any]:
    drawn = []
    for study in sorted(path.parent for path in studies.glob("**/results.json")):
        draw = {"components": components, "capacity": capacity}.get(study.name, lengths)
        name = "_".join(study.relative_to(studies).parts)
        draw(study, out / f"copying_{name}.png")
        drawn.append(name)
    return drawn


if __name__ == "__main__":
    main()
