"""Estimated covariances improved: Ledoit-Wolf shrinkage, noise eigenvalues clipped, nearest correlation matrix."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope._util.threads import one_thread, threads_for
from weightscope.statistics.moments import Moments


@dataclass(frozen=True)
class LedoitWolf:
    """S_shrunk = (1 - intensity) S + intensity * target * I, with S the covariance with divisor n."""

    intensity: float  # in [0, 1]
    target: float  # the mean of the variances, tr(S) / D


def shrunk_covariance(
    moments: Moments,
    centre: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    *,
    destroy: bool = False,
) -> tuple[np.ndarray, LedoitWolf]:
    """The shrunk second moment (D, D) of (x - centre) / scale, divisor n as in the paper, in one pass over the data.

    For vectors x about the centre, with S = sum of x x^T / n, m = tr(S) / D, d^2 = (|S|_F^2 - D m^2) / D and
    b^2 = (sum |x|^4 / n - |S|_F^2) / (n D), the intensity is min(b^2, d^2) / d^2.

    Args:
        moments: of vectors x, with `starts` where parts of x have scales of their own.
        centre: (D,); the mean if None.
        scale: (D,), one number in each part of `moments`; 1 if None.
        destroy: compute it in the memory of the moments.

    Source: Ledoit and Wolf 2004, Lemma 3.2-3.5.
    """
    n, mean = moments.n, moments.mean
    centre = mean if centre is None else centre
    scale = np.ones(moments.size) if scale is None else scale
    shift = mean - centre
    matrix = moments.covariance(destroy=destroy)
    matrix *= n - 1
    if shift.any():
        matrix += n * np.outer(shift, shift)
    fourth = moments.fourth.about(centre, scale, mean, matrix)
    matrix /= scale
    matrix /= scale[:, None] * n
    square = float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64))
    found = _ledoit_wolf(n, float(np.trace(matrix)), square, fourth, moments.size)
    matrix *= 1.0 - found.intensity
    matrix[np.diag_indices_from(matrix)] += found.intensity * found.target
    return matrix, found


def _ledoit_wolf(n: int, trace: float, square: float, fourth: float, size: int) -> LedoitWolf:
    """From tr(S), |S|_F^2 and the sum of |x|^4."""
    target = trace / size
    delta = square - size * target**2
    # In one dimension, or when S is a multiple of the identity already, shrinking changes nothing.
    if size == 1 or delta <= 0:
        return LedoitWolf(0.0, target)
    return LedoitWolf(min(max((fourth / n - square) / n, 0.0), delta) / delta, target)


def ledoit_wolf_of_rows(rows: np.ndarray) -> LedoitWolf:
    """The intensity from centred vectors (n, D), without a D x D matrix if n < D.

    |sum of x x^T|_F^2 also equals the squared norm of the n x n Gram matrix.
    """
    n, size = rows.shape
    squares = np.einsum("ij,ij->i", rows, rows)
    gram = rows @ rows.T if n < size else rows.T @ rows
    return _ledoit_wolf(n, float(squares.sum()) / n, float(np.vdot(gram, gram)) / n**2, float(squares @ squares), size)


def nearest_correlation(matrix: np.ndarray, *, floor: float = 1e-6) -> np.ndarray:
    """The correlation matrix nearest to a symmetric matrix in Frobenius norm.

    Alternating projections on the positive semi-definite matrices and on those with a unit diagonal, with Dykstra's
    correction (Higham 2002, "Computing the nearest correlation matrix", Algorithm 3.3).
    """
    y = np.array(matrix, dtype=np.float64)
    correction = np.zeros_like(y)
    with one_thread(), threads_for("decomposition", len(y)):
        for _ in range(500):
            r = y - correction
            values, vectors = np.linalg.eigh(r)
            x = (vectors * np.maximum(values, floor)) @ vectors.T
            correction = x - r
            before, y = y, x.copy()
            np.fill_diagonal(y, 1.0)
            if np.linalg.norm(y - before) <= 1e-9 * max(1.0, float(np.linalg.norm(y))):
                break
    values, vectors = np.linalg.eigh(y)  # the last projection left the unit diagonal, up to rounding
    x = (vectors * np.maximum(values, floor)) @ vectors.T
    scale = 1 / np.sqrt(x.diagonal())
    return x * np.outer(scale, scale)


def eigenvalues_clipped(correlation: np.ndarray, samples: float) -> tuple[np.ndarray, int]:
    """A correlation matrix without the eigenvalues that noise alone explains.

    Eigenvalues up to the edge (1 + sqrt(C / samples))^2 of the Marchenko-Pastur law are replaced by their mean
    (Laloux et al. 1999, "Noise dressing of financial correlation matrices"), and the diagonal is scaled back to one.
    """
    values, vectors = np.linalg.eigh(correlation)
    noise = values <= (1 + np.sqrt(len(values) / samples)) ** 2
    values[noise] = values[noise].mean() if noise.any() else 0.0
    cleaned = (vectors * values) @ vectors.T
    scale = 1 / np.sqrt(cleaned.diagonal())
    cleaned *= np.outer(scale, scale)
    return cleaned, int((~noise).sum())


def amplified(correlation: np.ndarray, errors: np.ndarray, gain: float) -> tuple[np.ndarray, dict[str, Any]]:
    """I + gain * (correlations beyond 4 standard errors), clipped at +-0.9, as nearest correlation.

    Also returns the numbers of pairs that were `kept`, `dropped` (set to zero) and `clipped`; `moved`, the Frobenius
    distance of the projection relative to the norm without the diagonal; and `realised`, the gain that is left of the
    one that was wanted, the slope sum r'r / sum r^2 of the result r' on the kept correlations r (0 if none is).
    """
    beyond = np.abs(correlation) > 4.0 * errors
    np.fill_diagonal(beyond, False)
    raw = np.where(beyond, gain * correlation, 0.0)
    wanted = raw.clip(-0.9, 0.9)
    target = wanted + np.eye(len(raw))
    matrix = nearest_correlation(target)
    kept, norm = int(beyond.sum()) // 2, float(np.linalg.norm(wanted))
    squares = float(np.square(correlation[beyond]).sum())
    return matrix, {
        "kept": kept,
        "dropped": len(raw) * (len(raw) - 1) // 2 - kept,
        "clipped": int((np.abs(raw) > 0.9).sum()) // 2,
        "moved": float(np.linalg.norm(matrix - target)) / norm if norm else 0.0,
        "realised": float((matrix * correlation)[beyond].sum()) / squares if squares else 0.0,
    }
