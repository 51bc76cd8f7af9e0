"""Shards on disk: their paths, hashes, writing and opening.

    shards/00003.h5          see `shard_format.py`
    shards/00003.h5.sha256   one line in the format of `sha256sum`

The hash is written first; the rename of the shard completes its tile. While a shard is replaced by a longer one, both
hashes are listed, so that at every moment the pair on disk is valid or the shard is absent. The bytes of a shard depend
on recipe, tile, torch version, HDF5 version, device and kernels only.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import h5py

from weightscope._util import atomic
from weightscope._util.sources import open_regular
from weightscope.errors import DataError, WeightscopeError
from weightscope.population.manifest import SHARDS, Manifest
from weightscope.population.shard_format import AGAIN, TrainedTile, check_structure, encode, foreign

_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")


class DamagedShard(DataError):
    """A shard that differs from what was written; training its tile again repairs it."""


class State(NamedTuple):
    """Whether the networks of a tile are on disk, and if not, why."""

    kind: Literal["done", "missing", "short", "damaged"]
    why: str = ""


def shard_file(path: Path, tile: int) -> Path:
    """The shard of tile `tile` in the population's folder `path`."""
    return path / SHARDS / f"{tile:05d}.h5"


def tiles_on_disk(path: Path, manifest: Manifest) -> list[int]:
    """The tiles of the population that have a shard, in ascending order.

    There may be shards beyond its end, of an unfinished growth or from before the population shrank.
    """
    try:
        names = [p.name for p in (path / SHARDS).iterdir()]
    except FileNotFoundError:
        return []
    tiles = sorted(int(name[:-3]) for name in names if re.fullmatch(r"\d{5,}\.h5", name))
    return [tile for tile in tiles if tile < manifest.tiles]


def networks_on_disk(path: Path, manifest: Manifest) -> int:
    """The number of networks of the population that have been trained."""
    rows = 0
    for tile in tiles_on_disk(path, manifest):
        if manifest.shorter_rows(tile) and state(path, manifest, tile).kind != "done":
            rows += max(manifest.shorter_rows(tile))
        else:
            rows += manifest.rows(tile)
    return rows


def complete(path: Path, manifest: Manifest) -> bool:
    """Whether every tile has an undamaged shard with all its networks."""
    if len(tiles_on_disk(path, manifest)) < manifest.tiles:
        return False
    return all(state(path, manifest, tile).kind == "done" for tile in range(manifest.tiles))


def save(path: Path, manifest: Manifest, trained: TrainedTile, device: str, kernels: str = "") -> tuple[Path, str]:
    """Write the shard of a trained tile, unless a valid one with as many networks exists.

    Returns:
        The shard's file and its sha256.

    Raises:
        WeightscopeError: if it cannot be written; no partial file is left.
        DataError: if the existing file is a valid shard of another recipe.
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
    """Whether the shard of a tile exists, is undamaged and has all its networks.

    Raises:
        DataError: if the file is a valid shard of another recipe, spec or tile.
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
    """List only the current hash of a valid shard (a replacement may have been interrupted)."""
    listed, digest = _listed(file), _digest(file)
    if listed != [digest] and digest in listed:
        _write_hashes(file, [digest])
    return digest


@contextlib.contextmanager
def opened(
    file: Path, manifest: Manifest, tile: int, *, known: tuple[int, ...] | None = None, least: int = 1
) -> Iterator[h5py.File]:
    """A shard, open for reading, after its hash and its structure were verified.

    The hash is verified first, so that HDF5 never parses a damaged file.

    Args:
        file: the shard.
        manifest: of its population.
        tile: the expected tile.
        known: the `signature` of the file when it was last verified; it is not verified again while the signature
            is the same.
        least: the number of networks that it must have.

    Raises:
        FileNotFoundError: if the file does not exist.
        DataError: if it is damaged (`DamagedShard`) or foreign.
    """
    fresh = known is None or signature(file) != known
    try:
        if fresh:
            _check_hash(file)
    except FileNotFoundError:
        raise
    except OSError as error:  # no permission, or a pipe or a device under this name
        raise DataError(f"{file}: cannot be read: {error.strerror or error}; change its permissions") from error
    try:
        # No lock: the file never changes, and a read-only or network file system may not have any.
        h5 = h5py.File(file, "r", locking=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{file}: its checksum is right, but it cannot be read as an HDF5 shard: {error}; upgrade weightscope if a "
            f"newer version wrote it, or move it out of the population and {AGAIN}"
        ) from error
    with h5:
        if fresh:
            try:
                check_structure(h5, file, manifest, tile, least)
            except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise foreign(file, "a shard of this version", f"an unreadable one ({error})") from error
        yield h5


def signature(file: Path) -> tuple[int, ...]:
    """Inode, size and modification time, which change when a file is replaced or rewritten."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_hash(file: Path) -> None:
    digest = _digest(file)
    listed = _listed(file)
    if digest not in listed:
        # It may have been replaced between the two reads.
        digest, listed = _digest(file), _listed(file)
    if not listed:
        raise DamagedShard(f"{file}: expected its sha256 in {hash_file(file).name} beside it, found none; {AGAIN}")
    if digest not in listed:
        raise DamagedShard(
            f"{file}: checksum mismatch, expected sha256 {listed[0][:16]}, found {digest[:16]} in "
            f"{file.stat().st_size} bytes; {AGAIN}"
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
