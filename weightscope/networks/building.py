"""Networks from recipes: the registered ones by type, and users' own by reference."""

import inspect

from torch import nn

from weightscope._util import plugins
from weightscope.data import SequenceConfig, SequenceSource
from weightscope.data.catalog import dataset_info
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
    if isinstance(recipe.data, SequenceConfig):
        return build_for_tokens(recipe.network, vocabulary_of(recipe.data))
    info = dataset_info(recipe.images)
    return build(recipe.network, in_channels=info.channels, image_size=info.size, num_classes=info.classes)


def vocabulary_of(config: SequenceConfig) -> int:
    """The vocabulary of a section for sequences; of a text whose vocabulary is not recorded, the files are read.

    Raises:
        DataError: if these are missing or damaged.
    """
    recorded = getattr(config, "vocabulary", None)
    return SequenceSource.of(config).vocabulary if recorded is None else int(recorded)


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
    if isinstance(config, OwnNetworkConfig):
        return _build_own(config, {"vocabulary": vocabulary})
    options = {name: getattr(config, name) for name in type(config).model_fields if name != "type"}
    return NETWORKS[config.type](vocabulary, **options)


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
    if isinstance(config, OwnNetworkConfig):
        sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
        return _build_own(config, sizes)
    reduction = getattr(config, "reduction", getattr(config, "patch_size", 1))
    if image_size % reduction:
        raise UsageError(
            f"network.patch_size: the network reduces the image by a factor of {reduction}, which must divide its "
            f"{image_size} pixels"
        )
    options = {name: getattr(config, name) for name in type(config).model_fields if name != "type"}
    network = NETWORKS[config.type]
    if "image_size" in inspect.signature(network).parameters:
        options["image_size"] = image_size
    return network(in_channels=in_channels, num_classes=num_classes, **options)


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
