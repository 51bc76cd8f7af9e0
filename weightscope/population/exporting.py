"""`export`: a population as one HDF5 file, for sharing.

HDF5 itself writes no file here. It lays the file out in memory, with the matrix's place reserved but never
written, and plain Python puts the pieces where they belong: memory does not grow with N, and a full disk is
an ordinary error, where HDF5 would fail again while closing the file.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from weightscope._util import atomic, toml
from weightscope.errors import UsageError
from weightscope.population.reading import Population
from weightscope.spec import WeightSpec


def export(population: Population, path: str | Path, select: str | Sequence[str] = "*") -> Path:
    """Write one HDF5 file with everything that others need, and no weightscope to read it.

    It holds `/weights` (n, D') float32 (contiguous, so that it can be mapped), `/network` (n,) the networks'
    numbers, `/seed` (n,), `/metrics/*`, and the texts `/spec` (JSON), `/recipe` (TOML), `/environment` (JSON).

    Args:
        population: what to write; open it with `partial=True` to export an incomplete one.
        path: the file, which is replaced if it exists.
        select: patterns as in `WeightSpec.select`; D' is the size of what they choose.

    Raises:
        UsageError: if a pattern matches nothing or the path is a folder.
        DataError: if a shard is damaged.
        WeightscopeError: if the file cannot be written; nothing half-written is left.

    Example:
        >>> export(Population("digits.pop"), "digits.h5")
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")
    sub = population.spec.select(select)
    layout, offset = _lay_out(population, sub)
    with atomic.replacing(path) as file:
        for start, piece in layout.pieces:
            file.seek(start)
            file.write(piece)
        if offset is not None:
            file.seek(offset)
            for block in population.chunks(select):
                file.write(block.astype("<f4", copy=False).data)
        file.truncate(layout.size)
    return path


def _lay_out(population: Population, sub: WeightSpec) -> tuple["_Recorder", int | None]:
    """Everything but the matrix, and where in the file the matrix belongs (None: it is empty)."""
    recorder = _Recorder()
    with h5py.File(recorder, "w", libver=("v110", "v110")) as h5:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        space = h5py.h5s.create_simple((len(population), sub.size))
        weights = h5py.h5d.create(h5.id, b"weights", h5py.h5t.IEEE_F32LE, space, properties)
        columns = {"network": population.indices, "seed": population.seeds}
        columns |= {f"metrics/{name}": values for name, values in population.metrics.items()}
        texts = {
            "spec": sub.to_json(),
            "recipe": toml.dumps(population.recipe.to_dict()),
            "environment": json.dumps(population.environment),
        }
        for name, values in columns.items():
            h5.create_dataset(name, data=values, track_times=False)
        for name, text in texts.items():
            h5.create_dataset(name, data=np.bytes_(text.encode()), track_times=False)
        offset = weights.get_offset()
    return recorder, offset


class _Recorder(io.RawIOBase):
    """A file in memory that keeps what was written and nothing for what was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[int, bytes]] = []
        self.size = 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        piece = bytes(data)
        self.pieces.append((self._position, piece))
        self._position += len(piece)
        self.size = max(self.size, self._position)
        return len(piece)

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size - self._position))
        view[:count] = bytes(count)
        for start, piece in self.pieces:
            low, high = max(start, self._position), min(start + len(piece), self._position + count)
            if low < high:
                view[low - self._position : high - self._position] = piece[low - start : high - start]
        self._position += count
        return count

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        kept = [(start, piece[: self.size - start]) for start, piece in self.pieces if start < self.size]
        self.pieces = kept
        return self.size
