"""The base of a recipe's sections, and the numbers in them. Does not import torch."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

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
    """A section without unknown keys; immutable.

    Fields that are `added` after populations were made are left out of what is written while they have their default:
    the fingerprint of a population is that of its written recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    added: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for name in self.added:
            if getattr(self, name) == type(self).model_fields[name].default:
                values.pop(name, None)
        return values
