"""Orthogonal rows with a given second moment."""

import numpy as np


def principal_rows(rows: np.ndarray) -> np.ndarray:
    """Orthogonal P (r, D) with P^T P = X^T X, in order of decreasing norm, from X (N, D).

    They do not depend on the order of X's rows, and neither do samples drawn with them.
    """
    values, vectors = np.linalg.eigh(rows @ rows.T)
    keep = values > values[-1] * len(rows) * np.finfo(np.float64).eps
    principal = (vectors[:, keep].T @ rows)[::-1]
    largest = np.abs(principal).argmax(axis=1)
    return principal * np.sign(principal[np.arange(len(principal)), largest])[:, None]


def principal_mean_rows(rows: np.ndarray) -> np.ndarray:
    """Orthogonal P (r, D) with P^T P = X^T X / N, in order of decreasing norm, from X (N, D)."""
    networks, size = rows.shape
    if networks <= size:
        return principal_rows(rows) / np.sqrt(networks)
    values, vectors = np.linalg.eigh(rows.T @ rows / networks)
    return (np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)[::-1]
