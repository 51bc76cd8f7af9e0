"""Gaussians with covariance diag(variance) + factor factor^T: isotropic, diagonal, low rank, and dense."""

from collections.abc import Mapping, Sequence
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
    checked,
    checked_data,
    checked_names,
    choose_mean,
    fit_mean,
    require_variation,
)
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments, Moments
from weightscope.statistics.shrinkage import LedoitWolf, ledoit_wolf_of_rows, shrunk_covariance


class AffineGaussian(Structure):
    r"""x = mean + sqrt(variance) * z1 + factor z2 with standard normal z1 (D,) and z2 (r,).

    `variance` (D,) is >= 0, all zero or None for a covariance that is in the factor alone; `factor` is (D, r), or None
    for r = 0. The density goes through the r x r matrix I + F^T V^-1 F (Woodbury) when r < D, and through the Cholesky
    factor of the dense covariance otherwise.
    """

    form = "affine"

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
        self.variance = checked(np.zeros(spec.size) if variance is None else variance, "variance", (spec.size,))
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

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], spec: WeightSpec, parameters: int = 0, diagnostics: Facts = None
    ) -> Self:
        """The inverse of `to_tensors`; an absent variance is zero, an absent factor has no columns."""
        checked_names(tensors, ["mean"], ["variance", "factor"])
        return cls(spec, **tensors, parameters=parameters, diagnostics=diagnostics)


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


# Lower bound of the noise variance as a share of an entry's variance, as in R's `factanal`; without one the
# likelihood is unbounded (Heywood cases).
_FLOOR = 0.005

_TOLERANCE = 1e-7  # gain in log-likelihood of one EM step, in nats per weight, below which it has converged
_STEPS = 2000  # of EM, at most


class LowRank(AffineGaussian):
    """Cov = F F^T + diag(v) with F (D, r), by maximum likelihood (factor analysis).

    EM (Rubin and Thayer 1982, on entries scaled to unit variance) from the probabilistic principal components
    (Tipping and Bishop 1999, Eq. 7), until the log-likelihood grows by less than 1e-7 nats per number. A
    step costs O(min(N, D) D r); no D x D matrix is made when N < D. The factors are rotated so that F^T V^-1 F is
    diagonal and decreasing, which makes them unique up to sign.
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
        rows = checked_data(data, spec)
        if type(rank) is not int or not 0 < rank < min(rows.shape):
            raise UsageError(f"rank: expected 1 to {min(rows.shape) - 1} for {rows.shape} data, found {rank!r}")
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = np.sqrt(np.mean(rows**2, axis=0))
        require_variation(scale)
        factor, noise, diagnostics = _factor_analysis(principal_rows(rows / scale) / np.sqrt(len(rows)), rank)
        parameters += spec.size * (rank + 1) - rank * (rank - 1) // 2
        diagnostics = {"mean": kinds, "rank": rank, **diagnostics}
        return cls(spec, mean, noise * scale**2, factor * scale[:, None], parameters, diagnostics)


def _factor_analysis(root: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Factors (D, r) and noise variances (D,) from P (m, D) with P^T P = S, a correlation matrix about the mean."""
    size = root.shape[1]
    variance = np.sum(root**2, axis=0)  # the diagonal of S
    spectrum = np.sum(root**2, axis=1)  # its eigenvalues, decreasing
    left = max((spectrum.sum() - spectrum[:rank].sum()) / (size - rank), _FLOOR)
    directions = root[:rank] / np.sqrt(spectrum[:rank])[:, None]
    factor = directions.T * np.sqrt(np.maximum(spectrum[:rank] - left, _FLOOR * left))
    noise = np.maximum(variance - np.sum(factor**2, axis=1), _FLOOR * variance)
    previous, steps, converged = -np.inf, 0, False
    while steps < _STEPS and not converged:
        steps += 1
        scaled = factor / noise[:, None]
        precision = np.eye(rank) + factor.T @ scaled  # (r, r)
        spread = np.linalg.inv(precision)
        projected = root @ scaled  # (m, r)
        scores = projected @ spread  # E[z | x] = x scaled spread
        cross = root.T @ scores  # (D, r)
        quadratic = np.sum(variance / noise) - np.sum(projected * scores)
        value = -0.5 * (np.log(noise).sum() + np.linalg.slogdet(precision)[1] + quadratic) / size
        converged = bool(value - previous < _TOLERANCE)
        previous = value
        if not converged:
            factor = np.linalg.solve(spread + scores.T @ scores, cross.T).T
            noise = np.maximum(variance - np.sum(factor * cross, axis=1), _FLOOR * variance)
    turn = np.linalg.eigh(factor.T @ (factor / noise[:, None]))[1][:, ::-1]
    factor = factor @ turn
    factor *= np.sign(factor[np.abs(factor).argmax(axis=0), np.arange(rank)])
    floored = int((noise <= _FLOOR * variance * (1 + 1e-12)).sum())
    return factor, noise, {"steps": steps, "converged": converged, "noise_at_floor": floored}


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


