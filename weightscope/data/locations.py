"""Where data files lie, and what every reader of them shares."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.data.catalog import DatasetInfo
from weightscope.errors import DataError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training images (n, c, S, S), training labels (n,), test images, test labels; all uint8."""

SHARED = Path("/usr/share/datasets")  # where Debian's dataset-* packages put their files


@dataclass(frozen=True)
class Layout:
    """One way in which a data set lies on disk.

    Attributes:
        folder: the usual name of its folder; the files may also lie in the searched folder itself.
        files: names of files, any of which says that the data set is meant to be here.
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


def missing(info: DatasetInfo, root: Path | None, instead: str) -> DataError:
    """The error that says where a data set was looked for and how to get it."""
    looked = ", ".join(str(place.absolute()) for place in places(root))
    return DataError(
        f"{info.name}: found no files in {looked}; {info.how_to_get}; "
        f"name another folder with --data or WEIGHTSCOPE_DATA; {instead}"
    )


def existing(path: Path, of: str) -> Path:
    """The path, if a file is there.

    Raises:
        DataError: if there is none; names the data set it belongs to.
    """
    if not path.is_file():
        raise DataError(f"{path}: expected a file of {of}, found none; is the data set complete?")
    return path


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Refuse labels (n,) that are not from 0 to `classes` - 1.

    Raises:
        DataError: naming the first such label.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels from 0 to {classes - 1}, found {labels[wrong[0]]} at item {wrong[0]}; "
            f"is this another data set?"
        )
