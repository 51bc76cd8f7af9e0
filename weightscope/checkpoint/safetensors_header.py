"""The header of a safetensors file, accepted only if every byte of the file is accounted for.

A file is 8 bytes (the header's length n, little endian), n bytes of JSON (name -> dtype, shape, offsets), and
the tensors. A valid header covers the rest of the file exactly, without gaps or overlaps.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightscope.errors import DataError

MAX_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""

BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of one entry of each data type of the format."""

_MAX_DIMENSIONS = 64
_MOST_VALUES = 3_000_000  # commas and colons; 200,000 tensors have 2.4 million, and the largest models fewer
_MAX_ENTRIES = 2**62


@dataclass(frozen=True)
class TensorEntry:
    """The position of a tensor in the file.

    Attributes:
        dtype: a key of `BITS`.
        shape: of the tensor.
        start: position of its first byte in the file.
        stop: position after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A valid header.

    Attributes:
        tensors: name -> entry, in the order of the header.
        metadata: name -> free text.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(read: Callable[[int, int], bytes], size: int, where: str) -> Header:
    """Read and check the header of a file.

    Args:
        read: `read(start, stop)` returns those bytes of the file.
        size: of the file, in bytes.
        where: name of the file in errors.

    Raises:
        DataError: if the header is invalid; says why.

    Example:
        >>> raw = open("model.safetensors", "rb").read()
        >>> read_header(lambda start, stop: raw[start:stop], len(raw), "model.safetensors").tensors
    """
    if size < 8:
        raise DataError(f"{where}: expected a safetensors file, found only {size} bytes; download it again")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise DataError(
            f"{where}: its header claims {length} bytes, in a file of {size}; it is truncated or not a safetensors file"
        )
    return parse_header(read(8, 8 + length), size, where)


def parse_header(raw: bytes, size: int, where: str) -> Header:
    """Check the JSON of a header; arguments and errors as `read_header`."""
    values = json_object(raw, f"{where}: its header")
    metadata = values.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DataError(f"{where}: expected `__metadata__` to map names to text")
    offset = 8 + len(raw)
    tensors = {name: _entry(name, value, offset, where) for name, value in values.items()}
    _check_cover(tensors, offset, size, where)
    return Header(tensors, metadata)


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object in a JSON text, whose keys must be unique at every depth.

    Raises:
        DataError: if the text is not JSON, is nested too deeply, has millions of values, duplicates a key, or is not an
            object.
    """
    # Each value takes up to 200 bytes of memory once it is parsed.
    values_there = raw.count(b",") + raw.count(b":")
    if values_there > _MOST_VALUES:
        raise DataError(f"{where} has {values_there:,} values, more than {_MOST_VALUES:,}")
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise DataError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {ascii(key)[:100]} is duplicated")
        out[key] = value
    return out


def _entry(name: str, value: Any, offset: int, where: str) -> TensorEntry:
    # Names are printed: control characters in them could rewrite the terminal.
    if not name.isprintable() or not name:
        raise DataError(f"{where}: a tensor's name is empty or not printable: {ascii(name)[:100]}")
    place = f"{where}: `{name[:200]}`"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{place}: expected dtype, shape and data_offsets in the header, found something else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise DataError(f"{place}: unknown dtype {ascii(dtype)[:50]}; expected one of {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_natural, shape)):
        raise DataError(f"{place}: expected a shape of integers >= 0, found {ascii(shape)[:100]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise DataError(f"{place}: expected two offsets >= 0, found {ascii(offsets)[:100]}")
    if math.prod(max(n, 1) for n in shape) > _MAX_ENTRIES:
        raise DataError(f"{place}: the shape {ascii(shape)[:100]} overflows")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise DataError(
            f"{place}: {dtype} of shape {ascii(shape)[:100]} takes {bits / 8:.15g} bytes, "
            f"its offsets {ascii(offsets)[:100]} hold {offsets[1] - offsets[0]}"
        )
    return TensorEntry(dtype, tuple(shape), offset + offsets[0], offset + offsets[1])


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_ENTRIES


def _check_cover(tensors: Mapping[str, TensorEntry], offset: int, size: int, where: str) -> None:
    end = offset
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise DataError(f"{where}: `{name[:200]}` {what}, at byte {entry.start} where {end} was expected")
        end = entry.stop
    if end != size:
        what = "bytes are left over at its end" if end < size else "bytes are missing: it is truncated"
        raise DataError(f"{where}: expected {end} bytes from its header, found {size}; {abs(size - end)} {what}")
