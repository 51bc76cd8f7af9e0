"""Augmentation of many images at once, each by its own random numbers.

An augmented image depends on the image and its own P uniform numbers only: it has the same bits alone and in any batch.
All steps are exact in integers, as in Pillow, and none loops over images. The order is crop, flip, operations, cutout,
and after normalisation random erasing, which fills with the mean colour or noise; other missing pixels are black.

A geometric operation is a table of source pixels (nearest neighbour), a colour operation a table of 256 values, so one
gather of each kind applies a different operation to every image. Strengths are the paper's largest ones times
`magnitude`; signs are random. With sharpness, the operations are the paper's 14, which are also torchvision's.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from weightscope.data.image_section import AugmentConfig

_CROP_RATIO = 4 / 3  # Szegedy et al. 2015, section 6; the default of torchvision and timm
_ERASED, _ERASED_RATIO, _ERASE_DRAWS = (0.02, 1 / 3), 1 / 0.3, 5  # timm's defaults; Zhong et al. 2020 have (0.02, 0.4)
_CELLS = 4096  # of the table of the inverse distribution function of aspect ratios

LEVELS = 32  # of a magnitude with a std

# Strength at magnitude 1.
ENHANCE = 0.9  # factors of brightness, contrast, saturation and sharpness are 1 -+ this
POSTERIZE = 4  # bits removed, of 8
SHEAR = 0.3
ROTATE = math.radians(30)
TRANSLATE = 150 / 331  # of the side length: the paper's 150 pixels in images of 331

COLOURS = ("autocontrast", "equalize", "brightness", "contrast", "saturation", "posterize", "solarize")
BLENDS = ("contrast", "saturation", "sharpness")  # of the image with its mean grey, with grey, smoothed
GEOMETRY = ("translate_x", "translate_y", "shear_x", "shear_y", "rotate")


R = TypeVar("R")


def _constant(make: Callable[..., R]) -> Callable[..., R]:
    """Keep the results of a function, and have `torch.compile` take them as constants instead of tracing it."""
    kept = lru_cache(maxsize=16)(make)

    @wraps(make)
    def constant(*arguments: Any, **named: Any) -> R:
        return kept(*arguments, **named)

    vars(constant)["_dynamo_marked_constant"] = True  # torch.compiler.assume_constant_result would import the compiler
    return constant


def draws_needed(config: AugmentConfig) -> int:
    """P, the number of uniform numbers per image."""
    crop = 2 * (config.crop > 0) + 4 * (config.resized_crop > 0) + config.flip
    each = 2 + (config.magnitude_std > 0) + (config.probability < 1)
    erased = (_ERASE_DRAWS + (config.erasing_mode == "pixel")) * (config.erasing > 0)
    return crop + each * config.operations + 2 * (config.cutout > 0) + erased


def augment(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Augment images, uint8 (n, c, S, S), each by its own draws, float32 (n, P) in [0, 1): float32 in [0, 1].

    P is `draws_needed(config)`; `erase` takes the last ones. A crop shifts the image by up to `crop` pixels along
    each axis; `resized_crop` cuts out a rectangle of at least that share of the area and of aspect ratio 3/4 to
    4/3, and resizes it bilinearly (Szegedy et al. 2015); `cutout` erases a square of that side around a random pixel
    (DeVries and Taylor 2017); `operations` of strength `magnitude` are those of RandAugment (Cubuk et al. 2020).
    """
    numbers = iter(draws.unbind(1))
    if config.resized_crop > 0:
        images = _resized_crop(images, numbers, config.resized_crop)
    if config.crop > 0 or config.flip:
        images = _crop_and_flip(images, numbers, config)
    if config.operations:
        settings = config.magnitude, images.device, config.magnitude_std, config.sharpness
        prepared: Tables = tables(*images.shape[1:], *settings)
        for _ in range(config.operations):
            which, sign = next(numbers), next(numbers)
            changed = apply(images, which, sign, prepared, next(numbers) if config.magnitude_std > 0 else None)
            if config.probability < 1:
                changed = torch.where((next(numbers) < config.probability)[:, None, None, None], changed, images)
            images = changed
    if config.cutout > 0:
        top, left = (whole(next(numbers), side) - config.cutout // 2 for side in images.shape[2:])
        side = torch.full_like(top, config.cutout)
        images = images * _outside(images, top, side, left, side)
    return images.float().div_(255)


def erase(images: Tensor, draws: Tensor, config: AugmentConfig) -> Tensor:
    """Random erasing: fill a rectangle of an image with probability `config.erasing`.

    The rectangle has 2 % to 1/3 of the area and an aspect ratio of 0.3 to 1 / 0.3, as by timm's RandomErasing. In mode
    "const" it is filled with 0, the mean colour, in mode "pixel" with independent N(0, 1) for each pixel and channel:
    a part of a fixed table of 2^20 numbers, which begins where the last draw says.

    Source: Zhong et al., Random erasing data augmentation, 2020.
    """
    if not config.erasing:
        return images
    noisy, size = config.erasing_mode == "pixel", images.shape[-1]
    chance, ratio, area, top, left = draws[:, -_ERASE_DRAWS - noisy : draws.shape[1] - noisy].unbind(1)
    height, width = sides(ratio, area, *_ERASED, _ERASED_RATIO, size)
    height = torch.where(chance < config.erasing, height, 0)
    kept = _outside(images, whole(top, size + 1 - height), height, whole(left, size + 1 - width), width)
    if not noisy:
        return images * kept
    parts = _noise(images.device).unfold(0, images[0].numel(), 1)  # a view: all parts of the table
    return torch.where(kept, images, parts[whole(draws[:, -1], len(parts))].view_as(images))


@_constant
def _noise(device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)).to(device)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`(images - mean) / std` for each channel, of images in units of [0, 1]."""
    if images.dtype == torch.uint8:
        images = images.float().div_(255)
    return (images - mean[:, None, None]) / std[:, None, None]


def whole(draws: Tensor, below: int | Tensor) -> Tensor:
    """Integers 0 .. below - 1 with equal probability from uniform numbers in [0, 1)."""
    return (draws * below).long().clamp_(max=below - 1)  # the product of the largest float below 1 may round up


def _resized_crop(images: Tensor, numbers: Iterator[Tensor], smallest: float) -> Tensor:
    """A random rectangle of each image, resized to the whole image by bilinear interpolation, rows after columns."""
    ratio, area, top, left = (next(numbers) for _ in range(4))
    size = images.shape[-1]
    height, width = sides(ratio, area, smallest, 1.0, _CROP_RATIO, size)
    images = _stretched(images, whole(left, size + 1 - width), width)
    return _stretched(images.transpose(2, 3), whole(top, size + 1 - height), height).transpose(2, 3)


def _stretched(images: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """The columns `start` to `start + length` of each image, stretched to all columns, rounded as by Pillow, uint8."""
    size = images.shape[-1]
    place = (2 * torch.arange(size, device=images.device) + 1) * length[:, None] - size  # (n, S), times 2 S
    place = torch.minimum(place.clamp(min=0), 2 * size * (length[:, None] - 1))
    first, part = start[:, None] + place // (2 * size), place % (2 * size)
    second = torch.minimum(first + 1, (start + length - 1)[:, None])
    pixels = [images.gather(3, at[:, None, None].expand_as(images)).int() for at in (first, second)]
    weight = part[:, None, None].int()
    mixed = pixels[0] * (2 * size - weight) + pixels[1] * weight
    return ((mixed + size) // (2 * size)).to(torch.uint8)


def _crop_and_flip(images: Tensor, numbers: Iterator[Tensor], config: AugmentConfig) -> Tensor:
    """Shift each image by up to `config.crop` pixels and mirror half of them."""
    n, _, height, width = images.shape
    shifts = [(whole(next(numbers), 2 * config.crop + 1) - config.crop)[:, None] for _ in range(2 * (config.crop > 0))]
    y = torch.arange(height, device=images.device).expand(n, height)
    x = torch.arange(width, device=images.device).expand(n, width)
    if config.flip:
        x = torch.where((next(numbers) < 0.5)[:, None], width - 1 - x, x)
    if shifts:
        y, x = y + shifts[0], x + shifts[1]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    index = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None, :]  # (n, S, S)
    moved = images.flatten(2).gather(2, index.reshape(n, 1, -1).expand(-1, images.shape[1], -1)).reshape(images.shape)
    return moved * inside[:, None]


def _outside(images: Tensor, top: Tensor, height: Tensor, left: Tensor, width: Tensor) -> Tensor:
    """Whether pixels (n, 1, S, S) are outside a rectangle of each image, given in pixels, int64 (n,)."""
    kept = []
    for start, length, side in ((top, height, images.shape[2]), (left, width, images.shape[3])):
        position = torch.arange(side, device=images.device)
        kept.append((position < start[:, None]) | (position >= (start + length)[:, None]))  # (n, S)
    return kept[0][:, None, :, None] | kept[1][:, None, None, :]


# --- random rectangles -----------------------------------------------------------------------------------------------


def sides(ratio: Tensor, area: Tensor, low: float, high: float, limit: float, size: int) -> tuple[Tensor, Tensor]:
    """Heights and widths in pixels, int64 (n,) each, of random rectangles within square images, at least 1.

    `height = size sqrt(s / r)`, `width = size sqrt(s r)`, rounded. The usual code draws the share s of the image's area
    uniformly from [low, high] and the logarithm u of the aspect ratio r = width / height uniformly from [-l, l], and
    tries again if the rectangle is larger than the image. Here (s, u) is drawn from the same distribution without a
    loop: a rectangle fits a square image if `s <= exp(-|u|)`, so u has a density proportional to
    `min(high, exp(-|u|)) - low`, and s is uniform below that bound. `ratio` and `area`, (n,) in [0, 1), are the uniform
    numbers of r and s; `limit` = exp(l).
    """
    table = _quantiles(low, high, math.log(limit), ratio.device)
    place = ratio.double() * _CELLS  # float64, so that a GPU rounds to the same pixels
    cell = place.long().clamp_(max=_CELLS - 1)
    u = torch.lerp(table[cell], table[cell + 1], place - cell)
    s = low + area.double() * (torch.exp(-u.abs()).clamp(max=high) - low).clamp_(min=0)
    height, width = ((size * (s * torch.exp(v)).sqrt()).round().long().clamp_(1, size) for v in (-u, u))
    return height, width


@_constant
def _quantiles(low: float, high: float, limit: float, device: torch.device) -> Tensor:
    """Quantiles 0, 1 / cells, ..., 1 of u, float64."""
    u = np.linspace(-limit, limit, 16 * _CELLS + 1)
    density = np.maximum(np.minimum(high, np.exp(-np.abs(u))) - low, 0)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    if below[-1] == 0:  # low = high = 1: the whole image
        return torch.zeros(_CELLS + 1, dtype=torch.float64, device=device)
    return torch.from_numpy(np.interp(np.linspace(0, below[-1], _CELLS + 1), below, u)).to(device)


# --- RandAugment -----------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Tables of K operations with either sign and L magnitudes for images of one size.

    Row (2 i + s) L + l is operation i with sign s and magnitude l.
    """

    names: tuple[str, ...]  # of the K operations
    levels: int  # L
    geometry: Tensor  # int64 (2 K L,), the row of `source` and `inside`
    source: Tensor  # int64 (G, S * S), index of the source pixel of each pixel
    inside: Tensor  # bool (G, S * S), whether the source is inside the image
    values: Tensor  # uint8 (2 K L, 256), the new value of each value, for operations that do not depend on the image
    factors: Tensor  # float32 (3, 2 K L), of the operations `BLENDS`; 1 for others


