"""The usable networks of a source, streamed in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weightscope.artifacts.population_fit import varying_spec
from weightscope.errors import DataError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.samples import WeightSamples, usable_chunks

BLOCK = 256  # rows; fixed, so that results do not depend on the chunks of the source


class UsableNetworks:
    """The networks of a source that did not diverge and are finite in the selected tensors, numbered from 0.

    The source is read once for the attributes and again by every call of `Entries.blocks`; one of its chunks is held
    at a time.

    Args:
        source: where the vectors come from.
        spec: of the D selected entries.

    Attributes:
        n: how many there are.
        excluded: how many were left out.
        first: (D,) the first network's values, float64.
        varying: (D,) booleans, which entries differ between networks.
    """

    def __init__(self, source: WeightSamples, spec: WeightSpec) -> None:
        self._source, self._spec = source, spec
        finite, diverged = [np.empty(0, dtype=bool)], 0
        first, self.varying = None, np.zeros(spec.size, dtype=bool)
        for rows, out in usable_chunks(source, spec.names):
            keep = finite_rows(rows)
            finite.append(keep)
            diverged += out
            rows = rows if keep.all() else rows[keep]
            if len(rows):
                first = rows[0].copy() if first is None else first
                self.varying |= (rows != first).any(axis=0)
        self._finite = np.concatenate(finite)
        self.n = int(self._finite.sum())
        self.excluded = diverged + len(self._finite) - self.n
        self.first = np.zeros(spec.size) if first is None else first.astype(np.float64)

    def entries(self, name: str, part: WeightSpec) -> "Entries":
        """The varying entries of some tensors.

        Args:
            name: for messages.
            part: of the tensors, in the order of the spec.
        """
        columns = self._spec.columns(part)
        return Entries(name, part, self.first[columns], self.varying[columns], self._source, self._finite)


@dataclass(frozen=True)
class Entries:
    """The entries of some tensors that vary between the usable networks.

    Attributes:
        name: for messages.
        part: of all D entries of the tensors.
        first: (D,) the first network's values.
        varying: (D,) booleans.
    """

    name: str
    part: WeightSpec
    first: np.ndarray
    varying: np.ndarray
    _source: WeightSamples
    _finite: np.ndarray

    @property
    def spec(self) -> WeightSpec:
        """Of the D' entries that vary."""
        return self.part if self.varying.all() else varying_spec(self.part, self.varying)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read the source again, in blocks of 256 rows.

        Yields:
            the number of the block's first network, and rows (n, D') float64, valid until the next block.

        Raises:
            DataError: if the source has another number of networks than before.
        """
        block = np.empty((BLOCK, int(self.varying.sum())))
        start = filled = seen = 0
        for rows, _ in usable_chunks(self._source, self.part.names):
            keep = self._finite[seen : seen + len(rows)]
            seen += len(rows)
            if seen > len(self._finite):
                break
            for k in range(0, len(rows), BLOCK):
                piece = rows[k : k + BLOCK][keep[k : k + BLOCK]][:, self.varying]
                while len(piece):
                    taken = piece[: BLOCK - filled]
                    block[filled : filled + len(taken)] = taken
                    piece, filled = piece[len(taken) :], filled + len(taken)
                    if filled == BLOCK:
                        yield start, block
                        start, filled = start + BLOCK, 0
        if seen != len(self._finite):
            raise DataError(
                f"the source changed while it was read: expected {len(self._finite)} networks, found {seen}; "
                "run the same command again"
            )
        if filled:
            yield start, block[:filled]

    def matrix(self) -> np.ndarray:
        """All rows (N, D') float64."""
        out = np.empty((int(self._finite.sum()), int(self.varying.sum())))
        for start, rows in self.blocks():
            out[start : start + len(rows)] = rows
        return out


def blocks_of(data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows (N, D) in memory in the blocks of `Entries.blocks`."""
    return ((start, data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
