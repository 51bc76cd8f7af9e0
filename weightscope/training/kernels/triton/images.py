"""The images of a step: gathered, augmented, normalised, mixed and transposed in one pass."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightscope.training.kernels.triton.common import padded

if TYPE_CHECKING:
    from weightscope.recipe import AugmentConfig


@triton.jit
def _whole(draws, below):
    """Same as `weightscope.data.augment.whole`."""
    return tl.minimum((draws * below).to(tl.int32), below - 1)


@triton.jit
def _image_row(
    images,
    index,
    draws,
    image,
    within,
    channel,
    y,
    H: tl.constexpr,
    W: tl.constexpr,
    C,
    P,
    WIDTH: tl.constexpr,
    CROP: tl.constexpr,
    FLIP: tl.constexpr,
    CUTOUT: tl.constexpr,
):
    """Row `y` of some augmented images, (images, WIDTH) in [0, 1]; same as `weightscope.data.augment.augment`."""
    which = tl.load(index + image, mask=within, other=0)
    draws += image * P
    x = tl.arange(0, WIDTH)[None, :]
    source_y, source_x = tl.zeros_like(image) + y, tl.zeros_like(image)[:, None] + x
    if FLIP:
        flip = tl.load(draws + 2 * (CROP > 0), mask=within, other=0.0) < 0.5
        source_x = tl.where(flip[:, None], W - 1 - source_x, source_x)
    if CROP > 0:
        source_y += _whole(tl.load(draws, mask=within, other=0.0), 2 * CROP + 1) - CROP
        source_x += (_whole(tl.load(draws + 1, mask=within, other=0.0), 2 * CROP + 1) - CROP)[:, None]
    kept = (within & (source_y >= 0) & (source_y < H))[:, None] & (source_x >= 0) & (source_x < W) & (x < W)
    if CUTOUT > 0:
        top = _whole(tl.load(draws + P - 2, mask=within, other=0.0), H) - CUTOUT // 2
        left = (_whole(tl.load(draws + P - 1, mask=within, other=0.0), W) - CUTOUT // 2)[:, None]
        kept &= ~(((y >= top) & (y < top + CUTOUT))[:, None] & (x >= left) & (x < left + CUTOUT))
    at = ((which * C + channel) * H + source_y)[:, None] * W + source_x
    return tl.load(images + at, mask=kept, other=0).to(tl.float32) / 255


@triton.jit
def _load_images(
    images,
    index,
    draws,
    shares,
    mean,
    std,
    out,
    B,
    C,
    P,
    H: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    CROP: tl.constexpr,
    FLIP: tl.constexpr,
    CUTOUT: tl.constexpr,
    MIXUP: tl.constexpr,
):
    """One row of one channel of BATCH images of one network."""
    net, channel, y = tl.program_id(0).to(tl.int64), tl.program_id(1) // H, tl.program_id(1) % H
    batch = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    within = batch < B
    m, s = tl.load(mean + channel), tl.load(std + channel)
    first = net * B
    row = _image_row(images, index, draws, first + batch, within, channel, y, H, W, C, P, WIDTH, CROP, FLIP, CUTOUT)
    row = (row - m) / s
    if MIXUP:  # with the batch in reverse order
        other = first + B - 1 - batch
        more = _image_row(images, index, draws, other, within, channel, y, H, W, C, P, WIDTH, CROP, FLIP, CUTOUT)
        share = tl.load(shares + net)
        row = share * row + (1 - share) * ((more - m) / s)
    x = tl.arange(0, WIDTH)[:, None]
    at = (((net * C + channel) * H + y) * W + x) * B + batch[None, :]
    tl.store(out + at, tl.trans(row).to(out.dtype.element_ty), mask=(x < W) & within[None, :])


def load_images(
    images: Tensor,
    index: Tensor,
    draws: Tensor | None,
    shares: Tensor | None,
    moments: tuple[Tensor, Tensor],
    config: "AugmentConfig",
    dtype: torch.dtype,
) -> Tensor:
    """Augmented, normalised and mixed images in network-stacked channels, in one pass over memory.

    Args:
        images: uint8 (n, C, H, W), the whole training set.
        index: (T, B), the images of each network's batch.
        draws: (T, B, P) uniform numbers for `augment`, or None without augmentation.
        shares: (T,), the mixup coefficients, or None without mixup.
        moments: mean and standard deviation of the channels, (C,) each.
        config: crop, flip and cutout; no operations.
        dtype: of the result.

    Returns:
        (T C, H, W, B).
    """
    count, batch = index.shape
    _, channels, height, width = images.shape
    out = torch.empty(count * channels, height, width, batch, dtype=dtype, device=images.device)
    size = padded(batch, 64)
    _load_images[(count, channels * height, triton.cdiv(batch, size))](
        images,
        index,
        moments[0] if draws is None else draws,
        moments[0] if shares is None else shares,
        *moments,
        out,
        batch,
        channels,
        0 if draws is None else draws.shape[2],
        H=height,
        W=width,
        WIDTH=triton.next_power_of_2(width),
        BATCH=size,
        CROP=config.crop,
        FLIP=config.flip,
        CUTOUT=config.cutout,
        MIXUP=shares is not None,
    )
    return out
