"""The demo at its smallest size: the whole chain, the report, and the second run; and what its default size costs."""

import inspect
import re
from pathlib import Path

import fake_training as fake
import pytest
from costs import network_steps

from weightscope.benchmarking import BenchResult
from weightscope.cli.demo import EPOCHS, RECIPE, arms, findings, run_demo
from weightscope.errors import UsageError
from weightscope.recipe import Recipe

ROOT = Path(__file__).parent.parent
STEPS = 17_000  # 0.013 processor seconds each, imports and figures included: 216 s, 2 minutes by the clock of two cores


@pytest.mark.slow
def test_the_demo_writes_a_report_and_resumes(tmp_path):
    lines: list[str] = []
    options = {"networks": 16, "epochs": 1, "seeds": 3, "workers": 1, "device": "cpu", "progress": False}
    report = run_demo(tmp_path, say=lines.append, **options)
    assert len(lines) == 6  # one before the five steps
    text = report.read_text()
    first, second = re.findall(r"<h2>(.*?)</h2>", text)[:2]
    assert (first, second) == ("The initialiser", "Correlations of the weights")
    result = BenchResult.load(tmp_path / "benchmark")
    assert len(result.arms) == len(arms("fitted.safetensors")) == 4
    for sentence in findings(result):
        assert sentence in text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    run_demo(tmp_path, say=lines.append, **options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")} == before
    assert report.read_text() == text


def test_the_default_size_takes_few_steps():
    """Networks times steps of training, of the population and of the benchmark's arms."""
    given = {name: p.default for name, p in inspect.signature(run_demo).parameters.items()}
    recipe, compared = Recipe.load(RECIPE), len(arms("fitted.safetensors"))
    assert (recipe.training.epochs, recipe.population.networks) == (given["epochs"], given["networks"])
    short = recipe.replace({"training.epochs": EPOCHS, "population.networks": given["seeds"] * compared})
    assert network_steps(recipe) + network_steps(short) <= STEPS


def test_the_findings_are_those_of_the_benchmark():
    row = {"difference": None, "difference_ci_holm": None, "correlations": None, "correlations_ci_holm": None}
    fitted = {"difference": 0.12, "difference_ci_holm": [0.05, 0.19], "correlations": 0.1, "pairs": 12}
    rows = [row | {"init": "default", "mean": 0.7}, row | fitted | {"init": "fitted", "mean": 0.82}]
    said = findings(BenchResult([], [*rows, row | {"init": "mimetic_attention", "mean": None}]))
    assert "82.0 % from the fitted initialiser, 70.0 % from the default and diverged from" in said[0]
    assert said[1].endswith(": +12 points (95 % interval +5 to +19, 12 paired seeds).")
    assert said[2].endswith(": not decided by so few networks.")


def test_too_few_networks_or_seeds_are_refused_before_anything_is_trained(tmp_path):
    lines: list[str] = []
    for given in ({"networks": 3}, {"seeds": 1}):
        with pytest.raises(UsageError, match=rf"{next(iter(given))}: expected an integer >= \d+, found"):
            run_demo(tmp_path, say=lines.append, **given)
    assert not lines


def test_the_demos_networks_are_those_of_the_population_recipe():
    assert Recipe.load(RECIPE).network == Recipe.load(ROOT / "populations" / "digits-vit.toml").network


def test_a_population_is_not_overwritten(tmp_path):
    path = tmp_path / "a-folder"
    fake.write_population(path, fake.recipe())
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    for folder in (path, tmp_path / "new.pop"):
        with pytest.raises(UsageError, match="is a population; give another folder"):
            run_demo(folder, networks=16, epochs=1, seeds=3)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "new.pop").exists()
