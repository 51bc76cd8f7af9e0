"""The registry of data sets, the folders that are searched for their files, and checks that all readers share.

Does not import torch. A reader registers itself with what is known of its data before they are loaded.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope._util.plugins import Registry
from weightscope.data.config import SourceConfig
from weightscope.errors import DataError

SHARED = Path("/usr/share/datasets")  # where Debian's dataset-* packages install their files

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training images (n, c, S, S), training labels (n,), test images (m, c, S, S), test labels (m,); all uint8 but for
the labels of more than 256 classes."""

Part = tuple[np.ndarray, np.ndarray]
"""Images and labels of one part."""


@dataclass(frozen=True)
class DatasetInfo:
    """One classification data set."""

    name: str
    channels: int
    size: int
    classes: int
    train: int
    test: int
    how_to_get: str = ""
    config: SourceConfig | None = None  # of a folder of images, whose numbers are 0 until it is read


Reader = Callable[..., Arrays]
"""Reads the first images: `reader(info, root, train, test)`, where `root` is a folder to search first."""

DATASETS: Registry[Reader] = Registry("data set")
"""Readers by the name of their data set; the details of each are the fields of its `DatasetInfo`."""


class Layout(NamedTuple):
    """One arrangement of a data set's files."""

    folder: str  # its usual name; the files may also be in the searched folder itself
    files: tuple[str, ...]  # any of which identifies the data set


def places(root: Path | None) -> list[Path]:
    """The folders that are searched, in order."""
    named = os.environ.get("WEIGHTSCOPE_DATA")
    return [*([root] if root else []), *([Path(named)] if named else []), Path("data"), SHARED]


def first_place(path: str, searched: Iterable[Path], accepted: Callable[[Path], bool], expected: str) -> Path:
    """The first accepted place of a path in the searched folders; DataError if there is none."""
    candidates = list(dict.fromkeys(place / path for place in searched))  # one, if the path is absolute
    for candidate in candidates:
        if accepted(candidate):
            return candidate
    looked = ", ".join(str(candidate.absolute()) for candidate in candidates)
    raise DataError(f"{expected} at one of {looked}, found none")


def find(root: Path | None, *layouts: Layout) -> tuple[Path, Layout] | None:
    """The first folder with a data set in one of the layouts, or None."""
    for place in places(root):
        for layout in layouts:
            for folder in (place / layout.folder, place):
                if any((folder / file).is_file() for file in layout.files):
                    return folder, layout
    return None


def missing(info: DatasetInfo, root: Path | None, instead: str = "") -> DataError:
    """The error about a data set without files: where they were searched for and how to get them."""
    looked = ", ".join(str(place.absolute()) for place in places(root))
    return DataError(
        f"{info.name}: expected its files in one of {looked}, found none; {info.how_to_get}; "
        f"or name another folder with --data or WEIGHTSCOPE_DATA{'; ' + instead if instead else ''}"
    )


def located(info: DatasetInfo, root: Path | None, *layouts: Layout) -> Path:
    """The first folder with a data set that is not downloaded; DataError if there is none."""
    found = find(root, *layouts)
    if found is None:
        raise missing(info, root)
    return found[0]


def existing(path: Path, info: DatasetInfo) -> Path:
    """The path, if it is a file; DataError otherwise."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of {info.name}, found none; is the data set complete?")
    return path


def read_records(path: Path, record: int, most: int, count: int) -> np.ndarray:
    """The first records of a binary file, uint8 (count, record); DataError unless it has `count` to `most` records."""
    size = path.stat().st_size
    if size % record or not count * record <= size <= most * record:
        raise DataError(
            f"{path}: expected {most * record} bytes ({most} records of {record}), found {size}; download it again"
        )
    return np.fromfile(path, np.uint8, count * record).reshape(count, record)


def checked_part(images: np.ndarray, labels: np.ndarray, info: DatasetInfo, where: object) -> Part:
    """Images (n, c, S, S) and labels (n,) as uint8; DataError naming the first label that is not below K."""
    wrong = np.flatnonzero((labels < 0) | (labels >= info.classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels from 0 to {info.classes - 1}, found {labels[wrong[0]]} at item {wrong[0]}; "
            "is this another data set?"
        )
    shape = (len(labels), info.channels, info.size, info.size)
    return np.array(images, order="C").reshape(shape), labels.astype(np.uint8)  # a copy, which may be written to
