"""Tensors of a checkpoint: what is known of each without reading it, and how it is read, from a file or from memory."""

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util import npz
from weightscope._util.environment import available_memory
from weightscope.errors import DataError, UsageError

# Data types of safetensors that torch has.
SAFETENSORS_TYPES = {f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)}
SAFETENSORS_TYPES |= {f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)}
SAFETENSORS_TYPES |= {f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)}
SAFETENSORS_TYPES |= {"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64}
SAFETENSORS_TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz}
SAFETENSORS_TYPES |= {"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}

# Data types of tensors that count as weights.
WEIGHTS = {dtype for dtype in SAFETENSORS_TYPES.values() if dtype.is_floating_point}
_LONGEST_NAME = 4096  # characters

# Hints that the finders of anatomy ask for; a module keeps them as attributes where a file has them in its config.
_HINTS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "num_key_value_heads")


@dataclass(frozen=True)
class FileCheck:
    """What is known of one file's integrity."""

    name: str
    status: Literal["verified", "unverified", "damaged"]  # unverified: not compared as a whole
    compared: str = ""  # with what: sha256, sha1, crc32, or nothing
    detail: str = ""  # why it is unverified or damaged, and what to do


def printable(name: Any, where: str) -> str:
    """A tensor's name, checked: it is printed, and control characters could rewrite the terminal.

    Numbers in it are read, which Python does up to 4,300 digits.
    """
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise DataError(f"{where}: a tensor's name is empty, too long or not printable: {ascii(name)[:100]}")
    return name


class SafetensorsTensor:
    """A tensor in a safetensors file, read when it is asked for."""

    def __init__(self, name: str, file: Any, where: str) -> None:
        header = file.get_slice(name)
        self.name, self._file, self._where = printable(name, where), file, where
        self.kind, self.shape = header.get_dtype(), tuple(header.get_shape())
        self.dtype = SAFETENSORS_TYPES.get(self.kind)
        bits = 8 if self.kind == "BOOL" else int(re.findall(r"\d+", self.kind)[0])  # F32, BF16, F8_E4M3
        self.nbytes = math.prod(self.shape) * bits // 8
        self.identity: Hashable = name  # equal for two names of one tied tensor

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """The tensor (`wide`: of half or quarter precision as float32), and its number of NaN and infinite entries."""
        if self.dtype is None:
            raise DataError(f"{self._where}: `{self.name}`: torch has no data type {self.kind}, so it cannot be read")
        try:
            out = self._file.get_tensor(self.name).to(_width(self.dtype, wide), copy=True)
        except (RuntimeError, MemoryError) as error:  # what torch raises when memory is short
            raise DataError(f"{self._where}: `{self.name}`: {' '.join(str(error).split())[:200]}") from error
        return out, _nonfinite(out)


