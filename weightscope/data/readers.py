"""Readers of the registered data sets: CIFAR, scikit-learn's digits, Fashion-MNIST, STL-10, SVHN and Tiny ImageNet.

Each is `read(info, root, train, test)`: the first training and test images, in the files' order, of the data set that
`info` describes, searched for in `root` first. Files that are missing or damaged are a `DataError`. CIFAR and
Fashion-MNIST are downloaded from the Hugging Face Hub if they are found nowhere and pyarrow is installed.
"""

import contextlib
import gzip
import importlib.util
import io
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.names import listing, shortened
from weightscope._util.restricted_pickle import load_arrays, uint8_array
from weightscope._util.sources import read_regular
from weightscope.data.images import check_memory, read_images, reading
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo, Part, places
from weightscope.errors import DataError

# --- files -----------------------------------------------------------------------------------------------------------


Layout = tuple[str, tuple[str, ...]]
"""A data set's usual folder, whose files may also be in the searched one itself, and files that identify it."""


def find(root: Path | None, *layouts: Layout) -> tuple[Path, Layout] | None:
    """The first folder with a data set in one of the layouts, or None."""
    for place in places(root):
        for layout in layouts:
            for folder in (place / layout[0], place):
                if any((folder / file).is_file() for file in layout[1]):
                    return folder, layout
    return None


def missing(info: DatasetInfo, root: Path | None, instead: str = "") -> DataError:
    """The error that says where files were searched for, and how to get them."""
    looked = ", ".join(str(place.absolute()) for place in places(root))
    return DataError(
        f"{info.name}: expected its files in one of {looked}, found none; {info.how_to_get}; "
        f"or name another folder with --data or WEIGHTSCOPE_DATA{'; ' + instead if instead else ''}"
    )


def located(info: DatasetInfo, root: Path | None, *layouts: Layout) -> Path:
    """The first folder with a data set that is not downloaded; DataError if there is none."""
    if (found := find(root, *layouts)) is None:
        raise missing(info, root)
    return found[0]


