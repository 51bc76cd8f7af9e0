"""What is known of each data set before it is loaded: shapes, sizes, where to get it. Does not import torch."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from weightscope._util.plugins import is_reference

# Importing a reader registers it.
from weightscope.data import cifar, digits, fashion_mnist  # noqa: F401
from weightscope.data.arrays import checked, info_of
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError, WeightscopeError


def dataset_info(name: str) -> DatasetInfo:
    """Shapes and sizes of a data set.

    Args:
        name: a registered name, or `"package.module:factory"` for one of your own; the factory is called once.

    Raises:
        UsageError: if there is no such data set; lists the names.
        DataError: if the factory fails or returns anything but four valid arrays.

    Example:
        >>> dataset_info("digits").classes
        10
    """
    found = DATASETS.find(name)
    if is_reference(name):
        return info_of(name, made_by(found, name))
    return DatasetInfo(name, **DATASETS.details[name])


@lru_cache(maxsize=1)
def made_by(factory: Callable[[], Any], name: str) -> Arrays:
    """The checked arrays that a user's factory returns; those of the last factory are kept.

    Args:
        factory: returns (train_images, train_labels, test_images, test_labels) or a `Dataset`.
        name: for messages.

    Raises:
        DataError: if the factory fails or returns anything but four valid arrays.
    """
    try:
        made = factory()
    except WeightscopeError:
        raise
    except Exception as error:
        raise DataError(f"{name}: the data set's factory raised {type(error).__name__}: {error}") from error
    return checked(made, name)
