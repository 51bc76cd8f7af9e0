"""Sums over the first parts of a population, kept in its folder, so that they need not be read when it has grown.

    sums/NAME-DIGEST.npz     arr_0, arr_1, ...: the numbers of the sums, in the order of `_places`

NAME is a hash of the shards that were summed, of the statistic and of the code of weightscope; DIGEST is that of the
arrays. Files with another one, or with arrays of other shapes or types, are removed and never used.
"""

import contextlib
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope._util import atomic, npz
from weightscope._util.sources import open_regular
from weightscope.errors import DataError, WeightscopeError

_OURS = f"{'[0-9a-f]' * 32}-{'[0-9a-f]' * 32}.npz"  # others in the folder are left alone
BYTES = 1 << 30  # of all files of a population, at most; the oldest go


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
