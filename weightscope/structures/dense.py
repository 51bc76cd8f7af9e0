"""Dense: every covariance is free, shrunk after Ledoit and Wolf."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import numpy as np
from scipy.linalg import cholesky

from weightscope.errors import DataError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments, Moments
from weightscope.statistics.shrinkage import LedoitWolf, ledoit_wolf_from_sums, ledoit_wolf_of_rows
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import STRUCTURES, choose_mean, fit_mean, require_variation
from weightscope.structures.principal import principal_rows

D = TypeVar("D", bound="Dense")


@STRUCTURES.register("dense", source="Ledoit and Wolf 2004")
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
    def accumulator(cls, spec: WeightSpec) -> "_DenseAccumulator[Self]":
        """Accumulates samples while N < D, moments from then on."""
        return _DenseAccumulator(spec, cls.from_rows, cls.from_moments)

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
        return cls._shrunk(spec, mean, ridge * scale**2, factor, parameters, kinds, shrunk)

    @classmethod
    def from_moments(cls, moments: Moments, fourth: "_FourthMoments", spec: WeightSpec) -> Self:
        """Fit from the mean, the covariance and sums of fourth order."""
        n, entries = moments.n, EntryMoments(spec.size)
        entries.n, entries.mean, entries.squares = n, moments.mean, moments.variance() * (n - 1)
        mean, parameters, kinds = choose_mean(entries, spec)
        scale = _scales(entries.mean_square(mean), spec)
        gram, shift = moments.covariance(destroy=True), entries.mean - mean
        gram *= n - 1
        gram += n * np.outer(shift, shift)
        quartic = fourth.about(mean, scale, gram)
        gram /= scale
        gram /= scale[:, None]
        trace, square = float(np.trace(gram)), float(np.vdot(gram, gram))
        shrunk = ledoit_wolf_from_sums(n, spec.size, trace, square, quartic)
        ridge = shrunk.intensity * shrunk.target
        if shrunk.intensity == 1.0:
            return cls._shrunk(spec, mean, ridge * scale**2, None, parameters, kinds, shrunk)
        gram *= (1.0 - shrunk.intensity) / n
        gram[np.diag_indices_from(gram)] += ridge
        try:
            factor = scale[:, None] * cholesky(gram, lower=True)
        except np.linalg.LinAlgError as error:
            raise DataError(f"the covariance is singular even after shrinkage: {error}") from error
        return cls._shrunk(spec, mean, np.zeros(spec.size), factor, parameters, kinds, shrunk)

    @classmethod
    def _shrunk(
        cls,
        spec: WeightSpec,
        mean: np.ndarray,
        variance: np.ndarray,
        factor: np.ndarray | None,
        parameters: int,
        kinds: dict[str, str],
        shrunk: LedoitWolf,
    ) -> Self:
        parameters += spec.size * (spec.size + 1) // 2
        return cls(spec, mean, variance, factor, parameters, {"mean": kinds, "shrinkage": shrunk.intensity})


def _scales(squares: np.ndarray, spec: WeightSpec) -> np.ndarray:
    """The root mean square (D,) of each entry's tensor."""
    scale = np.empty(spec.size)
    for part in spec.slices.values():
        scale[part] = np.sqrt(np.mean(squares[part])) if part.stop > part.start else 1.0
    require_variation(scale, "entries")
    return scale


class _DenseAccumulator(Generic[D]):
    def __init__(
        self,
        spec: WeightSpec,
        from_rows: Callable[[np.ndarray, WeightSpec], D],
        from_moments: Callable[[Moments, "_FourthMoments", WeightSpec], D],
    ) -> None:
        self._spec, self._from_rows, self._from_moments = spec, from_rows, from_moments
        self._held: list[np.ndarray] = []
        self._sums: tuple[Moments, _FourthMoments] | None = None

    def update(self, rows: np.ndarray) -> None:
        if self._sums is None:
            self._held.append(rows.copy())
            if sum(map(len, self._held)) < self._spec.size:
                return
            rows, self._held = np.concatenate(self._held), []
            self._sums = Moments(self._spec.size), _FourthMoments(self._spec, rows.mean(axis=0))
        for sums in self._sums:
            sums.update(rows)

    def finish(self) -> D:
        if self._sums is None:
            return self._from_rows(np.concatenate(self._held), self._spec)
        return self._from_moments(*self._sums, self._spec)


class _FourthMoments:
    """Sums that give sum_k |(x_k - c) / s|^4 for any centre c (D,) and one scale s for each of T tensors.

    With z = x - pilot and q_t = |z_t|^2 over the entries of tensor t, these are sum q q^T (T, T), sum q z^T (T, D),
    sum q (T,) and sum z (D,); sum z z^T comes from the covariance.
    """

    def __init__(self, spec: WeightSpec, pilot: np.ndarray) -> None:
        self._pilot, self._n = pilot, 0
        self._starts = np.array([part.start for part in spec.slices.values() if part.stop > part.start])
        tensors = len(self._starts)
        self._qq, self._qz = np.zeros((tensors, tensors)), np.zeros((tensors, spec.size))
        self._q, self._z = np.zeros(tensors), np.zeros(spec.size)

    def update(self, rows: np.ndarray) -> None:
        z = rows - self._pilot
        q = np.add.reduceat(z**2, self._starts, axis=1)
        self._n += len(rows)
        self._qq += q.T @ q
        self._qz += q.T @ z
        self._q += q.sum(axis=0)
        self._z += z.sum(axis=0)

    def about(self, centre: np.ndarray, scale: np.ndarray, gram: np.ndarray) -> float:
        """The sum, from `gram` = sum_k (x_k - centre) (x_k - centre)^T.

        With e = pilot - centre, |x_t - centre_t|^2 = q_t + 2 u_t + |e_t|^2, u_t = z_t . e_t. The columns of E (D, T)
        are e cut into tensors.
        """
        e, n = self._pilot - centre, self._n
        blocks = np.zeros((len(e), len(self._starts)))
        owner = np.searchsorted(self._starts, np.arange(len(e)), side="right") - 1
        blocks[np.arange(len(e)), owner] = e
        c = np.add.reduceat(e**2, self._starts)
        total = blocks.T @ self._z  # sum u
        mixed = self._qz @ blocks  # sum q u^T
        # sum z z^T = gram - e (sum z)^T - (sum z) e^T - n e e^T
        cross = np.outer(blocks.T @ e, total)
        uu = blocks.T @ gram @ blocks - cross - cross.T - n * np.outer(c, c)
        linear = np.outer(self._q + 2 * total, c)
        sums = self._qq + 2 * (mixed + mixed.T) + 4 * uu + linear + linear.T + n * np.outer(c, c)
        weight = 1.0 / scale[self._starts] ** 2
        return float(weight @ sums @ weight)
