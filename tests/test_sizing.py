"""How many networks a tile holds where the recipe does not say."""

from contextlib import nullcontext

import pytest
import torch

from weightscope.data import load
from weightscope.errors import RecipeError, UsageError
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training import tile_size
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
        assert tile_size.largest_tile(1e12, 0, 1, networks) == tile
    assert tile_size.largest_tile(100, 20, 5, 10**6) == 16  # 20 + 16 * 5 = 100
    assert tile_size.largest_tile(99, 20, 5, 10**6) == 8
    with pytest.raises(UsageError, match=r"one network takes 2 MiB to train, and 1 MiB"):
        tile_size.largest_tile(1 << 20, 1 << 20, 1 << 20, 1)


@pytest.mark.parametrize(("kernels", "tile"), [("torch", 128), ("inductor", 64)])
def test_on_a_gpu_it_follows_from_two_small_tiles(kernels, tile, monkeypatch):
    """40 MB and 3 MB for each network; of 1 GB free, 80 % are used. A graph and the evaluation take both at once."""
    data = load("digits", train=64, test=20)
    runs = []

    class Run(TileRun):
        def __init__(self, recipe, tile, data, device):
            super().__init__(recipe, tile, data, torch.device("cpu"))
            runs.append((recipe.population.tile, len(data.train_images)))
            self.nets.kernels = kernels  # for the choice alone

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(tile_size, "TileRun", Run)
    monkeypatch.setattr(tile_size, "current", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40e6 + 3e6 * runs[-1][0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    assert tile_size.choose_tile(RECIPE.replace({"population.networks": 10**4}), data, torch.device("cuda")) == tile
    assert runs == [(1, 32), (4, 32), (8, 32)]  # two batches each, the first to have what is allocated once
    assert tile_size.choose_tile(RECIPE, data, torch.device("cpu")) == 32


def test_a_population_keeps_the_tile_that_it_was_begun_with(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_size, "choose_tile", lambda *_: 2)
    collect(RECIPE, tmp_path / "p.pop", device="cpu")
    assert Population(tmp_path / "p.pop").recipe.population.tile == 2
    monkeypatch.setattr(tile_size, "choose_tile", lambda *_: 16)
    grown = collect(RECIPE, tmp_path / "p.pop", device="cpu", networks=5)
    assert (len(grown), grown.recipe.population.tile) == (5, 2)
    with pytest.raises(RecipeError, match=r"population\.tile: 2 -> 4"):
        collect(RECIPE.replace({"population.tile": 4}), tmp_path / "p.pop", device="cpu")
