"""Gaussians with covariance diag(variance) + factor factor^T, the form of four of the structures."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import DataError
from weightscope.spec import WeightSpec
from weightscope.structures.base import Structure, checked, checked_names

_LOG_2PI = float(np.log(2.0 * np.pi))


class AffineGaussian(Structure):
    r"""x = mean + sqrt(variance) * z1 + factor z2 with standard normal z1 (D,) and z2 (r,).

    The density goes through the r x r matrix I + F^T V^-1 F (Woodbury) when r < D, and through the Cholesky
    factor of the dense covariance otherwise.

    Args:
        spec: of the D entries.
        mean: (D,).
        variance: (D,), >= 0; all zero for a covariance that is in the factor alone.
        factor: (D, r), or None for r = 0.
        parameters: the number of fitted numbers.
        diagnostics: about the fit.

    Raises:
        DataError: if an array has the wrong shape, is not finite, or a variance is negative.
    """

    form = "affine"

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        variance: np.ndarray,
        factor: np.ndarray | None = None,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.variance = checked(variance, "variance", (spec.size,))
        self.factor = checked(np.zeros((spec.size, 0)) if factor is None else factor, "factor", (spec.size, None))
        if (self.variance < 0).any():
            raise DataError("`variance`: expected numbers >= 0, found negative ones")

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(D,) for the variances unless all are zero, (r,) for the factor unless r = 0."""
        shapes = [(self.spec.size,)] if self.variance.any() else []
        return tuple(shapes + [(self.factor.shape[1],)] * bool(self.factor.shape[1]))

    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """sqrt(variance) * z1 + factor z2."""
        terms = list(noise)
        out = np.sqrt(self.variance) * terms.pop(0) if self.variance.any() else np.zeros(self.spec.size)
        return out + terms.pop(0) @ self.factor.T if terms else out

    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""
        dense = self.factor @ self.factor.T
        dense[np.diag_indices_from(dense)] += self.variance
        return dense

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at (..., D)."""
        deviation = np.asarray(x, dtype=np.float64) - self.mean
        rows = deviation.reshape(-1, self.spec.size)
        scaled, whiten, log_det = self._root
        if scaled is None:
            quadratic = np.sum(solve_triangular(whiten, rows.T, lower=True) ** 2, axis=0)
        else:
            rows = rows / np.sqrt(self.variance)
            quadratic = np.sum(rows**2, axis=1)
            if scaled.shape[1]:
                quadratic -= np.sum(solve_triangular(whiten, (rows @ scaled).T, lower=True) ** 2, axis=0)
        value = -0.5 * (quadratic + log_det + self.spec.size * _LOG_2PI)
        return value.reshape(deviation.shape[:-1])

    @cached_property
    def _root(self) -> tuple[np.ndarray | None, np.ndarray, float]:
        """`(V^-1/2 F, Cholesky factor of the capacitance, log det)`, or `(None, of the covariance, log det)`."""
        size, rank = self.factor.shape
        try:
            if rank < size or not rank:
                if not (self.variance > 0).all():
                    raise DataError("the covariance is singular: entries without variance have no density")
                scaled = self.factor / np.sqrt(self.variance)[:, None]
                root = cholesky(np.eye(rank) + scaled.T @ scaled, lower=True)
                log_det = 2.0 * np.log(np.diag(root)).sum() + np.log(self.variance).sum()
                return scaled, root, float(log_det)
            root = cholesky(self.covariance(), lower=True)
        except np.linalg.LinAlgError as error:
            raise DataError(f"the covariance is singular: {error}") from error
        return None, root, float(2.0 * np.log(np.diag(root)).sum())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"variance": self.variance} if self.variance.any() else {}
        return arrays | ({"factor": self.factor} if self.factor.shape[1] else {})

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, np.ndarray],
        spec: WeightSpec,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> Self:
        """The inverse of `to_tensors`; an absent variance is zero, an absent factor has no columns."""
        checked_names(tensors, ["mean"], ["variance", "factor"])
        variance = tensors.get("variance", np.zeros(spec.size))
        return cls(spec, tensors["mean"], variance, tensors.get("factor"), parameters, diagnostics)
