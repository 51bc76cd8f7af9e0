"""`NetworkFit`: an initialiser fitted to one network, for networks of any width, depth and head count.

Its numbers are JSON in the header of the artifact, and covariances are its arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from weightscope.fits.artifact import VERSION, Artifact


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


FORMAT = "weightscope-network-initialiser"


@dataclass(frozen=True, eq=False, repr=False)
class NetworkFit(Artifact):
    """An initialiser fitted to one network.

    Attributes:
        numbers: the fit; `numbers.structure` is its kind.
        provenance: where the weights came from.
    """

    numbers: Any
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, in JSON types; the header of the artifact."""
        numbers = self.numbers.to_dict()
        return {"format": FORMAT, "version": VERSION, "numbers": numbers, "provenance": dict(self.provenance)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Of `filters`: `"i.mean"` (k*k,) and `"i.covariance"` (k*k, k*k) of layer i; otherwise none."""
        return self.numbers.arrays()

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer (and product)."""
        return self.numbers.rows()

    def summary(self) -> str:
        """The structure, its origin and the number of layers."""
        origin = self.provenance.get("source") or "a network in memory"
        return f"{self.numbers.structure} of {len(self.numbers.layers)} layers, fitted to {origin}"

    def text(self) -> str:
        """The structure, its origin, and the numbers with their fit."""
        origin = self.provenance.get("source") or "a network in memory"
        return f"{self.numbers.structure}, fitted to {origin}\n{self.numbers.text()}"