class MemoryTensor:
    """A tensor in memory, or of a mapped torch file; attributes and methods as `SafetensorsTensor`."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self._tensor = name, tensor
        self.kind, self.dtype = str(tensor.dtype).removeprefix("torch."), tensor.dtype
        self.shape, self.nbytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
        self.identity: Hashable = id(tensor)
        if not tensor.is_meta and tensor.numel():
            self.identity = (tensor.data_ptr(), tensor.dtype, self.shape, tensor.stride())

    def read(self, wide: bool) -> tuple[Tensor, int]:
        if self._tensor.is_meta:
            raise DataError(f"`{self.name}` is on the meta device and holds no numbers; materialise the model first")
        options: Any = {"copy": True, "memory_format": torch.contiguous_format}
        out = self._tensor.detach().to("cpu", _width(self.dtype, wide), **options)
        return out, _nonfinite(out)


class NpzTensor:
    """An array of a file of `numpy.savez`, expanded when it is read; attributes and methods as `SafetensorsTensor`."""

    def __init__(self, name: str, archive: zipfile.ZipFile, array: npz.Stored) -> None:
        self.name, self._archive, self._array = name, archive, array
        self._native = array.dtype.newbyteorder("=")
        self.dtype = torch.from_numpy(np.empty(0, self._native)).dtype
        self.kind, self.shape = str(self.dtype).removeprefix("torch."), array.shape
        self.nbytes, self.identity = math.prod(array.shape) * array.dtype.itemsize, array.entry.header_offset

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """See `SafetensorsTensor.read`; DataError if the memory left cannot hold it and what is computed from it."""
        if 2 * self.nbytes > (free := available_memory()):
            raise DataError(f"{self._array.where}: expands to {self.nbytes:,} bytes; only {free:,} are free")
        with npz_errors(self._array.where):
            found = npz.values(self._archive, self._array).astype(self._native, order="C", copy=False)
        out = torch.from_numpy(found).to(_width(self.dtype, wide))
        return out, _nonfinite(out)


@contextmanager
def npz_errors(where: str) -> Iterator[None]:
    """DataError for what zipfile and NumPy raise when a file is not one of `numpy.savez`."""
    try:
        yield
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{where}: expected a file of numpy.savez, found a damaged or another one ({error})") from error


StoredTensor = SafetensorsTensor | MemoryTensor | NpzTensor


@dataclass
class Store:
    """The contents of an opened checkpoint."""

    label: str  # name of the checkpoint, for errors
    tensors: dict[str, StoredTensor]
    unreadable: dict[str, str] = field(default_factory=dict)  # name -> why it is not among the tensors
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # free text of the files
    statistics: frozenset[str] | None = None  # names known to be buffers; None if unknown
    files: Any = None  # the `Folder` that they are in; None in memory


def open_module(module: nn.Module) -> Store:
    """The state dict of a module, with its configuration where it has one."""
    store = open_mapping(module.state_dict(keep_vars=True), type(module).__name__)
    store.statistics = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    store.config = dict(config if isinstance(config, Mapping) else _hints(module))
    return store


def open_mapping(tensors: Mapping[str, Any], label: str = "state dict", key: str | None = None) -> Store:
    """The tensors of a mapping, or of the mapping under a key in it."""
    config = dict(getattr(tensors, "config", None) or {})
    tensors, beside = weights_in(tensors, key, label, lambda value: isinstance(value, Tensor))
    if not all(isinstance(name, str) for name in tensors):
        raise DataError(f"{label}: expected names of tensors as keys, found other keys")
    others = {name: why for name, value in tensors.items() if (why := odd(value))}
    if tensors and not any(isinstance(value, Tensor) for value in tensors.values()):
        there = ", ".join(list(tensors)[:6])
        raise DataError(f"{label}: expected a mapping of names to tensors, found none under {there}")
    found: dict[str, StoredTensor] = {n: MemoryTensor(n, t) for n, t in tensors.items() if n not in others}
    return Store(label, found, others | beside, config)


def weights_in(
    value: Any, key: str | None, where: str, is_tensor: Callable[[Any], bool]
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The dictionary of weights, and why the items next to it are left out."""
    if not isinstance(value, Mapping):
        what = "one tensor" if is_tensor(value) else type(value).__name__.lower()
        raise DataError(f"{where}: expected a dictionary of tensors, found {what}")
    counts = {n: sum(map(is_tensor, item.values())) for n, item in value.items() if isinstance(item, Mapping)}
    inner = {n: value[n] for n, count in counts.items() if count}
    if key is not None:
        if key not in inner:
            there = f"expected one of {', '.join(ascii(name) for name in list(inner)[:8])}" if inner else "found none"
            raise UsageError(f"{where}: no dictionary of tensors {key!r}; {there}")
    else:
        found = [name for name in inner if name in _ROOTS]
        objects = [n for n in _ROOTS if not isinstance(value.get(n), Mapping | Tensor | _DATA)]
        if objects and not found:  # a pickled module: other tensors are not the weights
            raise DataError(
                f"{where}: expected a dictionary of tensors under {objects[0]!r}, found an object of "
                f"{type(value[objects[0]]).__name__}; save its state_dict(), or choose another dictionary with key="
            )
        loose = sum(map(is_tensor, value.values()))  # a loss beside the dictionary of weights is fewer than it has
        if loose >= max(counts.values(), default=0):
            if found:
                raise DataError(
                    f"{where}: found {loose} tensors beside the dictionary {found[0]!r} of {counts[found[0]]}; choose "
                    f"with key={found[0]}, or save what is meant by itself"
                )
            return value, {n: f"outside the weights: a dictionary of {counts[n]} tensors; key= reads it" for n in inner}
        if len(found) != 1 and len(inner) != 1:
            there = ", ".join(ascii(name)[:40] for name in list(inner)[:8])
            raise DataError(f"{where}: found several dictionaries of tensors; choose one with key=: {there}")
        key = found[0] if len(found) == 1 else next(iter(inner))
    beside = [n for n in value if isinstance(n, str) and n != key and n not in inner[key]]
    return inner[key], dict.fromkeys(beside, f"outside the dictionary of weights, {key!r}")


