"""Data sets from the Hugging Face Hub, for a machine that has none of the files and may use the network.

The Hub holds these data sets as Parquet files of PNG images, which pyarrow reads; without pyarrow nothing
is fetched. The Hub's client keeps what it has fetched in its own cache, so the network is used once.
"""

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.data.catalog import DatasetInfo
from weightscope.data.locations import Arrays, check_labels, missing
from weightscope.errors import DataError

TIMEOUT = 5.0  # seconds that the Hub has for a first answer, so that a machine without a network does not hang


@dataclass(frozen=True)
class Location:
    """Where the Hub keeps a data set.

    Attributes:
        repository: `organisation/name` of the data set.
        folder: of the two files.
        image: the column of images, `{bytes, path}`.
        label: the column of labels.
    """

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
    """Training and test images in the order of the Hub's files.

    Args:
        info: the catalogue entry.
        root: the folder that was looked in first, for the error.
        train: how many training images.
        test: how many test images.

    Raises:
        DataError: if pyarrow is not installed or the Hub does not answer; says where files were looked for
            and how to get them. Also if what came is not the data set.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise missing(info, root, "or `pip install pyarrow` to have it fetched from the Hugging Face Hub")
    location = LOCATIONS[info.name]
    try:
        paths = [_download(location, part) for part in ("train", "test")]
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise missing(info, root, f"the Hugging Face Hub could not be used ({reason})") from error
    return (
        *_read_parquet(paths[0], location, info, info.train, train),
        *_read_parquet(paths[1], location, info, info.test, test),
    )


def _download(location: Location, part: str) -> Path:
    """The path of one file in the Hub client's cache, fetched unless it is there.

    Raises:
        OSError: if it cannot be had.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    file = {
        "repo_id": location.repository,
        "filename": f"{location.folder}/{part}-00000-of-00001.parquet",
        "repo_type": "dataset",
    }
    try:
        return Path(hf_hub_download(**file, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        # without a network the download itself would go on trying for half a minute
        get_hf_file_metadata(hf_hub_url(**file), timeout=TIMEOUT)
        return Path(hf_hub_download(**file))
    except HfHubHTTPError.__bases__ as error:  # what its HTTP client raises, which differs between its versions
        raise OSError(f"{type(error).__name__}: {error}") from error


def _read_parquet(path: Path, location: Location, info: DatasetInfo, rows: int, count: int) -> tuple:
    """Images, uint8 (count, c, S, S), and labels, uint8 (count,)."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path, columns=[location.image, location.label])
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error}); delete it, to have it fetched anew") from error
    if table.num_rows != rows or table.column_names != [location.image, location.label]:
        raise DataError(
            f"{path}: expected {rows} rows of {location.image!r} and {location.label!r}, "
            f"found {table.num_rows} of {table.column_names}"
        )
    taken = table.slice(0, count).to_pylist()
    images = np.stack([_decode(row[location.image], info, f"{path}: row {i}") for i, row in enumerate(taken)])
    labels = np.array([row[location.label] for row in taken])
    check_labels(labels, info.classes, str(path))
    return images, labels.astype(np.uint8)


def _decode(cell: dict[str, bytes], info: DatasetInfo, where: str) -> np.ndarray:
    """Pixels, uint8 (c, S, S), of a compressed image."""
    from PIL import Image

    size = (info.size, info.size)
    try:
        with Image.open(io.BytesIO(cell["bytes"])) as image:
            found = image.size  # known before the pixels are decoded, so that a huge image is not
            pixels = np.asarray(image.convert("L" if info.channels == 1 else "RGB")) if found == size else None
    except (OSError, TypeError, KeyError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: expected an image, found something else ({error})") from error
    if pixels is None:
        raise DataError(f"{where}: expected an image of {size} pixels, found {found}")
    return pixels.reshape(*size, info.channels).transpose(2, 0, 1)
