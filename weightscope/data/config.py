"""The settings of augmentation, as recipes hold them. Does not import torch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AugmentConfig(BaseModel):
    """Augmentation of training images; the default does nothing.

    Attributes:
        crop: zero padding in pixels around the image before a random crop of the original size.
        flip: horizontal flip with probability 1/2.
        cutout: side length in pixels of an erased square.
        operations: number of RandAugment operations.
        magnitude: their strength, in [0, 1].
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0
    operations: Annotated[int, Field(ge=0, le=8)] = 0
    magnitude: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.3
