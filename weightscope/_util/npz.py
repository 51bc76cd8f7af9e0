"""Arrays of .npz files, found by headers that are not trusted; pickled objects are refused."""

import zipfile
from io import BytesIO
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from weightscope.errors import DataError

_HEADER = 2**16  # bytes that hold the header of an array
_PIECE = 2**22  # bytes expanded at once


class Stored(NamedTuple):
    """An array in an archive, by its header."""

    where: str
    entry: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    start: int  # bytes of the header


def stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> Stored:
    """An array by its header, which must agree with the size of its record."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others expand a million times
        raise DataError(f"{where}: expected an array as `numpy.savez` compresses it, found another compression")
    with archive.open(entry) as stream:
        head = BytesIO(stream.read(_HEADER))
    version = np.lib.format.read_magic(head)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise DataError(f"{where}: expected version 1.0 or 2.0 of the .npy format, found {version}")
    shape, fortran, dtype = readers[version](head)
    if dtype.hasobject:
        raise DataError(f"{where}: expected numbers, found pickled objects, which are not read")
    wanted, there = prod(shape) * dtype.itemsize, entry.file_size - head.tell()
    if wanted != there:
        raise DataError(f"{where}: expected {wanted} bytes as its header says, found {there}")
    return Stored(where, entry, shape, dtype, "F" if fortran else "C", head.tell())


def values(archive: zipfile.ZipFile, array: Stored) -> np.ndarray:
    """The array, in memory of its own size."""
    flat = np.empty(prod(array.shape), array.dtype)
    with archive.open(array.entry) as stream:
        stream.read(array.start)
        for piece in np.array_split(flat.view(np.uint8), flat.nbytes // _PIECE + 1):
            piece[:] = np.frombuffer(stream.read(len(piece)), np.uint8, len(piece))
    return flat.reshape(array.shape, order=array.order)
