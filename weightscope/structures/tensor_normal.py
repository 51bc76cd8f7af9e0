"""TensorNormal: one matrix normal for the layers of one shape, with a covariance between layers as third factor."""

import re

from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.structures.base import STRUCTURES, matrix_shapes
from weightscope.structures.separable import Array, Separable


@STRUCTURES.register("tensor_normal", source="Hoff 2011; Manceur and Dutilleul 2013")
class TensorNormal(Separable):
    """Cov(vec X) = R_L (x) R_p (x) R_n for the tensors of one role and shape, stacked: X (L, p, n), row-major vec.

    The same tensor of several blocks (`blocks.0.mlp.fc2.weight`, `blocks.1.mlp.fc2.weight`, ...) has L layers; each as
    a matrix (p, n): first axis by all others, a vector as one row. R_L is the covariance between layers, R_p between
    rows, R_n between columns: a tensor normal of order three, a matrix normal where L = 1. Stacks are independent of
    each other. Fitted by maximum likelihood (`weightscope.statistics.kronecker.tensor_normal`, which says
    how many networks are necessary).

    Entries of the same place in two layers have the correlation of R_L. Hidden units of two blocks can be renumbered
    apart, so that in a population only means over them can be correlated; the structure `exchangeable` has these.

    Args:
        spec: of the D entries.
        mean: (D,).
        factors: for each stack a root of R_L (L, L), lower triangular; the same of R_p (p, p), and of R_n (n, n).
        parameters: the number of fitted numbers.
        diagnostics: about the fit.

    Raises:
        UsageError: if no two tensors have one role and shape.
        DataError: if an array has the wrong shape, is not finite or is singular.
    """

    name = "tensor_normal"
    form = "tensor_normal"
    summary = "layers of one shape: covariance between layers (x) between rows (x) between columns"
    axes = ("layers", "rows", "columns")

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """Tensors whose names differ in numbers only and whose shapes agree, in the spec's order."""
        stacks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, tensor in enumerate(spec.tensors):
            stacks.setdefault((re.sub(r"\d+", "*", tensor.name), tensor.shape), []).append(i)
        if all(len(layers) < 2 for layers in stacks.values()):
            raise UsageError(
                "a tensor normal is for tensors of one name and shape in several layers, found no two of them "
                f"among {len(spec)} tensors"
            )
        parts, shapes = list(spec.slices.values()), matrix_shapes(spec)
        return tuple(
            Array(spec.tensors[layers[0]].name, (len(layers), *shapes[layers[0]]), tuple(parts[i] for i in layers))
            for layers in stacks.values()
        )
