"""Every study and benchmark script runs, at its smallest size; minutes, so `make torture` runs it.

python -m pytest tests/torture/studies.py
"""

import copy
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from programs import ROOT, script
from test_studies import COPYING, IMAGES, check_p_values

from weightscope import anatomy, load_init
from weightscope._util.environment import usable_cores
from weightscope.benchmarking import bench
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")


def run_script(path: str, out: Path, *arguments: object, **environment: str) -> list[dict[str, Any]]:
    """The rows that a benchmark script writes."""
    command = [sys.executable, ROOT / path, *arguments, "--json", out]
    subprocess.run([str(a) for a in command], check=True, capture_output=True, env=environment or None)
    return json.loads(out.read_text())["rows"]


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


def test_the_study_of_structure_on_cifar(tmp_path: Path) -> None:
    """Of a few networks on digits, collected as the study does."""
    small = {"data.name": "digits", "data.size": None, "data.train": 64, "data.test": 40, "training.epochs": 1}
    recipe = Recipe.load(ROOT / "populations" / "cifar10-convnext-16px.toml").replace(small | {"population.tile": 8})
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(recipe.to_dict()))
    collecting = script("analyses/gpu_populations/collect.py")
    sums = collecting.Sums("tiny", recipe, tmp_path, sums_only=True)
    assert collecting.collect(sums, recipe, 8, time.monotonic() + 600, device="cpu")
    options = ["--recipe", tmp_path / "tiny.toml", "--sums", tmp_path, "--out", tmp_path, "--populations", "1"]
    found = script("analyses/cifar_structure/run.py").main([str(option) for option in options])
    assert (found["networks"], found["look"], len(found["pointwise"])) == (8, "first", 6 + 3 * 5)
    script("figures/cifar_structure.py").main(tmp_path, tmp_path / "cifar.png")
    assert (tmp_path / "cifar.png").stat().st_size > 10_000


