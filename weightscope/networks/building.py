"""Networks from recipes: the registered ones by type, and users' own by reference."""

import inspect

from torch import nn

from weightscope._util import plugins
from weightscope.data.image_section import check_patches
from weightscope.errors import UsageError, WeightscopeError
from weightscope.networks import sequences  # noqa: F401 - importing a network registers it
from weightscope.networks.registry import NETWORKS
from weightscope.recipe import NetworkConfig, OwnNetworkConfig, Recipe


def build_for(recipe: Recipe) -> nn.Module:
    """The network of a recipe for its images or sequences, with torch's default initial weights.

    Raises:
        UsageError: as `build`.
        DataError: if the vocabulary of a text is not recorded and its files are missing or damaged.

    Example:
        >>> build_for(Recipe.load("populations/digits-convnext.toml"))
    """
    return _build(recipe.network, recipe.data.sizes())


def build_for_tokens(config: NetworkConfig, vocabulary: int) -> nn.Module:
    """The network for sequences that a recipe's [network] section describes, with its default initial weights.

    Args:
        config: the section, `Recipe.network`.
        vocabulary: v, the number of tokens.

    Raises:
        UsageError: if its sizes are inconsistent; for a network of one's own, if the factory cannot be imported or
            called, or does not return an `nn.Module`.

    Example:
        >>> build_for_tokens(Recipe.load("copying-mamba-small").network, 16)
    """
    return _build(config, {"vocabulary": vocabulary})


def build(config: NetworkConfig, *, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """The network described by a recipe's [network] section, with torch's default initial weights.

    Args:
        config: the section, `Recipe.network`.
        in_channels: c of the images (B, c, S, S).
        image_size: S.
        num_classes: the number of logits.

    Raises:
        UsageError: if the network's patches or stages do not divide the image or its sizes are inconsistent; for a
            network of one's own, if the factory cannot be imported or called, or does not return an `nn.Module`.

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
        try:
            check_patches(config, sizes["image_size"])
        except ValueError as error:
            raise UsageError(str(error)) from None
    network = NETWORKS[config.type]
    options = {name: getattr(config, name) for name in type(config).model_fields if name != "type"}
    options |= {name: size for name, size in sizes.items() if name in inspect.signature(network).parameters}
    return network(**options)


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
