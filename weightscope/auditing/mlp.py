"""Expectations of `mimetic_mlp_`, a mean in the first layer's entries, and of its baseline, a constant bias."""

import math
from dataclasses import dataclass

from scipy import stats
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import MLPPart, NamedTensors, chosen_layers, mlps
from weightscope.anatomy.matrices import default_deviation
from weightscope.auditing.intervals import UNTOUCHED, chi_squared, error_in, f_ratio, normal, outside
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.errors import AnatomyError, UsageError


@EXPECTATIONS.register("mimetic_mlp", reads=("MLPs",), variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}))
def mimetic_mlp_checks(
    source: NamedTensors, *, mode: str, b: float, sigma: float, gate: bool, layers: int | list[int] | None
) -> list[Check]:
    """Checks of fc1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries;
    - input means: variance of the n means over hidden units, relative to that of independent entries;
    - unit means: the same for the p means over inputs, which no mode changes;
    - all layers: the mean, or the input means' variance over the expected one, pooled;
    - slope: of the regression of fc1 on fc2^T, in the mode "anticorrelated".

    Apart from the means, entries are assumed to be independent, of any scale.

    Raises:
        AnatomyError: if there is no MLP, or the first layer of one has no entries.
    """
    choice("mode", mode, ("scalar", "rows", "anticorrelated"))
    checks: list[Check] = []
    tables: dict[str, list[Table]] = {}
    for part in chosen_layers(mlps(source), layers):
        for name in ("fc1", "gate") if gate and part.kind == "gated" else ("fc1",):
            fc1 = part.read(name).cpu().double()
            if not fc1.numel():
                raise AnatomyError(f"`{part.name}`: expected {name} with entries, found the shape {tuple(fc1.shape)}")
            if mode == "anticorrelated":
                rows = _anticorrelated(fc1, part)
            else:
                table = Table.of(fc1)
                rows = _shifted(table, mode, b, sigma)
                tables.setdefault(name, []).append(table)
            checks += checks_of("mimetic_mlp", name, part.layer, None, part.name, rows)
    for name, found in tables.items():
        if len(found) > 1:
            checks += checks_of("mimetic_mlp", name, None, None, "all layers", _pooled(found, mode, b, sigma))
    return checks


@dataclass(frozen=True)
class Table:
    """fc1 (p, n) as a two-way table of hidden units and inputs.

    Attributes:
        p: hidden units.
        n: inputs.
        mean: of all entries.
        unit: the default entries' standard deviation, of which `b` and `sigma` are multiples.
        noise: variance of the entries apart from the means of rows and columns.
        inputs: variance of the n means over hidden units, relative to that of independent entries.
        units: variance of the p means over inputs, relative to that of independent entries.
    """

    p: int
    n: int
    mean: float
    unit: float
    noise: float
    inputs: float
    units: float

    @classmethod
    def of(cls, fc1: Tensor) -> "Table":
        """The table of a matrix."""
        p, n = fc1.shape
        mean, inputs, units = fc1.mean(), fc1.mean(0), fc1.mean(1)
        noise = float((fc1 - inputs - units[:, None] + mean).square().sum()) / max(1, (p - 1) * (n - 1))
        spread = float(inputs.var()) * p / noise if noise else math.inf
        other = float(units.var()) * n / noise if noise else math.inf
        return cls(p, n, float(mean), default_deviation(fc1), noise, spread, other)

    def gain(self, sigma: float) -> float:
        """How much input means of the standard deviation sigma, in units, increase `inputs`."""
        return 1 + (sigma * self.unit) ** 2 * self.p / self.noise if self.noise else math.inf

    @property
    def error(self) -> float:
        """Standard deviation of the mean of independent entries."""
        return math.sqrt(self.noise / (self.p * self.n))


