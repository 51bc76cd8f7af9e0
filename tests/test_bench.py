"""The benchmark's statistics against scipy, its arms and pairing, own initialisers, and resuming."""

import contextlib
import json
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from fake_training import PROCESSES, recipe, write_population
from pictures import ON_CPU, PLAIN, fake_bench, runs_of
from safetensors.torch import save_file
from scipy import stats

from weightscope import networks
from weightscope._util import workers
from weightscope._util.plugins import imported
from weightscope.benchmarking import BenchResult, bench, linear_probe, plan_arms, plan_bench, summarise
from weightscope.benchmarking.result import finding
from weightscope.benchmarking.run import Design
from weightscope.benchmarking.statistics import above_chance, holm, mean_interval
from weightscope.data.metrics import ACCURACY
from weightscope.data.sequences import TASKS
from weightscope.errors import DataError, RecipeError, UsageError
from weightscope.fits.fitting import fit
from weightscope.init import _trained, mimetic_mlp_
from weightscope.init.named import resolve
from weightscope.networks import build_for
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.statistics.samples import WeightArray
from weightscope.training import request

pytestmark = pytest.mark.usefixtures("trained_here")

RECIPE = Recipe.parse(PLAIN)


def rows(values: dict[str, list[float]], epochs: int = 3) -> list[dict[str, Any]]:
    return [run for init, accuracies in values.items() for run in runs_of(init, accuracies, epochs=epochs)]


def test_the_summary_equals_scipys_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(0.9, 0.02, (3, 20))
    found = summarise(rows({"default": list(a), "x": list(b), "y": list(c)}))
    assert found[0]["difference"] is None
    for row, values in zip(found[1:], (b, c), strict=True):
        peer = stats.ttest_rel(values, a)
        assert row["difference"] == pytest.approx((values - a).mean())
        assert row["p"] == pytest.approx(peer.pvalue)
        np.testing.assert_allclose(row["difference_ci95"], peer.confidence_interval(0.95))
        assert row["reference"] == "default"
    spread = stats.sem(a) / (a.mean() * (1 - a.mean()))
    interval = stats.t.interval(0.95, 19, np.log(a.mean() / (1 - a.mean())), spread)
    np.testing.assert_allclose(found[0]["ci95"], 1 / (1 + np.exp(-np.array(interval))))
    np.testing.assert_allclose(interval_of(a), found[0]["ci95"])
    np.testing.assert_allclose(found[0]["ci95"], stats.t.interval(0.95, 19, a.mean(), stats.sem(a)), atol=1e-3)


def interval_of(accuracies: Any) -> list[float]:
    return mean_interval(np.array(accuracies))["ci95"]


@pytest.mark.parametrize("accuracies", [(0.9, 0.96), (0.999, 0.5, 1.0), (0.0, 0.04), (0.0, 1.0), (0.3,), (1.0,) * 6])
def test_intervals_of_accuracies_are_accuracies(accuracies: tuple[float, ...]) -> None:
    """Student's interval of two networks at 90 and 96 % is 55 to 131 %."""
    low, high = interval_of(accuracies)
    assert 0 <= low <= np.mean(accuracies) <= high <= 1
    assert (low < high) == (len(set(accuracies)) > 1 or len(accuracies) == 1)
    found = summarise(rows({"default": [0.0] * 2, "x": [0.02, 0.9]}))[1]
    assert -1 <= found["difference_ci95"][0] < found["difference"] < found["difference_ci95"][1] == 1


def test_holm_adjustment_is_that_of_the_step_down_procedure() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(0.9, 0.02, 30)
    shifts = {f"i{j}": list(base + rng.normal(0.002 * j, 0.01, 30)) for j in range(4)}
    found = [row for row in summarise(rows({"default": list(base)} | shifts)) if row["p"] is not None]
    p = np.array([row["p"] for row in found])
    order = np.argsort(p)
    expected = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    np.testing.assert_allclose([found[i]["p_holm"] for i in order], expected)
    assert holm([]) == []


