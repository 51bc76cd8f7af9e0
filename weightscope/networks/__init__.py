"""Plain `nn.Module`s, each readable in one screen, with timm's parameter names and shapes."""

from typing import TYPE_CHECKING

from torch import nn

from weightscope.errors import UsageError
from weightscope.networks.convmixer import ConvMixer, dilation_schedule
from weightscope.networks.convnext import ConvNeXt
from weightscope.networks.cost import multiply_adds
from weightscope.networks.layers import Attention, LayerNorm2d
from weightscope.networks.positions import sinusoidal_positions
from weightscope.networks.vit import ViT

if TYPE_CHECKING:
    from weightscope.recipe import NetworkConfig

__all__ = [
    "Attention",
    "ConvMixer",
    "ConvNeXt",
    "LayerNorm2d",
    "ViT",
    "build",
    "dilation_schedule",
    "multiply_adds",
    "sinusoidal_positions",
]

_TYPES: dict[str, type[nn.Module]] = {"convmixer": ConvMixer, "convnext": ConvNeXt, "vit": ViT}


def build(config: "NetworkConfig", *, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """The network that a recipe's [network] section describes.

    Args:
        config: the section, `Recipe.network`.
        in_channels: c of the images (B, c, S, S).
        image_size: S.
        num_classes: the number of logits.

    Raises:
        UsageError: if the network's patches or stages do not divide the image, or the sizes do not go together.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> build(recipe.network, in_channels=1, image_size=8, num_classes=10)
    """
    reduction = getattr(config, "reduction", config.patch_size)
    if image_size % reduction:
        raise UsageError(
            f"network.patch_size: the network reduces the image {reduction} times, which must divide its "
            f"{image_size} pixels"
        )
    options = {name: getattr(config, name) for name in type(config).model_fields if name != "type"}
    if config.type == "vit":
        options["image_size"] = image_size
    return _TYPES[config.type](in_channels=in_channels, num_classes=num_classes, **options)
