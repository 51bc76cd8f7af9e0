"""Expectations of the initialisers of MLPs and state-space layers, and of correlations between layers."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor
from torch.nn import functional as F

from weightscope._util.checks import choice
from weightscope.anatomy import MLPPart, NamedTensors, SSMPart, chosen_layers, filter_mlps, mlps, ssms
from weightscope.anatomy.matrices import default_deviation
from weightscope.auditing.intervals import UNTOUCHED, Distribution, Row, error_in, interval, normal, row
from weightscope.auditing.report import EXPECTATIONS, Check, checks_of, each
from weightscope.errors import AnatomyError, UsageError
from weightscope.init.mlp import MODES, first_and_last
from weightscope.init.ssm import chosen_states

# --- means in MLPs ----------------------------------------------------------------------------------------------------


@EXPECTATIONS.register("mimetic_mlp", reads=("MLPs",), variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}))
def mimetic_mlp_checks(source: NamedTensors, **p: Any) -> Iterator[Check]:
    """Checks of fc1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries, in units of the default entries' std;
    - input means: variance of the n means over hidden units, relative to the expected one;
    - unit means: the same for the p means over inputs, which no mode changes;
    - all layers: the mean, or the input means' variance, pooled;
    - slope: of the regression of fc1 on fc2^T, in the mode "anticorrelated".

    Apart from the means, entries are assumed to be independent, of any scale, so that the distributions are known: the
    present noise, which the initialiser was added to, is what they depend on.
    """
    choice("mode", p["mode"], ("scalar", "rows", "anticorrelated"))
    b, sigma = (0.0, p["sigma"]) if p["mode"] == "rows" else (p["b"], 0.0)
    matrices: list[Tensor] = []
    for part in chosen_layers(mlps(source, strict=None), p["layers"]):
        matrices.append(fc1 := part.read("fc1").cpu().double())
        if not fc1.numel():
            raise AnatomyError(f"`{part.name}`: expected fc1 with entries, found the shape {tuple(fc1.shape)}")
        rows = _anticorrelated(fc1, part) if p["mode"] == "anticorrelated" else _means([fc1], b, sigma)
        yield from checks_of("mimetic_mlp", "fc1", part.layer, None, part.name, rows)
    if len(matrices) > 1 and p["mode"] != "anticorrelated":
        yield from checks_of("mimetic_mlp", "fc1", None, None, "all layers", _means(matrices, b, sigma))


def _means(matrices: list[Tensor], b: float, sigma: float) -> list[Row]:
    """The mean b of the entries of matrices (p, n) with input means of variance sigma^2, and the variances of means.

    The noise is what is left without the means of rows and columns, in units of the default entries' variance.
    """
    p, n = np.array([w.shape for w in matrices]).T
    units = np.array([default_deviation(w) for w in matrices])
    means = np.array([float(w.mean()) for w in matrices]) / units
    parts = np.array([[float(x.var(correction=0)) for x in (w, w.mean(0), w.mean(1))] for w in matrices]).T
    total, of_inputs, of_units = parts * p * n / units**2  # sums of squares
    noise = np.maximum((total - of_inputs - of_units) / np.maximum(1, (p - 1) * (n - 1)), 1e-100)  # constant ones fail
    precision, gains = 1 / (sigma**2 / n + noise / (p * n)), 1 + sigma**2 * p / noise
    mean, error = float(precision @ means / precision.sum()), precision.sum() ** -0.5
    dof, others, rest = (n - 1).sum(), (p - 1).sum(), ((p - 1) * (n - 1)).sum()
    inputs, hidden = float((of_inputs / noise / gains).sum()), float((of_units / noise).sum())
    wrong = {UNTOUCHED: 1 / gains, error_in("sigma"): 1.44 - 0.44 / gains}
    scaled = {key: stats.f(dof, rest, scale=(n - 1) @ values / max(1, dof)) for key, values in wrong.items()}
    shifted = {UNTOUCHED: normal(0, error), error_in("b"): normal(1.2 * b, error)}
    return [
        row("mean", mean, normal(b, error), shifted if b else {}, slack=0.005 * abs(b)),
        row("input means", inputs / max(1, dof), stats.f(dof, rest), scaled if sigma else {}),
        row("unit means", hidden / max(1, others), stats.f(others, rest)),
    ]


def _anticorrelated(fc1: Tensor, part: MLPPart) -> list[Row]:
    """`(fc1 - fc2^T) / 2` has the slope -1/2 on fc2^T, and independent residuals of the variance of fc1 / 4."""
    slope, rest, error = _regression(part.read("fc2").cpu().double().mT, fc1)
    wrong = {UNTOUCHED: normal(0, error), error_in("the factor 1/2"): normal(-0.6, error)}
    # In packed gates the residuals are tiny, not zero.
    share = row("own share of variance", rest / float(fc1.var() or 1), (1e-12, 0.999))
    return [row("slope", slope, normal(-0.5, error), wrong, slack=0.005), share]


def _regression(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """The slope of y on x, the variance of the residuals, and the standard error of the slope."""
    x, y = x - x.mean(), y - y.mean()
    square = float(x.square().sum())
    slope = float((x * y).sum()) / square if square else math.nan
    rest = float((y - slope * x).var())
    return slope, rest, math.sqrt(rest / square) if square else math.inf


@EXPECTATIONS.register("constant_mlp_bias", reads=("MLPs",))
def constant_mlp_bias_checks(source: NamedTensors, *, value: float, layers: Any) -> list[Check]:
    """Checks of the entry of each fc1's bias that is farthest from the value; biases usually start around 0."""
    slack = 0.01 * abs(value) + 1e-6  # rounding of half precision

    def rows(part: MLPPart) -> list[Row]:
        bias = part.read_bias("fc1")
        if bias is None or not bias.numel():
            raise UsageError(f"`{part.name}`: expected an MLP whose first layer has a bias, found none")
        return [row("farthest", farthest(bias, value), value, {UNTOUCHED: 0.0, error_in("value"): 1.2 * value}, slack)]

    return each("constant_mlp_bias", "fc1 bias", chosen_layers(mlps(source, strict=None), layers), rows)