def existing(path: Path, info: DatasetInfo) -> Path:
    """The path, if it is a file; DataError otherwise."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of {info.name}, found none; is the data set complete?")
    return path


def read_records(path: Path, record: int, most: int, count: int) -> np.ndarray:
    """The first records of a binary file, uint8 (count, record); DataError unless it has `count` to `most` records."""
    size = path.stat().st_size
    if size % record or not count * record <= size <= most * record:
        raise DataError(
            f"{path}: expected {most * record} bytes ({most} records of {record}), found {size}; download it again"
        )
    return np.fromfile(path, np.uint8, count * record).reshape(count, record)


def checked_part(images: np.ndarray, labels: np.ndarray, info: DatasetInfo, where: object) -> Part:
    """Images (n, c, S, S) and labels (n,) as uint8; DataError naming the first label that is not below K."""
    wrong = np.flatnonzero((labels < 0) | (labels >= info.classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels from 0 to {info.classes - 1}, found {labels[wrong[0]]} at item {wrong[0]}; "
            "is this another data set?"
        )
    shape = (len(labels), info.channels, info.size, info.size)
    return np.array(images, order="C").reshape(shape), labels.astype(np.uint8)  # a copy, which may be written to


# --- CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the official binary version and the Python version ---------------------

# name -> the usual folder, training files of equally many images, test file, and in the binary version the label bytes
# before each image, of which the last is read, in the Python version the key of the labels
_CIFAR: dict[str, list[tuple[str, tuple[str, ...], str, int | str]]] = {
    "cifar10": [
        ("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", 1),
        ("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels"),
    ],
    "cifar100": [  # the coarse label precedes the fine one, which is the class
        ("cifar-100-binary", ("train.bin",), "test.bin", 2),
        ("cifar-100-python", ("train",), "test", "fine_labels"),
    ],
}
_SIZES = {"channels": 3, "size": 32, "train": 50_000, "test": 10_000}
_HOW = "unpack the official files so that one of these contains"


@DATASETS.register("cifar100", **_SIZES, classes=100, how_to_get=f"{_HOW} `cifar-100-binary/train.bin`")
@DATASETS.register("cifar10", **_SIZES, classes=10, how_to_get=f"{_HOW} `cifar-10-batches-bin/data_batch_1.bin`")
def cifar(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """CIFAR-10 or CIFAR-100; only the files that hold the images are read."""
    versions = {(version[0], (*version[1], version[2])): version for version in _CIFAR[info.name]}
    found = find(root, *versions)
    if found is None:
        return _from_hub(info, root, train, test)
    folder, (_, train_files, test_file, labels) = found[0], versions[found[1]]
    read = _cifar_binary if isinstance(labels, int) else _cifar_python
    each, parts = info.train // len(train_files), []
    for start, name in zip(range(0, train, each), train_files, strict=False):
        parts.append(read(existing(folder / name, info), labels, info, min(each, train - start), each))
    images, train_labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, train_labels, *read(existing(folder / test_file, info), labels, info, test, info.test)


def _cifar_binary(path: Path, labels: Any, info: DatasetInfo, count: int, most: int) -> Part:
    """The first images of a file of records: label bytes, then the red, green and blue planes."""
    records = read_records(path, labels + info.channels * info.size**2, most, count)
    return checked_part(records[:, labels:], records[:, labels - 1], info, path)


def _cifar_python(path: Path, key: Any, info: DatasetInfo, count: int, most: int) -> Part:
    """The first images of a pickled dictionary with `data` (n, c * S * S) and a list of labels."""
    pixels = info.channels * info.size**2
    with reading(path, "a CIFAR file"):
        raw = read_regular(path, most * (pixels + 256) + 65_536)  # names of files and labels beside the pixels
    batch = load_arrays(raw, str(path))
    items = batch.items() if isinstance(batch, dict) else ()
    entries = {name.decode("latin-1") if isinstance(name, bytes) else str(name): value for name, value in items}
    if "data" not in entries or key not in entries:
        found = listing(sorted(entries)) or "something else"
        raise DataError(f"{path}: expected a dictionary with 'data' and {key!r}, found {found}")
    data, labels = uint8_array(entries["data"], f"{path}: 'data'"), entries[key]
    if data.ndim != 2 or data.shape[1] != pixels or not count <= len(data) <= most:
        raise DataError(f"{path}: expected {most} images of {pixels} pixels, found data of shape {data.shape}")
    bytes_only = isinstance(labels, list) and all(isinstance(n, int) and 0 <= n < 256 for n in labels)
    if not bytes_only or len(labels) != len(data):
        raise DataError(f"{path}: expected {len(data)} labels from 0 to {info.classes - 1} in {key!r}, found others")
    return checked_part(data[:count], np.array(labels[:count]), info, path)


# --- digits: the test half of UCI's "Optical Recognition of Handwritten Digits" ---------------------------------------


@DATASETS.register(
    "digits", channels=1, size=8, classes=10, train=1437, test=360, how_to_get="`pip install scikit-learn`"
)
def digits(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """The 1,797 handwritten digits of scikit-learn, which defines no split.

    Every fifth image, after a stable sort by class, is a test image: 360 test and 1,437 training images with the same
    class proportions to within one image. The same writers are in both parts, so test accuracy does not measure
    generalisation to new writers. Pixels from 0 to 16 are scaled to 0 .. 255 and rounded, which keeps all 17 levels.
    """
    package = importlib.util.find_spec("sklearn")  # importing it takes a second
    folder = Path(str(package and package.origin)).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1].astype(int)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, info.size, info.size)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    labels = labels.astype(np.uint8)
    return images[~held_out][:train], labels[~held_out][:train], images[held_out][:test], labels[held_out][:test]


# --- Fashion-MNIST (Xiao et al. 2017): IDX files, plain or compressed with gzip ---------------------------------------

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IDX_NAMES = tuple(name + ending for name in _IDX for ending in ("", ".gz"))
_FASHION = ("fashion-mnist", _IDX_NAMES), ("FashionMNIST/raw", _IDX_NAMES)  # Debian's, torchvision's
_UBYTE = 0x08  # the IDX type code of unsigned bytes


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
def fashion_mnist(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Fashion-MNIST; an uncompressed file is preferred to a compressed one."""
    found = find(root, *_FASHION)
    if found is None:
        return _from_hub(info, root, train, test)

    def part(names: tuple[str, ...], count: int, most: int) -> Part:
        paths = [found[0] / name for name in names]
        paths = [path if path.is_file() else existing(path.with_name(f"{path.name}.gz"), info) for path in paths]
        images = _read_idx(paths[0], (info.size, info.size), count, most)
        return checked_part(images, _read_idx(paths[1], (), count, most), info, paths[1])

    return *part(_IDX[:2], train, info.train), *part(_IDX[2:], test, info.test)


