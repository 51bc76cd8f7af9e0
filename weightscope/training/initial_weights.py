"""Initial weights of the networks of a tile, each from its own random streams."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weightscope import init as initialisers
from weightscope._util.seeding import Purpose, kept_generators, seed_generators, torch_seed
from weightscope.errors import AnatomyError, DataError, RecipeError, SpecError, UsageError
from weightscope.init.scale_control import ScaleControl
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec


def initial_weights(
    recipe: Recipe, ids: Sequence[int], build: Callable[[], torch.nn.Module]
) -> tuple[np.ndarray, np.ndarray]:
    """The initial weights (T, D) float32 of networks `ids`, and their seeds (T,) uint64.

    Network k is built with torch's default initialisation under the seed of its INIT stream; then its initialiser
    (entry k mod number of [[init]] tables) is called with a generator on its STRUCTURE stream. So two recipes that
    differ only in the initialiser start from the same default weights: their networks are paired.
    """
    draw = _default_start(recipe, build)
    rows, seeds = [], []
    with torch.random.fork_rng(devices=[]), kept_generators():
        functions = [_controlled(config, draw) for config in recipe.init]
        for k in ids:
            i = k % len(functions)
            module = _initialised(recipe.init[i].name, functions[i], *draw(k))
            seeds.append(torch_seed(recipe.population.seed, k, Purpose.INIT))
            rows.append(WeightSpec.of(module).pack(_arrays(module)))
    return np.stack(rows), np.array(seeds, dtype=np.uint64)


def check_initialisers(recipe: Recipe, build: Callable[[], torch.nn.Module]) -> None:
    """Apply each initialiser to one network."""
    draw = _default_start(recipe, build)
    for i, config in enumerate(recipe.init):
        if config.name == "default" and config.artifact is None:
            continue
        where = f"init{f'.{i}' if len(recipe.init) > 1 else ''} ({config.artifact or config.name})"
        try:
            with torch.random.fork_rng(devices=[]), kept_generators():
                _initialised(config.name, resolve(config), *draw(i))
        except (AnatomyError, SpecError, UsageError) as error:
            raise RecipeError(f"{where}: {error}") from error
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise RecipeError(f"{where}: it raised {type(error).__name__}: {error}") from error


def _default_start(
    recipe: Recipe, build: Callable[[], torch.nn.Module]
) -> Callable[[int], tuple[torch.nn.Module, torch.Generator]]:
    """Network k with its default weights, and the generator that its initialiser draws from, for any k."""
    root = recipe.population.seed

    def draw(k: int) -> tuple[torch.nn.Module, torch.Generator]:
        seed_generators(torch_seed(root, k, Purpose.INIT))
        return build(), torch.Generator().manual_seed(torch_seed(root, k, Purpose.STRUCTURE))

    return draw


def _initialised(
    name: str, function: Callable[..., Any], module: torch.nn.Module, generator: torch.Generator
) -> torch.nn.Module:
    """The network after its initialiser, its tensors compared with those before."""
    spec = WeightSpec.of(module)
    found = function(module, generator=generator)
    module = found if isinstance(found, torch.nn.Module) else module
    if lines := spec.differences(WeightSpec.of(module)):
        raise UsageError(f"{name}: expected an initialiser to keep names and shapes, found {'; '.join(lines)}")
    return module


def _controlled(
    config: InitConfig, draw: Callable[[int], tuple[torch.nn.Module, torch.Generator]]
) -> Callable[..., Any]:
    """The initialiser of an [init] table, or its control, whose moments are estimated from the population's networks.

    These are always networks 0 to 31, so that network k does not depend on how many there are.
    """
    function = resolve(config)
    return function if config.control is None else ScaleControl.of(function, draw)


def resolve(config: InitConfig) -> Callable[..., Any]:
    """The initialiser of an [init] table: an artifact's, then the named ones on top, several joined by `+`."""
    if config.artifact is None:
        return initialisers.get(config.name, **config.parameters)
    fitted = initialisers.load_init(config.artifact)
    if config.name == "default" and not config.parameters:
        return fitted
    return initialisers.compose(fitted, initialisers.get(config.name, **config.parameters))


def _arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    names = set(WeightSpec.of(module).names)
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items() if name in names}
