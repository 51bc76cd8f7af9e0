"""Networks from recipes, the registered ones by type and users' own by reference."""

import inspect

from torch import nn

from weightscope._util import plugins
from weightscope.data.image_section import check_patches
from weightscope.errors import UsageError, WeightscopeError
from weightscope.recipe import NetworkConfig, OwnNetworkConfig, Recipe
from weightscope.recipe.networks import SECTIONS

NETWORKS: dict[str, type[nn.Module]] = {name: plugins.member(section.network) for name, section in SECTIONS.items()}
"""The classes that recipes name in `[network] type`."""


def build_for(recipe: Recipe) -> nn.Module:
    """The network of a recipe for its images or sequences, with torch's default initial weights.

    Example:
        >>> build_for(Recipe.load("populations/digits-convnext.toml"))
    """
    return _build(recipe.network, recipe.data.sizes())


def build(config: NetworkConfig, *, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """The network described by a recipe's [network] section, for images (B, c, S, S), with torch's initial weights.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> build(recipe.network, in_channels=1, image_size=8, num_classes=10)
    """
    return _build(config, {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes})


def _build(config: NetworkConfig, sizes: dict[str, int]) -> nn.Module:
    """The network of a section for the sizes of a task's inputs and outputs, `Task.sizes`."""
    if isinstance(config, OwnNetworkConfig):
        return _build_own(config, sizes)
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
