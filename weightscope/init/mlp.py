"""Mimetic initialisation of MLPs: a mean in the first layer, and correlations with filters and between layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weightscope._util.checks import choice, number
from weightscope.anatomy import MLPPart, NamedTensors, chosen_layers, filter_mlps, mlps
from weightscope.anatomy.matrices import default_std
from weightscope.anatomy.tensors import check_separate
from weightscope.errors import AnatomyError, UsageError
from weightscope.init.base import INITIALISERS, Generator, M, normal

_MODES, _UNITS = ("scalar", "rows", "anticorrelated"), ("std", "absolute")


@INITIALISERS.register("mimetic_mlp", source="MLP paper, Eq. 1 and 2", needs="MLPs")
def mimetic_mlp_(
    module: M,
    *,
    mode: str = "scalar",
    b: float = 1.0,
    sigma: float = 0.3,
    units: str = "std",
    layers: int | list[int] | None = None,
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Add a mean to the weights of the first layer of every MLP.

        scalar           W1 <- W1 + b s 1_p 1_n^T                          (Eq. 2)
        rows             W1 <- W1 + 1_p c^T,  c ~ N(0, (sigma s)^2 I_n)    (Eq. 1)
        anticorrelated   W1 <- (W1 - W2^T) / 2                             (section 2, seen in ViTs)

    W1 (p, n) is the weight of the first layer (fc1), W2 that of the second. s = 1 / sqrt(3 n), the standard deviation
    of torch's default entries, or 1 with `units="absolute"`, as in the texts (whose sigma is a variance). They print no
    value of b or sigma, so that there is no published preset.

    The added matrix of "scalar" has the spectral norm b s sqrt(p n), b sqrt(p / 3) with the default unit, which grows
    with the width; that of the random entries, about (1 + sqrt(p / n)) / sqrt(3), does not. docs/initialisers.md has a
    table by width and what was measured. After a LayerNorm with unit gain and zero bias the inputs of W1 sum to zero,
    and "scalar" changes only the gradients of the LayerNorm at the start.

    Args:
        mode: "scalar", "rows" or "anticorrelated".
        b: the mean in the mode "scalar", in units of s.
        sigma: the standard deviation of the means in the mode "rows", in units of s, >= 0.
        units: "std" for s as above, "absolute" for s = 1.

    Source: MLP paper, Eq. 1 and 2; thesis Eq. 3.39 and 3.40.

    Example:
        >>> mimetic_mlp_(vit, mode="rows", sigma=0.5, generator=torch.Generator().manual_seed(0))
    """
    choice("mode", mode, _MODES)
    number("b", b)
    number("sigma", sigma, least=0)
    choice("units", units, _UNITS)
    parts = chosen_layers(mlps(module, strict=strict, caller="mimetic_mlp_"), layers)
    check_separate((part, name) for part in parts for name in ("fc1", *["fc2"] * (mode == "anticorrelated")))
    for part in parts:
        w1 = part.read("fc1")  # (p, n)
        unit = default_std(w1) if units == "std" else 1.0
        if mode == "anticorrelated":
            part.write("fc1", (w1 - part.read("fc2").mT) / 2)
        elif mode == "rows":
            vector = normal(w1.shape[1], generator=generator) * (sigma * unit)
            part.write("fc1", w1 + vector.to(w1))
        else:
            part.write("fc1", w1 + b * unit)
    return module


