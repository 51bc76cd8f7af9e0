"""How many networks a tile holds where the recipe does not say."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from weightscope.data import load
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe import Recipe
from weightscope.training import measuring, request
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
        assert measuring.largest_tile(1e12, 0, 1, networks) == tile
    assert measuring.largest_tile(100, 20, 5, 10**6) == 16  # 20 + 16 * 5 = 100
    assert measuring.largest_tile(99, 20, 5, 10**6) == 8
    with pytest.raises(UsageError, match=r"one network takes 2 MiB to train, and 1 MiB"):
        measuring.largest_tile(1 << 20, 1 << 20, 1 << 20, 1)


@pytest.mark.parametrize(("kernels", "tile"), [("torch", 128), ("inductor", 64)])
def test_on_a_gpu_it_follows_from_two_small_tiles(kernels, tile, monkeypatch):
    """40 MB and 3 MB for each network; of 1 GB free, 80 % are used. A graph and the evaluation take both at once."""
    data = load("digits", train=64, test=20)
    runs = []

    class Run(TileRun):
        def __init__(self, recipe, tile, data, device, kernels):
            super().__init__(recipe, tile, data, torch.device("cpu"), "torch")
            runs.append((recipe.population.tile, len(data.train_images)))

    monkeypatch.setattr(measuring, "TileRun", Run)
    monkeypatch.setattr(measuring, "current", lambda device: nullcontext())
    monkeypatch.setattr(measuring, "choose_kernels", lambda *_: SimpleNamespace(kernels=kernels))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40e6 + 3e6 * runs[-1][0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    assert measuring.choose_tile(RECIPE.replace({"population.networks": 10**4}), data, torch.device("cuda")) == tile
    assert runs == [(1, 32), (4, 32), (8, 32)]  # two batches each, the first to have what is allocated once
    assert measuring.choose_tile(RECIPE, data, torch.device("cpu")) == 32


def test_a_population_keeps_the_tile_that_it_was_begun_with(tmp_path, monkeypatch):
    for chosen, networks in ((2, 3), (16, 5)):
        monkeypatch.setattr(request, "choose_tile", lambda *_, chosen=chosen: chosen)
        population = collect(RECIPE, tmp_path / "p.pop", device="cpu", networks=networks)
        assert (len(population), population.recipe.population.tile) == (networks, 2)
    with pytest.raises(RecipeError, match=r"population\.tile: 2 -> 4"):
        collect(RECIPE.replace({"population.tile": 4}), tmp_path / "p.pop", device="cpu")