def operations(channels: int, sharpness: bool = False) -> tuple[str, ...]:
    """Names of the operations for images of so many channels; saturation needs 3."""
    colours = [name for name in COLOURS if name != "saturation" or channels == 3]
    return ("identity", *colours, *GEOMETRY, *(("sharpness",) if sharpness else ()))


def magnitudes(mean: float, std: float) -> list[float]:
    """The equally probable strengths of an operation: normal quantiles at (l + 1/2) / 32, clipped to [0, 1]."""
    if std == 0:
        return [mean]
    quantiles = [NormalDist().inv_cdf((level + 0.5) / LEVELS) for level in range(LEVELS)]
    return [min(max(mean + std * z, 0.0), 1.0) for z in quantiles]


@_constant
def tables(
    channels: int,
    height: int,
    width: int,
    magnitude: float,
    device: torch.device,
    magnitude_std: float = 0.0,
    sharpness: bool = False,
) -> Tables:
    """Tables of the operations for images (n, c, height, width), whose strength has this mean and std."""
    names, levels = operations(channels, sharpness), magnitudes(magnitude, magnitude_std)
    rows = [(name, sign * level) for name in names for sign in (-1.0, 1.0) for level in levels]
    moves = [("identity", 0.0), *(row for row in rows if row[0] in GEOMETRY)]
    place = {move: at for at, move in enumerate(moves)}
    sources, insides = zip(*(_source(name, strength, height, width) for name, strength in moves), strict=True)
    factors = [[1 + strength * ENHANCE if name == blend else 1.0 for name, strength in rows] for blend in BLENDS]
    return Tables(
        names,
        len(levels),
        torch.tensor([place.get(row, 0) for row in rows]).to(device),
        torch.stack(sources).to(device),
        torch.stack(insides).to(device),
        torch.stack([_values(name, strength) for name, strength in rows]).to(device),
        torch.tensor(factors).to(device),
    )