@INITIALISERS.register("constant_mlp_bias", source="MLP paper, section 3 and Fig. 4", needs="MLPs with biases")
def constant_mlp_bias_(
    module: M,
    *,
    value: float = 0.1,
    layers: int | list[int] | None = None,
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Set the bias of the first layer of every MLP to a constant.

        b1 <- value 1_p

    The baseline that tells whether `mimetic_mlp` only makes up for a missing bias; the paper prints no number.

    Source: MLP paper, section 3 and Fig. 4.

    Example:
        >>> constant_mlp_bias_(convnext, value=0.05)
    """
    number("value", value)
    parts = chosen_layers(mlps(module, strict=strict, caller="constant_mlp_bias_"), layers)
    for part in parts:
        if part.read_bias("fc1") is None:
            raise UsageError(f"`{part.name}`: expected an MLP whose first layer has a bias, found none")
    for part in parts:
        part.write_bias("fc1", torch.full((part.hidden,), float(value), dtype=torch.float64))
    return module


def correlated(x: Tensor, y: Tensor, correlation: float) -> Tensor:
    """`m_y + s_y (rho (x - m_x) / s_x + sqrt(1 - rho^2) (y - m_y) / s_y)`, with means m and stds s over entries.

    For y independent of x: its correlation with x becomes rho, up to about (1 - rho^2) / sqrt(n) for n entries.
    """
    x, wide = x.double(), y.double()
    (std_x, mean_x), (std_y, mean_y) = (torch.std_mean(values, correction=0) for values in (x, wide))
    if not (std_x > 0 and std_y > 0):
        raise UsageError("correlation: expected entries that vary, found equal ones; initialise these weights first")
    mixed = correlation * std_y / std_x * (x - mean_x) + (1 - correlation**2) ** 0.5 * (wide - mean_y)
    return (mean_y + mixed).to(y)


@INITIALISERS.register("mimetic_conv_mlp", source="thesis 4.1, Fig. 3.40", needs="depthwise filters, each with an MLP")
def mimetic_conv_mlp_(
    module: M, *, correlation: float = -0.5, layers: int | list[int] | None = None, generator: Generator = None
) -> M:
    """Correlate the central pixel of each depthwise filter with diag(W2 W1) of the MLP in its block.

        f_c <- m_f + s_f (rho (d_c - m_d) / s_d + sqrt(1 - rho^2) (f_c - m_f) / s_f),   d_c = (W2 W1)_cc

    f_c is the central pixel of the filter of channel c, W1 (p, n) and W2 (n, p) are the weights of the MLP, m and s
    means and standard deviations over the n channels of a block. Central pixels keep their mean and variance; the
    correlation of f and d is rho up to a sampling error of about (1 - rho^2) / sqrt(n). The thesis prints no size.

    Args:
        correlation: rho, from -1 to 1.

    Raises:
        UsageError: if filters have no central pixel, or pixels or diagonal do not vary.

    Source: thesis 4.1 ("between adjacent convolutional and MLP layers") and 3.4.3, Fig. 3.40.

    Example:
        >>> mimetic_conv_mlp_(convnext, correlation=-0.5)
    """
    number("correlation", correlation, least=-1, most=1)
    for part in chosen_layers(filter_mlps(module), layers):
        part.write_centres(correlated(part.diagonal(), part.centres(), correlation))
    return module


MODES = ("entries", "rows")


def first_and_last(source: torch.nn.Module | NamedTensors, layers: Sequence[int]) -> tuple[MLPPart, MLPPart]:
    """The two MLPs of `mimetic_first_last_mlp_`."""
    parts = mlps(source)
    if len(parts) < 2:
        raise AnatomyError(f"expected at least two MLPs, found one, `{parts[0].name}`")
    if not isinstance(layers, Sequence) or len(layers) != 2:
        raise UsageError(f"layers: expected two layers, such as [0, -1], found {layers!r}")
    first, last = (chosen_layers(parts, layer)[0] for layer in layers)
    if first.layer == last.layer:
        raise UsageError(f"layers: expected two different layers, found {list(layers)}, both `{first.name}`")
    shapes = first.shape("fc2"), last.shape("fc2")
    if shapes[0] != shapes[1]:
        raise AnatomyError(
            f"`{last.name}`: expected fc2 of the shape of `{first.name}`, {shapes[0]}, found {shapes[1]}; "
            "choose two MLPs of one stage with `layers`"
        )
    return first, last


@INITIALISERS.register("mimetic_first_last_mlp", source="thesis 4.1, Fig. 3.39", needs="two MLPs of one shape")
def mimetic_first_last_mlp_(
    module: M,
    *,
    correlation: float = -0.5,
    mode: str = "entries",
    layers: Sequence[int] = (0, -1),
    generator: Generator = None,
) -> M:
    """Correlate the second matrix of the last MLP, which writes to the residual stream, with that of the first.

        entries   W2' <- m' + s' (rho (W2 - m) / s + sqrt(1 - rho^2) (W2' - m') / s')
        rows      the same of the row means r' (n, 1), added back:  W2' <- W2' + (new r' - r') 1_p^T

    W2 (n, p) is the second weight (fc2) of the first MLP and W2' that of the last, which keeps its mean and variance;
    m and s are means and standard deviations over all entries, or over the n row means, the only part that can be
    correlated in a population, since hidden units may be renumbered.

    Args:
        correlation: rho, from -1 to 1.
        mode: "entries" or "rows".
        layers: the two MLPs, counted from 0; negative numbers count from the end.

    Source: thesis 4.1 ("between the first and last layer MLPs") and 3.4.3, Fig. 3.39.

    Example:
        >>> mimetic_first_last_mlp_(convnext, correlation=-0.5, mode="rows")
    """
    number("correlation", correlation, least=-1, most=1)
    choice("mode", mode, MODES)
    first, last = first_and_last(module, layers)
    check_separate([(first, "fc2"), (last, "fc2")])
    w2, other = first.read("fc2"), last.read("fc2")  # (n, p)
    if mode == "rows":
        means, others = w2.mean(1, keepdim=True), other.mean(1, keepdim=True)
        last.write("fc2", other + correlated(means, others, correlation) - others)
    else:
        last.write("fc2", correlated(w2, other, correlation))
    return module
