"""Fits to the depthwise filters of one network: their distributions, or the nearest closed-form covariance."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from scipy.interpolate import CubicSpline
from scipy.optimize import OptimizeResult, minimize

from weightscope._util.checks import choice, count, flag, odd
from weightscope._util.results import row_table
from weightscope._util.threads import one_thread
from weightscope.anatomy import DepthwisePart, Parts, depthwise
from weightscope.anatomy.convolution import listed
from weightscope.errors import DataError, UsageError
from weightscope.fits.artifact import NetworkFit
from weightscope.statistics.filters import Schedule, conv_covariance, covariance_root, relative_depths
from weightscope.statistics.slices import slice_moments

Psd = Literal["abs", "clip"]


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: str
    stage: int
    depth: float  # relative, in [0, 1], among all depthwise layers of the network
    kernel: int  # k, the side of the square filters, odd
    count: int  # C, number of filters


class FilterDistribution(_Layer):
    """Mean and covariance of the filters of one depthwise layer, each filter one sample (thesis Eq. 3.3).

        mean = sum_c F_c / C,   covariance = sum_c vec(F_c - mean) vec(F_c - mean)^T / (C - 1)

    `vec` is in row-major order: pixel (i, j) is coordinate k i + j.
    """

    mean: np.ndarray = Field(exclude=True)  # (k, k) float64
    covariance: np.ndarray = Field(exclude=True)  # (k*k, k*k) float64, of rank C - 1 at most
    dead: int = 0  # number of filters whose norm is negligible; mean and covariance include them

    @property
    def relative_depth(self) -> float:
        """As of `DepthwisePart`."""
        return self.depth

    @property
    def usable(self) -> bool:
        """Whether at least two filters are alive; otherwise the covariance says nothing about filters."""
        return self.count - self.dead >= 2

    @property
    def constant(self) -> bool:
        """Whether all filters are equal up to the rounding of float32, so that there is no covariance to draw from."""
        return self.covariance.trace() <= (1e-6 * np.linalg.norm(self.mean)) ** 2


class FilterFit(NetworkFit):
    """Distributions of the filters of every depthwise layer, in depth order; options are `covariance_transfer_`'s."""

    structure: Literal["filters"] = "filters"
    layers: tuple[FilterDistribution, ...]
    kronecker: bool = False
    means: bool = False
    schedule: Literal["depth", "stage"] = "depth"
    kernel: int | None = None
    psd: Psd = "abs"

    @property
    def used(self) -> tuple[FilterDistribution, ...]:
        """The layers that filters are drawn from: of size `kernel`, with at least two filters that are not dead."""
        return tuple(x for x in self.layers if self.kernel in (None, x.kernel) and x.usable)

    def usable_layers(self) -> tuple[FilterDistribution, ...]:
        """`used`, or an error if there are none, or filters of one are all equal and no mean is drawn."""
        if not self.used:
            sizes = ", ".join(str(k) for k in sorted({layer.kernel for layer in self.layers if layer.usable}))
            if not sizes:
                raise DataError(f"all filters are dead: `{self.layers[0].name}`, ...")
            wanted = f"{self.kernel} x {self.kernel} filters"
            raise UsageError(f"kernel: no layer of the source has {wanted}, found sizes {sizes}")
        for layer in self.used:
            if layer.constant and not self.means:
                raise DataError(
                    f"`{layer.name}`: its {layer.count} filters are all equal and have no covariance to draw from, new "
                    "ones would be zero; means=true draws their mean, and kernel=K uses the layers of one size only"
                )
        return self.used

    def remarks(self) -> tuple[str, ...]:
        """What of the network is not used, and which distributions stand in for it."""
        used, dead = self.used, [x for x in self.layers if self.kernel in (None, x.kernel) and x.dead]
        does = {False: " and not used", True: "; its distribution includes them"}
        dead.sort(key=lambda x: x.usable)
        out = [f"`{x.name}`: {x.dead} of {x.count} filters are dead{does[x.usable]}" for x in dead]
        if 0 < len(used) < len(self.layers):
            span = f"{used[0].depth:.3f} to {used[-1].depth:.3f}"
            out.append(
                f"{len(used)} of {len(self.layers)} layers are used, at depths {span}; layers in between take a "
                "linear interpolation of these, layers outside take the first or the last"
            )
        return tuple(out)

    def arrays(self) -> dict[str, np.ndarray]:
        """`"i.mean"` (k*k,) and `"i.covariance"` (k*k, k*k) of layer i, float64."""
        out: dict[str, np.ndarray] = {}
        for i, layer in enumerate(self.layers):
            out |= {f"{i}.mean": layer.mean.reshape(-1), f"{i}.covariance": layer.covariance}
        return out

    def report(self) -> str:
        kernels = "all kernels" if self.kernel is None else f"kernel {self.kernel} only"
        given = f"kronecker {self.kronecker}, means {self.means}, schedule {self.schedule}, psd {self.psd}, {kernels}"
        used = {x.name for x in self.used}
        rows = [row | {"used": "*" * (row["name"] in used)} for row in self.rows()]
        columns = _COLUMNS | {"dead": "{dead}", "used": "{used}"}
        notes = (f"note: {remark}" for remark in self.remarks())
        lines = [f"covariance_transfer_: {given}", *_left_out_line(self.left_out), *notes]
        return "\n".join([*lines, "", row_table(columns, rows)])


