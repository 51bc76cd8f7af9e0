"""Dense: every covariance is free, shrunk after Ledoit and Wolf."""

from typing import Self

import numpy as np
from scipy.linalg import cholesky

from weightscope.errors import DataError
from weightscope.spec import WeightSpec
from weightscope.statistics.shrinkage import ledoit_wolf_of_rows
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import checked_data, fit_mean, require_variation


class Dense(AffineGaussian):
    """The Ledoit-Wolf (2004) covariance (1 - a) S + a m I, on tensors scaled to the same mean variance.

    For one tensor this is exactly `sklearn.covariance.LedoitWolf` about this structure's mean; scaling makes the
    target of several tensors of different sizes "independent entries with each tensor's own variance". With
    fewer networks than entries the covariance is kept as a factor of N columns, and no D x D matrix is made.
    """

    name = "dense"
    summary = "full covariance with Ledoit-Wolf shrinkage"

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D). Diagnostics hold the shrinkage intensity."""
        rows = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = np.empty(spec.size)
        for part in spec.slices.values():
            scale[part] = np.sqrt(np.mean(rows[:, part] ** 2)) if part.stop > part.start else 1.0
        require_variation(scale, "entries")
        rows /= scale
        shrunk = ledoit_wolf_of_rows(rows)
        ridge = shrunk.intensity * shrunk.target
        weight = np.sqrt((1.0 - shrunk.intensity) / len(rows))
        variance, factor = ridge * scale**2, None
        if weight and len(rows) < spec.size:
            if not ridge:
                raise DataError(f"no shrinkage and fewer networks ({len(rows)}) than entries ({spec.size})")
            factor = weight * scale[:, None] * principal_rows(rows).T
        elif weight:
            matrix = weight**2 * (rows.T @ rows)
            matrix[np.diag_indices_from(matrix)] += ridge
            try:
                factor, variance = scale[:, None] * cholesky(matrix, lower=True), np.zeros(spec.size)
            except np.linalg.LinAlgError as error:
                raise DataError(f"the covariance is singular even after shrinkage: {error}") from error
        parameters += spec.size * (spec.size + 1) // 2
        return cls(spec, mean, variance, factor, parameters, {"mean": kinds, "shrinkage": shrunk.intensity})


def principal_rows(rows: np.ndarray) -> np.ndarray:
    """Orthogonal rows P (r, D) with P^T P = X^T X, by falling norm, from X (N, D).

    They do not depend on the order of X's rows, so neither does what is sampled from them.
    """
    values, vectors = np.linalg.eigh(rows @ rows.T)
    keep = values > values[-1] * len(rows) * np.finfo(np.float64).eps
    principal = (vectors[:, keep].T @ rows)[::-1]
    largest = np.abs(principal).argmax(axis=1)
    return principal * np.sign(principal[np.arange(len(principal)), largest])[:, None]
