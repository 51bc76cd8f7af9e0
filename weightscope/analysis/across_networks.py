"""`covariance_across`: the joint covariance of tensors over the networks of a population; its leading eigenpairs."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from scipy.special import stdtrit

from weightscope._util.checks import choice
from weightscope._util.results import Result
from weightscope._util.sources import is_population
from weightscope._util.threads import one_thread
from weightscope._util.workers import Workers
from weightscope.analysis.computed import coordinates_of
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.coordinates import Coordinates, Function
from weightscope.statistics.eigenpairs import Eigenpairs, top_eigenpairs
from weightscope.statistics.moments import BLOCK, EntryMoments, Moments, Precision, finite_rows
from weightscope.statistics.permutation_rules import permutations_by_name
from weightscope.statistics.permutations import bare
from weightscope.statistics.samples import WeightSamples, ahead, over_parts, usable_chunks
from weightscope.statistics.stripes import StripeResult, stripe_ratios, stripe_terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from weightscope.analysis.within_network import NetworkCovariances

T = TypeVar("T")
Kind = Literal["covariance", "correlation"]
_MLP = "*.mlp.fc?.weight"


@dataclass(frozen=True, eq=False, repr=False)
class PopulationCovariance(Result):
    """A covariance or correlation matrix over networks, with the stripe ratios of the matrices in it."""

    matrix: np.ndarray  # (D', D'), in the precision of accumulation
    mean: np.ndarray  # (D',) float64
    n: int  # networks used
    excluded: int  # networks left out: diverged, equal to an earlier one, or not finite
    spec: WeightSpec  # names and shapes of the D' coordinates; its slices are the blocks of the matrix
    kind: Kind  # `"covariance"` (divisor n - 1) or `"correlation"`
    # `precision`, `folded_norms`, `constant` (coordinates without variance; their correlations are NaN), `rank_bound`,
    # and `without_stripes` (tensor -> reason) where these could not be computed
    diagnostics: dict[str, Any]
    stripes: dict[str, StripeResult] = field(default_factory=dict)  # by tensor with at least two axes
    # computed coordinate -> mean over networks and units, its `ci95` over networks, and the `std` of its numbers
    computed: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: ClassVar = {
        "tensor": "{tensor}",
        "variance of": "{means} means",
        "÷ independent (95 %)": "{ratio:.2f} ({low:.2f} to {high:.2f})",
    }
    left = (0, 1)

    @property
    def blocks(self) -> dict[str, slice]:
        """Name of a tensor -> its rows and columns of the matrix."""
        return self.spec.slices

    def block(self, rows: str, columns: str | None = None) -> np.ndarray:
        """The part of the matrix between two tensors (size, size'); a view."""
        names = (rows, rows if columns is None else columns)
        for name in names:
            self.spec[name]  # an unknown name is an error that lists the known ones
        return self.matrix[self.blocks[names[0]], self.blocks[names[1]]]

    def summary(self) -> str:
        return f"{self.kind} of {self.spec.size:,} coordinates in {len(self.spec)} tensors over {self.networks()}"

    def networks(self) -> str:
        """Their number and, of a snapshot, the epoch or step: `"16 networks at epoch 4"`."""
        return f"{self.n:,} networks" + (f" at {self.diagnostics['at']}" if "at" in self.diagnostics else "")

    def rows(self) -> list[dict[str, Any]]:
        """One row for each stripe ratio: tensor, kind of mean, ratio, its 95 % interval and p-value."""
        return [
            {"tensor": name, "means": kind, "ratio": ratio.value}
            | {"low": ratio.ci95[0], "high": ratio.ci95[1], "p": ratio.p}
            for name, result in self.stripes.items()
            for kind, ratio in result.ratios.items()
        ]

    def notes(self) -> list[str]:
        out = []
        if self.stripes:
            out.append("column means: over outputs, one per input (and pixel); row means: over these, one per output")
        out += [
            f"mean of {name}: {x['mean']:+.3g} ({x['ci95'][0]:+.3g} to {x['ci95'][1]:+.3g}), std {x['std']:.3g}"
            for name, x in self.computed.items()
        ]
        if self.excluded:
            out.append(f"left out: {self.excluded}, diverged, not finite, or equal to an earlier network")
        if constant := self.diagnostics.get("constant"):
            out.append(f"{constant} coordinates do not vary over the networks")
        problems = self.diagnostics.get("without_stripes", {})
        out += [f"no stripe ratios of `{name}`: {why}" for name, why in problems.items()]
        return out

    def to_dict(self) -> dict[str, Any]:
        out = {"n": self.n, "excluded": self.excluded, "kind": self.kind, "diagnostics": self.diagnostics}
        stripes = {
            name: {kind: {"ratio": x.value, "ci95": list(x.ci95), "p": x.p} for kind, x in result.ratios.items()}
            for name, result in self.stripes.items()
        }
        blocks = {name: [part.start, part.stop] for name, part in self.blocks.items()}
        return out | {"blocks": blocks, "stripes": stripes, "computed": self.computed}

    def plot(
        self,
        path: str | Path | None = None,
        *,
        means: bool = False,
        kind: Kind | None = None,
        cells: int | None = None,
    ) -> "Figure":
        """Draw the matrix, its blocks ruled off (MLP paper, Fig. 1), or that of group means.

        Means of channels show stripes that the noise of single entries hides. They are drawn with `means`, and without
        `cells` where stripe ratios were computed or the matrix has more than 600 coordinates; else single entries,
        averaged over at most so many `cells` along a side (600). Several tensors are drawn as correlations unless
        `kind` says otherwise, since their variances differ; of means and computed coordinates, correlations within
        chance are white. The file (.png, .pdf, .svg) is written if there is a path.
        DataError for means over fewer than 3 networks, of which the error is not known.
        """
        from weightscope import plots

        means = means or (cells is None and (bool(self.stripes) or self.spec.size > plots.covariance.CELLS))
        kind = kind or ("correlation" if len(self.spec) > 1 else self.kind)
        title = f"{kind.capitalize()}{' of group means' if means else ''} over {self.networks()}"
        limited = kind == "correlation" and (means or (self.computed and self.n > 2))
        within = plots.covariance.chance(self.n) if limited else None
        groups, cells = self.groups() if means else None, cells or plots.covariance.CELLS
        axes = plots.covariance_map(
            self.matrix, self.blocks, kind=kind, title=title, groups=groups, cells=cells, within=within
        )
        return plots.finished(axes, path)

    def groups(self) -> dict[str, np.ndarray]:
        """For `plots.covariance_map`: the entries of each tensor that belong to one channel of the residual stream.

        Channels are those of the permutation specification of the names; a tensor without is one group. Tensors of
        unknown names are grouped by shape: a matrix by its shorter side, filters by output, each entry of a vector.
        """
        out = {}
        for tensor in self.spec.tensors:
            axes = [n for n in tensor.shape if n != 1]
            if len(axes) == 2:
                out[tensor.name] = over_hidden_units(axes)
            elif tensor.size:
                units = axes[0] if len(axes) > 2 else tensor.size
                out[tensor.name] = np.repeat(np.arange(units), tensor.size // units)
        with contextlib.suppress(AnatomyError):
            out |= _by_channel(self.spec)
        return out


def _by_channel(spec: WeightSpec) -> dict[str, np.ndarray]:
    """Tensor -> the group of each entry (size,): its channel, in each view of a tensor on its own, or all entries.

    None of a network without named channels; AnatomyError if the architecture is not known.
    """
    permutations = permutations_by_name(spec)
    counts = Counter(label for view in permutations.views for label in view.labels)
    if not any(bare(label).startswith("channels") for label in counts):
        return {}
    out = {view.tensor: np.full(spec[view.tensor].shape, -1) for view in permutations.views if view.labels}
    for view in permutations.views:
        if view.labels:
            groups, units = out[view.tensor], np.zeros((1,) * len(view.shape), dtype=int)
            if channels := sorted(label for label in view.labels if bare(label).startswith("channels")):
                axis = view.axes.index(max(channels, key=counts.__getitem__))
                units = np.arange(view.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(view.shape))])
            view.write(groups, np.broadcast_to(groups.max() + 1 + units, view.shape))
    return {name: groups.reshape(-1) for name, groups in out.items()}


