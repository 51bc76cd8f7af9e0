"""Sources of weight vectors: the interface that statistics read, and arrays in memory."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from weightscope.errors import SpecError
from weightscope.spec import WeightSpec

T = TypeVar("T")
_END: Any = object()


class WeightSamples(Protocol):
    """N weight vectors that are read in blocks of rows; implemented by `Population`.

    A source may also have `diverged`, booleans (N,), for networks to leave out, and `marked_chunks`, which yields each
    block with its part of `diverged`, if that is faster than reading the whole array first.
    """

    @property
    def spec(self) -> WeightSpec:
        """Names and shapes of one network's tensors, of D entries in all."""

    def chunks(self, select: str | Sequence[str] = "*", size: int | None = None) -> Iterator[np.ndarray]:
        """Blocks of rows (n, D') with the tensors whose names match, in the spec's order."""


class WeightArray:
    """A matrix of weight vectors in memory."""

    def __init__(self, weights: Any, spec: WeightSpec) -> None:
        self.weights = np.asarray(weights)
        self.spec = spec
        if self.weights.ndim != 2 or self.weights.shape[1] != spec.size:
            raise SpecError(f"expected weights (N, {spec.size}) from the spec, found {self.weights.shape}")

    def __len__(self) -> int:
        return len(self.weights)

    def chunks(self, select: str | Sequence[str] = "*", size: int | None = None) -> Iterator[np.ndarray]:
        """Blocks of rows (size, D') with the tensors whose names match; 1,024 rows by default."""
        sub = self.spec.select(select)
        columns = self.spec.columns(sub)
        step = size or 1024
        whole = sub == self.spec
        for start in range(0, len(self.weights), step):
            rows = self.weights[start : start + step]
            yield rows if whole else rows[:, columns]


def literal(names: Sequence[str]) -> list[str]:
    """Patterns for `select` that match exactly these names, with wildcard characters escaped."""
    return ["".join(f"[{c}]" if c in "*?[" else c for c in name) for name in names]


def usable_chunks(
    source: WeightSamples, names: Sequence[str], size: int | None = None
) -> Iterator[tuple[np.ndarray, int]]:
    """Blocks of rows without the diverged networks, and how many were left out."""
    blocks = source.marked_chunks if hasattr(source, "marked_chunks") else partial(_marked_chunks, source)
    for rows, bad in blocks(select=literal(names), size=size):
        out = int(bad.sum())
        yield (rows[~bad] if out else rows), out


def _marked_chunks(
    source: WeightSamples, select: Sequence[str], size: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    diverged, start = getattr(source, "diverged", None), 0
    for rows in source.chunks(select=select, size=size):
        stop = start + len(rows)
        bad = np.zeros(len(rows), bool) if diverged is None else np.asarray(diverged[start:stop], bool)
        yield rows, bad
        start = stop


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, with the next one computed in a thread, so that reading overlaps with arithmetic."""
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as pool:
        waiting = pool.submit(next, items, _END)
        while (item := waiting.result()) is not _END:
            waiting = pool.submit(next, items, _END)
            yield item