def apply(images: Tensor, which: Tensor, sign: Tensor, prepared: Tables, strength: Tensor | None = None) -> Tensor:
    """Apply one operation to each image, uint8 (n, c, S, S).

    `which`, `sign` and `strength`, float32 (n,) in [0, 1), select the operation, its sign and its magnitude; `strength`
    is None if there is only one.
    """
    kind = whole(which, len(prepared.names))
    row = 2 * kind + (sign < 0.5)
    if strength is not None:
        row = row * prepared.levels + whole(strength, prepared.levels)
    move = prepared.geometry[row]
    contrast, saturation, sharpness = prepared.factors[:, row, None, None]  # (n, 1, 1) each
    pixels = images.flatten(2)  # (n, c, S * S)
    pixels = pixels.gather(2, prepared.source[move][:, None].expand_as(pixels)).mul_(prepared.inside[move][:, None])
    index, grey = pixels.long(), _grey(pixels)
    values = prepared.values[row][:, None].expand(-1, pixels.shape[1], -1)  # (n, c, 256)
    for name, made in (
        ("autocontrast", _autocontrast(pixels)),
        ("equalize", _equalize(pixels, index)),
        ("contrast", _contrast(grey, contrast)),
    ):
        values = torch.where((kind == prepared.names.index(name))[:, None, None], made, values)
    pixels = values.gather(2, index)
    if "saturation" in prepared.names:
        pixels = _blend(grey, pixels, saturation)
    pixels = pixels.reshape(images.shape)
    return _blend(_smoothed(pixels), pixels, sharpness[..., None]) if "sharpness" in prepared.names else pixels


