"""`NetworkFit`: an initialiser fitted to one network, for networks of any width, depth and head count.

Its numbers are JSON in the header of the artifact, and covariances are its arrays.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from weightscope.artifacts.filter_fits import FilterFit, FilterHeader, FilterLayer, ScheduleFit
from weightscope.artifacts.format import VERSION, Artifact, checked_header
from weightscope.artifacts.numbers import StrictModel
from weightscope.artifacts.product_fit import ProductFit, with_signs
from weightscope.errors import DataError
from weightscope.statistics.filters import FilterDistribution

FORMAT = "weightscope-network-initialiser"
Fit: TypeAlias = FilterFit | ScheduleFit | ProductFit


class _Header(StrictModel):
    format: Literal["weightscope-network-initialiser"]
    version: Literal[1]
    numbers: Annotated[FilterHeader | ScheduleFit | ProductFit, Field(discriminator="structure")]
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class NetworkFit(Artifact):
    """An initialiser fitted to one network.

    Attributes:
        numbers: the fit; `numbers.structure` is its kind.
        provenance: where the weights came from.
    """

    numbers: Fit
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


def network_fit_of(values: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> NetworkFit:
    """The fit that a header and arrays describe.

    Raises:
        DataError: if a value is invalid, or the arrays do not match the header or are not finite.
    """
    numbers = values.get("numbers")
    if isinstance(numbers, dict) and isinstance(numbers.get("structure"), str):
        # Structure names were written with hyphens once.
        numbers = numbers | {"structure": numbers["structure"].replace("-", "_")}
        values = values | {"numbers": with_signs(numbers)}
    header = checked_header(values, _Header)
    depths = [layer.depth for layer in header.numbers.layers]
    if any(b < a for a, b in itertools.pairwise(depths)):
        raise DataError(f"expected layers in the order of their depth, found {depths[:6]}")
    found = header.numbers
    expected = dict(_shapes(found.layers)) if isinstance(found, FilterHeader) else {}
    if odd := sorted(set(expected) ^ set(arrays)):
        raise DataError(f"its arrays are not those of {len(depths)} layers: {', '.join(odd[:3])}")
    for name, shape in expected.items():
        _check_array(name, arrays[name], shape)
    if isinstance(found, FilterHeader):
        layers = tuple(
            FilterDistribution(
                **layer.model_dump(),
                mean=arrays[f"{i}.mean"].reshape(layer.kernel, layer.kernel),
                covariance=arrays[f"{i}.covariance"],
            )
            for i, layer in enumerate(found.layers)
        )
        return NetworkFit(FilterFit(layers, **found.model_dump(exclude={"structure", "layers"})), header.provenance)
    return NetworkFit(found, header.provenance)


def _shapes(layers: tuple[FilterLayer, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for i, layer in enumerate(layers):
        yield f"{i}.mean", (layer.kernel**2,)
        yield f"{i}.covariance", (layer.kernel**2,) * 2


def _check_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != np.float64:
        raise DataError(f"`{name}`: expected float64 {shape}, found {array.dtype} {array.shape}")
    if not np.isfinite(array).all():
        raise DataError(f"`{name}`: expected finite numbers, found NaN or infinity")
    slack = 1e-9 * float(np.abs(array).max())
    if len(shape) == 2 and (array.diagonal().min() < 0 or not np.allclose(array, array.T, rtol=0, atol=slack)):
        raise DataError(
            f"`{name}`: expected a covariance, found a matrix that is not symmetric or has negative variances"
        )
