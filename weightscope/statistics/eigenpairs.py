"""The leading eigenpairs of covariances that are too large for memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from scipy.linalg import eigh

from weightscope._util.results import Result
from weightscope.errors import UsageError
from weightscope.statistics.moments import EntryMoments, add_gram, finite_rows

T = TypeVar("T")


class Total(Protocol):
    """Applies a function to blocks of rows, in parts or all of them, and adds up (`+=`) what it returns: one pass."""

    def __call__(self, function: Callable[[Iterable[np.ndarray]], T], size: int = 0) -> T:
        """`size` is about how many bytes each result takes."""


_COLUMNS = 2048  # columns of the data that are centred at once
_OVERSAMPLING, _PASSES = 16, 4  # of the randomised iteration


@dataclass(frozen=True, eq=False, repr=False)
class Eigenpairs(Result):
    """The leading eigenpairs of the covariance of n rows."""

    values: np.ndarray  # (r,), descending; variances along the vectors
    vectors: np.ndarray  # (r, D), orthonormal rows; the largest entry of each is positive
    mean: np.ndarray  # (D,)
    total: float  # the trace of the covariance
    n: int  # number of finite rows
    excluded: int  # number of rows left out because they contain a non-finite number
    method: Literal["gram", "randomised"]  # "gram" (exact) or "randomised"

    @property
    def explained(self) -> np.ndarray:
        """The share of the total variance along each vector, (r,)."""
        return self.values / self.total if self.total else np.zeros_like(self.values)

    columns: ClassVar = {"direction": "{direction}", "variance": "{variance:.4g}", "share of all": "{share:.2%}"}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each eigenpair, the largest first."""
        pairs = zip(self.values.tolist(), self.explained.tolist(), strict=True)
        return [{"direction": i, "variance": value, "share": share} for i, (value, share) in enumerate(pairs, 1)]

    def summary(self) -> str:
        """One line: how many, of what, and the method."""
        left_out = f" ({self.excluded} left out)" if self.excluded else ""
        size = f"{len(self.mean):,} coordinates over {self.n:,} networks{left_out}"
        return f"{len(self.values)} leading eigenpairs of the covariance of {size}, method {self.method}"

    def to_dict(self) -> dict[str, Any]:
        """The rows and the counts, without the vectors."""
        return super().to_dict() | {"n": self.n, "excluded": self.excluded, "total": self.total, "method": self.method}


def top_eigenpairs(total: Total, size: int, rank: int, *, memory: int = 2 << 30) -> Eigenpairs:
    """The `rank` leading eigenpairs of C = X^T X / (n - 1), X the centred rows (n, D).

    If the rows fit into `memory` as float32 and n <= D, from the Gram matrix: `X X^T = U S^2 U^T` gives
    `V = S^-1 U^T X` (Sirovich's snapshots); exact to float64 on float32 rows. Otherwise by randomised subspace
    iteration (Halko, Martinsson and Tropp 2011, Alg. 4.4) with four passes over the data: the values are then
    lower bounds, and close if the spectrum decays.
    """
    known = total(partial(EntryMoments, size))
    variance = float(known.variance().sum())
    if not 1 <= rank <= min(known.n - 1, size):
        raise UsageError(f"rank: expected 1 to {min(known.n - 1, size)} for {known.n} rows of {size}, found {rank}")
    method: Literal["gram", "randomised"]
    fits = 4 * (known.n + known.excluded) * size <= memory
    held = total(list) if fits else []
    if fits and known.n <= size:
        method, (values, vectors) = "gram", _by_gram(held, known, rank)
    else:
        if fits:
            total = lambda function, size=0: function(held)  # noqa: E731
        method, (values, vectors) = "randomised", _randomised(total, known, rank)
    vectors *= np.sign(vectors[np.arange(rank), np.abs(vectors).argmax(axis=1)])[:, None]
    return Eigenpairs(values, vectors, known.mean, variance, known.n, known.excluded, method)


def _by_gram(held: list[np.ndarray], known: EntryMoments, rank: int) -> tuple[np.ndarray, np.ndarray]:
    good = [chunk[finite_rows(chunk)] for chunk in held] if known.excluded else held
    parts = [slice(a, a + _COLUMNS) for a in range(0, len(known.mean), _COLUMNS)]

    def centred(part: slice) -> np.ndarray:
        return np.concatenate([np.subtract(rows[:, part], known.mean[part], dtype=np.float64) for rows in good])

    gram = np.zeros((known.n, known.n), order="F")
    for part in parts:
        add_gram(gram, np.ascontiguousarray(centred(part).T))
    squares, u = eigh(
        gram, lower=False, subset_by_index=(known.n - rank, known.n - 1), overwrite_a=True, check_finite=False
    )
    squares, u = squares[::-1], u[:, ::-1]
    varying = int((squares > known.n * np.finfo(float).eps * squares[0]).sum())
    if varying < rank:
        raise UsageError(f"rank: expected at most {varying}, the rank of the rows, found {rank}")
    vectors = np.concatenate([u.T @ centred(part) for part in parts], axis=1)
    return squares / (known.n - 1), vectors / np.sqrt(squares)[:, None]


def _image(mean: np.ndarray, basis: np.ndarray, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of z (z^T basis) over rows z about the mean, (D, r)."""
    image = np.zeros_like(basis)
    for rows in blocks:
        z = np.subtract(rows[finite_rows(rows)], mean, dtype=np.float64)
        image += z.T @ (z @ basis)
    return image


def _randomised(total: Total, known: EntryMoments, rank: int) -> tuple[np.ndarray, np.ndarray]:
    size = len(known.mean)
    width = min(rank + _OVERSAMPLING, size)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((size, width)))[0]
    image = basis
    for _ in range(_PASSES):
        basis = np.linalg.qr(image)[0]
        image = total(partial(_image, known.mean, basis), basis.nbytes) / (known.n - 1)
    values, turn = np.linalg.eigh(basis.T @ image)  # Rayleigh-Ritz
    return values[::-1][:rank].clip(0), np.ascontiguousarray((basis @ turn[:, ::-1][:, :rank]).T)
