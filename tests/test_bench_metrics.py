"""Benchmarks of metrics other than image accuracy: directions, bounds and units, with planted effects of both signs."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import PAIRED, PLAIN, bars_of, ends_of, fake_bench, points_of_bars, texts_of, words
from pictures import runs_of as rows_of
from scipy import stats

from weightscope import plots
from weightscope._util.arms import CONTROLS
from weightscope.benchmarking import BenchResult, summarise
from weightscope.benchmarking.gain import curve_of
from weightscope.benchmarking.result import finding, from_controls
from weightscope.benchmarking.run import Design
from weightscope.benchmarking.statistics import mean_interval, paired
from weightscope.data import metrics
from weightscope.data.metrics import ACCURACY, ACCURACY_2X, ACCURACY_4X, BITS, LOSS, METRICS, PERPLEXITY, Metric
from weightscope.errors import DataError, UsageError
from weightscope.recipe import DataConfig, Recipe

RECIPE = Recipe.parse({**PLAIN, "population": {"networks": 4, "tile": 4}})
SEEDS = 8
NOISE = np.random.default_rng(3).normal(0, 0.002, (2, SEEDS))
BASE = np.random.default_rng(4).uniform(1.2, 1.5, SEEDS)


def runs_of(init: str, values: Any, numbers: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Networks whose bits are `values` after 2 epochs, and 1 more after the first."""
    runs = rows_of(init, values, "bits", epochs=2, numbers=numbers or {})
    return [
        run | {"loss": bits * np.log(2), "perplexity": 2.0**bits, "curve": [bits + 1, bits]}
        for run, bits in zip(runs, values, strict=True)
    ]


def result_of(*arms: list[dict[str, Any]]) -> BenchResult:
    runs = [run for arm in arms for run in arm]
    return BenchResult(runs, summarise(runs, BITS), {}, BITS, (LOSS, BITS, PERPLEXITY))


def of_scale(arms: Any, metric: Metric = BITS) -> str | None:
    """What the title of the picture of scale controls says."""
    return finding(from_controls(arms, CONTROLS["scale"]), metric)


@pytest.fixture
def planted() -> BenchResult:
    """`fewer` needs 0.05 bits less than the default, `more` 0.05 more."""
    arms = (runs_of("fewer", BASE - 0.05 + NOISE[0]), runs_of("more", BASE + 0.05 + NOISE[1]))
    return result_of(runs_of("default", BASE), *arms)


def test_metrics_have_the_names_of_populations_and_a_direction() -> None:
    for metric, difference in ((ACCURACY, 0.1), (BITS, -0.1)):
        assert metric.better(difference)
        assert not metric.better(-difference)
        assert not metric.better(0.0)
    amounts = ACCURACY.amount(-0.021), BITS.amount(-0.0231), PERPLEXITY.amount(2.5)
    assert amounts == ("2.1 points", "0.023 bits per token", "2.50")
    for metric in (*METRICS.values(), metrics.accuracy_at(80)):
        assert metrics.metric_named(metric.name) == metric
    for name in ("test_accuracy_1x", "test_accuracy_x", "test_accuracy_02x", "test_accuracy_2", "loss"):
        assert metrics.metric_named(name) is None


@pytest.mark.parametrize("n", [3, 30])
@pytest.mark.parametrize(
    ("metric", "mean", "draw", "least"),
    [
        (ACCURACY, 0.96, lambda random, shape: random.beta(48, 2, shape), 0.93),
        (BITS, 1.0, lambda random, shape: random.gamma(4, 0.25, shape), 0.905),
    ],
    ids=("accuracy", "bits"),
)
def test_the_interval_of_a_mean_covers_it_inside_its_bounds(
    metric: Metric, mean: float, draw: Any, least: float, n: int
) -> None:
    """95 % of 4,000 intervals near a bound, within 5.8 standard errors; Student's own interval leaves the bounds.

    The delta method is approximate: with n = 3, 92 to 93 % hold a mean of bits.
    """
    draws = draw(np.random.default_rng(7), (4000, n))
    low, high = np.array([mean_interval(row, metric)["ci95"] for row in draws]).T
    assert least < ((low <= mean) & (high >= mean)).mean() < 0.97
    assert low.min() >= metric.bounds[0]
    assert high.max() <= metric.bounds[1]
    if n == 3:
        half = stats.t.ppf(0.975, n - 1) * draws.std(axis=1, ddof=1) / np.sqrt(n)
        ends = (draws.mean(axis=1) - half).min(), (draws.mean(axis=1) + half).max()
        assert not metric.bounds[0] <= ends[0] <= ends[1] <= metric.bounds[1]


