"""Products of two thin matrices: diagonal, norms and singular values without forming the product."""

import math
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from weightscope._util.threads import threads_for

_ROWS = 256  # of a block of a large product

STATISTICS = (
    *("diagonal_mean", "diagonal_std", "offdiagonal_norm", "alpha", "beta"),
    *("effective_rank", "participation", "asymmetry", "z"),
)


class FactoredProduct:
    """M = A B^T, stored as its factors; statistics are computed in float64. Leading axes are batch axes.

    With r <= d/2 nothing larger than (d, r) or (r, r) is allocated. Otherwise the factors are no smaller than M, and M
    is formed when its norms are needed, one product at a time, and released. A (..., d, r) and B (..., d', r) may be of
    any floating-point type and are not copied; `shape` is (d, d').
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a.detach(), b.detach()
        self.shape = (a.shape[-2], b.shape[-2])
        self.rank = a.shape[-1]

    @property
    def small(self) -> bool:
        """Whether the factors' own r x r matrices are used instead of M."""
        return 2 * self.rank <= min(self.shape)

    @cached_property
    def finite(self) -> Tensor:
        """Whether all entries of both factors are finite, (...) bool; all statistics of other products are NaN."""
        return self._norms.isfinite()

    def matrix(self) -> Tensor:
        """M itself, (..., d, d')."""
        return self._a.double() @ self._b.double().mT

    def corner(self, n: int) -> Tensor:
        """The upper left n x n entries of M, or all of a smaller M."""
        return self._a[..., :n, :].double() @ self._b[..., :n, :].double().mT

    def singular_values(self) -> Tensor:
        """M's singular values, (..., min(d, d', r)), largest first.

        With r <= d/2 they are those of R_A R_B^T, where A = Q_A R_A and B = Q_B R_B. Otherwise an SVD of M.
        """
        sound = self.finite[..., None, None]
        if self.small:
            left, right = (torch.linalg.qr(torch.where(sound, x, 0.0), mode="r").R for x in self._wide)
            values = torch.linalg.svdvals(left @ right.mT)
        else:
            values = torch.linalg.svdvals(torch.where(sound, self.matrix(), 0.0))[..., : self.rank]
        return torch.where(self.finite[..., None], values, math.nan)

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor]:
        return self._a.double(), self._b.double()

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor]:
        """A^T A and B^T B, (..., r, r)."""
        a, b = self._wide
        return a.mT @ a, b.mT @ b

    @cached_property
    def _norms(self) -> Tensor:
        """||A||_F ||B||_F, (...)."""
        if self.small:
            left, right = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in self._grams)
            return (left * right).sqrt()
        left, right = (torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64) for x in (self._a, self._b))
        return left * right

    def _moments(self) -> list[Tensor]:
        """M's diagonal (..., d), ||M||_F^2, tr((M^T M)^2), which is the sum of s^4, and tr(M M), each (...)."""
        if self.small:
            (a, b), (left, right) = self._wide, self._grams
            chain, mixed = left @ right, b.mT @ a
            return [
                (a * b).sum(-1),
                *((x * y).sum((-2, -1)) for x, y in ((left, right), (chain, chain.mT), (mixed, mixed.mT))),
            ]
        lead = self._a.shape[:-2]
        pairs = zip(self._a.reshape(-1, *self._a.shape[-2:]), self._b.reshape(-1, *self._b.shape[-2:]), strict=True)
        found = zip(*(_large(a, b) for a, b in pairs), strict=True)
        return [torch.stack(values).reshape((*lead, *values[0].shape)) for values in found]

    def statistics(self) -> dict[str, Tensor]:
        """The columns of the table of `products`, each (...) float64; M must be square, (d, d).

        - diagonal_mean: tr(M) / d;
        - diagonal_std: the spread of the d entries on the diagonal (divisor d);
        - offdiagonal_norm: Frobenius norm of the entries off the diagonal, over sqrt(d);
        - alpha, beta: the least-squares fit M ~ alpha Z + beta I, in which beta is the diagonal's mean and alpha is
          ||M - beta I||_F / sqrt(d), since ||Z||_F is sqrt(d) (thesis Eq. 3.12);
        - effective_rank: (sum s^2)^2 / sum s^4, the participation ratio of the singular values' energies;
        - participation: effective_rank / min(r, d), 1 when all singular values are equal;
        - asymmetry: ||M - M^T||_F / (sqrt(2) ||M||_F): 0 for a symmetric M, 1 for independent entries, sqrt(2) for an
          antisymmetric M;
        - z: tr(M) sqrt(d r) / (||A||_F ||B||_F). Under the null that A and B are independent, with independent
          Gaussian entries of any two variances, it is sqrt(n) times the cosine between two random directions in
          n = d r dimensions: mean 0, variance 1, and normal for all practical n.
        """
        d = self.shape[0]
        diagonal, energy, fourth, cross = self._moments()
        trace, beta = diagonal.sum(-1), diagonal.mean(-1)
        values = (
            beta,
            diagonal.std(-1, correction=0),
            # Rounding can make a difference that is zero slightly negative.
            ((energy - diagonal.square().sum(-1)).clamp_min(0) / d).sqrt(),
            ((energy - d * beta.square()).clamp_min(0) / d).sqrt(),
            beta,
            energy.square() / fourth,
            energy.square() / (fourth * min(self.rank, d)),
            ((energy - cross).clamp_min(0) / energy).sqrt(),
            trace * math.sqrt(d * self.rank) / self._norms,
        )
        return dict(zip(STATISTICS, torch.where(self.finite, torch.stack(values), math.nan), strict=True))


def _large(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The moments of one product, computed from M itself."""
    with threads_for("product", len(a)):
        m = a.double() @ b.double().T
        # the sum of s^4 is ||M M^T||_F^2, over pairs of row blocks: half of the products, and no second matrix
        pairs = combinations_with_replacement(m.split(_ROWS), 2)
        fourth = torch.stack([(x @ y.T).square_().sum() * (1 if x is y else 2) for x, y in pairs]).sum()
        return m.diagonal().clone(), m.square().sum(), fourth, (m * m.T).sum()
