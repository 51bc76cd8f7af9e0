"""Model files and folders, on disk or at the hub: which files hold the tensors, and at which bytes.

A safetensors file is 8 bytes (the header's length n, little endian), n bytes of JSON (name -> dtype, shape, offsets),
and the tensors. Its header is parsed here and not by `safetensors.safe_open`, which memory-maps: a
file truncated while it is open would kill the process.
"""

import hashlib
import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from weightscope._util import npz
from weightscope._util.sources import ARTIFACT_KEY, POPULATION_FILE
from weightscope.checkpoint.tensors import (
    SAFETENSORS_TYPES,
    ByteReader,
    FileCheck,
    FileTensor,
    LocalFile,
    NpzTensor,
    Store,
    StoredTensor,
    checked_shape,
    natural,
    npz_errors,
    printable,
    read_bytes,
)
from weightscope.checkpoint.torch_files import check_records, open_torch
from weightscope.errors import DataError, UsageError

CONFIG = "config.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# The order in which transformers and diffusers look, safetensors before pickles.
_STEMS = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
CANDIDATES = tuple(f"{stem}{end}" for stem in _STEMS for end in ("", ".index.json"))
_NPZ_SUFFIX = ".npz"
SUFFIXES = (".safetensors", *TORCH_SUFFIXES, _NPZ_SUFFIX)
_ZOO_FILE = "checkpoints"  # of torch.save, in the folders of Model Zoos
_MAX_JSON = 100 << 20
_MAX_VALUES = 3_000_000  # of JSON: a value takes up to 200 bytes parsed; 200,000 tensors have 2.4 million
_MOST_KEPT = 1 << 16
# Header and size of the last file -> its tensors and metadata: networks that differ in their numbers have the same.
_LAST: dict[tuple[bytes, int], tuple[list[FileTensor], dict[str, str]]] = {}
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# Bits of an entry of each data type of safetensors.
_BITS = {name: 8 * dtype.itemsize for name, dtype in SAFETENSORS_TYPES.items()}
_BITS |= {"F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Folder:
    """A folder of model files, here on disk; `where` is its name in errors, `commit` that of a model at the hub."""

    commit: str | None = None

    def __init__(self, path: Path) -> None:
        self.where, self._path = str(path), path
        self._files: list[LocalFile] = []

    def names(self) -> list[str]:
        """The plain names of its files."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def open(self, name: str) -> LocalFile:
        """Open a file."""
        self._files.append(LocalFile(self._path / name))
        return self._files[-1]

    def received(self) -> int:
        """Number of bytes read from disk so far."""
        return sum(file.bytes_read for file in self._files)

    def signature(self) -> tuple[Any, ...]:
        """What changes when one of the opened files is replaced or rewritten."""
        found = [os.fstat(file.stream.fileno()) for file in self._files]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)

    def check(self) -> list[FileCheck]:
        """Compare the opened files with the checksums that are known."""
        return [check_file(file.path.name, file.path) for file in self._files]


def check_file(name: str, path: Path) -> FileCheck:
    """Compare a file with the hash that names it in huggingface_hub's cache, or with the CRC-32 of its records."""
    real = path.resolve()
    if real.parent.name == "blobs" and _HASH.fullmatch(real.name):
        kind = "sha256" if len(real.name) == 64 else "sha1"
        with real.open("rb") as stream:
            # git's SHA-1, of small files, is that of `blob SIZE`, a zero byte and the content
            start = b"" if kind == "sha256" else b"blob %d\0" % real.stat().st_size
            digest = hashlib.new(kind, start, usedforsecurity=False)
            found = hashlib.file_digest(stream, lambda: digest).hexdigest()
        if found == real.name:
            return FileCheck(name, "verified", kind)
        why = f"checksum mismatch: expected {kind} {real.name[:16]}..., found {found[:16]}...; delete {real}"
        return FileCheck(name, "damaged", kind, f"{path}: {why}")
    try:
        file = LocalFile(path)
        if read_bytes(file, 0, min(file.size, 2)) == b"PK" and check_records(file):
            return FileCheck(name, "verified", "crc32")
    except DataError as error:
        return FileCheck(name, "damaged", "crc32", str(error))
    return FileCheck(name, "unverified", detail="no checksum of it is known")


def open_path(path: Path, key: str | None) -> Store:
    """The tensors of a file or a model folder on disk."""
    if path.is_dir():
        return open_folder(Folder(path), key)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; for a model at the hub write hf://org/name")
    if path.name != _ZOO_FILE and not path.name.endswith((".index.json", *SUFFIXES)):
        known = ", ".join(SUFFIXES[1:])
        raise UsageError(f"{path}: expected a .safetensors file, its .index.json, one of {known}, or a model folder")
    return _open(Folder(path.parent), path.name, str(path), key, (path.parent / CONFIG).is_file())


def open_folder(folder: Folder, key: str | None = None) -> Store:
    """The tensors of a model folder."""
    names, where = set(folder.names()), folder.where
    found = [name for name in CANDIDATES if name in names][:1]
    for suffixes in ((".safetensors",), TORCH_SUFFIXES, (_NPZ_SUFFIX,)):
        found = found or sorted(name for name in names if name.endswith(suffixes) and plain(name))
    if len(found) > 1:
        listed = f"{', '.join(found[:6])}; or make a population of all with `weightscope import`"
        raise DataError(f"{where}: found {len(found)} checkpoints; name one of them: {listed}")
    if not found and POPULATION_FILE in names:
        raise DataError(f"{where}: expected a model, found a population; give one of its networks: {where}::0")
    if not found:
        there = ", ".join(sorted(names)[:6]) or "no files"
        raise DataError(f"{where}: expected {CANDIDATES[0]}, {CANDIDATES[1]} or another checkpoint, found {there}")
    store = _open(folder, found[0], where, key, CONFIG in names)
    if ARTIFACT_KEY in store.metadata and folder.commit is None:
        file = Path(where, found[0])
        raise DataError(f"{where}: expected a model, found the artifact of an initialiser; give its file: {file}")
    return store


def plain(name: Any) -> bool:
    """Whether a name is that of a file in the same folder: no path, not hidden, printable."""
    return isinstance(name, str) and bool(re.fullmatch(r"[^./\\:][^/\\:]{0,254}", name)) and name.isprintable()


def _open(folder: Folder, name: str, label: str, key: str | None, has_config: bool) -> Store:
    # The configuration is checked first: it is small, and without it the tensors may be misread.
    config = _json(folder, CONFIG) if has_config else {}
    store = _open_index(folder, name, key) if name.endswith(".index.json") else _open_file(folder, name, key)
    store.label, store.config, store.files = label, config, folder
    return store


def _json(folder: Folder, name: str) -> dict[str, Any]:
    file = folder.open(name)
    if file.size > _MAX_JSON:
        raise DataError(f"{file.where}: expected at most {_MAX_JSON} bytes, found {file.size}")
    return _json_object(read_bytes(file, 0, file.size), f"{folder.where}: {name}")


def _open_file(folder: Folder, name: str, key: str | None) -> Store:
    if key is not None and not name.endswith((*TORCH_SUFFIXES, _ZOO_FILE)):
        raise UsageError(f"{folder.where}: {name}: holds one set of tensors; omit key=")
    if name.endswith(".safetensors"):
        return _open_safetensors(folder.open(name))
    file = folder.open(name)
    if name.endswith(_NPZ_SUFFIX):
        return _open_npz(file)
    return open_torch(file, key)


def _open_index(folder: Folder, name: str, key: str | None) -> Store:
    where = f"{folder.where}: {name}"
    table = _json(folder, name).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise DataError(f"{where}: expected a `weight_map` of tensor names to file names")
    suffix = (".safetensors",) if name.endswith(".safetensors.index.json") else TORCH_SUFFIXES
    for tensor, shard in table.items():
        if not plain(shard) or not shard.endswith(suffix):
            raise DataError(
                f"{where}: {ascii(tensor)[:100]} is mapped to {ascii(shard)[:100]}, "
                f"expected the plain name of a {suffix[0]} file in the same folder; nothing was opened"
            )
    shards = sorted(set(table.values()))
    stores = {shard: _open_file(folder, shard, key) for shard in shards}
    out = Store(where, {})
    for tensor, shard in table.items():
        store = stores[shard]
        if tensor in store.tensors:
            out.tensors[tensor] = store.tensors[tensor]
        elif tensor not in store.unreadable:
            raise DataError(f"{where}: {ascii(tensor)[:100]} is mapped to {shard}, which does not hold it")
    for shard, store in stores.items():
        out.unreadable |= store.unreadable
        for tensor in store.tensors:
            if table.get(tensor) != shard:
                out.unreadable.setdefault(tensor, f"in {shard}, but the index does not map it there")
        out.metadata |= store.metadata
    out.unreadable = {tensor: why for tensor, why in out.unreadable.items() if tensor not in out.tensors}
    return out


def _open_npz(file: LocalFile) -> Store:
    """The arrays of a file of `numpy.savez`."""
    store = Store(file.where, {})
    with npz_errors(file.where):
        archive = zipfile.ZipFile(file.stream)
        for entry in archive.infolist():
            name = printable(entry.filename.removesuffix(".npy"), file.where)
            store.tensors[name] = NpzTensor(
                name, archive, npz.stored(archive, entry, f"{file.where}: {entry.filename}")
            )
    return store


def _open_safetensors(file: ByteReader) -> Store:
    """The tensors of a safetensors file; its header must account for every byte, without gaps or overlaps."""
    where = file.where
    if file.size < 8:
        raise DataError(f"{where}: expected a safetensors file, found only {file.size} bytes; download it again")
    length = int.from_bytes(read_bytes(file, 0, 8), "little")
    if length > min(_MAX_JSON, file.size - 8):
        raise DataError(
            f"{where}: its header claims {length} bytes, in a file of {file.size}; "
            "it is truncated or not a safetensors file"
        )
    header = read_bytes(file, 8, 8 + length)
    if (last := _LAST.get((header, file.size))) is not None:
        found, metadata = last
        tensors = {tensor.name: tensor._replace(file=file) for tensor in found}
        return Store(where, dict[str, StoredTensor](tensors), metadata=dict(metadata))
    values = _json_object(header, f"{where}: its header")
    metadata = values.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DataError(f"{where}: expected `__metadata__` to map names to text")
    tensors = {name: _described(name, value, file, 8 + length) for name, value in values.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a gap before it"
            raise DataError(f"{where}: `{tensor.name[:200]}` {what}, at byte {tensor.start} where {end} was expected")
        end = tensor.stop
    if end != file.size:
        what = "bytes are left over at its end" if end < file.size else "bytes are missing: it is truncated"
        raise DataError(
            f"{where}: expected {end} bytes from its header, found {file.size}; {abs(file.size - end)} {what}"
        )
    _LAST.clear()
    if length <= _MOST_KEPT:
        bare = [tensor._replace(file=cast(ByteReader, None)) for tensor in tensors.values()]
        _LAST[header, file.size] = bare, dict(metadata)
    return Store(where, dict[str, StoredTensor](tensors), metadata=metadata)


def _described(name: str, value: Any, file: ByteReader, offset: int) -> FileTensor:
    """A tensor as its entry in the header describes it."""
    place = f"{file.where}: `{printable(name, file.where)[:200]}`"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{place}: expected dtype, shape and data_offsets in the header, found something else")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        raise DataError(f"{place}: unknown dtype {ascii(kind)[:50]}; expected one of {', '.join(_BITS)}")
    dims = checked_shape(shape, place)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        raise DataError(f"{place}: expected two offsets >= 0, found {ascii(offsets)[:100]}")
    bits, (start, stop) = math.prod(dims) * _BITS[kind], offsets
    if bits != 8 * (stop - start):
        raise DataError(
            f"{place}: {kind} of shape {ascii(shape)[:100]} takes {bits / 8:.15g} bytes, "
            f"its offsets {ascii(offsets)[:100]} hold {stop - start}"
        )
    return FileTensor(name, kind, SAFETENSORS_TYPES.get(kind), dims, file, offset + start, offset + stop)


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object in a JSON text, whose keys must be unique at every depth."""
    values_there = raw.count(b",") + raw.count(b":")
    if values_there > _MAX_VALUES:
        raise DataError(f"{where} has {values_there:,} values, more than {_MAX_VALUES:,}")
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise DataError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {ascii(twice)[:100]} is duplicated")
    return out
