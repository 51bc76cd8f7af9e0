"""The settings of augmentation, as recipes hold them. Does not import torch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