def over_hidden_units(shape: Sequence[int]) -> np.ndarray:
    """The index of each entry's row or column, whichever are fewer, for a matrix flattened row by row.

    An MLP's hidden units are the longer side: fc1 (p, d) is grouped by its columns, fc2 (d, p) by its rows.
    """
    rows, columns = shape
    return np.repeat(np.arange(rows), columns) if rows < columns else np.tile(np.arange(columns), rows)


@one_thread()
def covariance_across(
    source: WeightSamples | str | Path,
    select: str | Sequence[str] | None = "auto",
    *,
    kind: Kind = "covariance",
    computed: Mapping[str, Function] | Sequence[str] | None = None,
    fold_norms: bool = False,
    precision: Precision = "float64",
    device: Any = None,
    stripes: bool = True,
    workers: Workers | int | None = None,
) -> PopulationCovariance:
    """The joint covariance of tensors over the networks of a population (MLP paper, Fig. 1 and section 3).

    C = sum over networks of (w - mean)(w - mean)^T / (n - 1), in one pass over the data; memory is one D' x D' matrix
    and a few blocks of rows, independent of N. Diverged networks and non-finite rows are left out and counted in the
    result. Of matrices and convolutions, a second pass gives stripe ratios.

    Args:
        source: a population, its path, or a `WeightArray(weights, spec)`.
        select: patterns as in `WeightSpec.select`; "auto" for the MLP matrices (`*.mlp.fc?.weight`) of a network that
            has them, and for all tensors but the running statistics of another one, but none beside computed
            coordinates; None for these alone.
        kind: `"covariance"` or `"correlation"`.
        computed: further coordinates, as in thesis Fig. 3.40: name -> function of the tensors of n networks, name ->
            (n, *shape), that returns (n, ...), or several of these by name. Or names: "mlp-diagonal", "qk-diagonal",
            "vo-diagonal" (of W2 W1, W_Q W_K^T, W_V W_O of each block, heads added up), "centre-pixel" (of depthwise
            filters), "module:function", and "abs:" before one of these for magnitudes. All tensors are read then.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        precision: `"float64"`, or `"float32"` for large D (see `Moments`).
        device: None for the CPU, or a torch device to accumulate on.
        stripes: whether to compute stripe ratios.
        workers: processes of this machine, by default one for each core, or `Workers` of a cluster, that read a
            population of more than 4,096 networks (`weightscope.statistics.samples.over_parts`).

    UsageError for an invalid option, an unknown name or a computed coordinate of the wrong shape, or if the matrix does
    not fit into memory; DataError if fewer than 2 networks are usable, or a coordinate is not finite.

    Example:
        >>> found = covariance_across("digits.pop", kind="correlation")
        >>> found.block("stages.0.blocks.0.mlp.fc1.weight").shape
        (512, 512)
        >>> found.plot("stripes.png", means=True)
    """
    choice("kind", kind, get_args(Kind))
    choice("precision", precision, get_args(Precision))
    source, coordinates = _coordinates(source, select, computed, fold_norms)
    total = _total(source, coordinates, workers if device is None else 1)
    size = coordinates.spec.size
    found = total(partial(_moments, size, device, precision), np.dtype(precision).itemsize * size**2)
    entries = found.entries()
    matrix = (found.correlation if kind == "correlation" else found.covariance)(destroy=True)
    diagnostics: dict[str, Any] = {
        "precision": precision,
        "folded_norms": fold_norms,
        "constant": int((entries.squares == 0).sum()),
        "rank_bound": min(entries.n - 1, size),
    }
    if (snapshot := getattr(source, "snapshot", None)) is not None:
        diagnostics["at"] = f"{source.unit} {snapshot}"  # type: ignore[attr-defined]
    result = PopulationCovariance(matrix, entries.mean, entries.n, found.excluded, coordinates.spec, kind, diagnostics)
    for tensor in coordinates.computed:
        result.computed[tensor.name] = _distribution(result, entries, tensor.name)
    matrices = [t.name for t in coordinates.tensors if stripes and len(t.shape) > 1 and 1 < t.shape[0] < t.size]
    if matrices:
        _add_stripes(result, matrices, entries.mean, total)
    return result


