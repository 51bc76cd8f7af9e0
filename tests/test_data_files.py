"""Images of one's own in files: folders and .npz files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weightscope.data import SourceConfig, images, load, registry
from weightscope.data.arrays import PARTS
from weightscope.data.image_section import dataset_info
from weightscope.data.metrics import ACCURACY
from weightscope.errors import DataError, RecipeError, UsageError
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

OPTIONS: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data on this machine."""
    monkeypatch.delenv("WEIGHTSCOPE_DATA", raising=False)
    monkeypatch.setattr(registry, "SHARED", tmp_path / "shared")
    monkeypatch.chdir(tmp_path)


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def classes_in(folder: Path, each: int = 5, names: Sequence[str] = "abc", first: int = 0) -> None:
    """Folders of `each` PNG files; every image is told by its red value in the corner."""
    for c, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = picture(100 * c + i)
            pixels[..., 0] = first + 20 * c + i
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def config(**changes: Any) -> SourceConfig:
    return SourceConfig(**{"name": "folder", "path": "pets", "size": 8, **changes})


def recipe(**data: Any) -> Recipe:
    return Recipe.parse(
        {
            "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2},
            "data": {"name": "folder", "path": "pets", "size": 8, **data},
            "training": {"epochs": 1, "batch_size": 4},
            "population": {"networks": 2, "tile": 2},
        }
    )