def test_the_interval_of_a_mean_is_student_s_on_the_logarithm_above_the_bound() -> None:
    found = mean_interval(BASE, BITS)
    half = stats.t.ppf(0.975, SEEDS - 1) * stats.sem(BASE) / BASE.mean()
    np.testing.assert_allclose(found["ci95"], BASE.mean() * np.exp([-half, half]))
    shifted = mean_interval(1 + BASE, PERPLEXITY)["ci95"]
    np.testing.assert_allclose(np.array(shifted) - 1, found["ci95"])
    assert mean_interval(np.array([2.0, 2.0]), BITS)["ci95"] is None, "of whose spread nothing is known"
    assert mean_interval(np.full(6, 2.0), BITS)["ci95"] == [2, 2]
    assert mean_interval(np.array([2.0]), BITS)["ci95"] is None, "no finite interval of one network"
    assert mean_interval(np.array([]), BITS) == {"n": 0, "mean": None, "ci95": None}


def test_the_interval_of_a_difference_is_bounded_by_what_is_possible() -> None:
    assert paired(np.array([0.9, 0.0]), np.array([0.0, 0.5]))["difference_ci95"] == [-1, 1]
    low, high = paired(np.array([9.0, 0.0]), np.array([0.0, 5.0]), BITS)["difference_ci95"]
    assert (low, high) == pytest.approx((2 - 12.7062 * 7, 2 + 12.7062 * 7), rel=1e-4)
    assert paired(np.array([0.9]), np.zeros(1))["difference_ci95"] == [-1, 1]
    assert paired(np.array([0.9]), np.zeros(1), BITS) == {"difference": 0.9, "difference_ci95": None, "p": 1.0}


def test_two_seeds_are_too_few_for_an_interval() -> None:
    """It was printed as -100 to +100, and half of it beside a mean in bold."""
    pair = rows_of("default", [0.9, 0.96]) + rows_of("x", [0.5, 0.99])
    result = BenchResult(pair, summarise(pair))
    assert [line.count("too few seeds") for line in result.text().splitlines()[2:4]] == [0, 2]
    assert result.table().count("74.5 (too few seeds)") == 1
    assert "**" not in result.table()
    known = pair + rows_of("y", [0.95, 0.99])
    assert "-21.45 to +29.45" in BenchResult(known, summarise(known)).text()
    assert result.text().splitlines()[-1] == "intervals are over networks, for the test examples that were used"


def test_networks_without_a_finite_value_are_left_out_and_counted() -> None:
    runs = runs_of("default", BASE) + runs_of("x", BASE - 0.05) + runs_of("never", BASE)
    lost = [run for run in runs if run["init"] == "never" or (run["init"], run["seed"]) == ("x", 2)]
    for run in lost:
        run |= {"bits": None, "loss": None, "diverged": True, "curve": [3.0, None]}
    result = BenchResult(runs, summarise(runs, BITS), {}, BITS, (LOSS, BITS))
    _, some, none = result.arms
    assert (some["n"], some["diverged"], some["difference"]) == (7, 1, pytest.approx(-0.05))
    assert (none["n"], none["mean"], none["difference"], none["difference_ci_holm"]) == (0, None, None, None)
    assert none["p_holm"] == 2 * none["p"] == pytest.approx(2 * 2.0**-7), "all of 8 have the worst rank"
    assert some["difference_ci_holm"] is None, "an interval over those that are left may contradict p"
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["summary"] == result.arms
    assert "(8 diverged)" in result.text()
    assert "7 of 7" in texts_of(result.figures()["differences"](None).axes[0])
    assert all(figure(None) for figure in result.figures().values())
    assert "never" in result.table()


