"""Initialisers fitted to one network, as numbers that fit networks of any width, depth and head count.

The artifact is a safetensors file: the numbers are JSON in its metadata, and covariances are its tensors. Nothing that
a file says about itself is believed unchecked.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.numpy import save as to_bytes

from weightscope._util import atomic
from weightscope.artifacts.population_fit import KEY, FitResult, artifact_of, read_contents
from weightscope.artifacts.population_fit import NETWORK_FORMAT as FORMAT
from weightscope.errors import DataError

VERSION = 1
Psd = Literal["abs", "clip"]


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"expected an odd filter size, found {kernel}")
    return kernel


Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FilterLayer(_Model):
    """One depthwise layer: `depth` is relative, in [0, 1]; `kernel` k; `count` filters."""

    name: str
    stage: int = Field(ge=0)
    depth: float = Field(ge=0, le=1)
    kernel: Kernel
    count: int = Field(ge=2)


class FilterCovariances(_Model):
    """Covariances of the filters of every depthwise layer; the options are those of `covariance_transfer_`."""

    structure: Literal["filters"] = "filters"
    layers: tuple[FilterLayer, ...] = Field(min_length=1)
    kronecker: bool = False
    means: bool = False
    schedule: Literal["depth", "stage"] = "depth"
    kernel: Kernel | None = None
    psd: Psd = "abs"

    def text(self) -> str:
        """The layers as a table."""
        taken = "all kernels" if self.kernel is None else f"kernel {self.kernel} only"
        given = f"kronecker {self.kronecker}, means {self.means}, schedule {self.schedule}, psd {self.psd}, {taken}"
        rows = [(x.name, x.stage, f"{x.depth:.3f}", f"{x.kernel}x{x.kernel}", x.count) for x in self.layers]
        return f"covariance_transfer_: {given}\n\n" + _table(("layer", "stage", "depth", "kernel", "filters"), rows)


class ScheduleLayer(_Model):
    """How the closed form fits one layer.

    Attributes:
        sigma: the schedule's at this depth.
        sigma_alone: the best for this layer alone.
        scale: the layer's own, root of `s = <C, S> / |S|^2`.
        r2: `1 - |C - s S|^2 / |C|^2` with the schedule's sigma.
        r2_alone: the same with `sigma_alone`.
        attainable: r2 to be expected of so few filters drawn from the closed form itself.
    """

    name: str
    stage: int = Field(ge=0)
    depth: float = Field(ge=0, le=1)
    kernel: Kernel
    count: int = Field(ge=2)
    sigma: float = Field(gt=0)
    sigma_alone: float = Field(gt=0)
    scale: float = Field(ge=0)
    r2: float
    r2_alone: float
    attainable: float


class ConvSchedule(_Model):
    """Numbers of `conv_covariance_`; r2 is that of the layers, weighted by their filters."""

    structure: Literal["conv-schedule"] = "conv-schedule"
    sigma0: float
    v: float
    a: float
    scale: float = Field(gt=0)
    psd: Psd = "abs"
    schedule: Literal["depth", "sawtooth"] = "depth"
    r2: float
    layers: tuple[ScheduleLayer, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _positive(self) -> "ConvSchedule":
        vertex = min(1.0, max(0.0, -self.v / self.a)) if self.a else 0.0
        least = min(self.sigma0 + self.v * d + 0.5 * self.a * d**2 for d in (0.0, vertex, 1.0))
        if not least > 0:
            raise ValueError(f"sigma falls to {least:g} on the way; a network of another depth would have no filters")
        return self

    def text(self) -> str:
        """The call that it stands for, and the fit layer by layer."""
        call = f"conv_covariance_(net, sigma0={self.sigma0:.4g}, v={self.v:.4g}, a={self.a:.4g}, scale={self.scale:.4g}"
        head = ("layer", "depth", "kernel", "filters", "sigma", "alone", "scale", "R2", "alone", "attainable")
        rows = [
            (
                *(x.name, f"{x.depth:.3f}", f"{x.kernel}x{x.kernel}", x.count, f"{x.sigma:.3f}"),
                *(f"{n:.3f}" for n in (x.sigma_alone, x.scale, x.r2, x.r2_alone, x.attainable)),
            )
            for x in self.layers
        ]
        options = f', psd="{self.psd}", schedule="{self.schedule}")'
        return f"{call}{options}\nR2 {self.r2:.3f} of the covariances\n\n" + _table(head, rows)


class ProductFit(_Model):
    """Numbers of `mimetic_attention_` for one layer's product, mean over its heads.

    Attributes:
        alpha: noise of the recipe.
        beta: diagonal of the recipe; that of V/O has the sign of `mimetic_attention_`, minus the product's.
        beta_std: standard deviation of the heads' beta.
        diagonal: the product's own diagonal mean, `tr M / d`, which its rank keeps below beta.
        noise: the product's own least-squares alpha, `|M - diagonal I|_F / sqrt(d)`.
        r2: `d diagonal^2 / |M|_F^2`, the identity's share of the product; at most rank / d.
        attainable: rank / d.
        residual: `|s - s'| / |s|` between the singular values of M and those of the recipe.
    """

    alpha: float = Field(ge=0)
    beta: float
    beta_std: float = Field(ge=0)
    diagonal: float
    noise: float = Field(ge=0)
    r2: float = Field(ge=0, le=1)
    attainable: float = Field(gt=0, le=1)
    residual: float = Field(ge=0)


class ProductLayer(_Model):
    """One self-attention module; `depth` is relative, in [0, 1]."""

    name: str
    depth: float = Field(ge=0, le=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    qk: ProductFit
    vo: ProductFit


class IdentityProduct(_Model):
    """`W_Q W_K^T ~ alpha Z + beta I` and `W_V W_O ~ alpha Z - beta I`, layer by layer.

    `layer_scale` says whether the network had one after its attention, and whether it was folded into W_V W_O.
    """

    structure: Literal["identity-product"] = "identity-product"
    parts: Literal["both", "qk", "vo"] = "both"
    layer_scale: Literal["none", "folded", "left out"] = "none"
    layers: tuple[ProductLayer, ...] = Field(min_length=1)

    def text(self) -> str:
        """The numbers layer by layer."""
        each = ("alpha", "beta", "(std)", "R2", "of", "spectrum")
        head = ("layer", "depth", *(f"{part} {word}" for part in ("qk", "vo") for word in each))
        rows = [(x.name, f"{x.depth:.3f}", *_cells(x.qk), *_cells(x.vo)) for x in self.layers]
        note = (
            "R2 is the identity's share of the product, 'of' what its rank allows, 'spectrum' the relative "
            "residual of its singular values"
        )
        if self.layer_scale == "folded":
            note += "\nLayerScale is folded into W_V W_O"
        elif self.layer_scale == "left out":
            note += (
                "\nwarning: LayerScale multiplies what W_V W_O adds to each channel, its sign too; "
                "the option fold_scales=true includes it"
            )
        return f"mimetic_attention_ with these numbers, parts {self.parts}\n{note}\n\n" + _table(head, rows)


Numbers = Annotated[FilterCovariances | ConvSchedule | IdentityProduct, Field(discriminator="structure")]


class _Header(_Model):
    format: Literal["weightscope-network-initialiser"]
    version: Literal[1]
    numbers: Numbers
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Portable:
    """An initialiser fitted to one network.

    Attributes:
        numbers: what was fitted; `numbers.structure` names it.
        arrays: of `filters`: `"i.mean"` (k*k,) and `"i.covariance"` (k*k, k*k) of layer i, float64.
        provenance: where the weights came from.
    """

    numbers: FilterCovariances | ConvSchedule | IdentityProduct
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON types; this is the artifact's header."""
        numbers = self.numbers.model_dump(mode="json")
        return {"format": FORMAT, "version": VERSION, "numbers": numbers, "provenance": dict(self.provenance)}

    def text(self) -> str:
        """For the terminal: the structure, its origin, and the numbers with their fit."""
        origin = self.provenance.get("source")
        fitted = f"{self.numbers.structure}, fitted to {origin or 'a network in memory'}"
        return f"{fitted}\n{self.numbers.text()}"

    def save(self, path: str | Path) -> Path:
        """Write the artifact: whole, or not at all.

        Raises:
            WeightscopeError: if the file cannot be written.
        """
        header = json.dumps(self.to_dict(), allow_nan=False, sort_keys=True, separators=(",", ":"))
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        atomic.write(path, to_bytes(arrays, metadata={KEY: header}))
        return Path(path)


