"""The few layers that `torch.nn` lacks, under timm's names.

A network here is a *container*: it calls leaf layers, adds residuals, applies elementwise functions,
averages over space, and multiplies by or adds parameters along the channel axis. Everything that mixes or
splits channels is a leaf: a layer of `torch.nn`, `LayerNorm2d` or `Attention`. So a container's forward
also runs on network-stacked channels, a channel axis that holds the channels of T networks side by side, once its
leaves are replaced by batched layers; that is how many networks are trained as one.

Every layer with its own parameters has `reset_parameters()`, like those of `torch.nn`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope.errors import UsageError


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of images (B, C, H, W), at each pixel.

    Args:
        width: C.
        eps: added to the variance; 1e-6 as in ConvNeXt.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W)."""
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    """Multiplication by one learned number per channel, `x -> gamma * x`, on the last axis.

    Args:
        width: the number of channels.
        initial: the initial value of `gamma`.
    """

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `gamma` to its initial value."""
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """Scale (..., C)."""
        return x * self.gamma


class SpatialMean(nn.Module):
    """Average over the pixels of images: (B, C, S, S) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Average (B, C, S, S)."""
        return x.mean((2, 3))


class TokenPool(nn.Module):
    """Pool tokens (B, N, d) to one vector (B, d): their average, or the first one (the class token).

    Args:
        first: take the first token instead of the average.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """Pool (B, N, d)."""
        return x[:, 0] if self.first else x.mean(1)


class Mlp(nn.Module):
    """Linear, GELU, Linear: `x -> fc2(gelu(fc1(x)))` on the last axis.

    The MLP paper calls `fc1.weight` (p, d) W1 and `fc2.weight` (d, p) W2.

    Args:
        width: d, channels of input and output.
        hidden: p, hidden units.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    """Multi-head self-attention: `softmax(Q K^T / sqrt(k)) V` in each head, then `proj`.

    `qkv.weight` (3 d, d) stacks the queries, keys and values of all heads: rows `h k` to `(h + 1) k` of each
    third belong to head h. Its forward splits channels, so it is a leaf layer of batched training.

    Args:
        width: d.
        heads: H, which divides d; a head is k = d / H wide.
        qkv_bias: whether queries, keys and values have a bias.
    """

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"heads must divide width, found width {width} and heads {heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, d) to (B, N, d)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def depthwise(width: int, kernel_size: int, dilation: int = 1) -> nn.Conv2d:
    """A depthwise convolution, one kernel_size x kernel_size filter per channel, that keeps the image's size.

    Raises:
        UsageError: if the kernel size is even, so that a filter has no central pixel.
    """
    if kernel_size % 2 == 0:
        raise UsageError(f"kernel_size must be odd, so that a filter has a central pixel, found {kernel_size}")
    return nn.Conv2d(width, width, kernel_size, padding=dilation * (kernel_size // 2), dilation=dilation, groups=width)


def patchify(channels: int, width: int, patch_size: int) -> nn.Conv2d:
    """A linear map of non-overlapping patches: convolution with stride equal to its kernel size."""
    return nn.Conv2d(channels, width, patch_size, stride=patch_size)
