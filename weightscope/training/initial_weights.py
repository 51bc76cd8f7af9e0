"""Initial weights of the networks of a tile, each from its own random streams."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.torch_random import seeded
from weightscope.anatomy.permutation_groups import permutations_of
from weightscope.errors import AnatomyError, DataError, RecipeError, SpecError, UsageError
from weightscope.init.base import for_alike
from weightscope.init.controls import ScaleControl, UncorrelatedControl
from weightscope.init.named import resolve
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec

Build = Callable[[], torch.nn.Module]
Initialiser = Callable[..., Any]


def initial_weights(recipe: Recipe, ids: Sequence[int], build: Build) -> np.ndarray:
    """The initial weights (T, D) float32 of networks `ids`.

    Network k is built with torch's default initialisation under the seed of its INIT stream; then its initialiser
    (entry k mod number of [[init]] tables) is called with a generator on its STRUCTURE stream. So two recipes that
    differ only in the initialiser start from the same default weights: their networks are paired.
    """
    functions = [_controlled(config, recipe, build) if config.control else _of(config) for config in recipe.init]
    rows = []
    for k in ids:
        i = k % len(functions)
        module = _initialised(recipe, k, functions[i], build)
        spec, state = WeightSpec.of(module), module.state_dict()
        rows.append(spec.pack({name: state[name].detach().cpu().numpy() for name in spec.names}))
    return np.stack(rows)


def check_initialisers(recipe: Recipe, build: Build) -> None:
    """Apply each initialiser to one network."""
    for i, config in enumerate(recipe.init):
        if config.name == "default" and config.artifact is None:
            continue
        where = f"init{f'.{i}' if len(recipe.init) > 1 else ''} ({config.artifact or config.name})"
        try:
            _initialised(recipe, i, resolve(config), build)
            if config.control == "uncorrelated":
                _permutations(recipe, build)
        except (AnatomyError, SpecError, UsageError) as error:
            raise RecipeError(f"{where}: {error}") from error
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise RecipeError(f"{where}: it raised {type(error).__name__}: {error}") from error


def _controlled(config: InitConfig, recipe: Recipe, build: Build) -> Initialiser:
    """The control of an initialiser; its moments are those of networks 0, 1, ..., however many there are."""
    root = recipe.population.seed

    def draw(k: int) -> tuple[torch.nn.Module, torch.Generator]:
        with seeded(torch_seed(root, k, Purpose.INIT)):
            return build(), torch.Generator().manual_seed(torch_seed(root, k, Purpose.STRUCTURE))

    with seeded(root):  # what the initialiser draws without its generator
        if config.control == "scale":
            return ScaleControl.of(_of(config), draw)
        return UncorrelatedControl.of(_of(config), draw, _permutations(recipe, build))


def _of(config: InitConfig) -> Initialiser:
    return for_alike(resolve(config))


def _permutations(recipe: Recipe, build: Build) -> PermutationSpec:
    """The permutation specification of the recipe's network."""
    with seeded(0):
        return permutations_of(SimpleNamespace(spec=WeightSpec.of(build()), recipe=recipe))


def _initialised(recipe: Recipe, k: int, function: Initialiser, build: Build) -> torch.nn.Module:
    """Network k after its initialiser, its tensors compared with those before."""
    name, root = recipe.init[k % len(recipe.init)].name, recipe.population.seed
    with seeded(torch_seed(root, k, Purpose.INIT)):
        module, generator = build(), torch.Generator().manual_seed(torch_seed(root, k, Purpose.STRUCTURE))
        spec = WeightSpec.of(module)
        found = function(module, generator=generator)
        module = found if isinstance(found, torch.nn.Module) else module
    if lines := spec.differences(WeightSpec.of(module)):
        raise UsageError(f"{name}: expected an initialiser to keep names and shapes, found {'; '.join(lines)}")
    return module
