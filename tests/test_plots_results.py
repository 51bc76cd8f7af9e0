"""Training curves, forests and benchmarks, checked by what is drawn and not by pixels."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from pictures import (
    INIT,
    PAIRED,
    bars_of,
    bench_runs,
    bench_summary,
    ends_of,
    heights_of,
    points_of_bars,
    runs_of,
    texts_of,
)
from scipy import stats

from weightscope import plots
from weightscope.benchmarking import seed_differences, summarise
from weightscope.data.metrics import LOSS
from weightscope.errors import DataError, UsageError


def test_training_curves_are_medians_with_bands() -> None:
    values = np.random.default_rng(0).random((50, 7))
    values[3, 2] = np.nan
    ax = plots.training_curves(values)
    kept = np.delete(values, 3, axis=0)
    (curve,) = (line for line in ax.lines if line.get_gid() == "curve")
    np.testing.assert_allclose(curve.get_ydata(), np.median(kept, axis=0))
    np.testing.assert_array_equal(curve.get_xdata(), np.arange(1, 8))
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(np.quantile(kept, 0.95, axis=0).max())
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["median of 49, 5 to 95 % shaded, 1 diverged"]
    assert ax.get_ylabel() == "accuracy (%)"
    assert ax.get_xlim()[0] < 1 < 7 < ax.get_xlim()[1]
    one = plots.training_curves(np.array([[2.5]]), metric=LOSS)
    assert (len(one.collections), one.lines[0].get_marker(), one.get_ylabel()) == (0, "o", "loss (nats)")


def test_networks_that_all_diverged_have_no_curve() -> None:
    with pytest.raises(DataError, match="none of 3 networks is finite"):
        plots.training_curves(np.full((3, 2), np.nan))


def test_nothing_to_draw_against_depth_is_refused() -> None:
    for nothing in (lambda: plots.depth_curves([], []), lambda: plots.products_by_depth([])):
        with pytest.raises(UsageError, match="expected at least one network and one statistic to draw, found none"):
            nothing()


def test_convergence_has_one_look_for_each_initialiser_and_ticks_where_it_ran() -> None:
    inits = ["default", INIT, "artifact", "default (frozen)", "artifact (frozen)"]
    lengths = [1, 2, 4, 8, 16]
    ax = plots.convergence(bench_summary(inits, lengths))
    bars = {bar.get_label(): bar for bar in bars_of(ax)}
    assert list(bars) == inits
    lines = {name: bar.lines[0] for name, bar in bars.items()}
    np.testing.assert_allclose(lines["default"].get_ydata(), [0.7 + 0.01 * np.log2(e + 1) for e in lengths])
    looks = {(to_hex(line.get_color()), line.get_marker(), line.get_markerfacecolor()) for line in lines.values()}
    assert len(looks) == 5
    assert len({lines[name].get_marker() for name in inits[:3]}) == 3
    assert len({str(lines[name]._dash_pattern) for name in inits[:3]}) == 3
    assert lines["default"].get_color() == lines["default (frozen)"].get_color()
    assert lines["default (frozen)"].get_markerfacecolor() == "white"
    assert list(ax.get_xticks()) == lengths
    assert ax.get_xscale() == "log"
    for init, width in (("default", 0.0), ("artifact", 0.01)):  # paired, so the reference has none
        np.testing.assert_allclose([np.ptp(ends) for ends in heights_of(bars[init])], width, atol=1e-12)
    assert [t.get_text().replace("\n", " ") for t in ax.get_legend().get_texts()] == inits
    assert ax.get_legend().get_title().get_text() == f"mean of 8 seeds; {PAIRED} of the paired difference from default"
    assert plots.convergence(bench_summary(inits, [2, 3])).get_xscale() == "linear"


def test_a_single_length_is_drawn_as_rows_with_differences() -> None:
    ax = plots.convergence(bench_summary(["default", "artifact"], [3]))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["default", "artifact"]
    assert points_of_bars(ax) == pytest.approx([0.72, 0.74])
    assert ends_of(bars_of(ax)[0]) == [pytest.approx((0.72, 0.72))]
    assert ends_of(bars_of(ax)[1]) == [pytest.approx((0.735, 0.745))], "the paired interval, not that of the mean"
    alone = plots.convergence(bench_summary(["default"], [3]))
    assert ends_of(bars_of(alone)[0]) == [pytest.approx((0.712, 0.728))]
    reference = [line for line in ax.lines if line.get_gid() == "reference"]
    assert [line.get_xdata()[0] for line in reference] == pytest.approx([0.72])
    texts = texts_of(ax)
    assert "reference" in texts
    assert "+2.0, p = 2×10⁻⁹" in texts
    assert (
        "after 3 epochs; mean of 8 seeds; bars: adjusted 95 % intervals (Holm) of the paired"
        in ax.get_xlabel().replace("\n", " ")
    )
    adjusted = [row | {"p_holm": 0.25} for row in bench_summary(["default", "artifact"], [3])]
    assert "+2.0, p = 0.25" in texts_of(plots.convergence(adjusted))


def test_one_seed_is_a_point_without_an_interval() -> None:
    rows = [row | {"n": 1, "ci95": None} for row in bench_summary(["default"], [3, 6])]
    ax = plots.convergence(rows)
    assert [np.ptp(bar) for bar in heights_of(bars_of(ax)[0])] == [0, 0]
    assert "1 seed, so no interval" in ax.get_legend().get_title().get_text()


def test_equal_differences_have_no_bar_and_equal_seeds_are_counted() -> None:
    arms = {"default": (0, 0, 0), "a": (0.03, 0.03, 0.03), "b": (0.01, 0, -0.02)}
    runs = [run for init, shift in arms.items() for run in runs_of(init, np.array([0.05, 0.24, 0.9]) + shift)]
    ax = plots.paired_differences(seed_differences(runs))
    texts = texts_of(ax)
    assert {"+3.0 (all equal)", "3 of 3", "1 of 3 (1 equal)"} <= set(texts)
    assert ends_of(bars_of(ax)[0]) == [pytest.approx((3, 3))]


def test_summaries_that_make_no_sense_are_refused() -> None:
    rows = bench_summary(["default"], [3])
    for bad in ([], rows + rows):
        with pytest.raises(UsageError, match="expected rows that differ"):
            plots.convergence(bad)


def test_paired_differences_are_paired_by_seed() -> None:
    runs = bench_runs(["default", "artifact", "default (frozen)", "artifact (frozen)"], [3])
    np.random.default_rng(0).shuffle(runs[8:16])
    ax = plots.paired_differences(seed_differences(runs))
    accuracy, levels = (
        {(r["init"], r["seed"]): r["accuracy"] for r in runs},
        {r["init"]: r["level"] for r in summarise(runs)},
    )
    for name, reference, bar in zip(
        ("artifact", "artifact (frozen)"), ("default", "default (frozen)"), bars_of(ax), strict=True
    ):
        values = np.array([100 * (accuracy[name, k] - accuracy[reference, k]) for k in range(8)])
        assert bar.lines[0].get_xdata()[0] == pytest.approx(values.mean())
        interval = stats.ttest_1samp(values, 0).confidence_interval(1 - levels[name])
        assert ends_of(bar) == [pytest.approx(tuple(interval))]
    seeds = [line for line in ax.lines if line.get_gid() in ("seeds", "diverged")]
    drawn = np.sort(np.concatenate([line.get_xdata() for line in seeds[:2]]))
    expected = np.sort([100 * (accuracy["artifact", k] - accuracy["default", k]) for k in range(8)])
    np.testing.assert_allclose(drawn, expected)
    assert [len(line.get_xdata()) for line in seeds if line.get_gid() == "diverged"] == [1]
    assert "× diverged" in ax.get_xlabel()
    assert "default or default (frozen)" in ax.get_xlabel().replace("\n", " ")
    assert "8 of 8" in texts_of(ax)


def test_lengths_are_named_and_missing_seeds_are_left_out() -> None:
    runs = [r for r in bench_runs(["default", "artifact"], [9, 3]) if not (r["init"] == "artifact" and r["seed"] > 4)]
    ax = plots.paired_differences(seed_differences(runs))
    texts = texts_of(ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["artifact, 3 epochs", "artifact, 9 epochs"]
    assert "5 of 5" in texts
    with pytest.raises(UsageError, match="expected a second initialiser"):
        plots.paired_differences(seed_differences([r for r in runs if r["init"] == "default"]))
