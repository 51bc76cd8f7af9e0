"""The cost of one forward pass, counted layer by layer."""

import copy

import torch
from torch import Tensor, nn

from weightscope.networks.layers import Attention
from weightscope.networks.sequences.attention import CausalAttention, LinearAttention
from weightscope.networks.sequences.mamba import Mamba2Mixer, MambaMixer


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


def multiply_adds_of_sequence(module: nn.Module, tokens: int) -> int:
    """Multiply-adds of one sequence's forward pass, as `multiply_adds` counts them.

    Beside linear maps and convolutions these are `3 n p N` for a state-space layer of p channels and N states (decay,
    input, output), `2 n^2 d` for the products of causal attention, its mask not deducted, and `2 n k d` for linear
    attention with keys of width k.

    Args:
        module: a network of `networks.sequences`, or any other made of its layers, `nn.Linear` and `nn.Conv1d`.
        tokens: n.
    """
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(layer, MambaMixer):
            total += 3 * tokens * layer.A_log.numel()
        elif isinstance(layer, Mamba2Mixer):
            total += 3 * tokens * layer.out_proj.in_features * layer.state_size
        elif isinstance(layer, CausalAttention):
            total += tokens**2 * (layer.q_proj.out_features + layer.v_proj.out_features)
        elif isinstance(layer, LinearAttention):
            total += 2 * tokens * layer.q_proj.out_features * layer.v_proj.out_features
        elif isinstance(layer, nn.Linear | nn.Conv1d):
            total += output.numel() * layer.weight[0].numel()

    shapes = copy.deepcopy(module).to("meta").eval()
    for layer in shapes.modules():
        layer.register_forward_hook(count)
    shapes(torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
    return total
