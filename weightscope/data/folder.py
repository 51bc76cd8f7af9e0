"""Images of one's own: arrays, a folder with a folder for each class, or an .npz file.

The images of a folder are listed without decoding them, and only those that are asked for are read.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.names import listing
from weightscope.data.images import SUFFIXES, read_images, reading, resize
from weightscope.data.registry import FOLDER, Arrays, DatasetInfo, SourceConfig, first_place, places
from weightscope.errors import DataError, UsageError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
_TOGETHER = ("images", "labels")
_TRAINS = ("train", "training")  # in upper or lower case
_TESTS = ("test", "val", "valid", "validation", "testing")
_TEST_SHARE = 0.2


# --- arrays ----------------------------------------------------------------------------------------------------------


def checked(source: Any, name: str) -> Arrays:
    """Images as uint8 (n, c, S, S) and labels as uint8 or int64 (n,), training and test."""
    if all(hasattr(source, part) for part in PARTS):
        source = tuple(getattr(source, part) for part in PARTS)
    if not isinstance(source, (tuple, list)) or len(source) != len(PARTS):
        found = f"{len(source)} items" if isinstance(source, (tuple, list)) else type(source).__name__
        raise DataError(f"{name}: expected a Dataset or the four arrays ({', '.join(PARTS)}), found {found}")
    where = [f"{name}: {part}" for part in PARTS]
    images = [_checked_images(source[i], where[i]) for i in (0, 2)]
    labels = [_checked_labels(source[i], len(images[i // 2]), where[i]) for i in (1, 3)]
    if images[0].shape[1:] != images[1].shape[1:]:
        raise DataError(
            f"{where[2]}: expected images {images[0].shape[1:]} as in training, found {images[1].shape[1:]}"
        )
    kind = _label_type(_count_classes(labels[0], labels[1], where[1::2]))
    return images[0], labels[0].astype(kind), images[1], labels[1].astype(kind)


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


def _label_type(classes: int) -> type[np.integer]:
    return np.uint8 if classes <= 256 else np.int64


def _checked_images(source: Any, where: str) -> np.ndarray:
    """Images as uint8 (n, c, S, S)."""
    images = _array(source, where)
    if images.dtype.kind not in "ui":
        scaled = "; for pixels in [0, 1] pass `(255 * images).round().astype('uint8')`"
        hint = scaled if images.dtype.kind == "f" else "; convert them to uint8"
        raise DataError(f"{where}: expected integers from 0 to 255, found {images.dtype}{hint}")
    if images.ndim not in (3, 4) or images.size == 0:
        raise DataError(
            f"{where}: expected shape (n, channels, S, S) or (n, S, S), none of them 0, found {images.shape}"
        )
    images = images if images.ndim == 4 else images[:, None]
    _, channels, height, width = images.shape
    if height != width:
        hint = "; move the channels to the second axis" if channels == height else "; crop or pad them"
        raise DataError(f"{where}: expected square images (n, channels, S, S), found {images.shape}{hint}")
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(f"{where}: expected values from 0 to 255, found {images.min()} to {images.max()}")
    return np.ascontiguousarray(images, dtype=np.uint8)


def _checked_labels(source: Any, count: int, where: str) -> np.ndarray:
    """Labels as int64 (count,)."""
    labels = _array(source, where)
    if labels.dtype.kind not in "ui":
        raise DataError(f"{where}: expected integers, found {labels.dtype}; convert them with `.astype('int64')`")
    if labels.shape != (count,):
        raise DataError(f"{where}: expected shape ({count},), one label for each image, found {labels.shape}")
    if labels.min() < 0:
        raise DataError(f"{where}: expected labels from 0, found {labels.min()} at item {int(labels.argmin())}")
    return labels.astype(np.int64)


def _count_classes(train: np.ndarray, test: np.ndarray, where: Sequence[str]) -> int:
    """The number of classes of labels; DataError if one has no training image."""
    classes, present = int(train.max()) + 1, np.unique(train)
    if len(present) != classes:
        gap = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise DataError(
            f"{where[0]}: expected every class from 0 to {classes - 1}, found no image of class {gap}; number the "
            "classes without gaps (`numpy.unique(labels, return_inverse=True)`)"
        )
    if test.max() >= classes:
        raise DataError(f"{where[-1]}: expected labels from 0 to {classes - 1}, found {test.max()}")
    return classes


def _array(source: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: expected an array, found {type(source).__name__} ({error})") from error


# --- a folder or an .npz file ----------------------------------------------------------------------------------------

Part = tuple[np.ndarray, np.ndarray]
"""Paths of image files, or images (n, c, S, S), and their labels (n,)."""


def described(config: SourceConfig, root: str | Path | None) -> DatasetInfo:
    """The info of a folder or .npz file; if the recipe has all of it, without reading and without numbers of images."""
    if config.size is not None and config.channels is not None and config.classes is not None:
        return DatasetInfo(FOLDER, config.channels, config.size, config.classes, 0, 0)
    return _opened(config, root)[0]


def read(
    config: SourceConfig, root: str | Path | None, train: int | None, test: int | None
) -> tuple[DatasetInfo, Arrays]:
    """The info of a folder or .npz file, and its first training and test images, resized.

    The folder has a folder for each class, or two folders `train` (`training`) and `test` (`testing`, `val`, `valid`,
    `validation`), in upper or lower case, that have them. An .npz file has the arrays `PARTS`, or `images` and
    `labels`: integers from 0 to 255 of shape (n, S, S), (n, c, S, S) or (n, S, S, c), and (n,). Without test images a
    share of each class, drawn by `split_seed`, is for testing. Hidden files and folders are skipped.
    """
    info, parts, orders = _opened(config, root)
    counts = check_counts(FOLDER, train, test, info.train, info.test)
    made: list[np.ndarray] = []
    for (images, labels), order, count in zip((parts[0], parts[-1]), orders, counts, strict=True):
        mine = images[order[:count]]
        if images.dtype == object:
            made.append(_decoded(tuple((path, path.stat().st_mtime_ns) for path in mine), info.size, info.channels))
        else:
            made.append(resize(mine, info.size, FOLDER))
        made.append(labels[order[:count]].astype(_label_type(info.classes)))
    return info, (made[0], made[1], made[2], made[3])


@lru_cache(maxsize=2)  # every tile of a benchmark reads the data again
def _decoded(files: tuple[tuple[Path, int], ...], size: int, channels: int) -> np.ndarray:
    """The pixels of files, which are given with their times."""
    return read_images([path for path, _ in files], size, channels, FOLDER)


def located(config: SourceConfig, root: str | Path | None) -> Path:
    """The folder or .npz file of a recipe."""
    if config.path is None and root is None:
        raise DataError("folder: expected data.path in the recipe, or --data with the images, found neither")
    return first_place(
        config.path or "",
        [Path(root or "")] if config.path is None else [*places(root), Path()],
        lambda path: path.is_dir() or (path.is_file() and path.suffix == ".npz"),
        "folder: expected a folder of images or an .npz file",
    )


def _opened(config: SourceConfig, root: str | Path | None) -> tuple[DatasetInfo, list[Part], list[np.ndarray]]:
    """The info, one part or a training and a test part, and the order of the training and of the test images in it."""
    path = located(config, root)
    if path.is_file():
        parts = _npz(path, path.stat().st_mtime_ns)
        _, channels, size, _ = parts[0][0].shape
    else:
        parts = _folder(path)
        channels, size = config.channels or 3, config.size or 0
        if not size:
            raise DataError(f"{path}: expected data.size, the side length that images are resized to, found none")
    classes = _count_classes(parts[0][1], parts[-1][1], [str(path)] * 2)
    for name, found in (("channels", channels), ("classes", classes)):
        if (wanted := getattr(config, name)) not in (None, found):
            raise DataError(f"{path}: expected {wanted} {name} (data.{name}), found {found}")
    orders = _split(path, [labels for _, labels in parts], config)
    train, test = map(len, orders)
    return DatasetInfo(FOLDER, channels, config.size or size, classes, train, test), parts, orders


def _split(path: Path, labels: Sequence[np.ndarray], config: SourceConfig) -> list[np.ndarray]:
    """Places of training and of test images in two arrays of labels, or in one, a share of which is for testing."""
    if len(labels) == 2:
        if given := [f"data.{name}" for name in ("test_share", "split_seed") if getattr(config, name) is not None]:
            raise DataError(
                f"{path}: expected no {' or '.join(given)}, as there are training and test images already; remove "
                f"{'it' if len(given) == 1 else 'them'} from the recipe"
            )
        return [_interleaved(part) for part in labels]
    random, held = np.random.default_rng([config.split_seed or 0, len(labels[0])]), np.zeros(len(labels[0]), dtype=bool)
    for label in np.unique(labels[0]):
        mine = random.permutation(np.flatnonzero(labels[0] == label))
        if len(mine) < 2:
            raise DataError(
                f"{path}: expected at least 2 images of each class, one of them for testing, found 1 of class {label}"
            )
        held[mine[: min(max(1, round((config.test_share or _TEST_SHARE) * len(mine))), len(mine) - 1)]] = True
    order = random.permutation(len(labels[0]))
    return [order[~held[order]], order[held[order]]]


def _interleaved(labels: np.ndarray) -> np.ndarray:
    """An order of the items, (n,): item r of a class of m items is at the fraction (r + 1/2) / m of the whole."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = (np.arange(len(labels)) - np.repeat(starts, counts) + 0.5) / np.repeat(counts, counts)
    return np.argsort(place, kind="stable")


