"""Every analysis, figure and benchmark script runs, at its smallest size; recipes of the studies are valid."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import script

from weightscope.benchmarking import Axis, BenchResult, bench, plan_arms
from weightscope.benchmarking.design import axes_of
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Population:
    recipe = Recipe.load(ROOT / "populations" / "digits-convnext.toml").replace(
        {"network.width": 4, "network.depth": 2, "training.epochs": 1, "data.train": 128, "data.test": 40}
        | {"population.networks": 12, "population.tile": 12}
    )
    return collect(recipe, tmp_path_factory.mktemp("study") / "tiny.pop", workers=1, device="cpu", progress=False)


def test_the_stripes_study_and_its_figure(population: Population, tmp_path: Path) -> None:
    study = script("analyses/mlp_stripes/run.py")
    arguments = [sys.executable, ROOT / "analyses/mlp_stripes/run.py", population.path, "--out", tmp_path]
    subprocess.run([str(a) for a in arguments], check=True, capture_output=True)
    result = json.loads((tmp_path / "results.json").read_text())
    assert len(result["stripes"]) == 2 * 2 * 3
    with np.load(tmp_path / "correlation.npz") as stored:
        restored = stored["correlation"] * float(stored["step"])
    names = "stages.0.blocks.1.mlp.fc?.weight"
    exact = np.corrcoef(population.weights(names).astype(np.float64), rowvar=False)
    np.testing.assert_allclose(restored, np.clip(exact, -0.254, 0.254), atol=0.0011)
    script("figures/mlp_stripes.py").main(tmp_path, tmp_path / "stripes.png")
    assert (tmp_path / "stripes.png").stat().st_size > 10_000

    fc1 = population.weights("stages.0.blocks.0.mlp.fc1.weight").reshape(12, 8, 4).astype(np.float64)
    sums = study.fast_ratio(fc1, 1).sum(0)
    row = next(r for r in result["stripes"] if (r["block"], r["matrix"], r["means"]) == (0, "fc1", "column"))
    assert sums[0] / sums[1] == pytest.approx(row["ratio"])


def test_the_study_of_one_structure(population: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "analyses" / "one_structure")
    study = importlib.import_module("run")
    for name, value in {"SEEDS": {"short": 2}, "GAINS": (0.0, 3.0), "GAIN_SEEDS": 2}.items():
        monkeypatch.setattr(study, name, value)
    case = study.Case(population.recipe, "stages.*", ("mimetic_mlp",), 1, 1, 4, 12)
    found = study.benchmarks(case, population, tmp_path / "work", workers=1, device="cpu", progress=False)
    arms = {row["init"]: row for row in found["conditions"]["short"]["arms"]}
    chosen = f"gain-{found['gain']['gain']:g}"
    assert {"default", chosen, f"{chosen} (scale only)", f"{chosen}+mimetic_mlp", "within-blocks"} <= set(arms)
    assert arms[chosen]["beyond_scale"] is not None
    assert [point["gain"] for point in found["gain"]["curve"]] == [0.0, 3.0]
    rows = study.table(population, "convnext")
    study.merge(tmp_path / "table.json", "convnext", {"networks": len(population), "rows": rows})
    study.merge(tmp_path / "results.json", "convnext", found)
    script("figures/one_structure.py").main(tmp_path, tmp_path / "one.png")
    assert (tmp_path / "one_benchmarks.png").stat().st_size > 10_000

    means = population.weights("stages.0.blocks.0.mlp.fc1.weight").reshape(12, 8, 4).astype(np.float64)
    means = means - means.mean(0)
    row = next(r for r in rows if r["scheme"] == "stripes: fc1 column means")
    assert row["value"] == pytest.approx(8 * np.square(means.mean(1)).mean() / np.square(means).mean())
    check_p_values(rows)


def check_p_values(rows: list[dict[str, Any]]) -> None:
    """`p` is adjusted for all pairs, so it belongs to pairs alone; other tests have `p_unadjusted`."""
    pairs = [row for row in rows if "b" in row]
    single = [row for row in rows if row["scheme"].startswith("beyond covariances")]
    assert all("p" in row and "p_unadjusted" not in row for row in pairs)
    assert all("p" not in row and 0 <= row["p_unadjusted"] <= 1 for row in single)
    assert not any("p" in row for row in rows if row not in pairs)


def test_the_stored_table_of_one_structure_names_its_p_values() -> None:
    table = json.loads((ROOT / "analyses/one_structure/table.json").read_text())
    found = [table[name]["rows"] for name in table if name != "environment"]
    for rows in found:
        check_p_values(rows)
    assert sum("p_unadjusted" in row for rows in found for row in rows) == 4


@pytest.mark.parametrize("figure", ["closed_form", "initialisers"])
def test_figures_without_results_draw(figure: str, tmp_path: Path) -> None:
    script(f"figures/{figure}.py").main(tmp_path / f"{figure}.png")
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("results", sorted(ROOT.glob("analyses/*_inits/results.json")), ids=lambda p: p.parent.name)
def test_figures_of_committed_benchmarks_draw(results: Path, tmp_path: Path) -> None:
    script("figures/init_benchmarks.py").main(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


RECIPES = sorted(ROOT.glob("analyses/*/*.toml"))
BENCHMARKS = [path for path in RECIPES if Recipe.load(path).bench is not None]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_of_studies_are_valid(recipe: Path) -> None:
    assert Recipe.load(recipe).training.epochs >= 1


@pytest.mark.parametrize("recipe", BENCHMARKS, ids=lambda path: path.parent.name)
def test_results_of_studies_are_those_of_their_recipes(recipe: Path) -> None:
    """Every arm of the recipe in at least 8 paired seeds at two lengths, and the README has the table as it is."""
    planned, result = Recipe.load(recipe), BenchResult.load(recipe.parent)
    assert planned.bench is not None
    design = planned.bench.model_dump(exclude={"init", "seed", "metric"})
    arms = plan_arms(planned, planned.bench.init, **design)
    found = {(row["init"], json.dumps(row["cell"]), row["epochs"]): row["n"] for row in result.arms}
    assert set(found) == {(arm.init, json.dumps(dict(arm.cell)), arm.epochs) for arm in arms}
    assert min(found.values()) >= 8
    assert len(planned.bench.epochs) == 2
    trained = Recipe.parse(result.environment["recipe"])
    assert not [line for line in trained.differences(planned) if not line.startswith(("population.seed", "bench"))]
    assert result.text() in (recipe.parent / "README.md").read_text()


@pytest.mark.parametrize("recipe", BENCHMARKS, ids=lambda path: path.parent.name)
def test_benchmarks_of_studies_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few digits, in the first cell, with the first number of each grid."""
    monkeypatch.chdir(tmp_path)
    small = {
        "data": {"name": "digits", "train": 64, "test": 40},
        "network.depth": 1,
        "population.networks": 2,
        "population.tile": 2,
    }
    options: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}
    if (teacher := recipe.with_name("teacher.toml")).exists():
        collect(Recipe.load(teacher).replace({**small, "training.epochs": 1}), tmp_path / "teacher.pop", **options)
    study = Recipe.load(recipe)
    assert study.bench is not None
    vary, grid = (
        [Axis(axis.names, axis.points[:1]) for axis in axes_of(axes)] for axes in (study.bench.vary, study.bench.grid)
    )
    result = bench(study.replace(small), out="out", epochs=(1,), seeds=2, vary=vary, grid=grid, **options)
    assert {row["n"] for row in result.arms} == {2}
    assert len(result.arms) >= 3
    assert result.figures()


