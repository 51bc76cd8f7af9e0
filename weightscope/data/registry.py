"""What is known of data sets before they are read: their registry, settings, and where files are searched for.

Does not import torch. A reader registers itself with the sizes of its data set.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from weightscope._util.plugins import Registry
from weightscope._util.sources import as_path
from weightscope.data.task import Section, Seed
from weightscope.errors import DataError

FOLDER = "folder"
SHARED = Path("/usr/share/datasets")  # where Debian's dataset-* packages install their files

Part = tuple[np.ndarray, np.ndarray]
"""Images uint8 (n, c, S, S), or paths of their files (n,), and labels (n,) of one part."""

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The training part and the test part."""


class SourceConfig(Section):
    """Where images come from, and their size.

    Attributes:
        name: of a registered data set, a reference `"package.module:factory"`, or `"folder"` for images of one's own.
        size: side length in pixels that images are resized to; the data set's own if None. A folder needs it, an .npz
            file does not.
        path: of a folder of images or an .npz file, with `name = "folder"`; relative ones are searched for where data
            are, see `load`. If None, it is the folder that is searched first (`--data`).
        channels: 1 or 3, to which the images of a folder are converted, 3 if None; or those of an .npz file.
        classes: the number of a folder's classes; counted if None. Populations record size, channels and classes.
        test_share: the share of a folder's images that are for testing; 0.2 if None. Refused if it has a test part.
        split_seed: of the choice of these; 0 if None. Refused if there is a test part.
    """

    name: str
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    channels: Annotated[int, Field(ge=1, le=1024)] | None = None
    classes: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: Seed | None = None

    @model_validator(mode="after")
    def _of_a_folder(self) -> "SourceConfig":
        if self.name == FOLDER and not (self.path or "").endswith(".npz"):
            if self.size is None:
                raise ValueError('size: missing; with name = "folder", the side length that images are resized to')
            if self.path is not None and self.channels not in (None, 1, 3):
                raise ValueError(f"channels: expected 1 or 3 for image files, found {self.channels}")
        for field in ("path", "channels", "classes", "test_share", "split_seed"):
            if self.name != FOLDER and getattr(self, field) is not None:
                raise ValueError(f'{field}: only with name = "folder"; {self.name} has its own')
        return self


@dataclass(frozen=True)
class DatasetInfo:
    """One classification data set; `train` and `test` are 0 for a folder that is not counted."""

    name: str
    channels: int
    size: int
    classes: int
    train: int
    test: int
    how_to_get: str = ""


DATASETS: Registry[Callable[..., Any]] = Registry("data set")
"""`reader(info, root, train, test)` reads the first images; `root` is a folder to search first. The details of each are
the fields of its `DatasetInfo`."""


def search_folders(root: str | Path | None) -> list[Path]:
    """The folders that are searched, in order."""
    named = os.environ.get("WEIGHTSCOPE_DATA")
    return [*([as_path(root)] if root else []), *([Path(named)] if named else []), Path("data"), SHARED]


def first_found(path: str, searched: Iterable[Path], accepted: Callable[[Path], bool], expected: str) -> Path:
    """The first accepted path in the searched folders; DataError if there is none."""
    candidates = list(dict.fromkeys(as_path(folder / path) for folder in searched))  # one, if the path is absolute
    for candidate in candidates:
        if accepted(candidate):
            return candidate
    looked = ", ".join(str(candidate.absolute()) for candidate in candidates)
    raise DataError(f"{expected} at one of {looked}, found none")
