"""Distributions of depthwise filters: mean and covariance of a layer's, and the closed form that widens with depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weightscope._util.checks import choice, positive
from weightscope.errors import DataError, UsageError


@dataclass(frozen=True, eq=False)
class FilterDistribution:
    """Mean and covariance of the filters of one depthwise layer, each filter one sample.

        mean = sum_c F_c / C,   covariance = sum_c vec(F_c - mean) vec(F_c - mean)^T / (C - 1)

    `vec` is in row-major order: pixel (i, j) is coordinate k i + j.

    Attributes:
        name: path of the layer.
        stage: number of its stage, from 0.
        depth: relative depth among all depthwise layers of the network, in [0, 1].
        kernel: k, the side of the square filters.
        count: C, number of filters.
        mean: (k, k) float64.
        covariance: (k*k, k*k) float64, of rank C - 1 at most.
        dead: number of filters whose norm is negligible; mean and covariance include them.

    Raises:
        DataError: if the shape of an array does not follow from k.

    Source: thesis Eq. 3.3.
    """

    name: str
    stage: int
    depth: float
    kernel: int
    count: int
    mean: np.ndarray
    covariance: np.ndarray
    dead: int = 0

    @property
    def usable(self) -> bool:
        """Whether at least two filters are alive; otherwise the covariance says nothing about filters."""
        return self.count - self.dead >= 2

    def __post_init__(self) -> None:
        k = self.kernel
        for what, array, shape in (("mean", self.mean, (k, k)), ("covariance", self.covariance, (k * k, k * k))):
            if array.shape != shape:
                raise DataError(f"`{self.name}`: expected a {what} of shape {shape}, found {array.shape}")


@dataclass(frozen=True)
class Schedule:
    """`sigma(d) = sigma0 + v d + a d^2 / 2` over the relative depth d in [0, 1] (thesis Eq. 3.11).

    Attributes:
        sigma0: at the first layer.
        v: slope.
        a: curvature.
    """

    sigma0: float
    v: float
    a: float

    def __call__(self, depth: float) -> float:
        """Sigma at a relative depth."""
        return self.sigma0 + self.v * depth + 0.5 * self.a * depth**2


def closed_form(k: int, sigma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices C, S and M of the closed form `Sigma = (M * (C - S) + S * C) / 2`.

        C[x, y] = exp(-|x - y|_wrapped^2 / (2 sigma)),   S[x, y] = z[y],   M[x, y] = z[x]

    for pixels x, y, and `z[x] = exp(-|x - centre|^2 / (2 sigma))`: bumps that move, a static bump, and a mask.

    Args:
        k: side of the filter, odd.
        sigma: variance of the bumps, in square pixels, > 0.

    Returns:
        Three matrices (k*k, k*k) in float64, with pixels in row-major order.

    Raises:
        UsageError: if k is not a positive odd integer, or sigma is not positive.

    Source: thesis Eq. 3.5 to 3.9 and Fig. 3.6, rearranged from blocks as in Fig. A.4.

    Example:
        >>> c, s, m = closed_form(3, 0.5)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or k % 2 == 0:
        raise UsageError(f"k: expected an odd filter size (the bump needs a centre pixel), found {k!r}")
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

    Example:
        >>> conv_covariance(3, 0.5).shape
        (9, 9)
    """
    c, s, m = closed_form(k, sigma)
    return np.asarray(0.5 * ((m + s) * c - m * s))


def covariance_root(covariance: np.ndarray, psd: str = "abs") -> np.ndarray:
    """A root R of the positive semi-definite matrix `R R^T` made from a symmetric one, E diag(l) E^T.

        abs    R = E diag(|l|^(1/2))         the root used by NumPy's `multivariate_normal`, through its SVD
        clip   R = E diag(max(l, 0)^(1/2))   the nearest positive semi-definite matrix (Higham 1988)

    The thesis says "projected" and its code samples with the absolute values; its tables were made with "abs".

    Args:
        covariance: (n, n), symmetric.
        psd: "abs" or "clip".

    Returns:
        (n, n) in float64.

    Raises:
        UsageError: if `psd` is neither.
    """
    choice("psd", psd, ("abs", "clip"))
    import torch

    # torch, not NumPy: alternating between two libraries' thread pools is slow.
    values, vectors = (a.numpy() for a in torch.linalg.eigh(torch.from_numpy(np.asarray(covariance, np.float64))))
    return vectors * np.sqrt(np.abs(values) if psd == "abs" else np.maximum(values, 0))


class Staged(Protocol):
    """A layer in a stage of a hierarchical network."""

    @property
    def stage(self) -> int:
        """Number of the stage, from 0."""
        ...


def relative_depths(parts: Sequence[Staged], schedule: str) -> list[float]:
    """The relative depth in [0, 1] of each layer, 0 for a single layer.

    Args:
        parts: layers in order.
        schedule: "depth" counts over the whole network, "sawtooth" restarts in every stage.
    """
    if schedule == "depth":
        places = [(i, len(parts)) for i in range(len(parts))]
    else:
        stages = [part.stage for part in parts]
        places = [(stages[:i].count(stage), stages.count(stage)) for i, stage in enumerate(stages)]
    return [i / max(1, n - 1) for i, n in places]
