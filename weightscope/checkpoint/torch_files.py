"""Files of `torch.save`, read without torch's loader: nothing in them is imported or called.

Both layouts are read: the zip archive, and the stream of pickles of torch < 1.6. The pickle is followed as data
(see `weightscope._util.restricted_pickle`), which gives the position of each tensor in the file; tensors are then read
one by one. Memory is that of the tensors asked for, and a pickle that needs code is refused at the first name that it
asks for. A record of a zip archive is compared with its CRC-32 before anything in it is used.
"""

import io
import zipfile
from collections.abc import Mapping
from typing import Any

from weightscope._util.restricted_pickle import run
from weightscope.checkpoint.entries import Entry, FileEntry, Store
from weightscope.checkpoint.files import ByteReader, LocalFile, read_bytes
from weightscope.checkpoint.torch_pickle import LEGACY_MAGIC, Odd, Recording, TorchMachine, View
from weightscope.checkpoint.zip_records import CheckedRecords
from weightscope.errors import DataError, UsageError

_MAX_PICKLE = 64 << 20
_MAX_DIRECTORY = 64 << 20
_LEGACY_START = b"\x80\x02\x8a\n" + LEGACY_MAGIC.to_bytes(10, "little") + b"."
# Keys under which training scripts keep the weights, next to the state of an optimiser.
_ROOTS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")


def open_torch(file: LocalFile, key: str | None = None) -> Store:
    """The tensors of a file of `torch.save`.

    Args:
        file: a zip archive or a stream of pickles.
        key: of the dictionary of weights in a training checkpoint; None: find it.

    Raises:
        DataError: if it is neither, is damaged, or needs code.
        UsageError: if the key does not exist.
    """
    start = read_bytes(file, 0, min(file.size, 512))
    reader: ByteReader = file
    if start.startswith(b"PK"):
        reader = CheckedRecords(file, _records(file))
        value, places = _from_zip(reader)
    elif start.startswith(_LEGACY_START):
        value, places = _from_stream(file)
    elif start[257:262] == b"ustar" or start.startswith(b"\x80"):
        kind = "a tar file of an early torch"
        if start.startswith(b"\x80"):
            kind = "a bare pickle"
            # What it asks for, if it asks for code, is the more useful error.
            run(TorchMachine(file.where), read_bytes(file, 0, min(file.size, _MAX_PICKLE)), file.where)
        raise DataError(f"{file.where}: {kind} is not read; load it where you trust it and save it with safetensors")
    else:
        raise DataError(f"{file.where}: expected a file of torch.save, found neither a zip archive nor its pickles")
    weights, skipped = _weights(value, key, file.where)
    tensors: dict[str, View] = {}
    for name, item in weights.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise DataError(f"{file.where}: a tensor's name is not printable: {ascii(name)[:100]}")
        if isinstance(item, View):
            tensors[name] = item
        else:
            skipped[name] = item.reason if isinstance(item, Odd) else "no tensor"
    entries: dict[str, Entry] = {name: _entry(name, view, reader, places) for name, view in tensors.items()}
    return Store(file.where, entries, skipped)


def _entry(name: str, view: View, file: ByteReader, places: Mapping[str, tuple[int, int]]) -> FileEntry:
    storage = view.storage
    start, size = places.get(storage.key, (0, -1))
    if storage.dtype is None or size != storage.count * storage.dtype.itemsize:
        found = f"{size} bytes" if size >= 0 else "none"
        raise DataError(
            f"{file.where}: `{name}`: expected a storage of {storage.count} entries of {storage.dtype}, found {found}"
        )
    last = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True)) if 0 not in view.shape else -1
    item = view.dtype.itemsize
    start += view.offset * item
    stop = start + (last + 1) * item
    expected, dense = 1, True
    for n, step in zip(reversed(view.shape), reversed(view.stride), strict=True):
        dense &= n == 1 or step == expected
        expected *= n
    stride = None if dense or last < 0 else view.stride
    kind = str(view.dtype).removeprefix("torch.")
    return FileEntry(name, kind, view.dtype, view.shape, file, start, start if last < 0 else stop, stride)


def check_records(file: LocalFile) -> bool:
    """Compare every record of a file's zip archive with its CRC-32; whether all of them have one.

    Raises:
        DataError: if the archive is damaged; names the record.
    """
    return CheckedRecords(file, _records(file)).check_all()