def diverged(runs: list[dict[str, Any]], *seeds: int) -> list[dict[str, Any]]:
    """The networks, of which some diverged in the second epoch."""
    lost = {"bits": None, "loss": None, "perplexity": None, "diverged": True}
    return [run | lost | {"curve": [3.0, None]} if run["seed"] in seeds else run for run in runs]


@pytest.fixture
def unstable() -> BenchResult:
    """An arm whose three networks that did not diverge are better than those of the default, and a complete one."""
    lost = diverged(runs_of("unstable", BASE - 0.1 + NOISE[0]), *range(3, SEEDS))
    return result_of(runs_of("default", BASE), lost, runs_of("more", BASE + 0.05 + NOISE[1]))


@pytest.fixture
def lost_reference() -> BenchResult:
    """Six of eight networks of the default diverged; no network of the control and of the structure did."""
    arms = (runs_of("a", BASE - 0.1 + NOISE[0]), runs_of("a (scale only)", BASE - 0.05 + NOISE[1]))
    return result_of(diverged(runs_of("default", BASE), *range(2, SEEDS)), *arms)


def test_rows_store_the_number_of_pairs_of_their_differences(lost_reference: BenchResult) -> None:
    default, arm, control = lost_reference.arms
    assert [(row["n"], row["networks"]) for row in lost_reference.arms] == [(2, 8), (8, 8), (8, 8)]
    assert (default["pairs"], arm["pairs"], control["pairs"]) == (None, 2, 2)
    assert (arm["beyond_scale_pairs"], control["beyond_scale_pairs"]) == (8, None)
    np.testing.assert_allclose(arm["difference"], (NOISE[0] - 0.1)[:2].mean())


def test_an_arm_that_lost_networks_is_not_the_best_of_its_column(unstable: BenchResult) -> None:
    default, lost, _ = unstable.arms
    assert lost["mean"] < default["mean"], "which would be bold"
    complete = result_of(*(runs_of(init, shift) for init, shift in (("default", BASE), ("unstable", BASE - 0.1))))
    table, kept = unstable.table(), complete.table()
    assert f"**{default['mean']:.3f}**" in table
    assert f"**{lost['mean']:.3f}**" not in table
    assert f"**{complete.arms[1]['mean']:.3f}**" in kept, "the best, if it loses none"
    assert "5 of 8 of unstable diverged" in table
    assert "diverged" not in kept
    never = result_of(diverged(runs_of("default", BASE), *range(SEEDS)))
    assert "*" not in never.table()


def test_titles_say_how_many_networks_diverged(unstable: BenchResult) -> None:
    """Three networks are better than default; the five that diverged have the worst ranks."""
    assert unstable.arms[1]["difference"] < 0, "of those three"
    said = "more is 0.050 bits per token worse than default; 5 of 8 of unstable diverged"
    assert finding(unstable.arms, BITS) == said
    never = result_of(runs_of("default", BASE), diverged(runs_of("Never", BASE), *range(SEEDS)))
    assert finding(never.arms, BITS) == "Never differs significantly from default; 8 of 8 of Never diverged"


def test_a_reference_that_lost_networks_is_named(lost_reference: BenchResult) -> None:
    assert str(finding(lost_reference.arms, BITS)).endswith("; 6 of 8 of default diverged")
    better = "a is 0.051 bits per token better than a (scale only)"
    assert of_scale(lost_reference.arms) == better, "of which none diverged"
    assert "6 of 8 of default diverged" in words(lost_reference.figures()["scale"](None))


