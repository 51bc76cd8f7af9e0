"""The settings of data and augmentation, as recipes hold them. Does not import torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = "folder"
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class AugmentConfig(BaseModel):
    """Augmentation of training images; the default does nothing.

    Attributes:
        crop: zero padding in pixels around the image before a random crop of the original size.
        resized_crop: the smallest share of the image's area that a random crop, resized to the image, may have
            (0.08 is usual); 0 for no such crop.
        flip: horizontal flip with probability 1/2.
        cutout: side length in pixels of an erased square.
        operations: number of RandAugment operations.
        magnitude: their strength, in [0, 1].
        magnitude_std: standard deviation of the strength, drawn for each image and operation; timm's "m9-mstd0.5"
            is magnitude 0.9 and magnitude_std 0.05.
        sharpness: whether sharpness is one of the operations, as in the paper, torchvision and timm.
        erasing: probability of random erasing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0
    operations: Annotated[int, Field(ge=0, le=8)] = 0
    magnitude: Share = 0.3
    resized_crop: Share = 0.0
    magnitude_std: Share = 0.0
    sharpness: bool = False
    erasing: Share = 0.0

    @model_validator(mode="after")
    def _one_crop(self) -> "AugmentConfig":
        if self.crop and self.resized_crop:
            raise ValueError(f"crop and resized_crop exclude each other, found {self.crop} and {self.resized_crop}")
        return self


class SourceConfig(BaseModel):
    """Where images come from, and their size.

    Attributes:
        name: of a registered data set, a reference `"package.module:factory"`, or `"folder"` for images of one's own.
        size: side length in pixels that images are resized to; the data set's own if None. A folder needs it.
        path: of a folder of images or an .npz file, with `name = "folder"`; relative ones are searched for where data
            are, see `load`. If None, it is the folder that is searched first (`--data`).
        channels: of a folder's images, 1 or 3; 3 if None.
        classes: the number of a folder's classes; counted if None, and recorded in populations.
        test_share: the share of a folder's images that are for testing; 0.2 if None. Refused if it has a test part.
        split_seed: of the choice of these; 0 if None. Refused if there is a test part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    channels: Literal[1, 3] | None = None
    classes: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    @model_validator(mode="after")
    def _of_a_folder(self) -> "SourceConfig":
        if self.name == FOLDER:
            if self.size is None:
                raise ValueError(
                    'size: missing; with name = "folder", the side length in pixels that images are resized to'
                )
            return self
        for field in ("path", "channels", "classes", "test_share", "split_seed"):
            if getattr(self, field) is not None:
                raise ValueError(f'{field}: only with name = "folder"; {self.name} has its own')
        return self
