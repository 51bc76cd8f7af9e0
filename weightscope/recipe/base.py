"""The base of a recipe's sections, and checks that they share."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from weightscope._util.names import shortened

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
# Far beyond what is used, so that a typing error is an error at once and not hours later, out of memory.
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=2**12)]


class Section(BaseModel):
    """A section without unknown keys; immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def check_numbers(values: Mapping[str, Any], *, tables: bool = False) -> None:
    """Raise ValueError unless the values are what TOML can hold, and finite.

    Args:
        values: name -> value.
        tables: whether a value may be a table.
    """
    for key, value in values.items():
        if isinstance(value, list | tuple):
            check_numbers({f"{key}[{i}]": item for i, item in enumerate(value)}, tables=tables)
        elif isinstance(value, dict) and tables:
            check_numbers({f"{key}.{name}": item for name, item in value.items()}, tables=True)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, found {value}")
        elif not isinstance(value, int | float | str):
            raise ValueError(
                f"{key}: expected a number, a text, true, false, or a list of these, found {shortened(repr(value))}"
            )
