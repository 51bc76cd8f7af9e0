"""Arrays of images and labels in an .npz file, whose headers are compared with its sizes before anything is read."""

import zipfile
from math import prod
from pathlib import Path

import numpy as np

from weightscope.data.arrays import PARTS
from weightscope.errors import DataError

_TOGETHER = ("images", "labels")
_LARGEST = 2**35  # bytes of one array
_MOST_ENTRIES = 1024


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays `train_images`, `train_labels`, `test_images`, `test_labels`, or `images` and `labels`.

    Images of shape (n, S, S, c) with 1 or 3 channels are transposed to (n, c, S, S). Objects are never unpickled.

    Raises:
        DataError: if it is not an .npz file, arrays are missing, or a header does not fit the bytes behind it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()[:_MOST_ENTRIES]}
            wanted = next((names for names in (PARTS, _TOGETHER) if set(names) <= set(entries)), None)
            if wanted is None:
                raise DataError(
                    f"{path}: expected arrays {', '.join(PARTS)}, or {' and '.join(_TOGETHER)}, found "
                    f"{', '.join(sorted(entries)[:8]) or 'none'}"
                )
            return {name: _array(archive, entries[name], f"{path}: {name}") for name in wanted}
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        raise DataError(f"{path}: cannot be read as an .npz file ({type(error).__name__}: {error})") from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> np.ndarray:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if header is None:
            raise DataError(f"{where}: expected version 1.0 or 2.0 of the .npy format, found {version}")
        shape, in_columns, dtype = header(stream)
        if dtype.hasobject:
            raise DataError(f"{where}: expected numbers, found pickled objects, which are not read")
        wanted, there = prod(shape) * dtype.itemsize, entry.file_size - stream.tell()
        if wanted != there or wanted > _LARGEST:
            raise DataError(f"{where}: expected {wanted} bytes (at most {_LARGEST}) as its header says, found {there}")
        data = stream.read(wanted)
    if len(data) != wanted:
        raise DataError(f"{where}: expected {wanted} bytes, found {len(data)}")
    values = np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if in_columns else "C")
    if values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] == values.shape[2]:
        return values.transpose(0, 3, 1, 2)
    return values.reshape(-1) if values.ndim == 2 and values.shape[1] == 1 else values
