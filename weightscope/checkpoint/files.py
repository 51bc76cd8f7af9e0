"""Model files and folders, on disk or at the hub: which files hold the tensors."""

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weightscope._util.sources import ARTIFACT_KEY, POPULATION_FILE, reason
from weightscope.checkpoint import adapters
from weightscope.checkpoint.formats import METADATA, open_distributed, open_gguf, open_msgpack, torch_like
from weightscope.checkpoint.tensors import SAFETENSORS_TYPES, FileCheck, Store, StoredTensor
from weightscope.checkpoint.torch_files import check_records, open_torch
from weightscope.errors import DataError, UsageError

CONFIG = "config.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # .pth.tar; an archive of tar is refused
# The order in which transformers and diffusers look, safetensors before pickles.
_STEMS = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
CANDIDATES = (*(f"{stem}{end}" for stem in _STEMS for end in ("", ".index.json")), *adapters.FILES)
_NPZ, _GGUF, _FLAX, _PICKLE = ".npz", ".gguf", ".msgpack", ".pkl"
SUFFIXES = (".safetensors", *TORCH_SUFFIXES, _NPZ, _GGUF, _FLAX)  # a .pkl in a folder may be anything
_KERAS = (".h5", ".hdf5", ".keras")
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
        if path.suffix != ".distcp" and zipfile.is_zipfile(path) and check_records(path):  # that is one zip a tensor
            return FileCheck(name, "verified", "crc32")
    except DataError as error:
        return FileCheck(name, "damaged", "crc32", str(error))
    return FileCheck(name, "unverified", detail="no checksum of it is known")


def open_path(path: Path, key: str | None) -> Store:
    """The tensors of a file or a model folder on disk."""
    if path.is_dir():
        return open_folder(Folder(path), key)
    if not path.exists():
        hint = "for a model at the hub write hf://org/name"
        if str(path).startswith("timm:"):
            hint = f"`weightscope init {path} --init default -o FILE` writes an untrained one"
        raise DataError(f"{path}: no such file or folder; {hint}")
    if path.name.endswith(_KERAS):
        how = "numpy.savez('weights.npz', **{v.path: v.numpy() for v in model.variables})"
        raise UsageError(f"{path}: files of Keras are not read; save their arrays from Keras, {how}")
    if path.name != _ZOO_FILE and not path.name.endswith((".index.json", *SUFFIXES, _PICKLE)):
        known = ", ".join((*SUFFIXES[1:], _PICKLE))
        raise UsageError(f"{path}: expected a .safetensors file, its .index.json, one of {known}, or a model folder")
    return _open(Folder(path.parent), path.name, str(path), key)


def open_folder(folder: Folder, key: str | None = None) -> Store:
    """The tensors of a model folder."""
    names, where = set(folder.names()), folder.where
    found = [name for name in CANDIDATES if name in names][:1]
    if not found and METADATA in names:
        parts = [folder.file(name)[0] for name in names if name == METADATA or name.endswith(".distcp")]
        return replace(open_distributed(parts[0].parent, where, key), files=folder)
    for suffixes in ((".safetensors",), TORCH_SUFFIXES, (_NPZ,), (_GGUF,), (_FLAX,), (_PICKLE,)):
        found = found or sorted(name for name in names if name.endswith(suffixes) and name[0] != ".")
    if len(found) > 1:
        listed = f"{', '.join(found[:6])}; or make a population of all with `weightscope import`"
        raise DataError(f"{where}: found {len(found)} checkpoints; name one of them: {listed}")
    if not found and POPULATION_FILE in names:
        raise DataError(f"{where}: expected a model, found a population; give one of its networks: {where}::0")
    if not found:
        there = ", ".join(sorted(names)[:6]) or "no files"
        raise DataError(f"{where}: expected {CANDIDATES[0]}, {CANDIDATES[1]} or another checkpoint, found {there}")
    store = _open(folder, found[0], where, key)
    if ARTIFACT_KEY in store.metadata and folder.commit is None:
        file = Path(where, found[0])
        raise DataError(f"{where}: expected a model, found the artifact of an initialiser; give its file: {file}")
    return store


