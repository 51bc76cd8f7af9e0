"""The few layers that `torch.nn` lacks, under timm's names, and codes of positions.

A network here is a *container*: it calls leaf layers, adds residuals, applies elementwise functions,
averages over space, and multiplies by or adds parameters along the channel axis. Everything that mixes or
splits channels is a leaf: a layer of `torch.nn`, `LayerNorm2d` or `Attention`. So a container's forward
also runs on a channel axis that holds the channels of T networks side by side, once its
leaves are replaced by batched layers; that is how many networks are trained as one.

Every layer with its own parameters has `reset_parameters()`, like those of `torch.nn`.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope._util.checks import divided
from weightscope.errors import UsageError

# Torch says once in a process that such kernels may need a padded copy.
warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
TEMPERATURE = 10_000.0  # of position codes: Vaswani et al. 2017, section 3.5; also in MoCo-v3 and simple ViT


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of images (B, C, H, W), at each pixel."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    """Multiplication by one learned number per channel, `x -> gamma * x`, on the last axis of (..., C)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training the branch of an image is 0 with probability r, and divided by 1 - r otherwise.

    Source: Huang et al., Deep networks with stochastic depth, 2016, Eq. 2; scaled as in timm.
    """

    draws: Tensor | None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.draws = rate, None

    def factors(self, draws: Tensor, dtype: torch.dtype) -> Tensor:
        """0 or 1 / (1 - r) for each uniform number."""
        return (draws >= self.rate).to(dtype) / (1 - self.rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        draws = torch.rand(len(x), device=x.device) if self.draws is None else self.draws
        return x * self.factors(draws, x.dtype).view(-1, *(1 for _ in x.shape[1:]))


def drop_paths(rate: float, depth: int) -> list[nn.Module]:
    """One layer for each block i = 0 .. depth - 1, of rate `rate * i / (depth - 1)`; the identity if that is 0.

    Source: Huang et al. 2016, Eq. 4, with the rates of ConvNeXt and timm, which begin with 0.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"drop_path: expected a rate in [0, 1), found {rate}")
    rates = [rate * i / max(depth - 1, 1) for i in range(depth)]
    return [DropPath(r) if r > 0 else nn.Identity() for r in rates]


class SpatialMean(nn.Module):
    """Average over the pixels of images: (B, C, S, S) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class TokenPool(nn.Module):
    """Pool tokens (B, N, d) to one vector (B, d): their average, or the first one (the class token)."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] if self.first else x.mean(1)


class SumLinear(nn.Linear):
    """A linear map and a multiple of the inputs' sum: `y = W x + b 1_p 1_n^T x + bias`, with one learned number b.

    The baseline of the MLP paper (section 3, Fig. 4) for its initialisation, which adds the same matrix once. Not a
    container: its forward adds over channels.
    """

    def __init__(self, inputs: int, outputs: int, initial: float) -> None:
        super().__init__(inputs, outputs)
        self.initial = initial
        self.sum_weight = nn.Parameter(torch.full((1,), initial))

    def reset_parameters(self) -> None:
        """Draw the matrix and the bias as `nn.Linear` does, and set b to its initial value."""
        super().reset_parameters()
        if hasattr(self, "sum_weight"):  # not yet where the constructor of nn.Linear calls this
            nn.init.constant_(self.sum_weight, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.sum_weight * x.sum(-1, keepdim=True)


class Mlp(nn.Module):
    """Linear, GELU, Linear: `x -> fc2(gelu(fc1(x)))` on the last axis of (..., d).

    The MLP paper calls `fc1.weight` (p, d) W1 and `fc2.weight` (d, p) W2.
    """

    def __init__(self, width: int, hidden: int, learned_sum: float | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden) if learned_sum is None else SumLinear(width, hidden, learned_sum)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    """Multi-head self-attention of tokens (B, N, d): `softmax(Q K^T / sqrt(k)) V` in each head, then `proj`.

    `qkv.weight` (3 d, d) stacks the queries, keys and values of all heads: rows `h k` to `(h + 1) k` of each
    third belong to head h. Its forward splits channels, so it is a leaf layer of batched training.
    """

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        divided("width", width, "heads", heads)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def depthwise(width: int, kernel_size: int, dilation: int = 1) -> nn.Conv2d:
    """A depthwise convolution, one kernel_size x kernel_size filter per channel, that keeps the image's size.

    Even kernels, which have no central pixel, have torch's padding "same": one more pixel after the image than before.
    """
    if kernel_size % 2 == 0:
        return nn.Conv2d(width, width, kernel_size, padding="same", dilation=dilation, groups=width)
    return nn.Conv2d(width, width, kernel_size, padding=dilation * (kernel_size // 2), dilation=dilation, groups=width)


def patchify(channels: int, width: int, patch_size: int) -> nn.Conv2d:
    """A linear map of non-overlapping patches: convolution with stride equal to its kernel size."""
    return nn.Conv2d(channels, width, patch_size, stride=patch_size)


def sinusoidal_positions(rows: int, columns: int | None, width: int, temperature: float = TEMPERATURE) -> Tensor:
    """The sinusoidal codes of the cells of a grid, row by row, or of the positions of a sequence, (positions, width).

    With q frequencies `w_i = temperature^(-i/q)`, i = 0 .. q - 1, the codes are

        grid       [sin(x w), cos(x w), sin(y w), cos(y w)],          q = width / 4
        sequence   [sin(t w), cos(t w)],                              q = width / 2

    A shift of the position rotates each pair (sin, cos), so every code has the squared norm width / 2.

    Args:
        rows: of the grid, or the length of the sequence.
        columns: of the grid; None for a sequence.
        width: d, length of a code; a multiple of 4 (grid) or 2 (sequence).
        temperature: about the ratio of the longest to the shortest wavelength, > 0.

    Source: Chen et al. 2021 (MoCo-v3) for grids, Vaswani et al. 2017 for sequences.

    Example:
        >>> sinusoidal_positions(1, 2, 4)[1]  # y = 0, x = 1
        tensor([0.8415, 0.5403, 0.0000, 1.0000])
    """
    axes = 1 if columns is None else 2
    if width % (2 * axes):
        raise UsageError(
            f"sinusoidal positions on {axes} axes: expected a width that is a multiple of {2 * axes}, found {width}"
        )
    q = width // (2 * axes)
    frequencies = temperature ** (-torch.arange(q, dtype=torch.float64) / q)
    places = [torch.arange(rows, dtype=torch.float64)]
    if columns is not None:
        y, x = torch.meshgrid(places[0], torch.arange(columns, dtype=torch.float64), indexing="ij")
        places = [x.reshape(-1), y.reshape(-1)]
    angles = [place[:, None] * frequencies for place in places]  # each (rows * columns, q)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1).float()