@pytest.mark.parametrize("figure", ["closed_form", "initialisers"])
def test_figures_without_results_draw(figure: str, tmp_path: Path) -> None:
    script(f"figures/{figure}.py").main(tmp_path / f"{figure}.png")
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("results", sorted(ROOT.glob("analyses/*_inits/results.json")), ids=lambda p: p.parent.name)
def test_figures_of_committed_benchmarks_draw(results: Path, tmp_path: Path) -> None:
    script("figures/init_benchmarks.py").main(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


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
    assert study.achieved(population, case) == []  # of 12 networks, no correlation is kept
    assert f"{chosen} (uncorrelated)" in arms
    assert all(case.recipe.network.type == name for name, case in study.CASES.items())
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


@pytest.mark.parametrize("recipe", IMAGES, ids=lambda path: path.parent.name)
def test_benchmarks_of_studies_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a few digits, in the first two values of each field, with the first number of each grid."""
    monkeypatch.chdir(tmp_path)
    small = {
        "data": {"name": "digits", "train": 64, "test": 40},
        "network.depth": 8 if "one_layer_transfer" in recipe.parts else 1,  # which copies single layers
        "population.networks": 2,
        "population.tile": 2,
    }
    options: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}
    for folder in recipe.parents[1::-1]:
        monkeypatch.syspath_prepend(folder)
        for teacher in folder.glob("teacher*.toml"):  # of teacher-a.toml: a.pop
            out = tmp_path / f"{teacher.stem.removeprefix('teacher-')}.pop"
            collect(Recipe.load(teacher).replace({**small, "training.epochs": 1}), out, **options)
    study = Recipe.load(recipe)
    assert study.bench is not None
    vary = {names: values[:2] for names, values in study.bench.vary.items() if names != "data.name"}
    grid = {names: values[:1] for names, values in study.bench.grid.items()}
    inits = [
        init for init in study.bench.init if not (isinstance(init, dict) and "artifact" in init)
    ]  # not in the clone
    cut = study.bench.model_copy(
        update={"contrasts": [], "vary": {}, "init": tuple(inits)}
    )  # contrasts are of all cells
    study = study.model_copy(update={"bench": cut})
    result = bench(study.replace(small), out="out", epochs=(1,), seeds=2, vary=vary, grid=grid, **options)
    assert {row["n"] for row in result.arms} == {2}
    assert len(result.arms) >= 2
    assert result.figures()


@pytest.mark.parametrize("recipe", COPYING, ids=lambda path: path.parent.name)
def test_benchmarks_of_copying_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"data.length": 2, "data.train": 8, "data.test": 4, "training.epochs": 1, "network.width": 8}
    small |= {"network.state": 4, "population.networks": 2, "population.tile": 2}
    options: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}
    if (source := recipe.with_name("source.toml")).exists():
        many = {"population.networks": 10, "population.tile": 10}
        population = collect(Recipe.load(source).replace({**small, **many}), tmp_path / "source.pop", **options)
        script(str(source.with_name("fit.py").relative_to(ROOT))).main([str(population.path), "--least", "0"])
    if (teacher := recipe.with_name("teacher.toml")).exists():
        monkeypatch.syspath_prepend(recipe.parent)
        of_attention = {name: value for name, value in small.items() if name != "network.state"}
        collect(Recipe.load(teacher).replace(of_attention), tmp_path / "teacher.pop", **options)
    study = Recipe.load(recipe)
    assert study.bench is not None
    small["data.length"] = getattr(study.data, "shortest", None) or 2
    result = bench(study.replace(small), out="out", epochs=(1,), seeds=2, **options)
    assert {row["n"] for row in result.arms} == {2}
    figures = script("figures/copying.py")
    (tmp_path / "drawn" / recipe.parent.name).mkdir(parents=True)
    (tmp_path / "drawn" / recipe.parent.name / "results.json").write_text((tmp_path / "out/results.json").read_text())
    if recipe.parent.name == "components":
        (tmp_path / "drawn/components/recipe.toml").write_text(recipe.read_text())
        assert len(script("analyses/copying/components/effects.py").main(tmp_path / "drawn/components")) == 20
    if recipe.parent.name == "mamba2":
        rows = script("analyses/copying/mamba2/stops.py").main(Path("out"), tmp_path)
        found = {run["init"]: run["accuracy_2x"] for run in result.runs if run["seed"] == 0}
        again = {row["arm"]: row["accuracy"][0] for row in rows if row["length"] == 2}
        assert again["default-1-epochs"] == pytest.approx(found["default"], abs=1e-6)
    assert figures.main(tmp_path / "drawn", tmp_path) == [recipe.parent.name]
    assert (tmp_path / f"copying_{recipe.parent.name}.png").stat().st_size > 10_000


def test_the_population_benchmark_runs(tmp_path: Path) -> None:
    options = ["--rounds", 1, "--seconds", 0.01, "--case", "8x8", "--against", "loop"]
    rows = run_script("benchmarks/population.py", tmp_path / "population.json", *options)
    assert "against the best loop" in rows[-1]["row"]
    assert all(row["ratio"] > 0 for row in rows)


def test_the_benchmark_of_threads_runs(tmp_path: Path) -> None:
    options = "--depth 1 --repeats 1 --busy 1 --calls products"
    (row,) = run_script("benchmarks/threads.py", tmp_path / "threads.json", *options.split())
    assert row["ours"] > 0


def test_a_killed_sweep_repeats_no_tile_and_its_tiles_are_timed(tmp_path: Path) -> None:
    (row,) = run_script("benchmarks/sweep.py", tmp_path / "sweep.json", "--epochs", 1)
    assert row["tiles"] == 48
    assert row["repeated"] == 0
    assert row["kept"] >= 16
    assert row["tiles"] - 2 * usable_cores() <= row["timed_tiles"] <= row["tiles"]
    assert 0.1 * row["estimated"] < row["measured"] < 10 * row["estimated"]


def test_the_agreement_of_fast_and_plain_training_is_tested(tmp_path: Path) -> None:
    options = ["--networks", 4, "--epochs", 1, "--path", "torch kernels"]
    rows = run_script("benchmarks/agreement.py", tmp_path / "agreement.json", *options)
    assert [row["test"] for row in rows] == ["Welch", "Kolmogorov-Smirnov"] * 2
    assert all(0 <= row["p"] <= 1 for row in rows)


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    """Also past rows that fail, and again without making anything twice."""
    path, failed = tmp_path / "gpu.json", {"row": "convnext: eager loop, bfloat16", "error": "ended with status 1"}
    path.write_text(json.dumps({"rows": [failed]}))
    options = ["--device", "cpu", "--rounds", 1, "--seconds", 0.01, "--steps", 1, "--network", "convnext", "--tile"]
    rows = run_script("benchmarks/population_gpu.py", path, *options, 1)
    assert rows[0] == failed
    assert [row["network_epochs_per_second"] > 0 for row in rows[1:]] == [True] * 5
    wrong = run_script("benchmarks/population_gpu.py", tmp_path / "wrong.json", *options, -1)
    assert {row["row"].split()[1].strip(","): "error" in row for row in wrong} == {
        "eager": False,
        "weightscope": True,
        "vmap": True,
    }


def test_one_network_alone_is_compared_with_the_loop(tmp_path: Path) -> None:
    options = "--device cpu --data digits --train 600 --width 4 --depth 1 --epochs 2 --seeds 2 --precision float32"
    (row,) = run_script("benchmarks/convmixer_gpu.py", tmp_path / "alone.json", *options.split())
    assert row["ratio"] > 0
    assert [len(values) for values in row["accuracy"].values()] == [2, 2]


def test_the_time_of_frozen_filters(tmp_path: Path) -> None:
    """Frozen filters get no gradient; every number is a time of each arm."""
    benchmark = script("benchmarks/frozen_backward.py")
    small = ["--kernels", "3", "5", "--width", "4", "--depth", "1", "--batch", "2", "--rounds", "2"]
    rows = benchmark.main([*small, "--json", str(tmp_path / "frozen.json")])
    assert [row["kernel_size"] for row in rows] == [3, 5]
    times = [f"{arm}_{way}_s" for arm in ("trained", "frozen", "frozen_biases") for way in ("forward", "backward")]
    assert all(row[name] >= 0 for row in rows for name in times)
    assert json.loads((tmp_path / "frozen.json").read_text())["rows"] == rows


def test_covariances_larger_than_memory(tmp_path: Path) -> None:
    sizes = ("--tall", 80, 30, "--wide", 40, 90, "--rounds", 1)
    rows = run_script("benchmarks/covariance_large.py", tmp_path / "results.json", *sizes)
    assert [bool(row["peer"]) for row in rows] == [True, True]


def test_the_study_of_emergence_and_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("analyses/emergence/emergence.py")
    monkeypatch.setattr(study, "GAINS", (1.0, 4.0))
    sizes = {"networks": 12, "snapshots": (0, 1, 2), "early": 1, "epochs": 1, "seeds": 2, "gain_seeds": 2}
    found = study.run(tmp_path / "work", tmp_path, **sizes)
    assert {"default", "early", "end", "early (scale only)"} <= set(found["initialisers"]["accuracies"])
    what = {kind: {row["what"] for row in found[kind]["rows"]} for kind in study.KINDS}
    assert what["vit"] - what["convnext"] == {"QK", "VO"}
    first = Population(tmp_path / "work/vit.pop").at(0).weights("blocks.1.mlp.fc1.weight").reshape(12, 128, 32)
    centred = first.astype(np.float64) - first.mean(0, dtype=np.float64)
    row = next(r for r in found["vit"]["rows"] if (r["block"], r["what"]) == (1, "stripes of fc1, column means"))
    ratio = 128 * np.square(centred.mean(1)).mean() / np.square(centred).mean()
    assert np.exp(row["curve"][0]["value"]) == pytest.approx(ratio, rel=1e-4)
    script("figures/emergence.py").main(tmp_path, tmp_path / "emergence.png")
    assert (tmp_path / "emergence.png").stat().st_size > 10_000


@pytest.mark.parametrize("stage", ["FIRST", "SECOND"])
def test_the_study_of_pretrained_networks(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "analyses" / "pretrained_distribution")
    study = script("analyses/pretrained_distribution/run.py")
    (tmp_path / "vit.toml").write_text(study.RECIPE.read_text().replace("epochs = 16", "epochs = 1"))
    monkeypatch.setattr(study, "RECIPE", tmp_path / "vit.toml")
    recipe, contrasts = Recipe.load(study.RECIPE), getattr(study, stage)
    monkeypatch.setitem(study.SETTINGS, "digits", ({"data.train": 64}, 1, 2, contrasts))
    source = tmp_path / "vit.pt"
    torch.save(build_for(recipe).state_dict(), source)
    arguments = ["--source", str(source), "--work", str(tmp_path), "--out", str(tmp_path), "--networks", "8"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--only", "digits"])
    study.main()
    found = json.loads((tmp_path / "results.json").read_text())["digits"]
    assert {len(values) for values in found["accuracies"].values()} == {2}
    assert len(found["contrasts"]) == len(contrasts)
    script("figures/over_default.py").main("pretrained_distribution", tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

    network = build_for(recipe)
    turned, part = copy.deepcopy(network), copy.deepcopy(network)
    for module, options in ((network, {}), (turned, {"turn": "v"}), (part, {"parts": "qk"})):
        generator = torch.Generator().manual_seed(0)
        study.draw_parts_(module, file=str(tmp_path / "gain-4.safetensors"), generator=generator, **options)
    for one, other, third in zip(*map(anatomy.self_attention, (network, turned, part)), strict=True):
        assert all(torch.equal(one.read(key), (1 - 2 * (key == "v")) * other.read(key)) for key in "qkvo")
        assert [torch.equal(one.read(key), third.read(key)) for key in "qkvo"] == [True, True, False, False]


def test_the_study_of_another_source(tmp_path: Path) -> None:
    study = script("analyses/other_source/run.py")
    small = {"data": {"name": "digits", "train": 64, "test": 40}, "network.patch_size": 2, "network.width": 8}
    for name, changes in (("recipe", {"network.depth": 2}), ("source", {"network.depth": 1, "population.networks": 8})):
        recipe = Recipe.load(study.HERE / f"{name}.toml").replace(small | changes | {"population.tile": 8})
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(recipe.to_dict()))
    arguments = ["--work", tmp_path / "work", "--out", tmp_path, "--recipes", tmp_path, "--seeds", 3]
    study.main([str(argument) for argument in arguments])
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["choice"]["accuracies"]) == (1 + len(study.GAINS) + len(study.MIMETIC)) * len(study.RATES)
    for start, best in found["choice"]["chosen"].items():
        own = {"default": "default", study.OWN: "gain", study.START: "mimetic"}[start]
        means = {k: np.mean(v) for k, v in found["choice"]["accuracies"].items() if k.startswith(own)}
        assert means[f"{best['candidate']}, rate {best['learning_rate']}"] == max(means.values())
    for name, arms in (("short", 6), ("long", 4)):
        accuracies = found[name]["accuracies"]
        assert [len(values) for values in accuracies.values()] == [3] * arms
        for row in found[name]["contrasts"]:
            difference = np.mean(accuracies[row["arm"]]) - np.mean(accuracies[row["against"]])
            assert row["difference"] == pytest.approx(difference)
    assert sum("p_holm" in found[name]["contrasts"][i] for name in ("short", "long") for i in range(3)) == 5
    edges = found["beyond the edges"]["accuracies"]
    assert {arm: len(values) for arm, values in edges.items()} == {"default": 3, study.OWN: 3, study.START: 3}
    script("figures/over_default.py").main("other_source", tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_study_of_the_derived_start_of_vits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On untrained sizes: every arm and contrast is there, and the arms change what they say and nothing else."""
    monkeypatch.syspath_prepend(ROOT / "analyses" / "derived_vit_start")
    study = script("analyses/derived_vit_start/run.py")
    small = {"data": {"name": "digits", "train": 64, "test": 40}, "network.depth": 2, "network.width": 8}
    recipe = Recipe.load(study.RECIPE).replace(small | {"training.epochs": 1, "population.tile": 8})
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe.to_dict()))
    monkeypatch.setattr(study, "STEPS", (0, 1, 4))
    monkeypatch.setattr(study, "ORDER", ("parts", "rates", "by step"))
    monkeypatch.setattr(study, "FOUR", (0.003, 0.006))
    rates = ({}, study.FOUR, (1, 2), (3, 2), study.RATE_CONTRASTS)
    monkeypatch.setattr(study, "RATE_SETTINGS", {"rates": rates})
    arguments = ["--work", tmp_path / "work", "--out", tmp_path, "--recipe", tmp_path / "recipe.toml"]
    study.main([str(argument) for argument in [*arguments, "--seeds", 2, "--networks", 8]])
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found) == {*study.ORDER, "fits", "environment"}
    for name in ("parts", "rates"):
        accuracies = found[name]["accuracies"]
        assert {len(values) for values in accuracies.values()} == {2}
        for row in found[name]["contrasts"]:
            assert sum(row["weights"].values()) == 0
            difference = sum(weight * np.mean(accuracies[arm]) for arm, weight in row["weights"].items())
            assert row["difference"] == pytest.approx(difference)
    for row in found["by step"]["arms"].values():
        assert np.shape(row["common"]) == (3, 2)
        assert all(0 < value < 1 + 1e-6 for values in (*row["common"], row["entropy"]) for value in values)
    assert found["by step"]["arms"]["uniform, c = 0"]["entropy"] == pytest.approx([1, 1])
    script("figures/over_default.py").main("derived_vit_start", tmp_path, tmp_path / "parts.png")
    script("figures/derived_vit_start.py").main(tmp_path, tmp_path / "rates.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("parts", "rates"))

    default, artifact = build_for(recipe), str(tmp_path / "work/population-sinusoidal/derived.safetensors")

    def start(**options: str) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(0)
        return study.draw_parts_(copy.deepcopy(default), file=artifact, generator=generator, **options)

    whole = start()
    for options in study.PARTS.values():
        changed = start(**options)
        kept = options.get("parts", "qkvor")
        for one, other, third in zip(*map(anatomy.self_attention, (default, whole, changed)), strict=True):
            for key in "qkvo":
                wanted, value = (other if key in kept else one).read(key), third.read(key)
                moved = key in options.get("permute", "") or key in options.get("turn", "")
                assert torch.equal(wanted, value) != moved
                assert torch.equal(*(torch.sort(x.abs().flatten()).values for x in (wanted, value)))
        rest = (whole if "r" in kept else default).get_parameter("blocks.0.mlp.fc1.weight")
        assert torch.equal(rest, changed.get_parameter("blocks.0.mlp.fc1.weight"))
    by_file = load_init(artifact)(copy.deepcopy(default), generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(by_file.parameters(), whole.parameters(), strict=True))


def test_the_study_of_the_start_of_vits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "analyses" / "vit_start")
    study = script("analyses/vit_start/run.py")
    small = {"data": {"name": "digits", "train": 64, "test": 40}, "network.depth": 2, "network.width": 8}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(Recipe.load(study.RECIPE).replace(small).to_dict()))
    monkeypatch.setattr(study, "RECIPE", tmp_path / "recipe.toml")
    only = ["--only", "digits", "--only", study.RATES]
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--work", str(tmp_path / "work"), "--out", str(tmp_path), "--seeds", "2", *only]
    )
    study.main()
    results = json.loads((tmp_path / "results.json").read_text())
    found = results["digits"]
    assert len(found["accuracies"]) == 1 + len(study.ARMS) + 2 * len(study.CENTRED)
    assert len(found["contrasts"]) == len(study.CONTRASTS)
    assert {len(values) for row in results[study.RATES].values() for values in row["accuracies"].values()} == {2}
    script("figures/over_default.py").main("vit_start", tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
