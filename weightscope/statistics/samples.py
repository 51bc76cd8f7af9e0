"""Sources of weight vectors: the interface that statistics read, arrays in memory, and sums over parts of a source.

Sums over the first parts of a population are kept in its folder, so that they need not be read when it has grown.

    sums/NAME-DIGEST.npz     arr_0, arr_1, ...: the numbers of the sums, in the order of `_places`

NAME is a hash of the shards that were summed, of the statistic and of the code of weightscope; DIGEST is that of the
arrays. Files with another one, or with arrays of other shapes or types, are removed and never used.
"""

import contextlib
import hashlib
import io
import logging
import operator
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from weightscope._util import atomic, npz
from weightscope._util.environment import available_memory
from weightscope._util.sources import open_regular
from weightscope._util.workers import Workers, chosen_workers, in_order
from weightscope.errors import DataError, SpecError, UsageError, WeightscopeError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows

LEAF = 4096  # networks of the parts over which statistics of populations are summed, at least
LARGEST = 2 << 30  # bytes of a result above which a source is one part
_COPIES = 3  # of a result: the worker's, what it sends, and what is received
_OURS = f"{'[0-9a-f]' * 32}-{'[0-9a-f]' * 32}.npz"  # kept sums; other files in the folder are left alone
BYTES = 1 << 30  # of all files of a population, at most; the oldest go
_log = logging.getLogger(__name__)

T = TypeVar("T")
_END: Any = object()


class WeightSamples(Protocol):
    """N weight vectors that are read in blocks of rows; implemented by `Population`.

    A source may also have `diverged`, booleans (N,), for networks to leave out, and `marked_chunks`, which yields each
    block with its part of `diverged`, if that is faster than reading the whole array first; and `parts`, which cuts it
    for `over_parts`.
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
    marked, start = getattr(source, "marked_chunks", None), 0
    diverged = None if marked else getattr(source, "diverged", None)
    for block in (marked or source.chunks)(select=literal(names), size=size):
        rows, bad = block if marked else (block, np.zeros(len(block), bool))
        if diverged is not None:
            bad = np.asarray(diverged[start : start + len(rows)], bool)
        start += len(rows)
        out = int(bad.sum())
        yield (rows[~bad] if out else rows), out


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


class Keep(NamedTuple):
    """A statistic whose sums are kept; classes of sums name the attributes that are their numbers in `summed`."""

    empty: Callable[[], Any]  # sums over no network: what is read must have their shapes
    about: tuple[Any, ...]  # texts and arrays that they depend on, besides shards and code


class Kept:
    """The files of one statistic in a folder; `shards` are hashes of those in the first k parts, k = 1, 2, ..."""

    def __init__(self, folder: Path, shards: Sequence[str], keep: Keep) -> None:
        self._folder, self._keep = folder, keep
        self._old: Path | None = None  # the file that was read
        about = [x.tobytes() if isinstance(x, np.ndarray) else str(x).encode() for x in (_code(), *keep.about)]
        own = b"".join(hashlib.sha256(each).digest() for each in about)
        self._names = [hashlib.sha256(own + each.encode()).hexdigest()[:32] for each in shards]

    def read(self) -> tuple[int, Any]:
        """The sums over as many of the first parts as there are, and how many these are; 0 without any."""
        files = {file.name.partition("-")[0]: file for file in self._folder.glob(_OURS)}
        for count, name in reversed([*enumerate(self._names, 1)]):
            if name in files:
                try:
                    sums = _read(files[name], self._keep.empty())
                except (DataError, OSError, ValueError, LookupError, RuntimeError, EOFError, zipfile.BadZipFile):
                    with contextlib.suppress(WeightscopeError, OSError):
                        files[name].unlink()
                    continue
                self._old = files[name]
                return count, sums
        return 0, None

    def write(self, count: int, sums: Any) -> None:
        """Keep the sums over the first parts, if there are so many complete ones and the folder can be written."""
        if count != len(self._names):
            return
        if hasattr(sums, "flush"):
            sums.flush()
        arrays = [np.asarray(place[key]) for place, key in _places(sums)]
        if sum(array.nbytes for array in arrays) > BYTES:
            return
        with contextlib.suppress(WeightscopeError, OSError):
            atomic.make_folder(self._folder)
            np.savez(stream := io.BytesIO(), *arrays)
            atomic.write(self._folder / f"{self._names[-1]}-{_digest(arrays)}.npz", stream.getvalue())
            if self._old is not None:
                self._old.unlink()
            left = BYTES
            for file in sorted(self._folder.glob(_OURS), key=lambda file: -file.stat().st_mtime_ns):
                left -= file.stat().st_size
                if left < 0:
                    file.unlink()


def _places(sums: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Where the numbers of sums are: dictionaries, of attributes or values, and keys."""
    names = getattr(type(sums), "summed", None)
    place = sums if names is None else vars(sums)
    for key in place if names is None else names:
        if isinstance(place[key], int | np.integer | np.ndarray):
            yield place, key
        else:
            yield from _places(place[key])


