"""`weightscope demo`: the whole chain on data that come with the installation, and a report of the results.

Training resumes where it was interrupted. The report is self-contained HTML, in which every number links to the file
beside it that has it.
"""

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightscope import plots
from weightscope._util import atomic
from weightscope._util.checks import count
from weightscope.analysis.across_networks import covariance_across
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.analysis.inspection import inspect
from weightscope.benchmarking import BenchResult, bench
from weightscope.benchmarking.design import Init
from weightscope.cli.page import template, write_page
from weightscope.data.metrics import ACCURACY
from weightscope.data.readers import fashion_mnist_at_hand
from weightscope.errors import UsageError
from weightscope.fits.fitting import fit
from weightscope.plots.theme import interval, p_value, places, signed
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.statistics.index_effects import described
from weightscope.training.collection import collect

RAW = "blocks.1.attn.proj.weight"
SELECT = "blocks.*"  # all tensors of the blocks
GAIN = 30.0  # chosen in analyses/one_structure, on images held back from the training set
EPOCHS = 4
HAND_MADE = {"name": "mimetic_attention"}
SMALLEST_POPULATION = 16
MINUTES = 5  # of the default size on two cores
PAIRS = 12  # rows of the table of correlated pairs
FITTED = "fitted"
HEADINGS = {
    "benchmark": "On the population's data",
    "benchmark-longer": "After training as long as the population's",
    "benchmark-fashion": "On Fashion-MNIST",
}
_Ends = Sequence[float] | None  # of an interval
_CSS_PIXELS, _DPI = 96, 150  # per inch, of the browser and of the pictures


