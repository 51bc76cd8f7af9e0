"""STL-10 (Coates et al. 2011): the official binary files, whose images are stored by columns."""

from pathlib import Path

import numpy as np

from weightscope.data.locations import Layout, check_labels, existing, located, read_records
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo

_LAYOUT = Layout("stl10_binary", ("train_X.bin", "test_X.bin"))


@DATASETS.register(
    "stl10",
    channels=3,
    size=96,
    classes=10,
    train=5_000,
    test=8_000,
    how_to_get="unpack the official binary files so that one of these contains `stl10_binary/train_X.bin`",
)
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images in the files' order; the unlabelled ones are not read.

    Args:
        info: shapes and sizes.
        root: a folder to search first.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if the files are missing or damaged.
    """
    folder = located(info, root, (_LAYOUT,))
    return (*_read(folder, "train", info, info.train, train), *_read(folder, "test", info, info.test, test))


def _read(folder: Path, part: str, info: DatasetInfo, most: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images of one part: pixels (n, 3, column, row), labels from 1."""
    record = info.channels * info.size**2
    pixels = read_records(existing(folder / f"{part}_X.bin", info.name), record, most, count)
    path = existing(folder / f"{part}_y.bin", info.name)
    labels = read_records(path, 1, most, count).reshape(-1).astype(np.int64) - 1
    check_labels(labels, info.classes, str(path))
    images = pixels.reshape(count, info.channels, info.size, info.size).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(images), labels.astype(np.uint8)
