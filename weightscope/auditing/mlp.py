"""Expectations of `mimetic_mlp_`: a mean in the first layer's entries, the same for all hidden units."""

import math

from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import MLPPart, NamedTensors, mlps
from weightscope.anatomy.matrices import chosen_layers, default_deviation
from weightscope.auditing.intervals import chi_squared, f_ratio, normal
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of


@EXPECTATIONS.register("mimetic_mlp", variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}))
def mimetic_mlp_checks(
    source: NamedTensors, *, mode: str, b: float, sigma: float, gate: bool, layers: int | list[int] | None
) -> list[Check]:
    """Checks of fc1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries;
    - input means: variance of the n means over hidden units, relative to that of independent entries;
    - unit means: the same for the p means over inputs, which no mode changes;
    - slope: of the regression of fc1 on fc2^T, in the mode "anticorrelated".

    Apart from the means, entries are assumed to be independent, of any scale.

    Raises:
        AnatomyError: if there is no MLP.
    """
    choice("mode", mode, ("scalar", "rows", "anticorrelated"))
    checks: list[Check] = []
    for part in chosen_layers(mlps(source), layers):
        for name in ("fc1", "gate") if gate and part.kind == "gated" else ("fc1",):
            fc1 = part.read(name).cpu().double()
            rows = _anticorrelated(fc1, part) if mode == "anticorrelated" else _shifted(fc1, mode, b, sigma)
            checks += checks_of("mimetic_mlp", name, part.layer, None, part.name, rows)
    return checks


def _shifted(fc1: Tensor, mode: str, b: float, sigma: float) -> list[Row]:
    """`b` and `sigma` are in units of the default entries' deviation, as in `mimetic_mlp_`."""
    p, n = fc1.shape
    unit = default_deviation(fc1)
    b, sigma = b * unit, sigma * unit
    mean, inputs, units = fc1.mean(), fc1.mean(0), fc1.mean(1)
    noise = float((fc1 - inputs - units[:, None] + mean).square().sum()) / ((p - 1) * (n - 1))  # entry variance
    spread = float(inputs.var()) * p / noise if noise else math.inf
    other = float(units.var()) * n / noise if noise else math.inf
    low, high = f_ratio(n - 1, (p - 1) * (n - 1))
    if mode == "rows":  # the means have variance sigma^2 + noise / p
        gain = 1 + sigma**2 * p / noise if noise else math.inf
        low, high = (gain * x for x in chi_squared(n - 1))
        limits = normal(0.0, math.sqrt(sigma**2 / n + noise / (p * n)))
    else:
        limits = normal(b, math.sqrt(noise / (p * n)), slack=0.005 * abs(b))
    return [
        ("mean", float(mean), limits),
        ("input means", spread, (low, high)),
        ("unit means", other, f_ratio(p - 1, (p - 1) * (n - 1))),
    ]


def _anticorrelated(fc1: Tensor, part: MLPPart) -> list[Row]:
    """`(fc1 - fc2^T) / 2` has the slope -1/2 on fc2^T, and independent residuals of the variance of fc1 / 4."""
    fc2 = part.read("fc2").cpu().double().mT
    x, y = fc2 - fc2.mean(), fc1 - fc1.mean()
    slope = float((x * y).sum() / x.square().sum())
    rest = float((y - slope * x).var())
    error = math.sqrt(rest / float(x.square().sum()))
    share = rest / float(y.var()) if float(y.var()) else 0.0
    return [
        ("slope", slope, normal(-0.5, error, slack=0.005)),
        ("own share of variance", share, (1e-12, 0.999)),  # in packed gates the residuals are tiny, not zero
    ]
