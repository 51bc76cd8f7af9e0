"""Central pixels of depthwise filters against diag(W2 W1) of the MLP in their block, over a population."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from weightscope._util.results import Result
from weightscope.anatomy import filter_mlps
from weightscope.errors import DataError, UsageError
from weightscope.statistics.exchangeable import fisher_interval
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.samples import WeightSamples, usable_chunks

_GAINS = ("norm.weight", "gamma")  # of a ConvNeXt's block, that act right before and after its MLP


@dataclass(frozen=True)
class Correlation:
    """A correlation over (network, channel), with networks as independent units."""

    name: str  # of the block, or "all blocks"
    channels: int  # of the block, or of all of them
    correlation: float  # r
    error: float  # its standard error
    ci95: tuple[float, float]  # its 95 % interval
    p: float  # two-sided


@dataclass(frozen=True, eq=False, repr=False)
class FilterMLPCorrelation(Result):
    """Central pixels against diag(W2 W1), in each block and over all blocks."""

    total: Correlation  # over all networks, blocks and channels
    blocks: tuple[Correlation, ...]
    n: int  # networks
    excluded: int  # networks left out because they diverged or are not finite

    columns: ClassVar = {
        "central pixel against diag(W2 W1)": "{block}",
        "channels": "{channels}",
        "correlation": "{correlation:+.3f}",
        "95 % interval": "{low:+.3f} to {high:+.3f}",
        "p": "{p:.2g}",
    }

    def rows(self) -> list[dict[str, Any]]:
        """One row for each block, and one for all."""
        return [
            {"block": x.name, "channels": x.channels, "correlation": x.correlation, "error": x.error}
            | {"low": x.ci95[0], "high": x.ci95[1], "p": x.p}
            for x in (*self.blocks, self.total)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"networks": self.n, "excluded": self.excluded, "correlations": self.rows()}

    def summary(self) -> str:
        """One line."""
        found, (low, high) = self.total, self.total.ci95
        excluded = f" ({self.excluded} excluded)" if self.excluded else ""
        r = f"r = {found.correlation:+.3f} ({low:+.3f} to {high:+.3f})"
        return f"{self.n} networks{excluded}, {r}, p = {found.p:.2g}"


Magnitude = Literal["", "diagonal", "both"]


def filter_mlp_correlation(
    source: WeightSamples, magnitude: Magnitude = "", folded: bool = False
) -> FilterMLPCorrelation:
    """The correlation of the central pixel of each depthwise filter with diag(W2 W1) of the MLP in its block.

        r = sum f d / sqrt(sum f^2 sum d^2),   d_c = (W2 W1)_cc,

    with sums over networks, blocks and channels c, of the deviations of the central pixel f_c and of d_c from their
    means over the networks and channels of their block. sum f d is a moment of third order of the weights, and the
    variance of d one of fourth order. So it is no entry of a covariance of weights: normal weights of mean zero do not
    have it, whatever their covariance, and a structure that is fitted to covariances does not reproduce it.
    `magnitude` takes |d_c| ("diagonal"), or |d_c| and |f_c| ("both"). `folded` multiplies d_c by the weight of the norm
    before the MLP and by the block's LayerScale, if there is one: diag(gamma W2 W1 g) acts on what the norm gives.

    Channels and blocks of one network depend on each other. The standard error is that of the delta method over
    networks, with psi_k = a_k / sqrt(B C) - (r / 2) (b_k / B + c_k / C) for the sums a_k, b_k and c_k of f d, f^2 and
    d^2 in network k, and A, B and C over all; interval and p-value are Student's with N - 1 degrees of freedom
    on Fisher's scale.

    AnatomyError if the networks have no depthwise convolution with an MLP of as many channels in its block, UsageError
    if the filters have no central pixel, DataError if fewer than 3 networks are usable or numbers do not vary.

    Source: thesis 3.4.3, Fig. 3.40.

    Example:
        >>> print(filter_mlp_correlation(Population("digits.pop")))
    """
    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in source.spec.tensors}
    parts = filter_mlps(zeros)
    pairs = []
    for part in parts:
        (fc1,), (fc2,) = part.mlp.parameters["fc1"], part.mlp.parameters["fc2"]
        (filters,) = part.filters.parameters
        pairs.append((filters, fc1, fc2))
    blocks_of = [fc1.removesuffix("mlp.fc1.weight") for _, fc1, _ in pairs]
    gains = [[f"{block}{name}" for name in _GAINS if folded and f"{block}{name}" in zeros] for block in blocks_of]
    read = source.spec.select(
        [*(name for names in pairs for name in names), *(name for each in gains for name in each)]
    )
    values: list[list[list[np.ndarray]]] = []
    excluded = 0
    for rows, diverged in usable_chunks(source, read.names):
        finite = finite_rows(rows)
        excluded += diverged + int((~finite).sum())
        tensors = {t.name: rows[finite][:, read.slices[t.name]].reshape(-1, *t.shape) for t in read.tensors}
        values.append([])
        for (filters, fc1, fc2), factors in zip(pairs, gains, strict=True):
            f = central_pixels(tensors[filters]).astype(np.float64)
            d = np.einsum("nij,nji->ni", *(x.reshape(*x.shape[:2], -1) for x in (tensors[fc2], tensors[fc1])))
            d = d.astype(np.float64)
            for name in factors:
                d = d * tensors[name]
            values[-1].append([np.abs(f) if magnitude == "both" else f, np.abs(d) if magnitude else d])
    blocks = [tuple(np.concatenate(side) for side in zip(*found, strict=True)) for found in zip(*values, strict=True)]
    n = len(blocks[0][0])
    if n < 3:
        raise DataError(f"expected at least 3 networks for a standard error, found {n} ({excluded} excluded)")
    sums = [_sums(part.filters.name, *block) for part, block in zip(parts, blocks, strict=True)]
    sizes = [part.filters.channels for part in parts]
    found = [_correlation(part.filters.name, size, s) for part, size, s in zip(parts, sizes, sums, strict=True)]
    total = _correlation("all blocks", sum(sizes), np.sum(sums, axis=0))
    return FilterMLPCorrelation(total, tuple(found), n, excluded)


def central_pixels(filters: np.ndarray) -> np.ndarray:
    """The pixel in the middle of depthwise filters (N, C, 1, k, k), (N, C)."""
    rows, columns = filters.shape[-2:]
    if filters.ndim != 5 or not rows % 2 or not columns % 2:
        raise UsageError(f"expected filters of odd side, found {filters.shape[1:]}")
    return filters[:, :, 0, rows // 2, columns // 2]


def _sums(name: str, pixels: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """For each network the sums over channels of f d, f^2 and d^2, (3, N), of two arrays (N, C)."""
    f, d = pixels - pixels.mean(), diagonal - diagonal.mean()
    out = np.stack([(f * d).sum(axis=1), np.square(f).sum(axis=1), np.square(d).sum(axis=1)])
    if not (out[1:].sum(axis=1) > 0).all():
        raise DataError(f"`{name}`: central pixels or the diagonal of W2 W1 do not vary between networks and channels")
    return out


def _correlation(name: str, channels: int, sums: np.ndarray) -> Correlation:
    n = sums.shape[1]
    a, b, c = sums.sum(axis=1)
    r = float(a / math.sqrt(b * c))
    psi = sums[0] / math.sqrt(b * c) - r / 2 * (sums[1] / b + sums[2] / c)
    error = math.sqrt(n / (n - 1) * float(np.square(psi - psi.mean()).sum()))
    interval, _, p = fisher_interval(r, error, n - 1)
    return Correlation(name, channels, r, error, interval, p)
