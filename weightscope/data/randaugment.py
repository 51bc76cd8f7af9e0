"""The operations of RandAugment (Cubuk et al. 2020) as tables.

A geometric operation is a table of source pixels (nearest neighbour), a colour operation a table of 256 values, so
one gather of each kind applies a different operation to every image. Strengths are the paper's largest ones times
`magnitude` in [0, 1]; signs are random. With sharpness, which is optional, the operations are the paper's 14, which
are also torchvision's. Timm has 15 of other strengths, without identity, and applies each with probability 1/2.

Where the strength has a standard deviation, it is one of 32 equally probable levels of the normal distribution, clipped
to [0, 1], so that there are tables for each.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

LEVELS = 32  # of a magnitude with a standard deviation

# Strength at magnitude 1.
ENHANCE = 0.9  # factors of brightness, contrast, saturation and sharpness are 1 -+ this
POSTERIZE = 4  # bits removed, of 8
SHEAR = 0.3
ROTATE = math.radians(30)
TRANSLATE = 150 / 331  # of the side length: the paper's 150 pixels in images of 331

COLOURS = ("autocontrast", "equalize", "brightness", "contrast", "saturation", "posterize", "solarize")
GEOMETRY = ("translate_x", "translate_y", "shear_x", "shear_y", "rotate")


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of K operations with either sign and L magnitudes for images of one size.

    Row (2 i + s) L + l is operation i with sign s and magnitude l.

    Attributes:
        names: of the K operations.
        levels: L.
        geometry: int64 (2 K L,), the row of `source` and `inside`, of which there are G.
        source: int64 (G, S * S), index of the source pixel of each pixel.
        inside: bool (G, S * S), whether the source is inside the image.
        values: uint8 (2 K L, 256), the new value of each value, for operations that do not depend on the image.
        contrast: float32 (2 K L,), factor of the distance from the image's mean; 1 for other operations.
        saturation: float32 (2 K L,), factor of the distance from grey; 1 for other operations.
        sharpness: float32 (2 K L,), factor of the distance from the smoothed image; 1 for other operations.
    """

    names: tuple[str, ...]
    levels: int
    geometry: Tensor
    source: Tensor
    inside: Tensor
    values: Tensor
    contrast: Tensor
    saturation: Tensor
    sharpness: Tensor


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


@lru_cache(maxsize=16)
def tables(
    channels: int,
    height: int,
    width: int,
    magnitude: float,
    device: torch.device,
    magnitude_std: float = 0.0,
    sharpness: bool = False,
) -> Tables:
    """Tables of the operations for images (n, c, height, width).

    Args:
        channels: c.
        height: in pixels.
        width: in pixels.
        magnitude: strength, in [0, 1].
        device: of the images.
        magnitude_std: standard deviation of the strength.
        sharpness: whether it is one of the operations.
    """
    names, levels = operations(channels, sharpness), magnitudes(magnitude, magnitude_std)
    rows = [(name, sign * level) for name in names for sign in (-1.0, 1.0) for level in levels]
    moves = [("identity", 0.0), *(row for row in rows if row[0] in GEOMETRY)]
    place = {move: at for at, move in enumerate(moves)}
    geometry = [_source(name, strength, height, width) for name, strength in moves]
    factors = [_factors(rows, name).to(device) for name in ("contrast", "saturation", "sharpness")]
    return Tables(
        names,
        len(levels),
        torch.tensor([place.get(row, 0) for row in rows]).to(device),
        torch.stack([source for source, _ in geometry]).to(device),
        torch.stack([inside for _, inside in geometry]).to(device),
        torch.stack([_values(name, strength) for name, strength in rows]).to(device),
        *factors,
    )


def apply(images: Tensor, which: Tensor, sign: Tensor, prepared: Tables, strength: Tensor | None = None) -> Tensor:
    """Apply one operation to each image.

    Args:
        images: uint8 (n, c, S, S).
        which: float32 (n,) in [0, 1), selects the operation.
        sign: float32 (n,) in [0, 1), selects its sign.
        prepared: from `tables`.
        strength: float32 (n,) in [0, 1), selects the magnitude; None if there is only one.

    Returns:
        uint8 (n, c, S, S).
    """
    count = len(prepared.names)
    kind = (which * count).long().clamp_(max=count - 1)
    row = 2 * kind + (sign < 0.5)
    if strength is not None:
        row = row * prepared.levels + (strength * prepared.levels).long().clamp_(max=prepared.levels - 1)
    move = prepared.geometry[row]
    pixels = images.flatten(2)  # (n, c, S * S)
    pixels = pixels.gather(2, prepared.source[move][:, None].expand_as(pixels)).mul_(prepared.inside[move][:, None])
    index, grey = pixels.long(), _grey(pixels)
    values = prepared.values[row][:, None].expand(-1, pixels.shape[1], -1)  # (n, c, 256)
    for name, made in (
        ("autocontrast", _autocontrast(pixels)),
        ("equalize", _equalize(pixels, index)),
        ("contrast", _contrast(grey, prepared.contrast[row][:, None, None])),
    ):
        values = torch.where((kind == prepared.names.index(name))[:, None, None], made, values)
    pixels = values.gather(2, index)
    if "saturation" in prepared.names:
        pixels = _blend(grey, pixels, prepared.saturation[row][:, None, None])
    pixels = pixels.reshape(images.shape)
    if "sharpness" in prepared.names:
        pixels = _blend(_smoothed(pixels), pixels, prepared.sharpness[row][:, None, None, None])
    return pixels


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


def _factors(rows: list[tuple[str, float]], name: str) -> Tensor:
    return torch.tensor([1 + strength * ENHANCE if name == other else 1.0 for other, strength in rows])


def _smoothed(images: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels of which the centre counts 5-fold, rounded; border pixels are unchanged, as in Pillow.

    uint8 (n, c, S, S) to the same.
    """
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
    """The table that equalises each channel's histogram as Pillow does, uint8 (n, c, 256); `index` is int64 pixels.

    Images of fewer than 256 pixels are unchanged, as in Pillow.
    """
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, index, torch.ones((), dtype=torch.int32, device=pixels.device).expand(pixels.shape))
    brightest = counts.gather(2, pixels.amax(2, keepdim=True).long())
    step = (pixels.shape[2] - brightest).div(255, rounding_mode="floor")
    below = counts.cumsum(2, dtype=torch.int32) - counts
    leveled = (below + step // 2).div(step.clamp(min=1), rounding_mode="floor").clamp(0, 255)
    v = torch.arange(256, device=pixels.device, dtype=torch.int32)
    return torch.where(step > 0, leveled, v).to(torch.uint8)