def farthest(values: Tensor, target: float) -> float:
    """The entry that is farthest from a number."""
    flat = values.cpu().double().flatten()
    return float(flat[(flat - target).abs().argmax()])


# --- correlations between layers --------------------------------------------------------------------------------------

_SLACK = 0.005  # rounding in half precision
_BINS = 8192


@EXPECTATIONS.register("mimetic_conv_mlp", reads=("depthwise convolutions", "MLPs"))
def mimetic_conv_mlp_checks(source: NamedTensors, *, correlation: float, layers: Any) -> Iterator[Check]:
    """Checks of the correlation between central pixels and diag(W2 W1), in each block and pooled over blocks.

    Only the pooled correlation decides between right and untouched networks; one block alone has too few channels.
    """
    name, what, parts = "mimetic_conv_mlp", "filters and MLP", chosen_layers(filter_mlps(source, strict=None), layers)
    sizes = [part.filters.channels for part in parts]
    if max(sizes) <= 4:
        raise UsageError(
            f"{name}: expected more than 4 channels to correlate, found {max(sizes)}; use a larger network"
        )
    found = [_correlation(part.diagonal(), part.centres()) for part in parts]
    yield from checks_of(name, what, None, None, "all blocks", [_correlations(found, sizes, correlation, "channels")])
    for part, r, size in zip(parts, found, sizes, strict=True):
        if size > 4:
            alone = _correlations([r], [size], correlation, "channels")
            yield from checks_of(name, what, part.layer, None, part.filters.name, [(*alone[:3], {})])


