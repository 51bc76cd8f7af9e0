"""Gaussians with covariance diag(variance) + factor factor^T: isotropic, diagonal, low rank, and dense."""

import warnings
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope._util.threads import threads_for
from weightscope.errors import DataError, UsageError
from weightscope.fits.structure import (
    Accumulator,
    Facts,
    Structure,
    checked_data,
    choose_mean,
    fit_mean,
    frozen,
    require_variation,
)
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments


class AffineGaussian(Structure):
    r"""x = mean + sqrt(variance) * z1 + factor z2 with standard normal z1 (D,) and z2 (r,).

    `variance` (D,) is >= 0, all zero or None for a covariance that is in the factor alone; `factor` is (D, r), or None
    for r = 0. The density goes through the r x r matrix I + F^T V^-1 F (Woodbury) when r < D, and through the Cholesky
    factor of the dense covariance otherwise.
    """

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        variance: np.ndarray | None = None,
        factor: np.ndarray | None = None,
        parameters: int = 0,
        diagnostics: Facts = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.variance = frozen(np.zeros(spec.size) if variance is None else variance)
        self.factor = frozen(np.zeros((spec.size, 0)) if factor is None else factor)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(D,) for the variances unless all are zero, (r,) for the factor unless r = 0."""
        shapes = [(self.spec.size,)] if self.variance.any() else []
        return tuple(shapes + [(self.factor.shape[1],)] * bool(self.factor.shape[1]))

    def apply_root(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """sqrt(variance) * z1 + factor z2."""
        terms = list(noise)
        out = np.sqrt(self.variance) * terms.pop(0) if self.variance.any() else np.zeros(self.spec.size)
        return out + terms.pop(0) @ self.factor.T if terms else out

    def covariance(self) -> np.ndarray:
        dense = self.factor @ self.factor.T
        dense[np.diag_indices_from(dense)] += self.variance
        return dense

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """See `Structure.squares`."""
        scaled, whiten, log_det = self._root
        if scaled is None:
            return np.sum(solve_triangular(whiten, deviations.T, lower=True) ** 2, axis=0) + log_det
        rows = deviations / np.sqrt(self.variance)
        quadratic = np.sum(rows**2, axis=1)
        if scaled.shape[1]:
            quadratic -= np.sum(solve_triangular(whiten, (rows @ scaled).T, lower=True) ** 2, axis=0)
        return quadratic + log_det

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


class Diagonal(AffineGaussian):
    """w_j ~ N(mean_j, v_j) independently, by maximum likelihood."""

    name = "diagonal"
    needs_samples = False

    @classmethod
    def accumulator(cls, spec: WeightSpec) -> Accumulator:
        return Accumulator(EntryMoments(spec.size), partial(cls.from_moments, spec=spec))

    @classmethod
    def from_moments(cls, moments: EntryMoments, spec: WeightSpec) -> Self:
        """Fit from the entries' moments."""
        mean, parameters, kinds = choose_mean(moments, spec)
        variance, count = cls._variances(moments.mean_square(mean), spec)
        require_variation(variance)
        return cls(spec, mean, variance, None, parameters + count, {"mean": kinds})

    @classmethod
    def _variances(cls, squares: np.ndarray, spec: WeightSpec) -> tuple[np.ndarray, int]:
        """The variances (D,) from the mean squared deviations (D,), and how many numbers they are."""
        return squares, spec.size


class Isotropic(Diagonal):
    """w_j ~ N(mean_j, v) independently, with one v for each tensor, by maximum likelihood."""

    name = "isotropic"

    @classmethod
    def _variances(cls, squares: np.ndarray, spec: WeightSpec) -> tuple[np.ndarray, int]:
        return _tensor_means(squares, spec), len(spec)


def _tensor_means(values: np.ndarray, spec: WeightSpec) -> np.ndarray:
    """For each of D entries the mean of its tensor's values."""
    return np.concatenate([np.full(part.stop - part.start, values[part].mean()) for part in spec.slices.values()])


_FLOOR = 0.005  # least share of an entry's variance that is noise, as in R's `factanal`; without, likelihoods diverge
_TOLERANCE = 1e-7  # gain in log-likelihood of one step, in nats per weight, below which it has converged
_STEPS = 1000  # at most


