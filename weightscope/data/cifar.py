"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the official binary version and the Python version."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.restricted_pickle import NUMPY_ARRAY, loads, uint8_array
from weightscope.data import fetch
from weightscope.data.locations import Layout, check_labels, existing, find, read_records
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError

Batch = tuple[np.ndarray, np.ndarray]
"""Pixels, uint8 (n, c * S * S), and labels, uint8 (n,)."""


@dataclass(frozen=True)
class Version:
    """The files of one version of one data set.

    Attributes:
        folder: its usual name.
        train: the training files, with equally many images each.
        test: the test file.
        labels: in the binary version, the number of label bytes before each image, of which the last is read; in
            the Python version, the key of the labels.
    """

    folder: str
    train: tuple[str, ...]
    test: str
    labels: int | str

    @property
    def layout(self) -> Layout:
        """The folder and files to search for."""
        return Layout(self.folder, (*self.train, self.test))


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_VERSIONS = {
    "cifar10": (
        Version("cifar-10-batches-bin", tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", 1),
        Version("cifar-10-batches-py", _BATCHES, "test_batch", "labels"),
    ),
    "cifar100": (  # the coarse label precedes the fine one, which is the class
        Version("cifar-100-binary", ("train.bin",), "test.bin", 2),
        Version("cifar-100-python", ("train",), "test", "fine_labels"),
    ),
}


_SIZES = {"channels": 3, "size": 32, "train": 50_000, "test": 10_000}
_UNPACK = "unpack the official binary version so that one of these contains"


@DATASETS.register("cifar100", **_SIZES, classes=100, how_to_get=f"{_UNPACK} `cifar-100-binary/train.bin`")
@DATASETS.register("cifar10", **_SIZES, classes=10, how_to_get=f"{_UNPACK} `cifar-10-batches-bin/data_batch_1.bin`")
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images in the files' order; only the files that hold them are read.

    Args:
        info: shapes and sizes of cifar10 or cifar100.
        root: a folder to search first.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if the files are missing or damaged.
    """
    versions = {version.layout: version for version in _VERSIONS[info.name]}
    found = find(root, tuple(versions))
    if found is None:
        return fetch.read(info, root, train, test)
    folder, version = found[0], versions[found[1]]
    return (
        *_read_files([folder / name for name in version.train], version, info, info.train, train),
        *_read_files([folder / version.test], version, info, info.test, test),
    )


def _read_files(paths: list[Path], version: Version, info: DatasetInfo, most: int, count: int) -> Batch:
    """The first `count` images of files that hold `most` images together."""
    reader: Callable[..., Batch] = _read_binary if isinstance(version.labels, int) else _read_python
    batches, capacity = [], most // len(paths)
    for start, path in zip(range(0, count, capacity), paths, strict=False):
        wanted = min(capacity, count - start)
        pixels, labels = reader(existing(path, info.name), version.labels, info, wanted, capacity)
        check_labels(labels, info.classes, str(path))
        batches.append((pixels, labels))
    images = np.concatenate([pixels for pixels, _ in batches]).reshape(count, info.channels, info.size, info.size)
    return images, np.concatenate([labels for _, labels in batches])


def _read_binary(path: Path, label_bytes: int, info: DatasetInfo, count: int, capacity: int) -> Batch:
    """The first images of a file of records: label bytes, then the red, green and blue planes."""
    record = label_bytes + info.channels * info.size**2
    records = read_records(path, record, capacity, count)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _read_python(path: Path, key: str, info: DatasetInfo, count: int, capacity: int) -> Batch:
    """The first images of a pickled dictionary with `data` (n, c * S * S) and a list of labels."""
    pixels = info.channels * info.size**2
    most = capacity * (pixels + 256) + 65_536  # names of files and labels beside the pixels
    if path.stat().st_size > most:
        raise DataError(f"{path}: expected at most {most} bytes, found {path.stat().st_size}; is this a CIFAR file?")
    batch = loads(path.read_bytes(), str(path), NUMPY_ARRAY)
    entries = {_text(name): value for name, value in batch.items()} if isinstance(batch, dict) else {}
    if "data" not in entries or key not in entries:
        raise DataError(
            f"{path}: expected a dictionary with 'data' and {key!r}, found {sorted(entries) or 'something else'}"
        )
    data = uint8_array(entries["data"], f"{path}: 'data'")
    labels = entries[key]
    if data.ndim != 2 or data.shape[1] != pixels or not count <= len(data) <= capacity:
        raise DataError(f"{path}: expected {capacity} images of {pixels} pixels, found data of shape {data.shape}")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(_is_byte(label) for label in labels):
        raise DataError(f"{path}: expected {len(data)} labels from 0 to {info.classes - 1} in {key!r}, found others")
    return data[:count], np.array(labels[:count], dtype=np.uint8)


def _text(name: Any) -> str:
    return name.decode("latin-1") if isinstance(name, bytes) else str(name)


def _is_byte(label: Any) -> bool:
    return isinstance(label, int) and 0 <= label < 256