def test_nothing_is_said_of_the_part_of_a_control_that_lost_networks() -> None:
    """What is left of the control is better than the arm, but most was lost, so that p is in favour of the arm."""
    control = diverged(runs_of("a (scale only)", BASE - 0.2 + NOISE[1]), *range(1, SEEDS))
    found = result_of(runs_of("default", BASE), runs_of("a", BASE - 0.1 + NOISE[0]), control)
    assert found.arms[1]["beyond_scale"] > 0, "worse, on one seed"
    said = "a is 0.101 bits per token better than default; 7 of 8 of a (scale only) diverged"
    assert finding(found.arms, BITS) == said
    none = diverged(runs_of("a (scale only)", BASE), *range(SEEDS))
    lost = result_of(runs_of("default", BASE), runs_of("a", BASE - 0.1 + NOISE[0]), none)
    assert "8 of 8 of a (scale only) diverged" in words(lost.figures()["scale"](None)), "a KeyError"


def test_lower_is_better_in_words_and_the_wrong_direction_would_say_the_opposite(planted: BenchResult) -> None:
    wrong = replace(BITS, higher_is_better=True)
    differences = [row["difference"] for row in planted.arms[1:]]
    assert differences == pytest.approx([NOISE[0].mean() - 0.05, NOISE[1].mean() + 0.05]), "which keep their sign"
    assert finding(planted.arms, BITS) == f"fewer is {0.05 - NOISE[0].mean():.3f} bits per token better than default"
    assert finding(planted.arms, wrong) == f"more is {0.05 + NOISE[1].mean():.3f} bits per token better than default"
    only = result_of(runs_of("default", BASE), runs_of("more", BASE + 0.05 + NOISE[1]))
    assert finding(only.arms, BITS) == f"more is {0.05 + NOISE[1].mean():.3f} bits per token worse than default"
    same = result_of(runs_of("default", BASE), runs_of("more", BASE + NOISE[1]))
    assert finding(same.arms, BITS) == "No initialiser differs significantly from default"


def test_scale_and_structure_follow_the_direction() -> None:
    control, arm = runs_of("a (scale only)", BASE - 0.02 + NOISE[0]), runs_of("a", BASE - 0.05 + NOISE[1])
    result = result_of(runs_of("default", BASE), arm, control)
    assert result.arms[1]["beyond_scale"] == pytest.approx(-0.03 + NOISE[1].mean() - NOISE[0].mean())
    text = finding(result.arms, BITS)
    beyond = f"{-result.arms[1]['beyond_scale']:.3f} of them beyond scale"
    assert text == f"a is {0.05 - NOISE[1].mean():.3f} bits per token better than default, {beyond}"
    amount = f"{-result.arms[1]['beyond_scale']:.3f} bits per token"
    assert of_scale(result.arms) == f"a is {amount} better than a (scale only)"
    assert of_scale(result.arms, replace(BITS, higher_is_better=True)) == f"a is {amount} worse than a (scale only)"
    ax = result.figures()["scale"](None).axes[0]
    label = ax.get_xlabel().replace("\n", " ")
    assert label == "difference of test cross entropy on the same seed (bits per token), 8 seeds; lower is better"
    drawn = points_of_bars(ax)
    assert drawn == pytest.approx([result.arms[2]["difference"], result.arms[1]["beyond_scale"]])


def test_tables_mark_the_lowest_and_name_the_unit(planted: BenchResult) -> None:
    lowest = f"{planted.arms[1]['mean']:.3f}"
    assert lowest == f"{min(row['mean'] for row in planted.arms):.3f}"
    markdown = planted.table()
    assert markdown.count("**") == 2
    assert f"**{lowest}** ± " in markdown
    assert "Test cross entropy (bits per token) of 8 seeds; ± half the 95 % interval (Holm)" in markdown
    assert markdown.strip().endswith("lower is better")
    lines = planted.text().splitlines()
    assert "  cross entropy  " in lines[0]
    assert lines[-1] == "test cross entropy (bits per token); lower is better"
    assert f"{planted.arms[1]['difference']:+.4f}" in lines[3]


