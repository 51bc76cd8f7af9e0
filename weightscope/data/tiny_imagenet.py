"""Tiny ImageNet (200 classes of ImageNet at 64 x 64 pixels): the official folder, with its annotations of `val`."""

import re
from pathlib import Path

import numpy as np

from weightscope._util.names import listing
from weightscope.data.images import read_images
from weightscope.data.locations import Layout, existing, located
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError

_LAYOUT = Layout("tiny-imagenet-200", ("wnids.txt",))
_LARGEST = 2**24  # bytes of a text file
_NAME = re.compile(r"[\w.-]+")  # of a class or a file: no path


@DATASETS.register(
    "tiny-imagenet",
    channels=3,
    size=64,
    classes=200,
    train=100_000,
    test=10_000,
    how_to_get="unpack the official tiny-imagenet-200 so that one of these contains `tiny-imagenet-200/wnids.txt`",
)
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training images, class by class in turn, and those of `val` for testing, in the order of its annotations.

    Class i is the i-th name of wnids.txt in alphabetical order. Grey images become colour ones.

    Args:
        info: shapes and sizes.
        root: a folder to search first.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if files are missing or damaged; says how many.
    """
    folder = located(info, root, (_LAYOUT,))
    names = sorted(_lines(folder / "wnids.txt", info))
    if len(set(names)) != info.classes or not all(map(_NAME.fullmatch, names)):
        raise DataError(f"{folder / 'wnids.txt'}: expected {info.classes} different names, found {len(set(names))}")
    train_files, test_files = _training(folder, names, info, train), _validation(folder, names, info, test)
    return (
        *_read(train_files, info, f"{folder.name} (training)"),
        *_read(test_files, info, f"{folder.name} (val)"),
    )


def _training(folder: Path, names: list[str], info: DatasetInfo, count: int) -> list[tuple[Path, int]]:
    """The first images, one of each class in turn, with their classes."""
    each, out = info.train // info.classes, []
    inside = []
    for name in names[: min(count, len(names))]:
        place = folder / "train" / name / "images"
        files = sorted(place.glob("*.JPEG"), key=lambda path: (len(path.name), path.name)) if place.is_dir() else []
        if len(files) != each:
            raise DataError(f"{place}: expected {each} images, found {len(files)}; unpack the data set again")
        inside.append(files)
    for i in range(count):
        out.append((inside[i % info.classes][i // info.classes], i % info.classes))
    return out


def _validation(folder: Path, names: list[str], info: DatasetInfo, count: int) -> list[tuple[Path, int]]:
    path = folder / "val" / "val_annotations.txt"
    rows = [line.split("\t") for line in _lines(path, info)]
    bad = [row[0] for row in rows if len(row) < 2 or row[1] not in names or not _NAME.fullmatch(row[0])]
    if bad or len(rows) != info.test:
        raise DataError(
            f"{path}: expected {info.test} lines with a file and a class of wnids.txt, found {len(rows)}, "
            f"{len(bad)} of them with others{': ' + listing(bad) if bad else ''}"
        )
    labels = {name: i for i, name in enumerate(names)}
    return [(folder / "val" / "images" / row[0], labels[row[1]]) for row in rows[:count]]


def _lines(path: Path, info: DatasetInfo) -> list[str]:
    if existing(path, info.name).stat().st_size > _LARGEST:
        raise DataError(f"{path}: expected at most {_LARGEST} bytes, found {path.stat().st_size}")
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _read(files: list[tuple[Path, int]], info: DatasetInfo, what: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_images([path for path, _ in files], info.size, info.channels, what)
    return images, np.array([label for _, label in files], dtype=np.uint8)
