"""Contrasts that are declared beforehand, and worst ranks of networks without a finite value."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import PLAIN, fake_bench
from scipy import stats

from weightscope.benchmarking import BenchResult, Contrast, plan_bench, summarise
from weightscope.benchmarking.statistics import contrast_tests, paired
from weightscope.data.metrics import ACCURACY, LOSS
from weightscope.errors import UsageError
from weightscope.recipe import Recipe

CELLS = ({"network.width": 8}, {"network.width": 16})
INITS = ("default", "a", "a (scale only)")
ARMS = [(cell, epochs, init) for cell in CELLS for epochs in (3, 10) for init in INITS]
RECIPE = Recipe.parse({**PLAIN, "training": {"epochs": 2, "batch_size": 16}, "population": {"networks": 3, "tile": 32}})


def runs_of(g: np.random.Generator, seeds: int = 12, effect: float = 0.0) -> list[dict[str, Any]]:
    """Accuracies of all arms; what the initialiser does to a seed is common to all cells and lengths."""
    own = effect + g.normal(0, 0.02, seeds)
    return [
        {"cell": cell, "epochs": epochs, "init": init, "seed": k, "diverged": False}
        | {"accuracy": 0.5 + own[k] * (init == "a") + g.normal(0, 0.002), "loss": 1.0}
        for cell, epochs, init in ARMS
        for k in range(seeds)
    ]


def minus(init: str, other: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"init": init, **fields}, {"init": other, **fields, "weight": -1}]


@pytest.mark.parametrize(
    ("terms", "weights", "text"),
    [
        (minus("a", "default"), {"a": 0.25, "default": -0.25}, "mean(a) - mean(default)"),
        (
            minus("a", "a (scale only)", width=16, epochs=3),
            {"a": 1, "a (scale only)": -1},
            "mean(a, width=16, epochs=3) - mean('a (scale only)', width=16, epochs=3)",
        ),
        (
            [{"init": ["a", "default"]}, {"init": "a (scale only)", "weight": -1}],
            {"a": 0.125, "default": 0.125, "a (scale only)": -0.25},
            "mean(a, default) - mean('a (scale only)')",
        ),
        (
            [{"init": "a", "weight": -0.5}, {"init": "default", "weight": 0.3}, {"init": "a", "weight": 0.2}],
            {"a": -0.075, "default": 0.075},
            "-mean(a) / 2 + mean(default) * 0.3 + mean(a) / 5",
        ),
    ],
)
def test_weights_of_arms(terms: list[dict[str, Any]], weights: dict[str, float], text: str) -> None:
    contrast = Contrast.of(terms, ARMS)
    assert contrast.text == text
    assert sum(contrast.weights.values()) == pytest.approx(0)
    last = {key[2]: w for key, w in contrast.weights.items() if key[:2] == max(contrast.weights)[:2]}
    assert last == pytest.approx(weights), "of the narrower networks after 3 epochs"


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (minus("a", "defualt"), "no arm 'defualt'"),
        (minus("a", "default", width=9), "expected mean(a, width=9) among the cells width=8, epochs=3"),
        ([{"init": "a"}], "add up to zero, found a sum of 1"),
        ([], "found none that is not zero"),
    ],
)
def test_what_is_no_contrast_is_refused(terms: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UsageError, match=r"^contrasts: ") as error:
        Contrast.of(terms, ARMS)
    assert said in str(error.value)


def test_a_contrast_is_tested_over_seeds() -> None:
    """scipy's test of the seeds' sums; one over arms and seeds alike would call the seeds' common effect certain.

    200 null benchmarks; 5 % of 200 is 10, of which 22 or more have probability 5e-4.
    """
    contrast = Contrast.of(minus("a", "default"), ARMS)
    rejected = pooled = 0
    for seed in range(200):
        runs = runs_of(np.random.default_rng(seed))
        row = contrast_tests([contrast], runs)[0]
        values = {init: np.array([r["accuracy"] for r in runs if r["init"] == init]) for init in ("a", "default")}
        differences = values["a"] - values["default"]
        expected = stats.ttest_1samp(differences.reshape(4, 12).mean(0), 0)
        assert row["p"] == pytest.approx(expected.pvalue)
        assert row["ci"] == pytest.approx(list(expected.confidence_interval()))
        rejected += row["p"] < 0.05
        pooled += stats.ttest_1samp(differences, 0).pvalue < 0.05
    assert rejected < 22
    assert pooled > 50, "which is why cells of one seed are one observation"
    planted = contrast_tests([contrast], runs_of(np.random.default_rng(0), effect=0.05))[0]
    assert planted["p"] < 1e-4


def test_several_contrasts_are_adjusted_for_one_another_and_one_is_not() -> None:
    runs = runs_of(np.random.default_rng(0), effect=0.02)
    contrasts = [Contrast.of(minus("a", other), ARMS) for other in ("default", "a (scale only)")]
    both, (alone,) = contrast_tests(contrasts, runs), contrast_tests(contrasts[:1], runs)
    assert (alone["p_holm"], alone["level"]) == (alone["p"], 0.05)
    assert max(row["p_holm"] for row in both) > max(row["p"] for row in both) - 1e-15
    assert min(row["p_holm"] for row in both) == pytest.approx(2 * min(row["p"] for row in both))
    assert min(row["level"] for row in both) == 0.025


def test_a_contrast_without_a_seed_that_all_arms_finished_has_a_p_and_no_difference() -> None:
    runs = runs_of(np.random.default_rng(0), seeds=8)
    runs = [run | ({"accuracy": None} if run["init"] == "a" else {}) for run in runs]
    result = BenchResult(runs, summarise(runs))
    row = result.contrast(minus("a", "default"))
    assert (row["pairs"], row["seeds"], row["difference"], row["ci"]) == (0, 8, None, None)
    assert row["p_holm"] == pytest.approx(2.0**-7)
    json.dumps(row, allow_nan=False)
    both = [row, result.contrast(minus("default", "a (scale only)"))]
    text = BenchResult(runs, result.arms, contrasts=both).text()
    assert text.splitlines()[0].split()[0] == "contrast", "none of them was declared"
    assert text.splitlines()[2].split()[-4:] == ["0", "0.0078", "post", "hoc"]
    runs = [run | ({} if run["init"] == "a (scale only)" else {"accuracy": None}) for run in runs]
    assert BenchResult(runs, result.arms).contrast(minus("a", "default"))["p"] is None, "neither arm has a value"


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_a_network_without_a_finite_value_has_the_worst_rank(metric: Any) -> None:
    """Eight clear improvements; one lost network of ten weakens them, five turn them, and so does losing the others."""
    base = np.full(10, 0.5)
    better = base + metric.sign * np.linspace(0.01, 0.02, 10)
    p = {}
    for lost in (0, 1, 5, 8):
        values = np.where(np.arange(10) < lost, np.nan, better)
        found = paired(values, base, metric)
        p[lost] = found["p"]
        assert metric.sign * found["difference"] > 0, "of the others"
        assert paired(base, values, metric)["p"] == pytest.approx(found["p"])
    assert p[0] < 1e-6
    assert p[1] == pytest.approx(stats.wilcoxon([-10, *range(1, 10)]).pvalue)
    assert p[1] < 0.1 < p[5]
    assert p[8] < 0.05
    both = np.where(np.arange(10) < 3, np.nan, base)
    assert paired(both, both, metric)["p"] == 1.0


def test_a_benchmark_states_its_contrast_and_what_was_added_to_results_is_post_hoc(tmp_path: Path) -> None:
    inits, first, second = ["default", "mimetic_mlp"], minus("mimetic_mlp", "default"), minus("default", "mimetic_mlp")
    text = "mean(mimetic_mlp) - mean(default)"
    plan = plan_bench(RECIPE, inits, tmp_path / "a", contrasts=[first], measure=False)
    assert plan.text().splitlines()[1:] == [
        f"declared contrast: {text}",
        "tested at 5 %; all other comparisons are exploratory, adjusted for one another (Holm)",
    ]
    assert plan.to_dict()["contrasts"] == [text]
    result = fake_bench(RECIPE, inits, tmp_path / "a", contrasts=[first])
    (row,) = result.contrasts
    assert (row["contrast"], row["declared"], row["pairs"]) == (text, True, 3)
    assert row["p"] == pytest.approx(result.arms[1]["p"])
    assert result.text().startswith("declared contrast")
    assert json.loads((tmp_path / "a" / "results.json").read_text())["contrasts"] == [row]
    assert BenchResult.load(tmp_path / "a").contrasts == [row]
    again = fake_bench(RECIPE, inits, tmp_path / "a", contrasts=[first, second])
    assert [found["declared"] for found in again.contrasts] == [True, False]
    assert "post hoc" in again.text()
    assert result.contrast(first) == row | {"declared": False}
    table = RECIPE.replace({"bench": {"init": inits, "contrasts": [first]}})
    assert fake_bench(table, out=tmp_path / "b").contrasts == [row]