def fashion_mnist_at_hand(root: Path | None = None) -> bool:
    """Whether its files are in one of the folders that are searched, so that nothing is downloaded."""
    return find(root, *_FASHION) is not None


def _read_idx(path: Path, shape: tuple[int, ...], count: int, most: int) -> np.ndarray:
    """The first items of an IDX file, uint8 (count, *shape); its header is compared before anything else is read."""
    magic, header = bytes([0, 0, _UBYTE, 1 + len(shape)]), 8 + 4 * len(shape)
    with reading(path, "an IDX file"), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        head = stream.read(header)
        if head[:4] != magic:
            found = head[:4].hex(" ") or "nothing"
            raise DataError(f"{path}: expected an IDX file beginning with {magic.hex(' ')}, found {found}")
        if len(head) != header:
            raise DataError(f"{path}: expected a header of {header} bytes, found {len(head)}; download it again")
        items, *axes = (int(n) for n in np.frombuffer(head[4:], ">u4"))
        if tuple(axes) != shape or not count <= items <= most:
            number = f"{most}" if count == most else f"{count} to {most}"
            raise DataError(f"{path}: expected {number} items of shape {shape}, found {items} of {tuple(axes)}")
        data = stream.read(items * prod(shape) + 1)
    wanted, there = header + items * prod(shape), header + len(data)
    if wanted != there:
        more = there if there < wanted else "more"
        raise DataError(f"{path}: expected {wanted} bytes as its header says, found {more}; download it again")
    return np.frombuffer(data, np.uint8, count * prod(shape)).reshape(count, *shape)


# --- STL-10 (Coates et al. 2011): the official binary files, whose images are stored by columns -----------------------


