"""Expectations of the initialisers of MLPs and state-space layers, and of correlations between layers."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from weightscope._util.checks import choice
from weightscope.anatomy import FilterMLP, MLPPart, NamedTensors, SSMPart, chosen_layers, filter_mlps, mlps, ssms
from weightscope.anatomy.matrices import default_deviation
from weightscope.auditing.intervals import (
    FISHER,
    UNTOUCHED,
    Interval,
    Row,
    Simulated,
    error_in,
    f_ratio,
    normal,
    outside,
    powers,
)
from weightscope.auditing.report import EXPECTATIONS, Check, checks_of, each
from weightscope.errors import AnatomyError, UsageError
from weightscope.init.mlp import MODES, correlated, first_and_last
from weightscope.init.ssm import chosen_states

# --- means in MLPs ----------------------------------------------------------------------------------------------------


@EXPECTATIONS.register("mimetic_mlp", reads=("MLPs",), variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}))
def mimetic_mlp_checks(
    source: NamedTensors, *, mode: str, b: float, sigma: float, gate: bool, layers: int | list[int] | None
) -> list[Check]:
    """Checks of fc1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries, in units of the default entries' standard deviation;
    - input means: variance of the n means over hidden units, relative to the expected one;
    - unit means: the same for the p means over inputs, which no mode changes;
    - all layers: the mean, or the input means' variance, pooled;
    - slope: of the regression of fc1 on fc2^T, in the mode "anticorrelated".

    Apart from the means, entries are assumed to be independent, of any scale, so that the distributions are known: the
    present noise, which the initialiser was added to, is what they depend on.
    """
    choice("mode", mode, ("scalar", "rows", "anticorrelated"))
    b, sigma = (0.0, sigma) if mode == "rows" else (b, 0.0)
    checks: list[Check] = []
    tables: dict[str, list[Table]] = {}
    for part in chosen_layers(mlps(source, strict=None), layers):
        for name in ("fc1", "gate") if gate and part.kind == "gated" else ("fc1",):
            fc1 = part.read(name).cpu().double()
            if not fc1.numel():
                raise AnatomyError(f"`{part.name}`: expected {name} with entries, found the shape {tuple(fc1.shape)}")
            if mode == "anticorrelated":
                rows = _anticorrelated(fc1, part)
            else:
                tables.setdefault(name, []).append(table := Table.of(fc1))
                rows = [_mean([table], b, sigma), _input_means([table], sigma), table.unit_means()]
            checks += checks_of("mimetic_mlp", name, part.layer, None, part.name, rows)
    for name, found in tables.items():
        if len(found) > 1:
            pooled = _input_means(found, sigma) if mode == "rows" else _mean(found, b, sigma)
            checks += checks_of("mimetic_mlp", name, None, None, "all layers", [pooled])
    return checks


@dataclass(frozen=True)
class Table:
    """fc1 (p, n) as a two-way table of hidden units and inputs."""

    p: int  # hidden units
    n: int  # inputs
    mean: float  # of all entries, in units of the default entries' standard deviation, as `b` and `sigma`
    noise: float  # variance of the entries apart from the means of rows and columns, in these units
    inputs: float  # variance of the n means over hidden units, relative to that of independent entries
    units: float  # variance of the p means over inputs, relative to that of independent entries

    @classmethod
    def of(cls, fc1: Tensor) -> "Table":
        """The table of a matrix."""
        p, n = fc1.shape
        w = fc1 / default_deviation(fc1)
        mean, inputs, units = w.mean(), w.mean(0), w.mean(1)
        noise = float((w - inputs - units[:, None] + mean).square().sum()) / max(1, (p - 1) * (n - 1))
        spread, other = (float(x.var()) * k / noise if noise else math.inf for x, k in ((inputs, p), (units, n)))
        return cls(p, n, float(mean), noise, spread, other)

    def gain(self, sigma: float) -> float:
        """How much input means of the standard deviation sigma increase `inputs`."""
        return 1 + sigma**2 * self.p / self.noise if self.noise else math.inf

    def unit_means(self) -> Row:
        """The variance of the unit means, which no mode changes."""
        return "unit means", self.units, f_ratio(self.p - 1, (self.p - 1) * (self.n - 1))


def _mean(tables: list[Table], b: float, sigma: float) -> Row:
    """The mean of the entries of one or more layers, weighted by precision; b is expected."""
    weights = np.array([1 / max(sigma**2 / t.n + t.noise / (t.p * t.n), 1e-300) for t in tables])
    found, error = float(weights @ [t.mean for t in tables] / weights.sum()), float(weights.sum()) ** -0.5
    limits = normal(b, error, slack=0.005 * abs(b))
    untouched = 0.0 if len(tables) == 1 else None  # that each layer counts towards the outcome is enough
    return "mean", found, limits, powers(limits, untouched, {"b": 1.2 * b}, error) if b else {}


def _input_means(tables: list[Table], sigma: float) -> Row:
    """The variance of the input means of one or more layers over that expected: about Fisher's F."""
    weights, rest = np.array([t.n - 1 for t in tables]), sum((t.p - 1) * (t.n - 1) for t in tables)
    total = int(weights.sum())
    found, untouched, wrong = (
        float(weights @ [x / t.gain(sigma) for x, t in zip(values, tables, strict=True)]) / max(1, total)
        for values in ([t.inputs for t in tables], [1.0] * len(tables), [t.gain(1.2 * sigma) for t in tables])
    )
    limits = f_ratio(total, rest)
    if not sigma:
        return "input means", found, limits
    factors = {error_in("sigma"): wrong} | ({UNTOUCHED: untouched} if len(tables) == 1 else {})
    power = {
        error: float(stats.f.cdf(limits[0] / x, total, rest) + stats.f.sf(limits[1] / x, total, rest)) if x > 0 else 0.0
        for error, x in factors.items()
    }
    return "input means", found, limits, power


