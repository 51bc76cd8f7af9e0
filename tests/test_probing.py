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
from weightscope.benchmarking.probing import Probe, _features, _heads
from weightscope.cli import cli
from weightscope.data import load
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training import train_tile

SIZES = {"network.width": 8, "data.train": 256, "data.test": 100, "training.batch_size": 64, "population.tile": 2}
RECIPE = Recipe.parse(PLAIN).replace({**SIZES, "training.epochs": 2})
OPTIONS = {"seeds": 3, "device": "cpu"}


def lars(parameters: list[nn.Parameter], momenta: list[torch.Tensor], rate: float) -> None:
    """One tensor at a time, as published."""
    for p, momentum in zip(parameters, momenta, strict=True):
        step = p.grad
        if p.ndim > 1 and p.norm() > 0 and step.norm() > 0:
            step = step * (0.001 * p.norm() / step.norm())
        momentum.copy_(0.9 * momentum + step)
        p.data.sub_(rate * momentum)


def test_heads_equal_torchs_layers_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 30.0, 0.1])[:, None, None]
    features, labels = (
        torch.randn(3, 40, 6, generator=generator) * scale + 2,
        torch.randint(4, (3, 40), generator=generator),
    )
    probe = Probe(6, 4, [5, 6, 7])
    plain = [nn.Sequential(nn.BatchNorm1d(6, affine=False, eps=1e-6), nn.Linear(6, 4)) for _ in range(3)]
    for t, network in enumerate(plain):
        network[1].weight.data.copy_(probe.weights[t])
        network[1].bias.data.zero_()
    momenta = [[torch.zeros_like(p) for p in network.parameters()] for network in plain]
    for step in range(30):
        part = slice(10 * (step % 4), 10 * (step % 4) + 10)
        probe.step(features[:, part], labels[:, part], 0.5)
        for t, network in enumerate(plain):
            network.zero_grad()
            F.cross_entropy(network(features[t, part]), labels[t, part]).backward()
            lars(list(network.parameters()), momenta[t], 0.5)
    for t, network in enumerate(plain):
        torch.testing.assert_close(probe.weights[t], network[1].weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(probe.biases[t], network[1].bias, rtol=1e-4, atol=1e-6)
        expected = network.eval()(features[t])
        torch.testing.assert_close(probe.logits(features)[t], expected, rtol=1e-4, atol=1e-5)
    loss, right = probe.evaluate(features, labels[0])
    assert loss[0] == pytest.approx(F.cross_entropy(plain[0](features[0]), labels[0]).item(), rel=1e-4)
    np.testing.assert_array_equal(right[0], plain[0](features[0]).argmax(1) == labels[0])


def test_features_are_the_inputs_of_the_classifier_in_evaluation_mode() -> None:
    plan = RECIPE.replace({"network": {"type": "convmixer", "width": 8, "depth": 2, "kernel_size": 3, "patch_size": 2}})
    data, network = load("digits", train=40, test=20), build_for(plan)
    spec = WeightSpec.of(network)
    row = np.random.default_rng(0).uniform(0.1, 0.5, spec.size).astype(np.float32)
    found = _features(network, row, data.train_images, data)
    once = _features(network, row, data.train_images[:3], data)
    assert found.shape == (40, 8)
    torch.testing.assert_close(found[:3], once)  # no batch statistics
    pixels = (data.train_images.float() / 255 - data.mean[:, None, None]) / data.std[:, None, None]
    torch.testing.assert_close(network.eval().head(found), network(pixels), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_trained_features_beat_initial_ones_and_arms_are_paired(tmp_path: Path) -> None:
    plan = RECIPE.replace({"data.train": 1000, "training.batch_size": 500})
    tile = train_tile(plan.replace({"training.epochs": 10, "training.batch_size": 50}), 0, device="cpu")
    weights = WeightSpec.of(build_for(plan)).unpack(tile.weights[0])
    file = tmp_path / "trained.safetensors"
    save_file({name: torch.from_numpy(value).clone() for name, value in weights.items()}, file)
    arms = ["default", f'transfer(source="{file}")', "kaiming_uniform(slope=0.0)"]
    result = linear_probe(plan, arms, tmp_path / "out", epochs=[600], **OPTIONS)
    default, trained, other = result.arms
    assert (default["n"], default["epochs"]) == (3, 600)
    assert trained["difference"] > 0.1
    assert other["difference"] != 0
    assert len({run["accuracy"] for run in result.runs if run["init"] == "default"}) > 1, "seeds differ"
    assert len(result.runs[0]["curve"]) == 600
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
    arguments = ["bench", str(tmp_path / "recipe.toml"), *given, "--probe", "--epochs", "2", "--seeds", "2", "-o"]
    done = CliRunner().invoke(cli, [*arguments, str(tmp_path / "out"), "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    arms = json.loads((tmp_path / "out/results.json").read_text())["summary"]
    assert len({arm["mean"] for arm in arms}) > 1
    assert [arm["init"].split(" ")[0] for arm in arms] == ["default", *["select_weights"] * 4]
    assert (tmp_path / "out/table.md").exists()
    with pytest.raises(UsageError, match="--plan cannot be combined with --probe"):
        CliRunner().invoke(cli, [*arguments, str(tmp_path / "out"), "--plan"], catch_exceptions=False)


def test_a_probe_resumes_without_repeating_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms, out, given = ["default", "kaiming_uniform", "mimetic_mlp"], tmp_path / "out", {"epochs": [3], **OPTIONS}
    calls: list[int] = []

    def stopped(recipe: Recipe, ids: list[int], *rest: Any) -> Any:
        calls.append(len(ids))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return _heads(recipe, ids, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(probing, "_heads", stopped)
        with pytest.raises(KeyboardInterrupt):
            linear_probe(RECIPE, arms, out, **given)
    before = {path: path.stat().st_mtime_ns for path in out.glob("probes/*/[0-9]-*.json")}
    assert len(before) == 3, "of the first arm"
    assert not (out / "results.json").exists()
    resumed, whole = (linear_probe(RECIPE, arms, folder, **given) for folder in (out, tmp_path / "whole"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(resumed.runs) == 9
    assert (resumed.runs, resumed.arms) == (whole.runs, whole.arms), "to the last bit"
    for arm in resumed.arms[1:]:
        inner, outer = arm["difference_ci95"], arm["difference_ci_images"]
        assert outer[0] <= inner[0] < inner[1] <= outer[1]
        accuracies = [run["accuracy"] for run in resumed.runs if run["init"] == arm["init"]]
        np.testing.assert_allclose(resumed.hits["{}", 3, arm["init"]].mean(1), accuracies)


@pytest.mark.slow
def test_what_is_on_disk_is_of_the_same_probe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Anything that a result depends on is compared; damaged files are made again; seeds are added."""
    large = tmp_path / "large.safetensors"
    save_file(build_for(RECIPE.replace({"network.width": 16})).state_dict(), large)
    arms, out = ["default", f'select_weights(teacher="{large}")'], tmp_path / "out"
    given = {"epochs": [2], "device": "cpu"}
    first = linear_probe(RECIPE, arms, out, seeds=2, **given)
    (damaged,) = out.glob("probes/default*/1-*.json")
    kept = damaged.read_text()
    for text in ("{", "[]", '{"test_accuracy": "no"}'):
        damaged.write_text(text)
        more = linear_probe(RECIPE, arms, out, seeds=3, **given)
        assert json.loads(damaged.read_text()) == json.loads(kept)
        assert f"{damaged}: damaged; the network is probed again" in caplog.text
        assert [run for run in more.runs if run["seed"] < 2] == first.runs
    linear_probe(RECIPE.replace({"training.learning_rate": 0.5}), arms, out, seeds=3, **given)  # is not used
    for changes in ({"training.batch_size": 32}, {"data.train": 200}, {"network.width": 4}):
        with pytest.raises(UsageError, match=r"holds the results of another benchmark \(another"):
            linear_probe(RECIPE.replace(changes), arms, out, seeds=3, **given)
    stored = set(out.glob("probes/*/*.json"))
    save_file(build_for(RECIPE.replace({"network.width": 16})).state_dict(), large)
    linear_probe(RECIPE, arms, out, seeds=3, **given)
    assert len(set(out.glob("probes/*/*.json")) - stored) == 3, "of the arm whose teacher is another one"


def test_axes_that_a_probe_would_ignore_and_folders_of_benchmarks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="frozen: a linear probe trains no tensor"):
        linear_probe(RECIPE, ["default"], tmp_path, frozen="*", **OPTIONS)
    with pytest.raises(UsageError, match="learning_rate: a linear probe does not train the network"):
        linear_probe(RECIPE, ["default"], tmp_path, vary={"training.learning_rate": [0.1, 0.2]})
    table = {"init": ["default"], "vary": {"distillation.alpha": [0, 1], "network.kernel_size": [3, 5]}}
    recipe = Recipe.parse({**RECIPE.to_dict(), "distillation": {"teacher": "none.pop::0", "alpha": 0}, "bench": table})
    for given in ({}, {"vary": {"distillation.alpha": [0], "network.kernel_size": "3,5"}}):
        found = linear_probe(recipe, (), tmp_path / f"table-{len(given)}", epochs=[1], **OPTIONS, **given)
        assert [arm["cell"]["network.kernel_size"] for arm in found.arms] == [3, 5], "no arms that are the same"
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
