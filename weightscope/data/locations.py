"""The folders that are searched for data files, and checks that all readers share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.data.registry import DatasetInfo
from weightscope.errors import DataError

SHARED = Path("/usr/share/datasets")  # where Debian's dataset-* packages install their files


@dataclass(frozen=True)
class Layout:
    """One arrangement of a data set's files.

    Attributes:
        folder: the usual name of its folder; the files may also be in the searched folder itself.
        files: names of files, any of which identifies the data set.
    """

    folder: str
    files: tuple[str, ...]


def places(root: Path | None) -> list[Path]:
    """The folders that are searched, in order."""
    named = os.environ.get("WEIGHTSCOPE_DATA")
    return [*([root] if root else []), *([Path(named)] if named else []), Path("data"), SHARED]


def find(root: Path | None, layouts: Sequence[Layout]) -> tuple[Path, Layout] | None:
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


def located(info: DatasetInfo, root: Path | None, layouts: Sequence[Layout]) -> Path:
    """The first folder with a data set that is not downloaded.

    Raises:
        DataError: if there is none.
    """
    found = find(root, layouts)
    if found is None:
        raise missing(info, root)
    return found[0]


def existing(path: Path, of: str) -> Path:
    """The path, if it is a file.

    Raises:
        DataError: otherwise; names the data set that it belongs to.
    """
    if not path.is_file():
        raise DataError(f"{path}: expected a file of {of}, found none; is the data set complete?")
    return path


def read_records(path: Path, record: int, most: int, count: int) -> np.ndarray:
    """The first records of a binary file, uint8 (count, record).

    Raises:
        DataError: if the file has another size than `count` to `most` records.
    """
    size = path.stat().st_size
    if size % record or not count * record <= size <= most * record:
        raise DataError(
            f"{path}: expected {most * record} bytes ({most} records of {record}), found {size}; download it again"
        )
    return np.fromfile(path, np.uint8, count * record).reshape(count, record)


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels (n,) that are not from 0 to `classes` - 1.

    Raises:
        DataError: naming the first invalid label.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels from 0 to {classes - 1}, found {labels[wrong[0]]} at item {wrong[0]}; "
            "is this another data set?"
        )
