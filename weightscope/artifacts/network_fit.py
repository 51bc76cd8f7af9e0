"""`NetworkFit`: an initialiser fitted to one network, for networks of any width, depth and head count.

Its numbers are JSON in the header of the artifact, and covariances are its arrays.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from weightscope._util.tables import text_table
from weightscope.artifacts.format import VERSION, Artifact, checked_header
from weightscope.errors import DataError
from weightscope.statistics.filters import FilterDistribution

FORMAT = "weightscope-network-initialiser"
Psd = Literal["abs", "clip"]


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"expected an odd filter size, found {kernel}")
    return kernel


Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, eq=False)
class FilterFit:
    """Distributions of the filters of every depthwise layer; the options are those of `covariance_transfer_`.

    Attributes:
        layers: in depth order.
        left_out: the layers whose filters are not square, with their sizes.
    """

    structure: ClassVar[str] = "filters"
    layers: tuple[FilterDistribution, ...]
    kronecker: bool = False
    means: bool = False
    schedule: str = "depth"
    kernel: int | None = None
    psd: str = "abs"
    left_out: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `covariance_transfer_`."""
        return {key: getattr(self, key) for key in ("kronecker", "means", "schedule", "kernel", "psd")}

    @property
    def used(self) -> tuple[FilterDistribution, ...]:
        """The layers that filters are drawn from: of size `kernel`, with at least two filters that are not dead."""
        return tuple(x for x in self.layers if self.kernel in (None, x.kernel) and x.usable)

    def remarks(self) -> tuple[str, ...]:
        """What of the network is not used, and which distributions stand in for it."""
        used = self.used
        alike = [x for x in self.layers if self.kernel in (None, x.kernel)]
        out = [f"`{x.name}`: {x.dead} of {x.count} filters are dead and not used" for x in alike if not x.usable]
        out += [
            f"`{x.name}`: {x.dead} of {x.count} filters are dead; its distribution includes them"
            for x in used
            if x.dead
        ]
        if 0 < len(used) < len(self.layers):
            span = f"{used[0].depth:.3f} to {used[-1].depth:.3f}"
            out.append(
                f"{len(used)} of {len(self.layers)} layers are used, at depths {span}; layers in between take a "
                "linear interpolation of these, layers outside take the first or the last"
            )
        return tuple(out)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer: `name`, `stage`, `depth`, `kernel`, `count`, `dead`."""
        return [{key: getattr(x, key) for key in _FilterLayer.model_fields} for x in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """The header's part."""
        left = {"left_out": list(self.left_out)} if self.left_out else {}
        return {"structure": self.structure, "layers": self.rows(), **self.options, **left}

    def arrays(self) -> dict[str, np.ndarray]:
        """`"i.mean"` (k*k,) and `"i.covariance"` (k*k, k*k) of layer i, float64."""
        out: dict[str, np.ndarray] = {}
        for i, layer in enumerate(self.layers):
            out |= {f"{i}.mean": layer.mean.reshape(-1), f"{i}.covariance": layer.covariance}
        return out

    def text(self) -> str:
        """The layers as a table."""
        kernels = "all kernels" if self.kernel is None else f"kernel {self.kernel} only"
        given = f"kronecker {self.kronecker}, means {self.means}, schedule {self.schedule}, psd {self.psd}, {kernels}"
        used = {x.name for x in self.used}
        rows = [
            (x.name, x.stage, f"{x.depth:.3f}", f"{x.kernel}x{x.kernel}", x.count, x.dead, "*" * (x.name in used))
            for x in self.layers
        ]
        table = text_table(("layer", "stage", "depth", "kernel", "filters", "dead", "used"), rows)
        notes = (f"note: {remark}" for remark in self.remarks())
        return "\n".join([f"covariance_transfer_: {given}", *_left_out(self.left_out), *notes, "", table])


class _FilterLayer(_Model):
    name: str
    stage: int = Field(ge=0)
    depth: float = Field(ge=0, le=1)
    kernel: Kernel
    count: int = Field(ge=2)
    dead: int = Field(default=0, ge=0)