COPYING = ROOT / "analyses/copying"
COPYING_RECIPES = sorted(COPYING.glob("*/*.toml"))
COPYING_BENCHMARKS = [path for path in COPYING_RECIPES if path.name == "recipe.toml"]


@pytest.mark.parametrize("recipe", COPYING_RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_of_copying_are_valid(recipe: Path) -> None:
    assert Recipe.load(recipe).data.metrics[0].name == "test_accuracy"


@pytest.mark.parametrize("recipe", COPYING_BENCHMARKS, ids=lambda path: path.parent.name)
def test_results_of_copying_are_those_of_their_recipes(recipe: Path) -> None:
    """Every arm of the recipe in 8 paired seeds, at three lengths, and the README has the table as it is."""
    planned, result = Recipe.load(recipe), BenchResult.load(recipe.with_name("results.json"))
    assert planned.bench is not None
    arms = plan_arms(planned, planned.bench.init, **planned.bench.model_dump(exclude={"init", "seed", "metric"}))
    found = {(row["init"], json.dumps(row["cell"]), row["epochs"]): row["n"] for row in result.arms}
    assert set(found) == {(arm.init, json.dumps(dict(arm.cell)), arm.epochs) for arm in arms}
    assert min(found.values()) >= 8
    assert [metric.name for metric in result.metrics[:3]] == ["test_accuracy", "test_accuracy_2x", "test_accuracy_4x"]
    trained = Recipe.parse(result.environment["recipe"])
    assert not [line for line in trained.differences(planned) if not line.startswith(("population.seed", "bench"))]
    assert result.text() in (COPYING / "README.md").read_text()


@pytest.mark.parametrize("recipe", COPYING_BENCHMARKS, ids=lambda path: path.parent.name)
def test_benchmarks_of_copying_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"data.length": 2, "data.train": 8, "data.test": 4, "training.epochs": 1, "network.width": 8}
    small |= {"network.state": 4, "population.networks": 2, "population.tile": 2}
    options: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}
    if (source := recipe.with_name("source.toml")).exists():
        many = {"population.networks": 10, "population.tile": 10}
        population = collect(Recipe.load(source).replace({**small, **many}), tmp_path / "source.pop", **options)
        script(str(source.with_name("fit.py").relative_to(ROOT))).main([str(population.path), "--least", "0"])
    study = Recipe.load(recipe)
    assert study.bench is not None
    result = bench(study.replace(small), out="out", epochs=(1,), seeds=2, **options)
    assert {row["n"] for row in result.arms} == {2}
    figures = script("figures/copying.py")
    (tmp_path / "drawn" / recipe.parent.name).mkdir(parents=True)
    (tmp_path / "drawn" / recipe.parent.name / "results.json").write_text((tmp_path / "out/results.json").read_text())
    if recipe.parent.name == "components":
        (tmp_path / "drawn/components/recipe.toml").write_text(recipe.read_text())
        assert len(script("analyses/copying/components/effects.py").main(tmp_path / "drawn/components")) == 20
    assert figures.main(tmp_path / "drawn", tmp_path) == [recipe.parent.name]
    assert (tmp_path / f"copying_{recipe.parent.name}.png").stat().st_size > 10_000


