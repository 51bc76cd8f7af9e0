"""Shards on disk: encoding a trained tile as an HDF5 file, hashes, writing and opening.

    shards/00003.h5          /weights (n, D) f32, /seed (n,) u64, /metrics/NAME (n,) or (n, E);
                             /snapshots (n, S, D) f32, if the manifest has S > 0 snapshots;
                             /digest (n, 1 + S, 32) u8, of imported networks, which have no seed (0);
                             /hits (n, ceil(m / 8)) u8, of m test images, for images
    shards/00003.h5.sha256   one line in the format of `sha256sum`

The hash is written first; the rename of the shard completes its tile. While a shard is replaced by a longer one, both
hashes are listed, so that at every moment the pair on disk is valid or the shard is absent. The bytes of a shard depend
on recipe, tile, torch version, HDF5 version, device and kernels only.

    shards.npz               what shards hold beside weights, of a population of many; see `contents`
"""

import contextlib
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import h5py
import numpy as np

from weightscope._util import atomic, npz
from weightscope._util.names import shortened
from weightscope._util.remote import RemotePath
from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.sources import open_regular
from weightscope.errors import DataError, WeightscopeError
from weightscope.population.manifest import SHARDS, Manifest

AGAIN = "run `weightscope collect` or `import` again, as before, to restore it"

INDEX, SEED = "shards.npz", "/seed"
_INDEXED = 256  # shards that are read anew before their contents are kept
_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_FORMAT = "weightscope-shard"
_SCHEMA = 1
_FLAGS = 11  # the byte of a superblock of version 3 that is not zero while the file is open for writing
_CHUNK = (250, 1000)  # rows, columns: so that a few tensors are read without the rest
_AHEAD, _AHEAD_BYTES = 8, 2**28  # shards of an object store that are downloaded ahead, at most
_NETWORK_BYTES, _EPOCH_BYTES, _FILE_BYTES = 65, 32, 6_500  # seed and metrics; HDF5's structures, measured
# dtypes; the other arrays are numbers
_KINDS = {"weights": "f4", "snapshots": "f4", "digest": "u1", "hits": "u1", "seed": "u8", "metrics/diverged": "?"}


class DamagedShard(DataError):
    """A shard that differs from what was written; training its tile again repairs it."""


class State(NamedTuple):
    """Whether the networks of a tile are on disk, and if not, why."""

    kind: Literal["done", "missing", "short", "damaged"]
    why: str = ""


class Contents(NamedTuple):
    """What a shard of n networks holds beside weights."""

    signature: bytes  # of its file and its hash, which changes when they are replaced or written
    made: bytes  # "torch VERSION on DEVICE"
    table: np.ndarray  # (n,) with the fields `SEED` and the names of the metrics


@dataclass(frozen=True)
class TrainedTile:
    """The result of training or importing one tile: T networks, of which the last one of a population stores fewer."""

    index: int  # network k is row k mod T of tile k div T
    weights: np.ndarray | None  # (T, D) float32 in `WeightSpec` order; None if they are read by reference
    metrics: Mapping[str, np.ndarray]  # name -> (T,) or (T, E); one of them is `diverged`, booleans
    snapshots: np.ndarray | None = None  # (T, S, D) float32, the weights at the moments of `Manifest.snapshots`
    digest: np.ndarray | None = None  # (T, 1 + S, 32) uint8, of imported networks and their snapshots
    hits: np.ndarray | None = None  # (T, m) booleans: which test images the network classifies rightly


def shard_file(path: Path, tile: int) -> Path:
    """The shard of tile `tile` in the population's folder `path`."""
    return path / SHARDS / f"{tile:05d}.h5"


def tiles_on_disk(path: Path, manifest: Manifest) -> list[int]:
    """The tiles of the population that have a shard, in ascending order.

    There may be shards beyond its end, of an unfinished growth or from before the population shrank.
    """
    try:
        folder = path / SHARDS
        names = [p.name for p in folder.iterdir()] if isinstance(path, RemotePath) else os.listdir(folder)
    except FileNotFoundError:
        return []
    tiles = sorted(int(name[:-3]) for name in names if re.fullmatch(r"\d{5,}\.h5", name))
    return [tile for tile in tiles if tile < manifest.tiles]


