"""Distributions of depthwise filters.

Mean and covariance of one layer, resized to another kernel, interpolated over depth; and the closed form of the
covariance, which widens with depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope._util.checks import choice, odd, positive


def resized_covariance(covariance: np.ndarray, k: int, size: int) -> np.ndarray:
    """The covariance (k*k, k*k) of k x k filters as one (K*K, K*K) of K x K filters, K = `size`, both sides odd.

        1. every block is padded with its own mean, or clipped, around its centre: k x k -> K x K pixels
        2. bilinear interpolation over the grid of blocks, k x k -> K x K blocks, corner to corner
        3. the symmetric part is taken

    Steps 1 and 2 treat the two pixels of an entry differently, so step 3 is needed for a symmetric result. The thesis
    specifies neither step 3 nor whether corners or cell edges are aligned; with corners, block (0, 0) stays the first
    and the central block stays the central one. The result is not positive semi-definite in general; see
    `covariance_root`. UsageError for an even size.

    Source: thesis section 3.1.1, "Different filter sizes".
    """
    for side in (k, size):
        odd("filter size", side)
    if size == k:
        return covariance
    blocks = _recentred(covariance.reshape(k, k, k, k), size)  # (k, k, K, K)
    points = np.linspace(0, k - 1, size) if size > 1 else np.array([(k - 1) / 2])  # ends on ends, or the middle
    along = np.maximum(0.0, 1.0 - np.abs(points[:, None] - np.arange(k)))  # (K, k), of linear interpolation
    out = np.einsum("ai,bj,ijlm->ablm", along, along, blocks, optimize=True).reshape(size * size, size * size)
    return 0.5 * (out + out.T)


def resized_mean(mean: np.ndarray, size: int) -> np.ndarray:
    """The mean filter (k, k) as one of `size` x `size`: padded with its own mean, or clipped, as a block is."""
    return _recentred(mean, size)


def at_depth(depths: Sequence[float], values: Sequence[np.ndarray], depth: float) -> np.ndarray:
    """Linear interpolation of arrays over relative depth, constant before the first and after the last."""
    position = float(np.interp(depth, depths, np.arange(len(depths))))
    low = min(int(position), len(values) - 1)
    share = position - low
    return values[low] if share == 0 else (1 - share) * values[low] + share * values[low + 1]


def _recentred(pictures: np.ndarray, size: int) -> np.ndarray:
    """Pictures (..., k, k) padded with their means, or clipped, to (..., size, size) around the centre."""
    k = pictures.shape[-1]
    if size <= k:
        cut = (k - size) // 2
        return pictures[..., cut : cut + size, cut : cut + size]
    pad = (size - k) // 2
    means = pictures.mean(axis=(-2, -1), keepdims=True)
    out = np.broadcast_to(means, (*pictures.shape[:-2], size, size)).copy()
    out[..., pad : pad + k, pad : pad + k] = pictures
    return out


@dataclass(frozen=True)
class Schedule:
    """`sigma(d) = sigma0 + v d + a d^2 / 2` over the relative depth d in [0, 1] (thesis Eq. 3.11)."""

    sigma0: float  # at the first layer
    v: float  # slope
    a: float  # curvature

    def __call__(self, depth: float) -> float:
        """Sigma at a relative depth."""
        return self.sigma0 + self.v * depth + 0.5 * self.a * depth**2


def closed_form(k: int, sigma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices C, S and M (k*k, k*k) of the closed form `Sigma = (M * (C - S) + S * C) / 2`.

        C[x, y] = exp(-|x - y|_wrapped^2 / (2 sigma)),   S[x, y] = z[y],   M[x, y] = z[x]

    for pixels x, y in row-major order, and `z[x] = exp(-|x - centre|^2 / (2 sigma))`: bumps that move, a static bump,
    and a mask. Source: thesis Eq. 3.5 to 3.9 and Fig. 3.6, rearranged from blocks as in Fig. A.4.
    """
    odd("k", k)
    positive("sigma", sigma)
    pixels, half = np.arange(k), k // 2
    # Signed distances of pixels on a ring of k.
    ring = (pixels[:, None] - pixels[None, :] + half) % k - half
    line = np.exp(-((pixels - half) ** 2) / (2 * sigma))  # (k,)
    around = np.exp(-(ring**2) / (2 * sigma))  # (k, k)
    static = np.broadcast_to(np.kron(line, line), (k * k, k * k))
    return np.kron(around, around), static, static.T


def conv_covariance(k: int, sigma: float) -> np.ndarray:
    """The covariance of a k x k filter's entries, in closed form.

        Sigma = (M * (C - S) + S * C) / 2 = (diag(z) C + C diag(z) - z z^T) / 2

    Here z (k^2,) holds the Gaussian bump `exp(-|x - centre|^2 / (2 sigma))` over the pixels x, and C the same
    bump around every pixel, with wrap-around: `C[x, y] = exp(-|x - y|_wrapped^2 / (2 sigma))`, with ones on the
    diagonal. Sigma is symmetric but not positive semi-definite; see `covariance_root`.

    Args:
        k: side of the filter, odd.
        sigma: variance of the bumps, in square pixels, > 0.

    Returns:
        (k*k, k*k) in float64; row k*i + j and column k*l + m hold Cov(F[i, j], F[l, m]).

    Raises:
        UsageError: if k is not a positive odd integer, or sigma is not positive.

    Source: thesis Eq. 3.10 and Fig. A.3, rearranged from blocks as in Fig. A.4.
    """
    c, s, m = closed_form(k, sigma)
    return np.asarray(0.5 * ((m + s) * c - m * s))


def covariance_root(covariance: np.ndarray, psd: str = "abs") -> np.ndarray:
    """A root R of the positive semi-definite matrix `R R^T` made from a symmetric one, E diag(l) E^T.

        abs    R = E diag(|l|^(1/2))         the root used by NumPy's `multivariate_normal`, through its SVD
        clip   R = E diag(max(l, 0)^(1/2))   the nearest positive semi-definite matrix (Higham 1988)

    The thesis says "projected" and its code samples with the absolute values; its tables were made with "abs".
    """
    choice("psd", psd, ("abs", "clip"))
    import torch

    # torch, not NumPy: alternating between two libraries' thread pools is slow.
    values, vectors = (a.numpy() for a in torch.linalg.eigh(torch.from_numpy(np.asarray(covariance, np.float64))))
    return vectors * np.sqrt(np.abs(values) if psd == "abs" else np.maximum(values, 0))


def relative_depths(parts: Sequence[Any], schedule: str) -> list[float]:
    """The relative depth in [0, 1] of each layer: over the network ("depth"), or from 0 in every stage ("sawtooth").

    Layers that are absent or cannot be read count.
    """
    depths = [part.relative_depth for part in parts]
    if schedule == "depth":
        return depths
    stages: dict[int, list[float]] = {}
    for part, depth in zip(parts, depths, strict=True):
        stages.setdefault(part.stage, []).append(depth)
    ends = [(min(stages[part.stage]), max(stages[part.stage])) for part in parts]
    return [(x - low) / (high - low) if high > low else 0.0 for x, (low, high) in zip(depths, ends, strict=True)]