def _read(file: Path, sums: Any) -> Any:
    """Empty sums with the numbers in a file, which must be like theirs; rows (0, ...) stand for any number of them."""
    places = [*_places(sums)]
    with open_regular(file) as stream, zipfile.ZipFile(stream) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > 2 * BYTES:
            raise DataError(f"{file}: expected at most {BYTES:,} bytes")
        found = [npz.stored(archive, entry, file.name) for entry in archive.infolist()]
        for (place, key), one in zip(places, found, strict=True):
            like = np.asarray(place[key])
            rows = slice(like.shape[:1] == (0,), None)
            if one.dtype != like.dtype or one.shape[rows] != like.shape[rows]:
                raise DataError(f"{file}: expected {like.dtype} {like.shape}, found {one.dtype} {one.shape}")
        arrays = [npz.values(archive, one) for one in found]
    if _digest(arrays) != file.stem.partition("-")[2] or not all(np.isfinite(array).all() for array in arrays):
        raise DataError(f"{file}: expected finite numbers with the digest in its name, found others")
    for (place, key), array in zip(places, arrays, strict=True):
        place[key] = int(array) if not array.shape else array.copy(order="K")
    return sums


def _digest(arrays: Sequence[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        found.update(f"{array.dtype.str} {array.shape} {fortran}".encode())
        found.update(np.ascontiguousarray(array.T if fortran else array).data)
    return found.hexdigest()[:32]


@cache
def _code() -> str:
    """NumPy's version and the source of weightscope: other code may sum in another way."""
    found = hashlib.sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def over_parts(
    source: WeightSamples | list[Any],
    task: Callable[[Any, int], T],
    workers: Workers | int | None = None,
    *,
    networks: int | None = None,
    size: int = 0,
    keep: Keep | None = None,
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
        size: about how many bytes a result takes. If they are more than 2 GiB, the source is one part; no more
            processes are started than results fit into memory.
        keep: what the sums are, to use those over the first parts that were kept before, and to keep the new ones.

    Raises:
        WeightscopeError: if workers are lost, with the shards that they read; and what `task` raises.
    """
    chosen = workers if isinstance(workers, Workers) else chosen_workers("loky", workers, None)
    parts = source if isinstance(source, list) else parts_of(source, networks, size)
    if len(parts) < 2:
        return task(parts[0], 0)
    first, write = 0, None
    total: Any = None
    if keep and hasattr(source, "kept"):
        folder, hashes = source.kept(parts)
        kept = Kept(folder, hashes, keep)
        (first, total), write = kept.read(), kept.write
    left = [*enumerate(parts)][first:]
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
            if verified:  # workers of the next pass need not verify again
                part.verified.update(verified)
            total = operator.iadd(total, value) if i else value
            if write:
                write(i + 1, total)
    return total


def parts_of(source: WeightSamples, networks: int | None = None, size: int = 0) -> list[Any]:
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


def _on_part(task: Callable[[Any, int], T], item: tuple[int, Any]) -> tuple[T, dict[int, Any]]:
    """A result, and which hashes were verified for it."""
    i, part = item
    verified = getattr(part, "verified", {})
    before = dict(verified)
    value = task(part, i)
    return value, {tile: tag for tile, tag in verified.items() if tag != before.get(tile) and isinstance(tag, tuple)}
