"""Batches of training images of many networks."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weightscope.data.augment import augment, erase, normalise
from weightscope.data.config import AugmentConfig

if TYPE_CHECKING:
    from weightscope.recipe import Recipe


def fused(recipe: "Recipe") -> bool:
    """Whether Triton's `load_images` covers what the recipe does to its images."""
    config = recipe.images.augment
    other = config.operations or config.resized_crop or config.erasing or recipe.training.cutmix
    return not other


def load_images(
    images: Tensor,
    index: Tensor,
    draws: Tensor | None,
    shares: Tensor | None,
    moments: tuple[Tensor, Tensor],
    config: AugmentConfig,
    boxes: Tensor | None = None,
) -> Tensor:
    """Augmented, normalised and mixed images.

    Args:
        images: uint8 (n, C, H, W), the whole training set.
        index: (T, B), the images of each network's batch.
        draws: (T, B, P) uniform numbers for `augment`, or None without augmentation.
        shares: (T,), the mixup coefficients, or None without mixup and CutMix.
        moments: mean and standard deviation of the channels, (C,) each.
        config: the augmentation.
        boxes: (T, 4), the rectangles of CutMix, or None without CutMix; see `cutmix_boxes`.

    Returns:
        (T, B, C, H, W), float.
    """
    raw = images[index.reshape(-1)]
    if draws is not None:
        raw = augment(raw, draws.reshape(-1, draws.shape[-1]), config)
    found = normalise(raw, *moments)
    if draws is not None:
        found = erase(found, draws.reshape(-1, draws.shape[-1]), config)
    found = found.view(*index.shape, *raw.shape[1:])
    if shares is not None:  # each image is mixed with the one at the mirrored place of its batch
        share = shares[:, None, None, None, None]
        other = found.flip(1)
        found = share * found + (1 - share) * other
        if boxes is not None:
            found = torch.where(_inside(boxes, found.shape[-1])[:, None, None], other, found)
    return found


def cutmix_boxes(shares: np.ndarray, centres: np.ndarray, size: int) -> np.ndarray:
    """Rectangles of CutMix: sides `floor(S sqrt(1 - share))` around a random pixel, clipped at the border.

    Args:
        shares: (steps,), of the image that is kept.
        centres: (steps, 2), uniform numbers in [0, 1) for row and column.
        size: S, side of the images.

    Returns:
        (steps, 4) int64: first row, row after the last, first column, column after the last.

    Source: Yun et al., CutMix, 2019, section 3.1; timm's Mixup in mode "batch".
    """
    side = np.floor(size * np.sqrt(1 - shares)).astype(np.int64)[:, None]
    first = np.floor(size * centres).astype(np.int64) - side // 2  # (steps, 2)
    edges = np.stack([first, first + side], axis=2).clip(0, size)
    return edges.reshape(-1, 4)


def label_shares(shares: Tensor, boxes: Tensor | None, size: int) -> Tensor:
    """The weight (T,) of an image's own label: its share of the mixture, less the part of the area that is pasted."""
    if boxes is None:
        return shares
    top, bottom, left, right = boxes.unbind(1)
    return shares - (bottom - top) * (right - left) / size**2


def _inside(boxes: Tensor, size: int) -> Tensor:
    """Whether each pixel is in the box, (T, S, S)."""
    position = torch.arange(size, device=boxes.device)
    rows, columns = (
        (position >= boxes[:, at, None]) & (position < boxes[:, at + 1, None]) for at in (0, 2)
    )  # (T, S) each
    return rows[:, :, None] & columns[:, None, :]
