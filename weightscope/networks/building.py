"""Networks from recipes, the registered ones by type and users' own by reference, and the cost of a forward pass."""

import copy
import inspect

import torch
from torch import Tensor, nn

from weightscope._util import plugins
from weightscope.data.image_section import check_patches
from weightscope.errors import UsageError, WeightscopeError
from weightscope.networks.layers import Attention
from weightscope.networks.sequences import CausalAttention, LinearAttention, Mamba2Mixer, MambaMixer
from weightscope.recipe import NetworkConfig, OwnNetworkConfig, Recipe
from weightscope.recipe.networks import SECTIONS

NETWORKS: dict[str, type[nn.Module]] = {name: plugins.member(section.network) for name, section in SECTIONS.items()}
"""The classes that recipes name in `[network] type`."""


def build_for(recipe: Recipe) -> nn.Module:
    """The network of a recipe for its images or sequences, with torch's default initial weights.

    Example:
        >>> build_for(Recipe.load("populations/digits-convnext.toml"))
    """
    return _build(recipe.network, recipe.data.sizes())


def build(config: NetworkConfig, *, in_channels: int, image_size: int, num_classes: int) -> nn.Module:
    """The network described by a recipe's [network] section, for images (B, c, S, S), with torch's initial weights.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> build(recipe.network, in_channels=1, image_size=8, num_classes=10)
    """
    return _build(config, {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes})


def _build(config: NetworkConfig, sizes: dict[str, int]) -> nn.Module:
    """The network of a section for the sizes of a task's inputs and outputs, `Task.sizes`."""
    if isinstance(config, OwnNetworkConfig):
        return _build_own(config, sizes)
    if "image_size" in sizes:
        check_patches(config, sizes["image_size"])
    network = plugins.member(config.network)
    taken = inspect.signature(network).parameters
    return network(**config.options, **{name: size for name, size in sizes.items() if name in taken})


def _build_own(config: OwnNetworkConfig, named: dict[str, int]) -> nn.Module:
    factory, sizes = plugins.imported(config.type), tuple(named.values())
    if not callable(factory):
        raise UsageError(f"network.type: expected a function or class {config.type}, found {factory!r}")
    try:
        inspect.signature(factory).bind(*sizes, **config.numbers)
    except TypeError as error:
        raise UsageError(f"network: {config.type} is called with ({', '.join(named)}, **numbers): {error}") from error
    try:
        module = factory(*sizes, **config.numbers)
    except WeightscopeError:
        raise
    except Exception as error:
        raise UsageError(
            f"network: {config.type}({', '.join(map(str, sizes))}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"network.type: expected an nn.Module from {config.type}, found {type(module).__name__}")
    return module


# --- cost -------------------------------------------------------------------------------------------------------------


def multiply_adds(module: nn.Module, in_channels: int, image_size: int) -> int:
    """Multiply-adds of one image's forward pass in the convolutions, linear maps and attention products.

    `outputs * inputs per output` for convolutions and linear maps, and `2 N^2 d` for the two products of attention over
    N tokens. Normalisation, activations and residuals are not counted; padded pixels are. A backward pass costs about
    twice as much again. The module is of this package, or made of `nn.Conv2d`, `nn.Linear` and `Attention`.
    """
    return _multiply_adds(module, torch.zeros(1, in_channels, image_size, image_size, device="meta"))


def multiply_adds_of_sequence(module: nn.Module, tokens: int) -> int:
    """Multiply-adds of one sequence's forward pass, as `multiply_adds` counts them.

    Beside linear maps and convolutions these are `3 n p N` for a state-space layer of p channels and N states (decay,
    input, output), `2 n^2 d` for the products of causal attention, its mask not deducted, and `2 n k d` for linear
    attention with keys of width k.
    """
    return _multiply_adds(module, torch.zeros(1, tokens, dtype=torch.int64, device="meta"))


def _multiply_adds(module: nn.Module, inputs: Tensor) -> int:
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Linear():
                total += output.numel() * layer.weight[0].numel()
            case Attention():
                total += 2 * output.shape[1] * output.numel()
            case CausalAttention():
                total += output.shape[1] ** 2 * (layer.q_proj.out_features + layer.v_proj.out_features)
            case LinearAttention():
                total += 2 * output.shape[1] * layer.q_proj.out_features * layer.v_proj.out_features
            case MambaMixer():
                total += 3 * output.shape[1] * layer.A_log.numel()
            case Mamba2Mixer():
                total += 3 * output.shape[1] * layer.out_proj.in_features * layer.state_size

    shapes = copy.deepcopy(module).to("meta").eval()  # computes shapes only, and leaves the module unchanged
    for layer in shapes.modules():
        layer.register_forward_hook(count)
    dtype = next(shapes.parameters()).dtype
    shapes(inputs.to(dtype) if inputs.is_floating_point() else inputs)
    return total
