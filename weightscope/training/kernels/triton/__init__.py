"""Kernels for a GPU, in Triton; `functions.py` makes them differentiable.

Activations are bfloat16, float32, or (in Triton's interpreter) float64; weights and their gradients keep their own
type, float32 in training. Matrix products have operands of the activations' type and accumulate in at least float32;
everything else between load and store is at least float32. No kernel uses atomic additions: sums over the batch are
partial sums in a fixed order, so a step is deterministic.
"""

import torch
import triton
from torch import Tensor

from weightscope.errors import UsageError
from weightscope.training.kernels.triton.adamw import adamw
from weightscope.training.kernels.triton.batch_norm import gelu_norm, gelu_norm_backward
from weightscope.training.kernels.triton.convolution import blocks, convolve, convolve_backward
from weightscope.training.kernels.triton.images import load_images
from weightscope.training.kernels.triton.mlp import fits, mlp, mlp_backward, norm, norm_backward

VERSION = triton.__version__

__all__ = [
    "VERSION",
    "adamw",
    "block",
    "block_backward",
    "blocks",
    "convolve",
    "convolve_backward",
    "fits",
    "gelu_norm",
    "gelu_norm_backward",
    "load_images",
    "mlp",
    "mlp_backward",
    "norm",
    "norm_backward",
    "probe",
]


def block(x: Tensor, filters: list[Tensor], weights: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """`conv(x)` and `x + mlp(conv(x))` of x (T c, H, W, B); `filters` are weight and bias."""
    networks = len(weights[0])
    weight, bias = filters
    inner = convolve(x, weight, bias, 1)
    rows = inner.view(networks, len(x) // networks, -1)
    return inner, mlp(rows, weights, eps, x.view_as(rows)).view_as(x)


def block_backward(
    x: Tensor, weight: Tensor, inner: Tensor, weights: list[Tensor], grad: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Gradients of the input, of filters and their biases, and of the six weights."""
    rows = inner.view(len(weights[0]), len(x) // len(weights[0]), -1)
    middle, *of_mlp = mlp_backward(rows, weights, grad.view_as(rows), eps)
    return *convolve_backward(x, weight, middle.view_as(x), 1, grad), *of_mlp


def probe(device: torch.device) -> None:
    """Launch the smallest kernel.

    Raises:
        UsageError: if Triton cannot build or launch it, for example without a C compiler.
    """
    try:
        gain, shift = torch.zeros(2, 1, 1, device=device)
        norm(torch.zeros(1, 1, 1, device=device), gain, shift, 1.0)
    except RuntimeError as error:
        raise UsageError(
            f"kernels = 'compiled' need Triton on a GPU, which does not work here: {error}; use kernels = 'torch'"
        ) from error
