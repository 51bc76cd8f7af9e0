"""Mimetic initialisation of MLPs, a non-zero mean in the first layer, and the paper's baseline for it."""

import torch
from torch import Tensor

from weightscope._util.checks import choice, flag, number
from weightscope.anatomy import mlps
from weightscope.anatomy.matrices import chosen_layers, default_deviation
from weightscope.anatomy.strictness import reads
from weightscope.errors import UsageError
from weightscope.init._common import M, normal
from weightscope.init.registry import INITIALISERS

_MODES = ("scalar", "rows", "anticorrelated")


def shifted(w1: Tensor, b: float | Tensor) -> Tensor:
    """`W1 + 1_p b^T` for a vector b (n,), Eq. 1, or `W1 + b 1_p 1_n^T` for a number, Eq. 2; W1 is (p, n)."""
    return w1 + (b.unsqueeze(0) if isinstance(b, Tensor) else b)


def anticorrelated(w1: Tensor, w2: Tensor) -> Tensor:
    """`(W1 - W2^T) / 2` for W1 (p, n), W2 (n, p): correlation -1/sqrt(2) with W2^T if both have the same variance."""
    return (w1 - w2.mT) / 2


@INITIALISERS.register("mimetic_mlp", source="MLP paper, Eq. 1 and 2", needs="MLPs")
@reads(("MLPs",))
def mimetic_mlp_(
    module: M,
    *,
    mode: str = "scalar",
    b: float = 0.3,
    sigma: float = 0.3,
    gate: bool = False,
    layers: int | list[int] | None = None,
    strict: bool = True,
    generator: torch.Generator | None = None,
) -> M:
    """Add a mean to the weights of the first layer of every MLP, in units of the default entries' deviation.

        scalar           W1 <- W1 + b s 1_p 1_n^T                          (Eq. 2)
        rows             W1 <- W1 + 1_p c^T,  c ~ N(0, (sigma s)^2 I_n)    (Eq. 1)
        anticorrelated   W1 <- (W1 - W2^T) / 2                             (section 2, seen in ViTs)

        s = 1 / sqrt(3 n)

    W1 (p, n) is the weight of the first layer (fc1) in torch's (out, in) layout, with n inputs and p hidden units; W2
    that of the second (fc2). s is the standard deviation of torch's default entries, from which the paper's networks
    start, so that a number means the same relative to them at any width. The paper's b is `b * s` and its sigma, a
    variance, is `(sigma * s) ** 2`: to add a published b at width n, pass `b * sqrt(3 n)`. The paper prints neither
    value (Fig. 4 sweeps b at n = 256); 0.3 here is its b = 0.01 or sigma = 1e-4 at n = 300.

    In the mode "rows" each layer draws one vector, so that the columns of W1 have means while its grand mean stays
    zero. After a LayerNorm with unit gain and zero bias the inputs of W1 sum to zero, and "scalar" does not change the
    network's function at the start; it changes the gradients of the LayerNorm.

    Args:
        module: changed in place: the first layers' weights only.
        mode: "scalar", "rows" or "anticorrelated".
        b: the mean in the mode "scalar", in units of s.
        sigma: the standard deviation of the means in the mode "rows", in units of s, >= 0.
        gate: in gated MLPs, do the same to the gate (with its own vector).
        layers: which MLPs, counted from 0; None for all.
        strict: whether tensors that look like MLPs and cannot be read are an error; if not, a warning
            lists them and they stay as they are.
        generator: a CPU generator; None for torch's global one. Only "rows" draws.

    Raises:
        AnatomyError: if the module has no MLP.
        UsageError: if an argument is invalid, or `gate` is true and an MLP has none.

    Source: MLP paper, Eq. 1 and 2.

    Example:
        >>> mimetic_mlp_(vit, mode="rows", sigma=0.5, generator=torch.Generator().manual_seed(0))
    """
    choice("mode", mode, _MODES)
    number("b", b)
    number("sigma", sigma, least=0)
    flag("gate", gate)
    for part in chosen_layers(mlps(module), layers):
        if gate and part.kind != "gated":
            raise UsageError(f"gate: `{part.name}` is a plain MLP and has no gate")
        for name in ("fc1", "gate") if gate else ("fc1",):
            w1 = part.read(name)  # (p, n)
            if mode == "anticorrelated":
                part.write(name, anticorrelated(w1, part.read("fc2")))
            elif mode == "rows":
                vector = normal(w1.shape[1], generator=generator) * (sigma * default_deviation(w1))
                part.write(name, shifted(w1, vector.to(w1)))
            else:
                part.write(name, shifted(w1, b * default_deviation(w1)))
    return module


@INITIALISERS.register("constant_mlp_bias", source="MLP paper, section 3 and Fig. 4", needs="MLPs with biases")
@reads(("MLPs",))
def constant_mlp_bias_(
    module: M,
    *,
    value: float = 0.1,
    layers: int | list[int] | None = None,
    strict: bool = True,
    generator: torch.Generator | None = None,
) -> M:
    """Set the bias of the first layer of every MLP to a constant.

        b1 <- value 1_p

    The baseline that tells whether `mimetic_mlp` only makes up for a missing bias: "we also attempted to change the
    init of the bias of the linear layer itself to a small constant". The paper prints no number. The other baseline,
    a learned b sum(x), is part of the network (`learned_sum` of `ConvNeXt` and `ViT`).

    Args:
        module: changed in place: the biases of the first layers only, of gated MLPs not that of the gate.
        value: of every entry.
        layers: which MLPs, counted from 0; None for all.
        strict: whether tensors that look like MLPs and cannot be read are an error; if not, a warning
            lists them and they stay as they are.
        generator: not used.

    Raises:
        AnatomyError: if the module has no MLP.
        UsageError: if an argument is invalid, or an MLP has no bias.

    Source: MLP paper, section 3 and Fig. 4.

    Example:
        >>> constant_mlp_bias_(convnext, value=0.05)
    """
    number("value", value)
    parts = chosen_layers(mlps(module), layers)
    biases = []
    for part in parts:  # all before the first is written
        bias = part.read_bias("fc1")
        if bias is None:
            raise UsageError(f"`{part.name}`: expected an MLP whose first layer has a bias, found none")
        biases.append(torch.full_like(bias, value))
    for part, bias in zip(parts, biases, strict=True):
        part.write_bias("fc1", bias)
    return module
