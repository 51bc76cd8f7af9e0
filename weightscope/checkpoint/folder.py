"""Model files and folders, on disk or at the hub: which files hold the tensors, and at which bytes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from weightscope._util.sources import ARTIFACT_KEY, POPULATION_FILE
from weightscope.checkpoint.checks import FileCheck, blob_hash, kind, mismatch, mismatch_error
from weightscope.checkpoint.entries import TORCH, Entry, FileEntry, Store
from weightscope.checkpoint.files import ByteReader, LocalFile, read_bytes
from weightscope.checkpoint.foreign_formats import is_onnx, refuse_ctranslate2
from weightscope.checkpoint.onnx_files import open_onnx
from weightscope.checkpoint.safetensors_header import json_object, read_header
from weightscope.checkpoint.torch_files import check_records, open_torch
from weightscope.errors import DataError, UsageError

CONFIG = "config.json"
ONNX_SUFFIX = ".onnx"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# The order in which transformers and diffusers look, safetensors before pickles.
CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_CONFIG = 10 << 20
MAX_INDEX = 100 << 20
_MAX_SHARDS = 10_000


class Folder(Protocol):
    """A folder of model files.

    Attributes:
        where: its name in errors.
    """

    where: str

    @property
    def commit(self) -> str | None:
        """The commit at the hub; None on disk."""

    def names(self) -> Iterable[str]:
        """The plain names of its files."""

    def open(self, name: str) -> ByteReader:
        """Open a file without reading it."""

    def received(self) -> int:
        """Number of bytes read from disk, or received, so far."""

    def unverified(self) -> list[str]:
        """Names of the opened files that were not compared as a whole with a hash that their host states."""

    def check(self, download: bool) -> list[FileCheck]:
        """Compare the opened files with the checksums that are known.

        Args:
            download: fetch what is missing of them.
        """


class LocalFolder:
    """A folder on disk; see `Folder`."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.commit: str | None = None
        self._path = path
        self._files: list[LocalFile] = []

    def names(self) -> list[str]:
        """See `Folder.names`."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def open(self, name: str) -> LocalFile:
        """See `Folder.open`."""
        self._files.append(LocalFile(self._path / name))
        return self._files[-1]

    def received(self) -> int:
        """See `Folder.received`."""
        return sum(file.bytes_read for file in self._files)

    def unverified(self) -> list[str]:
        """See `Folder.unverified`; a folder on disk states no hashes."""
        return []

    def check(self, download: bool) -> list[FileCheck]:
        """See `Folder.check`: records of torch's zip archives, and files in huggingface_hub's cache."""
        return [_checked(Path(file.where).name, Path(file.where)) for file in self._files]


def _checked(name: str, path: Path) -> FileCheck:
    file, stated = LocalFile(path, counted=False), blob_hash(path)
    try:
        if stated is not None:
            if found := mismatch(stated, file.size, file.pieces(0, file.size)):
                raise mismatch_error(str(path), stated, found, f"delete {path.resolve()}")
            return FileCheck(name, "verified", kind(stated))
        if read_bytes(file, 0, min(file.size, 2)) == b"PK" and check_records(file):
            return FileCheck(name, "verified", "crc32")
    except DataError as error:
        return FileCheck(name, "damaged", "crc32" if stated is None else kind(stated), str(error))
    return FileCheck(name, "unverified", detail="no checksum of it is known")


def open_path(path: Path, key: str | None) -> Store:
    """The tensors of a file or a model folder on disk.

    Raises:
        DataError: if it is missing or damaged.
        UsageError: if it is not a checkpoint by its name.
    """
    if path.is_dir():
        return open_folder(LocalFolder(path), key)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; for a model at the hub write hf://org/name")
    if path.name.endswith(".json"):
        if not path.name.endswith(".index.json"):
            raise UsageError(f"{path}: expected a checkpoint or its .index.json, found another JSON file")
    elif not path.name.endswith((".safetensors", ONNX_SUFFIX, *TORCH_SUFFIXES)):
        file = LocalFile(path)
        refuse_ctranslate2(file)
        if not is_onnx(file):
            known = ", ".join((*TORCH_SUFFIXES, ONNX_SUFFIX))
            raise UsageError(f"{path}: expected a .safetensors file, one of {known}, or a model folder")
    return _open(LocalFolder(path.parent), path.name, str(path), key, (path.parent / CONFIG).is_file())


def open_folder(folder: Folder, key: str | None = None) -> Store:
    """The tensors of a model folder.

    Raises:
        DataError: if it holds no checkpoint, several of them, or a damaged one.
    """
    names = set(folder.names())
    name = next((c for c in CANDIDATES if c in names), None)
    if name is None:
        for suffixes in ((".safetensors",), TORCH_SUFFIXES, (ONNX_SUFFIX,)):
            found = sorted(n for n in names if n.endswith(suffixes) and plain(n))
            if len(found) > 1:
                listed = ", ".join(found[:6])
                raise DataError(f"{folder.where}: found {len(found)} checkpoints; name one of them: {listed}")
            if found:
                name = found[0]
                break
    if name is None and POPULATION_FILE in names:
        where = folder.where
        raise DataError(f"{where}: expected a model, found a population; give one of its networks: {where}::0")
    if name is None:
        raise DataError(
            f"{folder.where}: expected {CANDIDATES[0]}, {CANDIDATES[1]} or another checkpoint, found "
            f"{', '.join(sorted(names)[:6]) or 'no files'}"
        )
    store = _open(folder, name, folder.where, key, CONFIG in names)
    if ARTIFACT_KEY in store.metadata and folder.commit is None:
        file = Path(folder.where, name)
        raise DataError(
            f"{folder.where}: expected a model, found the artifact of an initialiser; give its file: {file}"
        )
    return store


def plain(name: Any) -> bool:
    """Whether a name is that of a file in the same folder: no path, not hidden, printable."""
    if not isinstance(name, str) or not 0 < len(name) <= 255:
        return False
    return name.isprintable() and not name.startswith(".") and not set(name) & set("/\\:")


def _open(folder: Folder, name: str, label: str, key: str | None, has_config: bool) -> Store:
    # The configuration is checked first: it is small, and without it the tensors may be misread.
    config = _json(folder, CONFIG, MAX_CONFIG) if has_config else {}
    store = _open_index(folder, name, key) if name.endswith(".index.json") else _open_file(folder, name, key)
    store.label, store.config, store.commit = label, config, folder.commit
    store.received, store.check, store.unverified = folder.received, folder.check, folder.unverified
    return store


def _json(folder: Folder, name: str, limit: int) -> dict[str, Any]:
    file = folder.open(name)
    if file.size > limit:
        raise DataError(f"{file.where}: expected at most {limit} bytes, found {file.size}")
    return json_object(read_bytes(file, 0, file.size), f"{folder.where}: {name}")


def _open_file(folder: Folder, name: str, key: str | None) -> Store:
    file = folder.open(name)
    if not file.where.endswith(".safetensors"):
        whole = file.whole()
        refuse_ctranslate2(whole)
        if not is_onnx(whole):
            return open_torch(whole, key)
        if key is not None:
            raise UsageError(f"{file.where}: an ONNX model holds one set of tensors; omit key=")
        return open_onnx(whole, lambda location: _external(folder, name, location))
    if key is not None:
        raise UsageError(f"{file.where}: a safetensors file holds one set of tensors; omit key=")
    header = read_header(lambda start, stop: read_bytes(file, start, stop), file.size, file.where)
    ends = sorted((entry.start, entry.stop) for entry in header.tensors.values())
    file.expect([(0, 8), (8, ends[0][0] if ends else file.size), *ends])
    entries: dict[str, Entry] = {
        name: FileEntry(name, e.dtype, TORCH.get(e.dtype), e.shape, file, e.start, e.stop)
        for name, e in header.tensors.items()
    }
    return Store(file.where, entries, metadata=dict(header.metadata))


def _external(folder: Folder, name: str, location: str) -> ByteReader:
    """A file of external data of an ONNX model."""
    if not plain(location) or location not in set(folder.names()):
        raise DataError(
            f"{folder.where}: {name}: expected the plain name of a file of external data in the same folder, found "
            f"{ascii(location)[:100]}; nothing was opened"
        )
    return folder.open(location)


def _open_index(folder: Folder, name: str, key: str | None) -> Store:
    where = f"{folder.where}: {name}"
    table = _json(folder, name, MAX_INDEX).get("weight_map")
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
    if len(shards) > _MAX_SHARDS:
        raise DataError(f"{where}: it names {len(shards)} files, more than {_MAX_SHARDS}")
    stores = {shard: _open_file(folder, shard, key) for shard in shards}
    out = Store(where, {})
    for tensor, shard in table.items():
        store = stores[shard]
        if tensor in store.entries:
            out.entries[tensor] = store.entries[tensor]
        elif tensor not in store.unreadable:
            raise DataError(f"{where}: {ascii(tensor)[:100]} is mapped to {shard}, which does not hold it")
    for shard, store in stores.items():
        out.unreadable |= store.unreadable
        for tensor in store.entries:
            if table.get(tensor) != shard:
                out.unreadable.setdefault(tensor, f"in {shard}, but the index does not map it there")
        out.metadata |= store.metadata
    for tensor in out.entries:
        out.unreadable.pop(tensor, None)
    return out