def _coordinates(
    source: Any,
    select: str | Sequence[str] | None,
    computed: Mapping[str, Function] | Sequence[str] | None,
    fold_norms: bool,
) -> tuple[WeightSamples, Coordinates]:
    """The opened source, and what is computed of each of its networks."""
    source = opened(source)
    mlps = any(fnmatchcase(name, _MLP) for name in source.spec.names)
    default = _MLP if mlps else [t.name for t in source.spec.tensors if t.role != "statistic"]
    return source, coordinates_of(source.spec, select, computed, fold_norms, default)


def _moments(size: int, device: Any, precision: Precision, blocks: Iterable[np.ndarray]) -> Moments:
    found = Moments(size, device=device, precision=precision)
    for rows in blocks:
        found.update(rows)
    return found


def _total(source: WeightSamples, coordinates: Coordinates, workers: Workers | int | None) -> Any:
    """Adds up a function of blocks of coordinates over the parts of a source; one pass over the data, see `Total`."""

    def total(function: Callable[[Iterable[np.ndarray]], T], size: int = 0) -> T:
        def task(part: WeightSamples, _: int) -> T:
            diverged = 0

            def blocks() -> Iterator[np.ndarray]:
                nonlocal diverged
                for rows, out in ahead(usable_chunks(part, coordinates.reads.names, BLOCK)):
                    diverged += out
                    yield coordinates(rows)

            found = function(blocks())
            if isinstance(found, EntryMoments | Moments):
                found.excluded += diverged
            return found

        return over_parts(source, task, workers, size=size)

    return total


