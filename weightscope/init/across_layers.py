"""Mimetic initialisation across layers: filters with the MLP behind them, the first MLP with the last."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weightscope._util.checks import choice, number
from weightscope.anatomy import MLPPart, NamedTensors, filter_mlps, mlps
from weightscope.anatomy.matrices import chosen_layers
from weightscope.errors import AnatomyError, UsageError
from weightscope.init._common import M
from weightscope.init.registry import INITIALISERS


def correlated(x: Tensor, y: Tensor, correlation: float) -> Tensor:
    """`m_y + s_y (rho (x - m_x) / s_x + sqrt(1 - rho^2) (y - m_y) / s_y)`, with means m and deviations s over entries.

    If y is independent of x, its correlation with x becomes rho, with a standard error of about
    (1 - rho^2) / sqrt(n) for n entries; its mean stays and its variance stays in expectation.

    Raises:
        UsageError: if all entries of x or of y are equal.
    """
    x, wide = x.double(), y.double()
    (deviation_x, mean_x), (deviation_y, mean_y) = (torch.std_mean(values, correction=0) for values in (x, wide))
    if not (deviation_x > 0 and deviation_y > 0):
        raise UsageError("correlation: expected entries that vary, found equal ones; initialise these weights first")
    mixed = correlation * deviation_y / deviation_x * (x - mean_x) + (1 - correlation**2) ** 0.5 * (wide - mean_y)
    return (mean_y + mixed).to(y)


@INITIALISERS.register("mimetic_conv_mlp", source="thesis 4.1, Fig. 3.40", needs="depthwise filters, each with an MLP")
def mimetic_conv_mlp_(
    module: M,
    *,
    correlation: float = -0.5,
    layers: int | list[int] | None = None,
    generator: torch.Generator | None = None,
) -> M:
    """Correlate the central pixel of each depthwise filter with diag(W2 W1) of the MLP in its block.

        f_c <- m_f + s_f (rho (d_c - m_d) / s_d + sqrt(1 - rho^2) (f_c - m_f) / s_f),   d_c = (W2 W1)_cc

    f_c is the central pixel of the filter of channel c, W1 (p, n) and W2 (n, p) are the weights of the MLP, and m and s
    are means and standard deviations over the n channels of a block. Central pixels keep their mean and variance; their
    covariances with other pixels shrink by sqrt(1 - rho^2). Within a block the correlation of f and d is rho up to a
    sampling error of about (1 - rho^2) / sqrt(n).

    In trained ConvNeXts a filter that increases its channel goes with an MLP that decreases it. The thesis prints no
    size for the correlation and found no benefit of an initialisation of its own that used it (section 3.4.3).

    Args:
        module: changed in place: the depthwise filters' central pixels only.
        correlation: rho, from -1 to 1.
        layers: which blocks, counted from 0; None for all.
        generator: not used.

    Raises:
        AnatomyError: if the module has no depthwise convolution with an MLP of as many channels in its block.
        UsageError: if an argument is invalid, filters have no central pixel, or pixels or diagonal do not vary.

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
    """The two MLPs of `mimetic_first_last_mlp_`.

    Raises:
        AnatomyError: if there are fewer than two MLPs, or the second matrices of the chosen ones differ in shape.
        UsageError: if `layers` is not two different layers.
    """
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
    generator: torch.Generator | None = None,
) -> M:
    """Correlate the second matrix of the last MLP, which writes to the residual stream, with that of the first.

        entries   W2' <- m' + s' (rho (W2 - m) / s + sqrt(1 - rho^2) (W2' - m') / s')
        rows      the same of the row means r' (n, 1), added back:  W2' <- W2' + (new r' - r') 1_p^T

    W2 (n, p) is the second weight (fc2) of the first MLP and W2' that of the last; m and s are means and standard
    deviations over all entries, or over the n row means. In the mode "entries" W2' keeps its mean and variance, and its
    row means get the correlation rho, too. A population's distribution does not change when hidden units are
    renumbered, so that across layers only row means can be correlated in it: the mode "rows" is this part alone.

    The thesis prints no size ("sometimes slightly correlated"; "the last block's MLP W2 is anticorrelated with the
    first block's").

    Args:
        module: changed in place: the second weight of the last MLP only.
        correlation: rho, from -1 to 1.
        mode: "entries" or "rows".
        layers: the two MLPs, counted from 0; negative numbers count from the end.
        generator: not used.

    Raises:
        AnatomyError: if the module has fewer than two MLPs, or the two have second matrices of different shapes.
        UsageError: if an argument is invalid, or the weights do not vary.

    Source: thesis 4.1 ("between the first and last layer MLPs") and 3.4.3, Fig. 3.39.

    Example:
        >>> mimetic_first_last_mlp_(convnext, correlation=-0.5, mode="rows")
    """
    number("correlation", correlation, least=-1, most=1)
    choice("mode", mode, MODES)
    first, last = first_and_last(module, layers)
    w2, other = first.read("fc2"), last.read("fc2")  # (n, p)
    if mode == "rows":
        means, others = w2.mean(1, keepdim=True), other.mean(1, keepdim=True)
        last.write("fc2", other + correlated(means, others, correlation) - others)
    else:
        last.write("fc2", correlated(w2, other, correlation))
    return module
