"""`weightscope demo`: the whole chain on data that come with the installation, and a report of the results.

Training resumes where it was interrupted.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weightscope._util import atomic
from weightscope._util.checks import count
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.benchmarking import BenchResult, bench
from weightscope.cli.page import Section, population_sections, write_html
from weightscope.data.metrics import ACCURACY
from weightscope.errors import UsageError
from weightscope.fits.fitting import fit
from weightscope.init.named import Init
from weightscope.plots.theme import decimals, interval, signed
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.collection import collect

RECIPE = Path(__file__).with_name("demo.toml")
SELECT = "blocks.*"  # all tensors of the blocks
GAIN = 30.0  # chosen in analyses/one_structure, on images held back from the training set
EPOCHS = 4  # of the benchmark
HAND_MADE = "mimetic_attention"
SMALLEST_POPULATION = 16
FITTED = "fitted"


def run_demo(
    out: str | Path,
    *,
    networks: int = 40,
    epochs: int = 12,
    seeds: int = 16,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Path:
    """Collect a population, find what is correlated in it, draw initial weights from it, and write the report.

    The initialiser is benchmarked against the default, its control (the means and variances of every part without
    correlations), and a hand-made initialiser. `options` are those of `collect`, such as `workers`.
    Returns the path of `report.html`.
    """
    count("networks", networks, least=SMALLEST_POPULATION)
    count("seeds", seeds, least=2)  # a paired comparison needs two
    out = Path(out)
    if out.suffix == ".pop" or (out / "shards").is_dir():
        raise UsageError(f"{out} is a population; give another folder for the demo, which makes its own in it")
    if out.is_dir() and any(out.iterdir()) and not (out / "digits.pop").is_dir():
        raise UsageError(f"{out}: expected a new or empty folder, or that of an earlier demo, found other files in it")
    recipe = Recipe.load(RECIPE)
    recipe.replace({"population.networks": seeds})  # refuses what the benchmark would, after minutes
    recipe = recipe.replace({"training.epochs": epochs, "population.networks": networks})
    say("The default size takes about 2 minutes on two cores. Ctrl-C is safe: run it again to resume.")
    say(f"1/5  training {networks} vision transformers on the digits -> {out / 'digits.pop'}")
    collect(recipe, out / "digits.pop", **options)
    population = Population(out / "digits.pop")

    say(f"2/5  the covariance of the whole network -> {out / 'exchangeable.json'}")
    found = covariance_exchangeable(population, SELECT)
    atomic.write(out / "exchangeable.json", json.dumps(found.to_dict(), indent=1, allow_nan=False).encode() + b"\n")

    say(f"3/5  fitting an initialiser -> {out / f'{FITTED}.safetensors'}")
    artifact = str(out / f"{FITTED}.safetensors")
    fit(population, SELECT, structure="exchangeable", joint="all", options={"gain": GAIN}).save(artifact)

    say(f"4/5  the benchmark, {len(arms(artifact))} initialisers on {seeds} paired seeds -> {out / 'benchmark'}")
    short = recipe.replace({"training.epochs": EPOCHS})
    result = bench(short, arms(artifact), out / "benchmark", seeds=seeds, **options)

    say(f"5/5  the report -> {out / 'report.html'}")
    caption = "Test accuracy of each start; bars are 95 % intervals of the paired difference from the default (Holm)."
    benchmark = Section("The initialiser", (), [(result.plot(), caption)])
    title = "The weights of a whole network, and an initialiser drawn from them"
    about = Section("How it was compared", _about(seeds))
    sections = [benchmark, *population_sections(population, found)[::-1], about]
    return write_html(out / "report.html", title, findings(result), sections)


def arms(artifact: str) -> list[Init]:
    """What is compared: the default, the fitted initialiser, its control, and a hand-made one."""
    control = InitConfig(artifact=artifact, control="uncorrelated")
    return ["default", artifact, control, InitConfig.model_validate({"name": HAND_MADE})]


def findings(result: BenchResult) -> list[str]:
    """The three sentences at the top of the report."""
    rows = {row["init"]: row for row in result.arms}
    mean = {init: f"{ACCURACY.factor * row['mean']:.1f} %" for init, row in rows.items() if row["mean"] is not None}
    default, fitted, made = (mean.get(init, "diverged") for init in ("default", FITTED, HAND_MADE))
    return [
        f"After {EPOCHS} epochs on the digits the test accuracy is {fitted} from the fitted initialiser, {default} "
        f"from the default and {made} from the hand-made {HAND_MADE}.",
        f"The fitted one minus the default: {_points(rows[FITTED], 'difference')}.",
        "The fitted one minus its control, which has the same means and variances of every part and no correlations: "
        f"{_points(rows[FITTED], 'correlations')}.",
    ]


def _points(row: Mapping[str, Any], key: str) -> str:
    """A paired difference in points with its interval."""
    difference, ends = row[key], row[f"{key}_ci_holm"]
    if difference is None or not ACCURACY.tells(ends):
        return "not decided by so few networks"
    low, high = (ACCURACY.factor * end for end in ends)
    value = signed(ACCURACY.factor * difference, decimals(high - low))
    return f"{value} points (95 % interval {interval(low, high)}, {row['pairs']} paired seeds)"


def _about(seeds: int) -> list[str]:
    """What the comparison holds equal, and what it does not."""
    return [
        f"Network k of every arm, of {seeds}, starts from the same default weights and sees the same batches in the "
        "same order; only its initialiser differs. The population has other seeds.",
        f"The initialiser draws from the correlations above, amplified by {GAIN:g}. The networks that it was fitted to "
        "have seen the same training images, and one learning rate is used for all arms: in a study of such networks, "
        "11 of 18 points of what correlations give remain with the best rate of each (analyses/derived_vit_start).",
    ]
