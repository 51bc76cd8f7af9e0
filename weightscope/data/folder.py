"""Images of one's own in files: a folder with a folder for each class, or an .npz file.

The images of a folder are listed without decoding them, and only those that are asked for are read.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from weightscope._util.names import listing
from weightscope.data.arrays import check_counts, count_classes, read_npz
from weightscope.data.images import SUFFIXES, read_images, resize
from weightscope.data.registry import FOLDER, Arrays, DatasetInfo, Part, SourceConfig, first_found, search_folders
from weightscope.errors import DataError

_TRAIN, _TESTS = "train", ("test", "val")
_TEST_SHARE = 0.2


def described(config: SourceConfig, root: str | Path | None) -> DatasetInfo:
    """The info of a folder or .npz file; if the recipe has all of it, without reading and without numbers of images."""
    if config.size is not None and config.channels is not None and config.classes is not None:
        return DatasetInfo(FOLDER, config.channels, config.size, config.classes, 0, 0)
    return _opened(config, root)[0]


def read(
    config: SourceConfig, root: str | Path | None, train: int | None, test: int | None
) -> tuple[DatasetInfo, Arrays]:
    """The info of a folder or .npz file, and its first training and test images, resized.

    The folder has a folder of images for each class, or two folders `train` and `test` (or `val`) that have them. An
    .npz file has the arrays `PARTS`, or `images` and `labels`: integers from 0 to 255 of shape (n, S, S), (n, c, S, S)
    or (n, S, S, c), and (n,). Without test images a share of each class, drawn by `split_seed`, is for testing.
    """
    info, parts, orders = _opened(config, root)
    counts = check_counts(FOLDER, train, test, info.train, info.test)
    made: list[np.ndarray] = []
    for (images, labels), order, count in zip((parts[0], parts[-1]), orders, counts, strict=True):
        chosen = images[order[:count]]
        if images.dtype == object:
            made.append(_decoded(tuple((path, path.stat().st_mtime_ns) for path in chosen), info.size, info.channels))
        else:
            made.append(resize(chosen, info.size, FOLDER))
        made.append(labels[order[:count]])
    return info, (made[0], made[1], made[2], made[3])


@lru_cache(maxsize=2)  # every tile of a benchmark reads the data again
def _decoded(files: tuple[tuple[Path, int], ...], size: int, channels: int) -> np.ndarray:
    """The pixels of files, which are given with their times."""
    return read_images([path for path, _ in files], size, channels, FOLDER)


def located(config: SourceConfig, root: str | Path | None) -> Path:
    """The folder or .npz file of a recipe."""
    if config.path is None and root is None:
        raise DataError("folder: expected data.path in the recipe, or --data with the images, found neither")
    return first_found(
        config.path or "",
        [Path(root or "")] if config.path is None else [*search_folders(root), Path()],
        lambda path: path.is_dir() or (path.is_file() and path.suffix == ".npz"),
        "folder: expected a folder of images or an .npz file",
    )


def _opened(config: SourceConfig, root: str | Path | None) -> tuple[DatasetInfo, Sequence[Part], list[np.ndarray]]:
    """The info, one part or a training and a test part, and the order of the training and of the test images in it."""
    path = located(config, root)
    if path.is_file():
        parts = read_npz(path, path.stat().st_mtime_ns)
        _, channels, size, _ = parts[0][0].shape
    else:
        parts, channels, size = _listed(path), config.channels or 3, config.size or 0
    classes = count_classes(parts[0][1], parts[-1][1], path)
    for name, found in (("channels", channels), ("classes", classes)):
        if (wanted := getattr(config, name)) not in (None, found):
            raise DataError(f"{path}: expected {wanted} {name} (data.{name}), found {found}")
    if len(parts) == 1:
        orders = _split(path, parts[0][1], config)
    elif config.test_share is None and config.split_seed is None:
        orders = [_interleaved(labels) for _, labels in parts]
    else:
        raise DataError(f"{path}: there are test images already; remove data.test_share and data.split_seed")
    train, test = map(len, orders)
    return DatasetInfo(FOLDER, channels, config.size or size, classes, train, test), parts, orders


def _listed(path: Path) -> list[Part]:
    """The images of a folder as paths, and their labels, in one part or in training and test."""
    if not (path / _TRAIN).is_dir():
        folders = [path]
    elif tests := [path / name for name in _TESTS if (path / name).is_dir()]:
        folders = [path / _TRAIN, tests[0]]
    else:
        raise DataError(f"{path}: expected a folder {' or '.join(_TESTS)} beside {_TRAIN}, found none")
    names = sorted(child.name for child in folders[0].iterdir() if child.is_dir() and not child.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{folders[0]}: expected a folder for each of at least 2 classes, found {len(names)} folders")
    known = {child.name for child in folders[-1].iterdir() if child.is_dir() and not child.name.startswith(".")}
    if others := sorted(known - {*names}):
        raise DataError(f"{folders[-1]}: expected classes of {folders[0]}, found others: {listing(others)}")
    parts = []
    for folder in folders:
        files = [sorted(f for f in (folder / name).glob("[!.]*") if f.suffix.lower() in SUFFIXES) for name in names]
        if empty := [name for name, found in zip(names, files, strict=True) if not found and folder == folders[0]]:
            suffixes = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{folder}: expected images ({suffixes}) in each folder, found none in {listing(empty)}")
        paths = np.array([file for found in files for file in found], dtype=object)
        parts.append((paths, np.repeat(np.arange(len(names)), [len(found) for found in files])))
    return parts


def _split(path: Path, labels: np.ndarray, config: SourceConfig) -> list[np.ndarray]:
    """Indices of training and of test images, a share of each class for testing."""
    random, held = np.random.default_rng([config.split_seed or 0, len(labels)]), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = random.permutation(np.flatnonzero(labels == label))
        if len(mine) < 2:
            raise DataError(f"{path}: expected at least 2 images of each class, one for testing, found 1 of {label}")
        held[mine[: min(max(1, round((config.test_share or _TEST_SHARE) * len(mine))), len(mine) - 1)]] = True
    order = random.permutation(len(labels))
    return [order[~held[order]], order[held[order]]]


def _interleaved(labels: np.ndarray) -> np.ndarray:
    """An order of the items, (n,): item r of a class of m items is at the fraction (r + 1/2) / m of the whole."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = (np.arange(len(labels)) - np.repeat(starts, counts) + 0.5) / np.repeat(counts, counts)
    return np.argsort(place, kind="stable")
