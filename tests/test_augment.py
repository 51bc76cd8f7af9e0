"""Augmentation against Pillow and plain loops, and the independence of every image from its neighbours."""

import hashlib
import math
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.stats import ks_2samp, kstest

from weightscope.data.augment import (
    LEVELS,
    ROTATE,
    SHEAR,
    TRANSLATE,
    apply,
    augment,
    draws_needed,
    erase,
    magnitudes,
    normalise,
    operations,
    sides,
    tables,
    whole,
)
from weightscope.recipe import AugmentConfig

CPU = torch.device("cpu")
EVERYTHING = AugmentConfig(crop=3, flip=True, cutout=5, operations=2, magnitude=0.7)
NEWER = AugmentConfig(
    resized_crop=0.2, flip=True, cutout=5, operations=2, magnitude=0.7, magnitude_std=0.2, sharpness=True, erasing=0.5
)


def _images(count: int, channels: int = 3, size: int = 20, seed: int = 0) -> torch.Tensor:
    """Smooth images with noise, so that neither histograms nor neighbouring pixels are uniform."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(rough, (size, size), mode="bilinear")
    noise = torch.rand(count, channels, size, size, generator=generator)
    return (30 + 150 * smooth + 40 * noise).to(torch.uint8)


def _draws(count: int, config: AugmentConfig, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, draws_needed(config), generator=torch.Generator().manual_seed(seed))


def _bytes(images: torch.Tensor) -> torch.Tensor:
    """Pixels as uint8 again."""
    scaled = images * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-3)
    return scaled.round().to(torch.uint8)


def _shown(image: torch.Tensor) -> np.ndarray:
    """Pixels (S, S, 3), or (S, S) of a grey image."""
    return (image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()


def _one(name: str, images: torch.Tensor, magnitude: float, sign: float) -> torch.Tensor:
    """One operation with one sign (0.25 the positive, 0.75 the negative) on all images."""
    sharpness = name == "sharpness"
    names = operations(images.shape[1], sharpness)
    which = torch.full((len(images),), (names.index(name) + 0.5) / len(names))
    prepared = tables(*images.shape[1:], magnitude, CPU, sharpness=sharpness)
    return apply(images, which, torch.full((len(images),), sign), prepared)


def _augmented(images: torch.Tensor, draws: torch.Tensor, config: AugmentConfig) -> torch.Tensor:
    return erase(augment(images, draws, config), draws, config)


@pytest.mark.parametrize("config", [EVERYTHING, NEWER], ids=["first", "newer"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_images_bits_depend_on_its_own_draws_only(channels: int, config: AugmentConfig) -> None:
    """Alone, in another order and among other images, in batches of odd sizes: the same bits."""
    images, draws = _images(67, channels), _draws(67, config)
    copies = images.clone(), draws.clone()
    together = _augmented(images, draws, config)
    assert torch.equal(images, copies[0])
    assert torch.equal(draws, copies[1])
    for i in range(67):
        assert torch.equal(_augmented(images[i : i + 1], draws[i : i + 1], config)[0], together[i])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))[:41]
    assert torch.equal(_augmented(images[order], draws[order], config), together[order])
    others = torch.cat([_images(5, channels, seed=7), images]), torch.cat([_draws(5, config, 7), draws])
    assert torch.equal(_augmented(*others, config)[5:], together)


def test_images_of_older_recipes_keep_their_bits() -> None:
    """The checksum of what version 0.1 computed."""
    digest = hashlib.sha256()
    for channels in (1, 3):
        images = _images(300, channels)
        for magnitude in (0.0, 0.3, 0.7, 1.0):
            config = EVERYTHING.model_copy(update={"magnitude": magnitude, "operations": 3})
            digest.update(_bytes(augment(images, _draws(300, config), config)).numpy().tobytes())
    assert digest.hexdigest()[:16] == "73820710c4982eef"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bits_are_the_same_on_a_gpu() -> None:
    for config in (EVERYTHING, NEWER):
        images, draws = _images(300), _draws(300, config)
        there = _augmented(images.cuda(), draws.cuda(), config)
        assert torch.equal(_bytes(there.cpu()), _bytes(_augmented(images, draws, config)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (AugmentConfig(), 0),
        (EVERYTHING, 9),
        (AugmentConfig(operations=2, probability=0.5), 6),
        (NEWER, 18),
    ],
)
def test_draws_needed_is_what_is_used(config: AugmentConfig, needed: int) -> None:
    assert draws_needed(config) == needed
    images, draws = _images(400, 3), _draws(400, config)
    before = _augmented(images, draws, config)
    assert before.dtype == torch.float32
    assert before.shape == images.shape
    for column in range(needed):
        changed = draws.clone()
        changed[:, column] = torch.rand(400, generator=torch.Generator().manual_seed(9))
        assert not torch.equal(_augmented(images, changed, config), before)


def test_operations_are_applied_with_their_probability() -> None:
    """The share of 4,000 images that one operation leaves alone, within 5 standard errors of that of 0.25."""
    config = AugmentConfig(operations=1, probability=0.25)
    images, draws = _images(4000), _draws(4000, config)
    always = _augmented(images, draws[:, :2], AugmentConfig(operations=1))
    found, plain = _augmented(images, draws, config), images.float().div(255)
    used = (found != plain).flatten(1).any(1)
    assert torch.equal(found[used], always[used])
    able = (always != plain).flatten(1).any(1).float().mean().item()  # an operation may leave an image as it is
    assert used.float().mean().item() == pytest.approx(0.25 * able, abs=5 * (0.25 * 0.75 / 4000) ** 0.5)


@pytest.mark.parametrize("below", [1, 9, 1000])
def test_whole_numbers_reach_every_value_and_no_other(below: int) -> None:
    edge = torch.tensor([0.0, 1 - 2**-24])
    assert whole(edge, below).tolist() == [0, below - 1]
    counts = whole(torch.arange(20 * below, dtype=torch.float64).add(0.5) / (20 * below), below).bincount()
    assert counts.tolist() == [20] * below


def test_crop_and_flip_equal_padding_cutting_and_mirroring() -> None:
    config, padding = AugmentConfig(crop=3, flip=True), 3
    images, draws = _images(60, size=9), _draws(60, config)
    result = _bytes(augment(images, draws, config))
    seen = set()
    for image, draw, ours in zip(images, draws, result, strict=True):
        y, x = (int(d * (2 * padding + 1)) for d in draw[:2].double())
        plain = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)))[:, y : y + 9, x : x + 9]
        flipped = bool(draw[2] < 0.5)
        assert np.array_equal(ours.numpy(), plain[:, :, ::-1] if flipped else plain)
        seen.add((y, flipped))
    assert len(seen) == 14


@pytest.mark.parametrize("side", [4, 5, 99])
def test_cutout_equals_a_loop(side: int) -> None:
    config = AugmentConfig(cutout=side)
    images, draws = _images(50, size=11), _draws(50, config)
    result = _bytes(augment(images, draws, config))
    for image, draw, ours in zip(images, draws, result, strict=True):
        plain = image.clone()
        y, x = (int(d * 11) - side // 2 for d in draw.double())
        plain[:, max(y, 0) : max(y + side, 0), max(x, 0) : max(x + side, 0)] = 0
        assert torch.equal(ours, plain)


def _rejected(low: float, high: float, limit: float, size: int, count: int) -> np.ndarray:
    """Heights and widths (count, 2) by the usual rejection, before rounding."""
    random, found = np.random.default_rng(0), []
    while len(found) < count:
        area, ratio = random.uniform(low, high), math.exp(random.uniform(-math.log(limit), math.log(limit)))
        if area * max(ratio, 1 / ratio) <= 1:
            found.append((size * math.sqrt(area / ratio), size * math.sqrt(area * ratio)))
    return np.array(found)


@pytest.mark.parametrize(("low", "high", "limit"), [(0.08, 1.0, 4 / 3), (0.9, 1.0, 4 / 3), (0.02, 1 / 3, 1 / 0.3)])
def test_rectangles_are_distributed_as_by_rejection(low: float, high: float, limit: float) -> None:
    """Kolmogorov-Smirnov on area and ratio, 4,000 draws each, in all 1 % false alarms; and it finds plain clipping."""
    size, generator = 100_000, torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 2, generator=generator)
    found = torch.stack(sides(draws[:, 0], draws[:, 1], low, high, limit, size), 1).numpy() / size
    expected = _rejected(low, high, limit, size, 4000) / size
    area, ratio = draws[:, 1].numpy() * (high - low) + low, limit ** (2 * draws[:, 0].numpy() - 1)
    clipped = np.sqrt(np.stack([area / ratio, area * ratio], 1)).clip(max=1)
    for what in (lambda hw: hw[:, 0] * hw[:, 1], lambda hw: np.log(hw[:, 1] / hw[:, 0])):
        assert ks_2samp(what(found), what(expected)).pvalue > 0.01 / 6
    assert (found <= 1).all()
    if high == 1:
        assert min(ks_2samp(clipped[:, i], expected[:, i]).pvalue for i in (0, 1)) < 1e-4


def test_rectangles_of_the_whole_image_and_of_a_pixel() -> None:
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert [side.tolist() for side in sides(ends, ends, 1.0, 1.0, 4 / 3, 7)] == [[7, 7], [7, 7]]
    assert [side.tolist() for side in sides(ends, ends, 1e-6, 1e-5, 4 / 3, 7)] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(("channels", "size"), [(1, 16), (3, 16), (3, 20)])
def test_resized_crops_equal_pillows(channels: int, size: int) -> None:
    """To the bit where Pillow's weights of 22 bits are exact; elsewhere what ends in one half may be rounded down."""
    config = AugmentConfig(resized_crop=0.08)
    images, draws = _images(60, channels, size), _draws(60, config)
    heights, widths = sides(draws[:, 0], draws[:, 1], 0.08, 1.0, 4 / 3, size)
    assert len(set(zip(heights.tolist(), widths.tolist(), strict=True))) > 30
    ours = _bytes(augment(images, draws, config))
    for image, draw, height, width, result in zip(images, draws, heights, widths, ours, strict=True):
        top, left = (int(u * (size + 1 - length)) for u, length in ((draw[2], height), (draw[3], width)))
        part = Image.fromarray(_shown(image)).crop((left, top, left + int(width), top + int(height)))
        theirs = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(_shown(result) - theirs).max() <= (0 if size == 16 else 1)


