"""The digits' training images alone: four fifths to train on, one fifth to choose a gain by."""

import numpy as np

from weightscope.data import load


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(train images, train labels, held-back images, held-back labels) of the training images of the digits."""
    found = load("digits")
    cut = len(found.train_images) * 4 // 5
    return (
        found.train_images[:cut],
        found.train_labels[:cut],
        found.train_images[cut:],
        found.train_labels[cut:],
    )
