"""What is known of each data set before it is loaded: shapes, sizes, and where to get it. No torch here."""

from dataclasses import dataclass

from weightscope._util.plugins import is_reference
from weightscope.errors import UsageError


@dataclass(frozen=True)
class DatasetInfo:
    """One classification data set.

    Attributes:
        name: as recipes spell it.
        channels: of an image, 1 or 3.
        size: side length of the square images, in pixels.
        classes: the number of classes.
        train: the number of training images.
        test: the number of test images.
        how_to_get: one sentence for the error that says the data are missing.
    """

    name: str
    channels: int
    size: int
    classes: int
    train: int
    test: int
    how_to_get: str


CATALOG = {
    info.name: info
    for info in (
        DatasetInfo("digits", 1, 8, 10, 1437, 360, "it comes with scikit-learn: `pip install scikit-learn`"),
        DatasetInfo(
            "fashion-mnist", 1, 28, 10, 60_000, 10_000,
            "install the Debian package dataset-fashion-mnist, or put the four IDX files "
            "(train-images-idx3-ubyte[.gz], ...) into a folder `fashion-mnist` there",
        ),
        DatasetInfo(
            "cifar10", 3, 32, 10, 50_000, 10_000,
            "unpack the official binary version so that `cifar-10-batches-bin/data_batch_1.bin` lies there",
        ),
        DatasetInfo(
            "cifar100", 3, 32, 100, 50_000, 10_000,
            "unpack the official binary version so that `cifar-100-binary/train.bin` lies there",
        ),
    )
}  # fmt: skip


def dataset_info(name: str) -> DatasetInfo:
    """The catalogue entry of a data set.

    Raises:
        UsageError: if there is none of that name; lists the names.
    """
    if is_reference(name):
        from weightscope.data.dataset import load

        return load(name).info
    try:
        return CATALOG[name]
    except KeyError:
        raise UsageError(f"no data set {name!r}; there are {', '.join(CATALOG)}") from None
