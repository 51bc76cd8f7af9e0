"""Images of one's own: a folder with a folder for each class, or an .npz file."""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from weightscope._util.names import listing
from weightscope.data.arrays import PARTS, checked
from weightscope.data.config import FOLDER, SourceConfig
from weightscope.data.images import SUFFIXES, read_images, resize
from weightscope.data.locations import places
from weightscope.data.npz import read_npz
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError

_TRAIN = "train"
_TESTS = ("test", "val", "valid", "validation")
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Contents:
    """What is in a folder of images; nothing of it is decoded.

    Attributes:
        path: the folder.
        classes: names of the classes, sorted; class i is the i-th.
        train: paths and labels of the training images, in an order drawn by the seed.
        test: the same of the test images.
        signature: changes whenever a file's path, size or date does.
    """

    path: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, ...], tuple[int, ...]]
    test: tuple[tuple[Path, ...], tuple[int, ...]]
    signature: str


def described(config: SourceConfig, root: Path | None) -> DatasetInfo:
    """The info of a folder or .npz file; without reading it, and without numbers of images, if the classes are given.

    Raises:
        DataError: if the classes are to be counted, and the folder is missing or has none.
    """
    size, channels, train, test = config.size or 0, config.channels or 3, 0, 0
    classes = config.classes
    if classes is None:
        path = located(config, root)
        if path.is_file():
            arrays = _npz(path, config)
            classes, train, test = int(arrays[1].max()) + 1, len(arrays[0]), len(arrays[2])
        else:
            found = contents(path, config.test_share or _TEST_SHARE, config.split_seed or 0)
            classes, train, test = len(found.classes), len(found.train[0]), len(found.test[0])
    return DatasetInfo(FOLDER, channels, size, classes, train, test, config=config)


def located(config: SourceConfig, root: Path | None) -> Path:
    """The folder or .npz file of a recipe.

    Raises:
        DataError: if there is none; says where it was searched for.
    """
    if config.path is None:
        if root is None:
            raise DataError("folder: expected data.path in the recipe, or --data with the images, found neither")
        places_of_it = [root]
    elif Path(config.path).is_absolute():
        places_of_it = [Path(config.path)]
    else:
        places_of_it = [place / config.path for place in (*places(root), Path())]
    for path in places_of_it:
        if path.is_dir() or (path.is_file() and path.suffix == ".npz"):
            return path
    looked = ", ".join(str(path.absolute()) for path in places_of_it)
    raise DataError(f"folder: expected a folder of images or an .npz file at one of {looked}, found none")


@DATASETS.register(
    FOLDER,
    channels=3,
    size=0,
    classes=0,
    train=0,
    test=0,
    how_to_get="`data.path`: a folder with a folder of images for each class, or an .npz; resized to `data.size`",
)
def read(info: DatasetInfo, root: Path | None, train: int | None, test: int | None) -> Arrays:
    """Training and test images of a folder, resized.

    The folder has a folder for each class, or two folders `train` and `test` (or `val`) that have them. Without these,
    a share of each class, drawn by `split_seed`, is for testing. An .npz file has `train_images`, `train_labels`,
    `test_images` and `test_labels`, or `images` and `labels`; images are uint8 (n, S, S), (n, c, S, S) or (n, S, S, c).

    Args:
        info: with the recipe's settings in `info.config`.
        root: a folder to search first.
        train: how many training images; None for all.
        test: how many test images; None for all.

    Raises:
        DataError: if there is no such folder, a class has no images, images cannot be read (says how many, and which),
            or the number of classes is not the recipe's.
    """
    config = info.config
    assert config is not None, "made by `described`"
    path = located(config, root)
    if path.is_file():
        images, labels, test_images, test_labels = _npz(path, config)
        _check_classes(path, int(labels.max()) + 1, config)
        return images[:train], labels[:train], test_images[:test], test_labels[:test]
    found = contents(path, config.test_share or _TEST_SHARE, config.split_seed or 0)
    _check_classes(path, len(found.classes), config)
    return (
        *_decoded(found.train, train, info.size, info.channels, f"{path} (training)", found.signature),
        *_decoded(found.test, test, info.size, info.channels, f"{path} (test)", found.signature),
    )


def contents(path: Path, test_share: float, seed: int) -> Contents:
    """The classes and files of a folder.

    Raises:
        DataError: if there are fewer than two classes, one has no images, or a test class is not one of training.
    """
    if not (path / _TRAIN).is_dir():
        classes, files = _classes(path)
        train, test = _split(files, test_share, seed)
    else:
        classes, train = _classes(path / _TRAIN)
        tests = [path / name for name in _TESTS if (path / name).is_dir()]
        if len(tests) != 1:
            raise DataError(
                f"{path}: expected one folder of {', '.join(_TESTS)} beside {_TRAIN}, found "
                f"{listing([t.name for t in tests]) if tests else 'none'}"
            )
        test_classes, of_test = _classes(tests[0])
        if unknown := sorted(set(test_classes) - set(classes)):
            raise DataError(
                f"{tests[0]}: expected classes of {path / _TRAIN}, found {len(unknown)} others: {listing(unknown)}"
            )
        by_name = dict(zip(test_classes, of_test, strict=True))
        test = [by_name.get(name, []) for name in classes]
    return Contents(path, tuple(classes), _mixed(train, seed), _mixed(test, seed + 1), _signature([*train, *test]))


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
    return names, files


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        Path(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
    )


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
    share, seed = config.test_share or _TEST_SHARE, config.split_seed or 0
    return _from_npz(path, config.size or 0, config.channels or 3, share, seed, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _from_npz(path: Path, size: int, channels: int, share: float, seed: int, _date: int) -> Arrays:
    """The four arrays of an .npz file, resized and split."""
    found = read_npz(path)
    if "images" in found:
        found = _split_arrays(found["images"], found["labels"], share, seed)
    arrays = checked(tuple(found[part] for part in PARTS), str(path))
    if arrays[0].shape[1] != channels:
        raise DataError(f"{path}: expected images of {channels} channels (data.channels), found {arrays[0].shape[1]}")
    return resize(arrays[0], size, str(path)), arrays[1], resize(arrays[2], size, str(path)), arrays[3]


def _split_arrays(images: np.ndarray, labels: np.ndarray, share: float, seed: int) -> dict[str, np.ndarray]:
    """A share of each class for testing, the others for training, each in a random order."""
    random, held = np.random.default_rng([seed, len(labels)]), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = random.permutation(np.flatnonzero(labels == label))
        held[mine[: min(max(1, round(share * len(mine))), len(mine) - 1)]] = True
    order = random.permutation(len(labels))
    train, test = order[~held[order]], order[held[order]]
    parts = (images[train], labels[train], images[test], labels[test])
    return dict(zip(PARTS, parts, strict=True))


def _check_classes(path: Path, found: int, config: SourceConfig) -> None:
    if config.classes is not None and found != config.classes:
        raise DataError(f"{path}: expected {config.classes} classes (data.classes), found {found}")
