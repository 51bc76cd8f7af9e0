"""Gaussians whose covariance is a Kronecker product for each tensor: the matrix normal."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import UsageError
from weightscope.fits.structure import (
    Facts,
    Structure,
    checked_data,
    fit_mean,
    frozen,
    matrix_shapes,
    require_variation,
)
from weightscope.spec import WeightSpec
from weightscope.statistics.kronecker import along, matrix_normal


class Kronecker(Structure):
    """W = M + A Z B^T for each tensor as a matrix (p, n): Cov(vec W) = A A^T (x) B B^T, row-major vec.

    A tensor with more than two axes counts as (first axis, all others): the covariance between a convolution's
    filters (x) that between pixels (thesis 3.1.1). Several tensors are independent of each other; one with fewer than
    two axes is a UsageError. `rows` and `columns` are A (p, p) and B (n, n) of each tensor, lower triangular; `roots`
    has the pairs. Fitted by maximum likelihood (`weightscope.statistics.kronecker.matrix_normal`, which says how many
    networks are necessary).
    """

    name = "kronecker"

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        rows: Sequence[np.ndarray],
        columns: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Facts = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self._shapes = _shapes(spec)
        self.roots = tuple((frozen(a), frozen(b)) for a, b in zip(rows, columns, strict=True))

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        shapes = _shapes(spec)
        data = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(data, spec)
        deviations, steps = data - mean, {}
        require_variation(np.mean(deviations**2, axis=0))
        rows: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        for (name, part), (p, n) in zip(spec.slices.items(), shapes, strict=True):
            fit = matrix_normal(deviations[:, part].reshape(-1, p, n))
            rows.append(cholesky(fit.rows, lower=True))
            columns.append(cholesky(fit.columns, lower=True))
            parameters += (p * (p + 1) + n * (n + 1)) // 2 - 1
            steps[name] = fit.iterations if fit.converged else f"not converged after {fit.iterations}"
        return cls(spec, mean, rows, columns, parameters, {"mean": kinds, "iterations": steps})

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(p, n) for each tensor."""
        return self._shapes

    def apply_root(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """A Z B^T, tensor by tensor."""
        out = np.empty((len(noise[0]), self.spec.size))
        for part, roots, z in zip(self.spec.slices.values(), self.roots, noise, strict=True):
            for axis, root in enumerate(roots, 1):
                z = along(root.__matmul__, z, axis)
            out[:, part] = z.reshape(len(out), -1)
        return out

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """See `Structure.squares`."""
        value = np.zeros(len(deviations))
        for part, shape, roots in zip(self.spec.slices.values(), self._shapes, self.roots, strict=True):
            white = deviations[:, part].reshape(-1, *shape)
            for axis, root in enumerate(roots, 1):
                white = along(partial(solve_triangular, root, lower=True), white, axis)
            value += np.square(white.reshape(len(value), -1)).sum(axis=1)
            value += sum(2 * math.prod(shape) // len(root) * np.log(np.diag(root)).sum() for root in roots)
        return value

    def covariance(self) -> np.ndarray:
        dense = np.zeros((self.spec.size, self.spec.size))
        for part, (a, b) in zip(self.spec.slices.values(), self.roots, strict=True):
            dense[part, part] = np.kron(a @ a.T, b @ b.T)
        return dense

    def _arrays(self) -> dict[str, np.ndarray]:
        columns = zip(("rows", "columns"), zip(*self.roots, strict=True), strict=True)
        return {f"{axis}.{i}": root for axis, roots in columns for i, root in enumerate(roots)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], spec: WeightSpec, parameters: int = 0, diagnostics: Facts = None
    ) -> Self:
        """The inverse of `to_tensors`."""
        rows, columns = ([tensors[f"{axis}.{i}"] for i in range(len(spec))] for axis in ("rows", "columns"))
        return cls(spec, tensors["mean"], rows, columns, parameters, diagnostics)


def _shapes(spec: WeightSpec) -> tuple[tuple[int, int], ...]:
    """(p, n) of each tensor; a UsageError if one is no matrix."""
    if flat := [t.name for t in spec.tensors if len(t.shape) < 2 or 0 in t.shape]:
        raise UsageError(f"a Kronecker structure is for tensors of two or more axes, found `{flat[0]}`")
    return matrix_shapes(spec)
