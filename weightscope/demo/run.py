"""`weightscope demo`: the whole chain on data that come with the installation, and a report of the results.

Training resumes where it was interrupted. Every number in the report is read from a file beside it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightscope import plots
from weightscope._util import atomic
from weightscope._util.checks import count
from weightscope.analysis.across_networks import PopulationCovariance, covariance_across
from weightscope.analysis.inspection import inspect
from weightscope.artifacts import PopulationFit
from weightscope.benchmarking import BenchResult, bench, summarise
from weightscope.errors import UsageError
from weightscope.fitting.population import fit
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.report import Column, Number, Report, Rows, Sourced, verdict
from weightscope.training.collection import collect

SELECT = "*.mlp.fc?.weight"
BLOCK = "stages.0.blocks.1.mlp.fc?.weight"
BENCH_SEED = 1_000_000  # the benchmark's networks share no seed with the population's
BENCH_EPOCHS = (3,)
SMALLEST_POPULATION = 16


def run_demo(
    out: str | Path,
    *,
    networks: int = 256,
    epochs: int = 12,
    seeds: int = 64,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Path:
    """Collect a population, compute its covariance, fit and benchmark initialisers, write the report.

    Args:
        out: folder for everything; created if missing.
        networks: size of the population.
        epochs: epochs of the population's training.
        seeds: paired seeds of the benchmark.
        say: called with one line before each step.
        options: passed on to `collect` (`workers`, `device`, `data`).

    Returns:
        Path of `report.html`.

    Raises:
        UsageError: if there are too few networks or seeds, or the folder is a population.
        Resumable: if interrupted.
    """
    count("networks", networks, least=SMALLEST_POPULATION)
    out = Path(out)
    if out.suffix == ".pop" or (out / "shards").is_dir():
        raise UsageError(f"{out} is a population; give another folder for the demo, which makes its own in it")
    recipe = Recipe.load(Path(__file__).with_name("demo.toml"))
    recipe = recipe.replace({"training.epochs": epochs, "population.networks": networks})
    say(f"1/5  training {networks} ConvNeXts on the digits -> {out / 'digits.pop'}")
    collect(recipe, out / "digits.pop", **options)
    population = Population(out / "digits.pop")

    say(f"2/5  the covariance of [vec fc1, vec fc2] -> {out / 'covariance.json'}")
    whole, block = covariance_across(population, SELECT), covariance_across(population, BLOCK)
    _write_json(out / "covariance.json", whole.to_dict())
    block.save_matrix(out / "covariance-block-1.npz")

    say(f"3/5  fitting structures -> {out / 'fitted.safetensors'}")
    fitted = fit(population, SELECT)
    fitted.save(out / "fitted.safetensors")
    fit(population, SELECT, structure="diagonal").save(out / "diagonal.safetensors")
    _write_json(out / "structures.json", fitted.to_dict())

    say(f"4/5  benchmark: default, fitted and diagonal, {seeds} paired seeds -> {out / 'benchmark'}")
    inits = ["default", str(out / "fitted.safetensors"), str(out / "diagonal.safetensors")]
    other_seeds = recipe.replace({"population.seed": BENCH_SEED})
    measured = bench(other_seeds, inits, out / "benchmark", epochs=BENCH_EPOCHS, seeds=seeds, **options)
    _write_json(out / "inspection.json", inspect(out / "digits.pop").to_dict())
    _write_json(out / "fitted-against-diagonal.json", _against(measured, "fitted", "diagonal"))
    say(f"5/5  the report -> {out / 'report.html'}")
    return _report(out, population, whole, block, fitted, measured)


def _write_json(path: Path, values: Any) -> None:
    atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def _against(measured: BenchResult, init: str, reference: str) -> dict[str, Any]:
    """One arm of the benchmark compared with another one than the first."""
    runs = [[run for run in measured.runs if run["init"] == name] for name in (reference, init)]
    return summarise([*runs[0], *runs[1]])[1]


def _report(
    out: Path,
    population: Population,
    whole: PopulationCovariance,
    block: PopulationCovariance,
    fitted: PopulationFit,
    measured: BenchResult,
) -> Path:
    """Write `report.html` from the files of the previous steps."""
    fitted_row = next(row for row in measured.arms if row["init"] == "fitted")
    finding = _judgement(fitted_row)
    report = Report(
        "Weights of tiny ConvNeXts, and an initialiser made from them",
        [
            f"After {BENCH_EPOCHS[0]} epochs on the digits, compared with the default, the fitted initialiser is ",
            finding,
            ".",
        ],
    )
    _population_part(report, population)
    _structure_part(report, whole, block)
    _fit_part(report, fitted)
    _bench_part(report, measured)
    return report.save(out / "report.html")


def _judgement(row: dict[str, Any]) -> Sourced:
    words = verdict(row["difference"], row["difference_ci95"], row["p_holm"], n=row["n"])
    words = words.replace("no significant difference:", "not significantly different:", 1)
    return Sourced(words, "benchmark/results.json")


def _population_part(report: Report, population: Population) -> None:
    facts = "inspection.json"
    report.heading("The population").text(
        "Networks of one recipe, trained from different seeds on scikit-learn's handwritten digits, 8 x 8 pixels. "
        "Each is a sample from the distribution of trained weights."
    )
    report.numbers(
        {
            "networks": Number(facts, "/done", "d"),
            "weights in each": Number(facts, "/dimension", ",d"),
            "median test accuracy, %": Number(facts, "/quantiles/test_accuracy/0.5", ".1f", scale=100),
            "diverged": Number(facts, "/diverged", "d"),
        }
    )
    curves = plots.training_curves(population.metrics["test_accuracy_per_epoch"], quantity="test accuracy")
    report.figure(
        plots.render(curves),
        "Test accuracy after each epoch: median and central 90 % of the networks.",
        alt="A line that rises from chance to the final accuracy, with a narrowing band around it.",
        source="digits.pop",
    )


def _structure_part(report: Report, whole: PopulationCovariance, block: PopulationCovariance) -> None:
    report.heading("The structure").text(
        "If the entries of fc1, the first matrix of an MLP, were independent, the mean of a column (over hidden units, "
        "for one input channel) would vary over networks by a known amount. The ratios below compare the measured "
        "variance with it."
    )
    title = "Covariance of [vec fc1, vec fc2], second block"
    picture = plots.covariance_map(block.matrix, block.blocks, title=title, diagonal="mask")
    report.figure(
        plots.render(picture),
        "Covariance over networks of the MLP weights of one block (MLP paper, Fig. 1). With so few networks, most of "
        "it is noise.",
        alt="A square map with two blocks on its diagonal, fc1 and fc2.",
        source="covariance-block-1.npz",
    )
    title = "The same, averaged over pairs of hidden units"
    picture = plots.covariance_map(block.matrix, block.blocks, title=title, groups=block.groups())
    report.figure(
        plots.render(picture),
        "Hidden units are exchangeable, so averaging over pairs of them keeps the structure and reduces the noise. A "
        "diagonal in the block of fc1 shows that weights from one input to different hidden units are correlated: "
        "stripes.",
        alt="A square map with two blocks; the diagonal of the fc1 block is visible if there are stripes.",
        source="covariance-block-1.npz",
    )
    rows = [
        (name, f"{kind} means", ratio.value, *ratio.ci95)
        for name, result in whole.stripes.items()
        for kind, ratio in (("column", result.column), ("row", result.row))
    ]
    report.figure(
        plots.render(plots.stripe_ratios(rows, title="Variance of group means, relative to independent entries")),
        "To the right of the line, means of columns or rows vary more than those of independent entries; to the left, "
        "less. 95 % intervals over networks.",
        alt="Ratios with intervals for every MLP matrix, around a line at one.",
        source="covariance.json",
    )


def _fit_part(report: Report, fitted: PopulationFit) -> None:
    report.heading("The initialiser").text(
        "Structures were fitted to ",
        Number("structures.json", "/networks", "d"),
        " networks' MLP weights (",
        Sourced(SELECT, "structures.json"),
        ") and chosen in each block by the log-likelihood of ",
        Number("structures.json", "/settings/held_out", "d"),
        " held-out networks. All other tensors keep the network's default initialisation.",
    )
    rows = [row for row in fitted.table if row["group"] == "(all)" and row["failed"] is None]
    columns = [
        Column("structure", "structure"),
        Column("parameters", "parameters", ",d"),
        Column("log_prob", "held-out log-likelihood, nats per network", ",.1f"),
        Column("difference", "difference from the best", ",.1f"),
        Column("difference_se", "standard error", ".1f"),
    ]
    report.table(rows, columns, "All blocks together.", source="structures.json")
    report.figure(
        plots.render(plots.heldout_scores(fitted.table, title="Held-out log-likelihood, relative to the best")),
        "Higher is better; differences are paired over the held-out networks.",
        alt="One point with an interval for each structure.",
        source="structures.json",
    )


def _bench_part(report: Report, measured: BenchResult) -> None:
    source = "benchmark/results.json"
    report.heading("Does it help?").text(
        "Network k of every arm starts from the same default weights, sees the same batches in the same order, and "
        "differs only in its initialiser. No seed is shared with the population; the images are the same. "
        "p-values are adjusted for the number of comparisons (Holm)."
    )
    for row in measured.arms:
        if row["difference"] is not None:
            report.text(f"Compared with the default, the initialiser {row['init']} is ", _judgement(row), ".")
    columns = [
        Column("init", "initialiser"),
        Column("epochs", "epochs", "d"),
        Column("n", "seeds", "d"),
        Column("mean", "accuracy, %", ".2f", scale=100),
        Column("difference", "difference, points", "+.2f", scale=100),
        Column("p_holm", "p (Holm)", ".2g"),
    ]
    report.table(Rows(source, "/summary"), columns, "Test accuracy after the last epoch.")
    report.figure(
        plots.render(plots.paired_differences(measured.runs, title="Paired differences from the default")),
        "One point for each seed, with the mean and its 95 % interval.",
        alt="Differences scattered around their means, and a line at zero.",
        source=source,
    )
    row = _against(measured, "fitted", "diagonal")
    words = verdict(row["difference"], row["difference_ci95"], row["p"], n=row["n"])
    report.text(
        "`fitted` samples from the chosen structures; `diagonal` keeps each entry's mean and variance without "
        "correlations. The effect of the correlations, fitted against diagonal: ",
        Sourced(words, "fitted-against-diagonal.json"),
        ".",
    )
