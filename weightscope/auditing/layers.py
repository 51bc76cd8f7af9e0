"""Statistics of the initialisers of MLPs and state-space layers, and of correlations between layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weightscope._util.checks import choice
from weightscope.anatomy import NamedTensors, chosen_layers, filter_mlps, mlps, ssms
from weightscope.anatomy.matrices import default_std
from weightscope.auditing.report import EXPECTATIONS, error_in
from weightscope.auditing.runs import Copy, Statistic
from weightscope.errors import UsageError
from weightscope.init.mlp import MODES, first_and_last
from weightscope.init.ssm import chosen_states

# --- means in MLPs ----------------------------------------------------------------------------------------------------


Start = Callable[[torch.Generator], None]


def _noise(network: Copy, *, mode: str, layers: Any, **_: Any) -> Start:
    """Independent entries of the variance that the present ones have apart from means and a multiple of fc2^T."""
    parts, stds = chosen_layers(mlps(network.source, strict=None), layers), []
    for part in parts:
        rest = fc1 = part.read("fc1").cpu().double()
        if mode == "anticorrelated":
            fc2 = part.read("fc2").cpu().double().mT
            rest = 2 * (fc1 - _slope(fc2, fc1) * fc2)
        units, inputs = rest.mean(1), rest.mean(0)
        rest = rest.sub(units[:, None]).sub_(inputs - inputs.mean())
        std = float(rest.norm()) / math.sqrt(max(1, (fc1.shape[0] - 1) * (fc1.shape[1] - 1)))
        if mode == "anticorrelated" and std <= 1e-6 * float(fc1.std()):  # a multiple of fc2^T, which no start gives
            std = default_std(fc1)
        stds.append(std)

    def start(g: torch.Generator) -> None:
        for part, std in zip(parts, stds, strict=True):
            part.write("fc1", torch.randn(part.shape("fc1"), generator=g) * std)

    return start


def _more(source: NamedTensors) -> None:
    """(W1 - 1.2 W2^T) / 2 from (W1 - W2^T) / 2."""
    for part in mlps(source, strict=None):
        part.write("fc1", part.read("fc1") - 0.1 * part.read("fc2").mT)


@EXPECTATIONS.register(
    "mimetic_mlp",
    reads=("MLPs",),
    variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}),
    start=_noise,
    errors=lambda p: {"scalar": ("b",), "rows": ("sigma",)}.get(p["mode"], {error_in("the factor 1/2"): _more}),
    pooled=True,
)
def mimetic_mlp_statistics(source: NamedTensors, *, mode: str, layers: Any) -> Iterator[Statistic]:
    """Statistics of fc1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries, in units of the default entries' std;
    - input means: variance of the n means over hidden units, in units of the default entries' variance;
    - unit means: the same for the p means over inputs, which no mode changes;
    - slope: of the regression of fc1 on fc2^T, in the mode "anticorrelated";
    - own share: of the variance of fc1 that fc2^T does not explain.
    """
    choice("mode", mode, ("scalar", "rows", "anticorrelated"))
    for part in chosen_layers(mlps(source, strict=None), layers):
        fc1 = part.read("fc1").cpu().double()
        found = {}
        if mode == "anticorrelated":
            fc2 = part.read("fc2").cpu().double().mT
            slope = _slope(fc2, fc1)
            fc1 = fc1 - fc1.mean()
            rest = fc1 - slope * (fc2 - fc2.mean())
            found["slope"] = slope
            found["own share"] = float(rest.norm() / fc1.norm()) ** 2
        else:
            inputs, units = (fc1.mean(axis) / default_std(fc1) for axis in (0, 1))
            found["mean"] = float(units.mean())
            found["input means"] = float(inputs.var(correction=0))
            found["unit means"] = float(units.var(correction=0))
        for what, value in found.items():
            scale = "variance" if what.endswith("means") else "identity"
            yield Statistic("fc1", part.layer, None, part.name, what, value, scale, part.layer)


def _slope(x: Tensor, y: Tensor) -> float:
    """The slope of y on x."""
    x, y = (x - x.mean()).flatten(), y.flatten()
    return float(x @ y / (x @ x).clamp_min(1e-300))


# --- correlations between layers --------------------------------------------------------------------------------------


def _shuffled_pixels(network: Copy, *, layers: Any, **_: Any) -> Start:
    """The present central pixels in a random order of channels, apart from their regression on the MLP's diagonal."""
    parts = chosen_layers(filter_mlps(network.source, strict=None), layers)
    pixels = [_apart(part.diagonal(), part.centres()) for part in parts]

    def start(g: torch.Generator) -> None:
        for part, values in zip(parts, pixels, strict=True):
            part.write_centres(_shuffled(values, g))

    return start


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Values y without their linear dependence on x, and with their mean and variance."""
    wide, other = y.cpu().double().flatten(), x.cpu().double().flatten()
    rest = wide - _slope(other, wide) * (other - other.mean())
    rest = (rest - rest.mean()) * (wide.std() / rest.std()) + wide.mean()
    return rest.reshape(y.shape).to(y)


def _shuffled(values: Tensor, g: torch.Generator) -> Tensor:
    return values.flatten()[torch.randperm(values.numel(), generator=g).to(values.device)].reshape(values.shape)


@EXPECTATIONS.register(
    "mimetic_conv_mlp",
    reads=("depthwise convolutions", "MLPs"),
    start=_shuffled_pixels,
    errors=("correlation",),
    pooled=True,
)
def mimetic_conv_mlp_statistics(source: NamedTensors, *, layers: Any) -> Iterator[Statistic]:
    """The correlation between central pixels and diag(W2 W1), in each block."""
    parts = chosen_layers(filter_mlps(source, strict=None), layers)
    enough = [part for part in parts if part.filters.channels > 4]
    if not enough:
        raise _few("mimetic_conv_mlp: ", max(part.filters.channels for part in parts), "channels")
    for part in enough:
        r = _correlation(part.diagonal(), part.centres())
        yield Statistic(
            "filters and MLP", part.layer, None, part.filters.name, "correlation", r, "correlation", part.layer
        )


def _few(who: str, found: int, what: str) -> UsageError:
    return UsageError(f"{who}expected more than 4 {what} to correlate, found {found}; use a larger network")


def _shuffled_last(network: Copy, *, mode: str, layers: Sequence[int], **_: Any) -> Start:
    """The last fc2 with entries, or means of rows, in a random order, apart from their regression on the first."""
    first, last = first_and_last(network.source, layers)
    x, y = (part.read("fc2") for part in (first, last))
    if mode == "rows":
        x, mean = (value.double().mean(1, keepdim=True) for value in (x, y))
        apart, rest = _apart(x, mean), y - mean
        return lambda g: last.write("fc2", (rest + _shuffled(apart, g)).to(y))
    apart = _apart(x, y)
    return lambda g: last.write("fc2", _shuffled(apart, g))


@EXPECTATIONS.register(
    "mimetic_first_last_mlp",
    reads=("MLPs",),
    variants=({}, {"mode": "rows"}),
    start=_shuffled_last,
    errors=("correlation",),
)
def mimetic_first_last_mlp_statistics(source: NamedTensors, *, mode: str, layers: Sequence[int]) -> Iterator[Statistic]:
    """The correlation of fc2 in the first and the last MLP, over entries or over row means.

    With a correlation of +-0.8 of few rows, atanh is skewed: of right networks with 8, 16 or 48 rows, 0.7, 0.4 or 0.2 %
    fail; with the default of -0.5, 0.2 % or fewer.
    """
    choice("mode", mode, MODES)
    first, last = first_and_last(source, layers)
    x, y = (part.read("fc2").double().mean(1) if mode == "rows" else part.read("fc2") for part in (first, last))
    if x.numel() <= 4:
        raise _few("", x.numel(), mode)
    r = _correlation(x, y)
    yield Statistic("first and last fc2", last.layer, None, last.name, "correlation", r, "correlation")


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.cpu().double().flatten(), y.cpu().double().flatten()]))[0, 1])


# --- state-space layers -----------------------------------------------------------------------------------------------


def _of_mamba(network: Copy, *, layers: Any, heads: Any, **_: Any) -> Start:
    """What the initialiser changes as Mamba starts: A = 1 .. N, or in Mamba-2 1 .. H or U(1, 16); C like B."""

    def start(g: torch.Generator) -> None:
        for part in chosen_layers(ssms(network.source, strict=None), layers):
            a_log, some = part.read("A_log").cpu().double(), chosen_states(part, heads)
            counted = torch.arange(1, a_log.shape[-1] + 1).double().log()
            if part.version == 2 and not _proportional(a_log[some], counted[some]):
                counted = (1 + 15 * torch.rand(a_log.shape, generator=g).double()).log()
            part.write("A_log", counted.expand(a_log.shape))
            part.write("C", _shuffled(part.read("B"), g))
            for name in ("dt_weight", "dt_bias", "conv_weight", "conv_bias"):
                if name in part.parts:
                    part.write(name, torch.rand(part.read(name).shape, generator=g) - 0.5)

    return start


def _proportional(a_log: Tensor, counted: Tensor) -> bool:
    """Whether values are a multiple of others, up to rounding."""
    c = float((a_log * counted).sum() / counted.square().sum().clamp_min(1e-300))
    return float((a_log - c * counted).abs().max()) <= 0.01 * abs(c) * float(counted.max())


@EXPECTATIONS.register(
    "mimetic_ssm",
    reads=("state-space layers",),
    variants=tuple({"c": c} for c in (2.0, 4.0, 8.0)),
    start=_of_mamba,
    errors=("c",),
)
def mimetic_ssm_statistics(source: NamedTensors, **p: Any) -> Iterator[Statistic]:
    """Statistics of every state-space layer.

    - mean A_log, std A_log: of A = -exp(A_log);
    - W_Delta, Delta: the largest entry of W_Delta, and the softplus(b_Delta) farthest from 1;
    - C on B: slope of W_C on W_B, 1/2, and their correlation, 1/sqrt(2);
    - current tap, other taps: of the convolution.
    """
    for part in chosen_layers(ssms(source, strict=None), p["layers"]):
        some = chosen_states(part, p["heads"])
        exact: dict[str, float] = {}
        spread: dict[str, float] = {}
        if p["a"]:
            a_log = part.read("A_log").cpu().double()[some]
            spread["mean A_log"], spread["std A_log"] = float(a_log.mean()), float(a_log.std(correction=0))
        if p["delta"]:
            exact["W_Delta"] = float(part.read("dt_weight")[some].abs().max())
            exact["Delta"] = farthest(F.softplus(part.read("dt_bias")[some].double()), 1.0)
        if p["cb"]:
            b, c = part.read("B").cpu().double(), part.read("C").cpu().double()
            spread["C on B"], spread["C-B correlation"] = _slope(b, c), _correlation(b, c)
        if part.version == 2 if p["convolution"] is None else p["convolution"]:
            taps = part.read("conv_weight").cpu()
            zeros = [taps[:, :-1].flatten()] + ([part.read("conv_bias").cpu()] if "conv_bias" in part.parts else [])
            exact["current tap"] = farthest(taps[:, -1], 1.0)
            exact["other taps and bias"] = float(F.pad(torch.cat(zeros), (0, 1)).abs().max())
        for what, value in (spread | exact).items():
            scale = "correlation" if what == "C-B correlation" else "identity"
            slack = 1e-6 if what.startswith("other") else 0.0
            yield Statistic("ssm", part.layer, None, part.name, what, value, scale, part.layer, slack=slack)


def farthest(values: Tensor, target: float) -> float:
    """The entry that is farthest from a number."""
    flat = values.cpu().double().flatten()
    return float(flat[(flat - target).abs().argmax()])
