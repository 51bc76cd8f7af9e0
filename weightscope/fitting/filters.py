"""Filters of one network as a file: their covariances, or the numbers of the closed-form covariance nearest to them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize, minimize_scalar

from weightscope._util.checks import choice, count
from weightscope.artifacts.network_fit import ConvSchedule, FilterCovariances, FilterLayer, Portable, ScheduleLayer
from weightscope.errors import DataError, UsageError
from weightscope.init.convolution import Schedule, conv_covariance, covariance_root, relative_depths
from weightscope.init.covariance_transfer import FilterLaw, TransferOptions, filter_laws

_GRID = 97  # values of sigma at which the closed form is computed; its fit is smooth in log sigma
_NARROWEST = 0.02  # square pixels: a bump without neighbours (exp(-25)); narrower ones are the same filter
_WIDEST = 4.0  # times k^2: the bumps are flat to 6 %, and wider ones are nearly the same
_LARGE, _COARSE = 15, 33  # above this kernel size fewer values: an eigendecomposition of k^2 x k^2 takes a second


def fit_filters(
    source: Any,
    *,
    kronecker: bool = False,
    means: bool = False,
    schedule: str = "depth",
    kernel: int | None = None,
    psd: str = "abs",
) -> Portable:
    """The covariances of a network's filters as an artifact; the arguments are those of `covariance_transfer_`.

    All layers are stored whatever `kernel` says, and the options say how they will be applied.

    Raises:
        AnatomyError: if there is no depthwise convolution.
        UsageError: if an option cannot be meant, or filters are one-dimensional, not square or of even size.
        DataError: if a weight is not finite.

    Source: thesis section 3.1.1.

    Example:
        >>> fit_filters("efficientnet-lite0.pth", kernel=5).save("filters.safetensors")
    """
    options = TransferOptions(kronecker, means, schedule, kernel, psd)
    laws = filter_laws(source)
    _of_size(laws, kernel)
    layers = tuple(FilterLayer(name=x.name, stage=x.stage, depth=x.depth, kernel=x.kernel, count=x.count) for x in laws)
    arrays: dict[str, np.ndarray] = {}
    for i, law in enumerate(laws):
        arrays |= {f"{i}.mean": law.mean.reshape(-1), f"{i}.covariance": law.covariance}
    return Portable(FilterCovariances(layers=layers, **vars(options)), arrays)


def fit_conv_schedule(source: Any, *, schedule: str = "depth", psd: str = "abs", kernel: int | None = None) -> Portable:
    """The schedule and scale of `conv_covariance_` nearest to a network's filters.

        minimise over sigma0, v, a, s_i >= 0:   sum_i n_i |C_i - s_i S(sigma(d_i))|_F^2 / |C_i|_F^2
        sigma(d) = sigma0 + v d + a d^2 / 2 > 0 on [0, 1],   scale = prod_i s_i^(n_i / 2 sum n)

    C_i is the covariance of the n_i filters of layer i, S(sigma) the one that `conv_covariance_` draws from (with its
    `psd`), of the layer's own kernel size. The shape so does not depend on how large a layer's filters are, and the
    scale is the geometric mean of the layers' own. Layers whose filters are all alike say nothing and are an error.
    With one layer v = a = 0, with two different depths a = 0.

    Goodness of fit: `R2_i = 1 - |C_i - s_i S|_F^2 / |C_i|_F^2`, which for the best s_i is the squared cosine of C_i
    and S. Filters drawn from S itself have about `|S|^2 / (|S|^2 + ((tr S)^2 + |S|^2) / (n - 1))`, given as
    `attainable`: few filters cannot show more.

    Args:
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.
        schedule: "depth" or "sawtooth", as in `conv_covariance_`.
        psd: "abs" or "clip", as in `conv_covariance_`.
        kernel: fit to layers with filters of this size only; None for all.

    Raises:
        AnatomyError: if there is no depthwise convolution.
        UsageError: if an option cannot be meant, or filters are one-dimensional, not square or of even size.
        DataError: if a weight is not finite, or no layer resembles the closed form.

    Source: thesis Eq. 3.10-3.11, whose parameters were found by eye and by grid search (B.1).

    Example:
        >>> fit_conv_schedule(convnext).numbers.sigma0
        0.31
    """
    choice("schedule", schedule, ("depth", "sawtooth"))
    choice("psd", psd, ("abs", "clip"))
    everything = filter_laws(source)
    depths = dict(zip((x.name for x in everything), relative_depths(everything, schedule), strict=True))
    laws = _of_size(everything, kernel)
    for law in laws:
        if not law.covariance.any():
            raise DataError(f"`{law.name}`: its filters are all alike and have no covariance to fit")
    places = [depths[law.name] for law in laws]
    fits = _layer_fits(laws, psd)
    weights = np.array([law.count for law in laws], dtype=np.float64)
    curve = _schedule(fits, places, weights / weights.sum())
    layers = [_described(law, fit, curve(d), psd) for law, fit, d in zip(laws, fits, places, strict=True)]
    scales = np.array([layer.scale for layer in layers])
    if not scales.any():
        raise DataError("no layer's covariance has a positive product with the closed form; there is nothing to fit")
    some = scales > 0
    numbers = ConvSchedule(
        sigma0=curve.sigma0,
        v=curve.v,
        a=curve.a,
        scale=float(np.exp(np.average(np.log(scales[some]), weights=weights[some]))),
        psd=psd,
        schedule=schedule,
        r2=float(np.average([layer.r2 for layer in layers], weights=weights)),
        layers=tuple(layers),
    )
    return Portable(numbers)


def _of_size(laws: list[FilterLaw], kernel: int | None) -> list[FilterLaw]:
    if kernel is None:
        return laws
    count("kernel", kernel)
    chosen = [law for law in laws if law.kernel == kernel]
    if not chosen:
        there = ", ".join(str(k) for k in sorted({law.kernel for law in laws}))
        raise UsageError(f"kernel: no layer has {kernel} x {kernel} filters, found {there}")
    return chosen


def drawn_covariance(k: int, sigma: float, psd: str) -> np.ndarray:
    """The covariance (k*k, k*k) of the filters that `conv_covariance_` draws: positive semi-definite."""
    root = covariance_root(conv_covariance(k, sigma), psd)
    return root @ root.T


@dataclass(frozen=True)
class _LayerFit:
    """How well each sigma fits one layer: the cosine between C and S(sigma) as a function of log sigma.

    Attributes:
        low: smallest log sigma for which the closed form was computed.
        high: the largest.
        cosine: smooth, from log sigma.
        best: the log sigma with the largest cosine.
    """

    low: float
    high: float
    cosine: Callable[[float], float]
    best: float

    @staticmethod
    def of(logs: np.ndarray, cosines: np.ndarray) -> "_LayerFit":
        """From the cosines (G,) at G log sigmas."""
        smooth = CubicSpline(logs, cosines)
        i = int(cosines.argmax())
        around = (logs[max(0, i - 1)], logs[min(len(logs) - 1, i + 1)])
        found = minimize_scalar(lambda x: -float(smooth(x)), bounds=around, method="bounded")
        return _LayerFit(float(logs[0]), float(logs[-1]), smooth, float(found.x))

    def at(self, sigma: float) -> float:
        """The cosine for sigma > 0, that of the nearest computed sigma outside their range; never negative."""
        return max(0.0, float(self.cosine(min(max(math.log(sigma), self.low), self.high))))


def _layer_fits(laws: list[FilterLaw], psd: str) -> list[_LayerFit]:
    """The fit of each layer. The closed form is computed once for each kernel size and sigma, and not kept."""
    out: dict[int, _LayerFit] = {}
    for k in {law.kernel for law in laws}:
        alike = [(i, law.covariance / np.linalg.norm(law.covariance)) for i, law in enumerate(laws) if law.kernel == k]
        logs = np.linspace(math.log(_NARROWEST), math.log(_WIDEST * k * k), _GRID if k <= _LARGE else _COARSE)
        cosines = np.empty((len(alike), len(logs)))
        for g, log in enumerate(logs):
            closed = drawn_covariance(k, math.exp(log), psd)
            closed /= np.linalg.norm(closed)
            cosines[:, g] = [np.vdot(closed, covariance) for _, covariance in alike]
        out |= {i: _LayerFit.of(logs, row) for (i, _), row in zip(alike, cosines, strict=True)}
    return [out[i] for i in range(len(laws))]


def _schedule(fits: list[_LayerFit], depths: list[float], weights: np.ndarray) -> Schedule:
    """The parabola with the largest weighted sum of squared cosines; by its values at depths 0, 1/2 and 1."""
    different = len(set(depths))
    best = np.exp([fit.best for fit in fits])
    places = (0.0, 0.5, 1.0)[: min(different, 3)] if different > 2 else (0.0, 1.0)[:different]

    def curve(logs: np.ndarray) -> Schedule:
        values = np.exp(logs)
        if len(values) == 1:
            return Schedule(float(values[0]), 0.0, 0.0)
        start, end = values[0], values[-1]
        a = 0.0 if len(values) == 2 else 4 * (start + end - 2 * values[1])
        return Schedule(float(start), float(end - start - a / 2), float(a))

    def loss(logs: np.ndarray) -> float:
        found = curve(logs)
        if _least(found) < _NARROWEST / 2:
            return 2.0 - _least(found)  # worse than anything, and better towards what can be meant
        return sum(w * (1 - fit.at(found(d)) ** 2) for w, fit, d in zip(weights, fits, depths, strict=True))

    starts = [np.full(len(places), math.log(float(np.average(best, weights=weights))))]
    starts.append(np.log(np.interp(places, depths, best)) if _rising(depths) else starts[0])
    starts.append(np.log(np.maximum(_parabola(depths, best, weights, places), _NARROWEST)))
    options = {"xatol": 1e-6, "fatol": 1e-12, "maxiter": 4000}
    found = min((minimize(loss, x, method="Nelder-Mead", options=options) for x in starts), key=lambda r: r.fun)
    # Nelder and Mead's simplex can shrink too early; a second one from its end costs little.
    return curve(minimize(loss, found.x, method="Nelder-Mead", options=options).x)


def _rising(depths: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(depths))


def _parabola(depths: list[float], values: np.ndarray, weights: np.ndarray, places: tuple[float, ...]) -> np.ndarray:
    """The least-squares polynomial through the layers' own sigmas, at the places."""
    fitted = np.polynomial.polynomial.polyfit(depths, values, len(places) - 1, w=np.sqrt(weights))
    return np.polynomial.polynomial.polyval(np.array(places), fitted)


