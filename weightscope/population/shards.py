"""Shards on disk: encoding a trained tile as an HDF5 file, its hash, writing and opening.

    shards/00003.h5          a tile of T networks: /weights (T, D) f32, /seed (T,) u64, /metrics/NAME (T,) or (T, E);
                             /snapshots (T, S, D) f32, if the manifest has S > 0 snapshots;
                             /hits (T, ceil(m / 8)) u8, of m test images, for images
    shards/00003.h5.sha256   one line in the format of `sha256sum`

A tile is stored whole, also where the population uses only some of its networks, so no shard is ever replaced. The hash
is written first; the rename of the shard completes its tile. The bytes of a shard depend on recipe, tile, torch
version, HDF5 version, device and kernels only.
"""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from weightscope._util import atomic
from weightscope._util.names import shortened
from weightscope._util.remote import is_remote, reporting
from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.sources import read_bytes
from weightscope.errors import DataError, WeightscopeError
from weightscope.population.manifest import SHARDS, Manifest

AGAIN = "run `weightscope collect` or `import` again, as before, to restore it"

_FORMAT, _SCHEMA = "weightscope-shard", 2
_CHUNK = (250, 1000)  # rows, columns: so that a few tensors are read without the rest
_NETWORK_BYTES, _EPOCH_BYTES, _FILE_BYTES = 65, 32, 6_500  # seed and metrics; HDF5's structures, measured


class MissingShard(DataError):
    """A shard that is not there."""


class DamagedShard(DataError):
    """A shard that differs from what was written; training its tile again repairs it."""


@dataclass(frozen=True)
class TrainedTile:
    """The result of training or importing one tile of T networks; a population may use fewer of its last one."""

    index: int  # network k is row k mod T of tile k div T
    weights: np.ndarray  # (T, D) float32 in `WeightSpec` order
    metrics: Mapping[str, np.ndarray]  # name -> (T,) or (T, E); one of them is `diverged`, booleans
    snapshots: np.ndarray | None = None  # (T, S, D) float32, the weights after the epochs of `Manifest.snapshots`
    hits: np.ndarray | None = None  # (T, m) booleans: which test images the network classifies rightly
    speed: float | None = None  # images per second at evaluation; not stored, since the bytes of a shard are repeatable


def shard_file(path: Path, tile: int) -> Path:
    """The shard of tile `tile` in the population's folder `path`."""
    return path / SHARDS / f"{tile:05d}.h5"


def hash_file(file: Path) -> Path:
    """The file beside a shard that holds its SHA-256."""
    return file.with_name(file.name + ".sha256")


