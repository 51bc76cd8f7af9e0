"""A product of two thin matrices and everything that is asked about it, without forming it."""

import math
from functools import cached_property

import torch
from torch import Tensor

_ROWS = 512  # of a large product that are worked on at once


class FactoredProduct:
    """M = A B^T, kept as its factors; computed in float64.

    With r < d/2 nothing larger than (d, r) or (r, r) is made. Otherwise the factors are no smaller than M, and M is
    made where its norms are asked for, and dropped again.

    Args:
        a: A (d, r), of any floating-point type; not copied.
        b: B (d', r).

    Attributes:
        shape: (d, d').
        rank: r, the largest rank that M can have.
        finite: whether all entries of both factors are; everything else is NaN where they are not.

    Example:
        >>> head = FactoredProduct(part.read("q")[0], part.read("k")[0])
        >>> head.diagonal().mean()
        tensor(0.0712, dtype=torch.float64)
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a.detach(), b.detach()
        self.shape = (a.shape[0], b.shape[0])
        self.rank = a.shape[1]
        # A finite sum proves that every entry is; it makes no copy. A sum that overflows only costs a second look.
        self.finite = all(math.isfinite(x.sum()) or bool(x.isfinite().all()) for x in (self._a, self._b))

    @property
    def small(self) -> bool:
        """Whether the factors' own r x r matrices are used instead of M."""
        return 2 * self.rank <= min(self.shape)

    def matrix(self) -> Tensor:
        """M itself, (d, d')."""
        return self._a.double() @ self._b.double().T

    def corner(self, n: int) -> Tensor:
        """The upper left n x n entries of M, or fewer where M has fewer."""
        return self._a[:n].double() @ self._b[:n].double().T

    def diagonal(self) -> Tensor:
        """M's diagonal, (min(d, d'),)."""
        n = min(self.shape)
        pairs = ((self._a[i : min(n, i + _ROWS)], self._b[i : min(n, i + _ROWS)]) for i in range(0, n, _ROWS))
        return torch.cat([torch.einsum("ir,ir->i", a.double(), b.double()) for a, b in pairs])

    def singular_values(self) -> Tensor:
        """M's singular values, (min(d, d', r),), largest first: those of R_A R_B^T with A = Q_A R_A, B = Q_B R_B."""
        if not self.finite:
            return torch.full((min(*self.shape, self.rank),), math.nan, dtype=torch.float64)
        if self.small:
            return self._core_values
        return torch.linalg.svdvals(self.matrix())[: self.rank]

    @cached_property
    def _core_values(self) -> Tensor:
        left, right = (torch.linalg.qr(x.double(), mode="r").R for x in (self._a, self._b))
        return torch.linalg.svdvals(left @ right.T)

    @cached_property
    def traces(self) -> tuple[float, float, float]:
        """||M||_F^2, tr((M^T M)^2), which is the sum of s^4, and tr(M M) where M is square (else NaN)."""
        if not self.finite:
            return math.nan, math.nan, math.nan
        square = self.shape[0] == self.shape[1]
        if self.small:
            energies = self._core_values.square()
            mixed = self._b.double().T @ self._a.double() if square else torch.full((1, 1), math.nan)
            return float(energies.sum()), float(energies.square().sum()), float((mixed * mixed.T).sum())
        m = self.matrix()
        blocks = m.split(_ROWS)
        fourth = 0.0
        for i, block in enumerate(blocks):  # ||M M^T||_F^2, each pair of blocks once
            fourth += sum(
                float((block @ other.T).square_().sum()) * (1 + (j > 0)) for j, other in enumerate(blocks[i:])
            )
        energy = sum(float(block.square().sum()) for block in blocks)
        cross = sum(float((block * m[:, i * _ROWS : (i + 1) * _ROWS].T).sum()) for i, block in enumerate(blocks))
        return energy, fourth, cross if square else math.nan

    def statistics(self) -> dict[str, float]:
        """What stands in a row of the table; M is square, (d, d).

        - diagonal_mean: tr(M) / d;
        - diagonal_std: the spread of the d entries on the diagonal (divisor d);
        - diagonal_median: their median, which a few large channels do not move;
        - diagonal_positive: the share of them that is above zero;
        - offdiagonal_norm: Frobenius norm beside the diagonal, over sqrt(d);
        - alpha, beta: the least-squares fit M ~ alpha Z + beta I, in which beta is the diagonal's mean and alpha is
          ||M - beta I||_F / sqrt(d), since ||Z||_F is sqrt(d) (thesis Eq. 3.12);
        - effective_rank: (sum s^2)^2 / sum s^4, the participation ratio of the singular values' energies;
        - asymmetry: ||M - M^T||_F / (sqrt(2) ||M||_F): 0 for a symmetric M, 1 for independent entries, sqrt(2) for an
          antisymmetric M;
        - z: tr(M) sqrt(d r) / (||A||_F ||B||_F). Under the null that A and B are independent, with independent
          Gaussian entries of any two variances, it is sqrt(n) times the cosine between two random directions in
          n = d r dimensions: mean 0, variance 1, and normal for all practical n;
        - z_rotated: tr(M) sqrt(d) / ||M||_F. The same under the weaker null that M's singular values are what they
          are and only the directions of the d channels are random (M R, R a uniformly random rotation), which also
          allows factors with correlated or unequal columns.
        """
        d = self.shape[0]
        diagonal = self.diagonal() if self.finite else torch.full((d,), math.nan, dtype=torch.float64)
        energy, fourth, cross = self.traces
        trace, beta = float(diagonal.sum()), float(diagonal.mean())
        sizes = math.prod(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (self._a, self._b))
        return {
            "diagonal_mean": beta,
            "diagonal_std": float(diagonal.std(correction=0)),
            "diagonal_median": float(diagonal.quantile(0.5)),
            "diagonal_positive": float((diagonal > 0).double().mean()) if self.finite else math.nan,
            "offdiagonal_norm": _root((energy - float(diagonal.square().sum())) / d),
            "alpha": _root((energy - d * beta**2) / d),
            "beta": beta,
            "effective_rank": _ratio(energy**2, fourth),
            "asymmetry": _root(_ratio(energy - cross, energy)),
            "z": _ratio(trace * math.sqrt(d * self.rank), sizes),
            "z_rotated": _ratio(trace * math.sqrt(d), math.sqrt(energy)),
        }


def _root(value: float) -> float:
    """The square root, where rounding may have made a zero negative."""
    return math.sqrt(max(value, 0.0)) if math.isfinite(value) else math.nan


def _ratio(over: float, under: float) -> float:
    return over / under if under != 0 else math.nan
