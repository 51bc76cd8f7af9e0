"""Augmentation against Pillow and plain loops, and the independence of every image from its neighbours."""

import math

import numpy as np
import pytest
import torch

from weightscope.data.augment import augment, draws_needed, normalise, whole
from weightscope.data.randaugment import ROTATE, SHEAR, TRANSLATE, apply, operations, tables
from weightscope.errors import UsageError
from weightscope.recipe import AugmentConfig

CPU = torch.device("cpu")
EVERYTHING = AugmentConfig(crop=3, flip=True, cutout=5, operations=2, magnitude=0.7)


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


def _one(name: str, images: torch.Tensor, magnitude: float, sign: float) -> torch.Tensor:
    """One operation with one sign (0.25 the positive, 0.75 the negative) on all images."""
    names = operations(images.shape[1])
    which = torch.full((len(images),), (names.index(name) + 0.5) / len(names))
    return apply(images, which, torch.full((len(images),), sign), tables(*images.shape[1:], magnitude, CPU))


# --- draws -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_an_images_bits_depend_on_its_own_draws_only(channels: int) -> None:
    """Alone, in another order and among other images, in batches of odd sizes: the same bits."""
    images, draws = _images(67, channels), _draws(67, EVERYTHING)
    together = augment(images, draws, EVERYTHING)
    for i in range(67):
        assert torch.equal(augment(images[i : i + 1], draws[i : i + 1], EVERYTHING)[0], together[i])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))[:41]
    assert torch.equal(augment(images[order], draws[order], EVERYTHING), together[order])
    others = torch.cat([_images(5, channels, seed=7), images]), torch.cat([_draws(5, EVERYTHING, 7), draws])
    assert torch.equal(augment(*others, EVERYTHING)[5:], together)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bits_are_the_same_on_a_gpu() -> None:
    images, draws = _images(300), _draws(300, EVERYTHING)
    there = augment(images.cuda(), draws.cuda(), EVERYTHING)
    assert torch.equal(_bytes(there.cpu()), _bytes(augment(images, draws, EVERYTHING)))


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (AugmentConfig(), 0),
        (AugmentConfig(crop=4), 2),
        (AugmentConfig(flip=True), 1),
        (AugmentConfig(cutout=8), 2),
        (AugmentConfig(operations=3), 6),
        (EVERYTHING, 9),
    ],
)
def test_draws_needed_is_what_is_used(config: AugmentConfig, needed: int) -> None:
    assert draws_needed(config) == needed
    images, draws = _images(400, 3), _draws(400, config)
    before = augment(images, draws, config)
    assert before.dtype == torch.float32
    assert before.shape == images.shape
    for column in range(needed):
        changed = draws.clone()
        changed[:, column] = torch.rand(400, generator=torch.Generator().manual_seed(9))
        assert not torch.equal(augment(images, changed, config), before)


def test_inputs_stay_as_they_are() -> None:
    images, draws = _images(9), _draws(9, EVERYTHING)
    copies = images.clone(), draws.clone()
    augment(images, draws, EVERYTHING)
    assert torch.equal(images, copies[0])
    assert torch.equal(draws, copies[1])


def test_no_augmentation_only_scales() -> None:
    images = _images(4)
    assert torch.equal(augment(images, torch.empty(4, 0), AugmentConfig()), images.float() / 255)


@pytest.mark.parametrize("below", [1, 2, 9, 13, 1000])
def test_whole_numbers_reach_every_value_and_no_other(below: int) -> None:
    edge = torch.tensor([0.0, 1 - 2**-24])
    assert whole(edge, below).tolist() == [0, below - 1]
    counts = whole(torch.arange(20 * below, dtype=torch.float64).add(0.5) / (20 * below), below).bincount()
    assert counts.tolist() == [20] * below


