"""Tensors of a checkpoint: what is known of each without reading it, and how it is read, from a file or from memory."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weightscope.checkpoint.checks import FileCheck
from weightscope.checkpoint.files import ByteReader
from weightscope.errors import DataError

TORCH: Mapping[str, torch.dtype] = {
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

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
WEIGHTS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS}
"""Data types of tensors that count as weights."""

_CHUNK = 1 << 22  # entries converted at once: peak memory is the result and 16 MB

# Hints that the finders of anatomy ask for; a module keeps them as attributes where a file has them in its config.
_HINTS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "num_key_value_heads")


class Entry(Protocol):
    """A tensor that can be read."""

    @property
    def kind(self) -> str:
        """Name of its data type."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Its data type as stored; None if torch has no such type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes as stored."""

    @property
    def identity(self) -> Hashable:
        """Equal for two names of one tied tensor."""

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """The tensor, and the number of its entries that are NaN or infinite.

        Args:
            wide: convert half and quarter precision to float32.
        """


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file; see `Entry`.

    Attributes:
        name: for errors.
        kind: see `Entry`.
        dtype: see `Entry`.
        shape: see `Entry`.
        file: the file that it is in.
        start: position of its first byte.
        stop: position after its last byte.
        stride: in entries; None for row-major.
    """

    name: str
    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    file: ByteReader
    start: int
    stop: int
    stride: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """See `Entry`."""
        return self.stop - self.start

    @property
    def identity(self) -> Hashable:
        """See `Entry`; empty tensors are never tied."""
        return (id(self.file), self.start, self.stop, self.shape, self.stride, self.name * (self.start == self.stop))

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """See `Entry.read`."""
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
        region, bad = self.file.prepare(self.start, self.stop), 0
        stored = torch.uint8 if dtype == torch.bool else dtype
        direct = flat.dtype == stored
        buffer = flat if direct else torch.empty(min(_CHUNK, len(flat)), dtype=stored)
        for first in range(0, len(flat), _CHUNK):
            target = flat[first : first + _CHUNK]
            piece = target if direct else buffer[: len(target)]
            region.read_into(piece.view(torch.uint8).numpy().data, self.start + first * dtype.itemsize)
            if not direct:
                target.copy_(piece)
            bad += nonfinite(target)
        return bad


@dataclass(frozen=True)
class MemoryEntry:
    """A tensor in memory; see `Entry`."""

    name: str
    tensor: Tensor

    @property
    def kind(self) -> str:
        """See `Entry`."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def dtype(self) -> torch.dtype:
        """See `Entry`."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Entry`."""
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """See `Entry`."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def identity(self) -> Hashable:
        """See `Entry`."""
        tensor = self.tensor
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
            return id(tensor)
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """See `Entry.read`; a copy, on the CPU."""
        if self.tensor.is_meta:
            raise DataError(f"`{self.name}` is on the meta device and holds no numbers; materialise the model first")
        result = torch.float32 if wide and _is_narrow(self.dtype) else self.dtype
        out = self.tensor.detach().to("cpu", result, copy=True)
        return out, nonfinite(out)


@dataclass
class Store:
    """The contents of an opened checkpoint.

    Attributes:
        label: name of the checkpoint, for errors.
        entries: name -> tensor, in stored order.
        unreadable: name -> why it has no entry.
        config: the model's configuration, or empty.
        metadata: free text of the files.
        commit: the commit at the hub; None elsewhere.
        attributes: path of a layer -> what the file says about it, under the names of torch's module (`groups`).
        statistics: names known to be buffers; None if unknown.
        received: returns the number of bytes read so far.
        check: see `weightscope.checkpoint.folder.Folder`.
        unverified: likewise.
    """

    label: str
    entries: dict[str, Entry]
    unreadable: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    statistics: frozenset[str] | None = None
    received: Callable[[], int] = lambda: 0
    check: Callable[[bool], list[FileCheck]] = lambda download: []
    unverified: Callable[[], list[str]] = list


def open_module(module: nn.Module) -> Store:
    """The state dict of a module, with its configuration where it has one."""
    store = open_mapping(module.state_dict(keep_vars=True), type(module).__name__)
    store.statistics = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    store.config = _config(module)
    return store


def open_mapping(tensors: Mapping[str, Any], label: str = "state dict") -> Store:
    """The tensors of a mapping.

    Raises:
        DataError: if a key is not a string, or no value is a tensor.
    """
    if not all(isinstance(name, str) for name in tensors):
        raise DataError(f"{label}: expected names of tensors as keys, found other keys")
    entries: dict[str, Entry] = {n: MemoryEntry(n, value) for n, value in tensors.items() if isinstance(value, Tensor)}
    if tensors and not entries:
        there = ", ".join(list(tensors)[:6])
        raise DataError(f"{label}: expected a mapping of names to tensors, found none under {there}")
    others = {name: f"a {type(value).__name__}, no tensor" for name, value in tensors.items() if name not in entries}
    return Store(label, entries, others, dict(getattr(tensors, "config", None) or {}))


def _config(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if isinstance(config, Mapping):
        return dict(config)
    out = {}
    for key in _HINTS:
        found = {v for m in module.modules() if type(v := getattr(m, key, None)) is int}
        if len(found) == 1:  # where layers differ, one number would be wrong for some
            out[key] = found.pop()
    return out


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in WEIGHTS and dtype.itemsize < 4


def nonfinite(values: Tensor) -> int:
    """The number of entries that are NaN or infinite."""
    if not values.is_floating_point() or values.dtype in EIGHT_BITS:
        return 0
    # A finite sum proves that all entries are finite, without extra memory; a sum that overflows proves nothing.
    if math.isfinite(values.sum().item()):
        return 0
    return int((~values.isfinite()).sum())
