"""Slices of one tensor as samples (filters, rows, columns): their covariance, spectrum and focus on the centre."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh
from scipy.special import stdtrit

from weightscope._util.threads import threads_for
from weightscope.errors import DataError
from weightscope.statistics.moments import Moments, finite_rows

KEPT = 1024  # coordinates up to which the whole matrix is returned: 8 MiB
FULL = 2048  # side of the smaller Gram matrix up to which every eigenvalue is computed: seconds on one core
LEADING = 16  # eigenvalues beyond that
_CHUNK = 256
_DEAD = 1e-3  # of the median norm: EfficientNet's pruned filters are at 1e-8, the smallest live ones at 0.05


@dataclass(frozen=True)
class SliceMoments:
    """Moments and spectrum of n samples x (n, P) of one tensor."""

    n: int  # number of finite samples
    excluded: int  # number of samples left out because they contain a non-finite number
    dead: int  # number of samples with a norm below a thousandth of the median norm; they are included
    mean: np.ndarray  # (P,) float64
    variance: np.ndarray  # (P,) float64, divisor n - 1
    covariance: np.ndarray | None  # (P, P) float64, divisor n - 1; None if P is above the limit
    # of the covariance, descending: min(n, P) of them, or the leading 16 if that is above 2,048
    eigenvalues: np.ndarray
    squared: float  # the squared Frobenius norm of the covariance, the sum of all squared eigenvalues

    @property
    def total(self) -> float:
        """The trace of the covariance."""
        return float(self.variance.sum())

    @property
    def effective_rank(self) -> float:
        """`(tr S)^2 / tr S^2`, between 1 and P: the effective number of directions; NaN without variance."""
        return self.total**2 / self.squared if self.squared > 0 else math.nan

    @property
    def mean_ratio(self) -> float:
        """`n |mean|^2 / tr S`: 1 on average for independent samples of mean zero."""
        return self.n * float(self.mean @ self.mean) / self.total if self.total > 0 else math.nan

    @property
    def edge_ratio(self) -> float:
        """The largest eigenvalue in units of Marchenko and Pastur's edge `(tr S / P) (1 + sqrt(P / (n - 1)))^2`.

        About 1 for independent entries of one variance; larger values mean structure or heavy tails.
        """
        size = len(self.mean)
        edge = self.total / size * (1 + math.sqrt(size / (self.n - 1))) ** 2
        return float(self.eigenvalues[0]) / edge if edge > 0 else math.nan


def slice_moments(samples: np.ndarray, *, keep: int = KEPT) -> SliceMoments:
    """Mean, covariance and spectrum of samples (n, P), computed in float64 (thesis Eq. 3.3).

    Sums run over blocks of 256 samples or coordinates, about the mean. Memory is one square matrix with the smaller
    of n and P as its side, besides the samples. The covariance itself is returned for P up to `keep`.
    """
    x = np.asarray(samples)
    finite = finite_rows(x)
    excluded = int(len(x) - finite.sum())
    x = x[finite] if excluded else x
    if len(x) < 2:
        raise DataError(f"expected at least 2 finite samples, found {len(x)} ({excluded} contain NaN or infinity)")
    norms = np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64))
    dead = int((norms < _DEAD * np.median(norms)).sum())
    size = x.shape[1]
    if size <= max(keep, len(x)):
        moments = Moments(size).update(x)
        mean, matrix = moments.mean, moments.covariance(destroy=True)
        variance = np.diagonal(matrix).copy()
        gram = matrix
    else:
        mean, variance, gram = _other_side(x)
        matrix = None
    values = _spectrum(gram, min(len(x), size))
    covariance = matrix if size <= keep else None
    return SliceMoments(len(x), excluded, dead, mean, variance, covariance, values, float(np.vdot(gram, gram)))


def _other_side(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (P,), variance (P,), and `Z Z^T / (n - 1)` (n, n) of the centred samples Z: S has its eigenvalues."""
    n, size = x.shape
    mean, variance, gram = np.empty(size), np.empty(size), np.zeros((n, n))
    for start in range(0, size, _CHUNK):
        part = slice(start, start + _CHUNK)
        block = x[:, part].astype(np.float64)
        # About the first sample first, so that a constant coordinate has exactly no variance.
        mean[part] = block[0] + (block - block[0]).mean(axis=0)
        block -= mean[part]
        variance[part] = np.einsum("ij,ij->j", block, block) / (n - 1)
        with threads_for("product", n):
            gram += block @ block.T
    return mean, variance, gram / (n - 1)


def _spectrum(gram: np.ndarray, rank: int) -> np.ndarray:
    """Eigenvalues of a positive semi-definite matrix, descending and never negative."""
    if len(gram) <= FULL:
        with threads_for("decomposition", len(gram)):
            return np.maximum(np.linalg.eigvalsh(gram)[::-1][:rank], 0.0)
    start = np.random.default_rng(0).standard_normal(len(gram))
    operator = LinearOperator(gram.shape, matvec=lambda v: gram @ v, dtype=np.float64)
    return np.maximum(np.sort(eigsh(operator, k=LEADING, v0=start, return_eigenvectors=False))[::-1], 0.0)


