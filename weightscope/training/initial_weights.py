"""Initial weights of the networks of a tile, each from its own streams."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weightscope import init as initialisers
from weightscope._util.seeding import Purpose, torch_seed
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec


def initial_weights(
    recipe: Recipe, ids: Sequence[int], build: Callable[[], torch.nn.Module]
) -> tuple[np.ndarray, np.ndarray]:
    """The networks' starting points.

    Network k is built with torch's default initialisation under the seed of its INIT stream; then its
    initialiser (entry k mod number of [[init]] tables) runs with a generator on its STRUCTURE stream. Two
    recipes that differ in the initialiser alone so start from the same default weights: they are paired.

    Args:
        recipe: gives the root seed and the initialisers.
        ids: the networks' numbers, T of them.
        build: makes one plain network from torch's global generator.

    Returns:
        weights (T, D) float32 and seeds (T,) uint64.
    """
    root = recipe.population.seed
    functions = [resolve(config) for config in recipe.init]
    rows, seeds = [], []
    with torch.random.fork_rng(devices=[]):
        for k in ids:
            seeds.append(torch_seed(root, k, Purpose.INIT))
            torch.manual_seed(seeds[-1])
            module = build()
            generator = torch.Generator().manual_seed(torch_seed(root, k, Purpose.STRUCTURE))
            functions[k % len(functions)](module, generator=generator)
            rows.append(WeightSpec.of(module).pack(_arrays(module)))
    return np.stack(rows), np.array(seeds, dtype=np.uint64)


def resolve(config: InitConfig) -> Callable[..., Any]:
    """The initialiser of an [init] table: an artifact's, or registered ones joined by `+`.

    Raises:
        UsageError: if the name or a parameter does not exist.
        DataError: if the artifact cannot be read.
    """
    if config.artifact is not None:
        return initialisers.load_init(config.artifact)
    return initialisers.get(config.name, **config.parameters)


def _arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    names = set(WeightSpec.of(module).names)
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items() if name in names}
