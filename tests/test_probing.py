"""Linear probes: equal to torch's own layers, features of frozen networks, paired arms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from pictures import PLAIN
from safetensors.torch import save_file
from torch import nn

from weightscope.benchmarking import linear_probe, probing
from weightscope.benchmarking.probing import _classified, features
from weightscope.cli import cli
from weightscope.data import load
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training import train_tile

pytestmark = pytest.mark.usefixtures("trained_here")

SIZES = {"network.width": 8, "data.train": 256, "data.test": 100, "training.batch_size": 64, "population.tile": 2}
RECIPE = Recipe.parse(PLAIN).replace({**SIZES, "training.epochs": 2})
OPTIONS = {"seeds": 3, "device": "cpu"}


def test_the_classifier_minimises_the_penalised_loss() -> None:
    """The sum of losses plus |W|^2 / 2, minimised by torch; a class without training images is never right."""
    noise = np.random.default_rng(0)
    labels, wanted = noise.integers(3, size=300), noise.integers(3, size=200)
    means = noise.normal(size=(3, 5))
    train, test = (4 * (means[each] + noise.normal(size=(len(each), 5))) + 2 for each in (labels, wanted))
    found = _classified(train, labels, test, wanted)
    x, y = (torch.from_numpy((each - train.mean(0)) / train.std(0)) for each in (train, test))
    layer = nn.Linear(5, 3, dtype=torch.float64)
    optimiser = torch.optim.LBFGS(
        layer.parameters(), max_iter=1000, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(layer(x), torch.from_numpy(labels), reduction="sum") + layer.weight.square().sum() / 2
        value.backward()
        return value

    optimiser.step(loss)
    expected = layer(y)
    assert found["test_loss"] == pytest.approx(F.cross_entropy(expected, torch.from_numpy(wanted)).item(), rel=1e-3)
    assert np.mean(found["hits"] == (expected.argmax(1).numpy() == wanted)) > 0.98
    assert found["test_accuracy"] == np.mean(found["hits"])
    assert 0.5 < found["test_accuracy"] < 1
    assert _classified(train, labels, test, np.full(200, 3))["test_accuracy"] == 0
    lost = _classified(np.full_like(train, np.nan), labels, test, wanted)
    assert (lost["diverged"], any(lost["hits"]), np.isnan(lost["test_loss"])) == (True, False, True)


def test_features_are_the_inputs_of_the_classifier_in_evaluation_mode() -> None:
    plan = RECIPE.replace({"network": {"type": "convmixer", "width": 8, "depth": 2, "kernel_size": 3, "patch_size": 2}})
    data, network = load("digits", train=40, test=20), build_for(plan)
    spec = WeightSpec.of(network)
    row = np.random.default_rng(0).uniform(0.1, 0.5, spec.size).astype(np.float32)
    found = features(network, row, data.train_images, data)
    once = features(network, row, data.train_images[:3], data)
    assert found.shape == (40, 8)
    np.testing.assert_allclose(found[:3], once, rtol=1e-5)  # no batch statistics
    pixels = (data.train_images.float() / 255 - data.mean[:, None, None]) / data.std[:, None, None]
    torch.testing.assert_close(
        network.eval().head(torch.from_numpy(found).float()), network(pixels), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_trained_features_beat_initial_ones_and_arms_are_paired(tmp_path: Path) -> None:
    plan = RECIPE.replace({"data.train": 500})
    tile = train_tile(plan.replace({"training.epochs": 10, "training.batch_size": 50}), 0, device="cpu")
    weights = WeightSpec.of(build_for(plan)).unpack(tile.weights[0])
    file = tmp_path / "trained.safetensors"
    save_file({name: torch.from_numpy(value).clone() for name, value in weights.items()}, file)
    arms = ["default", f'transfer(source="{file}")', "kaiming_uniform(slope=0.0)"]
    result = linear_probe(plan, arms, tmp_path / "out", **OPTIONS)
    default, trained, other = result.arms
    assert (default["n"], default["epochs"]) == (3, 0)
    assert trained["difference"] > 0.1
    assert other["difference"] != 0
    assert len({run["accuracy"] for run in result.runs if run["init"] == "default"}) > 1, "seeds differ"
    assert json.loads((tmp_path / "out/results.json").read_text())["summary"][0]["init"] == "default"


@pytest.mark.slow
def test_the_arms_of_the_papers_table(tmp_path: Path) -> None:
    """Random, uniform, first, random subset and inconsistent, from one teacher, as one command."""
    large = build_for(RECIPE.replace({"network.width": 16}))
    save_file(large.state_dict(), tmp_path / "large.safetensors")
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(RECIPE.to_dict()))
    rules = ("uniform", "consecutive", "random", "random-inconsistent")
    inits = [f'select_weights(teacher="{tmp_path / "large.safetensors"}", elements="{rule}")' for rule in rules]
    given = [text for init in ("default", *inits) for text in ("--init", init)]
    arguments = ["bench", str(tmp_path / "recipe.toml"), *given, "--probe", "--seeds", "2", "-o"]
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "out"), "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    arms = json.loads((tmp_path / "out/results.json").read_text())["summary"]
    assert len({arm["mean"] for arm in arms}) > 1
    assert [arm["init"].split(" ")[0] for arm in arms] == ["default", *["select_weights"] * 4]
    assert (tmp_path / "out/table.md").exists()
    with pytest.raises(UsageError, match="--plan cannot be combined with --probe"):
        CliRunner().invoke(cli, [*arguments, str(tmp_path / "out"), "--plan"], catch_exceptions=False)


def test_a_probe_resumes_without_repeating_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that a result depends on is compared; seeds are added."""
    large = tmp_path / "large.safetensors"
    save_file(build_for(RECIPE.replace({"network.width": 16})).state_dict(), large)
    arms, out, calls = ["default", f'select_weights(teacher="{large}")'], tmp_path / "out", list[int]()

    def stopped(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return _classified(*given)

    with monkeypatch.context() as patch:
        patch.setattr(probing, "_classified", stopped)
        with pytest.raises(KeyboardInterrupt):
            linear_probe(RECIPE, arms, out, **OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in out.glob("probes/*/[0-9]-*.json")}
    assert len(before) == 3, "of the first arm"
    assert not (out / "results.json").exists()
    resumed, whole = (linear_probe(RECIPE, arms, folder, **OPTIONS) for folder in (out, tmp_path / "whole"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (resumed.runs, resumed.arms) == (whole.runs, whole.arms), "to the last bit"
    inner, outer = resumed.arms[1]["difference_ci95"], resumed.arms[1]["difference_ci_images"]
    assert outer[0] <= inner[0] < inner[1] <= outer[1]
    accuracies = [run["accuracy"] for run in resumed.runs if run["init"] == "default"]
    np.testing.assert_allclose(resumed.hits["{}", 0, "default"].mean(1), accuracies)
    stored = set(out.glob("probes/*/*.json"))
    linear_probe(RECIPE.replace({"training.learning_rate": 0.5}), arms, out, seeds=4, device="cpu")  # is not used
    assert len(set(out.glob("probes/*/*.json")) - stored) == 2, "a seed of each arm"
    for changes in ({"data.train": 200}, {"network.width": 4}):
        with pytest.raises(UsageError, match=r"holds the results of another benchmark \((data.train|network.width): "):
            linear_probe(RECIPE.replace(changes), arms, out, seeds=4, device="cpu")
    stored = set(out.glob("probes/*/*.json"))
    save_file(build_for(RECIPE.replace({"network.width": 16})).state_dict(), large)
    linear_probe(RECIPE, arms, out, seeds=4, device="cpu")
    assert len(set(out.glob("probes/*/*.json")) - stored) == 4, "of the arm whose teacher is another one"


def test_axes_that_a_probe_would_ignore_and_folders_of_benchmarks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="frozen: a linear probe trains no tensor"):
        linear_probe(RECIPE, ["default"], tmp_path, frozen="*", **OPTIONS)
    with pytest.raises(UsageError, match="learning_rate: a linear probe does not train the network"):
        linear_probe(RECIPE, ["default"], tmp_path, vary={"training.learning_rate": [0.1]})
    table = {"init": ["default"], "vary": {"distillation.alpha": [0, 1], "network.kernel_size": [3, 5]}, "epochs": [9]}
    recipe = Recipe.parse({**RECIPE.to_dict(), "distillation": {"teacher": "none.pop::0", "alpha": 0}, "bench": table})
    found = linear_probe(recipe, (), tmp_path / "table", **OPTIONS)
    assert [(arm["cell"], arm["epochs"]) for arm in found.arms] == [({"network.kernel_size": k}, 0) for k in (3, 5)]
    (tmp_path / "bench" / "runs").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a benchmark of trained networks"):
        linear_probe(RECIPE, ["default"], tmp_path / "bench")
    (tmp_path / "a.pop").mkdir()
    with pytest.raises(UsageError, match=r"expected a new folder .* found a population"):
        linear_probe(RECIPE, ["default"], tmp_path / "a.pop")


def test_a_probe_of_sequences_is_refused_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.name: expected images for a linear probe, found copy; .*--frozen"):
        linear_probe("copying-mamba-small", ["default"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
