"""Readers of the registered data sets: CIFAR, scikit-learn's digits and Fashion-MNIST.

Each is `read(info, root, train, test)`: the first training and test images, in the files' order, of the data set that
`info` describes, searched for in `root` first. Files that are missing or damaged are a `DataError`.
"""

import gzip
import importlib.util
import pickle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.data.images import reading
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo, Part, search_folders
from weightscope.errors import DataError

# --- files -----------------------------------------------------------------------------------------------------------


Layout = tuple[str, tuple[str, ...]]
"""A data set's usual folder, whose files may also be in the searched one itself, and files that identify it."""


def find(info: DatasetInfo, root: Path | None, *layouts: Layout) -> tuple[Path, Layout]:
    """The first folder with a data set in one of the layouts; DataError if there is none."""
    for searched in search_folders(root):
        for layout in layouts:
            for folder in (searched / layout[0], searched):
                if any((folder / file).is_file() for file in layout[1]):
                    return folder, layout
    looked = ", ".join(str(folder.absolute()) for folder in search_folders(root))
    raise DataError(
        f"{info.name}: expected its files in one of {looked}, found none; {info.how_to_get}; "
        "or name another folder with --data or WEIGHTSCOPE_DATA"
    )


def existing(path: Path, info: DatasetInfo) -> Path:
    """The path, if it is a file; DataError otherwise."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of {info.name}, found none; is the data set complete?")
    return path


def checked_part(images: np.ndarray, labels: np.ndarray, info: DatasetInfo, where: object) -> Part:
    """Images uint8 (n, c, S, S) and labels int64 (n,); DataError naming the first label that is not below K."""
    wrong = np.flatnonzero((labels < 0) | (labels >= info.classes))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels from 0 to {info.classes - 1}, found {labels[wrong[0]]} at item {wrong[0]}; "
            "is this another data set?"
        )
    shape = (len(labels), info.channels, info.size, info.size)
    return np.array(images, np.uint8, order="C").reshape(shape), labels.astype(np.int64)  # copies


# --- CIFAR-10 and CIFAR-100 (Krizhevsky 2009): the official binary version and the Python version ---------------------

# name -> for each version the usual folder, training files of equally many images, test file, and in the binary version
# the label bytes before each image, of which the last is read, in the Python version the key of the labels
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
_HOW = "unpack the official files (or torchvision's) so that one of these contains"


@DATASETS.register("cifar100", **_SIZES, classes=100, how_to_get=f"{_HOW} `cifar-100-binary/train.bin`")
@DATASETS.register("cifar10", **_SIZES, classes=10, how_to_get=f"{_HOW} `cifar-10-batches-bin/data_batch_1.bin`")
def cifar(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """CIFAR-10 or CIFAR-100; only the files that hold the images are read."""
    versions = {(version[0], (*version[1], version[2])): version for version in _CIFAR[info.name]}
    folder, layout = find(info, root, *versions)
    _, train_files, test_file, labels = versions[layout]
    each = info.train // len(train_files)
    files = [folder / name for name in train_files[: -(-train // each)]]
    parts = [_read_cifar(existing(file, info), labels, info, each) for file in files]
    images, train_labels = (np.concatenate(arrays)[:train] for arrays in zip(*parts, strict=True))
    test_images, test_labels = _read_cifar(existing(folder / test_file, info), labels, info, info.test)
    return images, train_labels, test_images[:test], test_labels[:test]


def _read_cifar(path: Path, labels: int | str, info: DatasetInfo, count: int) -> Part:
    """The images of a file: the red, green and blue planes of each, in records behind label bytes, or pickled."""
    pixels = info.channels * info.size**2
    if isinstance(labels, int):
        raw, record = np.fromfile(path, np.uint8), labels + pixels
        if len(raw) != count * record:
            raise DataError(f"{path}: expected {count * record} bytes, found {len(raw)}; download it again")
        records = raw.reshape(count, record)
        return checked_part(records[:, labels:], records[:, labels - 1], info, path)
    with reading(path, "a CIFAR file"), path.open("rb") as file:
        batch = _ArrayUnpickler(file, encoding="latin1").load()
        entries = {name.decode() if isinstance(name, bytes) else name: value for name, value in batch.items()}
        data, numbers = entries["data"], np.array(entries[labels])
        if (data.dtype, data.shape, numbers.shape) != (np.uint8, (count, pixels), (count,)):
            raise DataError(
                f"{path}: expected {count} images of {pixels} bytes and as many labels, found {data.dtype} of shape "
                f"{data.shape} and {len(numbers)}"
            )
    return checked_part(data, numbers, info, path)


class _ArrayUnpickler(pickle.Unpickler):
    """Of dictionaries of NumPy arrays; imports nothing else that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """The function of NumPy; UnpicklingError for any other."""
        if f"{module} {name}" not in _NUMPY:
            raise pickle.UnpicklingError(f"its pickle needs {module}.{name}, which is not run")
        return super().find_class(module, name)


_NUMPY = {f"numpy.{core}.multiarray _reconstruct" for core in ("core", "_core")}
_NUMPY |= {"numpy ndarray", "numpy dtype", "_codecs encode"}


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
    folder, _ = find(info, root, *_FASHION)

    def part(images: str, labels: str, count: int) -> Part:
        paths = [folder / images, folder / labels]
        paths = [path if path.is_file() else existing(path.with_name(f"{path.name}.gz"), info) for path in paths]
        pixels = _read_idx(paths[0], (count, info.size, info.size))
        return checked_part(pixels, _read_idx(paths[1], (count,)), info, paths[1])

    (images, labels), (test_images, test_labels) = part(*_IDX[:2], info.train), part(*_IDX[2:], info.test)
    return images[:train], labels[:train], test_images[:test], test_labels[:test]


def fashion_mnist_at_hand(root: Path | None = None) -> bool:
    """Whether its files are in one of the folders that are searched."""
    try:
        return bool(find(DatasetInfo("fashion-mnist", **DATASETS.details["fashion-mnist"]), root, *_FASHION))
    except DataError:
        return False


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An IDX file of unsigned bytes of this shape."""
    with reading(path, "an IDX file"), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        raw = stream.read()
    header = bytes([0, 0, _UBYTE, len(shape)]) + np.array(shape, ">u4").tobytes()
    expected = len(header) + prod(shape)
    if not raw.startswith(header) or len(raw) != expected:
        raise DataError(
            f"{path}: expected {expected} bytes, an IDX file of shape {shape}, found {len(raw)} that begin with "
            f"{raw[: len(header)].hex(' ') or 'nothing'}; download it again"
        )
    return np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)
