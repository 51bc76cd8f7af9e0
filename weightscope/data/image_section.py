"""`DataConfig`: the section [data] of images. Does not import torch."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from weightscope._util.checks import count as checked_count
from weightscope._util.names import unknown
from weightscope._util.plugins import is_reference
from weightscope.data.catalog import DATASETS, dataset_info
from weightscope.data.config import FOLDER, AugmentConfig, SourceConfig
from weightscope.data.folder import located
from weightscope.data.metrics import ACCURACY, LOSS, Metric
from weightscope.data.task import IMAGES, SECTIONS, Task
from weightscope.errors import DataError

Count = Annotated[int, Field(ge=1, lt=2**31)]


@SECTIONS.register(IMAGES)
class DataConfig(Task, SourceConfig):
    """The data set by name or reference; `train` and `test` limit the number of images.

    `size` resizes the images. With `name = "folder"` they are those of `path`, see `SourceConfig`. With `validation`,
    the last so many training images are not trained on; networks are evaluated on them in place of the test images.
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

    @model_validator(mode="after")
    def _sizes(self) -> "DataConfig":
        if is_reference(self.name) or self.name == FOLDER:
            return self
        info = dataset_info(self.name)
        for field, there in (("train", info.train), ("test", info.test)):
            wanted = getattr(self, field)
            if wanted is not None and wanted > there:
                raise ValueError(f"{field} may be at most {there} for {self.name}, found {wanted}")
        left = (info.train if self.train is None else self.train) - 1
        if self.validation is not None and self.validation > left:
            raise ValueError(f"validation may be at most {left} of the training images, found {self.validation}")
        return self

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
        """The section with the number of a folder's classes."""
        if self.name != FOLDER or self.classes is not None:
            return self
        return self.model_copy(update={"classes": dataset_info(self, root).classes})

    def absolute(self, root: str | Path | None = None) -> "DataConfig":
        """The section with the absolute path of a folder."""
        if self.path is None:
            return self
        return self.model_copy(update={"path": os.path.abspath(located(self, None if root is None else Path(root)))})

    def check(self, recipe: Any) -> None:
        """Refuse patches that do not divide the image, and a plateau without validation images."""
        if recipe.training.schedule == "plateau" and self.validation is None:
            raise ValueError(
                "training.schedule: 'plateau' follows the loss of validation images; give their number, data.validation"
            )
        if self.size is not None or not is_reference(self.name):
            check_patches(recipe.network, self.size or dataset_info(self.name).size, f"{self.name}'s")

    def chance(self, metric: Metric, root: str | Path | None = None) -> tuple[float, int] | None:
        """The share of the most frequent class among the images of the evaluation, and their number."""
        if metric.unit != "%":
            return None
        try:
            labels = self.load(root).test_labels
        except DataError:
            return None
        return int(labels.bincount().max()) / len(labels), len(labels)

    def validating(self, count: int | None, root: str | Path | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """Hold back `count` training images, a fifth of them if None."""
        # a folder is counted with its classes
        uncounted = self.model_copy(update={"classes": None})
        images = dataset_info(uncounted, root).train if self.train is None else self.train
        held = checked_count("validation", max(1, images // 5) if count is None else count)
        return {"data.validation": held}, {"train": images - held, "validation": held}


def check_patches(network: Any, size: int, whose: str = "its") -> None:
    """Raise ValueError unless the factor by which a network's section reduces an image divides the image's side."""
    if size % network.reduction:
        raise ValueError(
            f"network.patch_size: the network reduces the image by a factor of {network.reduction}, which must divide "
            f"{whose} {size} pixels"
        )
