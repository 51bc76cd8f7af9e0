"""`weightscope demo`: the whole chain on data that come with the installation, and a report of what it found.

Each step writes its result beside the report and is skipped when that result is there already, so a demo that was
stopped goes on where it was. Nothing in the report is typed in: every number comes from a file beside it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightscope.bench import BenchResult, bench
from weightscope.collect import collect
from weightscope.errors import UsageError
from weightscope.fit import FitResult, fit
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.study import Study, study

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
    """Collect a population, study it, fit initialisers, benchmark them, write the report.

    Args:
        out: the folder for everything, made when it does not exist.
        networks: size of the population.
        epochs: of the population's training.
        seeds: paired seeds of the benchmark.
        say: called with one line before each step.
        options: passed on to `collect` (`workers`, `device`, `data`).

    Returns:
        The path of `report.html`.

    Raises:
        UsageError: if there are too few networks or seeds to say anything.
        Resumable: if it was interrupted.
    """
    if networks < SMALLEST_POPULATION:
        raise UsageError(f"networks: the demo needs at least {SMALLEST_POPULATION}, found {networks}")
    out = Path(out)
    recipe = Recipe.load(Path(__file__).with_name("demo.toml")).replace(
        {"training.epochs": epochs, "population.networks": networks}
    )
    say(f"1/5  training {networks} ConvNeXts on the digits -> {out / 'digits.pop'}")
    collect(recipe, out / "digits.pop", **options)
    population = Population(out / "digits.pop")

    say(f"2/5  the covariance of [vec W1, vec W2] -> {out / 'covariance.json'}")
    whole, block = study(population, SELECT), study(population, BLOCK)
    _write_json(out / "covariance.json", whole.to_dict())
    block.save_matrix(out / "covariance-block-1.npz")

    say(f"3/5  fitting structures -> {out / 'fitted.safetensors'}")
    fitted = fit(population, SELECT)
    fitted.save(out / "fitted.safetensors")
    fit(population, SELECT, structure="diagonal").save(out / "diagonal.safetensors")
    _write_json(out / "structures.json", fitted.to_dict())

    say(f"4/5  benchmark: default, fitted and diagonal, {seeds} paired seeds -> {out / 'benchmark'}")
    inits = ["default", str(out / "fitted.safetensors"), str(out / "diagonal.safetensors")]
    measured = bench(
        recipe.replace({"population.seed": BENCH_SEED}),
        inits,
        out / "benchmark",
        epochs=BENCH_EPOCHS,
        seeds=seeds,
        **options,
    )
    say(f"5/5  the report -> {out / 'report.html'}")
    return _report(out, population, whole, block, fitted, measured)


def _write_json(path: Path, values: Any) -> None:
    from weightscope import _atomic

    _atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")
