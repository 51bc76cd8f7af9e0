"""The registry of data sets. A reader registers itself with what is known of its data before they are loaded."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightscope._util.plugins import Registry
from weightscope.data.config import SourceConfig

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training images (n, c, S, S), training labels (n,), test images (m, c, S, S), test labels (m,); all uint8 but for
the labels of more than 256 classes."""


@dataclass(frozen=True)
class DatasetInfo:
    """One classification data set.

    Attributes:
        name: as in recipes.
        channels: of an image.
        size: side length of the square images, in pixels.
        classes: the number of classes.
        train: the number of training images.
        test: the number of test images.
        how_to_get: one sentence for the error about missing files.
        config: the settings of a folder of images, whose numbers of images are 0 until it is read; None for others.
    """

    name: str
    channels: int
    size: int
    classes: int
    train: int
    test: int
    how_to_get: str = ""
    config: SourceConfig | None = None


Reader = Callable[..., Arrays]
"""Reads the first images: `reader(info, root, train, test)`, where `root` is a folder to search first."""

DATASETS: Registry[Reader] = Registry("data set")
"""Readers by the name of their data set; the details of each are the fields of its `DatasetInfo`."""
