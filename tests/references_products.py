"""Products of attention weights by forming them: what `weightscope.products` must equal."""

import numpy as np


def statistics(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Of M = A B^T for A, B (d, r)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    m, (d, r) = a @ b.T, a.shape
    diagonal, s = np.diag(m), np.linalg.svd(m, compute_uv=False)
    beta = np.trace(m) / d
    # Under the null, the d r terms of the trace have variance var(a) var(b).
    deviation = np.sqrt(d * r * (a**2).mean() * (b**2).mean())
    return {
        "diagonal_mean": beta,
        "diagonal_std": diagonal.std(),
        "offdiagonal_norm": np.linalg.norm(m - np.diag(diagonal)) / np.sqrt(d),
        "alpha": np.linalg.norm(m - beta * np.eye(d)) / np.sqrt(d),
        "beta": beta,
        "effective_rank": (s**2).sum() ** 2 / (s**4).sum(),
        "asymmetry": np.linalg.norm(m - m.T) / np.sqrt(2) / np.linalg.norm(m),
        "z": np.trace(m) / deviation,
    }
