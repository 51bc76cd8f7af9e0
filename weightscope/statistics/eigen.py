"""Leading eigenpairs of a covariance without the D x D matrix."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.linalg import eigh

from weightscope.errors import UsageError
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.panels import Margins, margins
from weightscope.statistics.syrk import add_gram

_COLUMNS = 2048  # columns of the data that are centred at once
_OVERSAMPLING = 16


@dataclass(frozen=True)
class Eigenpairs:
    """The leading eigenpairs of the covariance of n rows.

    Attributes:
        values: (r,), descending; variances along the vectors.
        vectors: (r, D), orthonormal rows; the largest entry of each is positive.
        mean: (D,).
        total: the trace of the covariance.
        n: number of finite rows.
        excluded: number of rows left out because they contain a non-finite number.
        method: "gram" (exact) or "randomised".
    """

    values: np.ndarray
    vectors: np.ndarray
    mean: np.ndarray
    total: float
    n: int
    excluded: int
    method: Literal["gram", "randomised"]

    @property
    def explained(self) -> np.ndarray:
        """The share of the total variance along each vector, (r,)."""
        return self.values / self.total if self.total else np.zeros_like(self.values)


def top_eigenpairs(
    passes: Callable[[], Iterable[np.ndarray]],
    size: int,
    rank: int,
    *,
    memory: int = 2 << 30,
    power: int = 4,
    seed: int = 0,
) -> Eigenpairs:
    """The `rank` leading eigenpairs of C = X^T X / (n - 1), X the centred rows (n, D).

    If the rows fit into `memory` and n <= D, from the Gram matrix: `X X^T = U S^2 U^T` gives `V = S^-1 U^T X`
    (Sirovich's snapshots); exact to float64 on float32 rows. Otherwise by randomised subspace iteration (Halko,
    Martinsson and Tropp 2011, Alg. 4.4) with one pass over the data for each power: the values are then lower
    bounds, and close if the spectrum decays.

    Args:
        passes: called for every pass; yields the same rows (n, D) each time.
        size: D.
        rank: r, at most n - 1 and D.
        memory: bytes that the rows may take.
        power: passes of the randomised method.
        seed: of its start.

    Raises:
        UsageError: if the rank is not between 1 and min(n - 1, D).
        DataError: if fewer than 2 rows are finite.
    """
    held = _held(passes(), memory)
    known = margins(passes() if held is None else held, size)
    if not 1 <= rank <= min(known.n - 1, size):
        raise UsageError(f"rank: expected 1 to {min(known.n - 1, size)} for {known.n} rows of {size}, found {rank}")
    method: Literal["gram", "randomised"]
    if held is not None and known.n <= size:
        method, (values, vectors) = "gram", _by_gram(held, known, rank)
    else:
        again = passes if held is None else lambda: held
        method, (values, vectors) = "randomised", _randomised(again, known, rank, power=power, seed=seed)
    vectors *= np.sign(vectors[np.arange(rank), np.abs(vectors).argmax(axis=1)])[:, None]
    return Eigenpairs(values, vectors, known.mean, float(known.variance.sum()), known.n, known.excluded, method)


def _held(chunks: Iterable[np.ndarray], memory: int) -> list[np.ndarray] | None:
    """All rows in memory, or None if they take more than that."""
    out, size = [], 0
    for chunk in chunks:
        size += chunk.nbytes
        if size > memory:
            return None
        out.append(chunk)
    return out


def _by_gram(held: list[np.ndarray], known: Margins, rank: int) -> tuple[np.ndarray, np.ndarray]:
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


def _randomised(
    passes: Callable[[], Iterable[np.ndarray]], known: Margins, rank: int, *, power: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    size = len(known.mean)
    width = min(rank + _OVERSAMPLING, size)
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, width)))[0]
    image = basis
    for _ in range(max(1, power)):
        basis = np.linalg.qr(image)[0]
        image = np.zeros_like(basis)
        for rows in passes():
            z = np.subtract(rows[finite_rows(rows)], known.mean, dtype=np.float64)
            image += z.T @ (z @ basis)
        image /= known.n - 1
    values, turn = np.linalg.eigh(basis.T @ image)  # Rayleigh-Ritz
    return values[::-1][:rank].clip(0), np.ascontiguousarray((basis @ turn[:, ::-1][:, :rank]).T)
