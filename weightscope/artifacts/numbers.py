"""What the headers of all fits to one network share."""

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A part of a header: no unknown keys, no conversions, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Numbers(StrictModel):
    """Numbers without arrays."""

    def to_dict(self) -> dict[str, Any]:
        """The header's part."""
        out = self.model_dump(mode="json")
        return {key: value for key, value in out.items() if key != "left_out" or value}

    def arrays(self) -> dict[str, np.ndarray]:
        """No arrays."""
        return {}
