"""Initial weights of the networks of a tile, each from its own random streams."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weightscope import init as initialisers
from weightscope._util.seeding import Purpose, kept_generators, seed_generators, torch_seed
from weightscope.errors import UsageError
from weightscope.init.scale_control import ScaleControl
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec


def initial_weights(
    recipe: Recipe, ids: Sequence[int], build: Callable[[], torch.nn.Module]
) -> tuple[np.ndarray, np.ndarray]:
    """The initial weights of some networks.

    Network k is built with torch's default initialisation under the seed of its INIT stream; then its initialiser
    (entry k mod number of [[init]] tables) is called with a generator on its STRUCTURE stream. So two recipes that
    differ only in the initialiser start from the same default weights: their networks are paired.

    Args:
        recipe: provides the root seed and the initialisers.
        ids: the indices of T networks.
        build: makes one network from torch's global generator.

    Returns:
        weights (T, D) float32 and seeds (T,) uint64.

    Raises:
        UsageError: if an initialiser fails, or changes the network's tensors.
    """
    root = recipe.population.seed

    def draw(k: int) -> tuple[torch.nn.Module, torch.Generator]:
        seed_generators(torch_seed(root, k, Purpose.INIT))
        return build(), torch.Generator().manual_seed(torch_seed(root, k, Purpose.STRUCTURE))

    rows, seeds = [], []
    with torch.random.fork_rng(devices=[]), kept_generators():
        functions = [_controlled(config, draw) for config in recipe.init]
        for k in ids:
            seeds.append(torch_seed(root, k, Purpose.INIT))
            module, generator = draw(k)
            spec = WeightSpec.of(module)
            initialised = functions[k % len(functions)](module, generator=generator)
            module = initialised if isinstance(initialised, torch.nn.Module) else module
            if lines := spec.differences(WeightSpec.of(module)):
                name = recipe.init[k % len(functions)].name
                raise UsageError(f"{name}: expected an initialiser to keep names and shapes, found {'; '.join(lines)}")
            rows.append(spec.pack(_arrays(module)))
    return np.stack(rows), np.array(seeds, dtype=np.uint64)


def _controlled(
    config: InitConfig, draw: Callable[[int], tuple[torch.nn.Module, torch.Generator]]
) -> Callable[..., Any]:
    """The initialiser of an [init] table, or its control, whose moments are estimated from the population's networks.

    These are always networks 0 to 31, so that network k does not depend on how many there are.
    """
    function = resolve(config)
    return function if config.control is None else ScaleControl.of(function, draw)


def resolve(config: InitConfig) -> Callable[..., Any]:
    """The initialiser of an [init] table: an artifact's, then the named ones on top, several joined by `+`.

    Raises:
        UsageError: if the name or a parameter is unknown.
        DataError: if the artifact cannot be read.
    """
    if config.artifact is None:
        return initialisers.get(config.name, **config.parameters)
    fitted = initialisers.load_init(config.artifact)
    if config.name == "default" and not config.parameters:
        return fitted
    return initialisers.compose(fitted, initialisers.get(config.name, **config.parameters))


def _arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    names = set(WeightSpec.of(module).names)
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items() if name in names}
