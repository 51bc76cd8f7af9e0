"""Plain `nn.Module`s, each readable on one screen, with timm's parameter names and shapes."""

from typing import TYPE_CHECKING, Any

from weightscope.networks.convmixer import ConvMixer, dilation_schedule
from weightscope.networks.convnext import ConvNeXt
from weightscope.networks.layers import Attention, LayerNorm2d, sinusoidal_positions
from weightscope.networks.vit import ViT

if TYPE_CHECKING:
    from weightscope.networks.building import build, build_for

__all__ = [
    "Attention",
    "ConvMixer",
    "ConvNeXt",
    "LayerNorm2d",
    "ViT",
    "build",
    "build_for",
    "dilation_schedule",
    "sinusoidal_positions",
]


def __getattr__(name: str) -> Any:
    if name not in ("build", "build_for"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightscope.networks import building  # recipes need pydantic, which initialisers do not

    return getattr(building, name)
