"""`Dataset` and `load`: registered data sets and users' own, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope._util.plugins import is_reference, reference_to
from weightscope.data import folder
from weightscope.data.arrays import PARTS, check_counts, checked_arrays, info_of
from weightscope.data.image_section import dataset_info, made_by, source_of
from weightscope.data.images import resize
from weightscope.data.registry import DATASETS, FOLDER, Arrays, DatasetInfo, SourceConfig
from weightscope.data.task import Task, hash_of
from weightscope.errors import DataError, UsageError


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images and labels, n training and m test, each image c x S x S pixels.

    Attributes:
        info: name, shapes and sizes of the whole data set.
        train_images: uint8 (n, c, S, S).
        train_labels: int64 (n,).
        test_images: uint8 (m, c, S, S).
        test_labels: int64 (m,).
        mean: float32 (c,), of the training images' pixels in units of [0, 1].
        std: float32 (c,), population std of the same.
    """

    info: DatasetInfo
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, section: Any, root: str | Path | None = None) -> "Dataset":
        """The data set of a recipe's section [data]; a folder is searched first."""
        return load(section, root, train=section.train, test=section.test, validation=section.validation)

    @classmethod
    def from_arrays(
        cls, train_images: Any, train_labels: Any, test_images: Any, test_labels: Any, *, name: str = "arrays"
    ) -> "Dataset":
        """A data set of your own, of NumPy arrays or tensors on the CPU; `name` is for messages and results.

        Images are integers from 0 to 255, (n, c, S, S) or (n, S, S), labels integers from 0, (n,), with at least one
        training image of each class. DataError names the array, what was expected and what was found.

        Example:
            >>> data = Dataset.from_arrays(images[:800], labels[:800], images[800:], labels[800:], name="shapes")
        """
        arrays = checked_arrays((train_images, train_labels, test_images, test_labels), name)
        return _dataset(info_of(name, arrays), arrays)

    def __repr__(self) -> str:
        n, m, (channels, size, _) = len(self.train_labels), len(self.test_labels), self.train_images.shape[1:]
        return (
            f"<Dataset {self.info.name}: {n} training and {m} test images of {channels} x {size} x {size} pixels, "
            f"{self.info.classes} classes>"
        )

    @property
    def examples(self) -> int:
        """The number of training images."""
        return len(self.train_labels)

    @property
    def nbytes(self) -> int:
        """The bytes of the training images."""
        return self.train_images.nbytes

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **tensors)

    def first(self, train: int | None = None, test: int | None = None) -> "Dataset":
        """Only the first so many training and test images, None for all; UsageError if there are fewer."""
        n, m = check_counts(self.info.name, train, test, len(self.train_labels), len(self.test_labels))
        return self._with(self.train_images[:n], self.train_labels[:n], self.test_images[:m], self.test_labels[:m])

    def shortened(self, train: int) -> "Dataset":
        """Only the first so many training images, with the pixel statistics of all."""
        return replace(self, train_images=self.train_images[:train], train_labels=self.train_labels[:train])

    def held_back(self, count: int) -> "Dataset":
        """The last so many training images in place of the test images, and only the others for training."""
        n = len(self.train_labels) - count
        if n < 1:
            raise UsageError(f"data.validation: expected 1 to {len(self.train_labels) - 1} images, found {count}")
        return self._with(self.train_images[:n], self.train_labels[:n], self.train_images[n:], self.train_labels[n:])

    def _with(self, *arrays: Tensor) -> "Dataset":
        changed: dict[str, Any] = dict(zip(PARTS, arrays, strict=True))
        return replace(self, **changed | _pixel_statistics(arrays[0], self.info.name))

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of images and labels.

        Distinguishes two sources of one data set, such as CIFAR-10 and a JPEG-compressed copy.
        """
        return hash_of((self.train_images, self.train_labels, self.test_images, self.test_labels))


ImageSource = str | SourceConfig | Callable[[], Any]


def load(
    source: ImageSource | Task,
    root: str | Path | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    validation: int | None = None,
) -> Dataset | Any:
    """Read a registered data set or a folder of images, or check one of your own.

    Files are searched for in `root`, in the folder named by the environment variable WEIGHTSCOPE_DATA, in `./data`
    and in /usr/share/datasets, in this order.

    `source` is a registered name (`weightscope list datasets`); `"package.module:factory"` or a function without
    arguments, which returns (train_images, train_labels, test_images, test_labels), see `Dataset.from_arrays`, or a
    `Dataset`; or a recipe's [data] section: a `SourceConfig` for a folder of images or another size, a `SequenceConfig`
    for a `SequenceSource`.

    `train` and `test` take only the first so many images, of mixed classes. The last `validation` of these training
    images take the place of the test images. UsageError if there are not as many or no such data set; DataError if
    files are missing (says where they were searched for and how to get them) or damaged.

    Example:
        >>> load("digits")
        <Dataset digits: 1437 training and 360 test images of 1 x 8 x 8 pixels, 10 classes>
        >>> load(SourceConfig(name="folder", path="flowers", size=32))
    """
    if isinstance(source, Task) and not isinstance(source, SourceConfig):
        return source.load(root)
    if not isinstance(source, str | SourceConfig) and not callable(source):
        raise UsageError(
            f"data: expected a name, a function without arguments or a section [data], found {type(source).__name__}; "
            "of a `Dataset` use `first`, of arrays `Dataset.from_arrays`"
        )
    found = _read(source, None if root is None else Path(root), train, test)
    return found if validation is None else found.held_back(validation)


def _read(source: Any, root: Path | None, train: int | None, test: int | None) -> Dataset:
    if isinstance(source, str):
        source = source_of(source)
    if callable(source):
        name = reference_to(source)
        arrays = made_by(source, name)
    elif is_reference(name := source.name):
        arrays = _resized(made_by(DATASETS.find(name), name), source.size, name)
    elif name == FOLDER:
        info, arrays = folder.read(source, root, train, test)
        return _dataset(replace(info, train=len(arrays[0]), test=len(arrays[2])), arrays)
    else:
        info = dataset_info(name)
        n, m = check_counts(name, train, test, info.train, info.test)
        return _dataset(dataset_info(source), _resized(DATASETS[name](info, root, n, m), source.size, name))
    return _dataset(info_of(name, arrays), arrays).first(train, test)


def _resized(arrays: Arrays, size: int | None, name: str) -> Arrays:
    if size is None:
        return arrays
    return resize(arrays[0], size, name), arrays[1], resize(arrays[2], size, name), arrays[3]


def _dataset(info: DatasetInfo, arrays: Arrays) -> Dataset:
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in arrays)
    return Dataset(info, images, labels.long(), test_images, test_labels.long(), **_pixel_statistics(images, info.name))


def _pixel_statistics(images: Tensor, name: str) -> dict[str, Tensor]:
    """Mean and std of each channel in units of [0, 1], float32 (c,), exact from histograms."""
    values = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])  # (c, 256)
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(1)
    for channel in (variance == 0).nonzero().flatten().tolist():
        raise DataError(f"{name}: channel {channel} of the training images is constant, so it cannot be normalised")
    return {"mean": mean.float(), "std": variance.sqrt().float()}
