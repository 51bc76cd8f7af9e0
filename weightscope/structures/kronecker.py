"""Kronecker: a matrix normal for each tensor, covariance between rows (x) covariance between columns."""

import numpy as np

from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.structures.base import STRUCTURES, matrix_shapes
from weightscope.structures.separable import Array, Separable


@STRUCTURES.register("kronecker", source="Dutilleul 1999")
class Kronecker(Separable):
    """W = M + A Z B^T for each tensor as a matrix (p, n): Cov(vec W) = A A^T (x) B B^T, row-major vec.

    A tensor with more than two axes counts as (first axis, all others): the covariance between a convolution's
    filters (x) that between pixels (thesis 3.1.1). Several tensors are independent of each other. Fitted by
    maximum likelihood (`weightscope.statistics.kronecker.matrix_normal`).

    Args:
        spec: of the D entries.
        mean: (D,).
        factors: for each tensor A (p, p), lower triangular; and for each tensor B (n, n), lower triangular.
        parameters: the number of fitted numbers.
        diagnostics: about the fit.

    Raises:
        UsageError: if a tensor has fewer than two axes.
        DataError: if an array has the wrong shape, is not finite or is singular.
    """

    name = "kronecker"
    form = "kronecker"
    axes = ("rows", "columns")

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """Each tensor as a matrix."""
        if flat := [t.name for t in spec.tensors if len(t.shape) < 2 or 0 in t.shape]:
            raise UsageError(f"a Kronecker structure is for tensors of two or more axes, found `{flat[0]}`")
        named = zip(spec.slices.items(), matrix_shapes(spec), strict=True)
        return tuple(Array(name, shape, (part,)) for (name, part), shape in named)

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        """For each tensor A (p, p)."""
        return tuple(root for root, _ in self.roots)

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """For each tensor B (n, n)."""
        return tuple(root for _, root in self.roots)
