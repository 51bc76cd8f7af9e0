"""Model files and folders, on disk or at the hub: which files hold the tensors."""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from weightscope._util import npz
from weightscope._util.sources import ARTIFACT_KEY, POPULATION_FILE, reason
from weightscope.checkpoint.tensors import (
    FileCheck,
    NpzTensor,
    SafetensorsTensor,
    Store,
    StoredTensor,
    npz_errors,
    printable,
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
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Folder:
    """A folder of model files, here on disk; `where` is its name in errors, `commit` that of a model at the hub."""

    commit: str | None = None

    def __init__(self, path: Path) -> None:
        self.where, self._path = str(path), path
        self.opened: list[Path] = []

    def names(self) -> list[str]:
        """The plain names of its files."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def file(self, name: str) -> tuple[Path, str]:
        """A file of it, and its name in errors."""
        self.opened.append(self._path / name)
        return self.opened[-1], str(self.opened[-1])

    def check(self) -> list[FileCheck]:
        """Compare the opened files with the checksums that are known."""
        return [check_file(path.name, path) for path in self.opened]


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
        if zipfile.is_zipfile(path) and check_records(path):
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
    path, where = folder.file(name)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(values).__name__}")
    return values


def _open_file(folder: Folder, name: str, key: str | None) -> Store:
    if key is not None and not name.endswith((*TORCH_SUFFIXES, _ZOO_FILE)):
        raise UsageError(f"{folder.where}: {name}: holds one set of tensors; omit key=")
    path, where = folder.file(name)
    if name.endswith(".safetensors"):
        return _open_safetensors(path, where)
    if name.endswith(_NPZ_SUFFIX):
        return _open_npz(path, where)
    return open_torch(path, where, key)


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


def _open_npz(path: Path, where: str) -> Store:
    """The arrays of a file of `numpy.savez`."""
    store = Store(where, {})
    with npz_errors(where):
        archive = zipfile.ZipFile(path)
        for entry in archive.infolist():
            name = printable(entry.filename.removesuffix(".npy"), where)
            store.tensors[name] = NpzTensor(name, archive, npz.stored(archive, entry, f"{where}: {entry.filename}"))
    return store


def _open_safetensors(path: Path, where: str) -> Store:
    """The tensors of a safetensors file."""
    try:
        file = safe_open(path, "pt")
        tensors = {name: SafetensorsTensor(name, file, where) for name in file.offset_keys()}
        return Store(where, dict[str, StoredTensor](tensors), metadata=file.metadata() or {})
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {reason(error)}") from error
    except SafetensorError as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{where}: it is truncated, damaged or not a safetensors file: {why}") from error
