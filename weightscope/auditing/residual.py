"""Expectations of the baselines for residual networks: zeros, identities, isometries and scaled branches."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.anatomy.attention_modules import find as find_attention
from weightscope.anatomy.mlp import find as find_mlps
from weightscope.auditing.default_start import default_start
from weightscope.auditing.intervals import UNTOUCHED, error_in, outside
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.auditing.univariate import selected, uniform_entries
from weightscope.errors import AnatomyError, UsageError
from weightscope.init.baselines import (
    CONVOLUTIONS,
    FACTOR,
    QKV,
    QKVO,
    branches,
    centre_tap,
    fan_sum,
    matrices_of,
    zero_matrix,
)


@EXPECTATIONS.register("zero_init", reads=branches)
def zero_init_checks(source: NamedTensors, *, parts: str) -> list[Check]:
    """Checks that the first matrices of every branch are those of ZerO and the last ones zero."""
    choice("parts", parts, ("attention", "mlp", "both"))
    checks: list[Check] = []

    def add(layer: int, name: str, part: str, statistic: str, found: Tensor, high: float) -> None:
        # torch's default entries reach +-1/sqrt(fan in), an identity 1.
        reach = found.shape[-1] ** -0.5 if statistic == "largest" else 1 - found.shape[-1] ** -0.5
        power = {UNTOUCHED: outside((0.0, high), reach, 0.0)}
        if statistic == "distance":
            power[error_in("the identities")] = outside((0.0, high), 0.2, 0.0)
        largest = float(found.abs().max())
        checks.append(Check("zero_init", part, layer, None, name, statistic, largest, 0.0, high, power))

    for attention in find_attention(source) if parts != "mlp" else []:
        for letter in QKV:
            matrix = attention.read(letter).cpu().mT.flatten(0, 1)  # (out, in)
            add(attention.layer, attention.name, letter, "distance", matrix - zero_matrix(*matrix.shape), 0.005)
        add(attention.layer, attention.name, "o", "largest", attention.read("o").cpu(), 0.0)
    for mlp in find_mlps(source) if parts != "attention" else []:
        for name in matrices_of(mlp):
            matrix = mlp.read(name).cpu()
            if name == "fc2":
                add(mlp.layer, mlp.name, name, "largest", matrix, 0.0)
            else:
                add(mlp.layer, mlp.name, name, "distance", matrix - zero_matrix(*matrix.shape), 0.005)
    if not checks:
        raise AnatomyError(f"expected {'attention or MLPs' if parts == 'both' else parts}, found none")
    return checks


@EXPECTATIONS.register("t_fixup", reads=("attention modules", "MLPs"))
def t_fixup_checks(source: NamedTensors, *, kind: str) -> list[Check]:
    """Checks of Xavier-uniform entries, scaled down in the residual branches with the number of layers."""
    choice("kind", kind, ("encoder", "decoder"))
    attention, mlps = find_attention(source), find_mlps(source)
    if not attention or not mlps:
        raise AnatomyError(f"expected attention and MLPs, found {len(attention)} and {len(mlps)}")
    layers = len({part.layer for part in attention if part.kind == "self"})
    if not layers:
        raise AnatomyError("expected self-attention, found cross-attention only")
    scale = (9 * layers) ** -0.25 if kind == "decoder" else 0.67 * layers**-0.25
    checks: list[Check] = []
    for part in attention:
        for letter in QKVO:
            w = part.read(letter).cpu()
            rows = uniform_entries(w, math.sqrt(6 / fan_sum(letter, w.shape)) * (scale if letter in "vo" else 1.0))
            checks += checks_of("t_fixup", letter, part.layer, None, part.name, rows)
    for mlp in mlps:
        for name in matrices_of(mlp):
            w = mlp.read(name).cpu()
            rows = uniform_entries(w, math.sqrt(6 / sum(w.shape)) * scale)
            checks += checks_of("t_fixup", name, mlp.layer, None, mlp.name, rows)
    return checks


@EXPECTATIONS.register("delta_orthogonal")
def delta_orthogonal_checks(source: NamedTensors, *, gain: float, select: str) -> list[Check]:
    """Checks that every convolution is an orthogonal matrix at its centre tap and zero elsewhere."""
    matrices = selected(source, "delta_orthogonal", select)
    found = [(matrix, matrix.layer) for matrix in matrices if isinstance(matrix.layer, CONVOLUTIONS)]
    if not found:
        raise AnatomyError("expected convolutions, found none")
    checks = []
    for i, (matrix, layer) in enumerate(found):
        w = matrix.weight.detach().cpu().double() / gain
        centre = centre_tap(w)  # (out, in)
        blocks = torch.stack(centre.chunk(layer.groups))
        gram = blocks.mT @ blocks if blocks.shape[1] >= blocks.shape[2] else blocks @ blocks.mT
        rest = (w.square().sum() - centre.square().sum()).clamp_min(0) / w.square().sum().clamp_min(1e-300)
        taps = w[0, 0].numel()
        power = {error_in("gain"): outside((0.0, 0.02), 0.44, 0.0)}
        if taps == 1:
            power[UNTOUCHED] = _not_orthogonal(gram.shape[-1], max(blocks.shape[1:]), w.shape[1], gain)
        rows: list[Row] = [
            ("off-centre energy", float(rest), (0.0, 1e-9), {UNTOUCHED: outside((0.0, 1e-9), 1 - 1 / taps, 0.0)}),
            ("distance from orthogonal", float((gram - torch.eye(gram.shape[-1])).abs().max()), (0.0, 0.02), power),
        ]
        checks += checks_of("delta_orthogonal", "convolution", i, None, matrix.name, rows)
    return checks


@lru_cache(maxsize=256)
def _not_orthogonal(size: int, length: int, fan_in: int, gain: float) -> float:
    """The probability that default vectors (length, size) are farther than 0.02 from orthonormal ones, times gain.

    One diagonal entry at a time: the mean of `length` squares of U(-b, b), b = 1/sqrt(fan in), times length / gain^2.
    """
    mean = length / (3 * fan_in * gain**2)
    alone = outside((0.98, 1.02), mean, mean * math.sqrt(0.8 / length))
    return 1 - (1 - alone) ** size


# What untouched LayerScales of other libraries start from: ones, and the values of CaiT and of ConvNeXt.
_STARTS = (1.0, 1e-4, 1e-5, 1e-6)


@EXPECTATIONS.register("layer_scale_identity")
def layer_scale_identity_checks(source: NamedTensors, *, value: float, where: str) -> list[Check]:
    """Checks of LayerScale's factors; the scale of matrices cannot be checked without knowing them before.

    Untouched factors are those that the module's `reset_parameters` makes, else one of the published values. Without a
    module any value may be the network's own, and the audit is undecidable.
    """
    choice("where", where, ("auto", "factors", "matrices"))
    names = [name for name in source.names if FACTOR.search(name)]
    if where == "matrices" or not names:
        raise UsageError(
            "layer_scale_identity: scaled matrices look like any others, only LayerScale factors can be audited; "
            f"found {len(names)}"
        )
    checks = []
    for i, name in enumerate(names):
        factors = source.get(name).cpu().double().flatten()
        worst = float(factors[(factors - value).abs().argmax()])
        limits = (0.99 * value, 1.01 * value)
        start = default_start(source, name)
        if start is not None:
            starts = [float(start.flatten()[(start.flatten().double() - value).abs().argmax()])]
        else:
            starts = [*_STARTS] if isinstance(source, ModuleTensors) else [value]
        untouched = min(outside(limits, number, 0.0) for number in starts)
        power = {UNTOUCHED: untouched, error_in("value"): outside(limits, 1.2 * value, 0.0)}
        checks.append(Check("layer_scale_identity", "factor", i, None, name, "farthest", worst, *limits, power))
    return checks
