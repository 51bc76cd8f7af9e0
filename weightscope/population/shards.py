"""The format of one shard: its bytes, its checks, and how it is put in place.

    shards/00003.h5          /weights (n, D) f32, /seed (n,) u64, /metrics/NAME (n,) or (n, E)
    shards/00003.h5.sha256   one line in `sha256sum`'s format

The hash is written first, so the rename of the shard itself is what makes a tile done. When a shard is
replaced by a longer one, both hashes are listed until the new one is in place: at every moment the pair on
disk is valid, or the shard is absent. A shard's bytes depend on recipe, tile,
torch version and device only, and on the compiler where the recipe asks for compiled kernels.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import h5py
import numpy as np

from weightscope import _atomic
from weightscope.errors import DataError, WeightscopeError
from weightscope.population.manifest import SHARDS, Manifest
from weightscope.seeding import Purpose, torch_seed

AGAIN = "run `weightscope collect` again, which trains it anew"

_FORMAT = "weightscope-shard"
_SCHEMA = 1
_LIBVER = ("v110", "v110")
_CHUNK = (250, 1000)  # rows, columns: so that a few tensors are read without the rest
_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_LONGEST_TEXT = 256


class DamagedShard(DataError):
    """A shard that is not what was once written; training its tile again puts it right."""


class TrainedTile(Protocol):
    """What the trainer hands over: T networks, of which the last tile of a population keeps fewer.

    `weights` (T, D) float32, `seeds` (T,) uint64, `metrics` name -> (T,) or (T, E), `diverged` among them.
    """

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def weights(self) -> np.ndarray: ...  # noqa: D102
    @property
    def seeds(self) -> np.ndarray: ...  # noqa: D102
    @property
    def metrics(self) -> Mapping[str, np.ndarray]: ...  # noqa: D102


class State(NamedTuple):
    """Where a tile stands: its networks on disk, and why they are not all there."""

    kind: Literal["done", "missing", "short", "damaged"]
    why: str = ""


def shard_file(path: Path, tile: int) -> Path:
    """The shard of tile `tile` in the population's folder `path`."""
    return path / SHARDS / f"{tile:05d}.h5"


def tiles_on_disk(path: Path, manifest: Manifest) -> list[int]:
    """The tiles that have a shard, rising.

    Raises:
        DataError: if one lies beyond the population's end.
    """
    try:
        names = [p.name for p in (path / SHARDS).iterdir()]
    except FileNotFoundError:
        return []
    tiles = sorted(int(name[:-3]) for name in names if re.fullmatch(r"\d{5,}\.h5", name))
    if tiles and tiles[-1] >= manifest.tiles:
        raise DataError(
            f"{shard_file(path, tiles[-1])}: expected {manifest.tiles} tiles for {manifest.networks} networks, found "
            "one more; delete it, or run `weightscope collect` for as many networks as there are"
        )
    return tiles


