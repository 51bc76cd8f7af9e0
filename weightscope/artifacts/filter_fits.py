"""Numbers of initialisers of depthwise filters: distributions of filters, or the closed form of their covariance."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from weightscope._util.results import text_table
from weightscope.artifacts.numbers import Numbers, StrictModel
from weightscope.statistics.filters import FilterDistribution

Psd = Literal["abs", "clip"]


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"expected an odd filter size, found {kernel}")
    return kernel


Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd)]


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
        return [{key: getattr(x, key) for key in FilterLayer.model_fields} for x in self.layers]

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
        return "\n".join([f"covariance_transfer_: {given}", *left_out_line(self.left_out), *notes, "", table])


class FilterLayer(StrictModel):
    """What the header says of one layer of a `FilterFit`."""

    name: str
    stage: int = Field(ge=0)
    depth: float = Field(ge=0, le=1)
    kernel: Kernel
    count: int = Field(ge=2)
    dead: int = Field(default=0, ge=0)


class FilterHeader(StrictModel):
    """The header of a `FilterFit`."""

    structure: Literal["filters"]
    layers: tuple[FilterLayer, ...] = Field(min_length=1)
    kronecker: bool = False
    means: bool = False
    schedule: Literal["depth", "stage"] = "depth"
    kernel: Kernel | None = None
    psd: Psd = "abs"
    left_out: tuple[str, ...] = ()


class ScheduleLayer(StrictModel):
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


class ScheduleFit(Numbers):
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
        notes = [f"R2 {self.r2:.3f} of the covariances", *left_out_line(self.left_out)]
        return "\n".join([f"{call}{options}", *notes, "", text_table(head, rows)])


def left_out_line(layers: tuple[str, ...]) -> list[str]:
    """A line on the layers that were left out, or none."""
    return [f"left out, not square: {', '.join(layers)}"] if layers else []
