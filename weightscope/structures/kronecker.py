"""Kronecker: a matrix normal for each tensor, covariance between rows (x) covariance between columns."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.kronecker.factorisation import matrix_normal
from weightscope.structures.base import (
    STRUCTURES,
    Structure,
    checked,
    checked_data,
    checked_names,
    fit_mean,
    matrix_shapes,
    require_variation,
)


@STRUCTURES.register("kronecker", source="Dutilleul 1999")
class Kronecker(Structure):
    """W = M + A Z B^T for each tensor as a matrix (p, n): Cov(vec W) = A A^T (x) B B^T, row-major vec.

    A tensor with more than two axes counts as (first axis, all others): the covariance between a convolution's
    filters (x) that between pixels (thesis 3.1.1). Several tensors are independent of each other. Fitted by
    maximum likelihood (`weightscope.statistics.kronecker.factorisation.matrix_normal`).

    Args:
        spec: of the D entries.
        mean: (D,).
        rows: for each tensor A (p, p), lower triangular.
        columns: for each tensor B (n, n), lower triangular.
        parameters: the number of fitted numbers.
        diagnostics: about the fit.

    Raises:
        DataError: if an array has the wrong shape, is not finite or is singular.
    """

    name = "kronecker"
    form = "kronecker"

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        rows: Sequence[np.ndarray],
        columns: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self._shapes = matrix_shapes(spec)
        self.rows = tuple(
            _root(a, f"rows.{i}", p) for i, (a, (p, _)) in enumerate(zip(rows, self._shapes, strict=True))
        )
        self.columns = tuple(
            _root(b, f"columns.{i}", n) for i, (b, (_, n)) in enumerate(zip(columns, self._shapes, strict=True))
        )

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D). Every tensor needs at least two axes."""
        flat = [t.name for t in spec.tensors if len(t.shape) < 2 or 0 in t.shape]
        if flat:
            raise UsageError(f"a Kronecker structure is for tensors of two or more axes, found `{flat[0]}`")
        data = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(data, spec)
        deviations, rows, columns, steps = data - mean, [], [], {}
        require_variation(np.mean(deviations**2, axis=0), "entries")
        for (name, part), (p, n) in zip(spec.slices.items(), matrix_shapes(spec), strict=True):
            fit = matrix_normal(deviations[:, part].reshape(-1, p, n))
            rows.append(cholesky(fit.rows, lower=True))
            columns.append(cholesky(fit.columns, lower=True))
            parameters += p * (p + 1) // 2 + n * (n + 1) // 2 - 1
            steps[name] = fit.iterations if fit.converged else f"not converged after {fit.iterations}"
        return cls(spec, mean, rows, columns, parameters, {"mean": kinds, "iterations": steps})

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(p, n) for each tensor."""
        return self._shapes

    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """A Z B^T, tensor by tensor."""
        parts = [a @ z @ b.T for a, b, z in zip(self.rows, self.columns, noise, strict=True)]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at (..., D)."""
        deviation = np.asarray(x, dtype=np.float64) - self.mean
        flat = deviation.reshape(-1, self.spec.size)
        value = np.full(len(flat), -0.5 * self.spec.size * np.log(2.0 * np.pi))
        parts = zip(self.spec.slices.values(), self._shapes, self.rows, self.columns, strict=True)
        for part, (p, n), a, b in parts:
            w = flat[:, part].reshape(-1, p, n)
            half = solve_triangular(a, w.transpose(1, 0, 2).reshape(p, -1), lower=True).reshape(p, -1, n)
            white = solve_triangular(b, half.reshape(-1, n).T, lower=True).reshape(n, p, -1)
            value -= 0.5 * np.sum(white**2, axis=(0, 1))
            value -= n * np.log(np.diag(a)).sum() + p * np.log(np.diag(b)).sum()
        return value.reshape(deviation.shape[:-1])

    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D): one Kronecker product for each tensor on the diagonal."""
        dense = np.zeros((self.spec.size, self.spec.size))
        for part, a, b in zip(self.spec.slices.values(), self.rows, self.columns, strict=True):
            dense[part, part] = np.kron(a @ a.T, b @ b.T)
        return dense

    def _arrays(self) -> dict[str, np.ndarray]:
        factors = (("rows", self.rows), ("columns", self.columns))
        return {f"{key}.{i}": array for key, arrays in factors for i, array in enumerate(arrays)}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, np.ndarray],
        spec: WeightSpec,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> Self:
        """The inverse of `to_tensors`."""
        keys = [[f"{key}.{i}" for i in range(len(spec))] for key in ("rows", "columns")]
        checked_names(tensors, ["mean", *keys[0], *keys[1]])
        rows, columns = ([tensors[key] for key in names] for names in keys)
        return cls(spec, tensors["mean"], rows, columns, parameters, diagnostics)


def _root(array: np.ndarray, name: str, size: int) -> np.ndarray:
    root = checked(array, name, (size, size))
    if (np.diag(root) <= 0).any() or np.triu(root, 1).any():
        raise DataError(f"`{name}`: expected a lower triangular matrix with a positive diagonal")
    return root