def odd(value: Any) -> str:
    """Why a value is not a strided tensor; empty if it is."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, no tensor"
    if value.is_quantized or value.is_nested or value.layout != torch.strided:
        return f"a {'quantised' if value.is_quantized else 'nested' if value.is_nested else 'sparse'} tensor"
    return ""


# Keys under which training scripts keep the weights, next to the state of an optimiser.
_ROOTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
_DATA = str | bytes | int | float | list | tuple | None  # what else may be under these keys: the name of a model
# Quantised layers keep scales, zero points and permutations under these names, next to `weight`.
_QUANTISED_PARTS = ("scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point")


def not_weights(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Name -> why a tensor, with `dtype`, is not a weight, or not one without the tensors next to it."""
    out = {}
    for name, entry in tensors.items():
        kind = getattr(entry, "kind", None) or str(entry.dtype).removeprefix("torch.")
        if isinstance(entry, Tensor) and (why := odd(entry)):
            out[name] = why
        elif entry.dtype is None:
            out[name] = f"stored as {kind}, for which torch has no data type"
        elif entry.dtype not in WEIGHTS:
            what = "complex" if entry.dtype.is_complex else "integers or quantised numbers"
            out[name] = f"{what} ({kind}), not weights; `raw` reads them"
        elif entry.dtype.itemsize == 1 and (scale := {f"{name}_scale", f"{name}_scale_inv"} & tensors.keys()):
            out[name] = f"{kind}, to be multiplied by the scales in `{scale.pop()}`; `raw` reads it"
    for name in tensors:
        if name not in out and (owner := _owner(name, out)):
            out[name] = f"belongs to the quantised `{owner}`"
    return out


def _owner(name: str, skipped: Mapping[str, str]) -> str | None:
    """The quantised tensor that a tensor of scales or the like belongs to."""
    path, _, last = name.rpartition(".")
    if last in _QUANTISED_PARTS:
        return next((f"{path}.{own}" for own in ("weight", "qweight") if f"{path}.{own}" in skipped), None)
    while path and path not in skipped:  # bitsandbytes: fc.weight.absmax belongs to fc.weight
        path = path.rpartition(".")[0]
    return path or None


def _hints(module: nn.Module) -> Iterator[tuple[str, int]]:
    for key in _HINTS:
        found = {v for m in module.modules() if type(v := getattr(m, key, None)) is int}
        if len(found) == 1:  # where layers differ, one number would be wrong for some
            yield key, found.pop()


def _width(dtype: torch.dtype, wide: bool) -> torch.dtype:
    """The data type in which a tensor is read."""
    return torch.float32 if wide and dtype in WEIGHTS and dtype.itemsize < 4 else dtype


def _nonfinite(values: Tensor) -> int:
    """The number of entries that are NaN or infinite."""
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        return 0
    # A finite sum proves that all entries are finite, without extra memory; a sum that overflows proves nothing.
    if math.isfinite(values.sum().item()):
        return 0
    return int((~values.isfinite()).sum())
