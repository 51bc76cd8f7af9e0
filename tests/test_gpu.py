"""What a GPU runs: `torch.compile` in place of kernels in C, also without a GPU; populations there."""

import warnings

import numpy as np
import pytest
import tiny
import torch

from weightscope.analysis.across_networks import joint_covariance
from weightscope.data import load
from weightscope.recipe import Recipe
from weightscope.training import kernel_choice, spec_of, train_tile
from weightscope.training.collection import collect
from weightscope.training.engine import TileRun
from weightscope.training.kernel_choice import choose_kernels
from weightscope.training.kernels import functions

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

BASE = {
    "data": {"name": "digits", "train": 512, "test": 100, "augment": {"crop": 1, "flip": True}},
    "training": {"epochs": 2, "batch_size": 64, "learning_rate": 0.01, "kernels": "compiled"},
    "population": {"networks": 8, "tile": 4},
}
NETWORKS = {
    "convnext": {"type": "convnext", "width": 16, "depth": 2, "patch_size": 2, "expansion": 2},
    "vit": {"type": "vit", "width": 32, "depth": 2, "heads": 2, "patch_size": 2},
    "convmixer": {"type": "convmixer", "width": 32, "depth": 2, "kernel_size": 7, "patch_size": 2},
}


def recipe(name, **training):
    return Recipe.parse({**BASE, "network": NETWORKS[name], "training": {**BASE["training"], **training}})


def small(name):
    training = {"epochs": 2, "batch_size": 16, "learning_rate": 0.02, "mixup": 0.5, "label_smoothing": 0.1, "ema": 0.5}
    data = {"name": "digits", "train": 48, "test": 20, "augment": {"crop": 1, "flip": True, "cutout": 2}}
    population = {"networks": 4, "tile": 2}
    network = tiny.NETWORKS[name]
    return Recipe.parse({"network": network, "data": data, "training": training, "population": population})


@pytest.fixture
def without_gpu(monkeypatch):
    """The compiled step on a CPU, traced in one piece; code is generated in tests/torture/other_machines.py."""
    options, compiled = {"backend": "eager", "fullgraph": True}, torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function, **options))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.NETWORKS)
def test_a_compiled_step_trains_as_the_step_itself(name, without_gpu):
    """So nothing that changes from step to step or from epoch to epoch is outside of what the compiler sees."""
    plan, data = small(name), load("digits", train=48, test=20)
    here = torch.device("cpu")
    plain, compiled = (TileRun(plan, 0, data, here, kernels).train(None) for kernels in ("torch", "inductor"))
    tiny.assert_same_weights(spec_of(plan), compiled.weights, plain.weights, rtol=1e-4, atol=1e-5)
    tiny.assert_same_metrics(compiled.metrics, plain.metrics, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_compiled_is_compared_with_torchs(without_gpu, monkeypatch):
    """With a device that says that it is a GPU; a wrong one is found."""
    here = torch.device("cpu")
    monkeypatch.setattr(kernel_choice, "version", lambda package: "3.7.1")
    found = kernel_choice.check_kernels(small("convnext"), "inductor", here)
    assert found == "a training step and AdamW: equal to torch's within 1e-04"
    by_kernels = functions.by_kernels

    def wrong(function, kernels):
        compiled = by_kernels(function, kernels)
        return (lambda x: 1.001 * compiled(x)) if (kernels, function.__name__) == ("inductor", "forward") else compiled

    monkeypatch.setattr(kernel_choice, "by_kernels", wrong)
    with pytest.raises(kernel_choice.WrongKernel, match="logits differs"):
        kernel_choice.check_kernels(small("convnext"), "inductor", here)


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_tile_has_the_same_bits_whatever_was_trained_before(name, kernels, precision):
    plan = recipe(name, kernels=kernels, precision=precision)
    first = train_tile(plan, 1, device="cuda")
    train_tile(plan, 0, device="cuda")
    again = train_tile(plan, 1, device="cuda")
    assert again.weights.tobytes() == first.weights.tobytes()
    for metric, values in first.metrics.items():
        np.testing.assert_array_equal(again.metrics[metric], values)


@needs_gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpu_trains_as_a_cpu_does(name):
    """The first steps, before rounding errors grow."""
    plan = recipe(name, epochs=1).replace({"data.train": 128})
    assert choose_kernels(plan, torch.device("cuda")).kernels == "inductor"
    there = train_tile(plan, 0, device="cuda")
    here = train_tile(plan.replace({"training.kernels": "torch"}), 0, device="cpu")
    np.testing.assert_allclose(there.metrics["train_loss"], here.metrics["train_loss"], rtol=1e-3)
    assert abs(there.weights - here.weights).mean() <= 1e-2 * abs(here.weights).mean()


@needs_gpu
def test_a_population_chooses_its_tile_and_keeps_it(tmp_path):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"], "population": {"networks": 6}})
    population = collect(plan, tmp_path / "p.pop", device="cuda")
    assert population.recipe.population.tile == 8
    assert len(collect(plan, tmp_path / "p.pop", device="cuda", networks=10)) == 10
    (made_on,) = population.provenance()
    assert torch.cuda.get_device_name() in made_on


@needs_gpu
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_covariance_on_a_gpu_equals_numpy(tmp_path, precision):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"]}).replace({"training.epochs": 1})
    population = collect(plan, tmp_path / "p.pop", device="cuda", networks=32)
    found = joint_covariance(population, device="cuda", precision=precision)
    exact = np.cov(population.weights().astype(np.float64), rowvar=False)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    assert (abs(found.matrix - exact) <= (1e-5 if precision == "float32" else 1e-10) * scale.max()).all()
