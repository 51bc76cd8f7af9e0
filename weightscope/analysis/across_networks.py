"""`covariance`: over the networks of a population, in memory or on disk, or within networks; leading eigenpairs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from scipy import stats

from weightscope._util import atomic, outputs
from weightscope._util.checks import choice
from weightscope._util.results import Result
from weightscope._util.sources import is_population
from weightscope.analysis.exchangeable import ExchangeableCovariance, exchangeable_covariance
from weightscope.errors import DataError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Computed, Coordinates
from weightscope.statistics.exchangeable import fisher_interval
from weightscope.statistics.gram import Precision
from weightscope.statistics.mlps import StripeResult, TransposedCorrelation, stripes, transposed_correlation
from weightscope.statistics.moments import BLOCK, EntryMoments, Moments, finite_rows
from weightscope.statistics.out_of_core import Eigenpairs, top_eigenpairs, write_covariance
from weightscope.statistics.samples import WeightArray, WeightSamples, ahead, usable_chunks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from weightscope.analysis.within_network import NetworkCovariances


Kind = Literal["covariance", "correlation"]
_MLP = "*.mlp.fc?.weight"


@dataclass(frozen=True, eq=False, repr=False)
class PopulationCovariance(Result):
    """A covariance or correlation matrix over networks, with the stripe ratios of the matrices in it."""

    matrix: np.ndarray  # (D', D'), in the precision of accumulation
    mean: np.ndarray  # (D',) float64
    n: int  # networks used
    excluded: int  # networks left out because they diverged or contain a non-finite number
    spec: WeightSpec  # names and shapes of the D' coordinates; its slices are the blocks of the matrix
    kind: Kind  # `"covariance"` (divisor n - 1) or `"correlation"`
    # `precision`, `folded_norms`, `constant` (coordinates without variance; their correlations are NaN), `rank_bound`,
    # and `without_stripes` and `without_transposed` (tensor -> reason) where these could not be computed
    diagnostics: dict[str, Any]
    stripes: dict[str, StripeResult] = field(default_factory=dict)  # by tensor with two axes
    # name of an MLP of which both matrices were selected -> the mean correlation of W1[i, j] with W2[j, i]
    transposed: dict[str, TransposedCorrelation] = field(default_factory=dict)
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
        """Their number and, of a snapshot, the moment: `"16 networks at epoch 4"`."""
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
            out.append("column means: over outputs, one per input; row means: over inputs, one per output")
        for name, x in self.transposed.items():
            ends = f"{x.value:+.4f} ({x.ci95[0]:+.4f} to {x.ci95[1]:+.4f})"
            out.append(f"mean correlation of fc1[i, j] with fc2[j, i] of {name} over networks: {ends}")
        if self.excluded:
            out.append(f"{self.excluded} networks are left out: they diverged or contain non-finite numbers")
        if constant := self.diagnostics.get("constant"):
            out.append(f"{constant} coordinates do not vary over the networks")
        for key, what in (("transposed", "correlation of fc1 and fc2"), ("stripes", "stripe ratios")):
            problems = self.diagnostics.get(f"without_{key}", {})
            out += [f"no {what} of `{name}`: {why}" for name, why in problems.items()]
        return out

    def to_dict(self) -> dict[str, Any]:
        out = {"n": self.n, "excluded": self.excluded, "kind": self.kind, "diagnostics": self.diagnostics}
        stripes = {
            name: {kind: {"ratio": x.value, "ci95": list(x.ci95), "p": x.p} for kind, x in result.ratios.items()}
            for name, result in self.stripes.items()
        }
        transposed = {name: asdict(found) for name, found in self.transposed.items()}
        blocks = {name: [part.start, part.stop] for name, part in self.blocks.items()}
        return out | {"blocks": blocks, "stripes": stripes, "transposed": transposed}

    def plot(self, path: str | Path | None = None, *, means: bool | None = None) -> "Figure":
        """Draw the matrix, its blocks ruled off (MLP paper, Fig. 1), or the covariance of group means.

        Means over hidden units show stripes that the noise of single entries hides; by default they are drawn where
        stripe ratios were computed, or single entries do not fit into the picture. The file (.png, .pdf, .svg) is
        written if there is a path.
        """
        from weightscope import plots

        if means is None:
            means = bool(self.stripes) or self.spec.size > plots.covariance.CELLS
        title = f"{self.kind.capitalize()} over {self.networks()}" + (", mean over hidden units" if means else "")
        groups = self.groups() if means else None
        axes = plots.covariance_map(self.matrix, self.blocks, kind=self.kind, title=title, groups=groups)
        return plots.finished(axes, path)

    def groups(self) -> dict[str, np.ndarray]:
        """For `plots.covariance_map`: the entries of each matrix that differ in the hidden unit alone.

        A vector's entries are groups of their own; the filters of a convolution are one group for each output channel.
        """
        out = {}
        for tensor in self.spec.tensors:
            axes = [n for n in tensor.shape if n != 1]
            if len(axes) == 2:
                out[tensor.name] = over_hidden_units(axes)
            elif tensor.size:
                units = axes[0] if len(axes) > 2 else tensor.size
                out[tensor.name] = np.repeat(np.arange(units), tensor.size // units)
        return out

    def save_matrix(self, path: str | Path) -> None:
        """Write `matrix`, `mean`, and the blocks' `names` and `stops` as an .npz file.

        A matrix that was computed on disk (`file=...`) is already in that file, and nothing is written.
        """
        if isinstance(self.matrix, np.memmap):
            return
        stops = np.array([part.stop for part in self.blocks.values()])
        arrays = {"matrix": self.matrix, "mean": self.mean, "names": np.array(list(self.blocks)), "stops": stops}
        outputs.save_npz(path, arrays)


def over_hidden_units(shape: Sequence[int]) -> np.ndarray:
    """The index of each entry's row or column, whichever are fewer, for a matrix flattened row by row.

    An MLP's hidden units are the longer side: fc1 (p, d) is grouped by its columns, fc2 (d, p) by its rows.
    """
    rows, columns = shape
    return np.repeat(np.arange(rows), columns) if rows < columns else np.tile(np.arange(columns), rows)


def covariance_across(
    source: WeightSamples, select: str | Sequence[str] | None = "auto", **options: Any
) -> PopulationCovariance:
    """The joint covariance of the selected tensors, and the stripe ratios of those with two axes.

    Source: MLP paper, Fig. 1 and section 3.

    Example:
        >>> covariance_across(Population("digits.pop")).plot("covariance.png")
    """
    if select == "auto":
        select = _MLP if any(fnmatchcase(name, _MLP) for name in source.spec.names) else "*"
    found = joint_covariance(source, select, **options)
    ratios: dict[str, StripeResult] = {}
    pairs: dict[str, TransposedCorrelation] = {}
    problems: dict[str, dict[str, str]] = {"without_stripes": {}, "without_transposed": {}}
    for name, shape in ((t.name, t.shape) for t in found.spec.tensors if t.name in source.spec.slices):
        if len(shape) != 2:
            continue
        try:
            ratios[name] = stripes(_tensor(source, name))
        except DataError as error:  # too few networks, or a tensor that does not vary
            problems["without_stripes"][name] = str(error)
        mlp, other = name.removesuffix(".fc1.weight"), name.replace(".fc1.weight", ".fc2.weight")
        if mlp == name or other not in found.spec.names or found.spec[other].shape != shape[::-1]:
            continue
        try:
            pairs[mlp] = transposed_correlation(_tensor(source, name), _tensor(source, other))
        except DataError as error:
            problems["without_transposed"][mlp] = str(error)
    diagnostics = found.diagnostics | {key: reasons for key, reasons in problems.items() if reasons}
    return replace(found, stripes=ratios, transposed=pairs, diagnostics=diagnostics)


def _tensor(source: WeightSamples, name: str) -> np.ndarray:
    """One tensor of all networks that did not diverge, (N, *shape)."""
    rows = np.concatenate([rows for rows, _ in usable_chunks(source, [name])])
    return rows.reshape(-1, *source.spec[name].shape)


def joint_covariance(
    source: WeightSamples,
    select: str | Sequence[str] | None = "*",
    *,
    kind: Kind = "covariance",
    computed: Sequence[str] = (),
    fold_norms: bool = False,
    precision: Precision = "float64",
    device: Any = None,
    chunk: int = BLOCK,
    file: str | Path | None = None,
    memory: int = 2 << 30,
) -> PopulationCovariance:
    """The joint covariance of any selection of tensors over the networks of a population (MLP paper, Fig. 1).

    C = sum over networks of (w - mean)(w - mean)^T / (n - 1). One pass over the file; memory is one
    D' x D' matrix and a few blocks of rows, independent of N. Diverged networks and non-finite rows are left out
    and counted in the result: print that number.

    Args:
        source: a `Population`, a `WeightArray(weights, spec)`, or `slices_as_samples(tensor)` for the
            filters or rows within one network.
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        kind: `"covariance"` or `"correlation"`.
        computed: further coordinates, such as `"center(stages.0.blocks.{i}.conv_dw.weight)"` (thesis Fig. 3.40);
            see `weightscope.statistics.coordinates`.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        precision: `"float64"`, or `"float32"` for large D (see `Moments`).
        device: None for the CPU, or a torch device to accumulate on.
        chunk: rows read at once; affects speed only.
        file: a `.npy` file in which the matrix is computed, for D' beyond memory; the result's `matrix` is then a
            read-only memory map of it. The data are read once, and once more for every panel that fits into `memory`.
        memory: bytes to use with `file`.

    UsageError for invalid or contradictory options; DataError if fewer than 2 networks are usable.

    Example:
        >>> result = joint_covariance(Population("digits.pop"), "stages.0.blocks.0.mlp.fc*.weight")
        >>> result.block("stages.0.blocks.0.mlp.fc1.weight").shape
        (512, 512)
    """
    choice("kind", kind, get_args(Kind))
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    if not coordinates.spec.size:
        raise UsageError("select: nothing to compute; expected tensors or computed coordinates, found neither")
    choice("precision", precision, get_args(Precision))
    size, correlation = coordinates.spec.size, kind == "correlation"
    passes = _Passes(source, coordinates, chunk if file is None else BLOCK)
    found: Moments | EntryMoments
    if file is None:
        found = Moments(size, device=device, precision=precision)
        for rows in passes():
            found.update(rows)
        mean, n, variance = found.mean, found.n, found.variance()
        matrix = (found.correlation if correlation else found.covariance)(destroy=True)
    elif device is not None:
        raise UsageError(f"file: a covariance on disk is computed on the CPU, found device {device}; omit one of them")
    elif Path(file).suffix != ".npy":
        raise UsageError(f"file: expected a name that ends in .npy, found {file}")
    else:
        with atomic.replacing(file) as out:
            found = write_covariance(passes, size, out, dtype=precision, correlation=correlation, memory=memory)
        mean, n, variance = found.mean, found.n, found.variance()
        matrix = np.load(file, mmap_mode="r")
    diagnostics: dict[str, Any] = {
        "precision": precision,
        "folded_norms": fold_norms,
        "constant": int((variance == 0).sum()),
    }
    diagnostics |= {"rank_bound": min(int(n) - 1, size)}
    if (moment := getattr(source, "moment", None)) is not None:
        diagnostics["at"] = f"{source.unit} {moment}"  # type: ignore[attr-defined]
    excluded = found.excluded + passes.diverged
    return PopulationCovariance(matrix, mean, n, excluded, coordinates.spec, kind, diagnostics)


def eigenpairs(
    source: WeightSamples,
    rank: int,
    select: str | Sequence[str] | None = "*",
    *,
    computed: Sequence[str] = (),
    fold_norms: bool = False,
    memory: int = 2 << 30,
) -> Eigenpairs:
    """The leading eigenpairs of the covariance over a population, without the D' x D' matrix.

    Exact where the weight vectors fit into `memory` and there are no more of them than coordinates; otherwise by
    randomised subspace iteration. See `weightscope.statistics.out_of_core.top_eigenpairs`.

    Example:
        >>> eigenpairs(Population("digits.pop"), 8, "*.mlp.fc?.weight").explained
    """
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    passes = _Passes(source, coordinates)
    found = top_eigenpairs(passes, coordinates.spec.size, rank, memory=memory)
    return replace(found, excluded=found.excluded + passes.diverged)


class _Passes:
    """The coordinates of all usable networks; each call is one more pass over the data."""

    def __init__(self, source: WeightSamples, coordinates: Coordinates, chunk: int = BLOCK) -> None:
        self._source, self._coordinates, self._chunk = source, coordinates, chunk
        self.diverged = 0

    def __call__(self) -> Iterator[np.ndarray]:
        self.diverged = 0
        for rows, out in ahead(usable_chunks(self._source, self._coordinates.reads.names, self._chunk)):
            self.diverged += out
            yield self._coordinates(rows)


@dataclass(frozen=True)
class Correlation:
    """A correlation over (network, channel), with networks as independent units."""

    name: str  # of the block, or "all blocks"
    channels: int  # of the block, or of all of them
    correlation: float  # r
    error: float  # its standard error
    ci95: tuple[float, float]  # its 95 % interval
    p: float  # two-sided


@dataclass(frozen=True, eq=False, repr=False)
class FilterMLPCorrelation(Result):
    """Central pixels against diag(W2 W1), in each block and over all blocks."""

    total: Correlation  # over all networks, blocks and channels
    blocks: tuple[Correlation, ...]
    n: int  # networks
    excluded: int  # networks left out because they diverged or are not finite

    columns: ClassVar = {
        "central pixel against diag(W2 W1)": "{block}",
        "channels": "{channels}",
        "correlation": "{correlation:+.3f}",
        "95 % interval": "{low:+.3f} to {high:+.3f}",
        "p": "{p:.2g}",
    }

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"block": x.name, "channels": x.channels, "correlation": x.correlation, "error": x.error}
            | {"low": x.ci95[0], "high": x.ci95[1], "p": x.p}
            for x in (*self.blocks, self.total)
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"networks": self.n, "excluded": self.excluded, "correlations": self.rows()}

    def summary(self) -> str:
        found, (low, high) = self.total, self.total.ci95
        excluded = f" ({self.excluded} excluded)" if self.excluded else ""
        r = f"r = {found.correlation:+.3f} ({low:+.3f} to {high:+.3f})"
        return f"{self.n} networks{excluded}, {r}, p = {found.p:.2g}"


def filter_mlp_correlation(source: WeightSamples) -> FilterMLPCorrelation:
    """The correlation of the central pixel of each depthwise filter with diag(W2 W1) of the MLP in its block.

        r = sum f d / sqrt(sum f^2 sum d^2),   d_c = (W2 W1)_cc,

    with sums over networks, blocks and channels c, of the deviations of the central pixel f_c and of d_c from their
    means over the networks and channels of their block. sum f d is a moment of third order of the weights, and the
    variance of d one of fourth order. So it is no entry of a covariance of weights: normal weights of mean zero do not
    have it, whatever their covariance, and a structure that is fitted to covariances does not reproduce it.

    Channels and blocks of one network depend on each other. The standard error is that of the delta method over
    networks, with psi_k = a_k / sqrt(B C) - (r / 2) (b_k / B + c_k / C) for the sums a_k, b_k and c_k of f d, f^2 and
    d^2 in network k, and A, B and C over all; interval and p-value are Student's with N - 1 degrees of freedom
    on Fisher's scale.

    AnatomyError if the networks have no depthwise convolution with an MLP of as many channels in its block, UsageError
    if the filters have no central pixel, DataError if fewer than 3 networks are usable or numbers do not vary.

    Source: thesis 3.4.3, Fig. 3.40.

    Example:
        >>> print(filter_mlp_correlation(Population("digits.pop")))
    """
    from weightscope.anatomy import filter_mlps  # imports torch

    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in source.spec.tensors}
    parts = filter_mlps(zeros)
    pairs = []
    for part in parts:
        (fc1,), (fc2,) = part.mlp.parameters["fc1"], part.mlp.parameters["fc2"]
        pairs.append((Computed("center", part.parameters), Computed("diag", (fc2, fc1))))
    read = source.spec.select([name for pair in pairs for one in pair for name in one.tensors])
    values: list[list[list[np.ndarray]]] = []
    excluded = 0
    for rows, diverged in usable_chunks(source, read.names):
        finite = finite_rows(rows)
        excluded += diverged + int((~finite).sum())
        tensors = {t.name: rows[finite][:, read.slices[t.name]].reshape(-1, *t.shape) for t in read.tensors}
        values.append([[one(tensors).astype(np.float64) for one in pair] for pair in pairs])
    blocks = [tuple(np.concatenate(side) for side in zip(*found, strict=True)) for found in zip(*values, strict=True)]
    n = len(blocks[0][0])
    if n < 3:
        raise DataError(f"expected at least 3 networks for a standard error, found {n} ({excluded} excluded)")
    sums = [_sums(part.name, *block) for part, block in zip(parts, blocks, strict=True)]
    sizes = [part.filters.channels for part in parts]
    found = [_correlation(part.name, size, s) for part, size, s in zip(parts, sizes, sums, strict=True)]
    total = _correlation("all blocks", sum(sizes), np.sum(sums, axis=0))
    return FilterMLPCorrelation(total, tuple(found), n, excluded)


def _sums(name: str, pixels: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """For each network the sums over channels of f d, f^2 and d^2, (3, N), of two arrays (N, C)."""
    f, d = pixels - pixels.mean(), diagonal - diagonal.mean()
    out = np.stack([(f * d).sum(axis=1), np.square(f).sum(axis=1), np.square(d).sum(axis=1)])
    if not (out[1:].sum(axis=1) > 0).all():
        raise DataError(f"`{name}`: central pixels or the diagonal of W2 W1 do not vary between networks and channels")
    return out


def _correlation(name: str, channels: int, sums: np.ndarray) -> Correlation:
    n = sums.shape[1]
    a, b, c = sums.sum(axis=1)
    r = float(a / math.sqrt(b * c))
    psi = sums[0] / math.sqrt(b * c) - r / 2 * (sums[1] / b + sums[2] / c)
    error = math.sqrt(n / (n - 1) * float(np.square(psi - psi.mean()).sum()))
    interval, _, p = fisher_interval(r, error, stats.t(n - 1))
    return Correlation(name, channels, r, error, interval, p)


ACROSS = ("kind", "computed", "fold_norms", "precision", "device", "chunk", "file", "memory")
WITHIN = ("part", "labels", "config", "keep", "seed", "separability")


def covariance(
    source: Any,
    select: str | Sequence[str] | None = "auto",
    *,
    network: int | None = None,
    exchangeable: bool = False,
    permutations: Any = None,
    **options: Any,
) -> "PopulationCovariance | NetworkCovariances | ExchangeableCovariance":
    """Covariances over the networks of a population, or within one or several trained networks.

    A population (folder, `Population` or `WeightArray`) gives the joint covariance of its tensors over networks, with
    stripe ratios: a `PopulationCovariance`. Anything else gives the covariances of the filters, rows, columns or
    patches of each layer: a `NetworkCovariances`; so does a population with `network`, or with an option of these.
    With `exchangeable`, either gives the covariance averaged over the permutations of hidden units that leave the
    function unchanged: an `ExchangeableCovariance`, which shows what is correlated within and across layers.

    Args:
        source: a population, a path (.safetensors, .pt, .pth, a model folder), `hf://org/name[@revision]`, a
            `Checkpoint`, an `nn.Module`, a state dict, or a list of such networks.
        select: of a population: patterns of tensor names; "auto" for the MLP matrices (`*.mlp.fc?.weight`) of a
            network that has them and all tensors of another one; None for computed coordinates only.
        network: index of one network of a population's folder, whose layers are analysed.
        exchangeable: average over permutations of hidden units; `select` is then "*" by default.
        permutations: with `exchangeable`: those of one's own, see `exchangeable_covariance`.
        options: of a population: `kind`, `computed`, `fold_norms`, `precision`, `device`, `chunk`, `file`, `memory`,
            see `joint_covariance`; within networks: `part`, `labels`, `config`,
            `keep`, `seed`, `separability`, see `weightscope.analysis.within_network.covariance_within`.

    UsageError for an invalid option, or one of the other kind of source; DataError if a source cannot be read, or too
    few networks or samples are finite; AnatomyError, with the parts that there are, if a network has no such part.

    Example:
        >>> covariance("digits.pop", "*.mlp.fc1.weight", kind="correlation").plot("stripes.png", means=True)
        >>> print(covariance("efficientnet-lite0.pth", part="filters").text())
    """
    if unknown := sorted(options.keys() - {*ACROSS, *WITHIN}):
        known = ", ".join((*ACROSS, *WITHIN))
        raise UsageError(f"covariance: unknown option {', '.join(unknown)}; expected some of {known}")
    within = [name for name in WITHIN if name in options] + ["network"] * (network is not None)
    population = _population(source)
    if getattr(population, "moment", 0) is None and len(population) == 1:
        source, population = f"{population.path}::0", None
    if exchangeable:
        if options or network is not None:
            given = ", ".join([*options, *(["network"] if network is not None else [])])
            raise UsageError(f"exchangeable: takes `select` only, found {given}")
        samples = _one_network(source) if population is None else population
        return exchangeable_covariance(samples, "*" if select in ("auto", None) else select, permutations=permutations)
    if permutations is not None:
        raise UsageError("permutations: requires exchangeable")
    if population is not None and not within:
        return covariance_across(population, select, **options)
    if across := [name for name in ACROSS if name in options] + ["select"] * (select != "auto"):
        reason = f"together with {', '.join(within)}" if population is not None else "for a trained network"
        raise UsageError(f"{', '.join(across)}: applies to a population, found {reason}")
    from weightscope.analysis.within_network import covariance_within  # torch

    sources = list(source) if isinstance(source, list | tuple) else [source]
    labels = options.pop("labels", None) or [None] * len(sources)
    pairs = [_network(one, network) for one in sources]
    names = [own if label is None else label for (_, own), label in zip(pairs, labels, strict=False)]
    return covariance_within(*(one for one, _ in pairs), labels=names + list(labels[len(names) :]), **options)


def _population(source: Any) -> Any:
    """The population that a source is or names; None for anything else."""
    if not is_population(source):
        return source if hasattr(source, "chunks") and hasattr(source, "spec") else None
    from weightscope.population import population_in  # h5py

    return population_in(source)


def _one_network(source: Any) -> WeightArray:
    """The floating-point tensors of one network as a population of one, whose channels are the samples."""
    from weightscope.anatomy.tensors import numbered  # torch
    from weightscope.population import open_network  # h5py

    if isinstance(source, list | tuple):
        raise UsageError(f"exchangeable: expected a population or one network, found {len(source)} sources")
    found: Any = open_network(source)
    tensors = found.state_dict() if hasattr(found, "state_dict") else found
    read = {name: tensors[name] for name in numbered(tensors)}
    chosen = {name: x.detach().double().cpu().numpy() for name, x in read.items() if x.is_floating_point()}
    spec = WeightSpec(TensorSpec(name, tuple(value.shape)) for name, value in chosen.items())
    return WeightArray(spec.pack(chosen, dtype=float)[None], spec)


def _network(source: Any, index: int | None) -> tuple[Any, str | None]:
    """A network for `covariance_within`, and its label if it is one of a population."""
    population = _population(source)
    if population is None:
        if index is not None:
            raise UsageError(f"network: selects within a population's folder, found {source}")
        return source, None
    if not hasattr(population, "network"):
        raise UsageError(f"expected a population's folder, found {type(source).__name__}: it has no networks to build")
    return population.opened(index or 0), f"{population.path.name}::{index or 0}"