@pytest.mark.parametrize(
    ("images", "draws", "match"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, 9), r"expected images as uint8 .*found torch.float32"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), torch.zeros(2, 9), r"found torch.uint8 \(2, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 8), r"expected draws \(2, 9\), found \(2, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, 9), r"expected draws \(2, 9\), found \(3, 9\)"),
    ],
)
def test_wrong_inputs_are_refused(images: torch.Tensor, draws: torch.Tensor, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        augment(images, draws, EVERYTHING)


# --- crop, flip, cutout ----------------------------------------------------------------------------------


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


def test_a_flip_alone_mirrors_about_half_of_the_images() -> None:
    """Binomial(2000, 1/2) within five standard deviations: a false alarm in 1.7 million seeds."""
    images, draws = _images(2000, 1, 4), _draws(2000, AugmentConfig(flip=True))
    result = _bytes(augment(images, draws, AugmentConfig(flip=True)))
    flipped = (result == images.flip(3)).flatten(1).all(1)
    kept = (result == images).flatten(1).all(1)
    assert (flipped | kept).all()
    assert abs(int(flipped.sum()) - 1000) < 5 * math.sqrt(500)


@pytest.mark.parametrize("side", [1, 4, 5, 99])
def test_cutout_equals_a_loop(side: int) -> None:
    config = AugmentConfig(cutout=side)
    images, draws = _images(50, size=11), _draws(50, config)
    result = _bytes(augment(images, draws, config))
    for image, draw, ours in zip(images, draws, result, strict=True):
        plain = image.clone()
        y, x = (int(d * 11) - side // 2 for d in draw.double())
        plain[:, max(y, 0) : max(y + side, 0), max(x, 0) : max(x + side, 0)] = 0
        assert torch.equal(ours, plain)


# --- operations ------------------------------------------------------------------------------------------

PILLOW = {
    "identity": lambda image, m, sign: image,
    "autocontrast": lambda image, m, sign: _ops().autocontrast(image),
    "equalize": lambda image, m, sign: _ops().equalize(image),
    "posterize": lambda image, m, sign: _ops().posterize(image, 8 - round(4 * m)),
    "solarize": lambda image, m, sign: _ops().solarize(image, 256 * (1 - m)),
    "brightness": lambda image, m, sign: _enhance().Brightness(image).enhance(1 + sign * 0.9 * m),
    "contrast": lambda image, m, sign: _enhance().Contrast(image).enhance(1 + sign * 0.9 * m),
    "saturation": lambda image, m, sign: _enhance().Color(image).enhance(1 + sign * 0.9 * m),
}
EXACT = {"identity", "equalize", "posterize", "solarize"}


def _ops():
    from PIL import ImageOps

    return ImageOps


def _enhance():
    from PIL import ImageEnhance

    return ImageEnhance


@pytest.mark.parametrize("magnitude", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("name", "channels"), [(name, c) for c in (1, 3) for name in PILLOW if name in operations(c)])
def test_colour_operations_equal_pillows(name: str, magnitude: float, channels: int) -> None:
    """Pillow truncates where this rounds, so blends may differ by one of 255."""
    image_type = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    images = _images(6, channels, 24)
    for draw, sign in ((0.25, 1), (0.75, -1)):
        ours = _one(name, images, magnitude, draw)
        for image, result in zip(images, ours, strict=True):
            pixels = image[0].numpy() if channels == 1 else image.permute(1, 2, 0).numpy()
            theirs = np.asarray(PILLOW[name](image_type.fromarray(pixels), magnitude, sign)).astype(int)
            found = (result[0] if channels == 1 else result.permute(1, 2, 0)).numpy().astype(int)
            assert np.abs(found - theirs).max() <= (0 if name in EXACT else 1)


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
def test_operations_of_magnitude_zero_change_nothing_but_the_histogram(channels: int) -> None:
    images = _images(5, channels)
    for name in set(operations(channels)) - {"autocontrast", "equalize"}:
        assert torch.equal(_one(name, images, 0.0, 0.25), images), name


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_colour_are_no_special_case(channels: int) -> None:
    """No division by zero: autocontrast and equalisation leave such an image alone."""
    for value in (0, 7, 255):
        images = torch.full((2, channels, 20, 20), value, dtype=torch.uint8)
        for name in ("autocontrast", "equalize", "contrast"):
            assert torch.equal(_one(name, images, 1.0, 0.25), images)


def test_every_operation_is_drawn_equally_often() -> None:
    """Chi-squared over the distinguishable results of 6,500 draws, 13 operations, 0.1 % false alarms."""
    images = _images(1, 3, 16)
    names = operations(3)
    assert len(names) == 13
    draws = torch.rand(6500, 2, generator=torch.Generator().manual_seed(3))
    result = apply(images.expand(6500, -1, -1, -1), draws[:, 0], draws[:, 1], tables(3, 16, 16, 0.6, CPU))
    by_name = torch.stack([torch.stack([_one(name, images, 0.6, s)[0] for s in (0.25, 0.75)]) for name in names])
    equal = (result[:, None, None] == by_name).flatten(3).all(3).any(2)  # (6500, 13)
    assert (equal.sum(1) >= 1).all()
    counts = equal.sum(0).double()
    assert ((counts - 500) ** 2 / 500).sum() < 32.9


def test_grey_images_are_never_saturated() -> None:
    assert "saturation" not in operations(1)
    assert len(tables(1, 8, 8, 0.5, CPU).names) == 12


# --- normalisation ---------------------------------------------------------------------------------------


def test_normalised_images_have_mean_zero_and_deviation_one() -> None:
    pixels = augment(_images(50), torch.empty(50, 0), AugmentConfig()).double()
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), correction=0)
    scaled = normalise(pixels, mean, std)
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(scaled.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64))


def test_bytes_and_their_fractions_are_normalised_alike() -> None:
    """A trainer that augments and an evaluation that does not must see images of one scale."""
    images, mean, std = _images(5), torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    fractions = augment(images, torch.empty(5, 0), AugmentConfig())
    assert torch.equal(normalise(images, mean, std), normalise(fractions, mean, std))
    assert normalise(images, mean, std).abs().max() < 9