def _shifted(table: Table, mode: str, b: float, sigma: float) -> list[Row]:
    p, n = table.p, table.n
    rest = (p - 1) * (n - 1)
    units: Row = ("unit means", table.units, f_ratio(p - 1, rest))
    if mode == "rows":  # the means have variance (sigma unit)^2 + noise / p
        gain = table.gain(sigma)
        low, high = (gain * x for x in chi_squared(n - 1))
        limits = normal(0.0, math.sqrt((sigma * table.unit) ** 2 / n + table.error**2))
        untouched = 1 - float(stats.f.cdf(high, n - 1, rest) - stats.f.cdf(low, n - 1, rest))
        power = {UNTOUCHED: untouched, error_in("sigma"): _wrong_sigma(gain, table.gain(1.2 * sigma), n - 1)}
        return [("mean", table.mean, limits), ("input means", table.inputs, (low, high), power), units]
    b *= table.unit
    limits = normal(b, table.error, slack=0.005 * abs(b))
    power = {UNTOUCHED: outside(limits, 0.0, table.error), error_in("b"): outside(limits, 1.2 * b, table.error)}
    return [("mean", table.mean, limits, power), ("input means", table.inputs, f_ratio(n - 1, rest)), units]


def _wrong_sigma(gain: float, other: float, dof: int) -> float:
    """The probability that input means of the relative variance `other` are outside the interval for `gain`."""
    if not math.isfinite(other):
        return 0.0
    low, high = (gain / other * dof * x for x in chi_squared(dof))
    return float(stats.chi2.cdf(low, dof) + stats.chi2.sf(high, dof))


def _pooled(tables: list[Table], mode: str, b: float, sigma: float) -> list[Row]:
    """The mean of all layers, weighted by precision, or the variance of all input means over what is expected."""
    if mode == "rows":
        tables = [table for table in tables if table.n > 1]
        if not tables:
            return []
        dofs = [table.n - 1 for table in tables]
        gains = [table.gain(sigma) for table in tables]
        found = sum(k * t.inputs / g for k, t, g in zip(dofs, tables, gains, strict=True)) / sum(dofs)
        other = sum(k * t.gain(1.2 * sigma) / g for k, t, g in zip(dofs, tables, gains, strict=True)) / sum(dofs)
        power = {error_in("sigma"): _wrong_sigma(1.0, other, sum(dofs))}
        return [("input means", found, chi_squared(sum(dofs)), power)]
    weights = [table.unit**2 / max(table.error**2, 1e-300) for table in tables]
    found = sum(w * t.mean / t.unit for w, t in zip(weights, tables, strict=True)) / sum(weights)
    error = 1 / math.sqrt(sum(weights))
    limits = normal(b, error, slack=0.005 * abs(b))
    return [("mean", found, limits, {error_in("b"): outside(limits, 1.2 * b, error)})]


def _anticorrelated(fc1: Tensor, part: MLPPart) -> list[Row]:
    """`(fc1 - fc2^T) / 2` has the slope -1/2 on fc2^T, and independent residuals of the variance of fc1 / 4."""
    fc2 = part.read("fc2").cpu().double().mT
    x, y = fc2 - fc2.mean(), fc1 - fc1.mean()
    slope = float((x * y).sum() / x.square().sum())
    rest = float((y - slope * x).var())
    error = math.sqrt(rest / float(x.square().sum()))
    share = rest / float(y.var()) if float(y.var()) else 0.0
    limits = normal(-0.5, error, slack=0.005)
    power = {UNTOUCHED: outside(limits, 0.0, error), error_in("the factor 1/2"): outside(limits, -0.6, error)}
    return [
        ("slope", slope, limits, power),
        ("own share of variance", share, (1e-12, 0.999)),  # in packed gates the residuals are tiny, not zero
    ]


@EXPECTATIONS.register("constant_mlp_bias", reads=("MLPs",))
def constant_mlp_bias_checks(source: NamedTensors, *, value: float, layers: int | list[int] | None) -> list[Check]:
    """Checks of the entry of each fc1's bias that is farthest from the value; biases usually start around 0."""
    checks = []
    for part in chosen_layers(mlps(source), layers):
        bias = part.read_bias("fc1")
        if bias is None or not bias.numel():
            raise UsageError(f"`{part.name}`: expected an MLP whose first layer has a bias, found none")
        entries = bias.cpu().double().flatten()
        worst = float(entries[(entries - value).abs().argmax()])
        slack = 0.01 * abs(value) + 1e-6  # rounding of half precision
        limits = (value - slack, value + slack)
        power = {UNTOUCHED: outside(limits, 0.0, 0.0), error_in("value"): outside(limits, 1.2 * value, 0.0)}
        checks.append(
            Check("constant_mlp_bias", "fc1 bias", part.layer, None, part.name, "farthest", worst, *limits, power)
        )
    return checks