def _least(curve: Schedule) -> float:
    """The smallest sigma on [0, 1]."""
    vertex = -curve.v / curve.a if curve.a else 0.0
    return min(curve(0.0), curve(1.0), curve(min(1.0, max(0.0, vertex))))


def _described(law: FilterLaw, fit: _LayerFit, sigma: float, psd: str) -> ScheduleLayer:
    """The layer's row, from the closed form itself and not from the table."""
    alone = math.exp(fit.best)
    wanted, other = (drawn_covariance(law.kernel, x, psd) for x in (sigma, alone))
    square, trace = float(np.sum(wanted**2)), float(np.trace(wanted))
    return ScheduleLayer(
        name=law.name,
        stage=law.stage,
        depth=law.depth,
        kernel=law.kernel,
        count=law.count,
        sigma=sigma,
        sigma_alone=alone,
        scale=math.sqrt(max(0.0, float(np.sum(wanted * law.covariance)) / square)),
        r2=_r2(law.covariance, wanted),
        r2_alone=_r2(law.covariance, other),
        attainable=square / (square + (trace**2 + square) / (law.count - 1)),
    )


def _r2(covariance: np.ndarray, wanted: np.ndarray) -> float:
    """`1 - min over s >= 0 of |C - s S|^2 / |C|^2`."""
    product = max(0.0, float(np.sum(covariance * wanted)))
    return product**2 / float(np.sum(covariance**2) * np.sum(wanted**2))
