"""Images of one's own as arrays, in memory or in an .npz file."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.names import listing
from weightscope.data.images import reading
from weightscope.data.registry import Arrays, DatasetInfo, Part
from weightscope.errors import DataError, UsageError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
_TOGETHER = ("images", "labels")


def checked_arrays(source: Any, name: str) -> Arrays:
    """Images as uint8 (n, c, S, S) and labels as int64 (n,), training and test, of a `Dataset` or four arrays."""
    if all(hasattr(source, part) for part in PARTS):
        source = [getattr(source, part) for part in PARTS]
    if not isinstance(source, (tuple, list)) or len(source) != len(PARTS):
        found = f"{len(source)} items" if isinstance(source, (tuple, list)) else type(source).__name__
        raise DataError(f"{name}: expected a Dataset or the four arrays ({', '.join(PARTS)}), found {found}")
    train, test = _checked_parts(zip(PARTS, source, strict=True), name)
    count_classes(train[1], test[1], name)
    return *train, *test


def info_of(name: str, arrays: Arrays) -> DatasetInfo:
    """The `DatasetInfo` of checked arrays."""
    (train, channels, size, _), test = arrays[0].shape, len(arrays[2])
    return DatasetInfo(name, channels, size, int(arrays[1].max()) + 1, train, test)


def check_counts(name: str, train: int | None, test: int | None, n: int, m: int) -> tuple[int, int]:
    """The numbers of training and test images to take, all n and m if None; UsageError if there are not as many."""
    for which, wanted, available in (("train", train, n), ("test", test, m)):
        if wanted is not None and not 1 <= wanted <= available:
            raise UsageError(f"data.{which}: expected 1 to {available} images of {name}, found {wanted}")
    return n if train is None else train, m if test is None else test


def count_classes(train: np.ndarray, test: np.ndarray, where: object) -> int:
    """The number of classes of labels; DataError unless they are 0, 1, ... with a training image of each."""
    present = np.unique(train)
    if not np.array_equal(present, np.arange(len(present))):
        raise DataError(
            f"{where}: train_labels: expected every class from 0, found {listing(map(str, present))}; number the "
            "classes without gaps (`numpy.unique(labels, return_inverse=True)`)"
        )
    if test.min() < 0 or test.max() >= len(present):
        raise DataError(
            f"{where}: test_labels: expected 0 to {len(present) - 1} as in training, found {test.min()} to {test.max()}"
        )
    return len(present)


@lru_cache(maxsize=1)
def read_npz(path: Path, time: int) -> Sequence[Part]:
    """Images and labels of an .npz file that was written at a time: one part, or training and test."""
    with reading(path, "an .npz file", "write it again with numpy.savez"), np.load(path) as file:
        names = next((names for names in (PARTS, _TOGETHER) if {*names} <= {*file}), None)
        if names is None:
            expected = f"{', '.join(PARTS)}, or {' and '.join(_TOGETHER)}"
            raise DataError(f"{path}: expected arrays {expected}, found {listing(sorted(file)) or 'none'}")
        stored = [(name, file[name]) for name in names]
    for i, (name, array) in enumerate(stored):
        if array.ndim == 4 and array.shape[3] in (1, 3) and array.shape[1] == array.shape[2]:
            stored[i] = name, array.transpose(0, 3, 1, 2)
        elif array.ndim == 2 and array.shape[1] == 1:
            stored[i] = name, array[:, 0]
    return _checked_parts(stored, path)


def _checked_parts(named: Any, where: object) -> list[Part]:
    """Parts of images (n, c, S, S) and labels (n,), all with images of one shape."""
    arrays = list(named)
    parts = []
    for (images, pixels), (labels, numbers) in zip(arrays[::2], arrays[1::2], strict=True):
        parts.append((_images(pixels, f"{where}: {images}"), np.asarray(numbers)))
        found, expected = parts[-1][1], (len(parts[-1][0]),)
        if found.dtype.kind not in "ui" or found.shape != expected:
            raise DataError(
                f"{where}: {labels}: expected integers of shape {expected}, one for each image, found {found.dtype} of "
                f"shape {found.shape}"
            )
    first, last = parts[0][0].shape[1:], parts[-1][0].shape[1:]
    if first != last:
        raise DataError(f"{where}: test_images: expected images {first} as in training, found {last}")
    return [(images, labels.astype(np.int64)) for images, labels in parts]


def _images(source: Any, where: str) -> np.ndarray:
    """Images as uint8 (n, c, S, S)."""
    images = np.asarray(source)
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim != 4 or images.size == 0 or images.shape[2] != images.shape[3]:
        raise DataError(f"{where}: expected images (n, channels, S, S) or (n, S, S), found shape {images.shape}")
    if images.dtype.kind not in "ui" or images.min() < 0 or images.max() > 255:
        raise DataError(
            f"{where}: expected integers from 0 to 255, found {images.dtype} from {images.min()} to {images.max()}; "
            "for pixels in [0, 1] pass `(255 * images).round().astype('uint8')`"
        )
    return np.ascontiguousarray(images, dtype=np.uint8)