@pytest.mark.parametrize("mode", ["const", "pixel"])
def test_erasing_equals_a_loop(mode: Literal["const", "pixel"]) -> None:
    config = AugmentConfig(erasing=0.4, erasing_mode=mode)
    numbers = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    images, draws = torch.randn(300, 3, 20, 20, generator=torch.Generator().manual_seed(1)), _draws(300, config)
    found, erased = erase(images, draws, config), 0
    heights, widths = sides(draws[:, 1], draws[:, 2], 0.02, 1 / 3, 1 / 0.3, 20)
    for image, draw, height, width, ours in zip(images, draws, heights, widths, found, strict=True):
        plain = image.clone()
        if draw[0] < 0.4:
            top, left = int(draw[3] * (21 - height)), int(draw[4] * (21 - width))
            place = slice(None), slice(top, top + height), slice(left, left + width)
            start = int(draw[-1] * (len(numbers) - 1200 + 1))
            noise = torch.from_numpy(numbers[start : start + 1200]).reshape(3, 20, 20)
            plain[place] = noise[place] if mode == "pixel" else 0
            erased += 1
        assert torch.equal(ours, plain)
    assert 90 < erased < 150
    filled = found[found != images].numpy()
    if mode == "pixel":
        assert kstest(filled[:5000], "norm").pvalue > 1e-6  # false alarm 1e-6
    else:
        assert not filled.any()
    assert torch.equal(erase(images, draws[:, :0], AugmentConfig()), images)