class _FilterHeader(_Model):
    structure: Literal["filters"]
    layers: tuple[_FilterLayer, ...] = Field(min_length=1)
    kronecker: bool = False
    means: bool = False
    schedule: Literal["depth", "stage"] = "depth"
    kernel: Kernel | None = None
    psd: Psd = "abs"
    left_out: tuple[str, ...] = ()


class _Numbers(_Model):
    """Numbers without arrays."""

    def to_dict(self) -> dict[str, Any]:
        """The header's part."""
        out = self.model_dump(mode="json")
        return {key: value for key, value in out.items() if key != "left_out" or value}

    def arrays(self) -> dict[str, np.ndarray]:
        """No arrays."""
        return {}


class ScheduleLayer(_Model):
    """Fit of the closed form to one layer.

    Attributes:
        sigma: the schedule's at this depth.
        sigma_alone: the best for this layer alone.
        scale: the layer's own, the root of `s = <C, S> / |S|^2`.
        r2: `1 - |C - s S|^2 / |C|^2` with the schedule's sigma.
        r2_alone: the same with `sigma_alone`.
        attainable: expected r2 of as many filters drawn from the closed form itself.
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


class ScheduleFit(_Numbers):
    """Numbers of `conv_covariance_`; r2 is the mean over layers, weighted by their filters.

    `left_out` names the layers whose filters are not square, with their sizes.
    """

    structure: Literal["conv_schedule"] = "conv_schedule"
    sigma0: float
    v: float
    a: float
    scale: float = Field(gt=0)
    psd: Psd = "abs"
    schedule: Literal["depth", "sawtooth"] = "depth"
    r2: float
    layers: tuple[ScheduleLayer, ...] = Field(min_length=1)
    left_out: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _positive(self) -> "ScheduleFit":
        vertex = min(1.0, max(0.0, -self.v / self.a)) if self.a else 0.0
        least = min(self.sigma0 + self.v * d + 0.5 * self.a * d**2 for d in (0.0, vertex, 1.0))
        if not least > 0:
            raise ValueError(f"expected sigma > 0 at every depth, found {least:g}")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `conv_covariance_`."""
        return {key: getattr(self, key) for key in ("sigma0", "v", "a", "scale", "psd", "schedule")}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer, with the attributes of `ScheduleLayer`."""
        return [layer.model_dump() for layer in self.layers]

    def text(self) -> str:
        """The equivalent call, and the fit layer by layer."""
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
        notes = [f"R2 {self.r2:.3f} of the covariances", *_left_out(self.left_out)]
        return "\n".join([f"{call}{options}", *notes, "", text_table(head, rows)])


class ProductNumbers(_Model):
    """Numbers of `mimetic_attention_` for the product of one layer, mean over its heads.

    Attributes:
        alpha: of the noise.
        beta: of the diagonal, with the product's own sign, as `weightscope products` shows it; `beta_vo` of
            `mimetic_attention_` is minus that of V/O.
        beta_std: standard deviation of the heads' beta.
        diagonal: the product's own diagonal mean, `tr M / d`, smaller than beta because of its rank.
        noise: the product's own least-squares alpha, `|M - diagonal I|_F / sqrt(d)`.
        r2: `d diagonal^2 / |M|_F^2`, the identity's share of the product; at most rank / d.
        attainable: rank / d.
        residual: `|s - s'| / |s|` between the singular values of M and those of the initialiser's products.
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
    qk: ProductNumbers
    vo: ProductNumbers


