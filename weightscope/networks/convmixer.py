"""ConvMixer: depthwise convolutions mix space, pointwise convolutions mix channels (thesis 2.1.1)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.networks.layers import LayerNorm2d, SpatialMean, depthwise, patchify

# Dilation in each quarter of the network's layers (thesis Table 3.2, printed there for 8 layers).
DILATIONS = {
    "A": (1, 1, 1, 1),
    "B": (2, 2, 2, 2),
    "C": (3, 3, 3, 3),
    "D": (1, 2, 3, 3),
    "E": (1, 1, 2, 3),
    "F": (1, 2, 2, 2),
    "G": (1, 1, 2, 2),
    "H": (1, 1, 1, 2),
}


def dilation_schedule(name: str, depth: int) -> tuple[int, ...]:
    """The dilation of each depthwise layer, A to H (thesis Table 3.2): layer i belongs to quarter `floor(4 i / depth)`.

    Example:
        >>> dilation_schedule("E", 8)
        (1, 1, 1, 1, 2, 2, 3, 3)
    """
    return tuple(DILATIONS[choice("dilations", name, DILATIONS)][4 * i // depth] for i in range(depth))


class Residual(nn.Module):
    """`x -> fn(x) + x`."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


_NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm2d, "layer": LayerNorm2d}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class ConvMixer(nn.Module):
    """ConvMixer-h/d. Images (B, c, S, S) to logits (B, n).

    A block computes `y = norm(act(depthwise(x))) + x` (Eq. 2.2), then `norm(act(pointwise(y)))` (Eq. 2.3). With
    `residual` "both" y is added to the latter as well, with "none" nothing is added.

    It has exactly `h [d (k^2 + h + 6) + c p^2 + n + 3] + n` parameters (thesis Eq. 2.4, where c^2 is printed
    for c p^2). Names and shapes are those of `timm.models.convmixer.ConvMixer`. Weights and biases start
    from torch's defaults (Kaiming-uniform).

    Args:
        width: h, channels.
        depth: d, layers.
        kernel_size: k of the depthwise filters, or one for each layer (thesis 3.1.4 proposes it, and varies
            dilations); even ones have torch's padding "same".
        patch_size: p.
        num_classes: n.
        in_channels: c.
        dilations: the dilation schedule of the depthwise filters, A to H (thesis Table 3.2).
        residual: where inputs are added (thesis Table 2.3); "first" is the published network.
        norm: BatchNorm, or LayerNorm over the channels of each pixel (thesis Table 2.3).
        activation: GELU or ReLU (thesis Table 2.3).

    Source: Trockman and Kolter 2022; thesis 2.1.1.

    Example:
        >>> ConvMixer(256, 8, kernel_size=5, patch_size=1, num_classes=10)
    """

    def __init__(
        self,
        width: int,
        depth: int,
        kernel_size: int | Sequence[int],
        patch_size: int,
        num_classes: int,
        *,
        in_channels: int = 3,
        dilations: str = "A",
        residual: Literal["none", "first", "both"] = "first",
        norm: Literal["batch", "layer"] = "batch",
        activation: Literal["gelu", "relu"] = "gelu",
    ) -> None:
        super().__init__()
        choice("residual", residual, ("none", "first", "both"))
        choice("norm", norm, _NORMS)
        choice("activation", activation, _ACTIVATIONS)

        def normalised(convolution: nn.Conv2d) -> nn.Sequential:
            return nn.Sequential(convolution, _ACTIVATIONS[activation](), _NORMS[norm](width))

        def block(size: int, dilation: int) -> nn.Sequential:
            space, channels = depthwise(width, size, dilation), nn.Conv2d(width, width, 1)
            # the same names of tensors with and without the first residual; others with two, which tie all channels
            first = (
                nn.Sequential(OrderedDict(fn=normalised(space))) if residual == "none" else Residual(normalised(space))
            )
            if residual == "both":
                return nn.Sequential(first, Residual(normalised(channels)))
            return nn.Sequential(first, *normalised(channels))

        self.stem = normalised(patchify(in_channels, width, patch_size))
        sizes = (kernel_size,) * depth if isinstance(kernel_size, int) else kernel_size
        self.blocks = nn.Sequential(*map(block, sizes, dilation_schedule(dilations, depth)))
        self.pooling = SpatialMean()
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pooling(self.blocks(self.stem(x))))
