"""Intervals over networks and test images: coverage, a naive version, the bootstrap, and the hits in shards."""

import hashlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pictures import ON_CPU, PLAIN, runs_of
from scipy import stats

from weightscope.benchmarking import BenchResult, Contrast, bench, summarise
from weightscope.benchmarking.statistics import cell_key, contrast_tests, over_images, paired
from weightscope.population import Population
from weightscope.population.shards import hash_file
from weightscope.recipe import Recipe

pytestmark = pytest.mark.usefixtures("trained_here")

ARMS = ("default", "a", "b")


def drawn(g: np.random.Generator, networks: int, own: float, spread: float = 0.1) -> np.ndarray:
    """Hits (2, n, 360) of two arms, equally good over all images; with `own` > 0, each has easy ones of its own."""
    easy = g.normal(1.2, 1.5, 360) + own * g.normal(size=(2, 1, 360))
    return easy + spread * g.normal(size=(2, networks, 1)) + g.normal(size=(2, networks, 360)) > 0


def intervals(hits: np.ndarray, level: float = 0.05) -> tuple[list[float], list[float]]:
    """That over networks, and that over networks and images."""
    over_networks = paired(*hits.mean(axis=2), level=level)["difference_ci95"]
    return over_networks, over_images(hits[0].astype(float) - hits[1], over_networks, level)


@pytest.mark.parametrize(
    ("networks", "own", "alone"), [(8, 0.0, (0.93, 0.97)), (32, 0.0, (0.93, 0.97)), (8, 0.7, (0.3, 0.9))]
)
def test_both_intervals_of_two_equal_arms_and_which_of_them_covers_zero(
    networks: int, own: float, alone: tuple[float, float]
) -> None:
    """1,000 data sets: a proportion of 0.95 is between 0.93 and 0.97 with probability 0.996.

    Where images differ, the interval over networks is about the images that were used, and misses others.
    """
    g = np.random.default_rng(networks)
    found = np.array([intervals(drawn(g, networks, own)) for _ in range(1000)])  # (1000, 2, 2)
    covered = ((found[..., 0] <= 0) & (found[..., 1] >= 0)).mean(axis=0)
    assert alone[0] <= covered[0] <= alone[1]
    assert 0.93 <= covered[1] <= 0.97
    assert (found[:, 1, 0] <= found[:, 0, 0]).all()
    assert (found[:, 1, 1] >= found[:, 0, 1]).all()


def squares(d: np.ndarray) -> tuple[float, float, float]:
    """The mean squares of networks, images and interaction over n m, entry by entry."""
    (n, m), mean = d.shape, d.mean()
    a = sum((d[s].mean() - mean) ** 2 for s in range(n)) / (n * (n - 1))
    b = sum((d[:, i].mean() - mean) ** 2 for i in range(m)) / (m * (m - 1))
    rest = sum((d[s, i] - d[s].mean() - d[:, i].mean() + mean) ** 2 for s in range(n) for i in range(m))
    return a, b, rest / (n * m * (n - 1) * (m - 1))


@pytest.mark.parametrize(("own", "level"), [(0.0, 0.05), (0.7, 0.05), (2.0, 0.01)])
def test_the_interval_equals_the_naive_one(own: float, level: float) -> None:
    hits = drawn(np.random.default_rng(1), 6, own)[:, :, :50]
    d = hits[0].astype(float) - hits[1]
    a, b, e = squares(d)
    v, degrees = a + b - e, ((a, 5), (b, 49), (e, 5 * 49))
    half = stats.t.ppf(1 - level / 2, v**2 / sum(part**2 / freedom for part, freedom in degrees)) * np.sqrt(v)
    seeds, both = intervals(hits, level)
    wanted = [min(seeds[0], d.mean() - half), max(seeds[1], d.mean() + half)] if b > e else seeds
    np.testing.assert_allclose(both, wanted, rtol=1e-10)


def test_the_components_are_those_of_the_pigeonhole_bootstrap() -> None:
    """Rows and columns drawn with replacement 20,000 times: the variance (standard error 1 %) holds e three times."""
    g, (n, m) = np.random.default_rng(2), (12, 60)
    hits = drawn(g, n, 0.7)[:, :, :m]
    d = hits[0].astype(float) - hits[1]
    rows, columns = g.multinomial(n, np.full(n, 1 / n), 20_000) / n, g.multinomial(m, np.full(m, 1 / m), 20_000) / m
    a, b, e = squares(d)
    found = np.einsum("rs,si,ri->r", rows, d, columns, optimize=True).var()
    assert found == pytest.approx(a * (n - 1) / n + b * (m - 1) / m + e * (n - 1) * (m - 1) / (n * m), rel=0.05)


def test_one_network_or_one_image_says_nothing_of_others() -> None:
    assert over_images(np.ones((1, 9)), [-1.0, 1.0]) == over_images(np.ones((9, 1)), [1.0, 1.0]) == [-1.0, 1.0]
    assert over_images(np.ones((9, 9)), [1.0, 1.0]) == [1.0, 1.0]


