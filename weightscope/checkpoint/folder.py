"""Model files and folders, on disk or at the hub: which files hold the tensors, and where each tensor lies in them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from weightscope.checkpoint.entries import TORCH, FileEntry, Store
from weightscope.checkpoint.files import LocalFile, SourceFile, read_bytes
from weightscope.checkpoint.safetensors_header import json_object, read_header
from weightscope.checkpoint.torch_files import open_torch
from weightscope.errors import DataError, UsageError

CONFIG = "config.json"
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
        where: what errors call it.
        commit: at the hub; None on disk.
    """

    where: str
    commit: str | None

    def names(self) -> Iterable[str]:
        """The plain names of its files."""

    def text(self, name: str, limit: int) -> bytes:
        """A whole small file."""

    def open(self, name: str) -> SourceFile:
        """A file, nothing of it read."""

    def received(self) -> int:
        """How many bytes were read of files given by `text`, and of all else that is no `SourceFile`."""

    def verify(self) -> int:
        """Check whole files against what their host states; how many."""


class LocalFolder:
    """A folder on disk; see `Folder`."""

    commit = None

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        self._received = 0

    def names(self) -> list[str]:
        """See `Folder.names`."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def text(self, name: str, limit: int) -> bytes:
        """See `Folder.text`."""
        file = LocalFile(self._path / name)
        if file.size > limit:
            raise DataError(f"{file.where}: expected at most {limit} bytes, found {file.size}")
        self._received += file.size
        return read_bytes(file, 0, file.size)

    def open(self, name: str) -> LocalFile:
        """See `Folder.open`."""
        return LocalFile(self._path / name)

    def received(self) -> int:
        """See `Folder.received`."""
        return self._received

    def verify(self) -> int:
        """See `Folder.verify`; nobody states hashes of files on disk."""
        return 0


def open_path(path: Path, key: str | None) -> Store:
    """The tensors of a file or a model folder on disk.

    Raises:
        DataError: if it is missing or unsound.
        UsageError: if its name says nothing about its kind.
    """
    if path.is_dir():
        return open_folder(LocalFolder(path), key)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; for a model at the hub write hf://org/name")
    folder = LocalFolder(path.parent)
    names = [path.name]
    if path.name.endswith(".json"):
        if not path.name.endswith(".index.json"):
            raise UsageError(f"{path}: expected a checkpoint or its .index.json, found another JSON file")
    elif not path.name.endswith((".safetensors", *TORCH_SUFFIXES)):
        raise UsageError(f"{path}: expected a .safetensors file, one of {', '.join(TORCH_SUFFIXES)}, or a model folder")
    return _open(folder, names[0], str(path), key, (path.parent / CONFIG).is_file())


def open_folder(folder: Folder, key: str | None = None) -> Store:
    """The tensors of a model folder.

    Raises:
        DataError: if it holds no model, several, or an unsound one.
    """
    names = set(folder.names())
    name = next((c for c in CANDIDATES if c in names), None)
    if name is None:
        for suffixes in ((".safetensors",), TORCH_SUFFIXES):
            found = sorted(n for n in names if n.endswith(suffixes) and plain(n))
            if len(found) > 1:
                listed = ", ".join(found[:6])
                raise DataError(f"{folder.where}: found {len(found)} checkpoints; name one of them: {listed}")
            if found:
                name = found[0]
                break
    if name is None:
        raise DataError(
            f"{folder.where}: expected {CANDIDATES[0]}, {CANDIDATES[1]} or another checkpoint, found "
            f"{', '.join(sorted(names)[:6]) or 'no files'}"
        )
    return _open(folder, name, folder.where, key, CONFIG in names)


def plain(name: Any) -> bool:
    """Whether this is the name of a file in the same folder, and nothing else."""
    if not isinstance(name, str) or not 0 < len(name) <= 255:
        return False
    return name.isprintable() and not name.startswith(".") and not set(name) & set("/\\:")


def _open(folder: Folder, name: str, label: str, key: str | None, has_config: bool) -> Store:
    # The configuration is checked first: it is small, and without it the tensors may be misread.
    config = json_object(folder.text(CONFIG, MAX_CONFIG), f"{folder.where}: {CONFIG}") if has_config else {}
    if name.endswith(".index.json"):
        store = _open_index(folder, name, key)
    else:
        store = _open_file(folder.open(name), key)
    read = store.received
    store.label, store.config, store.commit, store.verify = label, config, folder.commit, folder.verify
    store.received = lambda: folder.received() + read()
    return store


def _open_file(file: SourceFile, key: str | None) -> Store:
    if not file.where.endswith(".safetensors"):
        return open_torch(file.whole(), key)
    if key is not None:
        raise UsageError(f"{file.where}: a safetensors file holds one set of tensors; leave key= out")
    header = read_header(lambda start, stop: read_bytes(file, start, stop), file.size, file.where)
    ends = sorted((entry.start, entry.stop) for entry in header.tensors.values())
    file.expect([(0, 8), (8, ends[0][0] if ends else file.size), *ends])
    entries = {
        name: FileEntry(name, e.dtype, TORCH.get(e.dtype), e.shape, file, e.start, e.stop)
        for name, e in header.tensors.items()
    }
    return Store(file.where, entries, metadata=dict(header.metadata), received=lambda: file.bytes_read)


def _open_index(folder: Folder, name: str, key: str | None) -> Store:
    where = f"{folder.where}: {name}"
    table = json_object(folder.text(name, MAX_INDEX), where).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise DataError(f"{where}: expected a `weight_map` of tensor names to file names")
    suffix = (".safetensors",) if name.endswith(".safetensors.index.json") else TORCH_SUFFIXES
    for tensor, shard in table.items():
        if not plain(shard) or not shard.endswith(suffix):
            raise DataError(
                f"{where}: {ascii(tensor)[:100]} is said to lie in {ascii(shard)[:100]}, "
                f"which is no plain name of a {suffix[0]} file; nothing was opened"
            )
    shards = sorted(set(table.values()))
    if len(shards) > _MAX_SHARDS:
        raise DataError(f"{where}: it names {len(shards)} files, more than {_MAX_SHARDS}")
    stores = {shard: _open_file(folder.open(shard), key) for shard in shards}
    out = Store(where, {}, received=lambda: sum(store.received() for store in stores.values()))
    for tensor, shard in table.items():
        store = stores[shard]
        if tensor in store.entries:
            out.entries[tensor] = store.entries[tensor]
        elif tensor not in store.unreadable:
            raise DataError(f"{where}: {ascii(tensor)[:100]} is said to lie in {shard}, which does not hold it")
    for shard, store in stores.items():
        out.unreadable |= store.unreadable
        for tensor in store.entries:
            if table.get(tensor) != shard:
                out.unreadable.setdefault(tensor, f"lies in {shard}, where the index does not look for it")
        out.metadata |= store.metadata
    for tensor in out.entries:
        out.unreadable.pop(tensor, None)
    return out
