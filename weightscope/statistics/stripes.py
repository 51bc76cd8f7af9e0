"""Stripes of matrices over networks: variances of group means."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from weightscope.errors import DataError
from weightscope.statistics.moments import EntryMoments, finite_rows


@dataclass(frozen=True)
class StripeRatio:
    """The variance of group means over networks, relative to that of independent entries."""

    value: float  # 1 in expectation under independence
    ci95: tuple[float, float]  # 95 % confidence interval
    p: float  # two-sided p-value of the hypothesis that the ratio is 1


@dataclass(frozen=True)
class StripeResult:
    """Stripes of a matrix W (p, n) over N networks."""

    column: StripeRatio  # of the n column means (for fc1, over the p hidden units, one for each input channel)
    row: StripeRatio  # of the p row means (over the n columns)
    overall: StripeRatio  # of the mean of all entries
    networks: int  # N, without those that contain a non-finite number

    @property
    def ratios(self) -> dict[str, StripeRatio]:
        """Kind of mean -> its ratio."""
        return {"column": self.column, "row": self.row, "overall": self.overall}


def stripes(matrices: Any) -> StripeResult:
    r"""Variance over networks of column, row and overall means, relative to independent entries.

    Each entry's mean over networks is subtracted first, E = W - mean, which removes fixed patterns. The
    column ratio is

        R = [sum over k, j of (mean over i of E_kij)^2 / n] / [sum over k, i, j of E_kij^2 / (p n) / p]

    and its expectation is 1 (up to a term of order 1/N, as both parts have expectation proportional to
    N - 1) when the entries are uncorrelated, even if their variances differ: then
    Var(mean over i of E_ij) = sum over i of v_ij / p^2. The row ratio swaps the axes; the overall ratio compares
    the mean of all entries with v / (p n). Networks are independent of each other, so the jackknife over
    networks of log R gives the standard error, with Student's t on N - 1 degrees of freedom; leaving
    network k out multiplies its squares by N / (N - 1) before they are subtracted, which is exact.

    Args:
        matrices: (N, p, n), or (N, p, ...) whose trailing axes are flattened to columns. Non-finite networks
            are left out.
    """
    array = np.asarray(matrices)
    if array.ndim < 3 or array.size == 0:
        raise DataError(f"stripes: expected matrices (N, p, n), found {array.shape}")
    array = array.reshape(len(array), array.shape[1], -1)
    rows = array.reshape(len(array), -1)
    centred = array[finite_rows(rows)].astype(np.float64)
    centred -= EntryMoments(rows.shape[1], [rows]).mean.reshape(array.shape[1:])
    return stripe_ratios(stripe_terms(centred))


def stripe_terms(centred: np.ndarray) -> np.ndarray:
    """The terms of the sums in `stripes`, (N, 4): of entries, column, row and overall means, from E (N, p, n)."""
    p, n = centred.shape[1:]
    columns, rows = centred.mean(axis=1), centred.mean(axis=2)  # (N, n), (N, p)
    total = np.einsum("kij,kij->k", centred, centred) / (p * n)
    means = np.einsum("kj,kj->k", columns, columns) / n * p, np.einsum("ki,ki->k", rows, rows) / p * n
    return np.stack([total, *means, columns.mean(axis=1) ** 2 * (p * n)], axis=1)


def stripe_ratios(terms: np.ndarray) -> StripeResult:
    """The ratios of all networks' `stripe_terms`."""
    if len(terms) < 3:
        raise DataError(f"stripes: expected at least 3 finite networks, found {len(terms)}")
    total, *means = terms.T
    if not total.sum() > 0:
        raise DataError("stripes: expected matrices that vary over networks, found constant ones")
    column, row, overall = (_ratio(each, total) for each in means)
    return StripeResult(column, row, overall, len(terms))


def _ratio(above: np.ndarray, below: np.ndarray) -> StripeRatio:
    """`sum(above) / sum(below)` with a jackknife interval over networks, on the logarithm; inputs (N,)."""
    n = len(above)
    value = above.sum() / below.sum()
    if value <= 1e-20:  # group means that are zero in every network, such as after centring
        return StripeRatio(float(value), (float(value), float(value)), 0.0)
    scale = n / (n - 1)
    left_out = np.log((above.sum() - scale * above) / (below.sum() - scale * below))  # (N,)
    error = np.sqrt((n - 1) / n * np.sum((left_out - left_out.mean()) ** 2))
    half = stdtrit(n - 1, 0.975) * error
    low, high = value * np.exp(-half), value * np.exp(half)
    p = 2.0 * stdtr(n - 1, -abs(np.log(value)) / error) if error > 0 else float(value == 1.0)
    return StripeRatio(float(value), (float(low), float(high)), float(p))
