"""Tensors of a checkpoint: what is known of each without reading it, and how it is read, from a file or from memory."""

import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from weightscope._util.sources import open_regular, reason
from weightscope.errors import DataError

SAFETENSORS_TYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""Data types of safetensors that torch has."""

_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
WEIGHTS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *_EIGHT_BITS}
"""Data types of tensors that count as weights."""

_CHUNK = 1 << 22  # entries converted at once: peak memory is the result and 16 MB

# Hints that the finders of anatomy ask for; a module keeps them as attributes where a file has them in its config.
_HINTS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "num_key_value_heads")


@dataclass(frozen=True)
class FileCheck:
    """What is known of one file's integrity."""

    name: str
    status: Literal["verified", "unverified", "damaged"]  # unverified: not compared as a whole
    compared: str = ""  # with what: sha256, sha1, crc32, or nothing
    detail: str = ""  # why it is unverified or damaged, and what to do


class Region(Protocol):
    """Available bytes, addressed by their position in the file that they belong to."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`; DataError if the file ends before."""


class ByteReader(Protocol):
    """A file of a checkpoint."""

    where: str  # its name in errors
    size: int

    def part(self, start: int, stop: int) -> Region:
        """Make these bytes available; of a file at the hub they are fetched, and no others."""


class LocalFile:
    """A regular file on disk, kept open, so that replacing it under its name does not mix two files.

    It is not memory-mapped: a file that is truncated while it is read is an error and not a crash. `base` is the
    position of its first byte in the file that it is a cached part of.
    """

    def __init__(self, path: str | Path, where: str | None = None, base: int = 0) -> None:
        self.where = where or str(path)
        self.bytes_read = 0
        self._base = base
        try:
            self.stream: BufferedReader = open_regular(path)
        except OSError as error:
            raise DataError(f"{self.where}: cannot be read: {reason(error)}") from error
        weakref.finalize(self, self.stream.close)
        self.size = os.fstat(self.stream.fileno()).st_size

    def part(self, start: int, stop: int) -> "LocalFile":
        """See `ByteReader.part`."""
        return self

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Region.read_into`."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.stream.fileno(), [buffer[done:]], start - self._base + done)
            except OSError as error:
                raise DataError(f"{self.where}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise DataError(f"{self.where}: it ends before byte {start + len(buffer)}: it is truncated")
            done += count
        self.bytes_read += done


def read_bytes(file: ByteReader, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop` of a file."""
    out = bytearray(stop - start)
    if out:
        file.part(start, stop).read_into(memoryview(out), start)
    return bytes(out)


def printable(name: Any, where: str) -> str:
    """A tensor's name, checked: it is printed, and control characters could rewrite the terminal."""
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise DataError(f"{where}: a tensor's name is empty or not printable: {ascii(name)[:100]}")
    return name


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    name: str  # for errors
    kind: str  # name of its data type
    dtype: torch.dtype | None  # as stored; None if torch has no such type
    shape: tuple[int, ...]
    file: ByteReader
    start: int  # position of its first byte
    stop: int  # position after its last byte
    stride: tuple[int, ...] | None = None  # in entries; None for row-major

    @property
    def nbytes(self) -> int:
        """Bytes that it takes as stored."""
        return self.stop - self.start

    @property
    def identity(self) -> Hashable:
        """Equal for two names of one tied tensor; empty tensors are never tied."""
        return (id(self.file), self.start, self.stop, self.shape, self.stride, self.name * (self.start == self.stop))

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """The tensor (`wide`: of half or quarter precision as float32), and its number of NaN and infinite entries."""
        where = f"{self.file.where}: `{self.name}`"
        if self.dtype is None:
            raise DataError(f"{where}: torch has no data type {self.kind}, so it cannot be read")
        result = torch.float32 if wide and _is_narrow(self.dtype) else self.dtype
        try:
            flat = torch.empty(self.nbytes // self.dtype.itemsize, dtype=result)
            bad = self._fill(flat, self.dtype)
            if self.stride is not None:
                flat = flat.as_strided(self.shape, self.stride).contiguous()
            return flat.reshape(self.shape), bad
        except (RuntimeError, MemoryError) as error:  # what torch raises when memory is short
            raise DataError(f"{where}: not enough memory: {' '.join(str(error).split())[:200]}") from error

    def _fill(self, flat: Tensor, dtype: torch.dtype) -> int:
        if not len(flat):
            return 0
        region, bad = self.file.part(self.start, self.stop), 0
        stored = torch.uint8 if dtype == torch.bool else dtype
        direct = flat.dtype == stored
        buffer = flat if direct else torch.empty(min(_CHUNK, len(flat)), dtype=stored)
        for first in range(0, len(flat), _CHUNK):
            target = flat[first : first + _CHUNK]
            piece = target if direct else buffer[: len(target)]
            region.read_into(piece.view(torch.uint8).numpy().data, self.start + first * dtype.itemsize)
            if not direct:
                target.copy_(piece)
            bad += _nonfinite(target)
        return bad


class MemoryTensor:
    """A tensor in memory; attributes and methods as `FileTensor`."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.kind = str(tensor.dtype).removeprefix("torch.")
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.nbytes = tensor.numel() * tensor.element_size()
        self.identity: Hashable = id(tensor)
        if not tensor.is_meta and tensor.numel() and tensor.layout == torch.strided:
            self.identity = (tensor.data_ptr(), tensor.dtype, self.shape, tensor.stride())
        self._tensor = tensor

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """See `FileTensor.read`; a copy, on the CPU."""
        if self._tensor.is_meta:
            raise DataError(f"`{self.name}` is on the meta device and holds no numbers; materialise the model first")
        result = torch.float32 if wide and _is_narrow(self.dtype) else self.dtype
        out = self._tensor.detach().to("cpu", result, copy=True)
        return out, _nonfinite(out)


StoredTensor = FileTensor | MemoryTensor


@dataclass
class Store:
    """The contents of an opened checkpoint."""

    label: str  # name of the checkpoint, for errors
    tensors: dict[str, StoredTensor]
    unreadable: dict[str, str] = field(default_factory=dict)  # name -> why it is not among the tensors
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # free text of the files
    commit: str | None = None  # at the hub
    # Path of a layer -> what the file says about it, under the names of torch's module (`groups`).
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    statistics: frozenset[str] | None = None  # names known to be buffers; None if unknown
    # See `weightscope.checkpoint.files.Folder`.
    received: Callable[[], int] = lambda: 0
    check: Callable[[bool], list[FileCheck]] = lambda download: []
    unverified: Callable[[], list[str]] = list


def open_module(module: nn.Module) -> Store:
    """The state dict of a module, with its configuration where it has one."""
    store = open_mapping(module.state_dict(keep_vars=True), type(module).__name__)
    store.statistics = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        store.config = dict(config.to_dict())
    elif isinstance(config, Mapping):
        store.config = dict(config)
    else:
        store.config = dict(_hints(module))
    return store


def open_mapping(tensors: Mapping[str, Any], label: str = "state dict") -> Store:
    """The tensors of a mapping."""
    if not all(isinstance(name, str) for name in tensors):
        raise DataError(f"{label}: expected names of tensors as keys, found other keys")
    found: dict[str, StoredTensor] = {n: MemoryTensor(n, t) for n, t in tensors.items() if isinstance(t, Tensor)}
    if tensors and not found:
        there = ", ".join(list(tensors)[:6])
        raise DataError(f"{label}: expected a mapping of names to tensors, found none under {there}")
    others = {name: f"a {type(value).__name__}, no tensor" for name, value in tensors.items() if name not in found}
    return Store(label, found, others, dict(getattr(tensors, "config", None) or {}))


def _hints(module: nn.Module) -> Iterator[tuple[str, int]]:
    for key in _HINTS:
        found = {v for m in module.modules() if type(v := getattr(m, key, None)) is int}
        if len(found) == 1:  # where layers differ, one number would be wrong for some
            yield key, found.pop()


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in WEIGHTS and dtype.itemsize < 4


def _nonfinite(values: Tensor) -> int:
    """The number of entries that are NaN or infinite."""
    if not values.is_floating_point() or values.dtype in _EIGHT_BITS:
        return 0
    # A finite sum proves that all entries are finite, without extra memory; a sum that overflows proves nothing.
    if math.isfinite(values.sum().item()):
        return 0
    return int((~values.isfinite()).sum())