def random_result(seed: int) -> BenchResult:
    """Arms with effects of all sizes and signs, some frozen, some with a control, some with equal differences."""
    random = np.random.default_rng(seed)
    metric, n, epochs = (ACCURACY, BITS)[seed % 2], int(random.integers(2, 9)), [3, 9][: int(random.integers(1, 3))]
    inits = ["default", *"abcd"[: int(random.integers(1, 5))]]
    inits += [f"{init} (scale only)" for init in inits[1:] if random.random() < 0.3]
    inits += [f"{init} (frozen)" for init in inits if random.random() < 0.3 and seed % 3 == 0]
    runs = []
    for length in epochs:
        base = random.uniform(0.3, 0.6, n)
        for init in inits:
            effect = random.choice([0, 0, 0.003, -0.003, 0.02, -0.05])
            values = base + effect + random.choice([0, 0.01]) * random.standard_normal(n)
            values = np.round(values, 2) if random.random() < 0.3 else values
            found = rows_of(init, np.clip(values, 0, 1), metric.key, epochs=length)
            runs += found
    return BenchResult(runs, summarise(runs, metric), {}, metric, (metric, LOSS))


def test_intervals_and_p_values_agree() -> None:
    for seed in range(8):
        result = random_result(seed)
        for row, key in product(result.arms, ("difference", "beyond_scale")):
            p, interval = row["p_holm" if key == "difference" else f"{key}_p_holm"], row[f"{key}_ci_holm"]
            if interval is not None:
                assert (p < 0.05) == (interval[0] > 1e-12 or interval[1] < -1e-12), (seed, row)


def test_bars_stay_above_the_bound() -> None:
    near = np.linspace(0.001, 0.02, SEEDS)
    result = result_of(runs_of("default", near), runs_of("x", near[::-1]))
    low, high = ends_of(bars_of(plots.convergence(result.arms, metric=BITS))[1])[0]
    assert low == 0
    assert high > result.arms[1]["mean"]
    below = result.arms[1]["mean"] + result.arms[1]["difference_ci_holm"][0] - result.arms[1]["difference"]
    assert below < 0, "the paired interval itself is not"


def test_maps_and_lines_of_a_grid_frame_the_lowest() -> None:
    axes = ("mimetic_attention.alpha_qk", "mimetic_attention.beta_qk")
    arms = [runs_of("default", BASE)]
    for i, (a, b) in enumerate([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]):
        shift = (0.02, -0.06, 0.08, -0.01)[i]
        label = f"mimetic_attention (alpha_qk={a:g}, beta_qk={b:g})"
        arms.append(runs_of(label, BASE + shift + NOISE[i % 2], dict(zip(axes, (a, b), strict=True))))
    result = result_of(*arms)
    figures = result.figures()
    assert list(figures)[:2] == [f"along-{axis}" for axis in axes]
    label = figures[f"along-{axes[0]}"](None).axes[0].get_ylabel()
    assert label == "test cross entropy (bits per token) after 2 epochs; lower is better"
    name = next(name for name in figures if name.startswith("map-"))
    ax = figures[name](None).axes[0]
    frame = next(patch for patch in ax.patches if patch.get_gid() == "largest")
    assert frame.get_xy() == (0, 1), "alpha 0, beta 1"  # type: ignore[attr-defined]
    amount = f"{0.06 - NOISE[1].mean():.3f}"
    assert f"−{amount}" in texts_of(ax)
    assert f"{amount} bits per token better than default" in words(ax.figure)


