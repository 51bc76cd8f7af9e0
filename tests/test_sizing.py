"""How many networks a tile holds where the recipe does not say."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from weightscope.data import load
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.training import devices, request
from weightscope.training.collection import collect
from weightscope.training.engine import TileRun

RECIPE = Recipe.parse(
    {
        "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3},
        "data": {"name": "digits", "train": 64, "test": 20},
        "training": {"epochs": 1, "batch_size": 16},
        "population": {"networks": 3},
    }
)


def test_it_is_the_largest_power_of_two_that_fits():
    for networks, tile in ((1, 1), (3, 4), (64, 64), (65, 128), (10**6, 1024)):
        assert request.largest_tile(1e12, 0, 1, networks) == tile
    assert request.largest_tile(100, 20, 5, 10**6) == 16  # 20 + 16 * 5 = 100
    assert request.largest_tile(99, 20, 5, 10**6) == 8
    with pytest.raises(UsageError, match=r"one network takes 2 MiB to train, and 1 MiB"):
        request.largest_tile(1 << 20, 1 << 20, 1 << 20, 1)


@pytest.mark.parametrize(("kernels", "tile"), [("torch", 128), ("inductor", 64)])
def test_on_a_gpu_it_follows_from_two_small_tiles(kernels, tile, monkeypatch):
    """40 MB and 3 MB for each network; of 1 GB free, 80 % are used. A graph and the evaluation take both at once."""
    data = load("digits", train=64, test=20)
    runs = []

    class Run(TileRun):
        def __init__(self, recipe, tile, data, device, kernels):
            super().__init__(recipe, tile, data, torch.device("cpu"), "torch")
            runs.append((recipe.population.tile, len(data.train_images)))

    monkeypatch.setattr(request, "TileRun", Run)
    monkeypatch.setattr(request, "current", lambda device: nullcontext())
    monkeypatch.setattr(request, "choose_kernels", lambda *_: SimpleNamespace(kernels=kernels))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40e6 + 3e6 * runs[-1][0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    assert request.choose_tile(RECIPE.replace({"population.networks": 10**4}), data, torch.device("cuda")) == tile
    assert runs == [(1, 32), (4, 32), (8, 32)]  # two batches each, the first to have what is allocated once
    assert request.choose_tile(RECIPE, data, torch.device("cpu")) == 32


@pytest.mark.parametrize(
    "network", [RECIPE.network.model_dump() | {"width": 512}, {"type": "mamba", "width": 512, "depth": 2}]
)
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_recipe_that_cannot_fit_into_the_memory_is_refused_before_anything_is_allocated(
    network, ema, monkeypatch, tmp_path
):
    """The memory is a byte less than, or as much as, what is needed, counted by hand."""
    data = (
        {"name": "copy", "length": 3, "vocabulary": 6, "train": 4} if network["type"] == "mamba" else {"name": "digits"}
    )
    training = {"epochs": 1, "batch_size": 1, "ema": ema}
    recipe = Recipe.parse({"network": network, "data": data, "training": training, "population": {"networks": 40}})
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build_for(recipe).parameters())
    needed = 4 * 32 * size * (5 if ema else 4)
    monkeypatch.setattr(devices, "available_memory", lambda: needed - 1)
    with pytest.raises(UsageError, match=rf"GiB for weights, .* of 32 networks with {size:,} weights\b.*GiB of memory"):
        collect(recipe, tmp_path / "a.pop", device="cpu")
    assert not (tmp_path / "a.pop").exists()
    monkeypatch.setattr(devices, "available_memory", lambda: needed)
    devices.check_memory(recipe, torch.device("cpu"))


def test_a_population_keeps_the_tile_that_it_was_begun_with(tmp_path, monkeypatch):
    for chosen, networks in ((2, 3), (16, 5)):
        monkeypatch.setattr(request, "choose_tile", lambda *_, chosen=chosen: chosen)
        population = collect(RECIPE, tmp_path / "p.pop", workers=1, device="cpu", networks=networks)
        assert (len(population), population.recipe.population.tile) == (networks, 2)
    population = collect(RECIPE.replace({"population.tile": 4}), tmp_path / "p.pop", workers=1, device="cpu")
    assert population.recipe.population.tile == 2
