"""Networks from recipes, the registered ones by type and users' own by reference."""

import inspect

from torch import nn

from weightscope._util import plugins
from weightscope.data.image_section import check_patches
from weightscope.errors import UsageError, WeightscopeError
from weightscope.recipe import NetworkConfig, OwnNetworkConfig, Recipe

_SIZES = (("in_channels", "image_size", "num_classes"), ("vocabulary",))  # of the tasks, in the order of `Task.sizes`


def build_for(recipe: Recipe) -> nn.Module:
    """The network of a recipe for its images or sequences, with torch's default initial weights.

    Example:
        >>> build_for(Recipe.load("populations/digits-convnext.toml"))
    """
    return build(recipe.network, **recipe.data.sizes())


def build(config: NetworkConfig, **sizes: int) -> nn.Module:
    """The network described by a recipe's [network] section, with torch's initial weights.

    `sizes` are those of the task's inputs and outputs (`Task.sizes`): `in_channels`, `image_size` and `num_classes` of
    images (B, c, S, S), `vocabulary` of sequences.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> build(recipe.network, in_channels=1, image_size=8, num_classes=10)
    """
    names = next((names for names in _SIZES if set(names) == set(sizes)), None)
    if isinstance(config, OwnNetworkConfig):  # which may be of a further kind of task
        return _build_own(config, {name: sizes[name] for name in names or sizes})
    if names is None:
        kinds = " or ".join(", ".join(names) for names in _SIZES)
        raise UsageError(f"sizes of a network: expected {kinds}, found {', '.join(sizes) or 'none'}")
    if "image_size" in sizes:
        check_patches(config, sizes["image_size"])
    network = plugins.member(config.network)
    taken = inspect.signature(network).parameters
    return network(**config.options, **{name: size for name, size in sizes.items() if name in taken})


def _build_own(config: OwnNetworkConfig, named: dict[str, int]) -> nn.Module:
    factory, sizes = plugins.imported(config.type), tuple(named.values())
    if not callable(factory):
        raise UsageError(f"network.type: expected a function or class {config.type}, found {factory!r}")
    try:
        inspect.signature(factory).bind(*sizes, **config.numbers)
    except TypeError as error:
        raise UsageError(f"network: {config.type} is called with ({', '.join(named)}, **numbers): {error}") from error
    try:
        module = factory(*sizes, **config.numbers)
    except WeightscopeError:
        raise
    except Exception as error:
        raise UsageError(
            f"network: {config.type}({', '.join(map(str, sizes))}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"network.type: expected an nn.Module from {config.type}, found {type(module).__name__}")
    return module
