"""Sources of weight vectors: the interface that statistics read, arrays in memory, and sums over parts of a source."""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from weightscope._util.environment import available_memory
from weightscope._util.in_order import in_order
from weightscope._util.workers import Workers, chosen_workers
from weightscope.errors import DataError, SpecError, UsageError, WeightscopeError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows

LEAF = 4096  # networks of the parts over which statistics of populations are summed, at least
LARGEST = 256 << 20  # bytes of a result above which a source is one part: larger ones are products for all threads
_COPIES = 3  # of a result: the worker's, what it sends, and what is received
_log = logging.getLogger(__name__)

T = TypeVar("T")
_END: Any = object()


class WeightSamples(Protocol):
    """N weight vectors that are read in blocks of rows; implemented by `Population`.

    A source may also have `marked_chunks`, which yields each block with booleans (n,), the networks that diverged and
    are left out; and `parts`, which cuts it for `over_parts`.
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
    if not hasattr(source, "marked_chunks"):
        yield from ((rows, 0) for rows in source.chunks(literal(names), size))
        return
    for rows, diverged in source.marked_chunks(literal(names), size):
        out = int(diverged.sum())
        yield (rows[~diverged] if out else rows), out


def finite_chunks(
    source: WeightSamples, names: Sequence[str], size: int | None = None
) -> Iterator[tuple[np.ndarray, int]]:
    """As `usable_chunks`, read ahead, also without networks that are not finite."""
    for rows, out in ahead(usable_chunks(source, names, size)):
        finite = finite_rows(rows)
        yield (rows if finite.all() else rows[finite]), out + int((~finite).sum())


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, with the next one computed in a thread, so that reading overlaps with arithmetic."""
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as pool:
        waiting = pool.submit(next, items, _END)
        while (item := waiting.result()) is not _END:
            waiting = pool.submit(next, items, _END)
            yield item


def over_parts(
    source: WeightSamples | list[Any],
    task: Callable[[Any, int], T],
    workers: Workers | int | None = None,
    *,
    networks: int | None = None,
    size: int = 0,
) -> T:
    """`task(part, i)` of each part of a source, computed by workers and added up (`+=`) in the order of the parts.

    A population is cut into parts of consecutive whole shards with at least so many `networks`; a source without
    `parts` is one. The result has the same bits for all numbers of workers and backends, since parts depend on the
    source alone, each is computed by one thread, and one process does the same.

    Args:
        source: what `task` reads, or its parts; they travel to the workers, as do the task and its results.
        task: called with a part and its number.
        workers: the number of processes of this machine, 1 for this one, by default one for each core; or `Workers`.
        networks: of a part, at least; by default 4,096.
        size: about how many bytes a result takes. If they are more than 256 MiB, the source is one part; no more
            processes are started than results fit into memory.

    Raises:
        WeightscopeError: if workers are lost, with the shards that they read; and what `task` raises.
    """
    chosen = workers if isinstance(workers, Workers) else chosen_workers("loky", workers, None)
    parts = source if isinstance(source, list) else partition(source, networks, size)
    if len(parts) < 2:
        return task(parts[0], 0)
    total: Any = None
    left = [*enumerate(parts)]
    chosen = chosen.on_device("cpu", len(left))
    if chosen.backend == "loky" and chosen.count is not None:
        most = max(1, available_memory() // (_COPIES * max(size, 1)))
        if most < chosen.count:
            _log.warning("%d of %d workers: results of %.1f GB fill the memory", most, chosen.count, size / 1e9)
            chosen = Workers(count=most)
    with contextlib.closing(in_order(partial(_on_part, task), left, [part.name for _, part in left], chosen)) as found:
        for (i, part), each in zip(left, found, strict=True):
            if isinstance(each, WeightscopeError):
                raise each
            value, verified = each
            if verified:  # workers of the next pass need not compare them again
                part.verified.update(verified)
            total = operator.iadd(total, value) if i else value
    return total


def partition(source: WeightSamples, networks: int | None = None, size: int = 0) -> list[Any]:
    """The parts of a source, see `over_parts`."""
    return (source.parts(networks or LEAF) if hasattr(source, "parts") and size <= LARGEST else []) or [source]


class Sums:
    """Several sums that are added up (`+=`) one by one; an error takes the place of one that failed."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def alive(self) -> list[int]:
        """Which have not failed."""
        return [i for i, item in enumerate(self.items) if not isinstance(item, WeightscopeError)]

    @contextlib.contextmanager
    def attempt(self, i: int) -> Iterator[None]:
        """Put an expected error of the block in the place of a sum."""
        try:
            yield
        except (UsageError, DataError) as error:
            self.items[i] = error

    def __iadd__(self, other: "Sums") -> "Sums":
        for i in self.alive():
            one = other.items[i]
            self.items[i] = one if isinstance(one, WeightscopeError) else operator.iadd(self.items[i], one)
        return self


def _on_part(task: Callable[[Any, int], T], item: tuple[int, Any]) -> tuple[T, set[int]]:
    """A result, and the shards whose hashes were compared for it."""
    i, part = item
    value = task(part, i)
    return value, getattr(part, "verified", set())
