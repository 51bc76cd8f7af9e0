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

_Start = tuple[torch.nn.Module, torch.Generator]


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
        functions = [
            # a control's moments are always those of networks 0 to 31: k does not depend on how many there are
            ScaleControl.of(resolve(config), draw) if config.control else resolve(config)
            for config in recipe.init
        ]
        for k in ids:
            i = k % len(functions)
            module = _initialised(recipe.init[i].name, functions[i], *draw(k))
            seeds.append(torch_seed(recipe.population.seed, k, Purpose.INIT))
            spec, state = WeightSpec.of(module), module.state_dict()
            rows.append(spec.pack({name: state[name].detach().cpu().numpy() for name in spec.names}))
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


def _default_start(recipe: Recipe, build: Callable[[], torch.nn.Module]) -> Callable[[int], _Start]:
    """Network k with its default weights, and the generator that its initialiser draws from, for any k."""
    root = recipe.population.seed

    def draw(k: int) -> _Start:
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


def resolve(config: InitConfig) -> Callable[..., Any]:
    """The initialiser of an [init] table: an artifact's, then the named ones on top, several joined by `+`."""
    if config.artifact is None:
        return initialisers.get(config.name, **config.parameters)
    fitted = initialisers.load_init(config.artifact)
    if config.name == "default" and not config.parameters:
        return fitted
    return initialisers.compose(fitted, initialisers.get(config.name, **config.parameters))
