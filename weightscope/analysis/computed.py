"""Computed coordinates by name: diagonals of products of weights, central pixels of filters, and their magnitudes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from weightscope._util.names import unknown
from weightscope._util.plugins import imported
from weightscope.errors import UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Coordinates, Function
from weightscope.statistics.permutation_rules import permutations_by_name
from weightscope.statistics.permutations import bare

Arrays = Mapping[str, np.ndarray]
_MAGNITUDE = "abs:"


def coordinates_of(
    spec: WeightSpec,
    select: str | Sequence[str] | None,
    computed: Mapping[str, Function] | Sequence[str] | None,
    fold_norms: bool,
    default: str | Sequence[str],
) -> Coordinates:
    """What is computed of each network; of "auto" the computed coordinates alone or, without, the default tensors."""
    names = [computed] if isinstance(computed, str) else computed or ()
    named = names if isinstance(names, Mapping) else {name: function_named(name) for name in names}
    if select == "auto":
        select = None if named else default
    return Coordinates(spec, select, computed=named, fold_norms=fold_norms)


def function_named(name: str) -> Function:
    """A function of NAMED or `module:function`; of `abs:` and such a name, the absolute values of its numbers."""
    if name.startswith(_MAGNITUDE):
        if (inner := name.removeprefix(_MAGNITUDE)).startswith(_MAGNITUDE):
            raise UsageError(f"computed {name}: expected {_MAGNITUDE} once")
        return partial(_magnitude, function_named(inner), name)
    if name not in NAMED and ":" not in name:
        raise UsageError(unknown("computed coordinate", name, NAMED, "module:function, or abs: and a name"))
    return NAMED[name] if name in NAMED else imported(name)


def _magnitude(function: Function, given: str, tensors: Arrays) -> dict[str, np.ndarray]:
    found = function(tensors)
    if not isinstance(found, Mapping):
        return {given: np.abs(found)}
    return {".".join([*name.split(".")[:-1], f"|{name.split('.')[-1]}|"]): np.abs(x) for name, x in found.items()}


def _diagonals(kind: str, tensors: Arrays) -> dict[str, np.ndarray]:
    """(A B)_cc = sum over units u of a_cu b_uc, (n, d), of the two matrices between channels and each group of units.

    The groups are those of the permutation specification, `hidden` of MLPs (in gated ones up and down), `qk` or `vo`.
    Of attention, the sum over a layer's heads.
    """
    spec = WeightSpec(TensorSpec(name, x.shape[1:]) for name, x in tensors.items())
    found: dict[str, list[Any]] = {}
    for view in permutations_by_name(spec).views:
        labels = [axis for axis in view.axes if axis is not None]
        units = [label for label in labels if bare(label).split(".")[0] == kind]
        if len(labels) == 2 and len(units) == 1:
            found.setdefault(bare(units[0]), []).append((view, units[0]))
    out = {}
    for both in found.values():
        both = [one for one in both if one[1].startswith("~")] if len(both) == 3 else both
        if len(both) != 2:
            continue
        one, other = (_by_unit(view.of(tensors[view.tensor]), view.axes.index(units)) for view, units in both)
        if one.shape == other.shape:
            path = both[0][0].tensor.rpartition(".")[0]
            block = path.rpartition(".")[0].removesuffix(".mlp").removesuffix(".attn")
            out[f"{block}.{_NAMES[kind]}"] = np.einsum("nuc,nuc->nc", one, other)
    if not out:
        raise UsageError(f"computed {_NAMES[kind]}: expected two matrices between channels and units, found none")
    return out


def _by_unit(matrix: np.ndarray, axis: int) -> np.ndarray:
    """(n, units, channels) of a matrix whose units are on an axis; further axes of length one are left out."""
    return np.moveaxis(matrix, axis + 1, 1).reshape(len(matrix), matrix.shape[axis + 1], -1)


def _centres(tensors: Arrays) -> dict[str, np.ndarray]:
    """The central pixels (n, C) of depthwise filters of odd side."""
    from weightscope.anatomy import depthwise  # torch

    parts = [part for part in depthwise({name: x[0] for name, x in tensors.items()}) if part.square]
    if not parts:
        raise UsageError("computed centre-pixel: expected square depthwise filters of odd side, found none")
    out = {}
    for part in parts:
        filters, middle = tensors[f"{part.name}.weight"], part.kernel[0] // 2
        out[f"{part.name.rpartition('.')[0]}.centre-pixel"] = filters[:, :, 0, middle, middle]
    return out


_NAMES = {"hidden": "mlp-diagonal", "qk": "qk-diagonal", "vo": "vo-diagonal"}
NAMED: dict[str, Function] = {name: partial(_diagonals, kind) for kind, name in _NAMES.items()}
NAMED["centre-pixel"] = _centres
