"""One tensor of a checkpoint: what is known without reading it, and how it is read."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from weightscope.checkpoint.files import SourceFile
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
"""Data types of safetensors that torch computes with."""

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
WEIGHTS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *EIGHT_BITS}
"""Data types of tensors that count as weights."""

_CHUNK = 1 << 22  # entries that are converted at once: the peak is the result and 16 MB


class Entry(Protocol):
    """A tensor that can be read.

    Attributes:
        kind: its data type in words.
        dtype: its data type as stored; None where torch has none.
        shape: of the tensor.
        identity: equal for two names of one tied tensor.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    identity: Hashable

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """The tensor and how many of its entries are NaN or infinite.

        Args:
            wide: half and quarter precision become float32.
        """


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file; see `Entry`.

    Attributes:
        name: for errors.
        kind: see `Entry`.
        dtype: see `Entry`.
        shape: see `Entry`.
        file: that holds it.
        start: of its first byte.
        stop: of the byte after its last.
        stride: in entries; None for row-major.
    """

    name: str
    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    file: SourceFile
    start: int
    stop: int
    stride: tuple[int, ...] | None = None

    @property
    def identity(self) -> Hashable:
        """See `Entry`; tensors without entries are nobody's alias."""
        return (id(self.file), self.start, self.stop, self.shape, self.stride, self.name * (self.start == self.stop))

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """See `Entry.read`."""
        where = f"{self.file.where}: `{self.name}`"
        if self.dtype is None:
            raise DataError(f"{where}: torch has no data type {self.kind}, so it cannot be read")
        result = torch.float32 if wide and self.dtype in WEIGHTS and self.dtype.itemsize < 4 else self.dtype
        count = (self.stop - self.start) // self.dtype.itemsize
        try:
            flat = torch.empty(count, dtype=result)
            bad = self._fill(flat)
            if self.stride is not None:
                flat = flat.as_strided(self.shape, self.stride).contiguous()
            return flat.reshape(self.shape), bad
        except (RuntimeError, MemoryError) as error:  # what torch raises when memory is short
            raise DataError(f"{where}: cannot be held in memory: {' '.join(str(error).split())[:200]}") from error

    def _fill(self, flat: Tensor) -> int:
        if not len(flat):
            return 0
        region, item, bad = self.file.prepare(self.start, self.stop), self.dtype.itemsize, 0
        stored = torch.uint8 if self.dtype == torch.bool else self.dtype
        direct = flat.dtype == stored
        buffer = flat if direct else torch.empty(min(_CHUNK, len(flat)), dtype=stored)
        for first in range(0, len(flat), _CHUNK):
            target = flat[first : first + _CHUNK]
            piece = target if direct else buffer[: len(target)]
            region.read_into(memoryview(piece.view(torch.uint8).numpy()), self.start + first * item)
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
        narrow = wide and self.dtype in WEIGHTS and self.dtype.itemsize < 4
        out = self.tensor.detach().to("cpu", torch.float32 if narrow else self.dtype, copy=True)
        return out, nonfinite(out)


@dataclass
class Store:
    """What a source holds.

    Attributes:
        label: the source, for errors.
        entries: name -> tensor, in the source's order.
        unreadable: name -> why there is no entry.
        config: the model's configuration, or empty.
        metadata: free text that stands in the files.
        commit: the commit at the hub; None elsewhere.
        statistics: names that are known to be buffers; None where the source does not tell.
        received: how many bytes were read so far.
        verify: fetches and checks whole files against the hashes that their host states; how many were checked.
    """

    label: str
    entries: dict[str, Entry]
    unreadable: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    statistics: frozenset[str] | None = None
    received: Callable[[], int] = lambda: 0
    verify: Callable[[], int] = lambda: 0


def nonfinite(values: Tensor) -> int:
    """How many entries are NaN or infinite."""
    if not values.is_floating_point() or values.dtype in EIGHT_BITS:
        return 0
    # A finite sum proves that all are finite; it costs no memory, and a sum that overflows only costs a second look.
    if math.isfinite(values.sum().item()):
        return 0
    return int((~values.isfinite()).sum())