def _folder(path: Path) -> list[Part]:
    """The images of a folder of folders, as paths, and their labels."""
    inside = {child.name.lower(): child for child in path.iterdir() if child.is_dir()}
    trains, tests = ([inside[name] for name in names if name in inside] for names in (_TRAINS, _TESTS))
    if trains and (len(trains) > 1 or len(tests) != 1):
        found = listing(child.name for child in [*trains, *tests])
        raise DataError(
            f"{path}: expected one folder of {', '.join(_TRAINS)} and one of {', '.join(_TESTS)}, found {found}"
        )
    found_classes = [_classes(part) for part in ((trains[0], tests[0]) if trains else (path,))]
    names = list(found_classes[0])
    if strangers := [name for name in found_classes[-1] if name not in names]:
        raise DataError(
            f"{tests[0]}: expected classes of {trains[0]}, found {len(strangers)} others: {listing(strangers)}"
        )
    parts = []
    for classes in found_classes:
        files = [file for name in names for file in classes.get(name, ())]
        labels = np.repeat(np.arange(len(names)), [len(classes.get(name, ())) for name in names])
        parts.append((np.array(files, dtype=object), labels))
    return parts


def _classes(path: Path) -> dict[str, list[Path]]:
    """The images of each class, in the order of their names."""
    found: dict[str, list[Path]] = {}
    for folder in sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")):
        files = found[folder.name] = []
        for file in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
            if file.suffix.lower() in SUFFIXES and not hidden:
                files.append(file)
        below = sorted({file.relative_to(folder).parts[0] for file in files})
        if len(below) > 1 and all(file.parent != folder for file in files):  # a part, or a group of classes
            raise DataError(
                f"{folder}: expected the images of one class, found only {len(below)} folders of images: "
                f"{listing(below)}; name the parts `{_TRAINS[0]}` and `{_TESTS[0]}`, or put the images of a class "
                "directly into its folder"
            )
    if len(found) < 2:
        raise DataError(f"{path}: expected a folder for each of at least 2 classes, found {len(found)} folders")
    if empty := [name for name, files in found.items() if not files]:
        raise DataError(
            f"{path}: expected images ({', '.join(sorted(SUFFIXES))}) in each of {len(found)} folders, "
            f"found none in {len(empty)} of them: {listing(empty)}"
        )
    return found


