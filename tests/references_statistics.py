"""Naive versions of the statistics, in float64 and in the order of their definitions."""

import numpy as np


def covariance(rows):
    """`numpy.cov` in float64 on data centred twice, so that badly centred data do not hurt the reference."""
    rows = np.asarray(rows, dtype=np.float64)
    centred = rows - rows.mean(axis=0)
    centred -= centred.mean(axis=0)
    return centred.T @ centred / (len(rows) - 1)


def stripe_ratios(w):
    """Column, row and overall ratio of (N, p, n), entry by entry."""
    w = np.asarray(w, dtype=np.float64)
    _, p, n = w.shape
    v = np.mean([w[:, i, j].var(ddof=1) for i in range(p) for j in range(n)])
    column = np.mean([w[:, :, j].mean(axis=1).var(ddof=1) for j in range(n)]) / (v / p)
    row = np.mean([w[:, i, :].mean(axis=1).var(ddof=1) for i in range(p)]) / (v / n)
    overall = w.mean(axis=(1, 2)).var(ddof=1) / (v / (p * n))
    return column, row, overall


def random_covariance(size, rng, *, condition=30.0):
    """A covariance with random eigenvectors and eigenvalues between 1 / condition and 1."""
    vectors, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return (vectors * np.geomspace(1 / condition, 1, size)) @ vectors.T


def rearranged(covariance, p, n):
    """R[(i, k), (j, l)] = Sigma[(i, j), (k, l)] of Van Loan and Pitsianis, by loops."""
    out = np.zeros((p * p, n * n))
    for i, k in np.ndindex(p, p):
        for j, l in np.ndindex(n, n):  # noqa: E741 - the formula's letter
            out[i * p + k, j * n + l] = covariance[i * n + j, k * n + l]
    return out