@dataclass(frozen=True)
class Focus:
    """Distribution of variance about the centre of a filter: `v_p` is the variance of pixel p, `r_p` its distance.

    The centre is the point `((kh - 1) / 2, (kw - 1) / 2)`; the central pixels are the one, two or four nearest to it.
    Distances are in pixels. Channels of a patch embedding are summed. All numbers are NaN without variance.

    """

    spread: float  # `sum_p v_p r_p^2 / sum_p v_p`, in square pixels: 0 for a single central pixel
    # spread over that of equal variances, `(kh^2 + kw^2 - 2) / 12`: 1 for independent entries of one variance and any
    # kernel, below 1 if variance is concentrated in the middle
    relative_spread: float
    relative_spread_se: float  # over the samples; 1.96 times it is half the 95 % interval, see `_quotient`
    central_share: float  # variance of the central pixels over the total variance
    central_share_se: float
    central_ratio: float  # central_share times P over the number of central pixels: 1 for equal variances
    neighbours: float  # mean correlation of pixels that touch at a side (the moving positive bump of thesis Fig. 3.1)
    # mean correlation of the central pixels with all others that do not touch them (the standing negative bump), or NaN
    from_centre: float
    offset_down: float  # `sum_p v_p (i_p - (kh - 1) / 2) / sum_p v_p`, the offset of the variance below the centre
    offset_right: float  # the same along a row, to the right


def centre_focus(samples: np.ndarray, shape: tuple[int, int], found: SliceMoments) -> Focus:
    """Distribution of the variance of filters about their centre."""
    row, column = (np.arange(n) - (n - 1) / 2 for n in shape)
    distance = (row[:, None] ** 2 + column**2).ravel()  # squared, from the centre (P,)
    central = distance == distance.min()
    pixels = len(distance)
    channels = len(found.mean) // pixels
    squares = np.zeros((found.n, pixels))  # (x - mean)^2, channels added
    kept = samples[finite_rows(samples)] if found.excluded else samples
    for c in range(channels):
        part = slice(c * pixels, (c + 1) * pixels)
        squares += (kept[:, part].astype(np.float64) - found.mean[part]) ** 2
    energy = squares.sum(axis=1)  # (n,)
    if not energy.sum() > 0:
        return Focus(*[math.nan] * 10)
    spread, spread_se = _quotient(squares @ distance, energy)
    share, share_se = _quotient(squares[:, central].sum(axis=1), energy)
    white = float(distance.mean())
    neighbours, others = _correlations(found, shape, central)
    # A filter of one pixel has a spread of zero.
    relative = (spread / white, spread_se / white) if white else (math.nan, math.nan)
    weights = squares.sum(axis=0) / energy.sum()  # (pixels,)
    coordinates = (index.ravel() - (n - 1) / 2 for index, n in zip(np.indices(shape), shape, strict=True))
    offsets = [float(weights @ axis) for axis in coordinates]
    ratio = share * pixels / int(central.sum())
    return Focus(spread, *relative, share, share_se, ratio, neighbours, others, *offsets)


def _quotient(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """The quotient q of two sums over n samples, and an error e with the 95 % interval q +- 1.96 e.

        w_k = b_k / sum b,   e = t(0.975, 1 / sum w^2 - 1) / 1.96 sqrt(sum ((t_k - q b_k) / (1 - w_k))^2) / sum b

    It covers in 91 to 96 % of cases from 4 samples on, of unequal scale, too: these count as 1 / sum w^2 equal ones.
    Two samples are equal about their mean, and say nothing: NaN. Source: MacKinnon and White 1985 (HC3), Kish 1965.
    """
    total, share = float(bottom.sum()), bottom / bottom.sum()
    value, freedom = float(top.sum()) / total, max(1.0, 1 / float(share @ share) - 1)
    error = float(np.linalg.norm((top - value * bottom) / np.maximum(1 - share, 1e-12))) / total
    return value, error * float(stdtrit(freedom, 0.975)) / 1.96 if len(top) > 2 else math.nan


def _correlations(found: SliceMoments, shape: tuple[int, int], central: np.ndarray) -> tuple[float, float]:
    """Mean correlation of neighbours, and of central pixels with those that do not touch them, over all channels."""
    if found.covariance is None or not (found.variance > 0).all():
        return math.nan, math.nan
    scale = 1 / np.sqrt(found.variance)
    matrix = found.covariance * scale * scale[:, None]
    rows, columns = (i.ravel() for i in np.indices(shape))
    apart = np.abs(rows[:, None] - rows) + np.abs(columns[:, None] - columns)
    far = central[:, None] & (apart > 1) & ~central
    pixels, touching, distant = len(central), [], []
    for start in range(0, len(matrix), pixels):
        own = matrix[start : start + pixels, start : start + pixels]
        touching.append(own[apart == 1])
        distant.append(own[far])
    means = [float(np.concatenate(values).mean()) if values[0].size else math.nan for values in (touching, distant)]
    return means[0], means[1]
