"""Augmentation of many images at once, each by its own random numbers.

The caller provides the randomness as uniform numbers, P for each image, so an augmented image depends on the image
and its own numbers only: it has the same bits alone and in any batch. All steps are exact in integers (lookup tables
and index tables on uint8), as in Pillow, and no step loops over images.

The order is crop, flip, operations, cutout, and after normalisation random erasing. Pixels from outside the image and
those that cutout erases are black; random erasing fills with the mean colour.
"""

import torch
from torch import Tensor

from weightscope.data.config import AugmentConfig
from weightscope.data.randaugment import Tables, apply, tables
from weightscope.data.rectangles import sides
from weightscope.errors import UsageError

_CROP_RATIO = 4 / 3  # Szegedy et al. 2015, section 6; the default of torchvision and timm
_ERASED, _ERASED_RATIO, _ERASE_DRAWS = (0.02, 1 / 3), 1 / 0.3, 5  # timm's defaults; Zhong et al. 2020 have (0.02, 0.4)


def draws_needed(config: AugmentConfig) -> int:
    """P, the number of uniform numbers per image.

    2 for crop or 4 for resized_crop, 1 for flip, 2 per operation (3 with magnitude_std), 2 for cutout, 5 for erasing.
    """
    crop = 2 * (config.crop > 0) + 4 * (config.resized_crop > 0) + config.flip
    each = 3 if config.magnitude_std > 0 else 2
    return crop + each * config.operations + 2 * (config.cutout > 0) + _ERASE_DRAWS * (config.erasing > 0)


def augment(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Augment images, each by its own draws.

    Args:
        images: uint8 (n, c, S, S); n may be the images of many networks in a row.
        draws: float32 (n, P) in [0, 1), P = `draws_needed(config)`, on the images' device; `erase` takes the last 5.
        config: which augmentations. A random crop shifts the image by up to `crop` pixels along each axis;
            `resized_crop` cuts out a rectangle of at least that share of the area and of aspect ratio 3/4 to 4/3, and
            resizes it bilinearly (torchvision's RandomResizedCrop; Szegedy et al. 2015); `cutout` erases a square of
            that side around a random pixel, clipped at the border (DeVries and Taylor 2017); `operations` of strength
            `magnitude` are drawn as in RandAugment (Cubuk et al. 2020), see `weightscope.data.randaugment`.

    Returns:
        float32 (n, c, S, S) in [0, 1]; see `normalise` and `erase`.

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
    if config.resized_crop > 0:
        images = _resized_crop(images, [next(numbers) for _ in range(4)], config.resized_crop)
    if config.crop > 0 or config.flip:
        vertical, horizontal = (next(numbers), next(numbers)) if config.crop > 0 else (None, None)
        images = _crop_and_flip(images, vertical, horizontal, next(numbers) if config.flip else None, config.crop)
    if config.operations:
        settings = config.magnitude, images.device, config.magnitude_std, config.sharpness
        prepared: Tables = tables(*images.shape[1:], *settings)
        for _ in range(config.operations):
            which, sign = next(numbers), next(numbers)
            images = apply(images, which, sign, prepared, next(numbers) if config.magnitude_std > 0 else None)
    if config.cutout > 0:
        images = _erase(images, next(numbers), next(numbers), config.cutout)
    return images.float().div_(255)


def erase(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Random erasing: set a rectangle of an image to 0, the mean colour, with probability `config.erasing`.

    The rectangle has 2 % to 1/3 of the area and an aspect ratio of 0.3 to 1 / 0.3, as by timm's RandomErasing in mode
    "const".

    Args:
        images: normalised, (n, c, S, S).
        draws: (n, P), those given to `augment`.
        config: the probability.

    Source: Zhong et al., Random erasing data augmentation, 2020.
    """
    if not config.erasing:
        return images
    chance, ratio, area, top, left = draws[:, -_ERASE_DRAWS:].unbind(1)
    size = images.shape[-1]
    height, width = sides(ratio, area, *_ERASED, _ERASED_RATIO, size)
    position, kept = torch.arange(size, device=images.device), []
    for draw, length in ((top, height), (left, width)):
        start = whole(draw, size + 1 - length)[:, None]
        kept.append((position < start) | (position >= start + length[:, None]))  # (n, S)
    kept[0] |= (chance >= config.erasing)[:, None]
    return images * (kept[0][:, None, :, None] | kept[1][:, None, None, :])


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


def whole(draws: Tensor, below: int | Tensor) -> Tensor:
    """Integers 0 .. below - 1 with equal probability from uniform numbers in [0, 1)."""
    return (draws * below).long().clamp_(max=below - 1)  # the product of the largest float below 1 may round up


def _resized_crop(images: Tensor, draws: list[Tensor], smallest: float) -> Tensor:
    """A random rectangle of each image, resized to the whole image by bilinear interpolation, rows after columns."""
    ratio, area, top, left = draws
    size = images.shape[-1]
    height, width = sides(ratio, area, smallest, 1.0, _CROP_RATIO, size)
    images = _stretched(images, whole(left, size + 1 - width), width)
    return _stretched(images.transpose(2, 3), whole(top, size + 1 - height), height).transpose(2, 3)


def _stretched(images: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """The columns `start` to `start + length` of each image, stretched to all columns, uint8.

    The centre of column x is at `(x + 1/2) length / S - 1/2` of the part, a fraction with denominator 2 S, so integers
    suffice. As Pillow's, the result is rounded after each axis.
    """
    size = images.shape[-1]
    place = (2 * torch.arange(size, device=images.device) + 1) * length[:, None] - size  # (n, S), times 2 S
    place = torch.minimum(place.clamp(min=0), 2 * size * (length[:, None] - 1))
    first, part = start[:, None] + place // (2 * size), place % (2 * size)
    second = torch.minimum(first + 1, (start + length - 1)[:, None])
    pixels = [images.gather(3, at[:, None, None].expand_as(images)).int() for at in (first, second)]
    weight = part[:, None, None].int()
    mixed = pixels[0] * (2 * size - weight) + pixels[1] * weight
    return ((mixed + size) // (2 * size)).to(torch.uint8)


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
