"""`EntryMoments`: mean and variance of each entry of N vectors in one pass, in O(D) memory."""

import numpy as np


class EntryMoments:
    """Streaming mean and sum of squared deviations of each of D entries.

    Rows are centred block by block; the distance between a block's mean and the mean so far enters as one more
    deviation (Chan, Golub and LeVeque 1983, Eq. 2.1b). An entry that has one value in all rows has exactly zero.

    Args:
        size: D.

    Attributes:
        n: rows taken.
        mean: (D,) float64.
        squares: (D,) sum of squared deviations from the mean.
    """

    def __init__(self, size: int) -> None:
        self.n = 0
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)

    def update(self, rows: np.ndarray) -> np.ndarray:
        """Take rows (n, D), n >= 1.

        Returns:
            deviations (n + 1, D), whose squares, and squares of any linear map of them, add up over all updates to
            those of the deviations from the common mean.
        """
        start = rows[0].astype(np.float64)
        deviations = np.empty((len(rows) + 1, len(start)))
        np.subtract(rows, start, out=deviations[:-1])
        shift = deviations[:-1].mean(axis=0)
        deviations[:-1] -= shift
        both = self.n + len(rows)
        distance = start + shift - self.mean
        deviations[-1] = np.sqrt(self.n * len(rows) / both) * distance
        self.mean = start + shift if not self.n else self.mean + distance * (len(rows) / both)
        self.squares += np.einsum("ij,ij->j", deviations, deviations)
        self.n = both
        return deviations

    def mean_square(self, about: np.ndarray) -> np.ndarray:
        """The mean squared deviation of each entry from `about` (D,), divisor n."""
        return self.squares / self.n + (self.mean - about) ** 2
