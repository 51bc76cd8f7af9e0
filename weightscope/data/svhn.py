"""SVHN (Netzer et al. 2011), cropped digits: the official MATLAB files."""

from pathlib import Path

import numpy as np

from weightscope.data.locations import Layout, check_labels, existing, located
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError

_FILES = ("train_32x32.mat", "test_32x32.mat")
_LAYOUTS = (Layout("svhn", _FILES), Layout("SVHN", _FILES))


@DATASETS.register(
    "svhn",
    channels=3,
    size=32,
    classes=10,
    train=73_257,
    test=26_032,
    how_to_get="put the official train_32x32.mat and test_32x32.mat into a folder `svhn` in one of these",
)
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images in the files' order; class i is the digit i.

    Args:
        info: shapes and sizes.
        root: a folder to search first.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if the files are missing or damaged.
    """
    folder = located(info, root, _LAYOUTS)
    paths = [existing(folder / name, info.name) for name in _FILES]
    return (*_read(paths[0], info, info.train, train), *_read(paths[1], info, info.test, test))


def _read(path: Path, info: DatasetInfo, most: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images of a file with X, uint8 (S, S, 3, n), and y (n, 1), in which 10 is the digit 0."""
    from scipy.io import loadmat, whosmat

    try:
        shapes = {name: shape for name, shape, _ in whosmat(path)}
        _check(path, shapes, info, most, count)  # before anything is read
        values = loadmat(path, variable_names=["X", "y"])
        _check(path, {name: np.shape(values[name]) for name in ("X", "y")}, info, most, count)
    except DataError:
        raise
    except Exception as error:  # the reader raises whatever it meets in a damaged file
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: cannot be read as a MATLAB file ({reason}); download it again") from error
    pixels, labels = values["X"], values["y"][:count, 0]
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "ui":
        raise DataError(f"{path}: expected X of uint8 and y of integers, found {pixels.dtype} and {labels.dtype}")
    labels = np.where(labels == info.classes, 0, labels.astype(np.int64))
    check_labels(labels, info.classes, str(path))
    return np.ascontiguousarray(pixels[..., :count].transpose(3, 2, 0, 1)), labels.astype(np.uint8)


def _check(path: Path, shapes: dict[str, tuple[int, ...]], info: DatasetInfo, most: int, count: int) -> None:
    pixels, labels = shapes.get("X", ()), shapes.get("y", ())
    items = pixels[3] if len(pixels) == 4 else 0
    expected = (info.size, info.size, info.channels, items), (items, 1)
    if (pixels, labels) != expected or not count <= items <= most:
        raise DataError(
            f"{path}: expected X of shape {(info.size, info.size, info.channels, most)} and y of shape {(most, 1)}, "
            f"found {pixels or 'no X'} and {labels or 'no y'}"
        )
