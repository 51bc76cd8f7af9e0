"""Images of one's own: a folder with a folder for each class, or an .npz file."""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from weightscope._util.names import listing
from weightscope.data.arrays import PARTS, checked, checked_images, checked_labels
from weightscope.data.config import FOLDER, SourceConfig
from weightscope.data.images import SUFFIXES, read_images, resize
from weightscope.data.registry import Arrays, DatasetInfo, first_place, places
from weightscope.errors import DataError

_TRAINS = ("train", "training")  # in upper or lower case
_TESTS = ("test", "val", "valid", "validation", "testing")
_TEST_SHARE = 0.2
_TOGETHER = ("images", "labels")
_LARGEST = 2**35  # bytes of one array
_MOST_ENTRIES = 1024


@dataclass(frozen=True)
class Contents:
    """What is in a folder of images; nothing of it is decoded."""

    path: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, ...], tuple[int, ...]]
    test: tuple[tuple[Path, ...], tuple[int, ...]]
    signature: str


def described(config: SourceConfig, root: Path | None) -> DatasetInfo:
    """The info of a folder or .npz file; if the classes are given, without reading it and without numbers of images."""
    size, channels, train, test = config.size or 0, config.channels or 3, 0, 0
    classes = config.classes
    if classes is None:
        path = located(config, root)
        if path.is_file():
            arrays = _npz(path, config)
            classes, train, test = int(arrays[1].max()) + 1, len(arrays[0]), len(arrays[2])
        else:
            found = contents(path, config)
            classes, train, test = len(found.classes), len(found.train[0]), len(found.test[0])
    return DatasetInfo(FOLDER, channels, size, classes, train, test, config=config)


def located(config: SourceConfig, root: Path | None) -> Path:
    """The folder or .npz file of a recipe."""

    def accepted(path: Path) -> bool:
        return path.is_dir() or (path.is_file() and path.suffix == ".npz")

    searched = [*places(root), Path()]
    if config.path is None:
        if root is None:
            raise DataError("folder: expected data.path in the recipe, or --data with the images, found neither")
        searched = [root]
    return first_place(config.path or "", searched, accepted, "folder: expected a folder of images or an .npz file")


def read(info: DatasetInfo, root: Path | None, train: int | None, test: int | None) -> Arrays:
    """Training and test images of a folder, resized.

    The folder has a folder for each class, or two folders `train` (`training`) and `test` (`testing`, `val`, `valid`,
    `validation`), in upper or lower case, that have them. Without these, a share of each class, drawn by `split_seed`,
    is for testing. Hidden files and folders are skipped. An .npz file has `train_images`, `train_labels`, `test_images`
    and `test_labels`, whose classes are interleaved, or `images` and `labels`, which are split as a folder is; images
    are uint8 (n, S, S), (n, c, S, S) or (n, S, S, c), labels integers (n,).
    """
    config = info.config
    assert config is not None, "made by `described`"
    path = located(config, root)
    if path.is_file():
        images, labels, test_images, test_labels = _npz(path, config)
        _check_classes(path, int(labels.max()) + 1, config)
        return images[:train], labels[:train], test_images[:test], test_labels[:test]
    found = contents(path, config)
    _check_classes(path, len(found.classes), config)
    return (
        *_decoded(found.train, train, info.size, info.channels, f"{path} (training)", found.signature),
        *_decoded(found.test, test, info.size, info.channels, f"{path} (test)", found.signature),
    )


def contents(path: Path, config: SourceConfig) -> Contents:
    """The classes and files of a folder."""
    seed = config.split_seed or 0
    trains, tests = _parts(path, _TRAINS), _parts(path, _TESTS)
    if not trains:
        classes, files = _classes(path)
        train, test = _split(files, config.test_share or _TEST_SHARE, seed)
    else:
        for names, parts in ((_TRAINS, trains), (_TESTS, tests)):
            if len(parts) != 1:
                beside = "" if names is _TRAINS else f" beside {trains[0].name}"
                found = listing([part.name for part in parts]) if parts else "none"
                raise DataError(f"{path}: expected one folder of {', '.join(names)}{beside}, found {found}")
        _check_not_split(path, config.test_share, config.split_seed)
        classes, train = _classes(trains[0])
        test_classes, of_test = _classes(tests[0])
        if unknown := sorted(set(test_classes) - set(classes)):
            raise DataError(
                f"{tests[0]}: expected classes of {trains[0]}, found {len(unknown)} others: {listing(unknown)}"
            )
        by_name = dict(zip(test_classes, of_test, strict=True))
        test = [by_name.get(name, []) for name in classes]
    return Contents(path, tuple(classes), _mixed(train, seed), _mixed(test, seed + 1), _signature([*train, *test]))