_COLUMNS = {
    "layer": "{name}",
    "stage": "{stage}",
    "depth": "{depth:.3f}",
    "kernel": "{kernel}x{kernel}",
    "filters": "{count}",
}


class ScheduleLayer(_Layer):
    """Fit of the closed form to one layer."""

    sigma: float  # the schedule's at this depth
    sigma_alone: float  # the best for this layer alone
    scale: float  # of the layer alone, the root of `s = <C, S> / |S|^2`
    r2: float  # `1 - |C - s S|^2 / |C|^2` with the schedule's sigma
    r2_alone: float  # the same with `sigma_alone`
    attainable: float  # expected r2 of as many filters drawn from the closed form itself


class ScheduleFit(NetworkFit):
    """Numbers of `conv_covariance_`; r2 is the mean over layers, weighted by their filters."""

    structure: Literal["conv_schedule"] = "conv_schedule"
    sigma0: float
    v: float
    a: float
    scale: float
    psd: Psd = "abs"
    schedule: Literal["depth", "sawtooth"] = "depth"
    r2: float
    layers: tuple[ScheduleLayer, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `conv_covariance_`."""
        return {key: getattr(self, key) for key in ("sigma0", "v", "a", "scale", "psd", "schedule")}

    def report(self) -> str:
        numbers = ", ".join(f"{key}={getattr(self, key):.4g}" for key in ("sigma0", "v", "a", "scale"))
        call = f'conv_covariance_(net, {numbers}, psd="{self.psd}", schedule="{self.schedule}")'
        forms = {"sigma": "sigma", "alone": "sigma_alone", "scale": "scale", "R2": "r2", "R2 alone": "r2_alone"}
        columns = _COLUMNS | {head: f"{{{key}:.3f}}" for head, key in (forms | {"attainable": "attainable"}).items()}
        notes = [f"R2 {self.r2:.3f} of the covariances", *_left_out_line(self.left_out)]
        return "\n".join([call, *notes, "", row_table(columns, self.rows())])


def _left_out_line(layers: tuple[str, ...]) -> list[str]:
    unread = [layer for layer in layers if layer.endswith(")")]
    odd = [layer for layer in layers if layer not in unread]
    lines = [f"left out, not square: {', '.join(odd)}"] if odd else []
    return lines + [f"left out, cannot be read: {layer}" for layer in unread]


_DEAD = 1e-3  # norm relative to the largest; weight decay takes a filter without gradient far below it


def filter_distributions(source: Any, *, strict: bool = True) -> list[FilterDistribution]:
    """Mean and covariance of the filters of every depthwise layer, in depth order (thesis Eq. 3.3).

    A filter is counted as dead if its norm is below a thousandth of the largest of its layer, or of what is typical of
    the network's layers (the median of their largest). A layer whose filters are one-dimensional, not square or of even
    size is a UsageError (`strict`), or is left out with a warning.
    """
    parts = depthwise(source, strict=strict, caller="filter_distributions")
    found, others = square_distributions(parts), [part for part in parts if not part.square]
    if others and strict:
        raise UsageError(f"expected square filters of odd size in every layer, found {listed(others)}")
    if others:
        warnings.warn(f"left out, not square: {listed(others)}", stacklevel=2)
    return found


def square_distributions(parts: Parts[DepthwisePart]) -> list[FilterDistribution]:
    """The distributions of the layers with square filters of odd size."""
    square = [(part, part.read().cpu().numpy().reshape(part.channels, -1)) for part in parts if part.square]
    if not square:
        raise UsageError(f"expected square filters of odd size, found {listed(parts)}")
    norms = [np.linalg.norm(filters.astype(np.float64), axis=1) for _, filters in square]
    typical = float(np.median([norm.max() for norm in norms]))
    found = []
    for (part, filters), norm in zip(square, norms, strict=True):
        dead = int((norm <= _DEAD * max(norm.max(), typical)).sum())
        found.append(_distribution(part, filters, dead))
    return found


def _distribution(part: DepthwisePart, filters: np.ndarray, dead: int) -> FilterDistribution:
    k = part.kernel[0]
    try:
        found = slice_moments(filters, keep=k * k)
    except DataError as error:
        raise DataError(f"`{part.name}`: {error}") from None
    if found.excluded:
        raise DataError(
            f"`{part.name}`: {found.excluded} of {part.channels} filters hold NaN or infinity; "
            "a covariance needs a network that did not diverge"
        )
    assert found.covariance is not None  # every size is kept
    layer: dict[str, Any] = {"name": part.name, "stage": part.stage, "depth": part.relative_depth, "kernel": k}
    mean = found.mean.reshape(k, k)
    return FilterDistribution(**layer, mean=mean, covariance=found.covariance, count=found.n, dead=dead)


def filter_fit(
    layers: Sequence[FilterDistribution],
    left_out: Sequence[str] = (),
    *,
    kronecker: bool,
    means: bool,
    schedule: str,
    kernel: int | None,
    psd: str,
) -> FilterFit:
    """A fit with the options of `covariance_transfer_`, checked."""
    flag("kronecker", kronecker)
    flag("means", means)
    choice("schedule", schedule, ("depth", "stage"))
    choice("psd", psd, get_args(Psd))
    if kernel is not None:
        odd("kernel", kernel)
    options: dict[str, Any] = {"kronecker": kronecker, "means": means, "schedule": schedule, "psd": psd}
    fit = FilterFit(layers=tuple(layers), left_out=tuple(left_out), kernel=kernel, **options)
    fit.usable_layers()
    return fit


@one_thread()
def fit_filters(
    source: Any,
    *,
    kronecker: bool = False,
    means: bool = False,
    schedule: str = "depth",
    kernel: int | None = None,
    psd: str = "abs",
) -> FilterFit:
    """The distributions of a network's filters as an artifact; the options are those of `covariance_transfer_`.

    All layers are stored for every value of `kernel`; the options are stored and used when the artifact is applied.
    Its text says which layers are used, which have dead filters, and what stands in for the others. Layers without
    square filters of odd size are listed; it is a UsageError if there are only such layers. Source: thesis 3.1.1.

    Example:
        >>> fit_filters("efficientnet-lite0.pth", kernel=5).save("filters.safetensors")
    """
    parts = depthwise(source, strict=None)
    options: dict[str, Any] = {"kronecker": kronecker, "means": means, "schedule": schedule}
    return filter_fit(square_distributions(parts), _left_out(parts), **options, kernel=kernel, psd=psd)


@one_thread()
def fit_conv_schedule(
    source: Any, *, schedule: str = "depth", psd: str = "abs", kernel: int | None = None
) -> ScheduleFit:
    """The schedule and scale of `conv_covariance_` nearest to a network's filters.

        minimise over sigma0, v, a, s_i >= 0:   sum_i n_i |C_i - s_i S(sigma(d_i))|_F^2 / |C_i|_F^2
        sigma(d) = sigma0 + v d + a d^2 / 2 > 0 on [0, 1],   scale = prod_i s_i^(n_i / 2 sum n)

    C_i is the covariance of the n_i filters of layer i, S(sigma) the one that `conv_covariance_` draws from (with its
    `schedule` and `psd`), of the layer's own kernel size; `kernel` restricts the fit to layers of that size. The
    schedule therefore does not depend on the magnitude of a layer's filters, and the scale is the geometric mean over
    layers. With one layer v = a = 0, with two different depths a = 0. A layer of equal filters is a DataError.

    Goodness of fit: `R2_i = 1 - |C_i - s_i S|_F^2 / |C_i|_F^2`, which for the best s_i is the squared cosine of C_i
    and S. Filters drawn from S itself have about `|S|^2 / (|S|^2 + ((tr S)^2 + |S|^2) / (n - 1))`, given as
    `attainable`, the most to expect of so few filters.

    Source: thesis Eq. 3.10-3.11, whose parameters were chosen by eye and refined by grid search (B.1).

    Example:
        >>> fit_conv_schedule(convnext).sigma0
        0.31
    """
    choice("schedule", schedule, ("depth", "sawtooth"))
    choice("psd", psd, get_args(Psd))
    if kernel is not None:
        count("kernel", kernel)
    parts = depthwise(source, strict=None)
    everything = square_distributions(parts)
    depth_of = dict(zip((x.name for x in everything), relative_depths(everything, schedule), strict=True))
    filters = [layer for layer in everything if kernel in (None, layer.kernel)]
    if not filters:
        known = ", ".join(str(k) for k in sorted({layer.kernel for layer in everything}))
        raise UsageError(f"kernel: no layer has {kernel} x {kernel} filters, found {known}")
    for layer in filters:
        if layer.constant:
            raise DataError(f"`{layer.name}`: its filters are all equal and have no covariance to fit")
    depths = [depth_of[layer.name] for layer in filters]
    fits = _layer_fits(filters, psd)
    weights = np.array([layer.count for layer in filters], dtype=np.float64)
    curve = _schedule(fits, depths, weights / weights.sum())
    layers = [_described(x, fit, curve(d), psd) for x, fit, d in zip(filters, fits, depths, strict=True)]
    scales = np.array([layer.scale for layer in layers])
    if not scales.any():
        raise DataError("no layer's covariance has a positive product with the closed form; there is nothing to fit")
    some = scales > 0
    numbers = {
        **{key: getattr(curve, key) for key in ("sigma0", "v", "a")},
        "scale": float(np.exp(np.average(np.log(scales[some]), weights=weights[some]))),
        "psd": psd,
        "schedule": schedule,
        "r2": float(np.average([layer.r2 for layer in layers], weights=weights)),
        "layers": tuple(layers),
        "left_out": tuple(_left_out(parts)),
    }
    return ScheduleFit(**numbers)


def _left_out(parts: Parts[DepthwisePart]) -> list[str]:
    """The layers with other than square filters, each with its size, and those that cannot be read."""
    sizes = [f"{part.name} {part.kernel[0]}x{part.kernel[1]}" for part in parts if not part.square]
    return [*sizes, *(f"{unread.name} {unread.why}" for unread in parts.unread)]


_GRID = 97  # values of sigma at which the closed form is computed; its fit is smooth in log sigma
_NARROWEST = 0.02  # square pixels: a bump of one pixel (neighbours exp(-25)); narrower ones are the same filter
_WIDEST = 4.0  # times k^2: the bumps are flat to 6 %, and wider ones are nearly the same
_LARGE, _COARSE = 15, 33  # fewer values above this kernel size: an eigendecomposition of k^2 x k^2 takes a second


def _drawn_covariance(k: int, sigma: float, psd: str) -> np.ndarray:
    """The covariance (k*k, k*k) of the filters that `conv_covariance_` draws: positive semi-definite."""
    root = covariance_root(conv_covariance(k, sigma), psd)
    return root @ root.T


class _LayerFit(NamedTuple):
    """How well each sigma fits one layer: the cosine of C and S(sigma), smooth in log sigma."""

    cosine: CubicSpline  # of log sigma
    best: float  # sigma with the largest cosine

    def at(self, sigma: float) -> float:
        """The cosine at sigma > 0, constant beyond the computed sigmas; never negative."""
        return max(0.0, float(self.cosine(np.clip(math.log(sigma), *self.cosine.x[[0, -1]]))))


def _layer_fits(layers: list[FilterDistribution], psd: str) -> list[_LayerFit]:
    """The fit of each layer. The closed form is computed once for each kernel size and sigma, and not kept."""
    out: dict[str, _LayerFit] = {}
    for k in {layer.kernel for layer in layers}:
        alike = {x.name: x.covariance / np.linalg.norm(x.covariance) for x in layers if x.kernel == k}
        logs = np.linspace(math.log(_NARROWEST), math.log(_WIDEST * k * k), _GRID if k <= _LARGE else _COARSE)
        rows = []
        for log in logs:
            closed = _drawn_covariance(k, math.exp(log), psd)
            closed /= np.linalg.norm(closed)
            rows.append([np.vdot(closed, covariance) for covariance in alike.values()])
        for name, cosines in zip(alike, np.transpose(rows), strict=True):
            spline = CubicSpline(logs, cosines)
            maxima = np.r_[logs, spline.derivative().roots(extrapolate=False)]  # or ends of the range
            out[name] = _LayerFit(spline, math.exp(maxima[np.nanargmax(spline(maxima))]))
    return [out[layer.name] for layer in layers]


def _schedule(fits: list[_LayerFit], depths: list[float], weights: np.ndarray) -> Schedule:
    """The parabola with the largest weighted sum of squared cosines; by its values at depths 0, 1/2 and 1."""
    degree = min(len(set(depths)), 3) - 1
    nodes = np.linspace(0, 1, degree + 1)
    solved = np.linalg.inv(np.vander(nodes, increasing=True))

    def curve(logs: np.ndarray) -> Schedule:
        sigma0, v, a = (float(x) for x in (*(solved @ np.exp(logs)), 0.0, 0.0)[:3])
        return Schedule(sigma0, v, 2 * a)

    def loss(logs: np.ndarray) -> float:
        found = curve(logs)
        vertex = np.clip(-found.v / found.a, 0.0, 1.0) if found.a else 0.0
        if (least := min(found(0.0), found(1.0), found(float(vertex)))) < _NARROWEST / 2:  # on [0, 1]
            return 2.0 - least  # worse than any valid schedule, and decreasing towards valid ones
        return sum(w * (1 - fit.at(found(d)) ** 2) for w, fit, d in zip(weights, fits, depths, strict=True))

    def search(start: np.ndarray) -> OptimizeResult:
        return minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-12, "maxiter": 4000})

    best = np.array([fit.best for fit in fits])
    starts = [np.full(len(nodes), math.log(float(np.average(best, weights=weights))))]
    if all(a < b for a, b in itertools.pairwise(depths)):
        starts.append(np.log(np.interp(nodes, depths, best)))
    polynomial = np.polynomial.Polynomial.fit(depths, best, degree, w=np.sqrt(weights), domain=[-1, 1])
    starts.append(np.log(np.maximum(polynomial(nodes), _NARROWEST)))
    found = min(map(search, starts), key=lambda result: result.fun)
    # The simplex can shrink too early; a second search from its end costs little.
    return curve(search(found.x).x)


def _described(layer: FilterDistribution, fit: _LayerFit, sigma: float, psd: str) -> ScheduleLayer:
    """The layer's row, computed from the closed form itself, not from the interpolated cosines."""
    c, (wanted, other) = layer.covariance, (_drawn_covariance(layer.kernel, x, psd) for x in (sigma, fit.best))
    square, trace = float(np.sum(wanted**2)), float(np.trace(wanted))
    # 1 - min over s >= 0 of |C - s S|^2 / |C|^2
    r2, r2_alone = (max(0.0, float(np.sum(c * s))) ** 2 / float(np.sum(c**2) * np.sum(s**2)) for s in (wanted, other))
    return ScheduleLayer(
        **layer.model_dump(exclude={"dead"}),
        sigma=sigma,
        sigma_alone=fit.best,
        scale=math.sqrt(max(0.0, float(np.sum(wanted * c)) / square)),
        r2=r2,
        r2_alone=r2_alone,
        attainable=square / (square + (trace**2 + square) / (layer.count - 1)),
    )