def encode(manifest: Manifest, trained: TrainedTile, rows: int, device: str) -> bytes:
    """The bytes of a shard: the first `rows` networks of a trained tile. The same input gives the same bytes."""
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
    columns = manifest.spec.size
    blocks = max(1, -(-columns // _CHUNK[1]))
    with h5py.File("shard", "w", driver="core", backing_store=False, libver=_LIBVER) as h5:
        for key, value in header.items():
            h5.attrs[key] = np.int64(value) if isinstance(value, int) else np.bytes_(value)
        h5.create_dataset(
            "weights",
            data=np.ascontiguousarray(trained.weights[:rows], dtype="<f4"),
            chunks=(min(rows, _CHUNK[0]), max(1, -(-columns // blocks))) if columns else None,
            fillvalue=np.float32("nan"),
            track_times=False,
        )
        h5.create_dataset("seed", data=np.asarray(trained.seeds[:rows], dtype="<u8"), track_times=False)
        group = h5.create_group("metrics")
        for name in sorted(trained.metrics):
            values = np.asarray(trained.metrics[name])[:rows]
            fill = np.asarray(np.nan, values.dtype) if values.dtype.kind == "f" else None
            group.create_dataset(name, data=values, fillvalue=fill, track_times=False)
        h5.flush()
        return h5.id.get_file_image()


def save(path: Path, manifest: Manifest, trained: TrainedTile, device: str) -> tuple[Path, str]:
    """Put a trained tile in place, unless a valid shard with as many networks is there already.

    Returns:
        The shard's file and its sha256.

    Raises:
        WeightscopeError: if it cannot be written; nothing half-written is left.
        DataError: if there is a valid shard of another recipe in its place.
    """
    file = shard_file(path, trained.index)
    rows = manifest.rows(trained.index)
    there = state(path, manifest, trained.index)
    if there.kind == "done":
        return file, tidy_hash(file)
    data = encode(manifest, trained, rows, device)
    digest = hashlib.sha256(data).hexdigest()
    old = [_digest(file)] if there.kind == "short" else []
    _write_hashes(file, [digest, *old])
    try:
        _atomic.write(file, data)
    except WeightscopeError:
        if there.kind == "missing":
            _hash_file(file).unlink(missing_ok=True)
        raise
    if old:
        _write_hashes(file, [digest])
    return file, digest


def state(path: Path, manifest: Manifest, tile: int) -> State:
    """Whether the shard of a tile is there, whole, undamaged and with as many networks as it should have.

    Raises:
        DataError: if a valid shard of another recipe, spec or tile lies in its place.
    """
    file = shard_file(path, tile)
    try:
        with opened(file, manifest, tile) as h5:
            rows = h5["weights"].shape[0]
    except FileNotFoundError:
        return State("missing")
    except DamagedShard as error:
        return State("damaged", str(error))
    wanted = manifest.rows(tile)
    return State("done") if rows >= wanted else State("short", f"{file} holds {rows} of {wanted} networks")


def tidy_hash(file: Path) -> str:
    """Leave only the present hash of a valid shard beside it (a replacement may have been interrupted)."""
    listed, digest = _listed(file), _digest(file)
    if listed != [digest] and digest in listed:
        _write_hashes(file, [digest])
    return digest


@contextlib.contextmanager
def opened(file: Path, manifest: Manifest, tile: int, known: tuple[int, ...] | None = None) -> Iterator[h5py.File]:
    """A shard, open for reading, after its hash and its structure were compared.

    The hash comes first, so that HDF5 never parses a damaged file.

    Args:
        file: the shard.
        manifest: of its population.
        tile: the tile that it must hold.
        known: the `signature` of the file when it was last found right; nothing is compared again while the
            file has it.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: if it is damaged (`DamagedShard`) or foreign.
    """
    fresh = known is None or signature(file) != known
    try:
        if fresh:
            _check_hash(file)
    except PermissionError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; give permission") from error
    try:
        # No lock: the file never changes, and a read-only or network file system may not have any.
        h5 = h5py.File(file, "r", locking=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{file}: expected an HDF5 shard, found another file: {error}; delete it and {AGAIN}"
        ) from error
    with h5:
        if fresh:
            try:
                _check_structure(h5, file, manifest, tile)
            except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise _foreign(file, "a shard of this version", f"an unreadable one ({error})") from error
        yield h5


def signature(file: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or rewritten: inode, size, time."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


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
    if not np.array_equal(trained.seeds, _seeds(manifest, first, size)):
        raise ValueError(f"tile {trained.index}: the trainer's seeds are not those of networks {first} and following")
    for name, values in trained.metrics.items():
        if np.ndim(values) not in (1, 2) or len(values) != size or np.asarray(values).dtype.kind not in "fiub":
            raise ValueError(f"tile {trained.index}: metric {name} is no (T,) or (T, E) array of numbers")
    if "diverged" not in trained.metrics or np.asarray(trained.metrics["diverged"]).dtype != bool:
        raise ValueError(f"tile {trained.index}: the trainer must say which networks diverged, as booleans")


def _seeds(manifest: Manifest, first: int, count: int) -> np.ndarray:
    root = manifest.recipe.population.seed
    return np.array([torch_seed(root, k, Purpose.INIT) for k in range(first, first + count)], dtype=np.uint64)


def _check_structure(h5: h5py.File, file: Path, manifest: Manifest, tile: int) -> None:
    """Compare everything with recipe and spec before any array is read."""
    _check_header(h5, file, manifest, tile)
    expected, found = {"weights", "seed", "metrics"}, _members(h5py.h5g.open(h5.id, b"/"), file)
    if found != expected:
        raise _foreign(file, ", ".join(sorted(expected)), ", ".join(sorted(found)))
    full, columns = manifest.rows(tile), manifest.spec.size
    weights = _dataset(h5.id, "weights", file)
    allowed = manifest.shorter_rows(tile) | {full}
    rows = weights.shape[0] if weights.rank else -1
    # A shard longer than this reader's manifest asks for: the population grew since the manifest was read.
    if weights.shape != (rows, columns) or not (rows in allowed or full < rows <= manifest.tile):
        raise _foreign(file, f"weights {(full, columns)}", f"{weights.shape}")
    _check_dataset(weights, "weights", file, (rows, columns), "f4")
    seeds = _dataset(h5.id, "seed", file)
    _check_dataset(seeds, "seed", file, (rows,), "u8")
    metrics = h5py.h5o.open(h5.id, b"metrics")
    if not isinstance(metrics, h5py.h5g.GroupID):
        raise _foreign(file, "a group /metrics", "something else")
    names = _members(metrics, file)
    for name in names:
        values = _dataset(metrics, name, file)
        epochs = values.shape[1:] if values.rank == 2 else ()
        if any(e > manifest.recipe.training.epochs for e in epochs):
            raise _foreign(file, f"at most {manifest.recipe.training.epochs} epochs in /metrics/{name}", str(epochs[0]))
        _check_dataset(values, f"metrics/{name}", file, (rows, *epochs), "?" if name == "diverged" else None)
    if "diverged" not in names:
        raise _foreign(file, "/metrics/diverged", "none")
    _check_seeds(seeds, file, manifest, tile)


def _check_header(h5: h5py.File, file: Path, manifest: Manifest, tile: int) -> None:
    def value(name: str, kind: str) -> np.ndarray | None:
        """A scalar attribute, unless it is missing, of another kind, or longer than any that was written."""
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
        if expected != found:
            raise _foreign(file, f"{what} {expected}", f"{found}")


def _check_seeds(seeds: h5py.h5d.DatasetID, file: Path, manifest: Manifest, tile: int) -> None:
    """Compare the first and the last: the hash speaks for those between."""
    found = np.empty(seeds.shape, np.uint64)
    seeds.read(h5py.h5s.ALL, h5py.h5s.ALL, found)
    first, last = tile * manifest.tile, tile * manifest.tile + len(found) - 1
    if found[[0, -1]].tolist() != [int(_seeds(manifest, k, 1)[0]) for k in (first, last)]:
        raise _foreign(file, f"the seeds of networks {first} and following", "others")


def _members(group: h5py.h5g.GroupID, file: Path) -> set[str]:
    """The names in a group, every one of them inside the file."""
    found = []
    # Looks at links without following them.
    group.links.iterate(lambda name, link: found.append((name.decode(errors="replace"), link.type)), info=True)
    for name, kind in found:
        if kind != h5py.h5l.TYPE_HARD:
            raise _foreign(file, f"`{name}` inside the file", "a link that leads elsewhere")
    return {name for name, _ in found}


def _dataset(parent: h5py.h5g.GroupID, name: str, file: Path) -> h5py.h5d.DatasetID:
    found = h5py.h5o.open(parent, name.encode())
    if not isinstance(found, h5py.h5d.DatasetID):
        raise _foreign(file, f"an array `{name}`", "something else")
    return found


def _check_dataset(
    values: h5py.h5d.DatasetID, name: str, file: Path, shape: tuple[int, ...], dtype: str | None
) -> None:
    found = values.dtype
    if values.shape != shape:
        raise _foreign(file, f"/{name} of shape {shape}", f"{values.shape}")
    if found != np.dtype(dtype) if dtype else found.kind not in "fiub":
        raise _foreign(file, f"/{name} of {dtype or 'numbers'}", f"{found}")
    properties = values.get_create_plist()
    virtual = properties.get_layout() == h5py.h5d.VIRTUAL
    if virtual or properties.get_external_count() or properties.get_nfilters():
        raise _foreign(file, f"/{name} stored plainly in the file", "external, virtual or filtered storage")
    # What was never written would read as the fill value.
    stored, needed = values.get_storage_size(), math.prod(shape) * found.itemsize
    if stored < needed:
        raise _foreign(file, f"/{name} stored in full", f"{stored} bytes")


def _foreign(file: Path, expected: str, found: str) -> DataError:
    return DataError(
        f"{file}: a foreign shard, expected {expected}, found {found}; delete it (or put it back where it belongs) "
        f"and {AGAIN}"
    )


def _check_hash(file: Path) -> None:
    digest = _digest(file)
    listed = _listed(file)
    if digest not in listed:
        # It may have been replaced between the two readings.
        digest, listed = _digest(file), _listed(file)
    if not listed:
        raise DamagedShard(f"{file}: expected its sha256 in {_hash_file(file).name} beside it, found none; {AGAIN}")
    if digest not in listed:
        raise DamagedShard(
            f"{file}: damaged, expected sha256 {listed[0][:16]}, found {digest[:16]} in {file.stat().st_size} bytes; "
            f"{AGAIN}"
        )


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_file(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _listed(file: Path) -> list[str]:
    try:
        with open(_hash_file(file), encoding="ascii", errors="replace") as stream:
            lines = stream.read(1024).splitlines()
    except FileNotFoundError:
        return []
    found = [_LINE.fullmatch(line) for line in lines]
    return [m[1] for m in found if m and m[2] == file.name]


def _write_hashes(file: Path, digests: list[str]) -> None:
    unique = dict.fromkeys(digests)
    _atomic.write(_hash_file(file), "".join(f"{d}  {file.name}\n" for d in unique).encode())