def _source(name: str, strength: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Index of each pixel's source, (S * S,), and whether it is inside; relative to the image's centre."""
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) - (height - 1) / 2,
        torch.arange(width, dtype=torch.float64) - (width - 1) / 2,
        indexing="ij",
    )
    cos, sin = math.cos(strength * ROTATE), math.sin(strength * ROTATE)
    from_y, from_x = {
        "translate_x": (y, x - strength * TRANSLATE * width),
        "translate_y": (y - strength * TRANSLATE * height, x),
        "shear_x": (y, x - strength * SHEAR * y),
        "shear_y": (y - strength * SHEAR * x, x),
        "rotate": (cos * y + sin * x, cos * x - sin * y),
    }.get(name, (y, x))
    row = torch.floor(from_y + (height - 1) / 2 + 0.5).long()
    column = torch.floor(from_x + (width - 1) / 2 + 0.5).long()
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return torch.where(inside, row * width + column, 0).flatten(), inside.flatten()


def _values(name: str, strength: float) -> Tensor:
    """The new value of each value, uint8 (256,); the identity for operations that depend on the image."""
    v, magnitude = torch.arange(256), abs(strength)
    if name == "brightness":
        v = (v * (1 + strength * ENHANCE) + 0.5).floor().clamp(0, 255)
    elif name == "posterize":
        v = v & ~((1 << round(POSTERIZE * magnitude)) - 1)
    elif name == "solarize":
        v = torch.where(v >= 256 * (1 - magnitude), 255 - v, v)
    return v.to(torch.uint8)


def _smoothed(images: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels, the centre weighted 5-fold, rounded; border pixels stay, as in Pillow."""
    if min(images.shape[2:]) < 3:
        return images
    wide = images.int()
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[:, :, 1:-1, 1:-1]  # of weight 13
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)
    return result


