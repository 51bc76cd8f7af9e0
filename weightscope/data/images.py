"""Image files to pixels of one size, decoded in parallel."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from weightscope._util.environment import usable_cores
from weightscope._util.names import shortened
from weightscope._util.progress import DELAY, Bar
from weightscope.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
_AT_MOST_16_BITS = ("PNG", "PPM")  # Pillow opens 16-bit PGM, and old ones PNG as well, in mode I, of 32 bits


def read_images(paths: Sequence[Path], size: int, channels: int, what: str) -> np.ndarray:
    """Pixels of image files, uint8 (n, c, S, S).

    The shorter side is resized to S pixels (bicubic, antialiased) and the middle of the longer one is kept. Palettes,
    CMYK and 16 bits are converted, transparent pixels are laid over black, and the camera's orientation is applied.
    """
    out = np.empty((len(paths), channels, size, size), np.uint8)

    def read(i: int) -> None:
        with reading(paths[i], "an image", "repair or remove it"), Image.open(paths[i]) as image:
            out[i] = pixels(image, size, channels)

    in_parallel(read, len(paths), f"reading {what}")
    return out


def resize(images: np.ndarray, size: int, what: str) -> np.ndarray:
    """Images uint8 (n, c, S, S) resized to (n, c, size, size), bicubic and antialiased; themselves if S is `size`."""
    count, channels, side, _ = images.shape
    if side == size:
        return images
    out = np.empty((count, channels, size, size), np.uint8)

    def one(i: int) -> None:
        for c in range(channels):
            plane = Image.fromarray(images[i, c])
            out[i, c] = np.asarray(plane.resize((size, size), Image.Resampling.BICUBIC))

    in_parallel(one, count, f"resizing {what}")
    return out


@contextmanager
def reading(where: object, what: str, then: str = "download it again") -> Iterator[None]:
    """Within the block, whatever a reader raises for a damaged file is a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = shortened(f"{type(error).__name__}: {error}", 200)
        raise DataError(f"{where}: cannot be read as {what} ({why}); {then}") from error


def in_parallel(function: Callable[[int], Any], count: int, doing: str) -> None:
    """Call `function(i)` for i < count on as many threads as there are cores; on one in a worker process."""
    main = multiprocessing.parent_process() is None
    threads = usable_cores() if main else 1
    bar = Bar(total=count, desc=doing, unit=" images", delay=DELAY, disable=None if main else True)
    with bar, ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, range(count)):
            bar.update()


def pixels(image: Image.Image, size: int, channels: int) -> np.ndarray:
    """Pixels (c, S, S) of an open image."""
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in _AT_MOST_16_BITS)
    image = ImageOps.exif_transpose(image)
    if deep:
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"expected pixels of 8 or 16 bits, found 32 (mode {image.mode})")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    image = image.convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(image, (size, size), method=Image.Resampling.BICUBIC)
    return np.asarray(fitted).reshape(size, size, channels).transpose(2, 0, 1)