class LowRank(AffineGaussian):
    """Cov = F F^T + diag(v) with F (D, r), by maximum likelihood (factor analysis).

    `sklearn.decomposition.FactorAnalysis` on entries scaled to unit variance, until the log-likelihood grows by less
    than 1e-7 nats per number. A step costs O(min(N, D) D r); no D x D matrix is made when N < D. Its F^T V^-1 F is
    diagonal and decreasing, which makes factors unique up to sign. Noise variances are at least 0.005 of an entry's.

    Source: Rubin and Thayer 1982; Tipping and Bishop 1999, Eq. 7; Barber 2012, Algorithm 21.1.
    """

    name = "low_rank"
    options: ClassVar[tuple[str, ...]] = ("rank",)

    @classmethod
    def candidates(cls, networks: int, size: int) -> tuple[dict[str, Any], ...]:
        """Ranks 1, 2, 4, ..., 64, up to a quarter of the networks and of the entries; at least 1."""
        most = max(1, min(networks, size, 256) // 4)
        return tuple({"rank": 2**k} for k in range(most.bit_length()))

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec, *, rank: int = 8) -> Self:
        """Fit to (N, D), with `rank` r at least 1, smaller than N and D."""
        from sklearn.decomposition import FactorAnalysis  # a second to import
        from sklearn.exceptions import ConvergenceWarning

        rows = checked_data(data, spec)
        if type(rank) is not int or not 0 < rank < min(rows.shape):
            raise UsageError(f"rank: expected 1 to {min(rows.shape) - 1} for {rows.shape} data, found {rank!r}")
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = np.sqrt(np.mean(rows**2, axis=0))
        require_variation(scale)
        roots = principal_rows(rows / scale)
        # Mirrored, they have mean zero and the second moment of the rows about the chosen mean.
        mirrored = np.concatenate([roots, -roots]) * np.sqrt(len(roots) / len(rows))
        model = FactorAnalysis(rank, tol=_TOLERANCE * mirrored.size, max_iter=_STEPS, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is in the diagnostics
            model.fit(mirrored)
        noise, factor = np.maximum(model.noise_variance_, _FLOOR), model.components_.T
        factor = factor * np.sign(factor[np.abs(factor).argmax(axis=0), np.arange(rank)])
        diagnostics = {
            "mean": kinds,
            "rank": rank,
            "steps": model.n_iter_,
            "converged": model.n_iter_ < _STEPS,
            "noise_at_floor": int((noise <= _FLOOR).sum()),
        }
        parameters += spec.size * (rank + 1) - rank * (rank - 1) // 2
        return cls(spec, mean, noise * scale**2, factor * scale[:, None], parameters, diagnostics)


def principal_rows(rows: np.ndarray) -> np.ndarray:
    """Orthogonal P (r, D) with P^T P = X^T X, in order of decreasing norm, from X (N, D).

    They do not depend on the order of X's rows, and neither do samples drawn with them.
    """
    wide = len(rows) <= rows.shape[1]
    with threads_for("decomposition", min(rows.shape)):
        values, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    if not wide:
        return (np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)[::-1]
    keep = values > values[-1] * len(rows) * np.finfo(np.float64).eps
    principal = (vectors[:, keep].T @ rows)[::-1]
    largest = np.abs(principal).argmax(axis=1)
    return principal * np.sign(principal[np.arange(len(principal)), largest])[:, None]


class Dense(AffineGaussian):
    """The Ledoit-Wolf (2004) covariance (1 - a) S + a m I, on tensors scaled to the same mean variance.

    For one tensor this is `sklearn.covariance.ledoit_wolf` about this structure's mean. After scaling, the target for
    several tensors of different scales is "independent entries with each tensor's own variance". With fewer networks
    than entries the covariance is kept as a factor of N columns, and no D x D matrix is made.
    """

    name = "dense"

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D)."""
        rows = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = np.sqrt(_tensor_means(np.mean(rows**2, axis=0), spec))
        require_variation(scale)
        rows /= scale
        intensity, ridge = ledoit_wolf_intensity(rows), float(np.mean(rows**2))
        facts = parameters + spec.size * (spec.size + 1) // 2, {"mean": kinds, "shrinkage": intensity}
        ridge *= intensity
        if intensity == 1.0:
            return cls(spec, mean, ridge * scale**2, None, *facts)
        if len(rows) < spec.size:
            factor = np.sqrt((1.0 - intensity) / len(rows)) * scale[:, None] * principal_rows(rows).T
            return cls(spec, mean, ridge * scale**2, factor, *facts)
        matrix = (1.0 - intensity) / len(rows) * (rows.T @ rows)
        matrix[np.diag_indices_from(matrix)] += ridge
        try:
            factor = scale[:, None] * cholesky(matrix, lower=True)
        except np.linalg.LinAlgError as error:
            raise DataError(f"the covariance is singular even after shrinkage: {error}") from error
        return cls(spec, mean, None, factor, *facts)


def ledoit_wolf_intensity(rows: np.ndarray) -> float:
    """The shrinkage a in [0, 1] of S = X^T X / n towards tr(S) / D I, for centred vectors X (n, D).

        d^2 = |S|_F^2 - tr(S)^2 / D,   b^2 = (sum |x|^4 / n - |S|_F^2) / n,   a = min(b^2, d^2) / d^2

    As `sklearn.covariance.ledoit_wolf_shrinkage`, which makes two D x D products; |S|_F^2 also follows from
    the n x n Gram matrix, 80 times as fast for n = 800, D = 16,000. Source: Ledoit and Wolf 2004, Lemma 3.2-3.5.
    """
    n, size = rows.shape
    squares = np.einsum("ij,ij->i", rows, rows)
    gram = rows @ rows.T if n < size else rows.T @ rows
    square = float(np.vdot(gram, gram)) / n**2
    distance = square - (float(squares.sum()) / n) ** 2 / size
    if size == 1 or distance <= 0:  # S is a multiple of the identity
        return 0.0
    return min(max((float(squares @ squares) / n - square) / n, 0.0), distance) / distance