def test_a_folder_is_split_by_its_seed_within_each_class(tmp_path: Path) -> None:
    classes_in(tmp_path / "pets", each=10)
    data = load(config())
    assert data.train_labels.bincount().tolist() == [8, 8, 8]
    assert data.test_labels.bincount().tolist() == [2, 2, 2]
    red = torch.cat([data.train_images[:, 0, 0, 0], data.test_images[:, 0, 0, 0]])
    assert sorted(red.tolist()) == [20 * c + i for c in range(3) for i in range(10)], "every image once"
    labels = torch.cat([data.train_labels, data.test_labels])
    assert torch.equal(red.long() // 20, labels)
    assert load(config()).fingerprint == data.fingerprint != load(config(split_seed=1)).fingerprint
    assert load(config(test_share=0.5)).test_labels.bincount().tolist() == [5, 5, 5]
    part = load(config(), train=12, test=3)
    assert torch.equal(part.train_images, data.train_images[:12])
    assert len(set(part.train_labels.tolist())) == 3, "classes are mixed"
    info = dataset_info(config())
    assert (info.channels, info.size, info.classes, info.train, info.test) == (3, 8, 3, 24, 6)
    with pytest.raises(UsageError, match=r"data\.train: expected 1 to 24 images"):
        load(config(), train=25)


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_folder_may_have_its_own_parts(tmp_path: Path, test: str) -> None:
    """As ImageNet has; hidden folders and files, and files that are no images, are skipped."""
    pets = tmp_path / "pets"
    classes_in(pets / "train", names="abc")
    classes_in(pets / test, names="bc", each=2, first=100)
    classes_in(pets / "train" / ".checkpoints")
    Image.fromarray(picture(7)).save(pets / "train" / "a" / "more.JPEG")
    Image.fromarray(picture(7)).save(pets / "train" / "a" / ".hidden.png")
    (pets / "train" / "a" / "notes.txt").write_text("no image")
    data = load(config())
    assert data.train_labels.bincount().tolist() == [6, 5, 5]
    assert data.test_labels.bincount(minlength=3).tolist() == [0, 2, 2], "class 1 is b, as in training"
    assert data.test_images[:, 0, 0, 0].min() >= 100
    Image.fromarray(picture(99)).save(pets / "train" / "a" / "0.png")
    assert load(config()).fingerprint != data.fingerprint, "a changed file is read again"
    (pets / test / "d").mkdir()
    with pytest.raises(DataError, match=r"expected classes of .*train, found others: `d`"):
        load(config())


@pytest.mark.parametrize("values", [{"test_share": 0.5}, {"split_seed": 0}])
def test_a_split_of_data_with_a_test_part_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    classes_in(tmp_path / "pets" / "train")
    classes_in(tmp_path / "pets" / "test")
    pixels, labels = arrays()
    np.savez(tmp_path / "a.npz", **dict(zip(PARTS, (pixels, labels, pixels, labels), strict=True)))
    for path in ("pets", "a.npz"):
        assert len(load(config(path=path)).test_labels) > 0
        with pytest.raises(DataError, match="there are test images already"):
            load(config(path=path, **values))


def write_modes(folder: Path) -> dict[str, np.ndarray]:
    """One image of each mode -> the pixels (3, S, S) expected of it, made without the package."""
    rgb = picture(1)
    grey, alpha = rgb[..., 0], rgb[..., 1]
    expected = {"rgb.png": rgb, "grey.png": np.repeat(grey[..., None], 3, axis=2)}
    Image.fromarray(rgb).save(folder / "rgb.png")
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(np.dstack([rgb, alpha])).save(folder / "rgba.png")
    expected["rgba.png"] = np.rint(rgb * (alpha[..., None] / 255.0)).astype(np.uint8)
    Image.fromarray(grey.astype(np.uint16) * 256 + 200).save(folder / "deep.png")
    (folder / "deep.pgm").write_bytes(b"P5 8 8 65535\n" + (grey.astype(">u2") * 256 + 200).astype(">u2").tobytes())
    expected["deep.png"] = expected["deep.pgm"] = expected["grey.png"]
    Image.fromarray(grey // 64 * 64).quantize(4).save(folder / "palette.png")
    expected["palette.png"] = np.repeat((grey // 64 * 64)[..., None], 3, axis=2)
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned: rotate clockwise
    Image.fromarray(rgb).save(folder / "turned.png", exif=turned)
    expected["turned.png"] = np.rot90(rgb, -1)
    return {name: pixels.transpose(2, 0, 1) for name, pixels in expected.items()}


def decoded(path: Path, size: int = 8, channels: int = 3) -> np.ndarray:
    return images.read_images([path], size, channels, "pictures")[0]


def test_mixed_modes_are_converted(tmp_path: Path) -> None:
    expected = write_modes(tmp_path)
    for name, pixels in expected.items():
        found = decoded(tmp_path / name).astype(int)
        assert np.abs(found - pixels).max() <= 1, name
    grey = decoded(tmp_path / "rgb.png", channels=1)
    rgb = expected["rgb.png"].astype(float)
    luma = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    assert np.abs(grey[0] - luma).max() <= 1
    Image.fromarray(np.ones((8, 8), np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(DataError, match=r"wide\.tif: .*8 or 16 bits, found 32 \(mode I\)"):
        decoded(tmp_path / "wide.tif")


def test_the_middle_of_a_long_image_is_kept_and_resizing_averages(tmp_path: Path) -> None:
    pixels = np.zeros((16, 48, 3), np.uint8)
    pixels[:, 16:32] = 200  # the middle
    Image.fromarray(pixels).save(tmp_path / "long.png")
    assert (decoded(tmp_path / "long.png", 16) == 200).all()
    checks = np.indices((16, 16)).sum(0) % 2 * 200
    Image.fromarray(checks.astype(np.uint8)).save(tmp_path / "checks.png")
    small = decoded(tmp_path / "checks.png", 4, 1)
    assert np.abs(small.astype(int) - 100).max() <= 12, "antialiased"


@pytest.mark.parametrize("content", [b"no image", b"", None], ids=["text", "empty", "cut"])
def test_unreadable_images_are_named(tmp_path: Path, content: bytes | None) -> None:
    classes_in(tmp_path / "pets")
    whole = (tmp_path / "pets" / "a" / "0.png").read_bytes()
    (tmp_path / "pets" / "b" / "bad.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(DataError, match=r"b/bad\.png: cannot be read as an image .*; repair or remove it$") as caught:
        load(config(test_share=0.01))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda folder: None, "expected a folder of images or an .npz file at one of .*pets, found none"),
        (lambda folder: classes_in(folder, names="a"), "each of at least 2 classes, found 1 folders"),
        (lambda folder: classes_in(folder, each=1), "at least 2 images of each class"),
        (lambda folder: [(folder / name).mkdir(parents=True) for name in "ab"], "found none in `a`, `b`"),
        (lambda folder: classes_in(folder / "train"), "expected a folder test or val beside train, found none"),
        (lambda folder: [classes_in(folder / part) for part in ("Fit", "Check")], "found none in `Check`, `Fit`"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], Any], match: str) -> None:
    make(tmp_path / "pets")
    with pytest.raises(DataError, match=match):
        load(config())


def test_a_folder_is_searched_where_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes_in(tmp_path / "elsewhere" / "pets")
    with pytest.raises(DataError, match="found none"):
        load(config())
    assert len(load(config(), tmp_path / "elsewhere").train_labels) == 12
    assert len(load(config(path=None), tmp_path / "elsewhere" / "pets").train_labels) == 12
    monkeypatch.setenv("WEIGHTSCOPE_DATA", str(tmp_path / "elsewhere"))
    assert len(load(config()).train_labels) == 12
    with pytest.raises(DataError, match=r"expected data\.path in the recipe, or --data"):
        load(config(path=None))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"size": None}, "size: missing"),
        ({"name": "digits", "path": "pets"}, 'path: only with name = "folder"; digits has its own'),
        ({"name": "digits", "path": None, "classes": 10}, "classes: only with"),
        ({"channels": 2}, "channels"),
        ({"test_share": 1.0}, "test_share"),
        ({"name": "folders"}, "no data set 'folders'; did you mean 'folder'"),
        ({"size": 7}, r"network\.patch_size: .* must divide folder's 7 pixels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe(**values)
    with pytest.raises(UsageError, match=r"expected data\.path and data\.size"):
        load("folder")


def test_a_population_of_a_folder_records_its_classes_and_is_read_without_it(tmp_path: Path) -> None:
    classes_in(tmp_path / "there" / "pets")
    options = OPTIONS | {"data": tmp_path / "there"}
    population = collect(recipe(), tmp_path / "pets.pop", **options)
    assert population.recipe.data.classes == 3
    collect(recipe(), tmp_path / "pets.pop", networks=4, **options)
    (tmp_path / "there").rename(tmp_path / "gone")
    found = Population(tmp_path / "pets.pop")
    assert len(found) == 4
    assert dataset_info(found.recipe.data).classes == 3
    classes_in(tmp_path / "there" / "pets", names="abcd")
    with pytest.raises((DataError, RecipeError), match="classes"):
        collect(recipe(), tmp_path / "pets.pop", networks=6, **options)
    with pytest.raises(DataError, match=r"expected 3 classes \(data\.classes\), found 4"):
        collect(found.recipe, tmp_path / "pets.pop", networks=6, **options)


def test_the_chance_of_a_folder_is_over_its_own_test_images(tmp_path: Path) -> None:
    classes_in(tmp_path / "elsewhere" / "pets", each=8)
    mine = recipe().completed(tmp_path / "elsewhere")
    test = len(load(mine.data, tmp_path / "elsewhere").test_labels)
    assert mine.data.chance(ACCURACY, tmp_path / "elsewhere") == (1 / 3, test)
    for held, count in (("test", 2), ("validation", 5)):
        part = mine.replace({f"data.{held}": count})
        found = part.data.load(tmp_path / "elsewhere").test_labels.bincount().max()
        assert part.data.chance(ACCURACY, tmp_path / "elsewhere") == (int(found) / count, count)
    assert mine.data.chance(ACCURACY) is None, "the folder is not there"
    counts = mine.data.validating(None, tmp_path / "elsewhere")[1]
    assert counts == {"train": 15, "validation": 3}, "a fifth of the training images is held back"


def test_registered_data_are_resized_too() -> None:
    data = load(SourceConfig(name="digits", size=4), train=100, test=50)
    assert data.train_images.shape == (100, 1, 4, 4)
    assert data.info.size == 4
    small = load("digits", train=100).train_images.double()
    means = small.reshape(100, 1, 4, 2, 4, 2).mean((3, 5))
    assert (data.train_images - means).abs().mean() < 12, "near the means of 2 x 2 pixels, whose range is 255"
    same = load(SourceConfig(name="digits", size=8), train=100)
    assert torch.equal(same.train_images, load("digits", train=100).train_images)


def arrays(count: int = 30, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, channels, 8, 8), dtype=np.uint8), np.arange(count) % 3


def test_an_npz_is_read_in_each_form(tmp_path: Path) -> None:
    pixels, labels = arrays()
    parts = (pixels[:20], labels[:20], pixels[20:], labels[20:])
    np.savez(tmp_path / "a.npz", **dict(zip(PARTS, parts, strict=True)))
    data = load(config(path="a.npz"))
    np.testing.assert_array_equal(data.train_images.numpy(), pixels[:20])
    assert data.test_labels.tolist() == labels[20:].tolist()
    np.savez_compressed(tmp_path / "b.npz", images=pixels.transpose(0, 2, 3, 1).copy(), labels=labels[:, None])
    mixed = load(config(path="b.npz"))
    assert mixed.train_labels.bincount().tolist() == [8, 8, 8]
    everything = torch.cat([mixed.train_images, mixed.test_images]).flatten(1).unique(dim=0)
    assert torch.equal(everything, torch.from_numpy(pixels).flatten(1).unique(dim=0))
    np.savez(tmp_path / "grey.npz", images=pixels[:, 0], labels=labels)
    assert load(config(path="grey.npz", size=4)).train_images.shape == (24, 1, 4, 4)
    assert load(config(path="grey.npz", size=None)).train_images.shape == (24, 1, 8, 8)
    with pytest.raises(DataError, match=r"expected 3 channels \(data\.channels\), found 1"):
        load(config(path="grey.npz", channels=3))
    np.savez(tmp_path / "objects.npz", images=np.array([None, 1]), labels=labels)
    with pytest.raises(DataError, match=r"objects\.npz: cannot be read as an \.npz file"):
        load(config(path="objects.npz"))


def test_the_classes_of_a_sorted_npz_are_interleaved(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (70, 3, 8, 8), dtype=np.uint8)
    labels = np.repeat([0, 1, 2], [10, 40, 20])
    parts = (pixels, labels, pixels[::2], labels[::2])
    np.savez(tmp_path / "a.npz", **dict(zip(PARTS, parts, strict=True)))
    data = load(config(path="a.npz"))
    for label in range(3):
        mine = data.train_images[data.train_labels == label].numpy()
        np.testing.assert_array_equal(mine, pixels[labels == label], "images keep their labels and order")
        mine = data.test_images[data.test_labels == label].numpy()
        np.testing.assert_array_equal(mine, pixels[::2][labels[::2] == label])
    part = load(config(path="a.npz"), train=14, test=14)
    assert part.train_labels.bincount().tolist() == part.test_labels.bincount().tolist() == [2, 8, 4]
    assert load(config(path="a.npz"), validation=14).test_labels.bincount().tolist() == [2, 8, 4]
    np.savez(tmp_path / "b.npz", **{name: getattr(data, name).numpy() for name in PARTS})
    assert load(config(path="b.npz")).fingerprint == data.fingerprint, "an interleaved file is read as it is"


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (np.arange(29) % 3, r"a\.npz: labels: expected integers of shape \(30,\), .*found int64 of shape \(29,\)"),
        (np.eye(10, dtype=int)[np.arange(30) % 10], r"expected integers of shape \(30,\), .* of shape \(30, 10\)"),
        (np.arange(30) % 3 / 1.0, r"a\.npz: labels: expected integers .*, found float64"),
        (np.r_[np.arange(29) % 2, 2], r"expected at least 2 images of each class, .* found 1 of 2"),
    ],
)
def test_labels_of_an_npz_that_do_not_fit_are_refused(tmp_path: Path, labels: np.ndarray, match: str) -> None:
    np.savez(tmp_path / "a.npz", images=arrays()[0], labels=labels)
    with pytest.raises(DataError, match=match):
        load(config(path="a.npz"))


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with pytest.raises(DataError, match=r"expected arrays train_images, .*, or images and labels, found `x`"):
        load(config(path="x.npz"))
