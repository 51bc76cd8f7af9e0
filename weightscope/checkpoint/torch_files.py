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
from typing import Any, BinaryIO

import torch

from weightscope._util.restricted_pickle import Call, DataUnpickler
from weightscope.checkpoint.tensors import (
    ByteReader,
    FileTensor,
    LocalFile,
    Store,
    StoredTensor,
    natural,
    printable,
    read_bytes,
    weights_in,
)
from weightscope.errors import DataError

_MAX_PICKLE = 64 << 20
_EXPANDS = 2  # times that views of one storage may be larger than the file
_PIECE = 1 << 20
_MOST_KEPT = 1 << 16
_LAST: dict[bytes, Any] = {}  # pickle -> its value, of one file: networks that differ in their numbers have the same
_LEGACY_START = b"\x80\x02\x8a\n" + 0x1950A86A20F9469CFC6C.to_bytes(10, "little") + b"."

# torch's own names for its data types: torch.half is the one of HalfStorage.
_NUMBERS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
_STORAGES: dict[str, torch.dtype | None] = {f"torch {name}Storage": getattr(torch, name.lower()) for name in _NUMBERS}
_STORAGES |= {"torch CharStorage": torch.int8, "torch ByteStorage": torch.uint8}
_STORAGES |= {"torch ComplexFloatStorage": torch.complex64, "torch ComplexDoubleStorage": torch.complex128}
_STORAGES |= {"torch.storage UntypedStorage": torch.uint8, "torch UntypedStorage": torch.uint8}
_OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {str(dtype).replace(".", " "): dtype for dtype in (*_STORAGES.values(), *_OTHERS)}
_STORAGES |= dict.fromkeys(f"torch {name}Storage" for name in ("QInt8", "QUInt8", "QInt32"))  # quantised
_PARAMETERS = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"}
# Functions that build tensors, and why what they build is not read, for those that are not strided arrays.
_TENSORS = {f"torch._utils _rebuild_tensor{suffix}": "" for suffix in ("", "_v2", "_v3")}
_TENSORS |= {
    "torch._utils _rebuild_qtensor": "a quantised tensor",
    "torch._utils _rebuild_nested_tensor": "a nested tensor",
}
_TENSORS |= {f"torch._utils _rebuild_sparse_{name}tensor": "a sparse tensor" for name in ("", "csr_")}
_TENSORS |= {"torch._utils _rebuild_meta_tensor_no_storage": "a tensor on the meta device, without numbers"}
_HARMLESS = {
    *("torch device", "torch Size", "torch.serialization _get_layout", "torch.nn.parameter Parameter"),
    *("torch per_tensor_affine", "torch per_channel_affine", "torch Tensor", "torch._tensor Tensor", "_codecs encode"),
    *("collections OrderedDict", "collections Counter", "torch.storage TypedStorage", "torch.storage _LegacyStorage"),
}
_ALLOWED = frozenset({*_STORAGES, *_DTYPES, *_PARAMETERS, *_TENSORS, *_HARMLESS})
_INSTEAD = (
    "it holds more than tensors: a whole pickled module, or code; save model.state_dict() with "
    "safetensors.torch.save_file and read that"
)


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

    def compare(self) -> None:
        """Compare it with its CRC-32, once."""
        if self._compared:
            return
        found, buffer = 0, memoryview(bytearray(min(_PIECE, self.size)))
        for first in range(0, self.size, _PIECE):
            piece = buffer[: self.size - first]
            self._file.read_into(piece, self._start + first)
            found = zlib.crc32(piece, found)
        if found != self._crc:
            mismatch = f"checksum mismatch: expected CRC-32 {self._crc:08x}, found {found:08x}"
            raise DataError(f"{self.where}: {mismatch}; download it again")
        self._compared = True

    def read_into(self, buffer: memoryview, start: int) -> None:
        self.compare()
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
        record.compare()
    return checked


def open_torch(file: LocalFile, key: str | None = None) -> Store:
    """The tensors of a file of `torch.save`; `key` names the dictionary of weights in a training checkpoint."""
    start = read_bytes(file, 0, min(file.size, len(_LEGACY_START)))
    if start.startswith(b"PK"):
        value, places = _from_zip(file)
    elif start == _LEGACY_START:
        value, places = _from_stream(file)
    else:
        raise DataError(
            f"{file.where}: expected a file of torch.save, found neither a zip archive nor its pickles; of a model "
            "converted for CTranslate2 or another program, open the original; a bare pickle, or a tar file of an early "
            "torch, may run code when it is loaded: load it only if you trust who made it, and save it with safetensors"
        )
    known = {*_TENSORS, *_PARAMETERS}
    weights, skipped = weights_in(value, key, file.where, lambda x: isinstance(x, Call) and x.name in known)
    tensors: dict[str, StoredTensor] = {}
    for name, item in weights.items():
        found = _tensor(printable(name, file.where), item, places, file.where)
        if isinstance(found, str):
            skipped.setdefault(name, found)
        else:
            tensors[name] = found
    size = sum({one.identity: one.nbytes for one in tensors.values()}.values())
    if size > max(_EXPANDS * file.size, 2**26):
        raise DataError(f"{file.where}: its tensors are views of the same bytes, {size:,} of a file of {file.size:,}")
    return Store(file.where, tensors, skipped)