def load_any(path: str | Path) -> FitResult | Portable:
    """Read an artifact of either kind: fitted to a population, or to one network.

    Raises:
        DataError: if the file is missing, no artifact, of another version, or does not make sense.

    Example:
        >>> load_any("filters.safetensors").numbers.structure
        'filters'
    """
    header, arrays = read_contents(path)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        return artifact_of(path, header, arrays)
    try:
        return _restored(header, arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def load_portable(path: str | Path) -> Portable:
    """Read an artifact that was fitted to one network.

    Raises:
        DataError: as `load_any`, and if it was fitted to a population.
    """
    found = load_any(path)
    if isinstance(found, FitResult):
        raise DataError(f"{path}: expected the artifact of one network, found one of a population")
    return found


def _restored(header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Portable:
    if header.get("version") != VERSION:
        raise DataError(
            f"expected version {VERSION} of the format, found {header.get('version')!r}; use a newer weightscope"
        )
    try:
        # Through JSON, where a list is a tuple although types are strict.
        parsed = _Header.model_validate_json(json.dumps(header))
    except RecursionError as error:
        raise DataError(f"its header is nested too deeply: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "header"
        raise DataError(f"its header does not make sense: {where}: {first['msg'].lower()}") from None
    _check_depths([layer.depth for layer in parsed.numbers.layers])
    wanted = _shapes(parsed.numbers)
    if set(wanted) != set(arrays):
        odd = sorted(set(wanted) ^ set(arrays))
        raise DataError(f"its arrays are not those of {len(parsed.numbers.layers)} layers: {', '.join(odd[:3])}")
    for name, shape in wanted.items():
        _check_array(name, arrays[name], shape)
    return Portable(parsed.numbers, dict(arrays), parsed.provenance)


def _check_depths(depths: list[float]) -> None:
    if any(b < a for a, b in itertools.pairwise(depths)):
        raise DataError(f"expected layers in the order of their depth, found {depths[:6]}")


def _shapes(numbers: FilterCovariances | ConvSchedule | IdentityProduct) -> dict[str, tuple[int, ...]]:
    if not isinstance(numbers, FilterCovariances):
        return {}
    out: dict[str, tuple[int, ...]] = {}
    for i, layer in enumerate(numbers.layers):
        out |= {f"{i}.mean": (layer.kernel**2,), f"{i}.covariance": (layer.kernel**2,) * 2}
    return out


def _check_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != np.float64:
        raise DataError(f"`{name}`: expected float64 {shape}, found {array.dtype} {array.shape}")
    if not np.isfinite(array).all():
        raise DataError(f"`{name}`: holds numbers that are not finite")
    if len(shape) == 2 and (array.diagonal().min() < 0 or not np.allclose(array, array.T, rtol=0, atol=_slack(array))):
        raise DataError(f"`{name}`: expected a covariance, found one that is not symmetric or has negative variances")


def _slack(array: np.ndarray) -> float:
    return 1e-9 * float(np.abs(array).max())


def _cells(fit: ProductFit) -> tuple[str, ...]:
    numbers = (f"{fit.alpha:.3f}", f"{fit.beta:+.3f}", f"({fit.beta_std:.3f})")
    return (*numbers, f"{fit.r2:.4f}", f"{fit.attainable:.4f}", f"{fit.residual:.2f}")


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    cells = [tuple(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    pairs = ([(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))] for row in cells)
    return "\n".join("  ".join(c.rjust(w) if i else c.ljust(w) for c, w, i in row) for row in pairs)
