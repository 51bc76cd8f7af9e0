"""The demo's report, written from the files of its steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightscope import plots
from weightscope.analysis.across_networks import ExchangeableCovariance, PopulationCovariance
from weightscope.benchmarking import BenchResult
from weightscope.fits import PopulationFit
from weightscope.population import Population
from weightscope.report import Column, Number, Report, Rows, Sourced, verdict

PAIRS = 12  # rows of the table of correlated pairs
FITTED, CONTROL = "fitted", "fitted (scale only)"
CONDITIONS = {
    "benchmark": "On the population's data",
    "benchmark-width": "At twice the width",
    "benchmark-fashion": "On Fashion-MNIST",
}


@dataclass(frozen=True)
class Results:
    """What the demo computed.

    Attributes:
        population: the trained networks.
        raw: the plain covariance of one block's MLP.
        found: the exchangeable covariance of the whole network.
        compared: the structures' held-out log-likelihoods.
        gain: of the initialiser's correlations.
        benchmarks: by the name of their folder.
    """

    population: Population
    raw: PopulationCovariance
    found: ExchangeableCovariance
    compared: PopulationFit
    gain: float
    benchmarks: dict[str, BenchResult]


def write_report(out: Path, results: Results) -> Path:
    """Write `report.html` into the folder of the demo's files."""
    row = _row(results.benchmarks["benchmark"], FITTED)
    report = Report(
        "The weights of a whole network, and an initialiser drawn from them",
        [
            f"After {row['epochs']} epochs on the digits, compared with the same means and variances without "
            "structure, the fitted initialiser is ",
            _beyond(row, "benchmark"),
            "; compared with the default, it is ",
            _against_default(row, "benchmark"),
            ".",
        ],
    )
    _population(report, results.population)
    _structure(report, results)
    _fit(report, results)
    for folder, result in results.benchmarks.items():
        _benchmark(report, folder, result)
    return report.save(out / "report.html")


def _row(result: BenchResult, init: str) -> dict[str, Any]:
    return next(row for row in result.arms if row["init"] == init)


def _words(difference: float, ci95: Any, p: float, n: int, folder: str) -> Sourced:
    words = verdict(difference, ci95, p, n=n)
    words = words.replace("no significant difference:", "not significantly different:", 1)
    return Sourced(words, f"{folder}/results.json")


def _against_default(row: dict[str, Any], folder: str) -> Sourced:
    return _words(row["difference"], row["difference_ci95"], row["p_holm"], row["pairs"], folder)


def _beyond(row: dict[str, Any], folder: str) -> Sourced:
    key = "beyond_scale"
    return _words(row[key], row[f"{key}_ci95"], row[f"{key}_p_holm"], row[f"{key}_pairs"], folder)


def _population(report: Report, population: Population) -> None:
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
    curves = plots.training_curves(population.metrics["test_accuracy_per_epoch"])
    report.figure(
        plots.render(curves),
        "Test accuracy after each epoch: median and central 90 % of the networks.",
        alt="A line that rises from chance to the final accuracy, with a narrowing band around it.",
        source="digits.pop",
    )