def test_effects_of_components_are_found() -> None:
    """A planted effect of one switch and one interaction; the other eight contrasts are zero but for noise."""
    study, noise = script("analyses/copying/components/effects.py"), np.random.default_rng(0)
    settings = [dict(zip(study.SWITCHES, map(bool, row), strict=True)) for row in np.ndindex(2, 2, 2, 2)]
    values = [0.2 + 0.3 * row["a"] + 0.1 * (row["a"] and row["cb"]) for row in settings]
    arms = [{"init": str(i)} for i in range(16)]
    runs = [
        {"init": str(i), "seed": k, "accuracy": v + 0.01 * noise.normal()}
        for i, v in enumerate(values)
        for k in range(8)
    ]
    rows = {tuple(row["switches"]): row for row in study.effects(BenchResult(runs, arms), settings)}
    assert rows["a",]["difference"] == pytest.approx(0.35, abs=0.01)
    assert rows["cb",]["difference"] == pytest.approx(0.05, abs=0.01)
    assert rows["a", "cb"]["difference"] == pytest.approx(0.05, abs=0.01)
    assert {names for names, row in rows.items() if row["p_holm"] < 0.01} == {("a",), ("cb",), ("a", "cb")}


def test_the_population_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "population.json"
    options = ["--rounds", "1", "--seconds", "0.01", "--case", "8x8", "--against", "loop", "--json", out]
    command = [sys.executable, ROOT / "benchmarks/population.py", *options]
    subprocess.run([str(a) for a in command], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert "against the best loop" in rows[-1]["row"]
    assert all(row["ratio"] > 0 for row in rows)


def test_the_agreement_of_fast_and_plain_training_is_tested(tmp_path: Path) -> None:
    out = tmp_path / "agreement.json"
    options = ["--networks", "4", "--epochs", "1", "--path", "torch kernels", "--json", out]
    command = [sys.executable, ROOT / "benchmarks/agreement.py", *options]
    subprocess.run([str(a) for a in command], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["test"] for row in rows] == ["Welch", "Kolmogorov-Smirnov"] * 2
    assert all(0 <= row["p"] <= 1 for row in rows)


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    networks = [argument for name in ("convnext", "vit", "convmixer") for argument in ("--network", name)]
    options = ["--device", "cpu", "--tile", 1, "--rounds", 1, "--seconds", 0.01, "--steps", 1, *networks, "--json", out]
    command = [sys.executable, ROOT / "benchmarks/population_gpu.py", *options]
    subprocess.run([str(a) for a in command], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["network_epochs_per_second"] > 0 for row in rows] == [True] * 18


def test_one_network_alone_is_compared_with_the_loop(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    options = "--device cpu --data digits --train 600 --width 4 --depth 1 --epochs 2 --seeds 2 --precision float32"
    command = [sys.executable, ROOT / "benchmarks/convmixer_gpu.py", *options.split(), "--json", out]
    subprocess.run([str(a) for a in command], check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ratio"] > 0
    assert [len(values) for values in row["accuracy"].values()] == [2, 2]


def test_what_the_gpu_kernels_take_is_found_without_a_gpu(tmp_path: Path) -> None:
    """Compiled for an H100, which finds errors that Triton's interpreter does not."""
    pytest.importorskip("triton.backends.nvidia", reason="no Triton for NVIDIA")
    out = tmp_path / "resources.json"
    command = [sys.executable, ROOT / "benchmarks/gpu_resources.py", "--precision", "bfloat16", "--json", out]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([str(a) for a in command], check=True, capture_output=True, env=environment)
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    for name in ("depthwise_forward", "depthwise_backward", "mlp_forward", "mlp_backward"):
        row = rows[f"convnext-16/4, bfloat16: {name}"]
        assert row["tensor_core_instructions"] > 0
        assert row["resident_warps"] >= 16
    assert all(row["spilled_bytes"] <= 32 for row in rows.values())
    assert all(row["shared_bytes"] <= 99 * 1024 for row in rows.values())  # the least of GPUs since Ampere


def test_the_time_of_frozen_filters(tmp_path: Path) -> None:
    """Frozen filters get no gradient; every number is a time of both arms."""
    benchmark = script("benchmarks/frozen_backward.py")
    small = ["--kernels", "3", "5", "--width", "4", "--depth", "1", "--batch", "2", "--rounds", "2"]
    rows = benchmark.main([*small, "--json", str(tmp_path / "frozen.json")])
    assert [row["kernel_size"] for row in rows] == [3, 5]
    times = ["trained_forward_s", "trained_backward_s", "frozen_forward_s", "frozen_backward_s"]
    assert all(row[name] >= 0 for row in rows for name in times)
    assert json.loads((tmp_path / "frozen.json").read_text())["rows"] == rows
