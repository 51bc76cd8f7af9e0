"""Estimated correlations improved: nearest correlation matrix, noise eigenvalues clipped, amplified."""

from typing import Any

import numpy as np

from weightscope._util.threads import one_thread, threads_for


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

    Eigenvalues up to the edge (1 + sqrt(C / samples))^2 of the Marchenko-Pastur distribution are replaced by their mean
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

    Also returns the numbers of pairs that were `kept`, `dropped` (set to zero) and `clipped`; `projection`, its
    Frobenius distance relative to the norm without the diagonal; and `achieved`, the gain that clipping and projection
    leave, the slope sum r'r / sum r^2 of the result r' on the kept correlations r (0 if none is).
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
        "projection": float(np.linalg.norm(matrix - target)) / norm if norm else 0.0,
        "achieved": float((matrix * correlation)[beyond].sum()) / squares if squares else 0.0,
    }