def run_demo(
    out: str | Path,
    *,
    networks: int = 128,
    epochs: int = 12,
    seeds: int = 64,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Path:
    """Collect a population, find what is correlated in it, draw initial weights from it, and write the report.

    The initialiser is benchmarked after a short training, after one as long as the population's, and on Fashion-MNIST
    if its files are there; against the default, its two controls (moments of each tensor, and of every part without
    correlations), and a hand-made initialiser. Only the short training has all `seeds`, the others a quarter as many.
    `options` are those of `collect`, such as `workers`.
    Returns the path of `report.html`.
    """
    count("networks", networks, least=SMALLEST_POPULATION)
    count("seeds", seeds, least=2)  # a paired comparison needs two
    out = Path(out)
    if out.suffix == ".pop" or (out / "shards").is_dir():
        raise UsageError(f"{out} is a population; give another folder for the demo, which makes its own in it")
    if out.is_dir() and any(out.iterdir()) and not (out / "digits.pop").is_dir():
        raise UsageError(f"{out}: expected a new or empty folder, or that of an earlier demo, found other files in it")
    recipe = Recipe.load(Path(__file__).with_name("demo.toml"))
    recipe.replace({"population.networks": seeds})  # refuses what the benchmark would, after minutes
    recipe = recipe.replace({"training.epochs": epochs, "population.networks": networks})
    say(
        f"Training {networks} small networks, fitting an initialiser to their weights and benchmarking it; the default "
        f"size takes about {MINUTES} minutes on two cores. Ctrl-C is safe: run it again to resume."
    )
    say(f"1/5  training {networks} vision transformers on the digits -> {out / 'digits.pop'}")
    collect(recipe, out / "digits.pop", **options)
    population = Population(out / "digits.pop")
    contents = inspect(out / "digits.pop").to_dict()
    _write_json(out / "inspection.json", contents)

    say(f"2/5  the covariance of the whole network -> {out / 'exchangeable.json'}")
    raw, found = covariance_across(population, RAW), covariance_exchangeable(population, SELECT)
    raw.save_matrix(out / "covariance-output-1.npz")
    _write_json(out / "exchangeable.json", found.to_dict())

    say(f"3/5  fitting structures -> {out / 'fitted.safetensors'}")
    compared = fit(population, SELECT, joint="all")
    _write_json(out / "structures.json", compared.to_dict())
    fitted = fit(population, SELECT, structure="exchangeable", joint="all", options={"gain": GAIN})
    fitted.save(out / "fitted.safetensors")

    say(f"4/5  benchmarks on {seeds} paired seeds -> {out / 'benchmark'}")
    benchmarks = _benchmarks(recipe, out, seeds, **options)

    say(f"5/5  the report -> {out / 'report.html'}")
    title = "Covariance over networks of vec W_O, second block"
    chance = population.recipe.data.chance(ACCURACY, options.get("data"))
    assert chance is not None  # the digits have several classes
    drawn: dict[str, Any] = {
        "training": plots.training_curves(population.metrics["test_accuracy_per_epoch"], chance=chance[0]),
        "raw": plots.covariance_map(raw.matrix, raw.blocks, title=title, diagonal="mask"),
        "whole": found.plot(),
        "scores": plots.heldout_scores(compared.table, title="Held-out log-likelihood, relative to the best"),
    }
    title = "Paired differences from the default"
    drawn |= {name: result.figures(title=title)["differences"](None) for name, result in benchmarks.items()}
    page = write_page(population, out / "page.html", SELECT).name if find_spec("plotly") else None
    return write_report(
        out / "report.html",
        page=page,
        pictures={name: plots.render(figure) for name, figure in drawn.items()},
        contents=contents,
        pairs=found.rows(),
        effects=described(found.index_effects),
        fits=compared.to_dict(),
        benchmarks={name: result.arms for name, result in benchmarks.items()},
        gain=GAIN,
        drawn=fitted.table[0]["log_prob"],
    )


def _benchmarks(recipe: Recipe, out: Path, seeds: int, **options: Any) -> dict[str, BenchResult]:
    """The comparisons by folder: `benchmark`, `benchmark-longer` and, where its files are, `benchmark-fashion`."""
    short = recipe.replace({"training.epochs": EPOCHS})
    artifact = str(out / "fitted.safetensors")
    arms: list[Init] = ["default", artifact]
    arms += [InitConfig(artifact=artifact, control="scale"), InitConfig(artifact=artifact, control="uncorrelated")]
    arms += [InitConfig.model_validate(HAND_MADE)]
    fewer = max(2, seeds // 4)
    found = {"benchmark": bench(short, arms, out / "benchmark", seeds=seeds, **options)}
    found["benchmark-longer"] = bench(recipe, arms[:-1], out / "benchmark-longer", seeds=fewer, **options)
    if fashion_mnist_at_hand(options.get("data")):
        fashion = {"data.name": "fashion-mnist", "data.train": 2000, "data.test": 2000, "network.patch_size": 7}
        found["benchmark-fashion"] = bench(
            short.replace(fashion), arms, out / "benchmark-fashion", seeds=fewer, **options
        )
    return found


def _write_json(path: Path, values: Any) -> None:
    atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


# --- the report -------------------------------------------------------------------------------------------------------


def write_report(
    path: Path,
    *,
    pictures: Mapping[str, bytes],
    pairs: Sequence[Mapping[str, Any]],
    fits: Mapping[str, Any],
    benchmarks: Mapping[str, Sequence[Mapping[str, Any]]],
    **values: Any,
) -> Path:
    """Write the page, beside the files that it links to; see `report.html`, the template.

    `pictures` are PNGs by name, those of the benchmarks by the names of their folders, and `benchmarks` rows of arms by
    folder; `fits` is in `structures.json`, and `pairs` are rows of the exchangeable covariance, strongest first.
    `values` are `contents`, as in `inspection.json`, `effects`, whether units are exchangeable by distribution, `gain`,
    `drawn`, the held-out log-likelihood of the amplified distribution, and `page`, the name of the population's page or
    None (without plotly).
    """
    sections = []
    for folder, arms in benchmarks.items():
        row = next(row for row in arms if row["init"] == FITTED)
        keys = ("", "_ci_holm", "_p_holm", "_pairs", "_ci_images")
        beyond, own = (verdict(*(row[f"{kind}{key}"] for key in keys)) for kind in ("beyond_scale", "correlations"))
        names = ("difference", "difference_ci_holm", "p_holm", "pairs", "difference_ci_images")
        default = verdict(*(row[name] for name in names))
        about = {"folder": folder, "heading": HEADINGS[folder], "arms": arms, "epochs": row["epochs"]}
        sections.append(about | {"beyond": beyond, "correlations": own, "default": default})
    text = template("report.html", number=number).render(
        pictures={name: _embedded(png) for name, png in pictures.items()},
        pairs=[row for row in pairs if row["p"] < 0.05][:PAIRS],
        fits=fits,
        scores=[row for row in fits["table"] if row["group"] == "all" and row["failed"] is None],
        benchmarks=sections,
        **values,
    )
    atomic.write(path, text.encode())
    return path


def _embedded(png: bytes) -> dict[str, Any]:
    """A picture as text, and the size in CSS pixels for which its own text was set."""
    width, height = (round(n * _CSS_PIXELS / _DPI) for n in struct.unpack(">II", png[16:24]))
    return {"base64": base64.b64encode(png).decode(), "width": width, "height": height}


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number as text, times `scale`; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "no spread" if math.isinf(value) else "not finite"
    return format(value * scale if scale != 1 else value, form).replace("-", "−", 1)


def verdict(difference: float | None, ci95: _Ends, p: float | None, n: int | None, images: _Ends = None) -> str:
    """Describe a paired difference of accuracies (fractions) in words that follow "the initialiser is".

    The interval is at the level of its p-value's test in a correction for several comparisons: it excludes zero where
    p < 0.05, which means significant. What is not significant is not called equal. `images` is the interval for other
    test images as well.
    """
    if difference is None and p is None:
        return "the reference of the comparison"
    if difference is None or ci95 is None or p is None or not ACCURACY.tells(ci95):
        why = "too few seeds" if p is None or ci95 is not None else "networks diverged"
        return f"not comparable: {why}{f' ({n})' if n is not None else ''}"
    value, low, high = (100 * number for number in (difference, *ci95))
    sure = (low > 0 or high < 0) and p < 0.05
    kind = "not significantly different" if not sure else "better" if value > 0 else "worse"
    facts = [f"95 % CI {interval(low, high)}"]
    facts += [f"{interval(*(100 * end for end in images))} for other test images as well"] if images else []
    facts += [p_value(p)] + ([f"{n} paired seeds"] if n is not None else [])
    return f"{kind}: {signed(value, places(high - low))} percentage points ({', '.join(facts)})"
