"""The correlation of each weight of an MLP's first matrix with the weight at the transposed place of its second."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from weightscope.errors import DataError, UsageError


@dataclass(frozen=True)
class TransposedCorrelation:
    """The mean over i, j of the correlation of W1[i, j] with W2[j, i] over networks.

    Attributes:
        value: the mean.
        ci95: its 95 % interval.
        p: two-sided, of a mean of 0.
        entries: number of pairs (i, j) that vary.
        n: number of networks.
    """

    value: float
    ci95: tuple[float, float]
    p: float
    entries: int
    n: int


def transposed_correlation(first: np.ndarray, second: np.ndarray) -> TransposedCorrelation:
    """The mean correlation of W1[i, j] with W2[j, i], that is of each hidden unit's input and output weights.

        r_ij = sum_n z1_ij(n) z2_ji(n) / (N - 1),   value = mean over i, j of r_ij

    with z the deviations from the mean over networks in units of the standard deviation. The value is the sum over
    networks of s(n) = mean_ij z1_ij(n) z2_ji(n), over N - 1; networks are independent, so the interval is that of a
    mean of N numbers s(n), by Student's t. The correlation of different entries of one network does not matter.

    Args:
        first: W1 (N, p, d).
        second: W2 (N, d, p).

    Raises:
        UsageError: if the shapes are not transposed.
        DataError: if there are fewer than 3 networks or no entry varies.

    Source: MLP paper, section 3 (anticorrelated W1 and W2 in ViTs, Fig. 1b).
    """
    if first.ndim != 3 or second.shape != (len(first), first.shape[2], first.shape[1]):
        raise UsageError(f"expected W1 (N, p, d) and W2 (N, d, p), found {first.shape} and {second.shape}")
    n = len(first)
    if n < 3:
        raise DataError(f"expected at least 3 networks, found {n}")
    z1 = _standardised(first.reshape(n, -1))
    z2 = _standardised(second.transpose(0, 2, 1).reshape(n, -1))
    varies = (z1 != 0).any(0) & (z2 != 0).any(0)
    if not varies.any():
        raise DataError("expected weights that vary over the networks, found none")
    shares = np.einsum("ne,ne->n", z1[:, varies], z2[:, varies]) / varies.sum()
    value = float(shares.sum() / (n - 1))
    error = float(shares.std(ddof=1)) / math.sqrt(n)
    half = float(stats.t.isf(0.025, n - 1)) * error
    p = float(2 * stats.t.sf(abs(value) / error, n - 1)) if error > 0 else 0.0
    return TransposedCorrelation(value, (max(-1.0, value - half), min(1.0, value + half)), p, int(varies.sum()), n)


def _standardised(rows: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and variance 1 (divisor N - 1), float64; zero where a column does not vary."""
    centred = rows.astype(np.float64)
    varies = np.ptp(centred, axis=0) > 0
    centred -= centred.mean(0)
    deviation = centred.std(0, ddof=1)
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=varies)
