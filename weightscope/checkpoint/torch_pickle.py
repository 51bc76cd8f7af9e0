"""The pickle inside a file of `torch.save`, followed as data: nested dictionaries of views into storages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightscope._util.restricted_pickle import Call, Machine
from weightscope.errors import DataError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = {"torch.storage UntypedStorage", "torch UntypedStorage"}
_DTYPES = {f"torch {str(d).removeprefix('torch.')}": d for d in {*_STORAGES.values()} | {torch.uint16, torch.uint32}}
_DTYPES |= {f"torch {name}": getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "uint64")}
_DICTS = {"collections OrderedDict", "collections Counter"}
_TENSORS = {"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"}
_PARAMETERS = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"}
# Builders of tensors that are not strided arrays: such tensors are skipped, with this reason.
_ODD = {
    "torch._utils _rebuild_qtensor": "quantised",
    "torch._utils _rebuild_sparse_tensor": "sparse",
    "torch._utils _rebuild_sparse_csr_tensor": "sparse",
    "torch._utils _rebuild_nested_tensor": "nested",
    "torch._utils _rebuild_meta_tensor_no_storage": "on the meta device, without numbers",
}
_HARMLESS = {
    *("torch device", "torch Size", "torch.serialization _get_layout", "torch.nn.parameter Parameter"),
    *("torch per_tensor_affine", "torch per_channel_affine", "torch Tensor", "torch._tensor Tensor", "_codecs encode"),
}
_QUANTISED = {f"torch {name}Storage" for name in ("QInt8", "QUInt8", "QInt32")}
_ALLOWED = frozenset(
    {*_DTYPES, *_UNTYPED, *_DICTS, *_TENSORS, *_PARAMETERS, *_ODD, *_HARMLESS, *_QUANTISED}
    | {f"torch {name}" for name in _STORAGES}
    | {f"torch.storage {name}" for name in ("TypedStorage", "_LegacyStorage")}
)


@dataclass(frozen=True)
class Storage:
    """The numbers in one record of a file; `dtype` is None if they are quantised."""

    key: str
    dtype: torch.dtype | None
    count: int


@dataclass(frozen=True)
class View:
    """A tensor: entries of a storage, counted in `dtype`."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Odd:
    """A tensor that is not a strided array, and why."""

    reason: str


class TorchMachine(Machine):
    """Follows what `torch.save` writes for nested dictionaries of tensors."""

    def __init__(self, where: str) -> None:
        super().__init__(_ALLOWED)
        self.where = where

    def name(self, name: str) -> None:
        """Push a function, or refuse it by its name."""
        if name not in self.allowed:
            shown = ascii(name.replace(" ", "."))[1:-1][:200]
            what = "a whole pickled module, or code" if not name.startswith("numpy") else "more than tensors"
            raise DataError(
                f"{self.where}: its pickle needs {shown}, which is not run: it holds {what}; "
                "save model.state_dict() with safetensors.torch.save_file and read that"
            )
        super().name(name)

    def compound(self, operation: str, argument: Any) -> None:
        """See `Machine.compound`; also persistent ids, which denote storages, and sets, which are ignored later."""
        match operation:
            case "BINPERSID":
                self.stack.append(_storage(*self.take(1)))
            case "EMPTY_SET":
                self.stack.append([])
            case "ADDITEMS":
                self.extend(self.since_mark())
            case "FROZENSET":
                self.stack.append(self.since_mark())
            case "POP":
                self.take(1)
            case _:
                super().compound(operation, argument)

    def call(self) -> None:
        """Replace the calls that make tensors and dictionaries by their results."""
        super().call()
        self.stack[-1] = _made(self.stack[-1].name, self.stack[-1].arguments)

    def build(self) -> None:
        """Drop a state; that of an OrderedDict holds the versions of its modules."""
        (state,) = self.take(1)
        if not isinstance(self.stack[-1], dict | View | Odd | Call) or not isinstance(state, dict | tuple):
            raise ValueError("it sets the state of something that has none")


def _storage(identity: Any) -> Storage:
    match identity:
        case ("storage", Call(kind, None), str(key), str(), int(count), *view) if count >= 0 and view in ([], [None]):
            name = kind.rpartition(" ")[2]
            if kind in _UNTYPED:
                return Storage(key, torch.uint8, count)
            if kind in _QUANTISED or name in _STORAGES:
                return Storage(key, _STORAGES.get(name), count)
    raise ValueError("it asks for something that is not a storage of numbers")


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """The result of a call, as far as this reader needs it."""
    if name in _DICTS:
        return _dictionary(arguments)
    if name in _TENSORS:
        return _view(name, arguments)
    if name in _PARAMETERS and arguments and isinstance(arguments[0], View | Odd):
        return arguments[0]
    if name in _ODD:
        return Odd(f"a {_ODD[name]} tensor")
    if name == "torch Size" and len(arguments) == 1 and isinstance(arguments[0], tuple | list):
        return tuple(arguments[0])
    return Call(name, ())


def _dictionary(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    match arguments:
        case ():
            return {}
        case (dict(items),):
            return dict(items)
        case (list(pairs),):
            machine = Machine(frozenset())
            machine.stack.append({})
            for pair in pairs:
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise ValueError("it makes a dictionary of something other than pairs")
                machine.put(list(pair))
            return machine.stack[0]
    raise ValueError("it makes a dictionary of something unknown")


def _view(name: str, arguments: tuple[Any, ...]) -> View | Odd:
    match arguments:
        case (Storage() as storage, int(offset), tuple(shape), tuple(stride), *rest):
            dtype = storage.dtype
            if name.endswith("_v3"):
                given = rest[2] if len(rest) > 2 else None
                dtype = _DTYPES.get(given.name) if isinstance(given, Call) else None
                if dtype is None:
                    return Odd("a tensor of an unknown data type")
        case _:
            raise ValueError("it builds a tensor of something that is not a storage")
    if dtype is None or storage.dtype is None:
        return Odd("a quantised tensor")
    if len(shape) != len(stride) or offset < 0 or not all(type(n) is int and n >= 0 for n in (*shape, *stride)):
        raise ValueError(f"it builds a tensor of shape {ascii(shape)[:80]} and stride {ascii(stride)[:80]}")
    room = storage.count * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if math.prod(max(n, 1) for n in shape) >= 2**62 or (0 not in shape and last >= room):
        raise ValueError(f"it builds a tensor of shape {ascii(shape)[:80]} outside its storage of {room} entries")
    if math.prod(shape) > room:
        return Odd("expanded: it has more entries than its storage")
    return View(storage, dtype, offset, shape, stride)


class Recording(TorchMachine):
    """Also records how many bytes an entry of each storage takes."""

    def __init__(self, where: str, sizes: dict[str, int]) -> None:
        super().__init__(where)
        self.sizes = sizes

    def compound(self, operation: str, argument: Any) -> None:
        """See `TorchMachine.compound`."""
        super().compound(operation, argument)
        if operation == "BINPERSID":
            storage = self.stack[-1]
            item = storage.dtype.itemsize if storage.dtype is not None else 1
            if self.sizes.setdefault(storage.key, item) != item:
                raise ValueError("it gives one storage two data types")
