"""Expectations of `mimetic_mlp_`: a mean in the first layer's entries, the same for all hidden units."""

import math

from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import MLPPart, NamedTensors
from weightscope.anatomy.mlp import find
from weightscope.auditing.intervals import Interval, chi_squared, f_ratio, normal
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check
from weightscope.errors import AnatomyError
from weightscope.init._common import chosen_layers


@EXPECTATIONS.register("mimetic_mlp", variants=({}, {"mode": "rows"}, {"mode": "anticorrelated"}))
def mimetic_mlp_checks(
    source: NamedTensors, *, mode: str, b: float, sigma: float, gate: bool, layers: int | list[int] | None
) -> list[Check]:
    """Checks of W1 (p, n) in every MLP, as a two-way table of hidden units and inputs.

    - mean: of all entries;
    - input means: variance of the n means over hidden units, relative to that of independent entries;
    - unit means: the same for the p means over inputs, which no mode changes;
    - slope: of the regression of W1 on W2^T, in the mode "anticorrelated".

    Apart from the means, entries are assumed to be independent, of any scale.

    Raises:
        AnatomyError: if there is no MLP.
    """
    choice("mode", mode, ("scalar", "rows", "anticorrelated"))
    parts = find(source)
    if not parts:
        raise AnatomyError("expected MLPs, found none")
    wanted = chosen_layers(layers, (part.layer for part in parts))
    checks: list[Check] = []
    for part in parts:
        if part.layer not in wanted:
            continue
        for name in ("fc1", "gate") if gate and part.kind == "gated" else ("fc1",):
            w1 = part.read(name).cpu().double()
            rows = _anticorrelated(w1, part) if mode == "anticorrelated" else _shifted(w1, mode, b, sigma)
            checks += [
                Check("mimetic_mlp", name, part.layer, None, part.name, statistic, found, *limits)
                for statistic, found, limits in rows
            ]
    return checks


def _shifted(w1: Tensor, mode: str, b: float, sigma: float) -> list[tuple[str, float, Interval]]:
    p, n = w1.shape
    mean, inputs, units = w1.mean(), w1.mean(0), w1.mean(1)
    noise = float((w1 - inputs - units[:, None] + mean).square().sum()) / ((p - 1) * (n - 1))  # entry variance
    spread = float(inputs.var()) * p / noise if noise else math.inf
    other = float(units.var()) * n / noise if noise else math.inf
    low, high = f_ratio(n - 1, (p - 1) * (n - 1))
    if mode == "rows":  # the means have variance sigma + noise / p
        gain = 1 + sigma * p / noise if noise else math.inf
        low, high = (gain * x for x in chi_squared(n - 1))
        limits = normal(0.0, math.sqrt(sigma / n + noise / (p * n)))
    else:
        limits = normal(b, math.sqrt(noise / (p * n)), slack=0.005 * abs(b))
    return [
        ("mean", float(mean), limits),
        ("input means", spread, (low, high)),
        ("unit means", other, f_ratio(p - 1, (p - 1) * (n - 1))),
    ]


def _anticorrelated(w1: Tensor, part: MLPPart) -> list[tuple[str, float, Interval]]:
    """`(W1 - W2^T) / 2` has the slope -1/2 on W2^T, and independent residuals of the variance of W1 / 4."""
    w2 = part.read("fc2").cpu().double().mT
    x, y = w2 - w2.mean(), w1 - w1.mean()
    slope = float((x * y).sum() / x.square().sum())
    rest = float((y - slope * x).var())
    error = math.sqrt(rest / float(x.square().sum()))
    share = rest / float(y.var()) if float(y.var()) else 0.0
    return [
        ("slope", slope, normal(-0.5, error, slack=0.005)),
        ("own share of variance", share, (1e-12, 0.999)),  # in packed gates the residuals are tiny, not zero
    ]