def _parts(path: Path, names: tuple[str, ...]) -> list[Path]:
    """The folders that have one of these names, in upper or lower case."""
    return sorted(child for child in path.iterdir() if child.name.lower() in names and child.is_dir())


def _check_not_split(path: Path, share: float | None, seed: int | None) -> None:
    """Refuse settings of a split for data that are not split."""
    given = [name for name, value in (("data.test_share", share), ("data.split_seed", seed)) if value is not None]
    if given:
        raise DataError(
            f"{path}: expected no {' or '.join(given)}, as there are training and test images already; remove "
            f"{'it' if len(given) == 1 else 'them'} from the recipe"
        )


def _classes(path: Path) -> tuple[list[str], list[list[Path]]]:
    """Names of the class folders, sorted, and the images in each, sorted."""
    names = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{path}: expected a folder for each of at least 2 classes, found {len(names)} folders")
    files = [_images_in(path / name) for name in names]
    if empty := [name for name, inside in zip(names, files, strict=True) if not inside]:
        raise DataError(
            f"{path}: expected images ({', '.join(sorted(SUFFIXES))}) in each of {len(names)} folders, "
            f"found none in {len(empty)} of them: {listing(empty)}"
        )
    for name, inside in zip(names, files, strict=True):
        _check_one_class(path / name, inside)
    return names, files


def _check_one_class(folder: Path, files: list[Path]) -> None:
    """Refuse a folder of several folders of images: it is a part or a group of classes. One folder below is fine."""
    if any(file.parent == folder for file in files):
        return
    below = sorted({file.relative_to(folder).parts[0] for file in files})
    if len(below) > 1:
        raise DataError(
            f"{folder}: expected the images of one class, found only {len(below)} folders of images: {listing(below)}; "
            f"name the parts `{_TRAINS[0]}` and `{_TESTS[0]}`, or put the images of a class directly into its folder"
        )


def _images_in(folder: Path) -> list[Path]:
    """Images in a folder and those below, sorted, without hidden files and folders."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # os.walk enters the remaining ones
        found += [
            Path(place, name) for name in names if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def _split(files: list[list[Path]], share: float, seed: int) -> tuple[list[list[Path]], list[list[Path]]]:
    """The images of each class for training and for testing: at least one of each."""
    train, test = [], []
    for label, inside in enumerate(files):
        if len(inside) < 2:
            raise DataError(
                f"{inside[0].parent}: expected at least 2 images of each class, one of them for testing, found 1"
            )
        held = min(max(1, round(share * len(inside))), len(inside) - 1)
        order = np.random.default_rng([seed, label]).permutation(len(inside))
        test.append([inside[i] for i in sorted(order[:held])])
        train.append([inside[i] for i in sorted(order[held:])])
    return train, test


def _mixed(files: list[list[Path]], seed: int) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """All paths and labels in one random order, so that the first n are of all classes."""
    paths = [path for inside in files for path in inside]
    labels = [label for label, inside in enumerate(files) for _ in inside]
    order = np.random.default_rng([seed, len(files), len(paths)]).permutation(len(paths))
    return tuple(paths[i] for i in order), tuple(labels[i] for i in order)


def _signature(files: list[list[Path]]) -> str:
    digest = hashlib.sha256()
    for path in (path for inside in files for path in inside):
        found = path.stat()
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@lru_cache(maxsize=2)  # training and test; every tile of a benchmark reads the data again
def _decoded(
    files: tuple[tuple[Path, ...], tuple[int, ...]],
    count: int | None,
    size: int,
    channels: int,
    what: str,
    _signature: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of the first files."""
    paths, labels = files[0][:count], np.array(files[1][:count], dtype=np.int64)
    return read_images(paths, size, channels, what), labels


