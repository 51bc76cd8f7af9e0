"""The base of a recipe's sections, and the numbers in them. Does not import torch."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Far beyond what is used, so that a typing error is an error at once and not hours later, out of memory.
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=2**12)]
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Marks a tuple, which TOML writes as a list."""


class Section(BaseModel):
    """A section without unknown keys; immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