_Places = dict[str, tuple[ByteReader, int, int]]  # key of a storage -> where it is: reader, start, number of bytes


def _unpickler(stream: BinaryIO, where: str) -> DataUnpickler:
    return DataUnpickler(stream, where, _ALLOWED, _INSTEAD)


def _storage(pid: Any, where: str) -> tuple[str, torch.dtype | None, int]:
    """Key, data type (None if quantised) and number of entries of the storage that a persistent id denotes."""
    match pid:
        case Call("", ("storage", Call(kind, None), str(key), str(), int(count), *view)) if view in ([], [None]):
            if kind in _STORAGES and natural(count):
                return key, _STORAGES[kind], count
    raise DataError(f"{where}: its pickle asks for something that is not a storage of numbers")


def _tensor(name: str, item: Any, places: _Places, where: str) -> FileTensor | str:
    """The tensor that a call builds, or why it is not read."""
    if isinstance(item, Call) and item.name in _PARAMETERS and item.arguments:
        item = item.arguments[0]
    if not isinstance(item, Call) or item.name not in _TENSORS:
        return "no tensor"
    if reason := _TENSORS[item.name]:
        return reason
    match item.arguments:
        case (pid, int(offset), tuple(shape), tuple(stride), *rest):
            key, stored, count = _storage(pid, where)
        case _:
            raise DataError(f"{where}: `{name}`: its pickle builds a tensor of something that is not a storage")
    dtype = stored
    if item.name.endswith("_v3"):
        dtype = _DTYPES.get(rest[2].name) if len(rest) > 2 and isinstance(rest[2], Call) else None
    if dtype is None or stored is None:
        return "a quantised tensor" if stored is None else "a tensor of an unknown data type"
    if len(shape) != len(stride) or not all(map(natural, (offset, *shape, *stride))):  # nested ones have no end as text
        raise DataError(f"{where}: `{name}`: its pickle builds a tensor of shape, stride or offset that is none")
    shown = f"{where}: `{name}`: its pickle builds a tensor of shape {ascii(shape)[:80]}"
    room = count * stored.itemsize // dtype.itemsize
    # Entries of the storage from the first to the last one
    span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if math.prod(max(n, 1) for n in shape) >= 2**62 or (span and offset + span > room):
        raise DataError(f"{shown} outside its storage of {room} entries")
    if math.prod(shape) > room:
        return "expanded: it has more entries than its storage"
    reader, start, size = places.get(key, (None, 0, -1))
    if reader is None or size != count * stored.itemsize:
        expected, found = f"{count} entries of {stored}", f"{size} bytes" if size >= 0 else "none"
        raise DataError(f"{where}: `{name}`: expected a storage of {expected}, found {found}")
    # A row-major tensor needs no stride: that of an axis is the number of entries after it.
    dense = all(n == 1 or stride[i] == math.prod(shape[i + 1 :]) for i, n in enumerate(shape))
    start += offset * dtype.itemsize
    kind, stop = str(dtype).removeprefix("torch."), start + span * dtype.itemsize
    return FileTensor(name, kind, dtype, shape, reader, start, stop, None if dense or not span else stride)


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
    text = read_bytes(code, 0, code.size)
    if text not in _LAST:
        value = _unpickler(io.BytesIO(text), file.where).read()
        _LAST.clear()
        if code.size > _MOST_KEPT:
            return value, places
        _LAST[text] = value
    return _LAST[text], places


def _from_stream(file: LocalFile) -> tuple[Any, _Places]:
    """As `_from_zip`, for the layout of torch < 1.6: five pickles, then each storage's count and numbers."""
    stream = io.BytesIO(read_bytes(file, 0, min(file.size, _MAX_PICKLE)))
    unpicklers = [_unpickler(stream, file.where) for _ in range(5)]
    _, version, system, value, keys = (unpickler.read() for unpickler in unpicklers)
    if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise DataError(f"{file.where}: expected little-endian numbers of torch's protocol 1001, found another")
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or len(set(keys)) != len(keys):
        raise DataError(f"{file.where}: its list of storages is damaged")
    storages = (_storage(pid, file.where) for pid in unpicklers[3].ids)
    widths = {key: dtype.itemsize if dtype else 1 for key, dtype, _ in storages}
    places, position = _Places(), stream.tell()
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
