"""Images of one's own: arrays, a folder with a folder for each class, or an .npz file.

What is in a folder or file is found without decoding it, and only the images that are asked for are read. Headers are
not trusted: pickled objects are refused, and what does not fit into the memory is refused before it is read.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import npz
from weightscope._util.names import listing
from weightscope.data.images import SUFFIXES, check_memory, progress, read_images, reading, resize
from weightscope.data.registry import FOLDER, Arrays, DatasetInfo, SourceConfig, first_place, places
from weightscope.errors import DataError, UsageError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
_TOGETHER = ("images", "labels")
_TRAINS = ("train", "training")  # in upper or lower case
_TESTS = ("test", "val", "valid", "validation", "testing")
_TEST_SHARE = 0.2
_MOST_ENTRIES = 1024
_MOST_IMAGES = 2**24  # of an .npz file, whose labels are all read
_BLOCK = 2**24  # bytes of an array that are in memory at once


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


def _image_shape(dtype: np.dtype, shape: tuple[int, ...], where: str) -> tuple[int, int, int, int]:
    """(n, c, S, S) of an array of images."""
    if dtype.kind not in "ui":
        scaled = "; for pixels in [0, 1] pass `(255 * images).round().astype('uint8')`"
        hint = scaled if dtype.kind == "f" else "; convert them to uint8"
        raise DataError(f"{where}: expected integers from 0 to 255, found {dtype}{hint}")
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(f"{where}: expected shape (n, channels, S, S) or (n, S, S), none of them 0, found {shape}")
    n, channels, height, width = shape if len(shape) == 4 else (shape[0], 1, *shape[1:])
    if height != width:
        hint = "; move the channels to the second axis" if channels == height else "; crop or pad them"
        raise DataError(f"{where}: expected square images (n, channels, S, S), found {shape}{hint}")
    return n, channels, height, width


def _checked_images(source: Any, where: str) -> np.ndarray:
    """Images as uint8 (n, c, S, S)."""
    images = _array(source, where)
    images = images.reshape(_image_shape(images.dtype, images.shape, where))
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(f"{where}: expected values from 0 to 255, found {images.min()} to {images.max()}")
    return np.ascontiguousarray(images, dtype=np.uint8)


def _check_label_shape(dtype: np.dtype, shape: tuple[int, ...], count: int, where: str) -> None:
    if dtype.kind not in "ui":
        raise DataError(f"{where}: expected integers, found {dtype}; convert them with `.astype('int64')`")
    if shape != (count,):
        raise DataError(f"{where}: expected shape ({count},), one label for each image, found {shape}")


def _checked_labels(source: Any, count: int, where: str) -> np.ndarray:
    """Labels as int64 (count,)."""
    labels = _array(source, where)
    _check_label_shape(labels.dtype, labels.shape, count, where)
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


@dataclass(frozen=True)
class OwnImages:
    """What is in a folder or .npz file: labels and places of the training and of the test images."""

    signature: str  # changes with the files and the split
    path: Path = field(compare=False)
    classes: int = field(compare=False)
    shape: tuple[int, int] | None = field(compare=False)  # channels and side length, of an .npz file
    labels: Sequence[np.ndarray] = field(compare=False)  # of each part, in an order in which classes are mixed
    rows: Sequence[np.ndarray] = field(compare=False)  # places of these images
    read: Callable[[list[np.ndarray], int, int], list[np.ndarray]] = field(compare=False)  # rows, size, channels


def described(config: SourceConfig, root: str | Path | None) -> DatasetInfo:
    """The info of a folder or .npz file; if the recipe has all of it, without reading and without numbers of images."""
    if config.size is not None and config.channels is not None and config.classes is not None:
        return DatasetInfo(FOLDER, config.channels, config.size, config.classes, 0, 0)
    return _info(config, _opened(config, root))


def read(
    config: SourceConfig, root: str | Path | None, train: int | None, test: int | None
) -> tuple[DatasetInfo, Arrays]:
    """The info of a folder or .npz file, and its first training and test images, resized.

    The folder has a folder for each class, or two folders `train` (`training`) and `test` (`testing`, `val`, `valid`,
    `validation`), in upper or lower case, that have them. An .npz file has the arrays `PARTS`, or `images` and
    `labels`: integers from 0 to 255 of shape (n, S, S), (n, c, S, S) or (n, S, S, c), and (n,). Without test images a
    share of each class, drawn by `split_seed`, is for testing. Hidden files and folders are skipped.
    """
    found = _opened(config, root)
    info = _info(config, found)
    if config.classes not in (None, found.classes):
        raise DataError(f"{found.path}: expected {config.classes} classes (data.classes), found {found.classes}")
    counts = check_counts(FOLDER, train, test, info.train, info.test)
    images = _pixels(found, counts, info.size, info.channels)
    kind = _label_type(found.classes)
    train_labels, test_labels = (found.labels[part][:n].astype(kind) for part, n in enumerate(counts))
    return info, (images[0], train_labels, images[1], test_labels)


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


def _opened(config: SourceConfig, root: str | Path | None) -> OwnImages:
    path = located(config, root)
    return _npz(path, config) if path.is_file() else _folder(path, config)


def _info(config: SourceConfig, found: OwnImages) -> DatasetInfo:
    channels, size = found.shape or (config.channels or 3, config.size)
    if size is None:
        raise DataError(f"{found.path}: expected data.size, the side length that images are resized to, found none")
    if config.channels not in (None, channels):
        raise DataError(
            f"{found.path}: expected images of {config.channels} channels (data.channels), found {channels}"
        )
    train, test = map(len, found.labels)
    return DatasetInfo(FOLDER, channels, config.size or size, found.classes, train, test)


@lru_cache(maxsize=1)  # every tile of a benchmark reads the data again
def _pixels(found: OwnImages, counts: tuple[int, int], size: int, channels: int) -> list[np.ndarray]:
    return found.read([rows[:count] for rows, count in zip(found.rows, counts, strict=True)], size, channels)


def _split(path: Path, labels: Sequence[np.ndarray], config: SourceConfig) -> list[np.ndarray]:
    """Places of training and of test images in two arrays of labels, or in one, of which a share is for testing."""
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


def _signature(files: Iterable[Path], config: SourceConfig) -> str:
    digest = hashlib.sha256(f"{config.test_share} {config.split_seed}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _folder(path: Path, config: SourceConfig) -> OwnImages:
    """A folder of folders of images."""
    trains, tests = (
        sorted(child for child in path.iterdir() if child.name.lower() in names and child.is_dir())
        for names in (_TRAINS, _TESTS)
    )
    for found, names, beside in ((trains, _TRAINS, ""), (tests, _TESTS, f" beside {trains[0].name}" if trains else "")):
        if trains and len(found) != 1:
            named = listing([part.name for part in found]) if found else "none"
            raise DataError(f"{path}: expected one folder of {', '.join(names)}{beside}, found {named}")
    inside = [_classes(part) for part in ((trains[0], tests[0]) if trains else (path,))]
    classes = list(inside[0])
    if unknown := sorted(set(inside[-1]) - set(classes)):
        raise DataError(f"{tests[0]}: expected classes of {trains[0]}, found {len(unknown)} others: {listing(unknown)}")
    files = [[file for name in classes for file in part.get(name, ())] for part in inside]
    labels = [np.repeat(np.arange(len(classes)), [len(part.get(name, ())) for name in classes]) for part in inside]

    def read(rows: list[np.ndarray], size: int, channels: int) -> list[np.ndarray]:
        parts = zip((files[0], files[-1]), rows, ("training", "test"), strict=True)
        return [
            read_images([inside[row] for row in mine], size, channels, f"{path} ({what})")
            for inside, mine, what in parts
        ]

    rows = _split(path, labels, config)
    mixed = [labels[part % len(labels)][order] for part, order in enumerate(rows)]
    return OwnImages(
        _signature((file for part in files for file in part), config), path, len(classes), None, mixed, rows, read
    )


def _classes(path: Path) -> dict[str, list[Path]]:
    """The images of each class, in the order of their names."""
    found: dict[str, list[Path]] = {}
    for name in sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")):
        inside = found[name] = []
        for place, folders, files in os.walk(path / name):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]  # os.walk enters the others
            images = (file for file in files if Path(file).suffix.lower() in SUFFIXES and not file.startswith("."))
            inside += [Path(place, file) for file in images]
        inside.sort()
        below = sorted({file.relative_to(path / name).parts[0] for file in inside})
        if len(below) > 1 and all(file.parent != path / name for file in inside):  # a part, or a group of classes
            raise DataError(
                f"{path / name}: expected the images of one class, found only {len(below)} folders of images: "
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


# --- .npz files ------------------------------------------------------------------------------------------------------


def _npz(path: Path, config: SourceConfig) -> OwnImages:
    """An .npz file, of which the headers and the labels are read. Objects are never unpickled."""
    with _archive(path) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()[:_MOST_ENTRIES]}
        wanted = next((names for names in (PARTS, _TOGETHER) if set(names) <= set(entries)), None)
        if wanted is None:
            names = f"{', '.join(PARTS)}, or {' and '.join(_TOGETHER)}"
            raise DataError(f"{path}: expected arrays {names}, found {listing(sorted(entries)) or 'none'}")
        stored = [npz.stored(archive, entries[name], f"{path}: {name}") for name in wanted]
        images = stored[::2]
        for x in images:
            if x.order == "F":
                raise DataError(f"{x.where}: expected an array in C order; write numpy.ascontiguousarray of it")
        shapes = [
            _image_shape(x.dtype, (*x.shape[:1], x.shape[3], *x.shape[1:3]) if _channels_last(x) else x.shape, x.where)
            for x in images
        ]
        if shapes[0][1:] != shapes[-1][1:]:
            raise DataError(f"{images[1].where}: expected images {shapes[0][1:]} as in training, found {shapes[1][1:]}")
        labels: list[np.ndarray] = []
        for (n, *_), x in zip(shapes, stored[1::2], strict=True):
            _check_label_shape(x.dtype, x.shape[:1] if x.shape[1:] == (1,) else x.shape, n, x.where)
            if n > _MOST_IMAGES:
                raise DataError(f"{x.where}: expected at most {_MOST_IMAGES} images, found {n}")
            labels.append(_checked_labels(_rows(archive, x, np.arange(n)).reshape(-1), n, x.where))
    classes = _count_classes(labels[0], labels[-1], [x.where for x in stored[1::2]])

    def read(rows: list[np.ndarray], size: int, channels: int) -> list[np.ndarray]:
        with _archive(path) as archive:
            if len(images) == 1:  # all in one pass over the file
                found = np.split(_rows(archive, images[0], np.concatenate(rows)), [len(rows[0])])
            else:
                found = [_rows(archive, x, mine) for x, mine in zip(images, rows, strict=True)]
        out = []
        for pixels, x in zip(found, (images[0], images[-1]), strict=True):
            checked = _checked_images(pixels.transpose(0, 3, 1, 2) if _channels_last(x) else pixels, x.where)
            out.append(resize(checked, size, x.where))
        return out

    rows = _split(path, labels, config)
    mixed = [labels[part % len(labels)][order] for part, order in enumerate(rows)]
    return OwnImages(_signature([path], config), path, classes, shapes[0][1:3], mixed, rows, read)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """An open .npz file."""
    with reading(path, "an .npz file", "write it again with numpy.savez"), zipfile.ZipFile(path) as archive:
        yield archive


def _channels_last(array: npz.Stored) -> bool:
    """Whether images are (n, S, S, c)."""
    return len(array.shape) == 4 and array.shape[3] in (1, 3) and array.shape[1] == array.shape[2]


def _rows(archive: zipfile.ZipFile, array: npz.Stored, rows: np.ndarray) -> np.ndarray:
    """Rows of an array in C order, (m, ...), read block by block."""
    n, *rest = array.shape
    width = prod(rest) * array.dtype.itemsize
    wanted = 2 * (len(rows) * width + max(width, _BLOCK))
    check_memory(wanted, array.where, f"{len(rows)} items of {tuple(rest)}")
    out = np.empty((len(rows), *rest), array.dtype)
    step, end = max(1, _BLOCK // width), int(rows.max()) + 1
    with archive.open(array.entry) as stream, progress(end, f"reading {array.where}", " items") as bar:
        stream.read(array.start)
        for start in range(0, end, step):
            count = min(step, n - start)
            block = np.frombuffer(stream.read(count * width), array.dtype).reshape(count, *rest)
            mine = (rows >= start) & (rows < start + count)
            out[mine] = block[rows[mine] - start]
            bar.update(count)
    return out