def _npz(path: Path, config: SourceConfig) -> Arrays:
    size, channels = config.size or 0, config.channels or 3
    return _from_npz(path, size, channels, config.test_share, config.split_seed, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _from_npz(path: Path, size: int, channels: int, share: float | None, seed: int | None, _date: int) -> Arrays:
    """The four arrays of an .npz file, split or with interleaved classes, and resized."""
    found = read_npz(path)
    if "images" in found:
        found = _split_arrays(found, path, share or _TEST_SHARE, seed or 0)
        arrays = checked(tuple(found[part] for part in PARTS), str(path))
    else:
        _check_not_split(path, share, seed)
        arrays = checked(tuple(found[part] for part in PARTS), str(path))
        train, test = _interleaved(arrays[1]), _interleaved(arrays[3])
        arrays = arrays[0][train], arrays[1][train], arrays[2][test], arrays[3][test]
    if arrays[0].shape[1] != channels:
        raise DataError(f"{path}: expected images of {channels} channels (data.channels), found {arrays[0].shape[1]}")
    return resize(arrays[0], size, str(path)), arrays[1], resize(arrays[2], size, str(path)), arrays[3]


def _split_arrays(found: dict[str, np.ndarray], path: Path, share: float, seed: int) -> dict[str, np.ndarray]:
    """A share of each class for testing, the others for training, each in a random order."""
    images = checked_images(found["images"], f"{path}: images")
    labels = checked_labels(found["labels"], f"{path}: labels", len(images))
    random, held = np.random.default_rng([seed, len(labels)]), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = random.permutation(np.flatnonzero(labels == label))
        if len(mine) < 2:
            raise DataError(
                f"{path}: expected at least 2 images of each class, one of them for testing, found 1 of class {label}"
            )
        held[mine[: min(max(1, round(share * len(mine))), len(mine) - 1)]] = True
    order = random.permutation(len(labels))
    train, test = order[~held[order]], order[held[order]]
    parts = (images[train], labels[train], images[test], labels[test])
    return dict(zip(PARTS, parts, strict=True))


def _interleaved(labels: np.ndarray) -> np.ndarray:
    """An order of the items, (n,), in which each class is spread evenly and keeps its own order.

    Item r = 0, 1, ... of a class of m items is at the fraction (r + 1/2) / m of the whole, so that the first and the
    last items are of all classes. The order of labels that are interleaved already does not change.
    """
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = (np.arange(len(labels)) - np.repeat(starts, counts) + 0.5) / np.repeat(counts, counts)
    return np.argsort(place, kind="stable")


def _check_classes(path: Path, found: int, config: SourceConfig) -> None:
    if config.classes is not None and found != config.classes:
        raise DataError(f"{path}: expected {config.classes} classes (data.classes), found {found}")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays `train_images`, `train_labels`, `test_images`, `test_labels`, or `images` and `labels`.

    Images of shape (n, S, S, c) with 1 or 3 channels are transposed to (n, c, S, S). Objects are never unpickled.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()[:_MOST_ENTRIES]}
            wanted = next((names for names in (PARTS, _TOGETHER) if set(names) <= set(entries)), None)
            if wanted is None:
                raise DataError(
                    f"{path}: expected arrays {', '.join(PARTS)}, or {' and '.join(_TOGETHER)}, found "
                    f"{', '.join(sorted(entries)[:8]) or 'none'}"
                )
            return {name: _npz_array(archive, entries[name], f"{path}: {name}") for name in wanted}
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        raise DataError(f"{path}: cannot be read as an .npz file ({type(error).__name__}: {error})") from error


def _npz_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> np.ndarray:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if header is None:
            raise DataError(f"{where}: expected version 1.0 or 2.0 of the .npy format, found {version}")
        shape, in_columns, dtype = header(stream)
        if dtype.hasobject:
            raise DataError(f"{where}: expected numbers, found pickled objects, which are not read")
        wanted, there = prod(shape) * dtype.itemsize, entry.file_size - stream.tell()
        if wanted != there or wanted > _LARGEST:
            raise DataError(f"{where}: expected {wanted} bytes (at most {_LARGEST}) as its header says, found {there}")
        data = stream.read(wanted)
    if len(data) != wanted:
        raise DataError(f"{where}: expected {wanted} bytes, found {len(data)}")
    values = np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if in_columns else "C")
    if values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] == values.shape[2]:
        return values.transpose(0, 3, 1, 2)
    return values.reshape(-1) if values.ndim == 2 and values.shape[1] == 1 else values
