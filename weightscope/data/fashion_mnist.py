"""Fashion-MNIST (Xiao et al. 2017): IDX files, plain or compressed with gzip."""

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from weightscope.data import fetch
from weightscope.data.locations import Layout, check_labels, existing, find
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError

UBYTE = 0x08  # the IDX type code of unsigned bytes

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_NAMES = tuple(name + ending for name in _FILES for ending in ("", ".gz"))
_LAYOUTS = (Layout("fashion-mnist", _NAMES), Layout("FashionMNIST/raw", _NAMES))  # Debian's and torchvision's


@DATASETS.register(
    "fashion-mnist",
    channels=1,
    size=28,
    classes=10,
    train=60_000,
    test=10_000,
    how_to_get="install the Debian package dataset-fashion-mnist, or put the four IDX files "
    "(train-images-idx3-ubyte[.gz], ...) into a folder `fashion-mnist` in one of these",
)
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images in the files' order.

    Args:
        info: shapes and sizes.
        root: a folder to search first.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if the files are missing or damaged.
    """
    found = find(root, _LAYOUTS)
    if found is None:
        return fetch.read(info, root, train, test)
    paths = [_either(found[0] / name, info) for name in _FILES]
    shape = (info.size, info.size)
    train_images = read_idx(paths[0], shape, train, most=info.train)
    train_labels = read_idx(paths[1], (), train, most=info.train)
    test_images = read_idx(paths[2], shape, test, most=info.test)
    test_labels = read_idx(paths[3], (), test, most=info.test)
    check_labels(train_labels, info.classes, str(paths[1]))
    check_labels(test_labels, info.classes, str(paths[3]))
    return train_images[:, None], train_labels, test_images[:, None], test_labels


def at_hand(root: Path | None = None) -> bool:
    """Whether the files are in one of the folders that are searched, so that nothing is downloaded."""
    return find(root, _LAYOUTS) is not None


def read_idx(path: Path, shape: tuple[int, ...], count: int, *, most: int) -> np.ndarray:
    """The first items of an IDX file of unsigned bytes.

    An IDX file consists of the bytes 0, 0, type and number of axes; the length of each axis as a big-endian
    uint32; and the items. The header is compared with the expected shape before anything is read, so a damaged
    one cannot cause more than `most` items to be allocated.

    Args:
        path: the file; gzip-compressed if it ends in `.gz`.
        shape: of one item.
        count: how many items to return.
        most: the largest number of items allowed in the file.

    Returns:
        Items, uint8 (count, *shape).

    Raises:
        DataError: if the magic number, the axes or the length differ; names the file, what was expected and found.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    header = 4 + 4 * (1 + len(shape))
    try:
        with opener(path, "rb") as stream:
            head = stream.read(header)
            items = _items(head, path, shape, count, most)
            data = stream.read(items * prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); it is damaged or truncated; download it again") from error
    if len(data) != items * prod(shape):
        found = f"{header + len(data)}" if len(data) < items * prod(shape) else "more"
        raise DataError(
            f"{path}: expected {header + items * prod(shape)} bytes as its header says, found {found}; "
            "download it again"
        )
    return np.frombuffer(data, np.uint8, count * prod(shape)).reshape(count, *shape).copy()


def _items(head: bytes, path: Path, shape: tuple[int, ...], count: int, most: int) -> int:
    """The number of items in a valid header."""
    magic = bytes([0, 0, UBYTE, 1 + len(shape)])
    if head[:4] != magic:
        raise DataError(
            f"{path}: expected an IDX file beginning with {magic.hex(' ')}, found {head[:4].hex(' ') or 'nothing'}"
        )
    axes = tuple(int(n) for n in np.frombuffer(head[4 : len(head) // 4 * 4], ">u4"))
    if len(axes) != 1 + len(shape):
        raise DataError(
            f"{path}: expected a header of {8 + 4 * len(shape)} bytes, found {len(head)}; download it again"
        )
    if axes[1:] != shape or not count <= axes[0] <= most:
        wanted = f"{most}" if count == most else f"{count} to {most}"
        raise DataError(f"{path}: expected {wanted} items of shape {shape}, found {axes[0]} of {axes[1:]}")
    return axes[0]


def _either(path: Path, info: DatasetInfo) -> Path:
    """The uncompressed file if it exists, otherwise the compressed one."""
    compressed = path.with_name(path.name + ".gz")
    return path if path.is_file() else existing(compressed, info.name)
