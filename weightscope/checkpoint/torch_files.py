"""Files of `torch.save`, read as data: nothing in them is imported or called.

Both layouts are read: the zip archive, and the stream of pickles of torch < 1.6. The pickle gives the place of each
tensor in the file, and tensors are read one by one, so that memory is that of the tensors asked for. A pickle that
needs code is refused at the first name that it asks for. A record of a zip archive is compared
with its CRC-32 before anything in it is used.
"""

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from weightscope._util.restricted_pickle import Call, DataUnpickler, Entries, run
from weightscope.checkpoint.tensors import ByteReader, FileTensor, LocalFile, Store, StoredTensor, printable, read_bytes
from weightscope.errors import DataError, UsageError

_MAX_PICKLE = 64 << 20
_PIECE = 1 << 20
_LEGACY_START = b"\x80\x02\x8a\n" + 0x1950A86A20F9469CFC6C.to_bytes(10, "little") + b"."
# Keys under which training scripts keep the weights, next to the state of an optimiser.
_ROOTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")

# torch's own names for its data types: torch.half is the one of HalfStorage.
_NUMBERS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
_STORAGES: dict[str, torch.dtype] = {f"{name}Storage": getattr(torch, name.lower()) for name in _NUMBERS}
_STORAGES |= {"CharStorage": torch.int8, "ByteStorage": torch.uint8}
_STORAGES |= {"ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128}
_UNTYPED = {"torch.storage UntypedStorage", "torch UntypedStorage"}
_OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {str(dtype).replace(".", " "): dtype for dtype in (*_STORAGES.values(), *_OTHERS)}
_DICTS = {"collections OrderedDict", "collections Counter"}
_TENSORS = {f"torch._utils _rebuild_tensor{suffix}" for suffix in ("", "_v2", "_v3")}
_PARAMETERS = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"}
# Builders of tensors that are not strided arrays: such tensors are skipped, with this reason.
_ODD = {"torch._utils _rebuild_qtensor": "quantised", "torch._utils _rebuild_nested_tensor": "nested"}
_ODD |= {f"torch._utils _rebuild_sparse_{name}tensor": "sparse" for name in ("", "csr_")}
_ODD |= {"torch._utils _rebuild_meta_tensor_no_storage": "on the meta device, without numbers"}
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
class _Storage:
    """The numbers in one record of a file; `dtype` is None if they are quantised."""

    key: str
    dtype: torch.dtype | None
    count: int


@dataclass(frozen=True)
class _View:
    """A tensor: entries of a storage, counted in `dtype`."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Entries of the storage from its first to its last one; 0 if it is empty."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else last + 1


@dataclass(frozen=True)
class _Odd:
    """A tensor that is not a strided array, and why."""

    reason: str


class _TorchUnpickler(DataUnpickler):
    """Builds what `torch.save` writes: nested dictionaries of views into storages."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(file, _ALLOWED)
        self.where = where
        self.widths: dict[str, int] = {}  # key of a storage -> bytes of one entry

    def find_class(self, module: str, name: str) -> Any:
        """The function as data, or DataError with its name."""
        if f"{module} {name}" not in self.allowed:
            what = "more than tensors" if module.startswith("numpy") else "a whole pickled module, or code"
            raise DataError(
                f"{self.where}: its pickle needs {ascii(f'{module}.{name}')[1:-1][:200]}, which is not run: it holds "
                f"{what}; save model.state_dict() with safetensors.torch.save_file and read that"
            )
        return Call(f"{module} {name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a persistent id denotes."""
        match pid:
            case ("storage", Call(kind, None), str(key), str(), int(count), *view) if view in ([], [None]):
                dtype = torch.uint8 if kind in _UNTYPED else _STORAGES.get(kind.rpartition(" ")[2])
                width = dtype.itemsize if dtype else 1
                if count >= 0 and (dtype or kind in _QUANTISED):
                    if self.widths.setdefault(key, width) != width:
                        raise ValueError("it gives one storage two data types")
                    return _Storage(key, dtype, count)
        raise ValueError("it asks for something that is not a storage of numbers")

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The tensor or the dictionary that a call makes."""
        if name in _DICTS:
            out = Entries()
            if len(arguments) > 1 or not isinstance(pairs := arguments[0] if arguments else {}, dict | list):
                raise ValueError("it makes a dictionary of something unknown")
            for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
                out[key] = value
            return out
        if name in _TENSORS:
            return _view(name, arguments)
        if name in _PARAMETERS and arguments and isinstance(arguments[0], _View | _Odd):
            return arguments[0]
        if name in _ODD:
            return _Odd(f"a {_ODD[name]} tensor")
        if name == "torch Size" and len(arguments) == 1 and isinstance(arguments[0], tuple | list):
            return tuple(arguments[0])
        return Call(name, ())

    def set_state(self, item: Any, state: Any) -> None:
        """Drop a state; that of an OrderedDict holds the versions of its modules."""
        if not isinstance(item, dict | _View | _Odd | Call) or not isinstance(state, dict | tuple):
            raise ValueError("it sets the state of something that has none")


def _view(name: str, arguments: tuple[Any, ...]) -> _View | _Odd:
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(stride), *rest):
            dtype = storage.dtype
            if name.endswith("_v3"):
                given = rest[2] if len(rest) > 2 else None
                dtype = _DTYPES.get(given.name) if isinstance(given, Call) else None
                if dtype is None:
                    return _Odd("a tensor of an unknown data type")
        case _:
            raise ValueError("it builds a tensor of something that is not a storage")
    if dtype is None or storage.dtype is None:
        return _Odd("a quantised tensor")
    shown = f"it builds a tensor of shape {ascii(shape)[:80]}"
    if len(shape) != len(stride) or offset < 0 or not all(type(n) is int and n >= 0 for n in (*shape, *stride)):
        raise ValueError(f"{shown} and stride {ascii(stride)[:80]}")
    room, view = storage.count * storage.dtype.itemsize // dtype.itemsize, _View(storage, dtype, offset, shape, stride)
    if math.prod(max(n, 1) for n in shape) >= 2**62 or (view.span and offset + view.span > room):
        raise ValueError(f"{shown} outside its storage of {room} entries")
    return _Odd("expanded: it has more entries than its storage") if math.prod(shape) > room else view


class _Record:
    """An uncompressed record of a zip archive, a `ByteReader`, compared with its CRC-32 before it is read."""

    def __init__(self, file: LocalFile, info: zipfile.ZipInfo) -> None:
        self.where = f"{file.where}: its record {ascii(info.orig_filename)[1:-1][:100]}"
        self.size = info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise DataError(f"{self.where} is compressed or encrypted, which torch.save never does")
        header = file.size if info.header_offset + 30 > file.size else info.header_offset
        local = read_bytes(file, header, min(header + 30, file.size))
        self._start = header + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        if local[:4] != b"PK\x03\x04" or info.compress_size != self.size or self._start + self.size > file.size:
            raise DataError(f"{self.where} is damaged or truncated; download it again")
        self._file = file
        self._crc = info.CRC
        self.has_crc = bool(info.CRC)  # not with torch.serialization.set_crc32_options(False)
        self._compared = not self.has_crc

    def part(self, start: int, stop: int) -> "_Record":
        if not self._compared:
            found, buffer = 0, memoryview(bytearray(min(_PIECE, self.size)))
            for first in range(0, self.size, _PIECE):
                piece = buffer[: self.size - first]
                self.read_into(piece, first)
                found = zlib.crc32(piece, found)
            self._file.bytes_read -= self.size  # it was not asked for
            if found != self._crc:
                mismatch = f"checksum mismatch: expected CRC-32 {self._crc:08x}, found {found:08x}"
                raise DataError(f"{self.where}: {mismatch}; download it again")
            self._compared = True
        return self

    def read_into(self, buffer: memoryview, start: int) -> None:
        self._file.read_into(buffer, self._start + start)


def _records(file: LocalFile) -> dict[str, _Record]:
    """The records of a zip archive by name."""
    try:
        with zipfile.ZipFile(file.stream) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, EOFError) as error:
        reason = ascii(str(error))[1:-1][:200]
        raise DataError(f"{file.where}: damaged zip archive: {reason}; download it again") from error
    records = {info.orig_filename: _Record(file, info) for info in infos}
    if len(records) != len(infos):
        raise DataError(f"{file.where}: damaged zip archive: two records have one name; download it again")
    return records


def check_records(file: LocalFile) -> bool:
    """Compare every record of a file's zip archive with its CRC-32; whether all of them have one."""
    records = _records(file).values()
    checked = all(record.has_crc or not record.size for record in records)
    for record in records:
        record.part(0, record.size)
    return checked


def open_torch(file: LocalFile, key: str | None = None) -> Store:
    """The tensors of a file of `torch.save`; `key` names the dictionary of weights in a training checkpoint."""
    start = read_bytes(file, 0, min(file.size, 512))
    if start.startswith(b"PK"):
        value, places = _from_zip(file)
    elif start.startswith(_LEGACY_START):
        value, places = _from_stream(file)
    elif start[257:262] == b"ustar" or start.startswith(b"\x80"):
        kind = "a tar file of an early torch"
        if start.startswith(b"\x80"):
            kind = "a bare pickle"
            # What it asks for, if it asks for code, is the more useful error.
            _unpickled(file, 0, min(file.size, _MAX_PICKLE), file.where)
        raise DataError(f"{file.where}: {kind} is not read; load it where you trust it and save it with safetensors")
    else:
        raise DataError(
            f"{file.where}: expected a file of torch.save, found neither a zip archive nor its pickles; "
            "of a model converted for CTranslate2 or another program, open the original"
        )
    weights, skipped = _weights(value, key, file.where)
    tensors: dict[str, StoredTensor] = {}
    for name, item in weights.items():
        printable(name, file.where)
        if isinstance(item, _View):
            tensors[name] = _tensor(name, item, places, file.where)
        else:
            skipped[name] = item.reason if isinstance(item, _Odd) else "no tensor"
    return Store(file.where, tensors, skipped)


_Places = dict[str, tuple[ByteReader, int, int]]  # key of a storage -> where it is: reader, start, number of bytes


def _tensor(name: str, view: _View, places: _Places, where: str) -> FileTensor:
    storage = view.storage
    reader, start, size = places.get(storage.key, (None, 0, -1))
    if reader is None or storage.dtype is None or size != storage.count * storage.dtype.itemsize:
        expected, found = f"{storage.count} entries of {storage.dtype}", f"{size} bytes" if size >= 0 else "none"
        raise DataError(f"{where}: `{name}`: expected a storage of {expected}, found {found}")
    # A row-major tensor needs no stride: that of an axis is the number of entries after it.
    dense = all(n == 1 or view.stride[i] == math.prod(view.shape[i + 1 :]) for i, n in enumerate(view.shape))
    start += view.offset * view.dtype.itemsize
    kind, stop = str(view.dtype).removeprefix("torch."), start + view.span * view.dtype.itemsize
    stride = None if dense or not view.span else view.stride
    return FileTensor(name, kind, view.dtype, view.shape, reader, start, stop, stride)


def _unpickled(file: ByteReader, start: int, stop: int, where: str) -> Any:
    return run(_TorchUnpickler(io.BytesIO(read_bytes(file, start, stop)), where), where)


def _from_zip(file: LocalFile) -> tuple[Any, _Places]:
    """The pickle's value, and where the storages are."""
    records = _records(file)
    roots = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise DataError(f"{file.where}: a zip archive, not of torch.save: expected one data.pkl, found {len(roots)}")
    root, code = roots[0].removesuffix("data.pkl"), records[roots[0]]
    if f"{root}constants.pkl" in records:
        raise DataError(f"{file.where}: TorchScript programs are not read; save its state_dict() with safetensors")
    order = records.get(f"{root}byteorder")
    if order is not None and read_bytes(order, 0, min(order.size, 16)) != b"little":
        raise DataError(f"{file.where}: expected numbers in little-endian order, found another")
    if code.size > _MAX_PICKLE:
        raise DataError(f"{code.where} takes {code.size} bytes, more than {_MAX_PICKLE}; save it as safetensors")
    prefix = f"{root}data/"
    places: _Places = {n.removeprefix(prefix): (r, 0, r.size) for n, r in records.items() if n.startswith(prefix)}
    return _unpickled(code, 0, code.size, file.where), places


def _from_stream(file: LocalFile) -> tuple[Any, _Places]:
    """As `_from_zip`, for the layout of torch < 1.6: five pickles, then each storage's count and numbers."""
    stream = io.BytesIO(read_bytes(file, 0, min(file.size, _MAX_PICKLE)))
    unpicklers = [_TorchUnpickler(stream, file.where) for _ in range(5)]
    _, version, system, value, keys = (run(unpickler, file.where) for unpickler in unpicklers)
    if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise DataError(f"{file.where}: expected little-endian numbers of torch's protocol 1001, found another")
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or len(set(keys)) != len(keys):
        raise DataError(f"{file.where}: its list of storages is damaged")
    widths, places, position = unpicklers[3].widths, _Places(), stream.tell()
    for key in keys:
        if key not in widths or position + 8 > file.size:
            raise DataError(f"{file.where}: it is truncated, or lists a storage that no tensor uses")
        count = int.from_bytes(read_bytes(file, position, position + 8), "little", signed=True)
        size = count * widths[key]
        position += 8
        if count < 0 or position + size > file.size:
            raise DataError(f"{file.where}: a storage of {count} entries does not fit into it: it is truncated")
        places[key] = (file, position, size)
        position += size
    if position != file.size:
        raise DataError(f"{file.where}: {file.size - position} bytes are left over at its end")
    return value, places


def _weights(value: Any, key: str | None, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The dictionary of weights, and why the items next to it are left out."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a dictionary of tensors, found {type(value).__name__.lstrip('_').lower()}")
    inner = {name: item for name, item in value.items() if isinstance(item, dict) and _has_tensors(item)}
    if key is not None:
        if key not in inner:
            there = ", ".join(ascii(name) for name in list(inner)[:8]) or "none"
            raise UsageError(f"{where}: no dictionary of tensors {key!r}; expected one of {there}")
    elif _has_tensors(value) or not inner:
        return value, {}
    else:
        found = [name for name in inner if name in _ROOTS]
        if len(found) != 1 and len(inner) != 1:
            there = ", ".join(ascii(name)[:40] for name in list(inner)[:8])
            raise DataError(f"{where}: found several dictionaries of tensors; choose one with key=: {there}")
        key = found[0] if len(found) == 1 else next(iter(inner))
    beside = {n: f"outside the dictionary of weights, {key!r}" for n in value if isinstance(n, str) and n != key}
    return inner[key], beside


def _has_tensors(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, _View | _Odd) for item in value.values())