def tiles_on_disk(path: Path, manifest: Manifest) -> list[int]:
    """The tiles of the population that have a shard, in ascending order.

    There may be shards beyond its end, of an unfinished growth or from before the population shrank.
    """
    try:
        with reporting(path):
            names = [file.name for file in (path / SHARDS).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    tiles = sorted(int(name[:-3]) for name in names if re.fullmatch(r"\d{5,}\.h5", name))
    return [tile for tile in tiles if tile < manifest.tiles]


def networks_on_disk(path: Path, manifest: Manifest) -> int:
    """The number of networks of the population that have been trained."""
    return sum(manifest.rows(tile) for tile in tiles_on_disk(path, manifest))


def bytes_on_disk(path: Path) -> int:
    """The size of all files of a population."""
    if is_remote(path):
        return int(path.fs.du(path.path))  # type: ignore[attr-defined]
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def save(path: Path, manifest: Manifest, trained: TrainedTile, device: str, kernels: str = "") -> None:
    """Write the shard of a trained tile and its hash."""
    file, data = shard_file(path, trained.index), encode(manifest, trained, device, kernels)
    atomic.write(hash_file(file), f"{hashlib.sha256(data).hexdigest()}  {file.name}\n".encode())
    try:
        atomic.write(file, data)
    except WeightscopeError:  # a full disk
        hash_file(file).unlink(missing_ok=True)
        raise


def is_done(path: Path, manifest: Manifest, tile: int) -> bool:
    """Whether the shard of a tile exists and its hash is right; DataError if it belongs to another recipe."""
    try:
        with open_shard(path, manifest, tile):
            return True
    except (MissingShard, DamagedShard):
        return False


def tiles_done(path: Path, manifest: Manifest) -> int:
    """The number of tiles whose shard is there and undamaged."""
    return sum(is_done(path, manifest, tile) for tile in tiles_on_disk(path, manifest))


@contextlib.contextmanager
def open_shard(path: Path, manifest: Manifest, tile: int, *, verify: bool = True) -> Iterator[h5py.File]:
    """A shard, open for reading; DataError if it is missing, damaged or belongs to another recipe.

    Its SHA-256 is compared first if `verify`, and always of an object store, from which it is read as a whole.
    """
    file = shard_file(path, tile)
    try:
        if is_remote(file):
            h5 = h5py.File(io.BytesIO(downloaded(file)), "r")
        else:
            if verify:
                _check_hash(hashlib.sha256(file.read_bytes()).hexdigest(), file)
            h5 = h5py.File(h5py.h5f.open(os.fsencode(file), h5py.h5f.ACC_RDONLY, _access()))
    except FileNotFoundError:
        raise MissingShard(f"{file}: expected a shard, but the file has disappeared; {AGAIN}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}; {AGAIN}") from error
    try:
        _check_header(h5, file, manifest, tile)
        yield h5
    finally:
        h5.id.close()


@cache
def _access() -> h5py.h5p.PropFAID:
    """How shards are opened: without a lock."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, False)
    return access


@lru_cache(maxsize=1)
def downloaded(file: Path) -> bytes:
    """The bytes of a shard in an object store, after its hash was compared; those of the last one are kept."""
    data = read_bytes(file)
    _check_hash(hashlib.sha256(data).hexdigest(), file)
    return data


def _check_hash(found: str, file: Path) -> None:
    beside, expected = hash_file(file), ""
    with contextlib.suppress(FileNotFoundError):
        expected = read_bytes(beside).decode("ascii", "replace").partition(" ")[0]
    if not expected:
        raise DamagedShard(f"{file}: expected its sha256 in {beside.name} beside it, found none; {AGAIN}")
    if found != expected:
        raise DamagedShard(f"{file}: checksum mismatch, expected sha256 {expected[:16]}, found {found[:16]}; {AGAIN}")


def _check_header(h5: h5py.File, file: Path, manifest: Manifest, tile: int) -> None:
    """Raise DataError if a shard is of another recipe or network, whose fingerprint is one, or another tile."""
    for name, value in {"recipe": manifest.fingerprint, "tile": tile}.items():
        found = attribute(h5, name)
        if found != (value.encode() if isinstance(value, str) else value):
            raise DataError(
                f"{file}: a foreign shard, expected {name} {value}, found {shortened(str(found))}; move it to the "
                f"population that it belongs to and {AGAIN}"
            )


def encode(manifest: Manifest, trained: TrainedTile, device: str, kernels: str = "") -> bytes:
    """The bytes of the shard of a trained tile; deterministic.

    `device` and `kernels` are for the header: what trained the tile, and how its compiled kernels were checked.
    """
    import torch

    header = {"format": _FORMAT, "schema": _SCHEMA, "spec": manifest.spec.fingerprint, "recipe": manifest.fingerprint}
    header |= {"tile": trained.index, "torch": torch.__version__, "device": device}
    if kernels:
        header["kernels"] = kernels
    tile, columns = manifest.tile, manifest.spec.size
    blocks = max(1, -(-columns // _CHUNK[1]))
    matrices = {"weights": trained.weights}
    if trained.snapshots is not None:
        matrices["snapshots"] = trained.snapshots
    # Not HDF5's own file in memory: in version 1.14 its image has a wrong checksum in the superblock.
    file = io.BytesIO()
    with new_file(file) as h5:
        for key, value in header.items():
            h5.attrs[key] = np.int64(value) if isinstance(value, int) else np.bytes_(value)
        for name, values in matrices.items():  # one snapshot is read without the others
            options: dict[str, Any] = {}
            if columns:
                ones = (1,) * (values.ndim - 2)
                options = {"chunks": (min(tile, _CHUNK[0]), *ones, max(1, -(-columns // blocks)))}
                options["fillvalue"] = np.float32("nan")
            _write(h5, name, np.ascontiguousarray(values), **options)
        _write(h5, "seed", _seeds(manifest, trained.index))
        if trained.hits is not None:
            _write(h5, "hits", np.packbits(trained.hits, axis=1))
            h5["hits"].attrs["images"] = np.int64(trained.hits.shape[1])
        group = h5["metrics"]
        for name in sorted(trained.metrics):
            values = np.asarray(trained.metrics[name])
            fill = np.asarray(np.nan, values.dtype) if values.dtype.kind == "f" else None
            _write(group, name, values, fillvalue=fill)
    return file.getvalue()


def _seeds(manifest: Manifest, tile: int) -> np.ndarray:
    """The seeds of the initial weights of a tile's networks, shape (T,); 0 of imported networks."""
    if manifest.imported:
        return np.zeros(manifest.tile, dtype="<u8")
    root, first = manifest.recipe.population.seed, tile * manifest.tile
    return np.array([torch_seed(root, k, Purpose.INIT) for k in range(first, first + manifest.tile)], dtype="<u8")


def _write(group: h5py.Group, name: str, values: np.ndarray, **options: Any) -> None:
    """Write an array, now: where it lies in the file must not depend on when Python closes its handle.

    HDF5 gives chunks their places when the array is closed. A thread that looks at stack frames, such as the profiler
    of a Dask worker, keeps handles for longer.
    """
    group.create_dataset(name, data=values, track_times=False, **options).id.flush()


def expected_bytes(manifest: Manifest) -> int:
    """About how many bytes the shards of a whole population take; HDF5 pads its chunks."""
    tile, columns = manifest.tile, manifest.spec.size
    blocks = max(1, -(-columns // _CHUNK[1]))
    padded = blocks * -(-columns // blocks)
    stored = -(-tile // _CHUNK[0]) * _CHUNK[0] if tile > _CHUNK[0] else tile
    metrics = tile * (_NETWORK_BYTES + manifest.recipe.training.epochs * _EPOCH_BYTES)
    return manifest.tiles * (4 * stored * padded * (1 + len(manifest.snapshots)) + metrics + _FILE_BYTES)


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


def read(h5: h5py.File, name: str) -> np.ndarray:
    """A whole array, at a third of the cost of `h5[name][:]`, which counts where there are many shards."""
    dataset = h5py.h5d.open(h5.id, name.encode())
    values = np.empty(dataset.shape, dataset.dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def read_weights(h5: h5py.File, snapshot: int | None, rows: slice, runs: Sequence[slice], out: np.ndarray) -> None:
    """Read runs of columns of some networks, side by side, into (n, D'): of a snapshot, or of the end of training."""
    dataset = h5py.h5d.open(h5.id, b"weights" if snapshot is None else b"snapshots")
    there, here, start = dataset.get_space(), h5py.h5s.create_simple(out.shape), 0
    which, one = ((), ()) if snapshot is None else ((snapshot,), (1,))
    for columns in runs:
        width = columns.stop - columns.start
        there.select_hyperslab((rows.start, *which, columns.start), (len(out), *one, width))
        here.select_hyperslab((0, start), (len(out), width))
        dataset.read(here, there, out)
        start += width


def hits_in(h5: h5py.File, rows: slice) -> np.ndarray | None:
    """Which of the m test images some networks of a shard classify rightly, (rows, m) bool; None if not stored."""
    if "hits" not in h5:
        return None
    return np.unpackbits(h5["hits"][rows], axis=1, count=int(h5["hits"].attrs["images"])).astype(bool)


def attribute(h5: h5py.File, name: str) -> Any:
    """An attribute of a shard, or None."""
    if not h5py.h5a.exists(h5.id, name.encode()):
        return None
    found = h5py.h5a.open(h5.id, name.encode())
    value = np.empty(found.shape, found.dtype)
    found.read(value)
    return value[()]


def header_text(h5: h5py.File, name: str) -> str:
    """A text attribute of a shard."""
    return bytes(h5.attrs[name]).rstrip(b"\0").decode("ascii", errors="replace")