def _distribution(found: PopulationCovariance, entries: EntryMoments, name: str) -> dict[str, Any]:
    """The mean of a coordinate over networks and units, its interval over networks, and the spread of its numbers."""
    part = found.blocks[name]
    mean, std = entries.mean[part], entries.std()[part]
    matrix = found.block(name) if found.kind == "covariance" else np.nan_to_num(found.block(name)) * np.outer(std, std)
    half = -float(stdtrit(found.n - 1, 0.025)) * math.sqrt(max(matrix.mean(), 0.0) / found.n)
    ci95 = [float(mean.mean()) - half, float(mean.mean()) + half]
    return {"mean": float(mean.mean()), "ci95": ci95, "std": math.sqrt(np.square(std).mean() + mean.var())}


def _add_stripes(result: PopulationCovariance, matrices: Sequence[str], mean: np.ndarray, total: Any) -> None:
    """Stripe ratios of matrices; in the diagnostics, why some have none."""

    def terms(blocks: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Those of `stripe_terms` (n, 4 matrices) of the finite ones among the networks, block by block."""
        out = [np.empty((0, 4 * len(matrices)))]
        for block in blocks:
            tensors = result.spec.unpack(block[finite_rows(block)] - mean)
            flat = [tensors[name].reshape(*tensors[name].shape[:2], -1) for name in matrices]
            out.append(np.column_stack([stripe_terms(np.ascontiguousarray(each)) for each in flat]))
        return out

    rows = np.concatenate(total(terms))
    for i, name in enumerate(matrices):
        try:
            result.stripes[name] = stripe_ratios(rows[:, 4 * i : 4 * i + 4])
        except DataError as error:  # too few networks, or a tensor that does not vary
            result.diagnostics.setdefault("without_stripes", {})[name] = str(error)


@one_thread()
def eigenpairs(
    source: WeightSamples | str | Path,
    rank: int,
    select: str | Sequence[str] | None = "auto",
    *,
    computed: Mapping[str, Function] | Sequence[str] | None = None,
    fold_norms: bool = False,
    memory: int = 2 << 30,
    workers: Workers | int | None = None,
) -> Eigenpairs:
    """The leading eigenpairs of the covariance over a population, without the D' x D' matrix.

    Exact where the weight vectors fit into `memory` and there are no more of them than coordinates; otherwise by
    randomised subspace iteration. See `weightscope.statistics.eigenpairs.top_eigenpairs`.

    Example:
        >>> eigenpairs(Population("digits.pop"), 8, "*.mlp.fc?.weight").explained
    """
    source, coordinates = _coordinates(source, select, computed, fold_norms)
    total = _total(source, coordinates, workers)
    return top_eigenpairs(total, coordinates.spec.size, rank, memory=memory)


@one_thread()
def covariance(source: Any, select: str | Sequence[str] | None = "auto") -> "PopulationCovariance | NetworkCovariances":
    """The covariance across the networks of a population, or within one trained network.

    A population gives `covariance_across(source, select)`, anything else (and a population of a single network)
    `weightscope.analysis.within_network.covariance_within(source)`.

    Example:
        >>> covariance("digits.pop", "*.mlp.fc1.weight").plot("stripes.png", means=True)
        >>> print(covariance("efficientnet-lite0.pth").text())
    """
    if hasattr(source, "chunks") or is_population(source):
        source = opened(source)
        if len(source) > 1:
            return covariance_across(source, select)
        source = source.opened(0)
    if select != "auto":
        raise UsageError("select: applies to a population, found one network; choose a part with covariance_within")
    from weightscope.analysis.within_network import covariance_within  # torch

    return covariance_within(source)


def opened(source: Any) -> Any:
    """The population that a path names; weights in memory as they are."""
    if hasattr(source, "chunks"):
        return source
    from weightscope.population import population_in  # h5py

    return population_in(source)
