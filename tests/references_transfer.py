"""Naive versions of what carries filter covariances from one kernel size to another."""

import numpy as np


def resized(covariance, k, size):
    """Thesis 3.1.1, block by block and entry by entry: mean-pad or clip, bilinear over blocks, symmetric part."""
    blocks = {}
    for i in range(k):
        for j in range(k):
            picture = np.array([[covariance[k * i + j, k * l + m] for m in range(k)] for l in range(k)])  # noqa: E741
            out = np.full((size, size), picture.mean())
            shift = size // 2 - k // 2
            for y in range(size):
                for x in range(size):
                    if 0 <= y - shift < k and 0 <= x - shift < k:
                        out[y, x] = picture[y - shift, x - shift]
            blocks[i, j] = out
    matrix = np.zeros((size * size, size * size))
    for a in range(size):
        for b in range(size):
            y, x = (c * (k - 1) / (size - 1) if size > 1 else (k - 1) / 2 for c in (a, b))
            i, j = min(int(y), max(k - 2, 0)), min(int(x), max(k - 2, 0))
            up, left = min(i + 1, k - 1), min(j + 1, k - 1)
            u, v = y - i, x - j
            block = (1 - u) * (1 - v) * blocks[i, j] + (1 - u) * v * blocks[i, left]
            block = block + u * (1 - v) * blocks[up, j] + u * v * blocks[up, left]
            matrix[size * a + b] = block.reshape(-1)
    return (matrix + matrix.T) / 2