def bytes_on_disk(path: Path) -> int:
    """Of all files of a population."""
    if isinstance(path, RemotePath):
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(path) for name in names)


def ahead(path: Path, manifest: Manifest, tiles: Iterable[int]) -> Iterator[int]:
    """The tiles; their shards in an object store are downloaded before the loop's body opens them."""
    tiles = list(tiles)
    if not isinstance(path, RemotePath):
        yield from tiles
        return
    files = [file for tile in tiles for file in (shard_file(path, tile), hash_file(shard_file(path, tile)))]
    size = 4 * manifest.tile * manifest.spec.size * (1 + len(manifest.snapshots))
    window = max(1, min(_AHEAD, _AHEAD_BYTES // max(1, size)))
    with ThreadPoolExecutor(2 * window) as pool:
        try:
            for at, tile in enumerate(tiles):
                for file in files[2 * at : 2 * (at + window)]:
                    file.fetch(pool)
                yield tile
                RemotePath.forget(files[2 * at : 2 * at + 2])
        finally:
            RemotePath.forget(files)


def networks_on_disk(path: Path, manifest: Manifest) -> int:
    """The number of networks of the population that have been trained."""
    rows = 0
    for tile in tiles_on_disk(path, manifest):
        shorter = manifest.shorter_rows(tile)
        rows += max(shorter) if shorter and state(path, manifest, tile).kind != "done" else manifest.rows(tile)
    return rows


def tiles_done(path: Path, manifest: Manifest) -> int:
    """The number of tiles whose shard is undamaged and has all its networks."""
    return sum(state.kind == "done" for state in states(path, manifest).values())


def save(path: Path, manifest: Manifest, trained: TrainedTile, device: str, kernels: str = "") -> tuple[Path, str]:
    """Write the shard of a trained tile, unless a valid one with as many networks exists; its file and its sha256.

    DataError if the existing file is a valid shard of another recipe.
    """
    file = shard_file(path, trained.index)
    rows = manifest.rows(trained.index)
    there = state(path, manifest, trained.index)
    if there.kind == "done":
        return file, tidy_hash(file)
    data = encode(manifest, trained, rows, device, kernels)
    digest = hashlib.sha256(data).hexdigest()
    old = [_digest(file)] if there.kind == "short" else []
    _write_hashes(file, [digest, *old])
    try:
        atomic.write(file, data)
    except WeightscopeError:
        if there.kind == "missing":
            hash_file(file).unlink(missing_ok=True)
        raise
    if old:
        _write_hashes(file, [digest])
    return file, digest


def state(path: Path, manifest: Manifest, tile: int) -> State:
    """Whether the shard of a tile exists, is undamaged and has all its networks; DataError if it is foreign."""
    file = shard_file(path, tile)
    try:
        with open_shard(file, manifest, tile) as h5:
            rows = h5["seed"].shape[0]
    except FileNotFoundError:
        return State("missing")
    except DamagedShard as error:
        return State("damaged", str(error))
    wanted = manifest.rows(tile)
    return State("done") if rows >= wanted else State("short", f"{file} holds {rows} of {wanted} networks")


def states(path: Path, manifest: Manifest) -> dict[int, State]:
    """As `state`, of all tiles that have a shard; those that `contents` knows are not read."""
    rows, damaged = {tile: manifest.rows(tile) for tile in tiles_on_disk(path, manifest)}, dict[int, State]()
    found = contents(path, manifest, rows, lambda i: open_shard(shard_file(path, i), manifest, i), damaged)
    return damaged | {i: State("done" if len(each.table) >= rows[i] else "short") for i, each in found.items()}


def contents(
    path: Path,
    manifest: Manifest,
    least: Mapping[int, int],
    opened: Callable[[int], contextlib.AbstractContextManager[h5py.File]],
    damaged: dict[int, State] | None = None,
) -> dict[int, Contents]:
    """Tile -> what its shard holds beside weights, of the tiles in `least`, with at least so many networks.

    Shards are opened and hashed if inode, size or modification time of them or their hash differs from `shards.npz`,
    which is renewed if they are many. Reading a damaged one anywhere removes it. A damaged shard is raised, or put
    into `damaged`.
    """
    if not least:  # there may be no folder
        return {}
    known, listed = _read_index(path, manifest), signatures(path)
    known = {tile: each for tile, each in known.items() if each.signature == listed.get(tile)}
    found = {tile: known[tile] for tile, rows in least.items() if tile in known and len(known[tile].table) >= rows}
    fresh = [tile for tile in least if tile not in found]
    try:
        for tile in ahead(path, manifest, fresh):
            try:
                with opened(tile) as h5:
                    found[tile] = _read_contents(h5, listed.get(tile, b""))
            except DamagedShard as error:
                if damaged is None:
                    raise
                damaged[tile] = State("damaged", str(error))
            except FileNotFoundError:  # removed meanwhile
                continue
    finally:  # if it is interrupted, too: of a million networks it takes minutes
        if len(fresh) >= _INDEXED and found:
            _write_index(path, manifest, known | found)
    return {tile: found[tile] for tile in least if tile in found}


def _read_contents(h5: h5py.File, signature: bytes) -> Contents:
    made = f"torch {header_text(h5, 'torch')} on {header_text(h5, 'device')}"
    columns = {SEED: h5["seed"][:]} | {name: values[:] for name, values in h5["metrics"].items()}
    table = np.empty(len(columns[SEED]), [(name, values.dtype, values.shape[1:]) for name, values in columns.items()])
    for name, values in columns.items():
        table[name] = values
    return Contents(signature, made.encode(), table)


def signatures(path: Path) -> dict[int, bytes]:
    """Inode (in a store, tag), size and modification time of the shards that have a hash, and of this."""
    folder, found = path / SHARDS, dict[str, str]()
    for entry in folder.glob("*.h5*") if isinstance(folder, RemotePath) else os.scandir(folder):
        with contextlib.suppress(OSError):  # removed meanwhile
            about = entry.stat()
            found[entry.name] = f"{about.st_ino} {about.st_size} {about.st_mtime_ns}"
    names = (name for name in found if re.fullmatch(r"\d{5,}\.h5", name) and f"{name}.sha256" in found)
    return {int(name[:-3]): f"{found[name]} {found[f'{name}.sha256']}".encode() for name in names}


def _write_index(path: Path, manifest: Manifest, found: Mapping[int, Contents]) -> None:
    signatures, made, tables = zip(*found.values(), strict=True)
    if len({table.dtype for table in tables}) == 1:
        rows = {"tile": [*found], "rows": [*map(len, tables)], "signature": signatures, "made": made}
        columns: dict[str, Any] = rows | {"table": np.concatenate(tables), "recipe": manifest.fingerprint.encode()}
        np.savez(stream := io.BytesIO(), **columns)
        with contextlib.suppress(WeightscopeError):  # where nothing may be written, all are read each time
            atomic.write(path / INDEX, stream.getvalue())


def _read_index(path: Path, manifest: Manifest) -> dict[int, Contents]:
    """What `_write_index` wrote for this recipe; nothing if it is not there or damaged."""
    try:
        with open_regular(path / INDEX) as stream, zipfile.ZipFile(stream) as archive:
            entries = {entry.filename: npz.stored(archive, entry, INDEX) for entry in archive.infolist()}
            found = {name: npz.values(archive, entry) for name, entry in entries.items()}
        if found["recipe.npy"].item() != manifest.fingerprint.encode():
            return {}
        table, rows = found["table.npy"], found["rows.npy"]
        kinds = table.dtype[SEED], table.dtype["diverged"]
        if rows.min() < 1 or rows.max() > manifest.tile or rows.sum() != len(table) or kinds != ("u8", "?"):
            return {}
        tables = np.split(table, rows.cumsum()[:-1])
        tiles, signatures, made = (found[f"{name}.npy"].tolist() for name in ("tile", "signature", "made"))
        return dict(zip(tiles, map(Contents, signatures, made, tables), strict=True))
    except (DataError, OSError, ValueError, LookupError, TypeError, RuntimeError, zipfile.BadZipFile):
        return {}


def tidy_hash(file: Path) -> str:
    """List only the current hash of a valid shard (a replacement may have been interrupted)."""
    listed = _listed(file)
    if len(listed) == 1:
        return listed[0]
    if (digest := _digest(file)) in listed:
        _write_hashes(file, [digest])
    return digest


@contextlib.contextmanager
def open_shard(
    file: Path, manifest: Manifest, tile: int, *, verified: dict[int, Any] | None = None, least: int = 1
) -> Iterator[h5py.File]:
    """A shard with at least `least` networks; DataError if it is damaged or foreign.

    First its hash, which keeps HDF5 from parsing a damaged file, and then its structure are verified, unless `verified`
    has inode, size and modification time of the tile's file; they are put there. What is verified is what is read: one
    open file, which HDF5 reads through Python, so that it does not mind who else has opened it. Of an object store,
    `verified` keeps the bytes of the shard that was read last.
    """
    with contextlib.ExitStack() as stack:
        known = None if verified is None else verified.get(tile)
        try:
            stream = known if isinstance(known, io.BytesIO) else _opened(file, stack)
            if fresh := known is None or known != _signature(stream):
                try:
                    _check_hash(stream, file)
                except DamagedShard:  # or replaced before its hash was read
                    stream = _opened(file, stack)
                    _check_hash(stream, file)
            h5 = stack.enter_context(h5py.File(stream, "r"))
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno is not None:  # no permission, or a pipe or a device under this name
                raise DataError(f"{file}: cannot be read: {error.strerror or error}; change its permissions") from error
            raise DataError(
                f"{file}: its checksum is right, but it cannot be read as an HDF5 shard: {error}; upgrade weightscope "
                f"if a newer version wrote it, or move it out of the population and {AGAIN}"
            ) from error
        if fresh:
            try:
                _check_structure(h5, file, manifest, tile, least)
            except (KeyError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                raise _foreign(file, "a shard of this version", f"an unreadable one ({error})") from error
        if verified is not None:
            if isinstance(stream, io.BytesIO):
                verified.clear()
            verified[tile] = _signature(stream)
        yield h5


def _opened(file: Path, stack: contextlib.ExitStack) -> io.BufferedIOBase:
    """A file that is closed with the stack, or the bytes of an object, which `verified` may keep."""
    stream = open_regular(file)
    return stream if isinstance(stream, io.BytesIO) else stack.enter_context(stream)


def _signature(stream: io.BufferedIOBase) -> Any:
    """Inode, size and modification time, which change when a file is replaced; of an object in a store itself."""
    if isinstance(stream, io.BytesIO):
        return stream
    found = os.fstat(stream.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_hash(stream: io.BufferedIOBase, file: Path) -> None:
    digest, listed = hashlib.file_digest(stream, "sha256").hexdigest(), _listed(file)
    if digest not in listed:  # the index may say otherwise, or of other shards
        with contextlib.suppress(OSError, DataError):
            (file.parent.parent / INDEX).unlink(missing_ok=True)
    if not listed:
        raise DamagedShard(f"{file}: expected its sha256 in {hash_file(file).name} beside it, found none; {AGAIN}")
    if digest not in listed:
        stream.seek(_FLAGS)
        why = " (HDF5 marks it as open for writing: close it where it is open)" if stream.read(1) not in b"\0" else ""
        raise DamagedShard(
            f"{file}: checksum mismatch{why}, expected sha256 {listed[0][:16]}, found {digest[:16]} in "
            f"{stream.seek(0, os.SEEK_END)} bytes; {AGAIN}"
        )


def _digest(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_file(file: Path) -> Path:
    """The file beside a shard that holds its SHA-256."""
    return file.with_name(file.name + ".sha256")


def _listed(file: Path) -> list[str]:
    try:
        with open_regular(hash_file(file)) as stream:
            lines = stream.read(1024).decode("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = [_LINE.fullmatch(line) for line in lines]
    return [m[1] for m in found if m and m[2] == file.name]


def _write_hashes(file: Path, digests: list[str]) -> None:
    unique = dict.fromkeys(digests)
    atomic.write(hash_file(file), "".join(f"{d}  {file.name}\n" for d in unique).encode())


def encode(manifest: Manifest, trained: TrainedTile, rows: int, device: str, kernels: str = "") -> bytes:
    """The bytes of a shard with the first `rows` networks of a trained tile; deterministic.

    `device` and `kernels` are for the header: what trained the tile, and how its compiled kernels were checked.
    """
    import torch

    found = {"weights": trained.weights, "snapshots": trained.snapshots, "digest": trained.digest}
    matrices = {name: values for name, values in found.items() if values is not None}
    shapes = {name: (manifest.tile, *shape) for name, shape in _shapes(manifest).items()}
    fits = {name: values.shape for name, values in matrices.items() if values.dtype == _KINDS[name]} == shapes
    if not fits:
        wanted = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"tile {trained.index}: expected {wanted} from the trainer")
    header = _header(manifest, trained.index) | {"torch": torch.__version__, "device": device}
    if kernels:
        header["kernels"] = kernels
    columns = manifest.spec.size
    blocks = max(1, -(-columns // _CHUNK[1]))
    # Not HDF5's own file in memory: in version 1.14 its image has a wrong checksum in the superblock.
    file = io.BytesIO()
    with new_file(file) as h5:
        for key, value in header.items():
            h5.attrs[key] = np.int64(value) if isinstance(value, int) else np.bytes_(value)
        for name, values in matrices.items():  # one moment is read without the others
            options: dict[str, Any] = {}
            if columns and name != "digest":
                ones = (1,) * (values.ndim - 2)
                options = {"chunks": (min(rows, _CHUNK[0]), *ones, max(1, -(-columns // blocks)))}
                options["fillvalue"] = np.float32("nan")
            _write(h5, name, np.ascontiguousarray(values[:rows]), **options)
        _write(h5, "seed", _seeds(manifest, trained.index * manifest.tile, rows))
        if trained.hits is not None:
            _write(h5, "hits", np.packbits(trained.hits[:rows], axis=1))
            h5["hits"].attrs["images"] = np.int64(trained.hits.shape[1])
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
        return (
            4 * stored * padded * (1 + len(manifest.snapshots))
            + rows * (_NETWORK_BYTES + epochs * _EPOCH_BYTES)
            + _FILE_BYTES
        )

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


def hits_in(h5: h5py.File, rows: int) -> np.ndarray | None:
    """Which of the m test images the first networks of a shard classify rightly, (rows, m) bool; None if not stored."""
    if "hits" not in h5:
        return None
    return np.unpackbits(h5["hits"][:rows], axis=1, count=int(h5["hits"].attrs["images"])).astype(bool)


def header_text(h5: h5py.File, name: str) -> str:
    """A text attribute of a shard."""
    return bytes(h5.attrs[name]).rstrip(b"\0").decode("ascii", errors="replace")


def _seeds(manifest: Manifest, first: int, count: int) -> np.ndarray:
    """The seeds of the initial weights of networks `first` and following."""
    if manifest.imported:
        return np.zeros(count, dtype="<u8")
    root = manifest.recipe.population.seed
    return np.array([torch_seed(root, k, Purpose.INIT) for k in range(first, first + count)], dtype="<u8")


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shapes of one network's rows of the arrays that are no metrics, without the seed."""
    size, moments, imported = manifest.spec.size, len(manifest.snapshots), manifest.imported
    shapes: dict[str, tuple[int, ...]] = {"digest": (1 + moments, 32)} if imported else {}
    if imported and imported.by_reference:
        return shapes
    return {"weights": (size,)} | ({"snapshots": (moments, size)} if moments else {}) | shapes


def _header(manifest: Manifest, tile: int) -> dict[str, Any]:
    """What the header of a shard says of the population that it belongs to."""
    fingerprints = {"spec": manifest.spec.fingerprint, "recipe": manifest.fingerprint}
    return {"format": _FORMAT, "schema": _SCHEMA} | fingerprints | {"tile": tile}


def _check_structure(h5: h5py.File, file: Path, manifest: Manifest, tile: int, least: int) -> None:
    """Compare the header with recipe and spec, and refuse what HDF5 would read from elsewhere or fill in.

    It may have more networks than the population, up to a whole tile, or fewer, down to `least`: another process may
    be growing the population, or its growth was interrupted.
    """
    for name, expected in _header(manifest, tile).items():
        what = {"format": "the format", "schema": "schema version", "spec": "a network with spec"}.get(name, name)
        what = "a recipe with fingerprint" if name == "recipe" else what
        value = h5.attrs.get(name)
        found = int(value) if isinstance(value, np.integer) else "nothing" if value is None else header_text(h5, name)
        if name == "schema" and isinstance(found, int) and found > _SCHEMA:
            raise DataError(
                f"{file}: expected {what} {expected}, found {found}; a newer version of weightscope wrote it: upgrade "
                "(`pip install --upgrade .` in a newer clone)"
            )
        if expected != found:
            raise _foreign(file, f"{what} {expected}", shortened(str(found)))
    arrays = _arrays(h5, file) | {f"metrics/{name}": v for name, v in _arrays(h5["metrics"], file).items()}
    shapes = _shapes(manifest)
    if missing := sorted({"seed", "metrics/diverged", *shapes} - arrays.keys()):
        raise _foreign(file, f"an array /{missing[0]}", "none")
    rows = (*arrays["seed"].shape, 0)[0]
    for name in sorted({"weights", "snapshots", "digest"} & arrays.keys()):
        expected, shape = shapes.get(name), arrays[name].shape
        if expected is None or shape != (rows, *expected) or not least <= rows <= manifest.tile:
            wanted = f"{name} {(manifest.rows(tile), *expected)}" if expected else f"no {name}"
            raise _foreign(file, wanted, f"{shape}")
    if (hits := arrays.get("hits")) is not None:
        expected = (rows, -(-int(hits.attrs["images"]) // 8))
        if hits.shape != expected:
            raise _foreign(file, f"hits {expected}", f"{hits.shape}")
    for name, values in arrays.items():
        kind = _KINDS.get(name)
        known = values.dtype == kind if kind else values.dtype.kind in "fiub"
        if not known or values.shape[:1] != (rows,) or (values.ndim > 2 and name not in shapes):
            raise _foreign(
                file, f"/{name} of {kind or 'numbers'} for {rows} networks", f"{values.dtype} {values.shape}"
            )


def _arrays(group: h5py.Group, file: Path) -> dict[str, h5py.Dataset]:
    """The arrays in a group, if all of it is stored in this file, plainly and in full."""
    out = {}
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise _foreign(file, f"`{name}` inside the file", "a link to another place")
        item = group[name]
        if isinstance(item, h5py.Dataset):
            stored, needed = item.id.get_storage_size(), item.size * item.dtype.itemsize
            if item.is_virtual or item.external or item.id.get_create_plist().get_nfilters() or stored < needed:
                raise _foreign(file, f"/{name} stored plainly and in full", "external, virtual or filtered storage")
            out[name] = item
    return out


def _foreign(file: Path, expected: str, found: str) -> DataError:
    """The error about an undamaged shard that belongs to another population."""
    return DataError(
        f"{file}: a foreign shard, expected {expected}, found {found}; move it to the population that it belongs to "
        f"and {AGAIN}"
    )
