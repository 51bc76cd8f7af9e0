"""Arrays of .npz files, one at a time; pickled objects are refused."""

import zipfile
from typing import NamedTuple

import numpy as np

from weightscope.errors import DataError

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Stored(NamedTuple):
    """An array in an archive, by its header."""

    where: str
    entry: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype


def stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> Stored:
    """An array by its header."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _READERS:
            raise DataError(f"{where}: expected version 1.0 or 2.0 of the .npy format, found {version}")
        shape, _, dtype = _READERS[version](stream)
    if dtype.hasobject:
        raise DataError(f"{where}: expected numbers, found pickled objects, which are not read")
    return Stored(where, entry, shape, dtype)


def values(archive: zipfile.ZipFile, array: Stored) -> np.ndarray:
    """The array, in memory of its own size."""
    with archive.open(array.entry) as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