def _anticorrelated(fc1: Tensor, part: MLPPart) -> list[Row]:
    """`(fc1 - fc2^T) / 2` has the slope -1/2 on fc2^T, and independent residuals of the variance of fc1 / 4."""
    slope, rest, error = _regression(part.read("fc2").cpu().double().mT, fc1)
    limits = normal(-0.5, error, slack=0.005)
    power = powers(limits, 0.0, {"the factor 1/2": -0.6}, error)
    # In packed gates the residuals are tiny, not zero.
    return [("slope", slope, limits, power), ("own share of variance", rest / float(fc1.var() or 1), (1e-12, 0.999))]


def _regression(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """The slope of y on x, the variance of the residuals, and the standard error of the slope."""
    x, y = x - x.mean(), y - y.mean()
    square = float(x.square().sum())
    slope = float((x * y).sum()) / square if square else math.nan
    rest = float((y - slope * x).var())
    return slope, rest, math.sqrt(rest / square) if square else math.inf


@EXPECTATIONS.register("constant_mlp_bias", reads=("MLPs",))
def constant_mlp_bias_checks(source: NamedTensors, *, value: float, layers: int | list[int] | None) -> list[Check]:
    """Checks of the entry of each fc1's bias that is farthest from the value; biases usually start around 0."""
    slack = 0.01 * abs(value) + 1e-6  # rounding of half precision
    limits = (value - slack, value + slack)

    def rows(part: MLPPart) -> list[Row]:
        bias = part.read_bias("fc1")
        if bias is None or not bias.numel():
            raise UsageError(f"`{part.name}`: expected an MLP whose first layer has a bias, found none")
        return [("farthest", farthest(bias, value), limits, powers(limits, 0.0, {"value": 1.2 * value}))]

    return each("constant_mlp_bias", "fc1 bias", chosen_layers(mlps(source, strict=None), layers), rows)


def farthest(values: Tensor, target: float) -> float:
    """The entry that is farthest from a number."""
    flat = values.cpu().double().flatten()
    return float(flat[(flat - target).abs().argmax()])


# --- correlations between layers --------------------------------------------------------------------------------------

_SLACK = 0.005  # rounding in half precision
_MOST = 4096  # pairs that are simulated; the deviation of more is scaled


@EXPECTATIONS.register("mimetic_conv_mlp", reads=("depthwise convolutions", "MLPs"))
def mimetic_conv_mlp_checks(source: NamedTensors, *, correlation: float, layers: int | list[int] | None) -> list[Check]:
    """Checks of the correlation between central pixels and diag(W2 W1), in each block and pooled over blocks.

    Only the pooled correlation decides between right and untouched networks; one block alone has too few channels.
    """
    name, what, parts = "mimetic_conv_mlp", "filters and MLP", chosen_layers(filter_mlps(source, strict=None), layers)
    sizes = tuple(part.filters.channels for part in parts)
    limits, power = _expected(name, "channels", correlation, sizes)
    found = {part.name: _correlation(part.diagonal(), part.centres()) for part in parts}
    pooled: Row = ("correlation", pooled_correlation([*found.values()], sizes), limits, power)
    large = [part for part in parts if part.filters.channels > 4]

    def rows(part: FilterMLP) -> list[Row]:
        limits = _expected(name, "channels", correlation, (part.filters.channels,))[0]
        return [("correlation", found[part.name], limits)]

    return [*checks_of(name, what, None, None, "all blocks", [pooled]), *each(name, what, large, rows)]


@EXPECTATIONS.register("mimetic_first_last_mlp", reads=("MLPs",), variants=({}, {"mode": "rows"}))
def mimetic_first_last_mlp_checks(
    source: NamedTensors, *, correlation: float, mode: str, layers: list[int]
) -> list[Check]:
    """A check of the correlation of fc2 in the first and the last MLP, over entries or over row means."""
    choice("mode", mode, MODES)
    first, last = first_and_last(source, layers)
    x, y = (part.read("fc2").double().mean(1) if mode == "rows" else part.read("fc2") for part in (first, last))
    limits, power = _expected("mimetic_first_last_mlp", mode, correlation, (x.numel(),))
    rows: list[Row] = [("correlation", _correlation(x, y), limits, power)]
    return checks_of("mimetic_first_last_mlp", "first and last fc2", last.layer, None, last.name, rows)


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.cpu().double().flatten(), y.cpu().double().flatten()]))[0, 1])


