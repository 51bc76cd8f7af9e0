"""Statistics of the baselines: independent entries, scaled branches, isometries, LayerScale."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.anatomy.matrices import Matrix, fans
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS, error_in
from weightscope.auditing.runs import Copy, Statistic, by_tensor, default_start
from weightscope.errors import DataError, UsageError
from weightscope.init.base import selected
from weightscope.init.baselines import (
    FACTOR,
    as_matrix,
    branches,
    centre_tap,
    convolutions,
    kaiming_uniform_,
)

DEFAULT = "the default start of torch's layers"


def _module(source: NamedTensors, name: str) -> nn.Module:
    if not isinstance(source, ModuleTensors):
        raise UsageError(f"{name}: needs a module, since fan-in and fan-out depend on the layer of a tensor")
    return source.module


def _by_torch(network: Copy, seed: int, *, select: str, **_: Any) -> None:
    kaiming_uniform_(network.target, select=select, generator=torch.Generator().manual_seed(seed))


def _one_of_each_shape(source: NamedTensors, p: dict[str, Any]) -> dict[str, Any]:
    """The parameters with `select` of one matrix of each shape, since all of a shape have one distribution."""
    found = selected(_module(source, "kaiming_uniform"), p["select"])
    first = {_like(matrix): matrix.name for matrix in reversed(found)}
    return p | {"select": ",".join(first.values())}


def _like(matrix: Matrix) -> tuple[Any, ...]:
    return *matrix.split(matrix.weight)[0].shape, matrix.fused, matrix.bias is not None


def _entries_of_matrices(name: str, source: NamedTensors, select: str, bias: str) -> Iterator[Statistic]:
    for i, matrix in enumerate(selected(_module(source, name), select)):
        blocks, like = matrix.split(matrix.weight.cpu()), _like(matrix)
        for number, block in enumerate(blocks):
            head = None if len(blocks) == 1 else number
            unit = 1 / math.sqrt(fans(block)[0]) if block.numel() else 1.0
            for what, value, scale in entries(matrix.name, block, unit):
                yield Statistic("weight", i, head, matrix.name, what, value, scale, like)
        if matrix.bias is not None and bias != "keep":
            values = matrix.bias.detach().cpu().double()
            if bias == "zero":
                yield Statistic("weight", i, None, matrix.name, "largest bias", float(values.abs().max()), like=like)
            else:
                square = float(values.square().mean()) * fans(blocks[0])[0]
                yield Statistic("weight", i, None, matrix.name, "bias square", square, "variance", like)


def entries(name: str, w: Tensor, unit: float) -> Iterator[tuple[str, float, str]]:
    """Name, value and scale of the mean and mean square, in units, and kurtosis of entries."""
    if not w.numel():
        raise DataError(f"expected a weight with entries, found the shape {tuple(w.shape)}; it has nothing to audit")
    squares = (w.float() / unit).square()
    square = float(squares.mean())
    yield "mean", float(w.float().mean()) / unit, "identity"
    yield "mean square", square, "variance"
    if w.numel() >= 100:  # below, the sample kurtosis is far from normal
        yield "kurtosis", float(squares.square().mean()) / max(square**2, 1e-30), "kurtosis"


_SHARED: dict[str, Any] = {"start": _by_torch, "untouched": DEFAULT, "fewer": _one_of_each_shape}


@EXPECTATIONS.register("kaiming_uniform", errors=("slope",), **_SHARED)
def kaiming_uniform_statistics(source: NamedTensors, *, bias: str, select: str) -> Iterator[Statistic]:
    """Statistics of the entries of every matrix, in units of 1 / sqrt(fan_in)."""
    return _entries_of_matrices("kaiming_uniform", source, select, bias)


@EXPECTATIONS.register("xavier", errors=("gain",), **_SHARED)
def xavier_statistics(source: NamedTensors, *, bias: str, select: str) -> Iterator[Statistic]:
    """Statistics of the entries of every matrix, in units of 1 / sqrt(fan_in)."""
    return _entries_of_matrices("xavier", source, select, bias)


@EXPECTATIONS.register("trunc_normal", errors=("std",), **_SHARED)
def trunc_normal_statistics(source: NamedTensors, *, bias: str, select: str) -> Iterator[Statistic]:
    """Statistics of the entries of every matrix, in units of 1 / sqrt(fan_in)."""
    return _entries_of_matrices("trunc_normal", source, select, bias)


def _larger_branches(_: Any) -> dict[str, Any]:
    def larger(network: Any) -> None:
        for part, name in branches(network, "both", strict=None, caller="t_fixup"):
            part.write(name, 1.2 * part.read(name))

    return {error_in("scale"): larger}


@EXPECTATIONS.register("t_fixup", reads=("attention modules", "MLPs"), errors=_larger_branches)
def t_fixup_statistics(source: NamedTensors, *, kind: str) -> Iterator[Statistic]:
    """Statistics of the entries of residual branches, in units of 1 / sqrt(fan_in)."""
    choice("kind", kind, ("encoder", "decoder"))
    for part, name in branches(source, "both", strict=None, caller="t_fixup"):
        w = as_matrix(name, part.read(name).cpu())
        for what, value, scale in entries(part.name, w, w.shape[1] ** -0.5):
            yield Statistic(name, part.layer, None, part.name, what, value, scale, tuple(w.shape))


def _kinds(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    parts = parameters.get("parts", "attention")
    return ("attention modules",) * (parts != "mlp") + ("MLPs",) * (parts != "attention")


EXPECTATIONS.register("zero_init", reads=_kinds)(by_tensor)


@EXPECTATIONS.register("delta_orthogonal", errors=("gain",))
def delta_orthogonal_statistics(source: NamedTensors, *, gain: float, select: str) -> Iterator[Statistic]:
    """Statistics of every convolution, an orthogonal matrix at its centre tap and zero elsewhere."""
    for i, (matrix, layer) in enumerate(convolutions(_module(source, "delta_orthogonal"), select)):
        w = matrix.weight.detach().cpu().double() / gain
        total, centre = float(w.square().sum()), centre_tap(w)  # (out, in)
        rest = max(0.0, total - float(centre.square().sum())) / max(total, 1e-300)
        apart = _not_orthogonal(centre, layer.groups)
        shape = (*w.shape, layer.groups)
        for what, value, slack in (("off-centre energy", rest, 1e-9), ("distance from orthogonal", apart, 0.02)):
            yield Statistic("convolution", i, None, matrix.name, what, value, like=shape, slack=slack, side="above")


def _not_orthogonal(matrix: Tensor, groups: int) -> float:
    """The largest entry of W^T W - I or W W^T - I, the smaller of the two, of each group of rows."""
    blocks = torch.stack(matrix.chunk(groups))
    gram = blocks.mT @ blocks if blocks.shape[1] >= blocks.shape[2] else blocks @ blocks.mT
    return float((gram - torch.eye(gram.shape[-1])).abs().max())


# What untouched LayerScales of other libraries start from: ones, and the values of CaiT and of ConvNeXt.
_STARTS = (1.0, 1e-4, 1e-5, 1e-6)


def _layer_scales(network: Copy, seed: int, *, value: float, **_: Any) -> None:
    """What the module's `reset_parameters` makes, else the nearest of the published values; any value in a file."""
    for name in filter(FACTOR.search, network.source.names):
        start = default_start(network.source, name)
        if start is not None:
            network.source.get(name).copy_(start)
        elif isinstance(network.source, ModuleTensors):
            network.source.get(name).fill_(min(_STARTS, key=lambda x: abs(x - value)))


@EXPECTATIONS.register("layer_scale_identity", start=_layer_scales, errors=("value",))
def layer_scale_identity_statistics(source: NamedTensors, *, value: float) -> Iterator[Statistic]:
    """LayerScale's factors; the scale of matrices cannot be checked without knowing them before."""
    names = [name for name in source.names if FACTOR.search(name)]
    if not names:
        raise UsageError("layer_scale_identity: scaled matrices look like any others; only LayerScale can be audited")
    for i, name in enumerate(names):
        far = farthest(source.get(name), value)
        yield Statistic("factor", i, None, name, "farthest", far, like=name, slack=0.01 * value)
