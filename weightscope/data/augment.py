"""Augmentation of many images at once, each by its own random numbers.

The caller provides the randomness as uniform numbers, P for each image, so an augmented image depends on the image
and its own numbers only: it has the same bits alone and in any batch. All steps are exact in integers (lookup tables
and index tables on uint8), as in Pillow, and no step loops over images.

The order is crop, flip, operations, cutout. Pixels from outside the image and erased pixels are black.
"""

import torch
from torch import Tensor

from weightscope.data.config import AugmentConfig
from weightscope.data.randaugment import Tables, apply, tables
from weightscope.errors import UsageError


def draws_needed(config: AugmentConfig) -> int:
    """P, the number of uniform numbers per image: 2 for crop, 1 for flip, 2 per operation, 2 for cutout."""
    return 2 * (config.crop > 0) + config.flip + 2 * config.operations + 2 * (config.cutout > 0)


def augment(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Augment images, each by its own draws.

    Args:
        images: uint8 (n, c, S, S); n may be the images of many networks in a row.
        draws: float32 (n, P) in [0, 1), P = `draws_needed(config)`, on the images' device.
        config: which augmentations. A random crop shifts the image by up to `crop` pixels along each axis;
            `cutout` erases a square of that side around a random pixel, clipped at the border (DeVries and Taylor
            2017); `operations` of strength `magnitude` are drawn as in RandAugment (Cubuk et al. 2020), see
            `weightscope.data.randaugment`.

    Returns:
        float32 (n, c, S, S) in [0, 1]; see `normalise`.

    Raises:
        UsageError: if the images are not uint8 or the draws have another shape.

    Example:
        >>> config = AugmentConfig(crop=2, flip=True)
        >>> draws = torch.rand(len(images), draws_needed(config), generator=generator)
        >>> augment(images, draws, config)
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise UsageError(f"expected images as uint8 (n, c, S, S), found {images.dtype} {tuple(images.shape)}")
    if draws.shape != (len(images), draws_needed(config)):
        raise UsageError(f"expected draws {(len(images), draws_needed(config))}, found {tuple(draws.shape)}")
    numbers = iter(draws.unbind(1))
    if config.crop > 0 or config.flip:
        vertical, horizontal = (next(numbers), next(numbers)) if config.crop > 0 else (None, None)
        images = _crop_and_flip(images, vertical, horizontal, next(numbers) if config.flip else None, config.crop)
    if config.operations:
        prepared: Tables = tables(images.shape[1], images.shape[2], images.shape[3], config.magnitude, images.device)
        for _ in range(config.operations):
            images = apply(images, next(numbers), next(numbers), prepared)
    if config.cutout > 0:
        images = _erase(images, next(numbers), next(numbers), config.cutout)
    return images.float().div_(255)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`(images - mean) / std` for each channel, of images in units of [0, 1].

    Args:
        images: float (..., c, S, S) in [0, 1], or uint8, which is divided by 255.
        mean: float (c,), such as `Dataset.mean`.
        std: float (c,), positive, such as `Dataset.std`.

    Returns:
        float (..., c, S, S).
    """
    if images.dtype == torch.uint8:
        images = images.float().div_(255)
    return (images - mean[:, None, None]) / std[:, None, None]


def whole(draws: Tensor, below: int) -> Tensor:
    """Integers 0 .. below - 1 with equal probability from uniform numbers in [0, 1)."""
    return (draws * below).long().clamp_(max=below - 1)  # the product of the largest float below 1 may round up


def _crop_and_flip(
    images: Tensor, vertical: Tensor | None, horizontal: Tensor | None, flip: Tensor | None, padding: int
) -> Tensor:
    """Shift each image by up to `padding` pixels and mirror half of them."""
    n, _, height, width = images.shape
    y = torch.arange(height, device=images.device).expand(n, height)
    x = torch.arange(width, device=images.device).expand(n, width)
    if flip is not None:
        x = torch.where((flip < 0.5)[:, None], width - 1 - x, x)
    if vertical is not None and horizontal is not None:
        y = y + (whole(vertical, 2 * padding + 1) - padding)[:, None]
        x = x + (whole(horizontal, 2 * padding + 1) - padding)[:, None]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    index = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # (n, S, S)
    moved = images.flatten(2).gather(2, index.reshape(n, 1, -1).expand(-1, images.shape[1], -1)).reshape(images.shape)
    return moved * inside[:, None]


def _erase(images: Tensor, vertical: Tensor, horizontal: Tensor, side: int) -> Tensor:
    """Set a square of this side around a random pixel of each image to 0."""
    kept = []
    for draws, length in ((vertical, images.shape[2]), (horizontal, images.shape[3])):
        start = whole(draws, length)[:, None] - side // 2
        position = torch.arange(length, device=images.device)
        kept.append((position < start) | (position >= start + side))  # (n, S)
    return images * (kept[0][:, None, :, None] | kept[1][:, None, None, :])
