"""Naive versions of what `weightscope.analysis.within_network` computes: NumPy, one line for one formula."""

import numpy as np


def moments(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, covariance and descending eigenvalues of samples (n, P), in float64."""
    x = samples.astype(np.float64)
    covariance = np.cov(x, rowvar=False).reshape(x.shape[1], x.shape[1])
    return x.mean(axis=0), covariance, np.sort(np.linalg.eigvalsh(covariance))[::-1]


def focus(samples: np.ndarray, channels: int, height: int, width: int) -> dict[str, float]:
    """The centre-focus statistics, pixel by pixel."""
    variance = samples.astype(np.float64).var(axis=0, ddof=1).reshape(channels, height, width).sum(axis=0)
    ci, cj = (height - 1) / 2, (width - 1) / 2
    distance = np.array([[(i - ci) ** 2 + (j - cj) ** 2 for j in range(width)] for i in range(height)])
    central = distance == distance.min()
    spread = (variance * distance).sum() / variance.sum()
    share = variance[central].sum() / variance.sum()
    rows, columns = np.indices((height, width))
    return {
        "spread": spread,
        "relative_spread": spread / ((height**2 + width**2 - 2) / 12),
        "central_share": share,
        "central_ratio": variance[central].mean() / variance.mean(),
        "offset_down": ((rows - ci) * variance).sum() / variance.sum(),
        "offset_right": ((columns - cj) * variance).sum() / variance.sum(),
    }


def correlations(samples: np.ndarray, channels: int, height: int, width: int) -> tuple[float, float]:
    """Mean correlation of touching pixels, and of central pixels with others that do not touch them."""
    matrix = np.corrcoef(samples.astype(np.float64), rowvar=False).reshape(
        channels, height, width, channels, height, width
    )
    ci, cj = (height - 1) / 2, (width - 1) / 2
    least = min((i - ci) ** 2 + (j - cj) ** 2 for i in range(height) for j in range(width))
    touching, distant = [], []
    for c in range(channels):
        for i, j, y, x in np.ndindex(height, width, height, width):
            apart = abs(i - y) + abs(j - x)
            first, second = ((a - ci) ** 2 + (b - cj) ** 2 == least for a, b in ((i, j), (y, x)))
            if apart == 1:
                touching.append(matrix[c, i, j, c, y, x])
            if first and not second and apart > 1:
                distant.append(matrix[c, i, j, c, y, x])
    return float(np.mean(touching)), float(np.mean(distant)) if distant else np.nan