def pooled_correlation(correlations: list[float], sizes: tuple[int, ...]) -> float:
    """The tanh of the mean of atanh(r) over samples, weighted by n - 3; samples of 4 or fewer have no weight."""
    weights = np.array([n - 3.0 if n > 4 else 0.0 for n in sizes])
    return FISHER[1](float(weights @ [FISHER[0](r) for r in correlations]) / weights.sum())


def _expected(name: str, what: str, correlation: float, sizes: tuple[int, ...]) -> tuple[Interval, dict[str, float]]:
    """The interval of a correct initialisation, and the power of the check.

    The wrong correlation is 1.2 times the right one, or 0.8 times where 1.2 would be beyond +-1.
    """
    if max(sizes) <= 4:
        raise UsageError(f"{name}: expected more than 4 {what} to correlate, found {max(sizes)}; use a larger network")
    drawn, shrink = simulated_correlations(float(correlation), sizes)
    limits = drawn.interval("correlation", via=FISHER, shrink=shrink, slack=_SLACK)
    return limits, drawn.power("correlation", limits, via=FISHER, shrink=shrink)


@lru_cache(maxsize=256)
def simulated_correlations(rho: float, sizes: tuple[int, ...], draws: int = 192) -> tuple[Simulated, float]:
    """Pooled correlations of independent samples after `correlated`, and the factor on their deviation at these sizes.

    Samples of more than `_MOST` pairs are simulated by as many; the deviation goes with the root of the number.
    """
    g, small = torch.Generator().manual_seed(0), tuple(min(n, _MOST) for n in sizes if n > 4)

    def drawn(r: float) -> dict[str, float]:
        pairs = [torch.randn(2, n, generator=g, dtype=torch.float64) for n in small]
        return {"correlation": pooled_correlation([_correlation(x, correlated(x, y, r)) for x, y in pairs], small)}

    wrong = {UNTOUCHED: 0.0, error_in("correlation"): (1.2 if abs(rho) <= 1 / 1.2 else 0.8) * rho}
    shrink = math.sqrt(sum(min(n, _MOST) for n in sizes) / sum(sizes))
    return Simulated.of(drawn, rho, wrong, draws, draws), shrink


# --- state-space layers -----------------------------------------------------------------------------------------------

# log U for U uniform in [1, 16], from which mamba_ssm draws A in Mamba-2
_A_RANGE = 16.0
_LOG_A = np.log(np.linspace(1.0, _A_RANGE, 100_001))


