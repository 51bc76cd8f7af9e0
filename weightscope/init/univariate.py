"""Baselines: the constructor's weights, and independent entries with a scale that depends on the layer's widths."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from weightscope._util.checks import choice, number, positive
from weightscope.anatomy.matrices import fans
from weightscope.init._common import M, each_matrix, normal, uniform
from weightscope.init.registry import INITIALISERS

_BIASES = ("uniform", "zero", "keep")


@INITIALISERS.register("default", source="the module's constructor", needs="nothing")
def default_(module: M, *, generator: torch.Generator | None = None) -> M:
    """Leave the module as its constructor made it; the baseline of every comparison.

    Args:
        module: returned unchanged.
        generator: not used.

    Example:
        >>> default_(vit)
    """
    return module


def _bias(rule: str, generator: torch.Generator | None) -> Callable[[Tensor, int], Tensor | None]:
    """The function that sets biases: torch's `U(+-1/sqrt(fan in))`, zero, or none."""
    choice("bias", rule, _BIASES)

    def fill(old: Tensor, fan_in: int) -> Tensor | None:
        if rule == "keep":
            return None
        if rule == "zero":
            return torch.zeros(old.shape)
        return uniform(*old.shape, bound=1 / math.sqrt(fan_in), generator=generator)

    return fill


@INITIALISERS.register("kaiming_uniform", source="He et al. 2015", needs="linear or convolutional layers")
def kaiming_uniform_(
    module: M,
    *,
    slope: float = math.sqrt(5),
    bias: str = "uniform",
    select: str = "*",
    generator: torch.Generator | None = None,
) -> M:
    """He initialisation, uniform: `W ~ U(-b, b)` with `b = sqrt(6 / ((1 + slope^2) fan_in))`.

    The default slope gives `b = 1 / sqrt(fan_in)`, torch's default for linear and convolutional layers, which the
    papers call Kaiming-uniform; `slope=0` is for ReLU.

    Args:
        module: changed in place: weights and biases of linear and convolutional layers.
        slope: of the leaky ReLU, >= 0.
        bias: "uniform" in `+-1/sqrt(fan_in)`, "zero", or "keep".
        select: shell patterns of weight names, comma-separated.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no such layer.
        UsageError: if an argument is invalid.

    Source: He et al. 2015, section 2.2; MLP paper, section 3.

    Example:
        >>> kaiming_uniform_(vit, select="*mlp*", generator=torch.Generator().manual_seed(0))
    """
    gain = math.sqrt(6 / (1 + number("slope", slope, least=0) ** 2))

    def fill(block: Tensor) -> Tensor:
        return uniform(*block.shape, bound=gain / math.sqrt(fans(block)[0]), generator=generator)

    return each_matrix(module, select, fill, _bias(bias, generator))


@INITIALISERS.register("xavier", source="Glorot and Bengio 2010", needs="linear or convolutional layers")
def xavier_(
    module: M,
    *,
    gain: float = 1.0,
    distribution: str = "uniform",
    bias: str = "zero",
    select: str = "*",
    generator: torch.Generator | None = None,
) -> M:
    """Glorot initialisation: variance `gain^2 * 2 / (fan_in + fan_out)`.

    A fused projection of queries, keys and values is treated as three matrices.

    Args:
        module: changed in place: weights and biases of linear and convolutional layers.
        gain: factor on the standard deviation, > 0.
        distribution: "uniform" or "normal".
        bias: "uniform" in `+-1/sqrt(fan_in)`, "zero", or "keep".
        select: shell patterns of weight names, comma-separated.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no such layer.
        UsageError: if an argument is invalid.

    Source: Glorot and Bengio 2010, Eq. 12 and 16.

    Example:
        >>> xavier_(vit, distribution="normal", generator=torch.Generator().manual_seed(0))
    """
    positive("gain", gain)
    choice("distribution", distribution, ("uniform", "normal"))

    def fill(block: Tensor) -> Tensor:
        std = gain * math.sqrt(2 / sum(fans(block)))
        if distribution == "normal":
            return normal(*block.shape, generator=generator).mul_(std)
        return uniform(*block.shape, bound=math.sqrt(3) * std, generator=generator)

    return each_matrix(module, select, fill, _bias(bias, generator))


@INITIALISERS.register("trunc_normal", source="default of timm's vision models", needs="linear or convolutional layers")
def trunc_normal_(
    module: M,
    *,
    std: float = 0.02,
    cut: float = 2.0,
    bias: str = "zero",
    select: str = "*",
    generator: torch.Generator | None = None,
) -> M:
    """Truncated normal entries: `W = std * z`, z standard normal given `|z| <= cut / std`.

    As in timm, the cut is absolute, so that std 0.02 and cut 2 truncate practically nothing.

    Args:
        module: changed in place: weights and biases of linear and convolutional layers.
        std: standard deviation before truncation, > 0.
        cut: largest absolute value, at least std.
        bias: "uniform" in `+-1/sqrt(fan_in)`, "zero", or "keep".
        select: shell patterns of weight names, comma-separated.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no such layer.
        UsageError: if an argument is invalid.

    Source: the default of timm's vision models (selection paper, section 4.1; impulse paper, section 5.1).

    Example:
        >>> trunc_normal_(vit, generator=torch.Generator().manual_seed(0))
    """
    positive("std", std)
    number("cut", cut, least=std)

    def fill(block: Tensor) -> Tensor:
        return truncated(*block.shape, std=std, cut=cut, generator=generator)

    return each_matrix(module, select, fill, _bias(bias, generator))


def truncated(*shape: int, std: float, cut: float, generator: torch.Generator | None) -> Tensor:
    """Normal numbers of standard deviation `std` given that they are in [-cut, cut], by the inverse error function."""
    edge = math.erf(cut / std / math.sqrt(2))
    # 1 - 2^-24 is the largest float32 below 1; the inverse is infinite at 1 itself.
    draws = uniform(*shape, bound=min(edge, 1 - 2**-24), generator=generator)
    return draws.erfinv_().mul_(std * math.sqrt(2)).clamp_(-cut, cut)