class ProductFit(_Numbers):
    """`W_Q W_K^T ~ alpha Z + beta I` and `W_V W_O ~ alpha Z + beta I`, layer by layer.

    Attributes:
        signs: beta has the sign of the product. Artifacts without this entry have minus that of V/O, and are
            converted when they are read.
        parts: the products that the initialiser sets.
        layer_scale: whether the network has one after its attention, and whether it was folded into W_V W_O.
    """

    structure: Literal["identity_product"] = "identity_product"
    signs: Literal["products"] = "products"
    parts: Literal["both", "qk", "vo"] = "both"
    layer_scale: Literal["none", "folded", "left out"] = "none"
    layers: tuple[ProductLayer, ...] = Field(min_length=1)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and product: `name`, `depth`, `width`, `heads`, `part` and the product's numbers."""
        return [
            {**layer.model_dump(exclude={"qk", "vo"}), "part": part, **getattr(layer, part).model_dump()}
            for layer in self.layers
            for part in ("qk", "vo")
        ]

    def text(self) -> str:
        """The numbers layer by layer."""
        each = ("alpha", "beta", "(std)", "R2", "of", "spectrum")
        head = ("layer", "depth", *(f"{part} {word}" for part in ("qk", "vo") for word in each))
        rows = [(x.name, f"{x.depth:.3f}", *_cells(x.qk), *_cells(x.vo)) for x in self.layers]
        note = (
            "R2 is the identity's share of the product, 'of' the most that its rank allows, 'spectrum' the relative "
            "residual of its singular values"
        )
        if self.layer_scale == "folded":
            note += "\nLayerScale is folded into W_V W_O"
        elif self.layer_scale == "left out":
            note += (
                "\nwarning: LayerScale multiplies each channel of W_V W_O and may change its sign; "
                "the option fold_scales=true includes it"
            )
        note = (
            f"beta has the sign of the product, as in `products`; beta_vo of mimetic_attention_ is minus that\n{note}"
        )
        return f"mimetic_attention_ with these numbers, parts {self.parts}\n{note}\n\n" + text_table(head, rows)


Numbers: TypeAlias = FilterFit | ScheduleFit | ProductFit


class _Header(_Model):
    format: Literal["weightscope-network-initialiser"]
    version: Literal[1]
    numbers: Annotated[_FilterHeader | ScheduleFit | ProductFit, Field(discriminator="structure")]
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class NetworkFit(Artifact):
    """An initialiser fitted to one network.

    Attributes:
        numbers: the fit; `numbers.structure` is its kind.
        provenance: where the weights came from.
    """

    numbers: Numbers
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
        values = values | {"numbers": _with_signs(numbers)}
    header = checked_header(values, _Header)
    depths = [layer.depth for layer in header.numbers.layers]
    if any(b < a for a, b in itertools.pairwise(depths)):
        raise DataError(f"expected layers in the order of their depth, found {depths[:6]}")
    found = header.numbers
    expected = dict(_shapes(found.layers)) if isinstance(found, _FilterHeader) else {}
    if odd := sorted(set(expected) ^ set(arrays)):
        raise DataError(f"its arrays are not those of {len(depths)} layers: {', '.join(odd[:3])}")
    for name, shape in expected.items():
        _check_array(name, arrays[name], shape)
    if isinstance(found, _FilterHeader):
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


def _with_signs(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers with the products' own signs; `ProductFit` once stored minus the beta of V/O."""
    layers = numbers.get("layers")
    if numbers["structure"] != "identity_product" or "signs" in numbers or not isinstance(layers, list):
        return numbers
    converted = []
    for layer in layers:
        vo = layer.get("vo") if isinstance(layer, dict) else None
        if isinstance(vo, dict) and isinstance(vo.get("beta"), float):
            layer = layer | {"vo": vo | {"beta": -vo["beta"]}}
        converted.append(layer)
    return numbers | {"signs": "products", "layers": converted}


def _shapes(layers: tuple[_FilterLayer, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
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


def _left_out(layers: tuple[str, ...]) -> list[str]:
    """A line on the layers that were left out, or none."""
    return [f"left out, not square: {', '.join(layers)}"] if layers else []


def _cells(fit: ProductNumbers) -> tuple[str, ...]:
    numbers = (f"{fit.alpha:.3f}", f"{fit.beta:+.3f}", f"({fit.beta_std:.3f})")
    return (*numbers, f"{fit.r2:.4f}", f"{fit.attainable:.4f}", f"{fit.residual:.2f}")