@EXPECTATIONS.register("mimetic_ssm", reads=("state-space layers",), variants=tuple({"c": c} for c in (2.0, 4.0, 8.0)))
def mimetic_ssm_checks(
    source: NamedTensors,
    *,
    c: float,
    a: bool,
    delta: bool,
    cb: bool,
    convolution: bool | None,
    layers: int | list[int] | None,
    heads: int | list[int] | None,
) -> list[Check]:
    """Checks of every state-space layer.

    - decay factor: c such that A_log = -c log(A_0), with A_0 of Mamba's own initialisation (1 .. N, 1 .. H, or
      U(1, 16));
    - slowest, fastest: the range of A = -exp(A_log);
    - W_Delta, Delta: the largest entry of W_Delta, and the softplus(b_Delta) farthest from 1;
    - C on B: slope of W_C on W_B, 1/2, and their correlation, 1/sqrt(2);
    - current tap, other taps: of the convolution.
    """

    def rows(part: SSMPart) -> list[Row]:
        some = chosen_states(part, heads)
        out = _decay(part, c, some) if a else []
        if delta:
            step = farthest(F.softplus(part.read("dt_bias")[some].double()), 1.0)
            out += [
                ("W_Delta", float(part.read("dt_weight")[some].abs().max()), (0.0, 0.0)),
                ("Delta", step, (0.99, 1.01)),
            ]
        out += _readout(part) if cb else []
        if part.version == 2 if convolution is None else convolution:
            taps = part.read("conv_weight").cpu()
            zeros = [taps[:, :-1].flatten()] + ([part.read("conv_bias").cpu()] if "conv_bias" in part.parts else [])
            out.append(("current tap", farthest(taps[:, -1], 1.0), (0.999, 1.001)))
            out.append(("other taps and bias", float(F.pad(torch.cat(zeros), (0, 1)).abs().max()), (0.0, 1e-6)))
        return out

    return each("mimetic_ssm", "ssm", chosen_layers(ssms(source, strict=None), layers), rows)


def _decay(part: SSMPart, c: float, some: list[int]) -> list[Row]:
    """The c estimated from A_log, given how A was initialised, and the range of A: from the largest start^-c to 1."""
    a_log = part.read("A_log").cpu().double()[some]
    places = torch.arange(part.state) if part.version == 1 else torch.tensor(some)
    count = len(places)
    slowest = 0.98 * (max(_A_RANGE, part.heads) if part.version == 2 else count) ** -c
    mean, std = float(_LOG_A.mean()), float(_LOG_A.std())
    factor, sd = -float(a_log.mean()) / mean, c * std / (mean * math.sqrt(count))
    limits = normal(c, sd, slack=0.01 * c)
    if count > 1:
        counted = (places + 1).double().log()
        slope = -float((a_log * counted).sum() / (counted.square().sum() * (a_log.numel() / count)))
        error = float((a_log + slope * counted).abs().max()) / (c * float(counted.max()))
        if part.version == 1 or error < 0.01:  # if large, A_log has no factor at all
            factor, sd, limits = slope if error <= 0.02 else math.nan, 0.0, (0.99 * c, 1.01 * c)
    power = {UNTOUCHED: outside(limits, -1.0, sd / c), error_in("c"): outside(limits, 1.2 * c, 1.2 * sd)}
    rate, bounds = a_log.exp(), (slowest, 1.02)
    return [
        ("decay factor", factor, limits, power),
        ("slowest -A", float(rate.min()), bounds),
        ("fastest -A", float(rate.max()), bounds),
    ]


def _readout(part: SSMPart) -> list[Row]:
    write, read = part.read("B").cpu().double().flatten(), part.read("C").cpu().double().flatten()
    slope, _, error = _regression(write, read)
    spread = 1 / math.sqrt(len(write))
    # d r = (1 - r^2) / sqrt(n) for normal entries; uniform ones fluctuate less.
    limits = normal(math.sqrt(0.5), 0.5 * spread, slack=0.01)
    return [
        ("C on B", slope, normal(0.5, error, slack=0.005)),
        ("C-B correlation", _correlation(write, read), limits, powers(limits, 0.0, {}, spread)),
    ]
