"""What is known of each data set before it is loaded: shapes, sizes, where to get it. Does not import torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from weightscope._util.plugins import is_reference
from weightscope.data import folder, readers  # noqa: F401 - importing readers registers them
from weightscope.data.arrays import checked, info_of
from weightscope.data.config import FOLDER, SourceConfig
from weightscope.data.registry import DATASETS, Arrays, DatasetInfo
from weightscope.errors import DataError, UsageError, WeightscopeError

_HOW = "`data.path`: a folder with a folder of images for each class, or an .npz; resized to `data.size`"
DATASETS.register(FOLDER, channels=3, size=0, classes=0, train=0, test=0, how_to_get=_HOW)(folder.read)


def dataset_info(source: str | SourceConfig, root: str | Path | None = None) -> DatasetInfo:
    """Shapes and sizes, after resizing, of a data set by name or reference, or of a section [data].

    A user's factory is called once. Without recorded classes, those of a folder, searched for in `root` first, are
    counted.
    """
    config = source_of(source)
    found = DATASETS.find(config.name)
    if config.name == FOLDER:
        return folder.described(config, None if root is None else Path(root))
    if is_reference(config.name):
        info = info_of(config.name, made_by(found, config.name))
    else:
        info = DatasetInfo(config.name, **DATASETS.details[config.name])
    return info if config.size is None else replace(info, size=config.size)


def source_of(source: str | SourceConfig) -> SourceConfig:
    """The settings of a data set that is given by its name."""
    if source == FOLDER:
        raise UsageError('folder: expected data.path and data.size beside it, as in SourceConfig(name="folder", ...)')
    return SourceConfig(name=source) if isinstance(source, str) else source


@lru_cache(maxsize=1)
def made_by(factory: Callable[[], Any], name: str) -> Arrays:
    """The checked arrays that a user's factory returns; those of the last factory are kept."""
    try:
        made = factory()
    except WeightscopeError:
        raise
    except Exception as error:
        raise DataError(f"{name}: the data set's factory raised {type(error).__name__}: {error}") from error
    return checked(made, name)
