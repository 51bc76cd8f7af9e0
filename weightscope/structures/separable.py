"""Normal distributions whose covariance is a Kronecker product for each array of tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.spec import WeightSpec
from weightscope.statistics.kronecker import tensor_normal
from weightscope.structures.base import (
    Structure,
    checked_data,
    checked_names,
    checked_root,
    fit_mean,
    require_variation,
)


@dataclass(frozen=True)
class Array:
    """Entries of a weight vector that form one array.

    Attributes:
        name: of its first tensor.
        shape: (d_1, ..., d_K).
        parts: of the weight vector, one after the other in row-major order.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[slice, ...]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The array of each of the vectors (N, D): (N, d_1, ..., d_K)."""
        return np.concatenate([rows[:, part] for part in self.parts], axis=1).reshape(-1, *self.shape)

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """The inverse of `read`, in place."""
        flat, start = values.reshape(len(rows), -1), 0
        for part in self.parts:
            stop = start + part.stop - part.start
            rows[:, part] = flat[:, start:stop]
            start = stop


class Separable(Structure):
    """x = mean + (L_1 (x) ... (x) L_K) z for each array of tensors; arrays are independent of each other.

    A subclass says which arrays there are, and names their axes. Fitted by maximum likelihood
    (`weightscope.statistics.kronecker.tensor_normal`).

    Attributes:
        axes: names of the K factors of an array, outermost first.
        arrays: those of the spec.
        roots: for each array L_1, ..., L_K, lower triangular, (d_k, d_k).
    """

    axes: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        *factors: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.arrays = self.arrays_of(spec)
        self.roots = tuple(
            tuple(
                checked_root(root, f"{axis}.{i}", d)
                for axis, root, d in zip(self.axes, roots, array.shape, strict=True)
            )
            for i, (array, roots) in enumerate(zip(self.arrays, zip(*factors, strict=True), strict=True))
        )

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """The arrays that the tensors form.

        Raises:
            UsageError: if the structure is not for these tensors.
        """
        raise NotImplementedError

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D)."""
        arrays = cls.arrays_of(spec)
        data = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(data, spec)
        deviations, steps = data - mean, {}
        require_variation(np.mean(deviations**2, axis=0), "entries")
        factors: list[list[np.ndarray]] = [[] for _ in cls.axes]
        for array in arrays:
            fit = tensor_normal(array.read(deviations))
            for known, factor in zip(factors, fit.factors, strict=True):
                known.append(cholesky(factor, lower=True))
            parameters += sum(d * (d + 1) // 2 for d in array.shape) - len(array.shape) + 1
            steps[array.name] = fit.iterations if fit.converged else f"not converged after {fit.iterations}"
        notes = {"mean": kinds, "iterations": steps}
        return cls(spec, mean, *factors, parameters=parameters, diagnostics=notes)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(d_1, ..., d_K) for each array."""
        return tuple(array.shape for array in self.arrays)

    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """The factors times the noise, array by array."""
        out = np.empty((len(noise[0]), self.spec.size))
        for array, roots, z in zip(self.arrays, self.roots, noise, strict=True):
            array.write(out, _along(roots, z, lambda root, values: root @ values))
        return out

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at (..., D)."""
        deviation = np.asarray(x, dtype=np.float64) - self.mean
        flat = deviation.reshape(-1, self.spec.size)
        value = np.full(len(flat), -0.5 * self.spec.size * np.log(2.0 * np.pi))
        for array, roots in zip(self.arrays, self.roots, strict=True):
            white = _along(roots, array.read(flat), lambda root, w: solve_triangular(root, w, lower=True))
            value -= 0.5 * np.square(white.reshape(len(flat), -1)).sum(axis=1)
            size = math.prod(array.shape)
            value -= sum(size // len(root) * np.log(np.diag(root)).sum() for root in roots)
        return value.reshape(deviation.shape[:-1])

    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""
        dense = np.zeros((self.spec.size, self.spec.size))
        places = np.arange(self.spec.size)[None]
        for array, roots in zip(self.arrays, self.roots, strict=True):
            where = array.read(places).ravel()
            dense[np.ix_(where, where)] = reduce(np.kron, [root @ root.T for root in roots])
        return dense

    def _arrays(self) -> dict[str, np.ndarray]:
        columns = zip(self.axes, zip(*self.roots, strict=True), strict=True)
        return {f"{axis}.{i}": root for axis, roots in columns for i, root in enumerate(roots)}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, np.ndarray],
        spec: WeightSpec,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> Self:
        """The inverse of `to_tensors`."""
        keys = [[f"{axis}.{i}" for i in range(len(cls.arrays_of(spec)))] for axis in cls.axes]
        checked_names(tensors, ["mean", *(key for names in keys for key in names)])
        factors = ([tensors[key] for key in names] for names in keys)
        return cls(spec, tensors["mean"], *factors, parameters=parameters, diagnostics=diagnostics)


def _along(roots: Sequence[np.ndarray], values: np.ndarray, apply: Any) -> np.ndarray:
    """Apply `apply(root, matrix)` along each axis of (N, d_1, ..., d_K)."""
    for axis, root in enumerate(roots, 1):
        front = np.moveaxis(values, axis, 0)
        values = np.moveaxis(apply(root, front.reshape(len(root), -1)).reshape(front.shape), 0, axis)
    return values
