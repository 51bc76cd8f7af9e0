"""ConvNeXt: depthwise convolution, LayerNorm and an MLP in each block (Liu et al. 2022), as in the MLP paper."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from weightscope.errors import UsageError
from weightscope.networks.layers import LayerNorm2d, Mlp, SpatialMean, depthwise, drop_paths, patchify


class ConvNeXtBlock(nn.Module):
    """`x -> x + drop_path(gamma * mlp(norm(conv_dw(x))))` on images (B, d, S, S)."""

    gamma: nn.Parameter | None

    def __init__(
        self,
        width: int,
        kernel_size: int,
        hidden: int,
        layer_scale: float | None,
        drop_path: nn.Module,
        learned_sum: float | None,
    ) -> None:
        super().__init__()
        self.layer_scale = layer_scale
        self.register_parameter("gamma", None if layer_scale is None else nn.Parameter(torch.empty(width)))
        self.conv_dw = depthwise(width, kernel_size)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden, learned_sum)
        self.drop_path = drop_path
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `gamma` to its initial value."""
        if self.gamma is not None and self.layer_scale is not None:
            nn.init.constant_(self.gamma, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, d, S, S) to (B, d, S, S)."""
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        if self.gamma is not None:
            y = y * self.gamma
        return x + self.drop_path(y).permute(0, 3, 1, 2)


class ConvNeXtStage(nn.Module):
    """Blocks of one width, after halving the image's side unless it is the first stage."""

    def __init__(
        self,
        before: int | None,
        width: int,
        drop_paths: Sequence[nn.Module],
        kernel_size: int,
        expansion: int,
        layer_scale: float | None,
        learned_sum: float | None,
    ) -> None:
        super().__init__()
        self.downsample = (
            nn.Identity() if before is None else nn.Sequential(LayerNorm2d(before), patchify(before, width, 2))
        )
        self.blocks = nn.Sequential(
            *(
                ConvNeXtBlock(width, kernel_size, expansion * width, layer_scale, drop_path, learned_sum)
                for drop_path in drop_paths
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, S, S) to (B, d, S/2, S/2); (B, d, S, S) to the same shape in the first stage."""
        return self.blocks(self.downsample(x))


class ConvNeXtHead(nn.Module):
    """Average over space, LayerNorm, linear classifier."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.global_pool = SpatialMean()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, d, S, S) to logits (B, n)."""
        return self.fc(self.norm(self.global_pool(x)))


class ConvNeXt(nn.Module):
    """ConvNeXt. Images (B, c, S, S) to logits (B, n).

    Isotropic if `width` and `depth` are numbers (one stage, as in the MLP paper), hierarchical if they are sequences
    with one entry per stage; each stage after the first halves the image's side. Names and shapes are those of
    `timm.models.convnext.ConvNeXt`, except that timm always has four stages and also halves the side before the first
    one if the patch size is 2. Weights and biases start from torch's defaults (Kaiming-uniform), not from the truncated
    normal with zero biases of the original, as in the MLP paper (section 3).

    Args:
        width: d, or the stages' widths.
        depth: blocks, or the stages' blocks.
        kernel_size: of the depthwise filters; even ones have torch's padding "same".
        patch_size: side length of the stem's patches.
        num_classes: n.
        expansion: the MLP's hidden units per channel, p / d.
        in_channels: c.
        layer_scale: initial value of each block's gamma; None for blocks without gamma.
        drop_path: rate of stochastic depth in the last block, in [0, 1); it rises linearly from 0 in the first.
        learned_sum: initial value of the learned number b in each `fc1(x) + b sum(x)`, a baseline of the MLP paper
            (section 3, Fig. 4); None for none.

    Source: Liu et al. 2022; MLP paper, section 3.

    Example:
        >>> ConvNeXt(16, 4, patch_size=2, expansion=2, layer_scale=None)
        >>> ConvNeXt((96, 192, 384, 768), (3, 3, 9, 3), num_classes=1000)
    """

    def __init__(
        self,
        width: int | Sequence[int],
        depth: int | Sequence[int],
        kernel_size: int = 7,
        patch_size: int = 4,
        num_classes: int = 10,
        *,
        expansion: int = 4,
        in_channels: int = 3,
        layer_scale: float | None = 1e-6,
        drop_path: float = 0.0,
        learned_sum: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(width, int) != isinstance(depth, int):
            raise UsageError(f"width and depth must both be numbers or both be sequences, found {width} and {depth}")
        widths, depths = ((n,) if isinstance(n, int) else tuple(n) for n in (width, depth))
        if len(widths) != len(depths) or not widths:
            raise UsageError(f"width and depth need one entry per stage, found {widths} and {depths}")
        self.stem = nn.Sequential(patchify(in_channels, widths[0], patch_size), LayerNorm2d(widths[0]))
        paths = iter(drop_paths(drop_path, sum(depths)))
        self.stages = nn.Sequential(
            *(
                ConvNeXtStage(
                    before, here, list(islice(paths, blocks)), kernel_size, expansion, layer_scale, learned_sum
                )
                for before, here, blocks in zip((None, *widths), widths, depths, strict=False)
            )
        )
        self.head = ConvNeXtHead(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, c, S, S) to logits (B, n)."""
        return self.head(self.stages(self.stem(x)))