@lru_cache(maxsize=1)
def _npz(path: Path, _: int) -> list[Part]:
    """The images and labels of an .npz file, which is given with its time. Objects are never unpickled."""
    with reading(path, "an .npz file", "write it again with numpy.savez"), np.load(path) as file:
        wanted = next((names for names in (PARTS, _TOGETHER) if {*names} <= {*file}), None)
        if wanted is None:
            names = f"{', '.join(PARTS)}, or {' and '.join(_TOGETHER)}"
            raise DataError(f"{path}: expected arrays {names}, found {listing(sorted(file)) or 'none'}")
        stored = [(name, file[name]) for name in wanted]
    parts = []
    for (what, images), (name, labels) in zip(stored[::2], stored[1::2], strict=True):
        if images.ndim == 4 and images.shape[3] in (1, 3) and images.shape[1] == images.shape[2]:
            images = images.transpose(0, 3, 1, 2)
        pixels = _checked_images(images, f"{path}: {what}")
        flat = labels[:, 0] if labels.shape[1:] == (1,) else labels
        parts.append((pixels, _checked_labels(flat, len(pixels), f"{path}: {name}")))
    if parts[0][0].shape[1:] != parts[-1][0].shape[1:]:
        raise DataError(
            f"{path}: test_images: expected images {parts[0][0].shape[1:]} as in training, "
            f"found {parts[-1][0].shape[1:]}"
        )
    return parts