def _structure(report: Report, results: Results) -> None:
    raw, found = results.raw, results.found
    report.heading("The structure").text(
        "Every entry of the plain covariance is estimated from one number per network, so noise hides what there is."
    )
    title = "Covariance of [vec fc1, vec fc2], second block, entry by entry"
    picture = plots.covariance_map(raw.matrix, raw.blocks, title=title, diagonal="mask", groups=None)
    report.figure(
        plots.render(picture),
        "Covariance over networks of the MLP weights of one block (MLP paper, Fig. 1).",
        alt="A square map with two blocks on its diagonal, fc1 and fc2, that looks like noise.",
        source="covariance-block-1.npz",
    )
    report.text(
        "Renumbering hidden units or channels does not change what a network computes. Networks that start from "
        "independent entries and are trained entry by entry in the same way therefore have a distribution that does "
        "not change either. Averaging over all such renumberings leaves small matrices, one for each set "
        "of renumbered axes, that are estimated from thousands of samples and describe the whole network."
    )
    report.figure(
        plots.render(found.plot()),
        "Correlation over channels, of everything that has a channel index, all layers at once. Off the blocks on the "
        "diagonal: what crosses tensors and layers.",
        alt="A square correlation matrix, ruled into tensors in network order, with correlated pairs off its diagonal.",
        source="exchangeable.json",
    )
    strongest = [row for row in found.rows() if row["p"] < 0.05][:PAIRS]
    if not strongest:
        report.text("No pair of tensors is significantly correlated in so small a population.")
        return
    columns = [
        Column("in words", "pair"),
        Column("correlation", "correlation", "+.2f"),
        Column("low", "95 % interval: low", "+.2f"),
        Column("high", "high", "+.2f"),
        Column("z", "standard errors", "+.0f"),
    ]
    caption = "The strongest pairs of tensors, p < 0.05 after adjustment for all pairs; largest canonical correlations "
    caption += "where a tensor has several numbers for each channel."
    report.table(strongest, columns, caption, source="exchangeable.json")


def _fit(report: Report, results: Results) -> None:
    compared = results.compared
    report.heading("The initialiser").text(
        "Structures were fitted jointly to all tensors of the blocks of ",
        Number("structures.json", "/networks", "d"),
        " networks and compared by the log-likelihood of ",
        Number("structures.json", "/settings/held_out", "d"),
        " held-out ones. The initialiser draws from the exchangeable one, with its significant correlations "
        "amplified by ",
        Sourced(f"{results.gain:g}", "fitted.safetensors"),
        ".",
    )
    rows = [row for row in compared.table if row["group"] == "all" and row["failed"] is None]
    columns = [
        Column("structure", "structure"),
        Column("parameters", "parameters", ",d"),
        Column("log_prob", "held-out log-likelihood, nats per network", ",.1f"),
        Column("difference", "difference from the best", ",.1f"),
        Column("difference_se", "standard error", ".1f"),
    ]
    report.table(rows, columns, "All tensors of the blocks jointly.", source="structures.json")
    report.figure(
        plots.render(plots.heldout_scores(compared.table, title="Held-out log-likelihood, relative to the best")),
        "Higher is better; differences are paired over the held-out networks.",
        alt="One point with an interval for each structure.",
        source="structures.json",
    )


def _benchmark(report: Report, folder: str, result: BenchResult) -> None:
    source, row = f"{folder}/results.json", _row(result, FITTED)
    report.heading(CONDITIONS[folder], 3 if folder != "benchmark" else 2)
    if folder == "benchmark":
        report.text(
            "Network k of every arm starts from the same default weights, sees the same batches in the same order, and "
            "differs only in its initialiser. No seed is shared with the population. The control "
            f"`{CONTROL}` has the mean and variance of each tensor of `{FITTED}` and nothing else. "
            "p-values are adjusted for the number of comparisons on each data set and width (Holm)."
        )
    report.text("Structure beyond scale: ", _beyond(row, folder), ".")
    report.text("Against the default: ", _against_default(row, folder), ".")
    columns = [
        Column("init", "initialiser"),
        Column("n", "seeds", "d"),
        Column("mean", "accuracy, %", ".2f", scale=100),
        Column("difference", "difference from default, points", "+.2f", scale=100),
        Column("p_holm", "p (Holm)", ".2g"),
    ]
    report.table(Rows(source, "/summary"), columns, f"Test accuracy after {row['epochs']} epochs.")
    report.figure(
        plots.render(plots.paired_differences(result.runs, title="Paired differences from the default")),
        "One point for each seed, with the mean and its 95 % interval.",
        alt="Differences scattered around their means, and a line at zero.",
        source=source,
    )