@pytest.mark.parametrize(("n", "effect"), [(3, 0.0), (5, 0.2)])
def test_false_alarms_and_intervals_of_six_arms_with_heavy_tails(n: int, effect: float) -> None:
    """400 tables of which 5 % or fewer have a false alarm: more than 34 with a probability below 1e-3. Tests that are
    not adjusted give 58 or more. Of 2,400 intervals, of which 95 % or more cover, fewer than 2,240 have one below 1e-3.
    """
    rng, alarms, covered, truth = np.random.default_rng(n), 0, 0, np.array([effect, 0.0, 0.0, 0.0, 0.0, 0.0])
    for _ in range(400):
        noise = 0.5 + 0.01 * rng.standard_t(3, (7, n)).clip(-25, 25)
        values = {"default": list(noise[0])} | {f"a{j}": list(noise[j + 1] + truth[j]) for j in range(6)}
        found = summarise(rows(values))[1:]
        alarms += any(row["p_holm"] < 0.05 for row, true in zip(found, truth, strict=True) if true == 0)
        low, high = np.array([row["difference_ci_holm"] for row in found]).T
        covered += int(((low <= truth) & (truth <= high)).sum())
    assert alarms <= 34
    assert covered >= 2240


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_differences_that_are_equal_up_to_rounding_have_no_t_test(n: int, dtype: Any) -> None:
    """Accuracies on 100 images with 3 more right on every seed: computed, the differences vary by 1e-17 or 1e-8."""
    right = np.array([5, 24, 90, 64, 77, 58, 95, 81])[:n]
    default, x = ((count / dtype(100)).astype(np.float64) for count in (right, right + 3))
    t = (x - default).mean() / stats.sem(x - default)
    assert 2 * stats.t.sf(t, n - 1) < 1e-6, "what a t-test says"
    found = summarise(rows({"default": list(default), "x": list(x)}))[1]
    assert found["p"] == 2.0 ** (1 - n)
    known = n >= 6
    assert (found["p"] < 0.05) == known == (found["difference_ci95"][0] > 0), "p-value and interval agree"
    assert found["difference_ci95"] == ([pytest.approx(0.03)] * 2 if known else [-1, 1])
    again = summarise(rows({"default": list(default), "x": list(default + 1e-9)}))[1]
    assert again["p"] == 1, "no difference"


@pytest.mark.parametrize("loss", [0.5, 0.25])
def test_an_arm_that_equals_its_reference_is_named(loss: float) -> None:
    """Accuracies may be equal by chance, the loss as well only if nothing was changed."""
    runs = rows({"default": [0.5, 0.6], "x": [0.5, 0.6]})
    for run in runs:
        run["loss"] = 0.5 if run["init"] == "default" else loss
    assert ("x: the results of default on every seed" in BenchResult(runs, summarise(runs)).text()) == (loss == 0.5)


def test_each_length_and_each_freezing_has_its_own_reference() -> None:
    values = {"default": [0.5, 0.6], "x": [0.6, 0.8], "default (frozen)": [0.1, 0.2], "x (frozen)": [0.4, 0.5]}
    found = {(r["epochs"], r["init"]): r for r in summarise(rows(values) + rows(values, epochs=9))}
    assert found[9, "x"]["reference"] == "default"
    assert found[3, "x (frozen)"]["difference"] == pytest.approx(0.3)
    assert found[9, "default (frozen)"]["difference"] is None


def test_arms_cross_initialisers_lengths_and_freezing() -> None:
    planned = plan_arms(RECIPE, ["default", "mimetic_mlp"], epochs=[1, 4], seeds=5, frozen="*.conv_dw.weight")
    inits = ["default", "mimetic_mlp", "default (frozen)", "mimetic_mlp (frozen)"]
    assert [(a.init, a.epochs) for a in planned] == [(init, epochs) for epochs in (1, 4) for init in inits]
    assert planned[3].recipe.training.frozen == ("*.conv_dw.weight",)
    assert planned[5].recipe.training.epochs == 4
    assert len({a.folder for a in planned}) == 8
    for wrong, given, message in (
        (["default"], {"seeds": 1}, "at least 2 seeds"),
        (["default", "default", "mimetic_mlp"], {}, "different names, found default more than once"),
        ([], {}, "different names, found none"),
    ):
        with pytest.raises(UsageError, match=message):
            plan_arms(RECIPE, wrong, **given)


