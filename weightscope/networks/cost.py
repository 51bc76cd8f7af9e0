"""What one forward pass costs, counted layer by layer."""

import copy

import torch
from torch import Tensor, nn

from weightscope.networks.layers import Attention


def multiply_adds(module: nn.Module, in_channels: int, image_size: int) -> int:
    """Multiply-adds of one image's forward pass in the convolutions, linear maps and attention products.

    Counted where the layers run: `outputs * inputs per output` for convolutions and linear maps, and
    `2 N^2 d` for the two products of attention over N tokens. Normalisation, activations and residuals are
    left out; padded pixels count. A backward pass costs about twice as much again.

    Args:
        module: a network of this package, or any that is made of `nn.Conv2d`, `nn.Linear` and `Attention`.
        in_channels: c of the image (1, c, S, S) that is sent through.
        image_size: S.
    """
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Conv2d | nn.Linear):
            total += output.numel() * layer.weight[0].numel()
        else:
            total += 2 * output.shape[1] * output.numel()

    twin = copy.deepcopy(module).to("meta").eval()  # shapes only: costs nothing and leaves the module alone
    for layer in twin.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | Attention):
            layer.register_forward_hook(count)
    twin(torch.zeros(1, in_channels, image_size, image_size, dtype=next(twin.parameters()).dtype, device="meta"))
    return total
