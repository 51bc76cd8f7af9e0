"""The cost of one forward pass, counted layer by layer."""

import copy

import torch
from torch import Tensor, nn

from weightscope.networks.layers import Attention


def multiply_adds(module: nn.Module, in_channels: int, image_size: int) -> int:
    """Multiply-adds of one image's forward pass in the convolutions, linear maps and attention products.

    `outputs * inputs per output` for convolutions and linear maps, and `2 N^2 d` for the two products of
    attention over N tokens. Normalisation, activations and residuals are not counted; padded pixels are. A
    backward pass costs about twice as much again.

    Args:
        module: a network of this package, or any other made of `nn.Conv2d`, `nn.Linear` and `Attention`.
        in_channels: c of the image (1, c, S, S).
        image_size: S.
    """
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Conv2d | nn.Linear):
            total += output.numel() * layer.weight[0].numel()
        else:
            total += 2 * output.shape[1] * output.numel()

    shapes = copy.deepcopy(module).to("meta").eval()  # computes shapes only, and leaves the module unchanged
    for layer in shapes.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | Attention):
            layer.register_forward_hook(count)
    shapes(torch.zeros(1, in_channels, image_size, image_size, dtype=next(shapes.parameters()).dtype, device="meta"))
    return total
