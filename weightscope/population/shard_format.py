"""The format of shards: encoding a trained tile as an HDF5 file, and validating such a file.

    /weights (n, D) f32, /seed (n,) u64, /metrics/NAME (n,) or (n, E)

Validation uses HDF5's low-level interface, which takes half the time of h5py's classes.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from weightscope._util.names import shortened
from weightscope._util.seeding import Purpose, torch_seed
from weightscope.errors import DataError
from weightscope.population.manifest import Manifest

AGAIN = "run `weightscope collect` again to retrain it"

_FORMAT = "weightscope-shard"
_SCHEMA = 1
_CHUNK = (250, 1000)  # rows, columns: so that a few tensors are read without the rest
_LONGEST_TEXT = 256
_NETWORK_BYTES, _EPOCH_BYTES, _FILE_BYTES = 65, 32, 6_500  # seed and metrics; HDF5's structures, measured


@dataclass(frozen=True)
class TrainedTile:
    """The result of training one tile: T networks, of which the last tile of a population stores fewer.

    Attributes:
        index: of the tile; network k is row k mod T of tile k div T.
        weights: (T, D) float32 in `WeightSpec` order.
        seeds: (T,) uint64, the seeds of the initial weights.
        metrics: name -> (T,) or (T, E) array; one of them is `diverged`, booleans.
    """

    index: int
    weights: np.ndarray
    seeds: np.ndarray
    metrics: Mapping[str, np.ndarray]


def encode(manifest: Manifest, trained: TrainedTile, rows: int, device: str, kernels: str = "") -> bytes:
    """The bytes of a shard with the first `rows` networks of a trained tile; deterministic.

    `device` and `kernels` are for the header: what trained the tile, and how its compiled kernels were checked.
    """
    import torch

    _check_tile(manifest, trained)
    header = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "spec": manifest.spec.fingerprint,
        "recipe": manifest.fingerprint,
        "tile": trained.index,
        "torch": torch.__version__,
        "device": device,
    }
    if kernels:
        header["kernels"] = kernels
    columns = manifest.spec.size
    blocks = max(1, -(-columns // _CHUNK[1]))
    # Not HDF5's own file in memory: in version 1.14 its image has a wrong checksum in the superblock.
    file = io.BytesIO()
    with new_file(file) as h5:
        for key, value in header.items():
            h5.attrs[key] = np.int64(value) if isinstance(value, int) else np.bytes_(value)
        weights = np.ascontiguousarray(trained.weights[:rows], dtype="<f4")
        chunks = (min(rows, _CHUNK[0]), max(1, -(-columns // blocks))) if columns else None
        _write(h5, "weights", weights, chunks=chunks, fillvalue=np.float32("nan"))
        _write(h5, "seed", np.asarray(trained.seeds[:rows], dtype="<u8"))
        group = h5["metrics"]
        for name in sorted(trained.metrics):
            values = np.asarray(trained.metrics[name])[:rows]
            fill = np.asarray(np.nan, values.dtype) if values.dtype.kind == "f" else None
            _write(group, name, values, fillvalue=fill)
    return file.getvalue()


def _write(group: h5py.Group, name: str, values: np.ndarray, **options: Any) -> None:
    """Write an array, now: where it lies in the file must not depend on when Python closes its handle.

    HDF5 gives chunks their places when the array is closed. A thread that looks at stack frames, such as the profiler
    of a Dask worker, keeps handles for longer.
    """
    group.create_dataset(name, data=values, track_times=False, **options).id.flush()


def expected_bytes(manifest: Manifest) -> int:
    """About how many bytes the shards of a whole population take; HDF5 pads its chunks."""
    columns, epochs = manifest.spec.size, manifest.recipe.training.epochs
    blocks = max(1, -(-columns // _CHUNK[1]))
    padded = blocks * -(-columns // blocks)

    def shard(rows: int) -> int:
        stored = -(-rows // _CHUNK[0]) * _CHUNK[0] if rows > _CHUNK[0] else rows
        return 4 * stored * padded + rows * (_NETWORK_BYTES + epochs * _EPOCH_BYTES) + _FILE_BYTES

    return (manifest.tiles - 1) * shard(manifest.tile) + shard(manifest.rows(manifest.tiles - 1))


def new_file(file: BinaryIO, user_block: int = 0) -> h5py.File:
    """An HDF5 file with a group `/metrics` that is written to a Python file, after `user_block` bytes for other use.

    Nothing in it has a time stamp, so that the same content gives the same bytes; h5py before 3.16 has no option for
    this.
    """
    access, creation = (h5py.h5p.create(kind) for kind in (h5py.h5p.FILE_ACCESS, h5py.h5p.FILE_CREATE))
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
    creation.set_obj_track_times(False)
    creation.set_userblock(user_block)
    h5 = h5py.File(h5py.h5f.create(b"python", h5py.h5f.ACC_TRUNC, fcpl=creation, fapl=access))
    properties = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    properties.set_obj_track_times(False)
    h5py.h5g.create(h5.id, b"metrics", gcpl=properties)
    return h5


def header_text(h5: h5py.File, name: str) -> str:
    """A text attribute of a shard."""
    return _text(h5.attrs[name])


def _text(value: Any) -> str:
    return bytes(value).rstrip(b"\0").decode("ascii", errors="replace")


def _check_tile(manifest: Manifest, trained: TrainedTile) -> None:
    size, first = manifest.tile, trained.index * manifest.tile
    if trained.weights.shape != (size, manifest.spec.size) or trained.weights.dtype != np.float32:
        raise ValueError(
            f"tile {trained.index}: expected weights {(size, manifest.spec.size)} float32 from the trainer, found "
            f"{trained.weights.shape} {trained.weights.dtype}"
        )
    if not np.array_equal(trained.seeds, seeds_of(manifest, first, size)):
        raise ValueError(f"tile {trained.index}: expected the seeds of networks {first} and following from the trainer")
    for name, values in trained.metrics.items():
        if np.ndim(values) not in (1, 2) or len(values) != size or np.asarray(values).dtype.kind not in "fiub":
            raise ValueError(f"tile {trained.index}: metric {name}: expected a (T,) or (T, E) array of numbers")
    if "diverged" not in trained.metrics or np.asarray(trained.metrics["diverged"]).dtype != bool:
        raise ValueError(f"tile {trained.index}: expected a boolean metric `diverged` from the trainer")


def seeds_of(manifest: Manifest, first: int, count: int) -> np.ndarray:
    """The seeds of the initial weights of networks `first` and following."""
    root = manifest.recipe.population.seed
    return np.array([torch_seed(root, k, Purpose.INIT) for k in range(first, first + count)], dtype=np.uint64)


def check_structure(h5: h5py.File, file: Path, manifest: Manifest, tile: int, least: int) -> None:
    """Compare the file with recipe and spec before any array is read.

    It may have more networks than the population, up to a whole tile, or fewer, down to `least`: another process may
    be growing the population, or its growth was interrupted.
    """
    _check_header(h5, file, manifest, tile)
    expected, found = {"weights", "seed", "metrics"}, _members(h5py.h5g.open(h5.id, b"/"), file)
    if found != expected:
        raise foreign(file, ", ".join(sorted(expected)), ", ".join(sorted(found)))
    full, columns = manifest.rows(tile), manifest.spec.size
    weights = _dataset(h5.id, "weights", file)
    rows = weights.shape[0] if weights.rank else -1
    if weights.shape != (rows, columns) or not least <= rows <= manifest.tile:
        raise foreign(file, f"weights {(full, columns)}", f"{weights.shape}")
    _check_dataset(weights, "weights", file, (rows, columns), "f4")
    seeds = _dataset(h5.id, "seed", file)
    _check_dataset(seeds, "seed", file, (rows,), "u8")
    metrics = h5py.h5o.open(h5.id, b"metrics")
    if not isinstance(metrics, h5py.h5g.GroupID):
        raise foreign(file, "a group /metrics", "something else")
    names = _members(metrics, file)
    for name in names:
        values = _dataset(metrics, name, file)
        epochs: tuple[int, ...] = tuple(values.shape[1:]) if values.rank == 2 else ()
        if any(e > manifest.recipe.training.epochs for e in epochs):
            raise foreign(file, f"at most {manifest.recipe.training.epochs} epochs in /metrics/{name}", str(epochs[0]))
        _check_dataset(values, f"metrics/{name}", file, (rows, *epochs), "?" if name == "diverged" else None)
    if "diverged" not in names:
        raise foreign(file, "/metrics/diverged", "none")
    _check_seeds(seeds, file, manifest, tile)


def _check_header(h5: h5py.File, file: Path, manifest: Manifest, tile: int) -> None:
    def value(name: str, kind: str) -> np.ndarray | None:
        """A scalar attribute, or None if it is missing, of another kind or too long."""
        if not h5py.h5a.exists(h5.id, name.encode()):
            return None
        attribute = h5py.h5a.open(h5.id, name.encode())
        dtype = attribute.dtype
        if attribute.shape != () or dtype.kind != kind or dtype.itemsize > _LONGEST_TEXT:
            return None
        out = np.empty((), dtype)
        attribute.read(out)
        return out

    def text(name: str) -> str:
        found = value(name, "S")
        return "nothing" if found is None else _text(found)

    def number(name: str) -> int | None:
        found = value(name, "i")
        return None if found is None else int(found)

    for what, expected, found in (
        ("the format", _FORMAT, text("format")),
        ("schema version", _SCHEMA, number("schema")),
        ("tile", tile, number("tile")),
        ("a network with spec", manifest.spec.fingerprint, text("spec")),
        ("a recipe with fingerprint", manifest.fingerprint, text("recipe")),
    ):
        if what == "schema version" and isinstance(found, int) and found > _SCHEMA:
            raise DataError(
                f"{file}: expected {what} {expected}, found {found}; a newer version of weightscope wrote it: upgrade "
                "(`pip install --upgrade weightscope-toolkit`)"
            )
        if expected != found:
            raise foreign(file, f"{what} {expected}", shortened(str(found)))


def _check_seeds(seeds: h5py.h5d.DatasetID, file: Path, manifest: Manifest, tile: int) -> None:
    """Compare the first and the last seed; the hash covers the others."""
    found = np.empty(seeds.shape, np.uint64)
    seeds.read(h5py.h5s.ALL, h5py.h5s.ALL, found)
    first, last = tile * manifest.tile, tile * manifest.tile + len(found) - 1
    if found[[0, -1]].tolist() != [int(seeds_of(manifest, k, 1)[0]) for k in (first, last)]:
        raise foreign(file, f"the seeds of networks {first} and following", "others")


def _members(group: h5py.h5g.GroupID, file: Path) -> set[str]:
    """The names in a group; refuses links to other files."""
    found = []
    # Does not follow links.
    group.links.iterate(lambda name, link: found.append((name.decode(errors="replace"), link.type)), info=True)
    for name, kind in found:
        if kind != h5py.h5l.TYPE_HARD:
            raise foreign(file, f"`{name}` inside the file", "a link to another place")
    return {name for name, _ in found}


def _dataset(parent: h5py.h5g.GroupID, name: str, file: Path) -> h5py.h5d.DatasetID:
    found = h5py.h5o.open(parent, name.encode())
    if not isinstance(found, h5py.h5d.DatasetID):
        raise foreign(file, f"an array `{name}`", "something else")
    return found


def _check_dataset(
    values: h5py.h5d.DatasetID, name: str, file: Path, shape: tuple[int, ...], dtype: str | None
) -> None:
    found = values.dtype
    if values.shape != shape:
        raise foreign(file, f"/{name} of shape {shape}", f"{values.shape}")
    if found != np.dtype(dtype) if dtype else found.kind not in "fiub":
        raise foreign(file, f"/{name} of {dtype or 'numbers'}", f"{found}")
    properties = values.get_create_plist()
    virtual = properties.get_layout() == h5py.h5d.VIRTUAL
    if virtual or properties.get_external_count() or properties.get_nfilters():
        raise foreign(file, f"/{name} stored plainly in the file", "external, virtual or filtered storage")
    # Missing data would be read as the fill value.
    stored, needed = values.get_storage_size(), math.prod(shape) * found.itemsize
    if stored < needed:
        raise foreign(file, f"/{name} stored in full", f"{stored} bytes")


def foreign(file: Path, expected: str, found: str) -> DataError:
    """The error about an undamaged shard that belongs to another population."""
    return DataError(
        f"{file}: a foreign shard, expected {expected}, found {found}; move it to the population that it belongs to "
        f"and {AGAIN}"
    )