@EXPECTATIONS.register("mimetic_first_last_mlp", reads=("MLPs",), variants=({}, {"mode": "rows"}))
def mimetic_first_last_mlp_checks(
    source: NamedTensors, *, correlation: float, mode: str, layers: list[int]
) -> list[Check]:
    """A check of the correlation of fc2 in the first and the last MLP, over entries or over row means."""
    choice("mode", mode, MODES)
    first, last = first_and_last(source, layers)
    x, y = (part.read("fc2").double().mean(1) if mode == "rows" else part.read("fc2") for part in (first, last))
    rows = [_correlations([_correlation(x, y)], [x.numel()], correlation, mode)]
    return checks_of("mimetic_first_last_mlp", "first and last fc2", last.layer, None, last.name, rows)


def _correlation(x: Tensor, y: Tensor) -> float:
    if x.numel() <= 4:
        return math.nan
    return float(torch.corrcoef(torch.stack([x.cpu().double().flatten(), y.cpu().double().flatten()]))[0, 1])


def _correlations(found: Sequence[float], sizes: Sequence[int], rho: float, what: str) -> Row:
    """The tanh of the mean of z = atanh(r) over samples, weighted by n - 3; samples of 4 or fewer have no weight.

    The wrong correlation is 1.2 times the right one, or 0.8 times where 1.2 would be beyond +-1.
    """
    if max(sizes) <= 4:
        raise UsageError(f"expected more than 4 {what} to correlate, found {max(sizes)}; use a larger network")
    n = tuple(size for size in sizes if size > 4)
    weights = (np.array(n) - 3) / (np.array(n) - 3).sum()
    low, high = np.tanh(interval(_mean_z(rho, n)))
    limits = float(low) - _SLACK, float(high) + _SLACK
    wrong = {
        UNTOUCHED: _mean_z(0.0, n),
        error_in("correlation"): _mean_z((1.2 if abs(rho) <= 1 / 1.2 else 0.8) * rho, n),
    }
    inside = tuple(_z(np.array(limits)).tolist())
    r = math.tanh(_z(np.array([r for r, size in zip(found, sizes, strict=True) if size > 4])) @ weights)
    return "correlation", r, limits, row("", 0.0, inside, wrong)[3]


def _z(r: np.ndarray) -> np.ndarray:
    return np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))


@cache
def _mean_z(rho: float, sizes: tuple[int, ...]) -> Distribution:
    """The distribution of the weighted mean of z, by convolution of histograms: it is skewed in small samples.

    For the correlation r of independent normal samples, r sqrt((n - 2) / (1 - r^2)) has Student's distribution of n - 2
    degrees of freedom. `correlated` makes (rho + sqrt(1 - rho^2) r) / sqrt(1 + 2 rho sqrt(1 - rho^2) r) of it.
    """
    from scipy import signal  # takes a while to import, and few audits need it

    levels = special.expit(np.linspace(-28, 28, 2 * _BINS + 1))
    samples, s = [], math.sqrt(1 - rho**2)
    for n in sizes:
        t = stats.t.ppf(levels[1::2], n - 2)
        r = t / np.sqrt(n - 2 + t**2)
        samples.append(_z((rho + s * r) / np.sqrt(1 + 2 * rho * s * r)) * (n - 3) / sum(n - 3 for n in sizes))
    step, start, mass = sum(float(np.ptp(z)) for z in samples) / _BINS, sum(float(z.min()) for z in samples), np.ones(1)
    for z in samples:
        places = np.rint((z - z.min()) / step).astype(int)
        mass = signal.fftconvolve(mass, np.bincount(places, weights=np.diff(levels[::2])))
    return stats.rv_histogram((mass.clip(0), start + step * (np.arange(len(mass) + 1) - 0.5)))


# --- state-space layers -----------------------------------------------------------------------------------------------

# log U for U uniform in [1, 16], from which mamba_ssm draws A in Mamba-2
_A_RANGE = 16.0
_LOG_A = np.log(np.linspace(1.0, _A_RANGE, 100_001))