def test_how_far_networks_generalise_is_one_number() -> None:
    """Against a fine grid of the polygon; networks that fail at once, never, and in between."""
    values = np.array([[0.5, 1.0, 0.9], [1.0, 1.0, 1.0], [1.0, 0.8, 0.95], [0.95, 0.9, 0.1], [np.nan, 1.0, 1.0]])
    names, lengths = ("test_accuracy", "test_accuracy_2x", "test_accuracy_5x"), [1, 2, 5]
    found = metrics.over_lengths(dict(zip(names, values.T, strict=True)) | {"test_loss": values[:, 0]})
    assert list(found) == ["test_area", "test_length_90"]
    grid = np.linspace(1, 5, 400_001)
    for row, area, length in zip(values[:-1], *found.values()):  # noqa: B905 - the last has no finite value
        polygon = np.interp(grid, lengths, row)
        assert area == pytest.approx(polygon.mean(), abs=1e-5)
        good = grid[np.logical_and.accumulate(polygon >= 0.9)]
        assert length == pytest.approx(good.max(initial=0), abs=1e-4)
    assert np.isnan(found["test_area"][-1])
    assert np.isnan(found["test_length_90"][-1])
    assert metrics.over_lengths({"test_accuracy": values[:, 0], "test_loss": values[:, 0]}) == {}, "one length"


def by_length(init: str, shift: np.ndarray) -> list[dict[str, Any]]:
    """Copiers that are right at their length, and less so at 2x and 4x."""
    place = {"init": init, "epochs": 3, "diverged": False, "loss": 0.1}
    return [
        place | {"seed": k, "accuracy": 0.99, "accuracy_2x": 0.5 + shift[0] + s, "accuracy_4x": 0.1 + shift[1] + s}
        for k, s in enumerate(10 * NOISE[0])
    ]


def test_accuracy_by_length_has_a_point_for_each_length_with_paired_intervals() -> None:
    runs = by_length("default", np.zeros(2)) + by_length("mimetic", np.array([0.3, 0.2]))
    for run in runs[SEEDS:]:
        run["accuracy_4x"] += float(NOISE[1][run["seed"]])
    metrics = (ACCURACY, ACCURACY_2X, ACCURACY_4X)
    ax = plots.accuracy_by_length({metric.length: summarise(runs, metric) for metric in metrics})
    bars = {bar.get_label(): bar for bar in bars_of(ax)}
    assert list(bars) == ["default", "mimetic"]
    np.testing.assert_allclose(bars["mimetic"].lines[0].get_xdata(), [1, 2, 4])
    rows = [summarise(runs, metric)[1] for metric in metrics]
    np.testing.assert_allclose(bars["mimetic"].lines[0].get_ydata(), [row["mean"] for row in rows])
    low, high = bars["mimetic"].lines[2][0].get_paths()[2].vertices[:, 1]
    np.testing.assert_allclose(high - low, np.ptp(rows[2]["difference_ci_holm"]))
    assert np.ptp(bars["default"].lines[2][0].get_paths()[2].vertices[:, 1]) == 0, "the reference has none"
    assert list(ax.get_xticks()) == [1, 2, 4]
    assert ax.get_legend().get_title().get_text() == f"mean of 8 seeds; {PAIRED} of the paired difference from default"


@pytest.fixture
def text_task(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BenchResult]:
    monkeypatch.setattr(DataConfig, "metrics", property(lambda self: (BITS, LOSS)))
    return lambda out, **given: fake_bench(RECIPE, ["default", "mimetic_mlp"], out, **given)


def test_a_benchmark_compares_the_primary_metric_of_its_task(text_task: Any, tmp_path: Path) -> None:
    result = text_task(tmp_path / "a")
    assert result.metric == BITS
    assert result.runs[0]["bits"] == 2.0
    assert result.runs[0]["loss"] == pytest.approx(2 * np.log(2))
    assert result.runs[3]["bits"] is result.runs[3]["loss"] is None
    assert result.runs[1]["curve"] == [2.1]
    assert result.arms[1]["difference"] == pytest.approx(-0.11)
    assert (result.arms[1]["n"], result.arms[1]["diverged"]) == (3, 1)
    lost = "1 of 4 of default, 1 of 4 of mimetic_mlp diverged"
    assert finding(result.arms, result.metric) == f"No initialiser differs significantly from default; {lost}"
    written = json.loads((tmp_path / "a" / "results.json").read_text())
    assert written["metric"] == "test_bits"
    assert written["metrics"]["test_bits"] | {"bounds": None} == BITS.to_dict() | {"bounds": None}
    assert written["metrics"]["test_bits"]["bounds"] == [0, None]
    again = BenchResult.load(tmp_path / "a" / "results.json")
    assert (again.runs, again.arms, again.metric, again.metrics) == (
        *(result.runs, result.arms, result.metric, result.metrics),
    )


