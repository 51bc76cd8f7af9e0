"""Mimetic initialisation of state-space layers: close to linear attention that recalls."""

import math

import torch
from torch import Tensor

from weightscope._util.checks import flag, positive
from weightscope.anatomy import SSMPart, ssms
from weightscope.anatomy.matrices import chosen_layers
from weightscope.init._common import M
from weightscope.init.registry import INITIALISERS

# softplus(b) = 1 for b = log(e - 1) = 0.5413
UNIT_STEP = math.log(math.e - 1)


def slow_decay(a_log: Tensor, c: float) -> Tensor:
    """`-c A_log`, the new A_log: `A = -exp(-c A_log)` is near zero where A_log is large."""
    return -c * a_log


def correlated(readout: Tensor, write: Tensor) -> Tensor:
    """`(W_C + W_B) / 2`, the new W_C."""
    return (readout + write) / 2


def identity_taps(shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A causal convolution (channels, taps) that is the identity: the last tap 1, the others 0."""
    taps = torch.zeros(shape)
    taps[:, -1] = 1
    return taps


@INITIALISERS.register("mimetic_ssm", source="thesis 3.3.2", needs="state-space layers")
def mimetic_ssm_(
    module: M,
    *,
    c: float = 8.0,
    a: bool = True,
    delta: bool = True,
    cb: bool = True,
    convolution: bool | None = None,
    layers: int | list[int] | None = None,
    generator: torch.Generator | None = None,
) -> M:
    """Make Mamba and Mamba-2 layers start close to linear attention between correlated tokens.

        a            A_log <- -c A_log              A = -exp(A_log) near 0: states decay slowly
        delta        W_Delta <- 0, b_Delta <- log(e - 1)      Delta = softplus(b) = 1 for every token
        cb           W_C <- (W_C + W_B) / 2         W_C^T W_B near a multiple of I: tokens attend to similar ones
        convolution  last tap 1, other taps and bias 0        the short convolution is the identity

    The four switches give the 16 combinations of thesis Fig. 3.26.

    Linear attention is approached, not reached: A_log of Mamba's state 1 (of Mamba-2's head 1) is log 1 = 0, so that
    its A is -1 for any c, and it decays by e at every token. With N = 8 and c = 8, the maps of random correlated B and
    C on 16 tokens differ from linear attention by 23 % in Frobenius norm, on 100 tokens by 34 %; with N = 16 by 17 and
    24 %.

    The components transform the present weights, assumed to be those of Mamba's own initialisation: A_log log n or the
    log of U(1, 16), W_B and W_C independent. They are not idempotent.

    Args:
        module: changed in place: the named parameters of its state-space layers.
        c: factor on A_log, of the published {2, 4, 8}, > 0.
        a: apply the first component.
        delta: apply the second.
        cb: apply the third.
        convolution: apply the fourth; None applies it to Mamba-2 only, as published.
        layers: which layers, counted from 0; None for all.
        generator: not used.

    Raises:
        AnatomyError: if the module has no state-space layer.
        UsageError: if an argument is invalid.

    Source: thesis 3.3.2 and Fig. 3.26.

    Example:
        >>> mimetic_ssm_(mamba, c=8, layers=3)
    """
    positive("c", c)
    for name, value in (("a", a), ("delta", delta), ("cb", cb)):
        flag(name, value)
    if convolution is not None:
        flag("convolution", convolution)
    for part in chosen_layers(ssms(module), layers):
        _set(part, c if a else None, delta, cb, part.version == 2 if convolution is None else convolution)
    return module


def _set(part: SSMPart, c: float | None, delta: bool, cb: bool, convolution: bool) -> None:
    if c is not None:
        part.write("A_log", slow_decay(part.read("A_log"), c))
    if delta:
        part.write("dt_weight", torch.zeros_like(part.read("dt_weight")))
        part.write("dt_bias", torch.full_like(part.read("dt_bias"), UNIT_STEP))
    if cb:
        part.write("C", correlated(part.read("C"), part.read("B")))
    if convolution:
        part.write("conv_weight", identity_taps(part.read("conv_weight").shape))
        if "conv_bias" in part.parts:
            part.write("conv_bias", torch.zeros_like(part.read("conv_bias")))
