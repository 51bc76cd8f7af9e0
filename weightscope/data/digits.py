"""The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels: the test half of UCI's "Optical Recognition"."""

from pathlib import Path

import numpy as np

from weightscope.data.catalog import DatasetInfo
from weightscope.data.locations import Arrays


def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images, in the file's order.

    scikit-learn has no split. Here every fifth image of the list sorted by class (a stable sort) is a test
    image: 360 to test and 1,437 to train, each class in the same proportion to within one image. The same
    writers are in both, so a test accuracy says nothing of new writers.

    Pixels count from 0 to 16; they are scaled to 0 .. 255 and rounded, which keeps all 17 levels apart.

    Args:
        info: the catalogue entry.
        root: not used, since the data come with scikit-learn.
        train: how many training images.
        test: how many test images.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, info.size, info.size)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    labels = labels.astype(np.uint8)
    return images[~held_out][:train], labels[~held_out][:train], images[held_out][:test], labels[held_out][:test]