def test_another_metric_of_the_task_is_compared_by_name(text_task: Any, tmp_path: Path) -> None:
    result = text_task(tmp_path / "a", metric="test_loss")
    assert result.metric == LOSS
    assert result.arms[1]["difference"] == pytest.approx(-0.11 * np.log(2))
    assert result.runs[1]["curve"] == pytest.approx([2.1 * np.log(2)])
    table = RECIPE.replace({"bench": {"init": ["default"], "metric": "test_loss"}})
    assert fake_bench(table, out=tmp_path / "b").metric == LOSS
    assert fake_bench(table, out=tmp_path / "c", metric="test_bits").metric == BITS
    with pytest.raises(
        UsageError, match="metric: no metric of this task 'test_accuracy'; there are test_bits, test_loss"
    ):
        text_task(tmp_path / "d", metric="test_accuracy")
    assert not (tmp_path / "d").exists(), "before anything is trained"


def test_arms_are_compared_by_what_their_tasks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    by_size = {32: (BITS, LOSS), 64: (ACCURACY, LOSS), 16: (ACCURACY,)}
    monkeypatch.setattr(DataConfig, "metrics", property(lambda self: by_size[self.train]))
    design = Design.of(RECIPE, ["default"], vary={"data.train": [32, 64]})
    assert (design.metric, design.metrics) == (LOSS, (LOSS,))
    with pytest.raises(UsageError, match="expected tasks with a metric in common, found none"):
        Design.of(RECIPE, ["default"], vary={"data.train": [32, 16]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "test_acuracy"}, "expected the results of a benchmark, found something else: 'test_acuracy'"),
        ("[", "expected the results of a benchmark"),
    ],
)
def test_files_that_are_no_results_are_refused(
    planted: BenchResult, tmp_path: Path, changes: Any, message: str
) -> None:
    text = json.dumps(planted.to_dict() | changes) if isinstance(changes, dict) else changes
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DataError, match=message):
        BenchResult.load(tmp_path / "results.json")


def test_the_gain_of_the_fewest_bits_is_chosen() -> None:
    means = np.array([2.00, 1.95, 1.9001, 1.90, 1.92])
    values = means[:, None] + 0.1 * np.random.default_rng(0).standard_normal(16) + 0.001 * NOISE[0][0]
    values = values + 0.001 * np.random.default_rng(1).standard_normal((5, 16))
    rows, chosen = curve_of([0, 1, 3, 10, 30], values, BITS)
    assert chosen == 2
    assert rows[1]["difference"] == pytest.approx((values[1] - values[0]).mean()), "the sign is kept"
    assert rows[2]["bits"] == pytest.approx(values[2].mean())
    assert curve_of([0, 1, 3, 10, 30], values, replace(BITS, higher_is_better=True))[1] == 0


def test_a_gain_whose_networks_diverge_is_not_chosen() -> None:
    values = np.full((3, 4), 2.0) - np.array([[0.0], [0.5], [0.1]]) + 0.01 * NOISE[0][:4]
    values[1, 2] = np.nan
    rows, chosen = curve_of([0, 3, 30], values, BITS)
    assert chosen == 2
    assert rows[1]["bits"] is rows[1]["difference"] is rows[1]["to_best_se"] is None
    with pytest.raises(DataError, match="networks of every one diverged; found no finite test_bits"):
        curve_of([0, 1], np.full((2, 3), np.nan), BITS)
