"""Low rank plus diagonal: factor analysis by expectation maximisation."""

from typing import Any, Self

import numpy as np

from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.structures.affine import AffineGaussian
from weightscope.structures.base import STRUCTURES, checked_data, fit_mean, require_variation
from weightscope.structures.principal import principal_mean_rows

# Lower bound of the noise variance as a share of an entry's variance, as in R's `factanal`; without one the
# likelihood is unbounded (Heywood cases).
_FLOOR = 0.005

_TOLERANCE = 1e-7  # gain in log-likelihood of one EM step, in nats per weight, below which it has converged
_STEPS = 2000  # of EM, at most


@STRUCTURES.register("low_rank", source="Rubin and Thayer 1982; Tipping and Bishop 1999, Eq. 7")
class LowRank(AffineGaussian):
    """Cov = F F^T + diag(v) with F (D, r), by maximum likelihood (factor analysis).

    EM (Rubin and Thayer 1982, on entries scaled to unit variance) from the probabilistic principal components
    (Tipping and Bishop 1999, Eq. 7), until the log-likelihood grows by less than 1e-7 nats per number. A
    step costs O(min(N, D) D r); no D x D matrix is made when N < D. The factors are rotated so that F^T V^-1 F is
    diagonal and decreasing, which makes them unique up to sign.
    """

    name = "low_rank"
    options = ("rank",)

    @classmethod
    def candidates(cls, networks: int, size: int) -> tuple[dict[str, Any], ...]:
        """Ranks 1, 2, 4, ..., 64, up to a quarter of the networks and of the entries; at least 1."""
        most = max(1, min(networks, size, 256) // 4)
        return tuple({"rank": 2**k} for k in range(most.bit_length()))

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec, *, rank: int = 8) -> Self:
        """Fit to (N, D).

        Args:
            data: (N, D).
            spec: of the D entries.
            rank: r, at least 1, smaller than N and D.
        """
        rows = checked_data(data, spec)
        if not isinstance(rank, int) or not 0 < rank < min(rows.shape):
            raise UsageError(f"rank: expected 1 to {min(rows.shape) - 1} for {rows.shape} data, found {rank!r}")
        mean, parameters, kinds = fit_mean(rows, spec)
        rows = rows - mean
        scale = np.sqrt(np.mean(rows**2, axis=0))
        require_variation(scale, "entries")
        factor, noise, diagnostics = _factor_analysis(principal_mean_rows(rows / scale), rank)
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