class _RowsOrMoments:
    """Rows while they are fewer than entries, their moments from then on."""

    def __init__(self, spec: WeightSpec) -> None:
        self.size, self.starts = spec.size, [part.start for part in spec.slices.values()]
        self.held: list[np.ndarray] = []
        self.moments: Moments | None = None

    def update(self, rows: np.ndarray) -> None:
        if self.moments is None:
            self.held.append(rows.copy())
            if sum(map(len, self.held)) >= self.size:
                self.moments = self._reduced()
        else:
            self.moments.update(rows)

    def __iadd__(self, other: Self) -> Self:
        if other.moments is None:
            for rows in other.held:
                self.update(rows)
        else:
            self.moments = self._reduced()
            self.moments += other.moments
        return self

    def _reduced(self) -> Moments:
        moments = self.moments or Moments(self.size, starts=self.starts)
        for rows in self.held:
            moments.update(rows)
        self.held = []
        return moments


class Dense(AffineGaussian):
    """The Ledoit-Wolf (2004) covariance (1 - a) S + a m I, on tensors scaled to the same mean variance.

    For one tensor this is exactly `sklearn.covariance.LedoitWolf` about this structure's mean. After scaling, the
    target for several tensors of different scales is "independent entries with each tensor's own variance".

    With fewer networks than entries the covariance is kept as a factor of N columns, and no D x D matrix is made.
    With more, samples are reduced to moments of order 2 to 4, so that memory is O(min(N, D) D).
    """

    name = "dense"
    needs_samples = False

    @classmethod
    def accumulator(cls, spec: WeightSpec) -> Accumulator:
        """Accumulates samples while N < D, moments from then on."""

        def made(found: _RowsOrMoments) -> Dense:
            if found.moments is None:
                return cls.from_rows(np.concatenate(found.held), spec)
            return cls.from_moments(found.moments, spec)

        return Accumulator(_RowsOrMoments(spec), made)

    @classmethod
    def memory(cls, networks: int, size: int) -> int:
        return 24 * min(networks, size) * size  # the matrix, or rows, their scaled copy, and a factor

    @classmethod
    def from_rows(cls, rows: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D), N < D."""
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = _scales(np.mean(rows**2, axis=0), spec)
        rows /= scale
        shrunk = ledoit_wolf_of_rows(rows)
        ridge, factor = shrunk.intensity * shrunk.target, None
        if shrunk.intensity < 1.0:
            if not ridge:
                raise DataError(f"no shrinkage and fewer networks ({len(rows)}) than entries ({spec.size})")
            factor = np.sqrt((1.0 - shrunk.intensity) / len(rows)) * scale[:, None] * principal_rows(rows).T
        return cls(spec, mean, ridge * scale**2, factor, *_facts(parameters, spec, kinds, shrunk))

    @classmethod
    def from_moments(cls, moments: Moments, spec: WeightSpec) -> Self:
        """Fit from moments of order 2 to 4."""
        mean, parameters, kinds = choose_mean(moments.entries(), spec)
        scale = _scales(moments.entries().mean_square(mean), spec)
        matrix, shrunk = shrunk_covariance(moments, mean, scale, destroy=True)
        facts = _facts(parameters, spec, kinds, shrunk)
        if shrunk.intensity == 1.0:
            return cls(spec, mean, shrunk.target * scale**2, None, *facts)
        try:
            factor = scale[:, None] * cholesky(matrix, lower=True)
        except np.linalg.LinAlgError as error:
            raise DataError(f"the covariance is singular even after shrinkage: {error}") from error
        return cls(spec, mean, None, factor, *facts)


def _facts(parameters: int, spec: WeightSpec, kinds: dict[str, str], shrunk: LedoitWolf) -> tuple[int, dict[str, Any]]:
    return parameters + spec.size * (spec.size + 1) // 2, {"mean": kinds, "shrinkage": shrunk.intensity}


def _scales(squares: np.ndarray, spec: WeightSpec) -> np.ndarray:
    """The root mean square (D,) of each entry's tensor."""
    scale = np.sqrt(_tensor_means(squares, spec))
    require_variation(scale)
    return scale
