"""Registered data sets and users' arrays: what is read, where it is looked for, and what is refused."""

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from weightscope.data import Dataset, load, registry
from weightscope.data.image_section import dataset_info
from weightscope.data.registry import DATASETS
from weightscope.errors import DataError, UsageError
from weightscope.training.collection import collect

# numbers of training and test images, channels, size and classes
SIZES = {
    "fashion-mnist": (30, 10, 1, 28, 10),
    "cifar10": (50, 10, 3, 32, 10),
    "cifar100": (30, 10, 3, 32, 100),
}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small data sets, and no data on this machine."""
    for name, (train, test, _, _, classes) in SIZES.items():
        small = {"train": train, "test": test, "classes": classes}
        monkeypatch.setitem(DATASETS.details, name, DATASETS.details[name] | small)
    monkeypatch.delenv("WEIGHTSCOPE_DATA", raising=False)
    monkeypatch.setattr(registry, "SHARED", tmp_path / "shared")
    monkeypatch.chdir(tmp_path)


def random_images(count: int, channels: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, channels, size, size), dtype=np.uint8), np.arange(count) % classes


def assert_holds(data: Dataset, *arrays: np.ndarray) -> None:
    tensors = data.train_images, data.train_labels, data.test_images, data.test_labels
    for tensor, array in zip(tensors, arrays, strict=True):
        assert np.array_equal(tensor, array)


def test_digits_are_split_1437_to_360_in_equal_proportions() -> None:
    data = load("digits")
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    train, test = data.train_labels.bincount(), data.test_labels.bincount()
    assert ((train + test) / 5 - test).abs().max() < 1
    together = torch.cat([data.train_images, data.test_images]).flatten(1)
    assert len(together.unique(dim=0)) == len(np.unique(load_digits().data, axis=0))
    assert together.unique().tolist() == [round(level * 255 / 16) for level in range(17)]
    part = load("digits", train=200, test=50)
    assert_holds(part, data.train_images[:200], data.train_labels[:200], data.test_images[:50], data.test_labels[:50])
    assert part.train_labels.bincount(minlength=10).min() >= 10, "classes are mixed"


def test_a_dataset_is_moved_and_told_apart() -> None:
    data = load("digits")
    moved = data.to("meta")
    assert {moved.train_images.device.type, moved.test_labels.device.type, moved.mean.device.type} == {"meta"}
    assert data.fingerprint == load("digits").fingerprint != load("digits", test=359).fingerprint
    assert repr(data) == "<Dataset digits: 1437 training and 360 test images of 1 x 8 x 8 pixels, 10 classes>"


@pytest.mark.parametrize("source", [load("digits", train=20), None, 3, (1, 2, 3, 4)], ids=repr)
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(UsageError, match=rf"expected a name, a function .*found {type(source).__name__}; of a `Datas"):
        load(source)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mnist", {}, "no data set 'mnist'; there are cifar10, cifar100, digits, fashion-mnist"),
        ("digits", {"train": 1438}, "data.train: expected 1 to 1437 images of digits, found 1438"),
        ("digits", {"test": 0}, "data.test: expected 1 to 360 images of digits, found 0"),
    ],
)
def test_impossible_requests_are_refused(name: str, options: dict, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load(name, **options)


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# version -> the data set, the usual folder
VERSIONS = {
    "fashion-mnist": ("fashion-mnist", "fashion-mnist"),
    "fashion-mnist.gz": ("fashion-mnist", "FashionMNIST/raw"),
    "cifar10-binary": ("cifar10", "cifar-10-batches-bin"),
    "cifar100-binary": ("cifar100", "cifar-100-binary"),
    **{f"cifar10-python{protocol}": ("cifar10", "cifar-10-batches-py") for protocol in ("", 2)},
    "cifar100-python2": ("cifar100", "cifar-100-python"),
}


def write(folder: Path, version: str, counts: tuple[int, int] | None = None) -> list[np.ndarray]:
    """Write a small data set in its official files; its four arrays."""
    name = VERSIONS[version][0]
    train, test, *rest = SIZES[name]
    train, test = counts or (train, test)
    images, labels = random_images(train + test, *rest)
    for part, rows in (("train", slice(0, train)), ("test", slice(train, None))):
        for file, content in _files(version, part, images[rows], labels[rows]).items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    return [images[:train], labels[:train], images[train:], labels[train:]]


def _files(version: str, part: str, images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    match version.split("-"):
        case ["fashion", kind]:
            files = dict(zip(IDX[:2] if part == "train" else IDX[2:], map(_idx, (images[:, 0], labels)), strict=True))
            return {f"{file}.gz": gzip.compress(raw) for file, raw in files.items()} if ".gz" in kind else files
        case ["cifar10" | "cifar100" as name, kind]:
            batches = {"train": slice(0, None), "test": slice(0, None)}
            if name == "cifar10":
                batches = {f"data_batch_{i + 1}": slice(10 * i, 10 * i + 10) for i in range(5)}
                batches["test_batch"] = slice(0, None)
            written = {}
            for file in [file for file in batches if ("test" in file) == (part == "test")]:
                pixels, numbers = images[batches[file]].reshape(-1, 3072), labels[batches[file]]
                if kind == "binary":
                    before = [numbers[:, None]] if name == "cifar10" else [numbers[:, None] // 5, numbers[:, None]]
                    written[f"{file}.bin"] = np.concatenate([*before, pixels], 1).astype(np.uint8).tobytes()
                else:
                    key = "labels" if name == "cifar10" else "fine_labels"
                    written[file] = _python_batch(pixels, numbers, key, int(kind.removeprefix("python") or 4))
            return written
    raise AssertionError(version)


class Python2Pickler(pickle._Pickler):
    """Writes byte strings as Python 2 does, as in the published files."""

    dispatch: ClassVar = pickle._Pickler.dispatch | {
        bytes: lambda self, x: self.write(b"T" + struct.pack("<i", len(x)) + x)
    }


def _python_batch(images: np.ndarray, labels: np.ndarray, key: str, protocol: int) -> bytes:
    """As Python 2 wrote it for protocol 2, as Python 3 writes it otherwise."""
    batch = {b"batch_label": b"training batch", key.encode(): labels.tolist()}
    batch |= {b"data": np.ascontiguousarray(images), b"filenames": [b"a.png"] * len(labels)}
    if protocol != 2:
        return pickle.dumps(batch, protocol=protocol)
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(batch)
    return stream.getvalue().replace(b"numpy._core", b"numpy.core")


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_is_read(tmp_path: Path, version: str) -> None:
    name, folder = VERSIONS[version]
    arrays = write(tmp_path / "here" / folder, version)
    assert_holds(load(name, tmp_path / "here"), *arrays)
    part = load(name, tmp_path / "here", train=12, test=3)
    assert_holds(part, arrays[0][:12], arrays[1][:12], arrays[2][:3], arrays[3][:3])


@pytest.mark.parametrize(
    ("place", "folder"),
    [("root", ""), ("WEIGHTSCOPE_DATA", "FashionMNIST/raw"), ("data", "fashion-mnist"), ("shared", "fashion-mnist")],
)
def test_files_are_found_in_each_place(tmp_path: Path, monkeypatch, place: str, folder: str) -> None:
    write(tmp_path / place / folder, "fashion-mnist")
    monkeypatch.setenv("WEIGHTSCOPE_DATA", str(tmp_path / "WEIGHTSCOPE_DATA"))
    order = ["root", "WEIGHTSCOPE_DATA", "data", "shared"]
    for later in order[order.index(place) + 1 :]:
        write(tmp_path / later, "fashion-mnist", (20, 10))
    assert len(load("fashion-mnist", tmp_path / "root").train_labels) == 30


@pytest.mark.parametrize("name", SIZES)
def test_missing_data_say_where_they_were_looked_for_and_how_to_get_them(
    name: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WEIGHTSCOPE_DATA", str(tmp_path / "environment"))
    with pytest.raises(DataError) as caught:
        load(name, tmp_path / "root")
    message = str(caught.value)
    for part in (name, "root", "environment", "data", "shared", dataset_info(name).how_to_get, "--data"):
        assert part in message
    assert "\n" not in message
    assert caught.value.exit_code == 3


def test_files_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "cifar10-binary")
    for i in (3, 4, 5):
        (tmp_path / f"data_batch_{i}.bin").unlink()
    assert len(load("cifar10", tmp_path, train=20).train_labels) == 20
    with pytest.raises(DataError, match=r"data_batch_3.bin: expected a file of cifar10, found none"):
        load("cifar10", tmp_path, train=21)


IDX_DAMAGE = [
    (lambda raw: raw[:-100], r"expected 23536 bytes, an IDX file of shape \(30, 28, 28\), found 23436"),
    (lambda raw: raw[:11], "found 11 that begin with"),
    (lambda raw: b"\x89PNG" + raw[4:], "found 23536 that begin with 89 50 4e 47"),
]
DAMAGE = [
    *(("fashion-mnist", IDX[0], change, match) for change, match in IDX_DAMAGE),
    ("fashion-mnist.gz", f"{IDX[0]}.gz", lambda raw: gzip.compress(gzip.decompress(raw)[:-100]), IDX_DAMAGE[0][1]),
    ("fashion-mnist.gz", f"{IDX[2]}.gz", lambda raw: raw[: len(raw) // 2], "cannot be read .*again"),
    ("fashion-mnist", IDX[1], lambda raw: _idx(np.arange(30) % 11), "labels from 0 to 9, found 10 at item 10"),
    ("fashion-mnist", IDX[3], None, "expected a file of fashion-mnist, found none"),
    ("cifar10-binary", "data_batch_2.bin", lambda raw: raw[:-1], "expected 30730 bytes, found 30729"),
    ("cifar10-binary", "data_batch_5.bin", lambda raw: raw[:3073] + b"\x0a" + raw[3074:], "found 10 at item 1"),
]


@pytest.mark.parametrize(("version", "file", "change", "match"), DAMAGE, ids=lambda x: x if isinstance(x, str) else "")
def test_damaged_files_are_refused(
    tmp_path: Path, version: str, file: str, change: Callable[[bytes], bytes] | None, match: str
) -> None:
    write(tmp_path, version)
    raw = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if change is not None:
        (tmp_path / file).write_bytes(change(raw))
    with pytest.raises(DataError, match=rf"{file}(\.gz)?: .*({match})"):
        load(VERSIONS[version][0], tmp_path)


class _Runs:
    """Pickles to a call of `os.system`."""

    def __reduce__(self) -> tuple:
        import os

        return os.system, ("touch was-run",)


def _batch(**changes: object) -> dict:
    images, labels = random_images(10, 3, 32, 10)
    return {b"data": images.reshape(10, -1), b"labels": labels.tolist()} | {k.encode(): v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (pickle.dumps({"data": _Runs()}, 2), r"its pickle needs posix\.system"),
        ({b"data": np.zeros((10, 3072), np.uint8)}, "cannot be read as a CIFAR file .*labels"),
        (_batch(data=np.zeros((10, 300))), "10 images of 3072 bytes and as many labels, found float64"),
        (_batch(labels=[0] * 9), "as many labels, found .* and 9"),
        (_batch(labels=[0] * 9 + [17]), "expected labels from 0 to 9, found 17 at item 9"),
    ],
)
def test_python_files_of_another_kind_are_refused(tmp_path: Path, batch: object, match: str) -> None:
    write(tmp_path, "cifar10-python")
    (tmp_path / "data_batch_1").write_bytes(batch if isinstance(batch, bytes) else pickle.dumps(batch, protocol=3))
    with pytest.raises(DataError, match=f"data_batch_1: .*{match}"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "was-run").exists()


def _own() -> list[np.ndarray]:
    return [*random_images(20, 2, 6, 3), *random_images(6, 2, 6, 3)]


CALLS: list[str] = []


def own_factory() -> list[np.ndarray]:
    CALLS.append("own")
    return _own()


def dataset_factory() -> Dataset:
    return Dataset.from_arrays(*_own(), name="mine")


def failing_factory() -> None:
    raise KeyError("disk")


def test_arrays_of_your_own() -> None:
    arrays = _own()
    data = Dataset.from_arrays(*arrays, name="mine")
    assert (data.info.channels, data.info.size, data.info.classes) == (2, 6, 3)
    assert (data.info.train, data.info.test) == (20, 6)
    assert_holds(data, *arrays)
    others = torch.from_numpy(arrays[2][:, 0].copy())
    grey = Dataset.from_arrays(arrays[0][:, 0].astype(np.int32), arrays[1], others, arrays[3])
    assert grey.train_images.shape == (20, 1, 6, 6)
    assert grey.train_images.dtype == torch.uint8
    assert torch.equal(grey.test_images[:, 0], data.test_images[:, 0])
    part = data.first(7, 2)
    assert_holds(part, arrays[0][:7], arrays[1][:7], arrays[2][:2], arrays[3][:2])
    pixels = part.train_images.double() / 255
    torch.testing.assert_close(part.mean.double(), pixels.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(part.std.double(), pixels.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)


def test_a_factory_by_reference_is_called_once() -> None:
    CALLS.clear()
    name = f"{__name__}:own_factory"
    assert dataset_info(name).classes == 3
    data = load(name, train=12)
    assert (len(data.train_labels), data.info.name, data.info.train) == (12, name, 20)
    assert load(own_factory).fingerprint == load(name).fingerprint != data.fingerprint
    assert CALLS == ["own"]
    assert load(f"{__name__}:dataset_factory").fingerprint == load(name).fingerprint


def unseeded_factory() -> list[np.ndarray]:
    images = np.random.default_rng().integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    return [images, np.arange(40) % 4, images[:8], np.arange(8) % 4]


def test_a_worker_refuses_a_factory_that_makes_other_data_there(tmp_path: Path) -> None:
    """A factory is called once in a process, and tiles are trained in another."""
    values = {
        "network": {"type": "convnext", "width": 4, "depth": 1, "patch_size": 2},
        "data": {"name": unseeded_factory},
        "training": {"epochs": 1, "kernels": "torch"},
        "population": {"networks": 2, "tile": 2},
    }
    options = {"workers": 1, "device": "cpu", "progress": False}
    with pytest.raises(DataError, match=r"unseeded_factory: expected data of hash .* in each worker.* a fixed seed"):
        collect(values, tmp_path / "a.pop", **options)


def test_a_factory_that_fails_is_named() -> None:
    with pytest.raises(DataError, match=r"failing_factory: the data set's factory raised KeyError: 'disk'"):
        load(f"{__name__}:failing_factory")
    with pytest.raises(UsageError, match=r"no_such_module:f: cannot import no_such_module"):
        load("no_such_module:f")


def _changed(part: int, change: Callable[[np.ndarray], object]) -> list[object]:
    arrays: list[object] = [*_own()]
    arrays[part] = change(_own()[part])
    return arrays


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (_own()[:3], r"lambda.*: expected a Dataset or the four arrays \(train_images, .*\), found 3 items"),
        (
            _changed(0, lambda x: x / 255),
            r"train_images: expected integers .*, found float64 .*\(255 \* images\).round",
        ),
        (_changed(0, lambda x: x.astype(int) * 2), "train_images: expected integers from 0 to 255, .* from 0 to 510"),
        (_changed(0, lambda x: x[:, 0, 0]), r"train_images: expected images \(n, channels, S, S\).*shape \(20, 6\)"),
        (_changed(2, lambda x: x[:0]), r"test_images: expected images .*, found shape \(0, 2, 6, 6\)"),
        (_changed(0, lambda x: x.transpose(0, 2, 3, 1)), r"expected images .*, found shape \(20, 6, 6, 2\)"),
        (
            _changed(2, lambda x: x[:, :1]),
            r"test_images: expected images \(2, 6, 6\) as in training, found \(1, 6, 6\)",
        ),
        (_changed(1, lambda x: x[:19]), r"train_labels: expected .* \(20,\), one .*, found int64 of shape \(19,\)"),
        (_changed(1, lambda x: x + 0.5), "train_labels: expected integers .*, found float64"),
        (_changed(1, lambda x: x - 1), "train_labels: expected every class from 0, found `-1`, `0`, `1`"),
        (_changed(1, lambda x: x + 1), "expected every class from 0, found `1`, `2`, `3`; number the"),
        (_changed(3, lambda x: x + 1), "test_labels: expected 0 to 2 as in training, found 1 to 3"),
        (_changed(0, lambda x: x * 0), "channel 0 of the training images is constant"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(source: object, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(lambda: source)
    assert "\n" not in str(caught.value)
