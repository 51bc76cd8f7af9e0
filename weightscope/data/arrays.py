"""Users' own images and labels: checked, and brought to the form in which registered data sets are read."""

from typing import Any

import numpy as np

from weightscope.data.registry import Arrays, DatasetInfo
from weightscope.errors import DataError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


def checked(source: Any, name: str) -> Arrays:
    """Images as uint8 (n, c, S, S) and labels as uint8 or int64 (n,), training and test."""
    if all(hasattr(source, part) for part in PARTS):
        source = tuple(getattr(source, part) for part in PARTS)
    if not isinstance(source, (tuple, list)) or len(source) != len(PARTS):
        found = f"{len(source)} items" if isinstance(source, (tuple, list)) else type(source).__name__
        raise DataError(f"{name}: expected a Dataset or the four arrays ({', '.join(PARTS)}), found {found}")
    where = [f"{name}: {part}" for part in PARTS]
    images = [checked_images(source[i], where[i]) for i in (0, 2)]
    labels = [checked_labels(source[i], where[i], len(images[i // 2])) for i in (1, 3)]
    if images[0].shape[1:] != images[1].shape[1:]:
        raise DataError(
            f"{where[2]}: expected images {images[0].shape[1:]} as in training, found {images[1].shape[1:]}"
        )
    classes = int(labels[0].max()) + 1
    present = np.unique(labels[0])
    if len(present) != classes:
        gap = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise DataError(
            f"{where[1]}: expected every class from 0 to {classes - 1}, found no image of class {gap}; number the "
            "classes without gaps (`numpy.unique(labels, return_inverse=True)`)"
        )
    if labels[1].max() >= classes:
        raise DataError(f"{where[3]}: expected labels from 0 to {classes - 1}, found {labels[1].max()}")
    kind = np.uint8 if classes <= 256 else np.int64
    return images[0], labels[0].astype(kind), images[1], labels[1].astype(kind)


def info_of(name: str, arrays: Arrays) -> DatasetInfo:
    """The `DatasetInfo` of checked arrays."""
    (train, channels, size, _), test = arrays[0].shape, len(arrays[2])
    return DatasetInfo(name, channels, size, int(arrays[1].max()) + 1, train, test)


def checked_images(source: Any, where: str) -> np.ndarray:
    """Images as uint8 (n, c, S, S)."""
    images = _array(source, where)
    if images.dtype.kind == "f":
        raise DataError(
            f"{where}: expected integers from 0 to 255, found {images.dtype}; for pixels in [0, 1] pass "
            "`(255 * images).round().astype('uint8')`"
        )
    if images.dtype.kind not in "ui":
        raise DataError(f"{where}: expected integers from 0 to 255, found {images.dtype}; convert them to uint8")
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or 0 in images.shape:
        raise DataError(
            f"{where}: expected shape (n, channels, S, S) or (n, S, S), none of them 0, found {images.shape}"
        )
    if images.shape[2] != images.shape[3]:
        hint = "; move the channels to the second axis" if images.shape[1] == images.shape[2] else "; crop or pad them"
        raise DataError(f"{where}: expected square images (n, channels, S, S), found {images.shape}{hint}")
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(f"{where}: expected values from 0 to 255, found {images.min()} to {images.max()}")
    return np.ascontiguousarray(images, dtype=np.uint8)


def checked_labels(source: Any, where: str, count: int) -> np.ndarray:
    """Labels as int64 (count,)."""
    labels = _array(source, where)
    if labels.dtype.kind not in "ui":
        raise DataError(f"{where}: expected integers, found {labels.dtype}; convert them with `.astype('int64')`")
    if labels.shape != (count,):
        raise DataError(f"{where}: expected shape ({count},), one label for each image, found {labels.shape}")
    if labels.min() < 0:
        raise DataError(f"{where}: expected labels from 0, found {labels.min()} at item {int(labels.argmin())}")
    return labels.astype(np.int64)


def _array(source: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: expected an array, found {type(source).__name__} ({error})") from error