def test_every_comparison_of_accuracies_has_both_intervals() -> None:
    g = np.random.default_rng(3)
    hits = dict(zip([("{}", 3, init) for init in ARMS], [*drawn(g, 8, 0.7), drawn(g, 8, 0.7)[0]], strict=True))
    runs = [run for (_, _, init), each in hits.items() for run in runs_of(init, each.mean(axis=1))]
    rows = summarise(runs, hits=hits)
    for row in rows[1:]:
        d = hits["{}", 3, row["init"]].astype(float) - hits["{}", 3, "default"]
        assert row["difference_ci_images"] == over_images(d, row["difference_ci_holm"], row["level"])
        assert np.ptp(row["difference_ci_images"]) > 1.1 * np.ptp(row["difference_ci_holm"])
    terms = [{"init": ["a", "b"]}, {"init": "default", "weight": -1}]
    contrast = Contrast.of(terms, [({}, 3, init) for init in ARMS])
    (found,) = contrast_tests([contrast], runs, hits=hits)
    default, a, b = (each.astype(float) for each in hits.values())
    assert found["ci_images"] == pytest.approx(over_images((a + b) / 2 - default, found["ci"]))
    lines = BenchResult(runs, rows, contrasts=[found]).text().splitlines()
    shown = {contrast.text: found["ci_images"]} | {row["init"]: row["difference_ci_images"] for row in rows[1:]}
    for start, both in shown.items():
        (line,) = (line for line in lines if line.startswith(f"{start} "))
        assert " to ".join(f"{100 * end:+.2f}" for end in both) in line, "one table has both intervals"
    assert max(map(len, lines)) <= 120
    fewer = hits | {("{}", 3, "a"): hits["{}", 3, "a"][:, :300]}
    assert [row["difference_ci_images"] is None for row in summarise(runs, hits=fewer)] == [True, True, False]
    assert contrast_tests([contrast], runs, hits=fewer)[0]["ci_images"] is None


def test_arms_are_compared_between_cells_with_both_intervals() -> None:
    both = drawn(np.random.default_rng(5), 8, 0.7)
    hits = {(cell_key({"cell": {"x.y": y}}), 3, "a"): each for y, each in enumerate(both)}
    runs = [run for y, each in enumerate(both) for run in runs_of("a", each.mean(axis=1), cell={"x.y": y})]
    (row,) = BenchResult(runs, [], hits=hits).between("x.y")
    d = both[1].astype(float) - both[0]
    assert row["difference_ci_images"] == over_images(d, row["difference_ci_holm"])
    assert BenchResult(runs, []).between("x.y") == [row | {"difference_ci_images": None}]


def test_a_network_without_a_finite_accuracy_leaves_neither_interval() -> None:
    hits = dict(zip([("{}", 3, init) for init in ARMS[:2]], drawn(np.random.default_rng(4), 9, 0.7), strict=True))
    accuracies = {init: each.mean(axis=1) for (_, _, init), each in hits.items()}
    accuracies["a"][4] = np.nan  # and no hits
    hits["{}", 3, "a"][4] = False
    runs = [run for init, each in accuracies.items() for run in runs_of(init, each)]
    contrast = Contrast.of([{"init": "a"}, {"init": "default", "weight": -1}], [({}, 3, init) for init in accuracies])
    row, (found,) = summarise(runs, hits=hits)[1], contrast_tests([contrast], runs, hits=hits)
    assert row["difference_ci_holm"] is row["difference_ci_images"] is found["ci"] is found["ci_images"] is None
    assert row["pairs"] == found["pairs"] == 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A benchmark of two initialisers, with two tiles of each; its folder and result."""
    folder = tmp_path_factory.mktemp("bench")
    recipe = Recipe.parse({**PLAIN, "population": {"networks": 3, "tile": 2}})
    return folder, lambda: bench(recipe, ["default", "mimetic_mlp"], folder, **ON_CPU)


def test_shards_store_the_hits_of_the_last_evaluation(trained: Any) -> None:
    folder, run = trained
    result = run()
    assert BenchResult.load(folder).arms == result.arms
    hits = {}
    for path in (folder / "runs").rglob("population.json"):
        population = Population(path.parent)
        found = hits[population.recipe.init[0].name] = population.hits
        assert found.shape == (3, 40)
        np.testing.assert_array_equal(found.mean(axis=1).astype("f4"), population.metrics["test_accuracy"])
    row, d = result.arms[1], hits["mimetic_mlp"].astype(float) - hits["default"]
    assert row["difference_ci_images"] == over_images(d, row["difference_ci_holm"], row["level"])
    assert result.text().count("other images too") == 2, "a column and its note"
    terms = [{"init": "mimetic_mlp"}, {"init": "default", "weight": -1}]
    found = result.contrast(terms)
    assert found["ci_images"] == pytest.approx(over_images(d, found["ci"], found["level"]))
    assert BenchResult.load(folder).contrast(terms) == found | {"ci_images": None}
    assert result.to_pandas()["difference_images_low"].iloc[1] == row["difference_ci_images"][0]


def test_shards_without_hits_have_no_such_interval(trained: Any) -> None:
    folder, run = trained
    run()
    shard = next((folder / "runs").rglob("00001.h5"))

    def changed(change: Any) -> None:
        with h5py.File(shard, "r+") as h5:
            change(h5)
        hash_file(shard).write_text(f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}\n")

    changed(lambda h5: h5.pop("hits"))
    assert Population(shard.parents[1]).hits is None
    result = run()
    assert "difference_ci_images" not in result.rows()[1]
    assert "intervals are over networks, for the test examples that were used" in result.text()