def test_arms_are_paired_and_a_second_run_trains_nothing(tmp_path: Path) -> None:
    tables = [InitConfig(name=name) for name in ("default", "kaiming_uniform", "default+default")]
    result = bench(RECIPE, tables, tmp_path, epochs=[1, 2], **ON_CPU)
    inits = ("default", "kaiming_uniform", "default+default")
    assert [(r["epochs"], r["init"], r["seed"]) for r in result.runs] == list(product((1, 2), inits, range(3)))
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["runs"] == result.runs
    assert written["environment"]["recipe"]["data"]["name"] == "digits"
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.h5")}
    assert len(before) == 6
    again = bench(RECIPE, tables, tmp_path, epochs=[1, 2], **ON_CPU)
    assert again.runs == result.runs
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.h5")} == before
    assert "kaiming_uniform" in result.text()
    accuracy = [[r["accuracy"] for r in result.runs if r["init"] == init] for init in inits]
    assert accuracy[0] == accuracy[2], "an initialiser that changes nothing gives equal bits"
    assert result.arms[2]["p"] == 1


def test_an_initialiser_on_top_of_an_artifact(tmp_path: Path) -> None:
    network = networks.build_for(RECIPE)
    spec = WeightSpec.of(network)
    weights = np.random.default_rng(0).standard_normal((8, spec.size))
    file = tmp_path / "fit.safetensors"
    fit(WeightArray(weights, spec), "*.mlp.fc?.weight", structure="isotropic").save(file)
    alone, on_top = (plan_arms(RECIPE, [f"{file}{more}"])[0].recipe.init[0] for more in ("", "+mimetic_mlp"))
    both = resolve(on_top)(networks.build_for(RECIPE), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    expected = mimetic_mlp_(resolve(alone)(networks.build_for(RECIPE), generator=generator), generator=generator)
    for name in spec.names:
        if ".mlp.fc1.weight" in name:
            assert torch.equal(both.state_dict()[name], expected.state_dict()[name])
            assert not torch.equal(both.state_dict()[name], network.state_dict()[name])


def test_sources_of_weights_are_hashed_once_for_all_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the tiles; a source that has changed meanwhile is an error."""
    plan = RECIPE.replace({"population.tile": 2})
    names = [str(tmp_path / f"{name}.safetensors") for name in ("a", "teacher")]
    for name in names:
        save_file(build_for(plan).state_dict(), name)
    teacher = {"teacher": names[1], "kind": "logit", "alpha": 1.0}
    plan = plan.replace({"distillation": teacher})
    inits = ["default", f'transfer(source="{names[0]}")', f'transfer(source="{names[0]}", components="mlp")']
    read: list[str] = []
    fingerprint = _trained.fingerprint

    def counted(source: Any) -> str:
        read.append(source if isinstance(source, str) else "teacher")
        return fingerprint(source)

    monkeypatch.setattr(_trained, "fingerprint", counted)
    result = bench(plan, inits, tmp_path / "out", seeds=4, **ON_CPU)
    assert len(list((tmp_path / "out").rglob("*.h5"))) == 6
    assert sorted(read) == [names[0], "teacher"]
    inputs = json.loads(next((tmp_path / "out").rglob("transfer*.pop/population.json")).read_text())["inputs"]
    assert inputs[f"weights {names[0]}"] == fingerprint(names[0])
    assert f"teacher {names[1]}" in inputs

    read.clear()
    again = bench(plan, inits, tmp_path / "out", seeds=4, **ON_CPU)
    assert [row["mean"] for row in again.arms] == [row["mean"] for row in result.arms]
    assert len(read) == 2
    request.weight_hashes(plan)
    assert read[-1] == "teacher", "what was passed does not outlive the benchmark"


def test_an_initialiser_with_numbers_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "strong.toml").write_text('name = "mimetic_mlp"\nsigma = 0.5\n')
    arm = plan_arms(RECIPE, ["default", str(tmp_path / "strong.toml")])[1]
    assert arm.init == "strong"
    assert arm.recipe.init[0].parameters == {"sigma": 0.5}
    (tmp_path / "bad.toml").write_text("name = 3\n")
    with pytest.raises(UsageError, match=r"bad.toml: name: input should be a valid string"):
        plan_arms(RECIPE, [str(tmp_path / "bad.toml")])
    with pytest.raises(UsageError, match="cannot read"):
        plan_arms(RECIPE, ["none.toml"])


def scaled_init(module: torch.nn.Module, *, generator: torch.Generator, scale: float = 0.5) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return module


def test_a_function_is_recorded_by_reference_and_labelled_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightscope.benchmarking.run.resolve", lambda config: None)
    result = fake_bench(RECIPE, ["default", scaled_init], tmp_path / "b")
    assert [row["init"] for row in result.arms] == ["default", "scaled_init"]
    reference = plan_arms(RECIPE, [scaled_init])[0].recipe.init[0].name
    assert reference == f"{__name__}:scaled_init"
    assert imported(reference) is scaled_init

    def local_init(module: torch.nn.Module, *, generator: torch.Generator) -> torch.nn.Module:
        return module

    arm = plan_arms(RECIPE, [local_init])[0]
    assert (arm.init, arm.folder) == ("local_init", "local_init-1-epochs.pop")
    assert imported(arm.recipe.init[0].name) is local_init


class Scaling:
    """An initialiser with a number of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: torch.nn.Module, *, generator: torch.Generator) -> torch.nn.Module:
        return scaled_init(module, generator=generator, scale=self.scale)

    def twice(self, module: torch.nn.Module, *, generator: torch.Generator) -> torch.nn.Module:
        return self(self(module, generator=generator), generator=generator)


