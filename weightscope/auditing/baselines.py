"""Expectations of the baselines: independent entries; zeros, identities, isometries and scaled branches."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.anatomy.matrices import fans
from weightscope.auditing.intervals import (
    UNTOUCHED,
    Distribution,
    Row,
    default_start,
    error_in,
    predicted,
    row,
    zero_biases,
)
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS, Check, checks_of
from weightscope.errors import DataError, UsageError
from weightscope.init.base import selected
from weightscope.init.baselines import (
    FACTOR,
    ZERO,
    as_matrix,
    branches,
    centre_tap,
    convolutions,
    fixup_scale,
    zero_matrix,
)

DEFAULT = "the default start of torch's layers"


@EXPECTATIONS.register("kaiming_uniform")
def kaiming_uniform_checks(source: NamedTensors, *, slope: float, bias: str, select: str) -> Iterator[Check]:
    """Checks of entries `U(-b, b)`, `b = sqrt(6 / ((1 + slope^2) fan_in))`."""
    gain = math.sqrt(6 / (1 + slope**2))
    return _each(source, "kaiming_uniform", select, bias, lambda w: _uniform(gain / math.sqrt(fans(w)[0])))


@EXPECTATIONS.register("xavier")
def xavier_checks(source: NamedTensors, *, gain: float, distribution: str, bias: str, select: str) -> Iterator[Check]:
    """Checks of entries with variance `gain^2 * 2 / (fan_in + fan_out)`, uniform or normal."""

    def of_entries(w: Tensor) -> Distribution:
        std = gain * math.sqrt(2 / sum(fans(w)))
        return _uniform(math.sqrt(3) * std) if distribution == "uniform" else stats.norm(0, std)

    return _each(source, "xavier", select, bias, of_entries)


@EXPECTATIONS.register("trunc_normal")
def trunc_normal_checks(source: NamedTensors, *, std: float, cut: float, bias: str, select: str) -> Iterator[Check]:
    """Checks of normal entries of standard deviation `std` given that they are in [-cut, cut]."""
    edge = min(cut / std, 30.0)
    return _each(source, "trunc_normal", select, bias, lambda w: stats.truncnorm(-edge, edge, scale=std))


def _uniform(bound: float) -> Distribution:
    return stats.uniform(-bound, 2 * bound)


def _module(source: NamedTensors, name: str) -> nn.Module:
    if not isinstance(source, ModuleTensors):
        raise UsageError(f"{name}: needs a module, since fan-in and fan-out depend on the layer of a tensor")
    return source.module


def _each(
    source: NamedTensors, name: str, select: str, bias: str, expected: Callable[[Tensor], Distribution]
) -> Iterator[Check]:
    for i, matrix in enumerate(selected(_module(source, name), select)):
        blocks = matrix.split(matrix.weight.cpu())
        for number, block in enumerate(blocks):
            part = None if len(blocks) == 1 else number
            rows = entries(block.float(), expected(block), DEFAULT)
            yield from checks_of(name, "weight", i, part, matrix.name, rows)
        if matrix.bias is not None and bias != "keep":
            limit = 0.0 if bias == "zero" else 1.004 / math.sqrt(fans(blocks[0])[0])
            largest = row("largest bias", float(matrix.bias.detach().abs().max()), (0.0, limit))
            yield from checks_of(name, "weight", i, None, matrix.name, [largest])


def entries(w: Tensor, expected: Distribution, default: str = "") -> list[Row]:
    """Mean, variance, kurtosis and largest of entries relative to a symmetric distribution, with intervals.

    With `default`, the power of the variance is also given for torch's own entries, U(-1, 1) / sqrt(fan_in): those of
    `kaiming_uniform` are the same and pass, and this power says so.
    """
    n = w.numel()
    if n == 0:
        raise DataError(f"expected a weight with entries, found the shape {tuple(w.shape)}; it has nothing to audit")
    std, largest = expected.std(), expected.support()[1]
    m4, m6, m8 = _moments(expected.dist.name, expected.args[: expected.dist.numargs])
    squares = w.square()
    square = float(squares.mean())
    error = math.sqrt((m4 - 1) / n)
    wrong = {error_in("the standard deviation"): stats.norm(1.44, 1.44 * error)}
    if default:
        ratio = 1 / (3 * fans(w)[0] * std**2)
        wrong[default] = stats.norm(ratio, ratio * math.sqrt(0.8 / n))
    rows = [
        row("mean", float(w.mean()) / std, stats.norm(0, 1 / math.sqrt(n))),
        row("variance", square / std**2, stats.norm(1, error), wrong, slack=2e-3),
    ]
    if n >= 1000:  # below, the sample kurtosis is far from normal
        error = math.sqrt((m8 - m4**2 - 4 * m4 * (m6 - m4) + 4 * m4**2 * (m4 - 1)) / n)
        kurtosis = float(squares.square().mean()) / max(square**2, 1e-300)
        rows.append(row("kurtosis", kurtosis, stats.norm(m4, error), slack=0.02))
    if largest < math.inf:
        rows.append(row("largest", max(map(abs, map(float, w.aminmax()))) / largest, (0.0, 1.004)))
    return rows


@cache
def _moments(name: str, shape: tuple[float, ...]) -> tuple[float, ...]:
    """The 4th, 6th and 8th standardised moments of a distribution of `scipy.stats`; each is an integral, so slow."""
    one = getattr(stats, name)(*shape)
    return tuple(float(one.expect(lambda x, k=k: (x - one.mean()) ** k)) / one.std() ** k for k in (4, 6, 8))


@EXPECTATIONS.register("t_fixup", reads=("attention modules", "MLPs"))
def t_fixup_checks(source: NamedTensors, *, kind: str) -> Iterator[Check]:
    """Checks of Xavier-uniform entries, scaled down in the residual branches with the number of layers."""
    choice("kind", kind, ("encoder", "decoder"))
    found = branches(source, "both", strict=None, caller="t_fixup")
    scale = fixup_scale(found, kind)
    for part, name in found:
        w = as_matrix(name, part.read(name).cpu())
        bound = math.sqrt(6 / sum(w.shape)) * (1.0 if name in ("q", "k") else scale)
        yield from checks_of("t_fixup", name, part.layer, None, part.name, entries(w, _uniform(bound)))


def _kinds(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    parts = parameters.get("parts", "attention")
    return ("attention modules",) * (parts != "mlp") + ("MLPs",) * (parts != "attention")


@EXPECTATIONS.register("zero_init", reads=_kinds)
def zero_init_checks(source: NamedTensors, *, parts: str) -> Iterator[Check]:
    """Checks that the first matrices of every branch are those of ZerO and the last ones zero."""
    choice("parts", parts, ("attention", "mlp", "both"))
    for part, name in branches(source, parts, strict=None, caller="zero_init"):
        matrix = as_matrix(name, part.read(name).cpu())
        edge = matrix.shape[-1] ** -0.5  # torch's default entries reach +-1/sqrt(fan in), an identity 1
        if name in ZERO:
            check = row("largest", float(matrix.abs().max()), 0.0, {UNTOUCHED: edge})
        else:
            wrong = {UNTOUCHED: 1 - edge, error_in("the identities"): 0.2}
            check = row("distance", float((matrix - zero_matrix(*matrix.shape)).abs().max()), (0.0, 0.005), wrong)
        yield from checks_of("zero_init", name, part.layer, None, part.name, [check, *zero_biases(part, [name])])


@EXPECTATIONS.register("delta_orthogonal")
def delta_orthogonal_checks(source: NamedTensors, *, gain: float, select: str) -> Iterator[Check]:
    """Checks that every convolution is an orthogonal matrix at its centre tap and zero elsewhere."""
    for i, (matrix, layer) in enumerate(convolutions(_module(source, "delta_orthogonal"), select)):
        w = matrix.weight.detach().cpu().double() / gain
        total, centre = float(w.square().sum()), centre_tap(w)  # (out, in)
        rest = max(0.0, total - float(centre.square().sum())) / max(total, 1e-300)
        edge, taps, g = 1 / (gain * math.sqrt(w[0].numel())), w[0, 0].numel(), torch.Generator().manual_seed(0)
        wrong = {error_in("gain"): 0.44}
        if taps == 1:
            draws = [torch.rand(centre.shape, generator=g, dtype=w.dtype) for _ in range(6)]
            wrong[UNTOUCHED] = predicted([_not_orthogonal((2 * u - 1) * edge, layer.groups) for u in draws])
        rows = [
            row("off-centre energy", rest, (0.0, 1e-9), {UNTOUCHED: 1 - 1 / taps}),
            row("distance from orthogonal", _not_orthogonal(centre, layer.groups), (0.0, 0.02), wrong),
        ]
        yield from checks_of("delta_orthogonal", "convolution", i, None, matrix.name, rows)


def _not_orthogonal(matrix: Tensor, groups: int) -> float:
    """The largest entry of W^T W - I or W W^T - I, the smaller of the two, of each group of rows."""
    blocks = torch.stack(matrix.chunk(groups))
    gram = blocks.mT @ blocks if blocks.shape[1] >= blocks.shape[2] else blocks @ blocks.mT
    return float((gram - torch.eye(gram.shape[-1])).abs().max())


# What untouched LayerScales of other libraries start from: ones, and the values of CaiT and of ConvNeXt.
_STARTS = (1.0, 1e-4, 1e-5, 1e-6)


@EXPECTATIONS.register("layer_scale_identity")
def layer_scale_identity_checks(source: NamedTensors, *, value: float) -> Iterator[Check]:
    """Checks of LayerScale's factors; the scale of matrices cannot be checked without knowing them before.

    Untouched factors are those that the module's `reset_parameters` makes, else one of the published values. Without a
    module any value may be the network's own, and the audit is undecidable.
    """
    names = [name for name in source.names if FACTOR.search(name)]
    if not names:
        raise UsageError("layer_scale_identity: scaled matrices look like any others; only LayerScale can be audited")
    for i, name in enumerate(names):
        start = default_start(source, name)
        starts = [*_STARTS] if isinstance(source, ModuleTensors) else [value]
        starts = starts if start is None else [farthest(start, value)]
        wrong = {UNTOUCHED: min(starts, key=lambda x: abs(x - value)), error_in("value"): 1.2 * value}
        rows = [row("farthest", farthest(source.get(name), value), value, wrong, slack=0.01 * value)]
        yield from checks_of("layer_scale_identity", "factor", i, None, name, rows)
