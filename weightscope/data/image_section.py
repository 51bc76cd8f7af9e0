"""`DataConfig`: the section [data] of images, and what is known of its data set before it is loaded.

Does not import torch.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from weightscope._util.checks import count as checked_count
from weightscope._util.names import shortened, unknown
from weightscope._util.plugins import is_reference
from weightscope.data import arrays, folder, readers  # noqa: F401 - importing readers registers them
from weightscope.data.metrics import ACCURACY, LOSS, Metric
from weightscope.data.registry import DATASETS, FOLDER, Arrays, DatasetInfo, SourceConfig
from weightscope.data.task import IMAGES, SECTIONS, Count, Section, Share, Task
from weightscope.errors import DataError, UsageError, WeightscopeError

_HOW = "`data.path`: a folder with a folder of images for each class, resized to `data.size`, or an .npz file"
DATASETS.register(FOLDER, channels=3, size=0, classes=0, train=0, test=0, how_to_get=_HOW)(folder.read)


def dataset_info(source: str | SourceConfig, root: str | Path | None = None) -> DatasetInfo:
    """Shapes and sizes, after resizing, of a data set by name or reference, or of a section [data].

    A user's factory is called once. What is not recorded of a folder, searched for in `root` first, is read.
    """
    config = source_of(source)
    if config.name == FOLDER:
        return folder.described(config, root)
    reader = DATASETS.find(config.name)
    if is_reference(config.name):
        info = arrays.info_of(config.name, made_by(reader, config.name))
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
    """The checked arrays that a user's factory returns; the last ones are kept."""
    try:
        made = factory()
    except WeightscopeError:
        raise
    except Exception as error:
        why = shortened(f"{type(error).__name__}: {error}", 200)
        raise DataError(f"{name}: the data set's factory raised {why}") from error
    return arrays.checked_arrays(made, name)


class AugmentConfig(Section):
    """Augmentation of training images; the default does nothing. File formats describe the fields.

    Timm's "rand-m9-mstd0.5" is magnitude 0.9, magnitude_std 0.05 and probability 0.5.
    """

    added: ClassVar[tuple[str, ...]] = ("probability", "erasing_mode")

    crop: Annotated[int, Field(ge=0)] = 0  # pixels of zero padding before a random crop of the original size
    flip: bool = False  # horizontally, with probability 1/2
    cutout: Annotated[int, Field(ge=0)] = 0  # side length in pixels of an erased square
    operations: Annotated[int, Field(ge=0, le=8)] = 0  # of RandAugment
    magnitude: Share = 0.3  # their strength
    probability: Share = 1.0  # of each of them
    resized_crop: Share = 0.0
    magnitude_std: Share = 0.0
    sharpness: bool = False
    erasing: Share = 0.0
    erasing_mode: Literal["const", "pixel"] = "const"

    @model_validator(mode="after")
    def _one_crop(self) -> "AugmentConfig":
        if self.crop and self.resized_crop:
            raise ValueError(f"crop and resized_crop exclude each other, found {self.crop} and {self.resized_crop}")
        return self


@SECTIONS.register(IMAGES)
class DataConfig(Task, SourceConfig):
    """The data set by name or reference, see `SourceConfig`; `train` and `test` limit the number of images.

    With `validation`, networks are evaluated on the last so many training images in place of the test images.
    """

    what: ClassVar[str] = "images"
    input_axes: ClassVar[int] = 3
    stacked: ClassVar[bool] = False
    source: ClassVar[str] = "weightscope.data.dataset:Dataset.of"
    batches: ClassVar[str] = "weightscope.training.image_task:ImageBatches"

    train: Count | None = None
    test: Count | None = None
    validation: Count | None = None
    augment: AugmentConfig = AugmentConfig()

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if not is_reference(value) and value not in DATASETS:
            names = (*DATASETS, *(name for name in SECTIONS if name != IMAGES))
            raise ValueError(unknown("data set", value, names, "'package.module:name' for one of your own"))
        return value

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Accuracy and loss."""
        return ACCURACY, LOSS

    def sizes(self) -> dict[str, int]:
        """`in_channels`, `image_size` and `num_classes`."""
        info = dataset_info(self)
        return {"in_channels": info.channels, "image_size": info.size, "num_classes": info.classes}

    def input_shape(self) -> tuple[int, ...]:
        """(c, S, S)."""
        info = dataset_info(self)
        return info.channels, info.size, info.size

    def output_shape(self) -> tuple[int, ...]:
        """(classes,)."""
        return (dataset_info(self).classes,)

    def completed(self, root: str | Path | None = None) -> "DataConfig":
        """The section with the size, channels and classes of a folder."""
        if self.name != FOLDER:
            return self
        info = dataset_info(self, root)
        return self.model_copy(update={name: getattr(info, name) for name in ("size", "channels", "classes")})

    def absolute(self, root: str | Path | None = None) -> "DataConfig":
        """The section with the absolute path of a folder."""
        if self.path is None:
            return self
        return self.model_copy(update={"path": os.path.abspath(folder.located(self, root))})

    def check(self, recipe: Any) -> None:
        """Refuse patches that do not divide the image, and a plateau without validation images."""
        if recipe.training.schedule == "plateau" and self.validation is None:
            raise ValueError(
                "training.schedule: 'plateau' follows the loss of validation images; give their number, data.validation"
            )
        if self.size is not None or not (is_reference(self.name) or self.name == FOLDER):
            check_patches(recipe.network, self.size or dataset_info(self.name).size, f"{self.name}'s")

    def chance(self, metric: Metric, root: str | Path | None = None) -> tuple[float, int] | None:
        """The share of the most frequent class among the images of the evaluation, and their number."""
        if metric.unit != "%":
            return None
        try:
            labels = self.load(root).test_labels
        except DataError:
            return None
        most = int(labels.bincount().max())
        return (most / len(labels), len(labels)) if most < len(labels) else None

    def validating(self, count: int | None, root: str | Path | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """Hold back `count` training images, a fifth of them if None."""
        # a folder is counted with its classes
        uncounted = self.model_copy(update={"classes": None})
        images = dataset_info(uncounted, root).train if self.train is None else self.train
        held = checked_count("validation", max(1, images // 5) if count is None else count)
        return {"data.validation": held}, {"train": images - held, "validation": held}


def check_patches(network: Any, size: int, whose: str = "its") -> None:
    """Raise UsageError unless the factor by which a network's section reduces an image divides the image's side."""
    if size % network.reduction:
        raise UsageError(
            f"network.patch_size: the network reduces the image by a factor of {network.reduction}, which must divide "
            f"{whose} {size} pixels"
        )
