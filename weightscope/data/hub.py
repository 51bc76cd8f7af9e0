"""Download data sets from the Hugging Face Hub when no local files are found.

The Hub stores these data sets as Parquet files of PNG images. Reading them needs pyarrow; without it nothing is
downloaded. Downloads are kept in the Hub client's cache.
"""

import importlib.util
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.data.registry import Arrays, DatasetInfo, Part, checked_part, missing
from weightscope.errors import DataError

TIMEOUT = 5.0  # seconds until the Hub must respond, so that a machine without a network does not hang


class Location(NamedTuple):
    """A data set on the Hub: `organisation/name`, the folder of its two files, the columns of images and labels."""

    repository: str
    folder: str
    image: str
    label: str


LOCATIONS = {
    "fashion-mnist": Location("zalando-datasets/fashion_mnist", "fashion_mnist", "image", "label"),
    "cifar10": Location("uoft-cs/cifar10", "plain_text", "img", "label"),
    "cifar100": Location("uoft-cs/cifar100", "cifar100", "img", "fine_label"),
}


def read(info: DatasetInfo, root: Path | None, train: int, test: int) -> Arrays:
    """The first training and test images in the order of the Hub's files.

    DataError if pyarrow is not installed or the Hub does not respond (says where files were searched for, `root` first,
    and how to get them), or if the downloaded files are not the data set.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise missing(info, root, "or `pip install pyarrow` to download it from the Hugging Face Hub")
    location = LOCATIONS[info.name]
    try:
        paths = [_download(location, part) for part in ("train", "test")]
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise missing(info, root, f"downloading from the Hugging Face Hub failed ({reason})") from error
    return (
        *_read_parquet(paths[0], location, info, info.train, train),
        *_read_parquet(paths[1], location, info, info.test, test),
    )


def _download(location: Location, part: str) -> Path:
    """The path of one file in the Hub client's cache, downloaded if necessary; OSError if it cannot be."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, file = location.repository, f"{location.folder}/{part}-00000-of-00001.parquet"
    # The HTTP client and its errors differ between versions of huggingface_hub.
    failures: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        # Without a network the download itself would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type="dataset"), timeout=TIMEOUT)
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except failures as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _read_parquet(path: Path, location: Location, info: DatasetInfo, rows: int, count: int) -> Part:
    """The first images and labels of one file."""
    from pyarrow import ArrowException, parquet

    columns = [location.image, location.label]
    try:
        table = parquet.read_table(path, columns=columns)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error}); delete it to download it again") from error
    if table.num_rows != rows or table.column_names != columns:
        raise DataError(
            f"{path}: expected {rows} rows of {location.image!r} and {location.label!r}, "
            f"found {table.num_rows} of {table.column_names}"
        )
    taken = table.slice(0, count).to_pylist()
    images = np.stack([_decode(row[location.image], info, f"{path}: row {i}") for i, row in enumerate(taken)])
    return checked_part(images, np.array([row[location.label] for row in taken]), info, path)


def _decode(cell: dict[str, Any], info: DatasetInfo, where: str) -> np.ndarray:
    """Pixels, uint8 (c, S, S), of a compressed image."""
    from PIL import Image

    size = (info.size, info.size)
    try:
        with Image.open(io.BytesIO(cell["bytes"])) as image:
            found = image.size  # read from the header; a huge image is not decoded
            pixels = np.asarray(image.convert("L" if info.channels == 1 else "RGB")) if found == size else None
    except (OSError, TypeError, KeyError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: expected an image, found something else ({error})") from error
    if pixels is None:
        raise DataError(f"{where}: expected an image of {size} pixels, found {found}")
    return pixels.reshape(*size, info.channels).transpose(2, 0, 1)
