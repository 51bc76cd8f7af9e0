"""Tensors of a checkpoint: what is known of each without reading it, and how it is read, from a file or from memory."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class FileCheck:
    """What is known of one file's integrity."""

    name: str
    status: Literal["verified", "unverified", "damaged"]  # unverified: not compared as a whole
    compared: str = ""  # with what: sha256, sha1, crc32, or nothing
    detail: str = ""  # why it is unverified or damaged, and what to do


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor without reading it, and how it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None if torch does not have it
    load: Callable[[], Tensor]  # as stored; the tensor may share memory with others
    identity: Hashable  # equal for two names of one tied tensor
    where: str = ""  # before the name in errors: "file: "
    stored_as: str = ""  # the name of the file's format for the data type, if it has one

    @property
    def kind(self) -> str:
        """The data type as text."""
        return self.stored_as or str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        # of those that torch does not have the bits are in the name: F4, F6_E2M3
        bits = 8 * self.dtype.itemsize if self.dtype else int(re.findall(r"\d+", self.kind)[0])
        return math.prod(self.shape) * bits // 8

    def read(self, wide: bool) -> tuple[Tensor, int]:
        """A copy (`wide`: of half or quarter precision as float32), and its number of NaN and infinite entries."""
        if self.dtype is None:
            raise DataError(f"{self.where}`{self.name}`: torch has no data type {self.kind}, so it cannot be read")
        options: Any = {"copy": True, "memory_format": torch.contiguous_format}
        try:
            out = self.load().detach().to("cpu", _width(self.dtype, wide), **options)
        except (RuntimeError, MemoryError) as error:  # what torch raises when memory is short
            raise DataError(f"{self.where}`{self.name}`: {' '.join(str(error).split())[:200]}") from error
        return out, _nonfinite(out)

    def changed(self, name: str, change: Callable[[Tensor], Tensor]) -> "StoredTensor":
        """The tensor under another name, changed when it is read; `change` also takes a tensor on the meta device."""
        after = change(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        facts: dict[str, Any] = {"shape": tuple(after.shape), "dtype": after.dtype, "stored_as": ""}
        return replace(self, name=name, load=lambda: change(self.load()), identity=name, **facts)


def in_memory(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor in memory, or of a mapped file."""

    def load() -> Tensor:
        if tensor.is_meta:
            raise DataError(f"`{name}` is on the meta device and holds no numbers; materialise the model first")
        return tensor

    shape, named = tuple(tensor.shape), tensor.is_meta or not tensor.numel()
    identity: Hashable = id(tensor) if named else (tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
    return StoredTensor(name, shape, tensor.dtype, load, identity)


@dataclass
class Store:
    """The contents of an opened checkpoint."""

    label: str  # name of the checkpoint, for errors
    tensors: dict[str, StoredTensor]
    unreadable: dict[str, str] = field(default_factory=dict)  # name -> why it is not among the tensors
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # free text of the files
    statistics: frozenset[str] | None = None  # names known to be buffers; None if unknown
    note: str = ""  # what was chosen where there are several
    files: Any = None  # the `Folder` that they are in; None in memory


def open_module(module: nn.Module) -> Store:
    """The state dict of a module, with its configuration where it has one."""
    store = open_mapping(module.state_dict(keep_vars=True), type(module).__name__)
    store.statistics = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    store.config = dict(config) if isinstance(config, Mapping) else {}
    return store


def open_mapping(tensors: Mapping[str, Any], label: str = "state dict", key: str | None = None) -> Store:
    """The tensors of a mapping, or of the mapping under a key in it."""
    config = dict(getattr(tensors, "config", None) or {})
    tensors, beside, note = weights_in(tensors, key, label)
    if not all(isinstance(name, str) for name in tensors):
        raise DataError(f"{label}: expected names of tensors as keys, found other keys")
    others = {name: why for name, value in tensors.items() if (why := odd(value))}
    if tensors and not _count(tensors):
        there = ", ".join(list(tensors)[:6])
        raise DataError(f"{label}: expected a mapping of names to tensors, found none under {there}")
    found: dict[str, StoredTensor] = {n: in_memory(n, t) for n, t in tensors.items() if n not in others}
    return Store(label, found, others | beside, config, note=note)


def weights_in(value: Any, key: str | None, where: str) -> tuple[Mapping[str, Any], dict[str, str], str]:
    """The dictionary of weights, why the items next to it are left out, and a note if there is another like it."""
    if not isinstance(value, Mapping):
        what = "one tensor" if isinstance(value, Tensor) else type(value).__name__.lower()
        raise DataError(f"{where}: expected a dictionary of tensors, found {what}")
    nested = dict(_nested(value))
    if key is not None and key not in nested:
        what = f"expected one of {_quoted(nested)}" if nested else "found none"
        raise UsageError(f"{where}: no dictionary of tensors {key!r}; {what}")
    chosen = _chosen(value, nested, where) if key is None else key
    if chosen is None:
        weights, why = value, "outside the weights: a dictionary of tensors; --key reads it"
        beside = [name for name in nested if name in value and _count(nested[name])]
    else:
        weights, why = flat(nested[chosen]), f"outside the dictionary of weights, {chosen!r}"
        root = chosen.partition(".")[0]
        beside = [name for name in value if isinstance(name, str) and name != root and name not in weights]
    mine, note = _ends(weights), ""
    like = (name for name in nested if name != chosen and 2 * len(mine & _ends(nested[name])) > len(mine))
    if key is None and (other := next(like, None)):
        read = f"read `{chosen}`; `{other}` is beside it" if chosen else f"read the tensors outside of `{other}`"
        note = f"{read}: --key {other}, in Python key={other!r}"
    return weights, dict.fromkeys(beside, why), note


def _chosen(value: Mapping[Any, Any], nested: Mapping[str, Mapping[str, Any]], where: str) -> str | None:
    """The dictionary of weights in a training checkpoint; None if the tensors beside dictionaries are the weights."""
    counts = {name: count for name, inner in nested.items() if name in value and (count := _count(inner))}
    roots = [name for name in counts if name in _ROOTS]
    objects = [name for name in _ROOTS if not isinstance(value.get(name), Mapping | Tensor | _DATA)]
    if objects and not roots:  # a pickled module: other tensors are not the weights
        raise DataError(
            f"{where}: expected a dictionary of tensors under {objects[0]!r}, found an object of "
            f"{type(value[objects[0]]).__name__}; save its state_dict(), or choose another dictionary {_BY_KEY}"
        )
    loose = _count(value)  # a loss beside the dictionary of weights is fewer than it has
    if nested and not roots and loose <= 1 and not (counts and nested.keys().isdisjoint(_ROOTS)):
        raise DataError(f"{where}: the tensors are nested deeper; choose a dictionary {_BY_KEY}: {_quoted(nested)}")
    if loose >= max(counts.values(), default=0):
        if roots:
            raise DataError(
                f"{where}: found {loose} tensors beside the dictionary {roots[0]!r} of {counts[roots[0]]}; choose it "
                f"{_BY_KEY}, or save what is meant by itself"
            )
        return None
    if len(roots) != 1 and len(counts) != 1:
        raise DataError(f"{where}: found several dictionaries of tensors; choose one {_BY_KEY}: {_quoted(nested)}")
    return roots[0] if len(roots) == 1 else next(iter(counts))


def _count(value: Mapping[Any, Any]) -> int:
    return sum(isinstance(item, Tensor) for item in value.values())


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(ascii(name)[:60] for name in list(names)[:8])


def _nested(value: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted path -> dictionary, of those in a dictionary that have tensors, or dictionaries of tensors, by name."""
    for name, item in value.items():
        if isinstance(name, str) and isinstance(item, Mapping) and all(isinstance(n, str) for n in item):
            inner = list(_nested(item, f"{path}{name}."))
            if inner or _count(item):
                yield f"{path}{name}", item
                yield from inner


def _ends(tensors: Mapping[Any, Any]) -> set[tuple[str, ...]]:
    """The last two parts of the tensors' names, before which wrappers may add others."""
    return {tuple(str(name).split(".")[-2:]) for name, value in tensors.items() if isinstance(value, Tensor)}


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary, with the tensors of dictionaries in it under dotted names."""
    found = [("", value), *((f"{path}.", inner) for path, inner in _nested(value))]
    return {f"{path}{n}": v for path, inner in found for n, v in inner.items() if not isinstance(v, Mapping)}


def odd(value: Any) -> str:
    """Why a value is not a strided tensor; empty if it is."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, no tensor"
    if value.is_quantized or value.is_nested or value.layout != torch.strided:
        return f"a {'quantised' if value.is_quantized else 'nested' if value.is_nested else 'sparse'} tensor"
    return ""


# Keys under which training scripts keep the weights, next to the state of an optimiser.
_ROOTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
_BY_KEY = "with --key (key= in Python)"
_DATA = str | bytes | int | float | list | tuple | None  # what else may be under these keys: the name of a model
# Quantised layers keep scales, zero points and permutations under these names, next to `weight`.
_QUANTISED_PARTS = ("scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "SCB")


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
        return next(
            (f"{path}.{own}" for own in ("weight", "qweight", "weight_packed") if f"{path}.{own}" in skipped), None
        )
    while path and path not in skipped:  # bitsandbytes: fc.weight.absmax belongs to fc.weight
        path = path.rpartition(".")[0]
    return path or None


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