@DATASETS.register(
    "stl10",
    channels=3,
    size=96,
    classes=10,
    train=5_000,
    test=8_000,
    how_to_get=f"{_HOW} `stl10_binary/train_X.bin`",
)
def stl10(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """STL-10; the unlabelled images are not read."""
    folder = located(info, root, ("stl10_binary", ("train_X.bin", "test_X.bin")))

    def part(name: str, count: int, most: int) -> Part:
        """Of pixels (n, 3, column, row) and labels from 1."""
        record, path = info.channels * info.size**2, folder / f"{name}_y.bin"
        pixels = read_records(existing(folder / f"{name}_X.bin", info), record, most, count)
        labels = read_records(existing(path, info), 1, most, count).reshape(-1).astype(np.int64) - 1
        images = pixels.reshape(count, info.channels, info.size, info.size).transpose(0, 1, 3, 2)
        return checked_part(images, labels, info, path)

    return *part("train", train, info.train), *part("test", test, info.test)


# --- SVHN (Netzer et al. 2011), cropped digits: the official MATLAB files ---------------------------------------------

_SVHN = ("train_32x32.mat", "test_32x32.mat")


@DATASETS.register(
    "svhn",
    channels=3,
    size=32,
    classes=10,
    train=73_257,
    test=26_032,
    how_to_get="put the official train_32x32.mat and test_32x32.mat into a folder `svhn` in one of these",
)
def svhn(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """SVHN; class i is the digit i."""
    folder = located(info, root, ("svhn", _SVHN), ("SVHN", _SVHN))
    paths = [existing(folder / name, info) for name in _SVHN]
    return *_read_svhn(paths[0], info, train, info.train), *_read_svhn(paths[1], info, test, info.test)


def _read_svhn(path: Path, info: DatasetInfo, count: int, most: int) -> Part:
    """The first images of a file with X, uint8 (S, S, 3, n), and y (n, 1), in which 10 is the digit 0."""
    from scipy.io import loadmat, whosmat

    image = info.size, info.size, info.channels
    with reading(path, "a MATLAB file"):
        shapes = {name: shape for name, shape, _ in whosmat(path)}  # by the header, before anything is read
        x, y = shapes.get("X", ()), shapes.get("y", ())
        if x[:3] != image or y != (*x[3:], 1) or not count <= y[0] <= most:
            raise DataError(
                f"{path}: expected X of shape {(*image, most)} and y of shape {(most, 1)}, found {x or 'no X'} and "
                f"{y or 'no y'}"
            )
        values = loadmat(path, variable_names=["X", "y"])
    pixels, labels = values["X"], values["y"][:count, 0]
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "ui":
        raise DataError(f"{path}: expected X of uint8 and y of integers, found {pixels.dtype} and {labels.dtype}")
    labels = np.where(labels == info.classes, 0, labels.astype(np.int64))
    return checked_part(pixels[..., :count].transpose(3, 2, 0, 1), labels, info, path)


# --- Tiny ImageNet (200 classes of ImageNet): the official folder, with its annotations of `val` ----------------------

_LARGEST = 2**24  # bytes of a text file
_NAME = re.compile(r"[\w.-]+")  # of a class or a file: no path


@DATASETS.register(
    "tiny-imagenet",
    channels=3,
    size=64,
    classes=200,
    train=100_000,
    test=10_000,
    how_to_get=f"{_HOW} `tiny-imagenet-200/wnids.txt`",
)
def tiny_imagenet(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training images, class by class in turn, and those of `val` for testing, in the order of its annotations.

    Class i is the i-th name of wnids.txt in alphabetical order. Grey images become colour ones.
    """
    folder = located(info, root, ("tiny-imagenet-200", ("wnids.txt",)))
    names = sorted(_lines(folder / "wnids.txt", info))
    if len(set(names)) != info.classes or not all(map(_NAME.fullmatch, names)):
        raise DataError(f"{folder / 'wnids.txt'}: expected {info.classes} different names, found {len(set(names))}")
    inside = []
    for place in (folder / "train" / name / "images" for name in names[:train]):
        files = sorted(place.glob("*.JPEG"), key=lambda path: (len(path.name), path.name)) if place.is_dir() else []
        if len(files) != info.train // info.classes:
            wanted = info.train // info.classes
            raise DataError(f"{place}: expected {wanted} images, found {len(files)}; unpack the data set again")
        inside.append(files)
    path = folder / "val" / "val_annotations.txt"
    rows = [line.split("\t") for line in _lines(path, info)]
    bad = [row[0] for row in rows if len(row) < 2 or row[1] not in names or not _NAME.fullmatch(row[0])]
    if bad or len(rows) != info.test:
        raise DataError(
            f"{path}: expected {info.test} lines with a file and a class of wnids.txt, found {len(rows)}, "
            f"{len(bad)} of them with others{': ' + listing(bad) if bad else ''}"
        )
    labels = np.arange(train) % info.classes, np.array([names.index(row[1]) for row in rows[:test]])
    paths = (
        [inside[label][i // info.classes] for i, label in enumerate(labels[0])],
        [folder / "val" / "images" / row[0] for row in rows[:test]],
    )
    parts = [
        (read_images(files, info.size, info.channels, f"{folder.name} ({what})"), numbers.astype(np.uint8))
        for files, numbers, what in zip(paths, labels, ("training", "val"), strict=True)
    ]
    return *parts[0], *parts[1]


def _lines(path: Path, info: DatasetInfo) -> list[str]:
    with reading(path, "text"):
        text = read_regular(existing(path, info), _LARGEST).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


# --- the Hugging Face Hub, which has Parquet files of PNG images -----------------------------------------------------

_PARQUET_ROWS = 16  # of which the images are in memory at once: equal ones are stored once
TIMEOUT = 5.0  # seconds until the Hub must respond, so that a machine without a network does not hang


LOCATIONS = {  # organisation/name, the folder of its two files, the columns of images and labels
    "fashion-mnist": ("zalando-datasets/fashion_mnist", "fashion_mnist", "image", "label"),
    "cifar10": ("uoft-cs/cifar10", "plain_text", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
}


def _from_hub(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """The first training and test images in the order of the Hub's files, which its client keeps in its cache."""
    if importlib.util.find_spec("pyarrow") is None:
        raise missing(info, root, "or `pip install pyarrow` to download it from the Hugging Face Hub")
    repository, folder, *columns = LOCATIONS[info.name]
    try:
        paths = [_download(repository, f"{folder}/{part}-00000-of-00001.parquet") for part in ("train", "test")]
    except OSError as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise missing(info, root, f"downloading from the Hugging Face Hub failed ({reason})") from error
    first = _read_parquet(paths[0], columns, info, info.train, train)
    return *first, *_read_parquet(paths[1], columns, info, info.test, test)


def _download(repository: str, file: str) -> Path:
    """The path of one file in the Hub client's cache, downloaded if necessary; OSError if it cannot be."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # The HTTP client and its errors differ between versions of huggingface_hub.
    failures: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    with contextlib.suppress(LocalEntryNotFoundError):
        return Path(hf_hub_download(repository, file, repo_type="dataset", local_files_only=True))
    try:
        # Without a network the download itself would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type="dataset"), timeout=TIMEOUT)
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except failures as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _read_parquet(path: Path, columns: list[str], info: DatasetInfo, rows: int, count: int) -> Part:
    """The first images and labels of one file, whose header is compared with what is expected before it is read."""
    from pyarrow import parquet

    with reading(path, "Parquet", "delete it to download it again"), parquet.ParquetFile(path) as file:
        meta, names = file.metadata, file.schema_arrow.names
        if meta.num_rows != rows or not {*columns} <= {*names}:
            raise DataError(
                f"{path}: expected {rows} rows of {columns[0]!r} and {columns[1]!r}, "
                f"found {meta.num_rows} of {listing(names)}"
            )
        held = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        check_memory(held, str(path), f"{rows} compressed images")
        images = np.empty((count, info.channels, info.size, info.size), np.uint8)
        labels = np.empty(count, np.int64)
        batches = file.iter_batches(_PARQUET_ROWS, columns=columns)
        for i, row in zip(range(count), (row for batch in batches for row in batch.to_pylist()), strict=False):
            images[i] = _decoded(row[columns[0]], info, f"{path}: row {i}")
            labels[i] = row[columns[1]]
    return checked_part(images, labels, info, path)


def _decoded(cell: dict[str, Any], info: DatasetInfo, where: str) -> np.ndarray:
    """Pixels, uint8 (c, S, S), of a compressed image."""
    from PIL import Image

    size = (info.size, info.size)
    with reading(where, "an image"), Image.open(io.BytesIO(cell["bytes"])) as image:
        if image.size != size:  # by its header; a huge image is not decoded
            raise DataError(f"{where}: expected an image of {size} pixels, found {image.size}")
        pixels = np.asarray(image.convert("L" if info.channels == 1 else "RGB"))
    return pixels.reshape(*size, info.channels).transpose(2, 0, 1)
