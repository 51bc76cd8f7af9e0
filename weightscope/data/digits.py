"""The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels: the test half of UCI's "Optical Recognition"."""

from pathlib import Path

import numpy as np

from weightscope.data.registry import DATASETS, Arrays, DatasetInfo


@DATASETS.register(
    "digits",
    channels=1,
    size=8,
    classes=10,
    train=1437,
    test=360,
    how_to_get="part of scikit-learn: `pip install scikit-learn`",
)
def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """Training and test images, in the file's order.

    scikit-learn defines no split. Every fifth image, after a stable sort by class, is a test image: 360 test and
    1,437 training images with the same class proportions to within one image. The same writers are in both parts,
    so test accuracy does not measure generalisation to new writers.

    Pixels from 0 to 16 are scaled to 0 .. 255 and rounded, which keeps all 17 levels distinct.

    Args:
        info: shapes and sizes.
        root: ignored; the data are part of scikit-learn.
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