@EXPECTATIONS.register("mimetic_ssm", reads=("state-space layers",), variants=tuple({"c": c} for c in (2.0, 4.0, 8.0)))
def mimetic_ssm_checks(source: NamedTensors, **p: Any) -> list[Check]:
    """Checks of every state-space layer.

    - decay factor: c such that A_log = -c log(A_0), with A_0 of Mamba's own initialisation (1 .. N, 1 .. H, or
      U(1, 16));
    - slowest, fastest: the range of A = -exp(A_log);
    - W_Delta, Delta: the largest entry of W_Delta, and the softplus(b_Delta) farthest from 1;
    - C on B: slope of W_C on W_B, 1/2, and their correlation, 1/sqrt(2);
    - current tap, other taps: of the convolution.
    """

    def rows(part: SSMPart) -> list[Row]:
        some = chosen_states(part, p["heads"])
        out = _decay(part, p["c"], some) if p["a"] else []
        if p["delta"]:
            out.append(row("W_Delta", float(part.read("dt_weight")[some].abs().max()), 0.0))
            out.append(row("Delta", farthest(F.softplus(part.read("dt_bias")[some].double()), 1.0), 1.0, slack=0.01))
        out += _readout(part) if p["cb"] else []
        if part.version == 2 if p["convolution"] is None else p["convolution"]:
            taps = part.read("conv_weight").cpu()
            zeros = [taps[:, :-1].flatten()] + ([part.read("conv_bias").cpu()] if "conv_bias" in part.parts else [])
            out.append(row("current tap", farthest(taps[:, -1], 1.0), 1.0, slack=1e-3))
            out.append(row("other taps and bias", float(F.pad(torch.cat(zeros), (0, 1)).abs().max()), (0.0, 1e-6)))
        return out

    return each("mimetic_ssm", "ssm", chosen_layers(ssms(source, strict=None), p["layers"]), rows)


def _decay(part: SSMPart, c: float, some: list[int]) -> list[Row]:
    """The c estimated from A_log, given how A was initialised, and the range of A: from the largest start^-c to 1."""
    a_log = part.read("A_log").cpu().double()[some]
    places = torch.arange(part.state) if part.version == 1 else torch.tensor(some)
    count = len(places)
    slowest = 0.98 * (max(_A_RANGE, part.heads) if part.version == 2 else count) ** -c
    mean, std = float(_LOG_A.mean()), float(_LOG_A.std())
    factor, sd = -float(a_log.mean()) / mean, std / (mean * math.sqrt(count))  # sd is relative

    def around(c: float) -> Distribution:
        return normal(c, abs(c) * sd)

    if count > 1:
        counted = (places + 1).double().log()
        slope = -float((a_log * counted).sum() / (counted.square().sum() * (a_log.numel() / count)))
        error = float((a_log + slope * counted).abs().max()) / (c * float(counted.max()))
        if part.version == 1 or error < 0.01:  # if large, A_log has no factor at all
            factor, sd = slope if error <= 0.02 else math.nan, 0.0
    wrong = {UNTOUCHED: around(-1.0), error_in("c"): around(1.2 * c)}
    rate, bounds = a_log.exp(), (slowest, 1.02)
    return [
        row("decay factor", factor, around(c), wrong, slack=0.01 * c),
        row("slowest -A", float(rate.min()), bounds),
        row("fastest -A", float(rate.max()), bounds),
    ]


def _readout(part: SSMPart) -> list[Row]:
    write, read = part.read("B").cpu().double().flatten(), part.read("C").cpu().double().flatten()
    slope, _, error = _regression(write, read)
    spread = 1 / math.sqrt(len(write))
    # d r = (1 - r^2) / sqrt(n) for normal entries; uniform ones fluctuate less.
    expected, untouched = normal(math.sqrt(0.5), 0.5 * spread), normal(0, spread)
    return [
        row("C on B", slope, normal(0.5, error), slack=0.005),
        row("C-B correlation", _correlation(write, read), expected, {UNTOUCHED: untouched}, slack=0.01),
    ]