def _blend(origin: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    """`origin + factor * (value - origin)`, rounded and clipped to 0 .. 255, uint8; exact for factor 1."""
    origin = origin.float()
    moved = (value - origin).mul_(factor).add_(origin).add_(0.5)
    return moved.clamp_(0, 255).to(torch.uint8)  # the conversion truncates


def _grey(pixels: Tensor) -> Tensor:
    """Luma of ITU-R 601 in integers as in Pillow, int32 (n, 1, S * S)."""
    if pixels.shape[1] != 3:
        return pixels[:, :1].int()
    red, green, blue = pixels.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def _autocontrast(pixels: Tensor) -> Tensor:
    """The table that stretches each channel to 0 .. 255, uint8 (n, c, 256)."""
    low, high = (extreme.int() for extreme in (pixels.amin(2, keepdim=True), pixels.amax(2, keepdim=True)))
    v = torch.arange(256, device=pixels.device, dtype=torch.int32)
    stretched = (255 * (v - low)).div((high - low).clamp(min=1), rounding_mode="floor").clamp(0, 255)
    return torch.where(high > low, stretched, v).to(torch.uint8)


def _contrast(grey: Tensor, factor: Tensor) -> Tensor:
    """The table that scales the distance from the image's rounded mean grey by `factor`, uint8 (n, 1, 256)."""
    count = grey.shape[2]
    mean = (2 * grey.sum(2, keepdim=True) + count).div(2 * count, rounding_mode="floor")
    return _blend(mean, torch.arange(256, device=grey.device), factor)


def _equalize(pixels: Tensor, index: Tensor) -> Tensor:
    """The table that equalises each channel's histogram as Pillow does, uint8 (n, c, 256)."""
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, index, torch.ones((), dtype=torch.int32, device=pixels.device).expand(pixels.shape))
    brightest = counts.gather(2, pixels.amax(2, keepdim=True).long())
    step = (pixels.shape[2] - brightest).div(255, rounding_mode="floor")
    below = counts.cumsum(2, dtype=torch.int32) - counts
    leveled = (below + step // 2).div(step.clamp(min=1), rounding_mode="floor").clamp(0, 255)
    v = torch.arange(256, device=pixels.device, dtype=torch.int32)
    return torch.where(step > 0, leveled, v).to(torch.uint8)
