"""`Dataset` and `load`: one data set as tensors, whatever its files look like."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope._util.plugins import imported, is_reference
from weightscope.data import cifar, digits, fashion_mnist
from weightscope.data.catalog import DatasetInfo, dataset_info
from weightscope.data.locations import Arrays
from weightscope.errors import DataError, UsageError

Reader = Callable[[DatasetInfo, Path | None, int, int], Arrays]

_READERS: dict[str, Reader] = {
    "digits": digits.read,
    "fashion-mnist": fashion_mnist.read,
    "cifar10": cifar.read,
    "cifar100": cifar.read,
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, n training and m test, each image c x S x S pixels.

    Attributes:
        info: the catalogue entry.
        train_images: uint8 (n, c, S, S).
        train_labels: int64 (n,).
        test_images: uint8 (m, c, S, S).
        test_labels: int64 (m,).
        mean: float32 (c,), of the training images' pixels in units of [0, 1].
        std: float32 (c,), population standard deviation of the same.
    """

    info: DatasetInfo
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on another device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of images and labels.

        Tells two sources of one data set apart, such as CIFAR-10 and a copy that went through JPEG.
        """
        digest = hashlib.sha256()
        for tensor in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]


def load(name: str, root: str | Path | None = None, *, train: int | None = None, test: int | None = None) -> Dataset:
    """Read a data set.

    Files are looked for in `root`, in the folder that the environment variable WEIGHTSCOPE_DATA names, in
    `./data` and in /usr/share/datasets, in this order; then in the Hugging Face Hub, if pyarrow is installed.

    Args:
        name: of the data set, see `weightscope.data.catalog`.
        root: a folder to look in first, `--data` of the commands.
        train: take only the first so many training images (classes are interleaved); None for all.
        test: take only the first so many test images; None for all.

    Raises:
        UsageError: if there is no such data set, or not as many images.
        DataError: if it is found nowhere (says where it looked and how to get it), or its files are damaged.

    Example:
        >>> data = load("digits")
        >>> data.train_images.shape
        torch.Size([1437, 1, 8, 8])
    """
    if is_reference(name):
        return _own(name, imported(name), train, test)
    info = dataset_info(name)
    counts = []
    for which, wanted, there in (("train", train, info.train), ("test", test, info.test)):
        if wanted is not None and not 1 <= wanted <= there:
            raise UsageError(f"data.{which}: {name} has {there} images, from 1 to as many can be taken, found {wanted}")
        counts.append(there if wanted is None else wanted)
    arrays = _READERS[name](info, None if root is None else Path(root), *counts)
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in arrays)
    mean, std = _pixel_statistics(images)
    for channel in (std == 0).nonzero().flatten().tolist():
        raise DataError(f"{name}: channel {channel} of the training images is the same everywhere; it cannot be scaled")
    return Dataset(info, images, labels.long(), test_images, test_labels.long(), mean, std)


def _own(name: str, factory: Callable[[], Any], train: int | None, test: int | None) -> Dataset:
    made = factory()
    if isinstance(made, Dataset):
        return made
    images, labels, test_images, test_labels = (torch.as_tensor(array) for array in made)
    classes = int(max(labels.max(), test_labels.max())) + 1
    info = DatasetInfo(name, images.shape[1], images.shape[2], classes, len(images), len(test_images), "")
    images, labels, test_images, test_labels = images[:train], labels[:train], test_images[:test], test_labels[:test]
    return Dataset(info, images, labels.long(), test_images, test_labels.long(), *_pixel_statistics(images))


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in units of [0, 1], float32 (c,), exact from histograms."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])  # (c, 256)
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(1)
    return mean.float(), variance.sqrt().float()
