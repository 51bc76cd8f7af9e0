"""What only a GPU can show: populations, the tile rule and CUDA graphs there."""

import numpy as np
import pytest
import torch

from weightscope.analysis.across_networks import joint_covariance
from weightscope.data import load
from weightscope.recipe import Recipe
from weightscope.training import train_tile
from weightscope.training.collection import collect
from weightscope.training.engine import TileRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_computes_what_its_step_does(name, precision, monkeypatch):
    data, plan = load("digits", train=512, test=100), recipe(name, precision=precision)
    by_graph = TileRun(plan, 0, data, torch.device("cuda")).train(None)
    monkeypatch.setattr(TileRun, "_capture", lambda run: type("Step", (), {"replay": staticmethod(run._step)}))
    step_by_step = TileRun(plan, 0, data, torch.device("cuda")).train(None)
    assert step_by_step.weights.tobytes() == by_graph.weights.tobytes()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpu_trains_as_a_cpu_does(name):
    """The first steps, before rounding errors grow."""
    plan = recipe(name, epochs=1).replace({"data.train": 128})
    there = train_tile(plan, 0, device="cuda")
    here = train_tile(plan.replace({"training.kernels": "torch"}), 0, device="cpu")
    np.testing.assert_allclose(there.metrics["train_loss"], here.metrics["train_loss"], rtol=1e-3)
    assert abs(there.weights - here.weights).mean() <= 1e-2 * abs(here.weights).mean()


def test_a_population_chooses_its_tile_and_keeps_it(tmp_path):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"], "population": {"networks": 6}})
    population = collect(plan, tmp_path / "p.pop", device="cuda")
    assert population.recipe.population.tile == 8
    assert len(collect(plan, tmp_path / "p.pop", device="cuda", networks=10)) == 10
    (made_on,) = population.provenance()
    assert torch.cuda.get_device_name() in made_on


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_covariance_on_a_gpu_equals_numpy(tmp_path, precision):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"]}).replace({"training.epochs": 1})
    population = collect(plan, tmp_path / "p.pop", device="cuda", networks=32)
    found = joint_covariance(population, device="cuda", precision=precision)
    exact = np.cov(population.weights().astype(np.float64), rowvar=False)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    assert (abs(found.matrix - exact) <= (1e-5 if precision == "float32" else 1e-10) * scale.max()).all()
