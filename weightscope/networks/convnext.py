"""ConvNeXt: depthwise convolution, LayerNorm and an MLP in each block (Liu et al. 2022), as in the MLP paper."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

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
        drop_path: nn.Module,
        *,
        kernel_size: int,
        expansion: int,
        layer_scale: float | None,
        learned_sum: float | None,
    ) -> None:
        super().__init__()
        self.layer_scale = layer_scale
        self.register_parameter("gamma", None if layer_scale is None else nn.Parameter(torch.empty(width)))
        self.conv_dw = depthwise(width, kernel_size)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, expansion * width, learned_sum)
        self.drop_path = drop_path
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gamma is not None and self.layer_scale is not None:
            nn.init.constant_(self.gamma, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        if self.gamma is not None:
            y = y * self.gamma
        return x + self.drop_path(y).permute(0, 3, 1, 2)


def _stage(before: int | None, width: int, blocks: Iterable[Callable[[int], nn.Module]]) -> nn.Sequential:
    """Blocks of one width: (B, before, S, S) to (B, d, S/2, S/2), and to (B, d, S, S) in the first stage."""
    reduced = nn.Identity() if before is None else nn.Sequential(LayerNorm2d(before), patchify(before, width, 2))
    return nn.Sequential(OrderedDict(downsample=reduced, blocks=nn.Sequential(*(block(width) for block in blocks))))


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
        options: dict[str, Any] = {
            "kernel_size": kernel_size, "expansion": expansion, "layer_scale": layer_scale, "learned_sum": learned_sum
        }  # fmt: skip
        blocks = (partial(ConvNeXtBlock, drop_path=path, **options) for path in drop_paths(drop_path, sum(depths)))
        stages = zip((None, *widths), widths, depths, strict=False)
        self.stages = nn.Sequential(*(_stage(before, here, islice(blocks, n)) for before, here, n in stages))
        norm, classifier = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], num_classes)
        self.head = nn.Sequential(OrderedDict(global_pool=SpatialMean(), norm=norm, fc=classifier))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))