def _records(file: LocalFile) -> list[zipfile.ZipInfo]:
    _check_directory(file)
    try:
        with zipfile.ZipFile(file.stream()) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, EOFError) as error:
        raise DataError(f"{file.where}: damaged zip archive: {ascii(str(error))[:200]}; download it again") from error


def _from_zip(file: CheckedRecords) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The pickle's value, and storage key -> (position, bytes)."""
    places = file.places
    roots = [name for name in places if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise DataError(
            f"{file.where}: a zip archive, but not of torch.save: expected one data.pkl, found {len(roots)}"
        )
    root = roots[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in places:
        raise DataError(f"{file.where}: TorchScript programs are not read; save its state_dict() with safetensors")
    order = places.get(f"{root}byteorder")
    if order is not None and read_bytes(file, order[0], order[0] + min(order[1], 16)) != b"little":
        raise DataError(f"{file.where}: expected numbers in little-endian order, found another")
    start, size = places[roots[0]]
    if size > _MAX_PICKLE:
        raise DataError(f"{file.where}: its pickle takes {size} bytes, more than {_MAX_PICKLE}; save it as safetensors")
    value = run(TorchMachine(file.where), read_bytes(file, start, start + size), file.where)
    prefix = f"{root}data/"
    return value, {name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)}


def _check_directory(file: LocalFile) -> None:
    """Refuse a directory of records that is too large: zipfile reads all of it into memory first."""
    tail = read_bytes(file, max(0, file.size - (1 << 16) - 100), file.size)
    end, wide = tail.rfind(b"PK\x05\x06"), tail.rfind(b"PK\x06\x06")
    size = int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0
    if wide >= 0:
        size = max(size % (2**32 - 1), int.from_bytes(tail[wide + 40 : wide + 48], "little"))
    if size > _MAX_DIRECTORY:
        raise DataError(f"{file.where}: damaged zip archive: its directory claims {size} bytes; download it again")


def _from_stream(file: LocalFile) -> tuple[Any, dict[str, tuple[int, int]]]:
    """As `_from_zip`, for the layout of torch < 1.6: five pickles, then each storage's count and numbers."""
    stream = io.BytesIO(read_bytes(file, 0, min(file.size, _MAX_PICKLE)))
    sizes: dict[str, int] = {}
    _, version, system, value, keys = (run(Recording(file.where, sizes), stream, file.where) for _ in range(5))
    if version != 1001 or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise DataError(f"{file.where}: expected little-endian numbers of torch's protocol 1001, found another")
    if not isinstance(keys, list) or len(set(map(repr, keys))) != len(keys):
        raise DataError(f"{file.where}: its list of storages is damaged")
    places: dict[str, tuple[int, int]] = {}
    position = stream.tell()
    for key in keys:
        if not isinstance(key, str) or key not in sizes or position + 8 > file.size:
            raise DataError(f"{file.where}: it is truncated, or lists a storage that no tensor uses")
        count = int.from_bytes(read_bytes(file, position, position + 8), "little", signed=True)
        size = count * sizes[key]
        position += 8
        if count < 0 or position + size > file.size:
            raise DataError(f"{file.where}: a storage of {count} entries does not fit into it: it is truncated")
        places[key] = (position, size)
        position += size
    if position != file.size:
        raise DataError(f"{file.where}: {file.size - position} bytes are left over at its end")
    return value, places


def _weights(value: Any, key: str | None, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The dictionary of weights, and why the items next to it are left out."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a dictionary of tensors, found {type(value).__name__.lstrip('_').lower()}")
    inner = {
        name: item for name, item in value.items() if isinstance(item, dict) and any(map(_is_tensor, item.values()))
    }
    if key is not None:
        if key not in inner:
            there = ", ".join(ascii(name) for name in list(inner)[:8]) or "none"
            raise UsageError(f"{where}: no dictionary of tensors {key!r}; expected one of {there}")
    elif any(map(_is_tensor, value.values())) or not inner:
        return value, {}
    else:
        found = [name for name in inner if name in _ROOTS]
        if len(found) != 1 and len(inner) != 1:
            there = ", ".join(ascii(name)[:40] for name in list(inner)[:8])
            raise DataError(f"{where}: found several dictionaries of tensors; choose one with key=: {there}")
        key = found[0] if len(found) == 1 else next(iter(inner))
    beside = {n: f"outside the dictionary of weights, {key!r}" for n in value if isinstance(n, str) and n != key}
    return inner[key], beside


def _is_tensor(value: Any) -> bool:
    return isinstance(value, View | Odd)
