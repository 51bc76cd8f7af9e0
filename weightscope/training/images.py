"""Batches of training images of many networks."""

from torch import Tensor

from weightscope.data.augment import augment, normalise
from weightscope.data.config import AugmentConfig


def load_images(
    images: Tensor,
    index: Tensor,
    draws: Tensor | None,
    shares: Tensor | None,
    moments: tuple[Tensor, Tensor],
    config: AugmentConfig,
) -> Tensor:
    """Augmented, normalised and mixed images.

    Args:
        images: uint8 (n, C, H, W), the whole training set.
        index: (T, B), the images of each network's batch.
        draws: (T, B, P) uniform numbers for `augment`, or None without augmentation.
        shares: (T,), the mixup coefficients, or None without mixup.
        moments: mean and standard deviation of the channels, (C,) each.
        config: the augmentation.

    Returns:
        (T, B, C, H, W), float.
    """
    raw = images[index.reshape(-1)]
    if draws is not None:
        raw = augment(raw, draws.reshape(-1, draws.shape[-1]), config)
    found = normalise(raw, *moments).view(*index.shape, *raw.shape[1:])
    if shares is not None:  # mixup of each image with the one at the mirrored place of its batch
        share = shares[:, None, None, None, None]
        found = share * found + (1 - share) * found.flip(1)
    return found
