"""Statistics of the baselines: of each tensor, and of isometries and LayerScale."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.auditing.layers import farthest
from weightscope.auditing.report import EXPECTATIONS
from weightscope.auditing.runs import Copy, Statistic, by_tensor
from weightscope.errors import UsageError
from weightscope.init.baselines import FACTOR, centre_tap, convolutions


def _kinds(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    parts = parameters.get("parts", "attention")
    return ("attention modules",) * (parts != "mlp") + ("MLPs",) * (parts != "attention")


for _name in ("kaiming_uniform", "xavier", "trunc_normal"):
    EXPECTATIONS.register(_name)(by_tensor)
EXPECTATIONS.register("t_fixup", reads=("attention modules", "MLPs"))(by_tensor)
EXPECTATIONS.register("zero_init", reads=_kinds)(by_tensor)
EXPECTATIONS.register("constant_mlp_bias", reads=("MLPs",))(by_tensor)


@EXPECTATIONS.register("delta_orthogonal", errors=("gain",))
def delta_orthogonal_statistics(source: NamedTensors, *, gain: float, select: str) -> Iterator[Statistic]:
    """Statistics of every convolution, an orthogonal matrix at its centre tap and zero elsewhere."""
    if not isinstance(source, ModuleTensors):
        raise UsageError(
            "delta_orthogonal: expected a module, whose layers say what a convolution is, found tensors only"
        )
    for i, (matrix, layer) in enumerate(convolutions(source.module, select)):
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


def _layer_scales(network: Copy, *, value: float, **_: Any) -> Callable[[torch.Generator], None]:
    """What the module's `reset_parameters` makes, else the nearest of the published values; any value in a file."""
    names = list(filter(FACTOR.search, network.source.names))

    def start(_: torch.Generator) -> None:
        for name in network.start_layers(names) if isinstance(network.source, ModuleTensors) else ():
            network.source.get(name).fill_(min(_STARTS, key=lambda x: abs(x - value)))

    return start


@EXPECTATIONS.register("layer_scale_identity", start=_layer_scales, errors=("value",))
def layer_scale_identity_statistics(source: NamedTensors, *, value: float) -> Iterator[Statistic]:
    """LayerScale's factors; the scale of matrices cannot be checked without knowing them before."""
    names = [name for name in source.names if FACTOR.search(name)]
    if not names:
        raise UsageError("layer_scale_identity: scaled matrices look like any others; only LayerScale can be audited")
    for i, name in enumerate(names):
        far = farthest(source.get(name), value)
        yield Statistic("factor", i, None, name, "farthest", far, like=name, slack=0.01 * value)