@pytest.mark.slow
def test_any_callable_is_an_initialiser_in_other_processes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them scale by a quarter, so that they agree to the last bit, and differ from the default."""
    monkeypatch.setitem(workers.ENGINES, "loky", PROCESSES)
    inits = [scaled_init, partial(scaled_init, scale=0.25), Scaling(0.25), Scaling(0.5).twice]
    inits += [lambda module, *, generator: scaled_init(module, generator=generator, scale=0.25)]
    result = bench(RECIPE, inits, tmp_path / "a", **ON_CPU)
    labels = ["scaled_init", "scaled_init (scale=0.25)", "Scaling", "Scaling.twice", "lambda"]
    assert [row["init"] for row in result.arms] == labels
    losses = np.array([run["loss"] for run in result.runs]).reshape(5, 3)
    assert (losses[1:] == losses[1]).all()
    assert (losses[0] != losses[1]).all()
    named = bench(RECIPE, {"a": Scaling(0.25), "b": Scaling(0.5)}, tmp_path / "b", **ON_CPU)
    assert [row["init"] for row in named.arms] == ["a", "b"]
    assert named.arms[0]["loss"] == result.arms[2]["loss"] != named.arms[1]["loss"]
    with pytest.raises(UsageError, match="different names, found Scaling more than once; in Python, a mapping"):
        plan_arms(RECIPE, [Scaling(0.25), Scaling(0.5)])


def test_labels_are_short_and_differ() -> None:
    table = InitConfig.model_validate({"name": "my.module:scaled_init", "scale": 0.1})
    inits = ["default", "my.module:my_init", "mimetic_mlp+mine:f", table, InitConfig(artifact="runs/fit.safetensors")]
    inits += ["runs/fit.safetensors+mimetic_mlp"]
    labels = ["default", "my_init", "mimetic_mlp+f", "scaled_init (scale=0.1)", "fit", "fit+mimetic_mlp"]
    assert [arm.init for arm in plan_arms(RECIPE, inits)] == labels
    found = plan_arms(RECIPE, ["mine:scaled_init", "other:scaled_init"])
    assert [arm.init for arm in found] == ["mine:scaled_init", "other:scaled_init"]
    with pytest.raises(UsageError, match=r"found default \(scale=0.1\) more than once"):
        plan_arms(RECIPE, [table.model_copy(update={"name": "default"}), "default(scale=0.1)"])
    with pytest.raises(UsageError, match="expected a name, a file, a callable or an InitConfig"):
        plan_arms(RECIPE, [3])  # type: ignore[list-item]


def test_the_recipe_may_be_a_name_a_path_or_a_population_and_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(tomli_w.dumps(PLAIN))
    write_population(tmp_path / "old.pop", recipe(networks=4))
    given = ("tiny.toml", tmp_path / "old.pop", RECIPE, "digits-convnext")
    tiny, old, *others = (Design.of(each, ["default"], seeds=2) for each in given)
    names = ["tiny-bench", "old-bench", "convnext-digits-bench", "digits-convnext-bench"]
    assert [str(design.folder) for design in (tiny, old, *others)] == names
    assert (tiny.recipe.network, old.recipe.data) == (RECIPE.network, recipe().data)
    with pytest.raises(UsageError, match="did you mean 'digits-convnext'"):
        Design.of("digit-convnext", ["default"])


@pytest.mark.parametrize("seed", range(3))
def test_no_results_are_lost_in_silence(seed: int, tmp_path: Path) -> None:
    """A second benchmark in one folder keeps every network of the first, or is refused and changes nothing."""
    choose = random.Random(seed)

    def some(items: list[Any]) -> list[Any]:
        return choose.sample(items, choose.randint(1, len(items)))

    def run() -> list[tuple[Any, ...]]:
        recipe = RECIPE.replace({"network.depth": choose.choice([1, 1, 2])})
        given = {"epochs": some([1, 2]), "seeds": choose.choice([2, 3]), "metric": choose.choice([None, "test_loss"])}
        vary = choose.choice([{}, {"data.train": some([32, 64])}])
        inits = some(["default", "mimetic_mlp", scaled_init])
        runs = fake_bench(recipe, inits, tmp_path, vary=vary, **given).runs
        return [(recipe.network.depth, run["init"], str(run["cell"]), run["epochs"], run["seed"]) for run in runs]

    first, before = run(), (tmp_path / "results.json").read_bytes()
    second: list[tuple[Any, ...]] = []
    with contextlib.suppress(UsageError):
        second = run()
    assert set(first) <= set(second) or (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize("there", ["notes.txt", "probes.json", "results.json"])
def test_a_folder_of_something_else_is_refused_before_anything_runs(there: str, tmp_path: Path) -> None:
    for name in (there, "mine"):
        (tmp_path / name).write_text("{}")
    with pytest.raises((UsageError, DataError), match=r"expected (a new|the results|JSON)|holds a b"):
        bench(RECIPE, ["default"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({there, "mine"})


def test_the_result_is_for_further_work(tmp_path: Path) -> None:
    four = RECIPE.replace({"population.networks": 4})
    result = fake_bench(four, ["default", "mimetic_mlp"], tmp_path / "b", epochs=[1, 2])
    assert repr(result) == "<BenchResult: 4 arms, 16 networks on digits>"
    lines = str(result).splitlines()
    assert lines[0].split()[:3] == ["initialiser", "epochs", "n"]
    assert lines[3].split()[:4] == ["mimetic_mlp", "1", "4", "86.50"]
    frame = result.to_pandas()
    assert list(frame["init"]) == ["default", "mimetic_mlp"] * 2
    assert frame["difference"].iloc[1] == pytest.approx(0.015)
    assert frame["difference_holm_low"].iloc[1] < 0.015 < frame["difference_holm_high"].iloc[1]
    assert not any(isinstance(value, list | dict) for value in frame.to_numpy().flat), "one value in each cell"
    assert result._repr_html_() == f"<pre>{result}</pre>", "the same numbers in notebooks"
    written = json.loads((tmp_path / "b" / "results.json").read_text())
    assert written["summary"] == result.arms
    assert written["runs"][3]["loss"] is None


@pytest.mark.parametrize("run", [bench, linear_probe, plan_bench])
def test_an_initialiser_that_does_not_apply_is_known_before_any_arm_is_trained(tmp_path: Path, run: Any) -> None:
    """One error that names the cell, and no network of the other arms."""
    inits, vary = ["default", "mimetic_first_last_mlp"], {"network.depth": [2, 1]}
    with pytest.raises(RecipeError, match=r"^depth=1: init \(mimetic_first_last_mlp\): expected at least two MLPs"):
        run(RECIPE, inits, tmp_path / "out", vary=vary)
    assert not (tmp_path / "out").exists()


def test_guesses_are_called_better_than_chance_as_rarely_as_stated() -> None:
    """In 4000 benchmarks of 6 networks that guess 50 shared labels of 10 classes; a real difference is found."""
    rng = np.random.default_rng(0)
    level = (0.1, 50)
    p = [
        above_chance((rng.integers(10, size=(6, 50)) == rng.integers(10, size=50)).mean(1), level) for _ in range(4000)
    ]
    assert np.mean(np.array(p) < 0.05) < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 4000)
    constant = [above_chance(np.repeat((rng.integers(10, size=50) == 0).mean(), 6), level) for _ in range(4000)]
    assert np.mean(np.array(constant) < 0.05) < 0.08, "all networks give the same answer, and share the labels' luck"
    assert above_chance(np.array([0.3, 0.35, 0.25, 0.3, 0.32, 0.29]), level) < 0.05
    assert above_chance(np.array([0.3]), level) < 0.05
    assert above_chance(np.array([0.118, 0.119]), (0.1, 10_000)) < 1e-6, "two networks are more than one"
    level, values = (0.05, 20), np.arange(21) / 20
    called = [above_chance(values[k : k + 1], level) < 0.05 for k in range(21)]
    assert stats.binom.pmf(np.arange(21), 20, 0.05)[called].sum() < 0.08, "of one network that guesses few labels"


def one_class_of_three() -> tuple[np.ndarray, ...]:
    images, labels = np.random.default_rng(0).integers(256, size=(20, 1, 8, 8), dtype=np.uint8), np.arange(20) % 3
    return images, labels, images[:10], np.where(np.arange(10) < 7, 1, labels[:10])


def one_class() -> tuple[np.ndarray, ...]:
    images, *_ = one_class_of_three()
    return images, np.zeros(20, dtype=int), images, np.zeros(20, dtype=int)


def test_the_chance_of_images_is_the_share_of_the_most_frequent_class() -> None:
    recipes = [
        RECIPE.model_dump(mode="json", exclude_none=True) | {"data": {"name": f"test_bench:{f.__name__}"}}
        for f in (one_class_of_three, one_class)
    ]
    found = [Recipe.parse(recipe).data.chance(ACCURACY) for recipe in recipes]
    assert found == [(one_class_of_three()[3].tolist().count(1) / 10, 10), None]


def test_arms_at_chance_are_named_in_one_line(tmp_path: Path) -> None:
    """A network that is not trained guesses; the level is that of the data, and is in the JSON."""
    still = RECIPE.replace({"training.learning_rate": 0.0, "training.weight_decay": 0.0})
    result = bench(still, ["default", "kaiming_uniform"], tmp_path, **ON_CPU)
    level = float(still.data.load().test_labels.bincount().max()) / still.data.test
    lines = [line for line in result.text().splitlines() if "chance" in line]
    where = f"({100 * level:.3g} %)"
    assert lines == [f"not distinguishable from chance {where}: default, kaiming_uniform (one-sided t-test at 5 %)"]
    written = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert [(row["chance"], row["chance_p"] > 0.05) for row in written] == [(level, True)] * 2
    assert "chance" not in BenchResult(result.runs, summarise(result.runs)).text()


@pytest.mark.parametrize("name", ["copy", "selective_copy", "associative_recall"])
def test_the_chance_of_a_task_is_that_of_a_constant_guess(name: str) -> None:
    data = {"name": name, "length": 4, "vocabulary": 10, "test": 400, "lengths": [1, 2]}
    task = Recipe.parse({**RECIPE.to_dict(), "network": {"type": "mamba", "width": 8, "depth": 1}, "data": data})
    for metric in task.data.metrics[:2]:
        level = task.data.chance(metric)
        assert level is not None
        found = TASKS[name](torch.Generator().manual_seed(0), 400, 4 * metric.length, 10)
        answer = found.targets[found.mask]
        assert len(answer) == level[1]
        shares = np.bincount(answer.numpy(), minlength=10) / len(answer)
        assert shares[shares > 0] == pytest.approx(level[0], abs=5 * np.sqrt(level[0] / level[1]))
    assert task.data.chance(task.data.metrics[-1]) is None


def test_the_title_of_the_pictures_tells_scale_from_structure() -> None:
    better = {"default": [0.50, 0.52, 0.49, 0.51], "a": [0.60, 0.62, 0.60, 0.61]}
    control = {"a (scale only)": [0.60, 0.61, 0.60, 0.62]}
    text = "a is 10.2 points better than default"
    assert finding(summarise(rows(better | control))) == f"{text}, not significantly more than its scale alone"
    more = {"a (scale only)": [0.70, 0.71, 0.70, 0.72]}
    assert finding(summarise(rows(better | more))) == f"{text}, less than its scale alone"
    better["a (scale only)"] = [0.52, 0.53, 0.52, 0.54]
    assert finding(summarise(rows(better))) == f"{text}, 8.0 of them beyond scale"
    two = [*rows(better, epochs=1), *rows({"default": [0.9, 0.91], "a": [0.9, 0.91]})]
    assert finding(summarise(two)).startswith("a is 10.2 points better than default after 1 epoch, 8.0 of")
