"""Torch's operations for the functions of the training step.

The depthwise convolution of the channels of many networks is computed as batched matrix products.

With the batch innermost, an image of one channel is a column of H*W pixels and a batch is the matrix X (H*W, B). A
depthwise convolution is then a small banded Toeplitz matrix for each channel, applied from the left, Y_c = M(w_c) X_c.
That wastes few multiplications for small images, and the weight gradient, which takes most of the time in the library's
convolution, becomes one more matrix product: dM = dY X^T, gathered along the diagonals that share a tap. Larger images
are cut into blocks of rows: a block of r output rows reads only the r + 2 * reach input rows around it, which are
contiguous, so a block's operand is a view and nothing is copied.
"""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Up to this many pixels one dense (H*W, H*W) matrix for each channel is the fastest form; measured on AVX-512.
_DENSE_PIXELS = 64
_BLOCK_ROWS = 2


class Normalise(torch.autograd.Function):
    """`gain (x - mean) / sqrt(variance + eps) + shift` of x (T, c, P), moments over `dim`; gain and shift (T, c)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dim: int, eps: float) -> Tensor:
        """One pass over x."""
        wide = x.float() if x.dtype != torch.float64 else x
        centred = wide - wide.mean(dim, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim, keepdim=True) + eps)
        normal = centred.mul_(scale).to(x.dtype)
        ctx.save_for_backward(normal, scale, weight)
        ctx.dim = dim
        return torch.addcmul(bias[:, :, None].to(x.dtype), normal, weight[:, :, None].to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, gain and shift."""
        normal, scale, weight = ctx.saved_tensors
        product = grad * normal
        grad_weight, grad_bias = product.sum(2, dtype=weight.dtype), grad.sum(2, dtype=weight.dtype)
        g = grad * weight[:, :, None].to(grad.dtype)
        along = product.mul_(weight[:, :, None].to(grad.dtype)).mean(ctx.dim, keepdim=True)
        g.sub_(g.mean(ctx.dim, keepdim=True)).addcmul_(normal, along, value=-1)
        return g.mul_(scale.to(g.dtype)), grad_weight, grad_bias, None, None


def attention(qkv: Tensor) -> Tensor:
    """`softmax(q^T k / sqrt(d)) v` of queries, keys and values (T, 3, H, d, N, B): (T, H, d, N, B)."""
    q, k, v = qkv.permute(1, 0, 2, 5, 4, 3).contiguous().unbind(0)  # each (T, H, B, N, d)
    # Not cuDNN's, whose backward pass is not deterministic and has given NaN in bfloat16; the others add in a fixed
    # order up to 256 tokens.
    allowed = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(allowed) if qkv.is_cuda else nullcontext():
        y = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    return y.reshape(q.shape).permute(0, 1, 4, 3, 2).contiguous()


class DepthwiseConv2d(torch.autograd.Function):
    """Depthwise convolution of x (C, H, W, B), contiguous for speed, with filters (C, k, k), k odd.

    Equal to `F.conv2d(x, weight, padding=dilation * (k - 1) // 2, dilation=dilation, groups=C)`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dilation: int) -> Tensor:
        """The convolution."""
        ctx.save_for_backward(x, weight)
        ctx.dilation = dilation
        return convolve(x, weight, dilation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Gradients of x and the filters."""
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:  # the transposed convolution is the convolution with the flipped kernel
            grad_x = convolve(grad, weight.flip(1, 2), ctx.dilation)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(x, grad, weight.shape[-1], ctx.dilation)
        return grad_x, grad_weight, None


def _block_rows(height: int, width: int) -> int:
    if height * width <= _DENSE_PIXELS:
        return height
    return _BLOCK_ROWS if height % _BLOCK_ROWS == 0 else 1


def _table(x: Tensor, rows: int, k: int, dilation: int) -> Tensor:
    make = _taps if torch.compiler.is_compiling() else _cached_taps  # a compiler traces no caches
    height, width = x.shape[1:3]
    return make(rows, height, width, k, dilation, x.device).to(x.dtype)


def _taps(rows: int, height: int, width: int, k: int, dilation: int, device: torch.device) -> Tensor:
    """One-hot map (k*k, N*K) from taps to the entries of a block's Toeplitz matrix.

    It has N = rows*width output pixels and K = window*width input pixels, of its rows and `reach` more on both sides.
    """
    reach = dilation * (k - 1) // 2
    above, window = (0, height) if rows == height else (reach, rows + 2 * reach)
    grid = torch.meshgrid(*(torch.arange(n, device=device) for n in (rows, width, window, width)), indexing="ij")
    y, x, v, u = (axis.reshape(-1) for axis in grid)
    dy, dx = v - above - y + reach, u - x + reach  # distance from the kernel's first tap, in pixels
    hit = (dy % dilation == 0) & (dx % dilation == 0)
    dy, dx = dy // dilation, dx // dilation
    hit &= (dy >= 0) & (dy < k) & (dx >= 0) & (dx < k)
    tap = torch.where(hit, dy * k + dx, -1)
    return (tap == torch.arange(k * k, device=device)[:, None]).float()


_cached_taps = lru_cache(maxsize=64)(_taps)


def _blocks(height: int, rows: int, reach: int) -> list[tuple[int, int, int, int]]:
    """(first output row, first input row, end of input rows, first row within the window) of each block."""
    if rows == height:
        return [(0, 0, height, 0)]
    out = []
    for top in range(0, height, rows):
        low, high = max(0, top - reach), min(height, top + rows + reach)
        out.append((top, low, high, low - (top - reach)))
    return out


def convolve(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """The forward pass of `DepthwiseConv2d`."""
    channels, height, width, batch = x.shape
    k = weight.shape[-1]
    rows = _block_rows(height, width)
    taps = _table(x, rows, k, dilation)
    matrix = (weight.reshape(channels, k * k).to(x.dtype) @ taps).view(channels, rows * width, -1)  # (C, N, K)
    x = x.contiguous()
    blocks = _blocks(height, rows, dilation * (k - 1) // 2)
    if len(blocks) == 1:
        return torch.bmm(matrix, x.view(channels, height * width, batch)).view_as(x)
    out = torch.empty_like(x)
    for top, low, high, offset in blocks:
        part = matrix[:, :, offset * width : (offset + high - low) * width]
        y = torch.bmm(part, x[:, low:high].view(channels, -1, batch))
        out[:, top : top + rows] = y.view(channels, rows, width, batch)
    return out


def weight_gradient(x: Tensor, grad: Tensor, k: int, dilation: int) -> Tensor:
    """The gradient of the filters, (C, k, k)."""
    channels, height, width, batch = x.shape
    rows = _block_rows(height, width)
    taps = _table(x, rows, k, dilation)
    x = x.contiguous()
    entries = taps.shape[1] // (rows * width)
    blocks = _blocks(height, rows, dilation * (k - 1) // 2)
    total = x.new_zeros(channels, rows * width, entries) if len(blocks) > 1 else x.new_empty(0)
    for top, low, high, offset in blocks:
        g = grad[:, top : top + rows].view(channels, rows * width, batch)
        xt = x[:, low:high].view(channels, -1, batch).transpose(1, 2)
        if len(blocks) == 1:
            total = torch.bmm(g, xt)
        elif (high - low) * width == entries:
            total.baddbmm_(g, xt)
        else:
            total[:, :, offset * width : (offset + high - low) * width] += torch.bmm(g, xt)
    return (total.view(channels, -1) @ taps.T).view(channels, k, k)
