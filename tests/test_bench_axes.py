"""Axes of a benchmark: cells of recipes, grids of numbers, plans, seeds of its own, resuming, tables and pictures."""

import json
from pathlib import Path
from typing import Any

import fake_training as fake
import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner
from pictures import ON_CPU as OPTIONS
from pictures import PLAIN, heights_of
from pictures import runs_of as rows_of
from scipy.stats import ttest_rel

from weightscope import plots, training
from weightscope.benchmarking import BenchResult, bench, plan_arms, plan_bench, summarise
from weightscope.benchmarking.design import combinations_of, point_text
from weightscope.benchmarking.run import Design, _supported
from weightscope.cli import cli
from weightscope.cli.options import varied
from weightscope.errors import RecipeError, Resumable, UsageError
from weightscope.fits import PopulationFit
from weightscope.fits.fitting import fit
from weightscope.init.named import labelled, parse_init
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.training import collection, image_task, planning
from weightscope.training.collection import TileResult

pytestmark = pytest.mark.usefixtures("trained_here")

RECIPE = Recipe.parse({**PLAIN, "training": {"epochs": 2, "batch_size": 16}, "population": {"networks": 3, "tile": 32}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("network.kernel_size=3,7,9", {"network.kernel_size": [3, 7, 9]}),
        ("data.train=1000,all", {"data.train": [1000, "all"]}),
        ("training.betas=[0.9, 0.99],[0.8, 0.9]", {"training.betas": [[0.9, 0.99], [0.8, 0.9]]}),
        ('network.type,network.heads=["vit",3],["vit",6]', {"network.type,network.heads": [["vit", 3], ["vit", 6]]}),
        ("training.schedule=cosine, constant", {"training.schedule": ["cosine", "constant"]}),
    ],
)
def test_axes_of_the_command_line(text: str, expected: dict[str, Any]) -> None:
    assert varied([text]) == expected
    for wrong in ("network.depth", "a.b=", "=1"):
        with pytest.raises(UsageError, match="expected FIELD=VALUE"):
            varied([wrong])


def test_cells_are_all_combinations() -> None:
    found = combinations_of({"a.x": [1, 2], "a.y,a.z": [[3, 4], [5, 6]]})
    assert found == [{"a.x": x, "a.y": y, "a.z": z} for x in (1, 2) for y, z in ((3, 4), (5, 6))]
    assert combinations_of({}) == [{}]
    for wrong in ({"a.x": []}, {"a.x": "1,2"}, {"a.x,a.y": [[1, 2], [3]]}, {"a.x,a.y": [1, 2]}):
        with pytest.raises(UsageError, match=r"a\.x.*: expected a list of values"):
            combinations_of(wrong)
    names = Recipe.parse(
        {**PLAIN, "network": {"type": "convmixer", "width": 8, "depth": 1, "kernel_size": 3, "patch_size": 2}}
    )
    given = {"network.residual": ["none", "both"], "data.train": ["all", 32]}
    cells = {json.dumps(dict(arm.cell)) for arm in plan_arms(names, ["default"], vary=given)}
    assert len(cells) == 4
    assert '{"network.residual": "none", "data.train": null}' in cells, "all is no limit, none a text"


def test_initialisers_have_numbers_in_parentheses() -> None:
    label, table = labelled("conv_covariance(sigma0=0.15, v=0.25, a=-1)")
    assert label == "conv_covariance (sigma0=0.15, v=0.25, a=-1)"
    assert (table.name, table.parameters) == ("conv_covariance", {"sigma0": 0.15, "v": 0.25, "a": -1})
    joined = parse_init('mimetic_attention(parts="qk")+mimetic_mlp(sigma=0.2)')
    assert (joined.name, joined.parameters) == ("mimetic_attention+mimetic_mlp", {"parts": "qk", "sigma": 0.2})
    assert labelled({"name": "mine:f", "x": 2}) == ("f (x=2)", InitConfig.model_validate({"name": "mine:f", "x": 2}))
    for text in ("a=false, delta=true", "a=False, delta=True"):  # as in recipes, and as in Python
        assert parse_init(f"mimetic_ssm({text}, c=4)").parameters == {"a": False, "delta": True, "c": 4}
    for bad in ("f(1)", "f(x=open('a'))", "f(x=1", "f(x=1)+g(x=2)", "f(x=1, x=2)", "f(**{})", "f(a=no)", "f(a=FALSE)"):
        with pytest.raises(UsageError, match="--init: expected"):
            labelled(bad)