PILLOW = {
    "identity": lambda image, m, sign: image,
    "autocontrast": lambda image, m, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, m, sign: ImageOps.equalize(image),
    "posterize": lambda image, m, sign: ImageOps.posterize(image, 8 - round(4 * m)),
    "solarize": lambda image, m, sign: ImageOps.solarize(image, 256 * (1 - m)),
    "brightness": lambda image, m, sign: ImageEnhance.Brightness(image).enhance(1 + sign * 0.9 * m),
    "contrast": lambda image, m, sign: ImageEnhance.Contrast(image).enhance(1 + sign * 0.9 * m),
    "saturation": lambda image, m, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.9 * m),
    "sharpness": lambda image, m, sign: ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * m),
}
EXACT = {"identity", "equalize", "posterize", "solarize"}


@pytest.mark.parametrize("magnitude", [0.3, 1.0])
@pytest.mark.parametrize(
    ("name", "channels"), [(name, c) for c in (1, 3) for name in PILLOW if name in operations(c, True)]
)
def test_colour_operations_equal_pillows(name: str, magnitude: float, channels: int) -> None:
    """Pillow truncates where this rounds, so blends may differ by one of 255."""
    images = _images(6, channels, 24)
    for draw, sign in ((0.25, 1), (0.75, -1)):
        ours = _one(name, images, magnitude, draw)
        for image, result in zip(images, ours, strict=True):
            theirs = np.asarray(PILLOW[name](Image.fromarray(_shown(image)), magnitude, sign)).astype(int)
            assert np.abs(_shown(result) - theirs).max() <= (0 if name in EXACT else 1)