def _open(folder: Folder, name: str, label: str, key: str | None) -> Store:
    # The configuration is checked first: it is small, and without it the tensors may be misread.
    there = folder.names()
    about: tuple[str, ...] = (CONFIG, "open_clip_config.json")
    about = (adapters.CONFIG,) if name in adapters.FILES else about
    about += ("params.json",) if name.startswith("consolidated") else ()  # Llama as published
    config = next((_json(folder, one) for one in about if one in there), {})
    store = _open_index(folder, name, key) if name.endswith(".index.json") else _open_file(folder, name, key)
    store.label, store.config, store.files = label, store.config | config, folder
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
    if key is not None and not name.endswith((*TORCH_SUFFIXES, _FLAX, _PICKLE, _ZOO_FILE)):
        raise UsageError(f"{folder.where}: {name}: holds one set of tensors; leave out --key (key= in Python)")
    path, where = folder.file(name)
    if path.is_file() and path.stat().st_size < 1000 and path.read_bytes().startswith(b"version https://git-lfs"):
        raise DataError(f"{where}: expected a model, found a pointer file of git LFS; run `git lfs pull` in its folder")
    if name.endswith(".safetensors"):
        return _open_safetensors(path, where)
    if name.endswith(_NPZ):
        return _open_npz(path, where)
    if name.endswith(_GGUF):
        return open_gguf(path, where)
    if name.endswith(_FLAX):
        return open_msgpack(path, where, key)
    return open_torch(path, where, key)


def _open_index(folder: Folder, name: str, key: str | None) -> Store:
    where = f"{folder.where}: {name}"
    table = _json(folder, name).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise DataError(f"{where}: expected a `weight_map` of tensor names to file names")
    stores = {shard: _open_file(folder, shard, key) for shard in sorted(set(table.values()))}
    out = Store(where, {})
    for tensor, shard in table.items():
        store = stores[shard]
        if tensor in store.tensors:
            out.tensors[tensor] = store.tensors[tensor]
        elif tensor not in store.unreadable:
            raise DataError(f"{where}: {ascii(tensor)[:100]} is mapped to {shard}, which does not hold it")
    for store in stores.values():
        out.unreadable |= store.unreadable
        out.metadata |= store.metadata
    out.unreadable = {tensor: why for tensor, why in out.unreadable.items() if tensor not in out.tensors}
    return out


def _open_npz(path: Path, where: str) -> Store:
    """The arrays of a file of `numpy.savez`; those of Google's Vision Transformers as torch has them."""
    found, left = list[StoredTensor](), dict[str, str]()
    with _npz_errors(where):
        archive = zipfile.ZipFile(path)
        google = any("/encoderblock_" in name for name in archive.namelist())
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            array = _npz_array(archive, entry, name.replace("/", ".") if google else name, f"{where}: {entry.filename}")
            if isinstance(array, str):
                left[name] = array
            else:
                found.append(array)
    store = torch_like(found, where) if google else Store(where, {array.name: array for array in found})
    return replace(store, unreadable=left)


def _npz_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, where: str) -> StoredTensor | str:
    """An array by its header, or why it is not read."""
    with archive.open(entry) as stream:
        first = np.lib.format.read_magic(stream) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    native = np.dtype(np.int16) if dtype == "V2" else dtype.newbyteorder("=")
    if native.char not in "?bhilqBHILQefdFD":  # what torch has
        return f"{'pickled objects' if dtype.hasobject else f'of type {dtype}'}, not read"
    # two bytes of no type are JAX's bfloat16
    kind = torch.bfloat16 if dtype == "V2" else torch.from_numpy(np.empty(0, native)).dtype

    def load() -> Tensor:
        with _npz_errors(where), archive.open(entry) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        bits = array.view(native) if dtype == "V2" else array.astype(native, order="C", copy=False)
        return torch.from_numpy(np.asarray(bits)).view(kind)

    return StoredTensor(name, shape, kind, load, entry.header_offset)


@contextmanager
def _npz_errors(where: str) -> Iterator[None]:
    """DataError for what zipfile and NumPy raise when a file is not one of `numpy.savez`."""
    try:
        yield
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{where}: expected a file of numpy.savez, found a damaged or another one ({error})") from error


def _open_safetensors(path: Path, where: str) -> Store:
    """The tensors of a safetensors file."""
    try:
        file = safe_open(path, "pt")
        tensors = dict[str, StoredTensor]()
        for name in file.offset_keys():
            header = file.get_slice(name)
            kind, shape, load = header.get_dtype(), tuple(header.get_shape()), partial(file.get_tensor, name)
            tensors[name] = StoredTensor(name, shape, SAFETENSORS_TYPES.get(kind), load, name, f"{where}: ", kind)
        return Store(where, tensors, metadata=file.metadata() or {})
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {reason(error)}") from error
    except SafetensorError as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{where}: it is truncated, damaged or not a safetensors file: {why}") from error