def test_arms_cross_cells_lengths_and_grids() -> None:
    arms = plan_arms(
        RECIPE,
        ["default", "mimetic_mlp(b=0.02)", "kaiming_uniform+mimetic_mlp"],
        vary={"network.kernel_size": [3, 5], "training.epochs": [1, 2], "data.train": [32, None]},
        grid={"mimetic_mlp.sigma": [0.0, 0.1, 0.2]},
        control="scale",
    )
    assert len(arms) == 2 * 2 * 2 * (1 + 2 * 3 + 2 * 3)
    assert len({arm.folder for arm in arms}) == len(arms)
    one = arms[3]
    assert one.init == "mimetic_mlp (b=0.02, sigma=0.1)"
    assert one.recipe.init[0].parameters == {"b": 0.02, "sigma": 0.1}
    assert dict(one.cell) == {"network.kernel_size": 3, "data.train": 32}
    assert dict(one.numbers) == {"mimetic_mlp.sigma": 0.1}
    assert arms[4].init == one.init + " (scale only)"
    last = arms[-1].recipe
    assert (last.network.kernel_size, last.data.train, last.training.epochs) == (5, None, 2)  # type: ignore[union-attr]
    assert not arms[0].numbers, "the default has no such number and is run once"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"vary": {"mimetic_mlp.sigma": [1]}}, UsageError, "varied by `grid`"),
        ({"vary": {"population.networks": [1]}}, UsageError, "the number of networks by `seeds`"),
        ({"vary": {"network.kernels": [1]}}, RecipeError, "network.kernels: unknown key"),
        ({"vary": {"network.patch_size": [2, 3]}}, RecipeError, r"must divide .* \(at patch_size=3\)"),
        ({"grid": {"mimetic_attention.alpha_qk": [1]}}, UsageError, "expected the name of an initialiser"),
        ({"vary": {"training.epochs": [1]}, "epochs": [2]}, UsageError, "given as `epochs`, too"),
    ],
)
def test_axes_that_do_not_fit_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_arms(RECIPE, ["default", "mimetic_mlp"], **given)


@pytest.mark.slow
def test_a_sweep_equals_its_cells_run_alone(tmp_path: Path) -> None:
    """Seeds are paired within each cell; curves are in the results; more seeds are added to those there."""
    inits = ["default", "mimetic_mlp(sigma=0.5)"]
    result = bench(RECIPE, inits, tmp_path / "a", vary={"network.kernel_size": [3, 5]}, **OPTIONS)
    assert [(row["cell"], row["init"]) for row in result.arms] == [
        ({"network.kernel_size": size}, init) for size in (3, 5) for init in ("default", "mimetic_mlp (sigma=0.5)")
    ]
    alone = bench(RECIPE.replace({"network.kernel_size": 5}), inits, tmp_path / "b", **OPTIONS)
    second = [run for run in result.runs if run["cell"] == {"network.kernel_size": 5}]
    assert [r["accuracy"] for r in alone.runs] == [r["accuracy"] for r in second]
    pairs = zip(second[:3], second[3:], strict=True)
    assert result.arms[3]["difference"] == pytest.approx(np.mean([b["accuracy"] - a["accuracy"] for a, b in pairs]))
    for run in result.runs:
        assert len(run["curve"]) == 2
        assert run["curve"][-1] == pytest.approx(run["accuracy"])
    assert Population(next((tmp_path / "b").rglob("default*.pop"))).recipe.population.tile == 3, "no padding to 32"
    with pytest.raises(UsageError, match=r"another benchmark \(network.kernel_size: 5 -> 3; arms that are missing"):
        bench(RECIPE, inits, tmp_path / "b", seeds=5, vary={"network.kernel_size": [5]}, **OPTIONS)
    with pytest.raises(UsageError, match=r"missing here: `default, 2 epochs`, `mimetic_mlp \(sigma=0.5\), 2 epochs`\)"):
        bench(RECIPE.replace({"network.kernel_size": 5}), inits, tmp_path / "b", **OPTIONS | {"epochs": [1]})
    replacing = {**OPTIONS, "overwrite": True}
    more = bench(RECIPE, inits, tmp_path / "b", seeds=5, vary={"network.kernel_size": [5]}, **replacing)
    assert len(more.runs) == 10
    grown = bench(RECIPE.replace({"network.kernel_size": 5}), inits, tmp_path / "b", seeds=5, **replacing)
    assert [r["accuracy"] for r in grown.runs[:3]] == [r["accuracy"] for r in alone.runs[:3]]
    other = RECIPE.replace({"network.kernel_size": 5, "training.learning_rate": 0.5})
    with pytest.raises(RecipeError, match=r"was collected with another recipe.*training\.learning_rate"):
        bench(other, inits, tmp_path / "b", seeds=5, **replacing)