def _move(name: str, strength: float, y: float, x: float, size: int) -> tuple[float, float]:
    """Where the pixel at (y, x), counted from the centre, is taken from."""
    angle = strength * ROTATE
    return {
        "translate_x": (y, x - strength * TRANSLATE * size),
        "translate_y": (y - strength * TRANSLATE * size, x),
        "shear_x": (y, x - strength * SHEAR * y),
        "shear_y": (y - strength * SHEAR * x, x),
        "rotate": (
            math.cos(angle) * y + math.sin(angle) * x,
            math.cos(angle) * x - math.sin(angle) * y,
        ),
    }[name]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["translate_x", "translate_y", "shear_x", "shear_y", "rotate"])
def test_geometric_operations_equal_a_loop(name: str, sign: int) -> None:
    image = _images(1, 3, 13)
    result = _one(name, image, 0.8, 0.25 if sign > 0 else 0.75)[0]
    for i in range(13):
        for j in range(13):
            y, x = (math.floor(v + 6 + 0.5) for v in _move(name, sign * 0.8, i - 6, j - 6, 13))
            inside = 0 <= y < 13 and 0 <= x < 13
            assert torch.equal(result[:, i, j], image[0, :, y, x] if inside else torch.zeros(3, dtype=torch.uint8))
    assert not torch.equal(result, image[0])


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_colour_are_no_special_case(channels: int) -> None:
    """No division by zero: autocontrast and equalisation leave such an image alone."""
    for value in (0, 7, 255):
        images = torch.full((2, channels, 20, 20), value, dtype=torch.uint8)
        for name in ("autocontrast", "equalize", "contrast"):
            assert torch.equal(_one(name, images, 1.0, 0.25), images)


def test_the_operations_are_those_of_the_paper_and_of_torchvision() -> None:
    """Cubuk et al. 2020, section 3, where colour is called saturation here."""
    paper = "identity autocontrast equalize rotate solarize saturation posterize contrast brightness sharpness"
    moves = "shear_x shear_y translate_x translate_y"
    assert sorted(operations(3, sharpness=True)) == sorted(f"{paper} {moves}".split())
    assert operations(3, sharpness=True)[:-1] == operations(3), "older recipes keep the order"


def test_magnitudes_with_a_std_are_normal_and_clipped() -> None:
    levels = np.array(magnitudes(0.5, 0.1))
    assert len(levels) == LEVELS
    assert levels.mean() == pytest.approx(0.5)
    assert levels.std() == pytest.approx(0.1, rel=0.02)
    assert magnitudes(0.9, 0.05)[-1] == 1.0
    assert magnitudes(0.9, 0.0) == [0.9]


@pytest.mark.parametrize("name", ["rotate", "posterize", "contrast"])
def test_each_level_is_the_operation_of_its_magnitude(name: str) -> None:
    image, names = _images(1, 3, 16), operations(3, sharpness=True)
    prepared = tables(3, 16, 16, 0.5, CPU, magnitude_std=0.2, sharpness=True)
    which = torch.full((LEVELS,), (names.index(name) + 0.5) / len(names))
    strength = (torch.arange(LEVELS) + 0.5) / LEVELS
    found = apply(image.expand(LEVELS, -1, -1, -1), which, torch.full((LEVELS,), 0.75), prepared, strength)
    for level, ours in zip(magnitudes(0.5, 0.2), found, strict=True):
        assert torch.equal(ours, _one(name, image, level, 0.75)[0])
    assert len({ours.numpy().tobytes() for ours in found}) > 2


def test_bytes_and_their_fractions_are_normalised_alike() -> None:
    """A trainer that augments and an evaluation that does not must see images of one scale."""
    images, mean, std = _images(5), torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    fractions = augment(images, torch.empty(5, 0), AugmentConfig())
    assert torch.equal(fractions, images.float() / 255)
    assert torch.equal(normalise(images, mean, std), normalise(fractions, mean, std))
    expected = (images.numpy() / 255 - mean.numpy()[:, None, None]) / std.numpy()[:, None, None]
    np.testing.assert_allclose(normalise(images, mean, std).numpy(), expected, rtol=1e-5, atol=1e-5)