def test_a_sweep_stays_in_its_table() -> None:
    table = {"init": ["default", {"name": "mimetic_mlp", "sigma": 0.5}], "vary": {"data.train": [32, 64]}}
    recipe = Recipe.parse({**PLAIN, "bench": {**table, "seeds": 2}})
    arms = Design.of(recipe).arms
    assert [(dict(arm.cell), arm.recipe.population.networks) for arm in arms[::2]] == [
        ({"data.train": train}, 2) for train in (32, 64)
    ]
    fewer = Design.of(recipe, ["default"], seeds=3).arms
    assert [(arm.init, arm.recipe.population.networks) for arm in fewer] == [("default", 3)] * 2, "arguments come first"
    with pytest.raises(RecipeError, match=r"bench\.seedz: unknown key"):
        Recipe.parse({**PLAIN, "bench": {"seedz": 2}})


def test_a_sweep_resumes_without_repeating_a_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/sweep.py does the same with SIGKILL, and compares the time with the plan's."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(tomli_w.dumps(PLAIN))
    command = ["bench", "tiny.toml", "--init", "default", "--vary", "network.kernel_size=3,5"]
    command += ["--vary", "data.train=32,48", "--seeds", "2", "--workers", "1", "--device", "cpu", "-o", "out"]
    trained, train_tile = [], training.train_tile

    def stopped(*given: Any, **options: Any) -> Any:
        trained.append(given)
        if len(trained) > 2:
            raise KeyboardInterrupt
        return train_tile(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_tile", stopped)
        first = CliRunner().invoke(cli, command)
    assert isinstance(first.exception, Resumable)
    assert "stopped: 4 of 8 networks are kept in" in str(first.exception)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    assert len(before) == 2
    again = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert "4 cells, 4 arms, 8 networks in 4 tiles, 2 of them done" in again.stderr
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    assert len(after) == 4
    assert {path: after[path] for path in before} == before
    written = json.loads(Path("out/results.json").read_text())
    assert len(written["runs"]) == 8
    assert all(run["curve"] for run in written["runs"])
    assert Path("out/table.md").exists()


def test_the_plan_counts_what_is_left_and_expects_the_time(tmp_path: Path) -> None:
    given: dict[str, Any] = {"vary": {"network.kernel_size": [3, 5]}, "seeds": 2}
    options = {"workers": 1, "device": "cpu"}
    inits = ["default", "mimetic_mlp"]
    plan = plan_bench(RECIPE, inits, tmp_path, **given, **options)
    assert [(row["arms"], row["networks"], row["tiles"], row["done"]) for row in plan.cells] == [(2, 4, 2, 0)] * 2
    assert plan.seconds == pytest.approx(sum(row["seconds"] for row in plan.cells), abs=5)
    assert plan.summary().startswith("2 cells, 4 arms, 8 networks in 4 tiles; expected time ")
    assert not any(tmp_path.iterdir()), "nothing is written"
    told: list[TileResult] = []
    own: dict[str, Any] = {"vary": {"network.kernel_size": [3]}, "seeds": 2, "on_tile": told.append}
    bench(RECIPE, inits, tmp_path, progress=False, **own, **options)
    assert {each.name for each in told} == {f"kernel_size=3/{init}, 2 epochs" for init in inits}
    plan = plan_bench(RECIPE, inits, tmp_path, **given, **options, measure=False)
    assert [row["done"] for row in plan.cells] == [2, 0]
    assert plan.seconds is None
    bench(RECIPE, inits, tmp_path, **given, progress=False, **options)
    done = plan_bench(RECIPE, inits, tmp_path, **given, **options)
    assert done.summary() == "2 cells, 4 arms, 8 networks in 4 tiles, 4 of them done; expected time 0 s with 1 worker"


def test_the_plan_counts_one_evaluation_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length: 10 epochs with one evaluation were planned with five of those of 2 epochs."""
    monkeypatch.setattr(planning, "_timed", lambda *_: (0.0, 0.0, 4, 100.0))
    given: dict[str, Any] = {"epochs": (2, 10), "seeds": 2, "workers": 1, "device": "cpu"}
    for evaluate, evaluations in (("end", 2), ("epoch", 12)):
        plan = plan_bench(RECIPE.replace({"training.evaluate": evaluate}), ["default"], tmp_path, **given)
        assert plan.cells[0]["seconds"] == 100 * evaluations


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[PopulationFit, Path]:
    fake.write_population(tmp_path / "old.pop", RECIPE.replace({"population.networks": 24, "population.tile": 8}))
    result = fit(Population(tmp_path / "old.pop"), "*.weight", structure="diagonal")
    result.save(tmp_path / "fit.safetensors")
    return result, tmp_path / "fit.safetensors"


def test_a_benchmark_shares_no_seed_with_the_population_of_its_artifact(fitted: tuple[PopulationFit, Path]) -> None:
    result, path = fitted
    assert result.provenance["recipe"]["population"]["seed"] == 0
    design = Design.of(path.parent / "old.pop", ["default", path], seeds=4)
    assert design.recipe.population.seed == 1_000_000
    assert {arm.recipe.population.seed for arm in design.arms} == {1_000_000}
    assert Design.of(RECIPE, ["default", path], seed=7).recipe.population.seed == 7
    with pytest.raises(UsageError, match=r"seed 0: .* was fitted to a population with this seed"):
        Design.of(RECIPE, ["default", path], seed=0)
    assert Design.of(RECIPE, ["default"], seed=0).recipe.population.seed == 0
    # a recipe whose own seed is 1,000,000 below that of the population
    result.provenance["recipe"]["population"]["seed"] = 1_000_000
    result.save(path)
    assert Design.of(RECIPE, ["default", path]).recipe.population.seed == 2_000_000


def runs_of(init: str, cell: dict[str, Any], numbers: dict[str, Any], accuracies: np.ndarray) -> list[dict[str, Any]]:
    runs = rows_of(init, accuracies, cell=cell, numbers=numbers, epochs=2)
    return [run | {"curve": [0.5 * run["accuracy"], run["accuracy"]]} for run in runs]


@pytest.fixture(scope="module")
def swept() -> BenchResult:
    """Two cells; in each the default and a grid of 3 x 2 numbers, the best at (0.5, 1)."""
    random, runs = np.random.default_rng(0), []
    for size in (3, 7):
        base = random.normal(0.7, 0.03, 8)
        runs += runs_of("default", {"network.kernel_size": size}, {}, base)
        for a in (0.0, 0.5, 1.0):
            for b in (0, 1):
                gain = 0.1 * b - 0.2 * (a - 0.5) ** 2 - 0.02
                label = f"mimetic_attention (alpha_qk={a}, beta_qk={b})"
                numbers = {"mimetic_attention.alpha_qk": a, "mimetic_attention.beta_qk": b}
                runs += runs_of(label, {"network.kernel_size": size}, numbers, base + gain + random.normal(0, 0.004, 8))
    return BenchResult(runs, summarise(runs))


def test_pictures_of_a_sweep(swept: BenchResult, tmp_path: Path) -> None:
    names = list(swept.figures())
    axes = ["network.kernel_size", "mimetic_attention.alpha_qk", "mimetic_attention.beta_qk"]
    assert names[:3] == [f"along-{axis}" for axis in axes]
    assert sum(name.startswith("map-") for name in names) == 2 + 3 + 2
    main = swept.plot(tmp_path / "main.png").axes[0].get_xlabel()
    assert (tmp_path / "main.png").read_bytes()[:4] == b"\x89PNG"
    assert main == swept.figures()[names[0]]().axes[0].get_xlabel()
    assert main != swept.plot(tmp_path / f"along-{axes[1]}.png").axes[0].get_xlabel()

    ax = plots.metric_along(swept.arms, "mimetic_attention.alpha_qk")
    assert len(ax.containers) == 2 * 2, "beta x kernel sizes"
    best = next(row for row in swept.arms if row["init"] == "mimetic_attention (alpha_qk=0.5, beta_qk=1)")
    drawn = {
        (x, round(float(y), 6)): ends
        for bar in ax.containers
        for x, y, ends in zip(*bar.lines[0].get_data(), heights_of(bar), strict=True)
    }
    low, high = drawn[0.5, round(best["mean"], 6)]
    shift = best["mean"] - best["difference"]
    np.testing.assert_allclose([low, high], np.array(best["difference_ci_holm"]) + shift, atol=1e-9)
    assert high - low < 0.5 * (best["ci95"][1] - best["ci95"][0]), "paired intervals are much narrower"
    with pytest.raises(UsageError, match=r"axis: expected one of mimetic_attention\.alpha_qk"):
        plots.metric_along(swept.arms, "network.depth")


def test_ticks_are_where_their_labels_say() -> None:
    """Ticks at 7.5, 10 and 12.5 % had the labels 8, 10 and 12."""
    for low, high in np.random.default_rng(0).uniform(0, 1, (3, 2)):
        runs = rows_of("default", [low] * 2) + rows_of("default", [high] * 2, epochs=9)
        ax = plots.convergence(summarise(runs))
        ax.figure.draw_without_rendering()
        labels = [float(label.get_text().replace("−", "-")) for label in ax.get_yticklabels()]
        assert labels == pytest.approx(list(100 * ax.get_yticks()), abs=1e-9)


def test_a_map_is_centred_at_zero(swept: BenchResult) -> None:
    axes = ("mimetic_attention.alpha_qk", "mimetic_attention.beta_qk")
    mine = [row for row in swept.arms if row["cell"] == {"network.kernel_size": 7}]
    ax = plots.difference_map(mine, axes)
    image = ax.collections[0]
    assert image.norm.vmin == -image.norm.vmax
    found = {
        (row["numbers"][axes[0]], row["numbers"][axes[1]]): 100 * row["difference"] for row in mine if row["numbers"]
    }
    expected = [[found[a, b] for a in (0.0, 0.5, 1.0)] for b in (0, 1)]
    np.testing.assert_allclose(np.asarray(image.get_array()), expected)
    with pytest.raises(UsageError, match="expected rows with"):
        plots.difference_map(mine, ("network.depth", axes[1]))


def test_the_best_of_a_map_has_lost_no_network() -> None:
    """Of the arm that lost some, p is against it: its networks that are left are better."""
    row = {"init": "a", "difference": 0.01, "p_holm": 0.01, "reference": "default", "numbers": {}, "epochs": 1, "n": 4}
    lost = row | {"difference": 0.05, "pairs": 4, "networks": 8, "diverged": 4, "cell": {"x.a": 1, "x.b": 1}}
    ax = plots.difference_map([lost, row | {"pairs": 8, "networks": 8, "cell": {"x.a": 2, "x.b": 1}}], ("x.a", "x.b"))
    (frame,) = [patch for patch in ax.patches if patch.get_gid() == "largest"]
    assert frame.get_x() == 1


def test_no_value_is_all_images_or_none() -> None:
    """Only images are all there without a number; a learned sum is absent. In maps, along axes and in texts."""
    assert point_text({"data.train": None, "network.learned_sum": None}) == "train=all, learned_sum=none"
    rows = [
        {"init": "a", "cell": {"network.layer_scale": scale, "data.train": size}, "difference": 0.01, "p_holm": 1.0}
        | {"reference": "default", "pairs": 4, "numbers": {}, "epochs": 1, "n": 2, "mean": 0.5}
        for scale in (None, 0.1)
        for size in (None, 100)
    ]
    ax = plots.difference_map(rows, ("network.layer_scale", "data.train"))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.1", "none"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["100", "all"]


def test_tables_are_like_those_of_the_papers(swept: BenchResult) -> None:
    markdown = swept.table()
    rows = [line.split("|")[1:-1] for line in markdown.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {3}
    assert [cell.strip() for cell in rows[0]] == ["initialiser", "kernel_size=3", "kernel_size=7"]
    best = next(row for row in swept.arms if row["init"] == "mimetic_attention (alpha_qk=0.5, beta_qk=1)")
    half = 50 * np.ptp(best["difference_ci_holm"])
    assert f"**{100 * best['mean']:.1f}** ± {half:.1f}†" in markdown
    axes = ["network.kernel_size", "mimetic_attention.alpha_qk", "mimetic_attention.beta_qk"]
    assert list(swept.rows()[1])[:4] == ["init", *axes]


def test_arms_that_differ_in_punctuation_have_folders_of_their_own() -> None:
    names = [f'transfer(source="a.pt",select="{pattern}")' for pattern in ("*.norm*", "?.norm?", "*.norm")]
    folders = {arm.folder for arm in plan_arms(RECIPE, ["default", *names], seeds=2)}
    assert len(folders) == 4
    with pytest.raises(UsageError, match="expected arms with folders of their own"):
        plan_arms(RECIPE, ['transfer(source="a b.pt")', 'transfer(source="a-b.pt")'], seeds=2)


def test_an_arm_is_compared_with_itself_in_another_cell(swept: BenchResult, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(swept.to_dict()))
    loaded = BenchResult.load(tmp_path)
    assert loaded == BenchResult.load(tmp_path / "results.json") == swept
    field, *_ = swept.runs[0]["cell"]
    rows = loaded.between(field)
    values = list(dict.fromkeys(run["cell"][field] for run in swept.runs))
    assert rows[0]["cell"][field] == values[1]
    for row in rows:
        mine, base = (
            {
                run["seed"]: run["accuracy"]
                for run in swept.runs
                if (run["init"], run["epochs"]) == (row["init"], row["epochs"])
                and run["cell"] == {**row["cell"], field: value}
            }
            for value in (row["cell"][field], values[0])
        )
        differences = np.array([mine[k] - base[k] for k in mine])
        assert row["difference"] == pytest.approx(differences.mean())
        assert row["p"] == pytest.approx(ttest_rel(list(mine.values()), [base[k] for k in mine]).pvalue)
        assert row["p"] <= row["p_holm"] <= 1
    assert {row["cell"][field] for row in rows} == set(values[1:])
    with pytest.raises(UsageError, match=r"network\.widht"):
        loaded.between("network.widht")


def test_throughput_is_measured_at_evaluations_and_kept_on_resuming(tmp_path: Path, monkeypatch: Any) -> None:
    """The median of the evaluations but the first, of a clock that advances by 8, 1, 2, 4 s between its readings."""
    steps = iter([s for seconds in (8, 1, 2, 4) for s in (0, seconds)] * 2)
    now = [0.0]

    def clock() -> float:
        now[0] += next(steps, 1)
        return now[0]

    monkeypatch.setattr(image_task.time, "thread_time", clock)
    monkeypatch.setattr(collection, "spread", lambda task, todo, *_: ((item, task(item)) for item in todo))
    given: dict[str, Any] = {"seeds": 2, "epochs": [4], "vary": {"network.depth": [1, 2]}, "progress": False}
    recipe = RECIPE.replace({"network.width": 8})
    result = bench(recipe, ["default"], tmp_path / "b", throughput=True, device="cpu", workers=1, **given)
    tests = len(recipe.data.load(None).test_labels)
    assert [row["images_per_second"] for row in result.arms] == [2 * tests / 2] * 2
    assert all("tiles of 2" in row["measured_on"] for row in result.arms)
    sizes = [
        sum(p.numel() for p in Population(path).network(0).parameters()) for path in (tmp_path / "b").rglob("*.pop")
    ]
    assert sorted(row["parameters"] for row in result.arms) == sorted(sizes)
    assert "images/s" in result.text()
    axes = result.figures()["along-parameters"]().axes[0]
    assert axes.get_xlabel() == "parameters"
    again = bench(recipe, ["default"], tmp_path / "b", device="cpu", workers=1, **given)
    assert again.arms == result.arms
    stored = BenchResult.load(tmp_path / "b")
    assert [row["images_per_second"] for row in stored.arms] == [tests] * 2


def test_throughput_has_the_digits_that_tiles_have_in_common() -> None:
    found = [_supported(values) for values in ([1234.0], [1211.0, 1234.0, 1240.0], [90.0, 118.0, 340.0], [7.0, 7.0])]
    assert found == [1200, 1230, 100, 7]


def test_throughput_needs_two_evaluations_of_images(tmp_path: Path) -> None:
    for changes, epochs, found in (({}, 1, "1 epoch"), ({"training.evaluate": "end"}, 2, "evaluate = 'end'")):
        with pytest.raises(
            UsageError, match=f"throughput: expected evaluate = 'epoch' and 2 epochs or more, found.*{found}"
        ):
            bench(RECIPE.replace(changes), ["default"], tmp_path / "b", epochs=[epochs], throughput=True, **OPTIONS)
    with pytest.raises(UsageError, match="throughput: expected images, found sequences"):
        bench("copying-mamba-two-cores", ["default"], tmp_path / "c", throughput=True, **OPTIONS)
