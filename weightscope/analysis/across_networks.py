"""`covariance`: over the networks of a population, in memory or on disk, or within networks; leading eigenpairs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np

from weightscope._util import atomic, outputs
from weightscope._util.checks import choice
from weightscope._util.results import Result
from weightscope._util.sources import is_population
from weightscope._util.threads import one_thread
from weightscope._util.workers import Workers
from weightscope.analysis.exchangeable import ExchangeableCovariance, exchangeable_covariance
from weightscope.errors import DataError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Coordinates
from weightscope.statistics.mlps import (
    StripeResult,
    TransposedCorrelation,
    mean_correlation,
    stripe_ratios,
    stripe_terms,
    transposed_terms,
)
from weightscope.statistics.moments import BLOCK, EntryMoments, Moments, Precision
from weightscope.statistics.out_of_core import Eigenpairs, top_eigenpairs, write_covariance
from weightscope.statistics.samples import (
    Keep,
    WeightArray,
    WeightSamples,
    ahead,
    finite_chunks,
    first_chunks,
    literal,
    over_parts,
    usable_chunks,
)

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
            out.append(f"left out: {self.excluded}, diverged, not finite, or equal to an earlier network")
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
        title = f"{self.kind.capitalize()}{' of group means' if means else ''} over {self.networks()}"
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


@one_thread()
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
    matrices = [t.name for t in found.spec.tensors if t.name in source.spec.slices and len(t.shape) == 2]
    if not matrices:
        return found
    over = {key: options[key] for key in ("workers", "keep_sums") if key in options}
    ratios, pairs, problems = _matrix_statistics(source, source.spec.select(literal(matrices)), **over)
    diagnostics = found.diagnostics | {key: reasons for key, reasons in problems.items() if reasons}
    return replace(found, stripes=ratios, transposed=pairs, diagnostics=diagnostics)


def _matrix_statistics(
    source: WeightSamples, spec: WeightSpec, workers: Workers | int | None = None, keep_sums: bool = True
) -> tuple[dict[str, StripeResult], dict[str, TransposedCorrelation], dict[str, dict[str, str]]]:
    """Stripe ratios of matrices, and correlations of MLPs' pairs of them; and why some have none.

    Terms of each network are about the means of all networks; of a population of several parts about those of its first
    4,096 usable ones, so that they need not be computed again when it grows. Ratios and correlations are then those
    about all, and only their errors are of terms about the first, in units of their deviations; where means or
    variances of these differ from all by more than chance, as in an import that is sorted, terms are computed again.
    """
    known = EntryMoments(spec.size, first_chunks(source, spec.names))
    names = {t.name.removesuffix(".fc1.weight"): t.name for t in spec if t.name.endswith(".fc1.weight")}
    second = {mlp: name.replace(".fc1.weight", ".fc2.weight") for mlp, name in names.items()}
    mlps = [m for m in names if second[m] in spec.slices and spec[second[m]].shape == spec[names[m]].shape[::-1]]
    terms = _Terms(spec, [(names[mlp], second[mlp]) for mlp in mlps], known)
    keep = Keep(terms.none, ("matrices", spec.to_json(), known.mean, known.squares)) if keep_sums else None
    found = over_parts(source, terms, workers, keep=keep)
    found.flush()
    if terms.differ(found):
        terms = _Terms(spec, terms.pairs, found.entries)
        found = over_parts(source, terms, workers)
        found.flush()
    found.rows -= terms.of(spec.unpack((found.entries.mean - terms.mean)[None]))  # about the means of all
    ratios: dict[str, StripeResult] = {}
    pairs: dict[str, TransposedCorrelation] = {}
    problems: dict[str, dict[str, str]] = {"without_stripes": {}, "without_transposed": {}}
    for i, (name, shape) in enumerate((t.name, t.shape) for t in spec.tensors):
        try:
            ratios[name] = stripe_ratios(found.rows[:, 4 * i : 4 * i + 4], shape, found.excluded)
        except DataError as error:  # too few networks, or a tensor that does not vary
            problems["without_stripes"][name] = str(error)
    moved, scales = spec.unpack(found.entries.mean - terms.mean), spec.unpack(found.entries.deviation())
    for i, (mlp, (one, other)) in enumerate(zip(mlps, terms.pairs, strict=True)):
        scale, shares = scales[one] * scales[other].T, found.rows[:, 4 * len(spec) + i]
        products = (found.products[i] - len(shares) * moved[one] * moved[other].T)[scale > 0] / scale[scale > 0]
        try:
            if products.size:
                shares = shares + (products.mean() - shares.sum()) / len(shares)
            pairs[mlp] = mean_correlation(shares, products.size)
        except DataError as error:
            problems["without_transposed"][mlp] = str(error)
    return ratios, pairs, problems


class _Terms:
    """Terms of the statistics of matrices, of each network of a part: four of each matrix, one of each pair of them."""

    def __init__(self, spec: WeightSpec, pairs: Sequence[tuple[str, str]], known: EntryMoments) -> None:
        self.spec, self.pairs, self.known, self.mean = spec, pairs, known, known.mean
        self.scales = spec.unpack(known.deviation())

    def none(self) -> "_Rows":
        """Those of no network."""
        return _Rows(4 * len(self.spec) + len(self.pairs), self.spec.size, [self.spec[a].shape for a, _ in self.pairs])

    def differ(self, found: "_Rows") -> bool:
        """Whether means or variances of the known networks are not those of a sample of all (p < 1e-4 in a tensor)."""
        known, now = self.known, found.entries
        if not known.n or ((known.squares > 0) != (now.squares > 0)).any():
            return known.n > 0
        for i, (name, shift) in enumerate(self.spec.unpack((now.mean - known.mean)[None]).items()):
            part = self.spec.slices[name]
            before, after = (x.squares[part].sum() / max(x.n - 1, 1) for x in (known, now))
            terms = found.rows[:, 4 * i : 4 * i + 4]
            chance = 4 * shift.size * terms[:, 0].std() / known.n**0.5  # of a sum of variances
            if abs(after - before) > chance or (stripe_terms(shift) > 16 / known.n * terms.mean(axis=0)).any():
                return True
        return False

    def __call__(self, part: WeightSamples, _: int) -> "_Rows":
        out = self.none()
        for rows, excluded in finite_chunks(part, self.spec.names, BLOCK):
            out.excluded += excluded
            if not len(rows):
                continue
            out.entries.update(rows)
            tensors = self.spec.unpack(rows - self.mean)
            out.more.append(self.of(tensors))
            for i, pair in enumerate(self.pairs):
                out.products[i] += np.einsum("nij,nji->ij", *self._of(pair, tensors))
        return out

    def of(self, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """The terms (n, K) of deviations of n networks."""
        columns = [stripe_terms(np.ascontiguousarray(tensors[name])) for name in self.spec.names]
        pairs = [transposed_terms(*self._of(p, tensors), *self._of(p, self.scales))[0] for p in self.pairs]
        return np.column_stack([*columns, *pairs])

    @staticmethod
    def _of(pair: tuple[str, str], tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return tensors[pair[0]], tensors[pair[1]]


class _Rows:
    """Numbers of consecutive networks, (N, K), moments of their D weights, and sums of products of pairs of these."""

    summed = ("excluded", "rows", "entries", "products")

    def __init__(self, width: int, size: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self.excluded, self.rows, self.more = 0, np.empty((0, width)), list[np.ndarray]()
        self.entries = EntryMoments(size)
        self.products = {i: np.zeros(shape) for i, shape in enumerate(shapes)}

    def flush(self) -> None:
        """Put what was added into `rows`."""
        self.rows, self.more = np.concatenate([self.rows, *self.more]), []

    def __iadd__(self, other: "_Rows") -> "_Rows":
        self.excluded += other.excluded
        self.more += [other.rows, *other.more]
        self.entries += other.entries
        for i, products in other.products.items():
            self.products[i] += products
        return self


@one_thread()
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
    workers: Workers | int | None = None,
    keep_sums: bool = True,
) -> PopulationCovariance:
    """The joint covariance of any selection of tensors over the networks of a population (MLP paper, Fig. 1).

    C = sum over networks of (w - mean)(w - mean)^T / (n - 1). One pass over the file; memory is one
    D' x D' matrix and a few blocks of rows, independent of N. Diverged networks and non-finite rows are left out
    and counted in the result: print that number.

    Args:
        source: a `Population` or a `WeightArray(weights, spec)`.
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
        memory: bytes to use with `file`, in each process.
        workers: processes of this machine, by default one for each core, or `Workers` of a cluster, that read a
            population of more than 4,096 networks (`weightscope.statistics.samples.over_parts`).
        keep_sums: whether sums over a population's first parts are kept in its folder, at most 1 GiB, and used when it
            has grown (`weightscope.statistics.samples`); not those of `file` or a device.

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
    total = _total(source, coordinates, workers if device is None else 1, chunk if file is None else BLOCK)
    found: Any
    if file is None:
        function, keep = partial(_moments, size, device, precision), None
        if keep_sums and device is None:
            about = coordinates.spec.to_json(), coordinates.reads.names, fold_norms, precision
            keep = Keep(partial(function, ()), ("moments", *about))
        found = total(function, np.dtype(precision).itemsize * size**2, keep)
        mean, n, variance = found.mean, found.n, found.variance()
        matrix = (found.correlation if correlation else found.covariance)(destroy=True)
    elif device is not None:
        raise UsageError(f"file: a covariance on disk is computed on the CPU, found device {device}; omit one of them")
    elif Path(file).suffix != ".npy":
        raise UsageError(f"file: expected a name that ends in .npy, found {file}")
    else:
        with atomic.replacing(file) as out:
            found = write_covariance(total, size, out, dtype=precision, correlation=correlation, memory=memory)
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
    return PopulationCovariance(matrix, mean, n, found.excluded, coordinates.spec, kind, diagnostics)


def _moments(size: int, device: Any, precision: Precision, blocks: Iterable[np.ndarray]) -> Moments:
    found = Moments(size, device=device, precision=precision)
    for rows in blocks:
        found.update(rows)
    return found


@one_thread()
def eigenpairs(
    source: WeightSamples,
    rank: int,
    select: str | Sequence[str] | None = "*",
    *,
    computed: Sequence[str] = (),
    fold_norms: bool = False,
    memory: int = 2 << 30,
    workers: Workers | int | None = None,
) -> Eigenpairs:
    """The leading eigenpairs of the covariance over a population, without the D' x D' matrix.

    Exact where the weight vectors fit into `memory` and there are no more of them than coordinates; otherwise by
    randomised subspace iteration. See `weightscope.statistics.out_of_core.top_eigenpairs`.

    Example:
        >>> eigenpairs(Population("digits.pop"), 8, "*.mlp.fc?.weight").explained
    """
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    total = _total(source, coordinates, workers)
    return top_eigenpairs(total, coordinates.spec.size, rank, memory=memory)


def _total(source: WeightSamples, coordinates: Coordinates, workers: Workers | int | None, chunk: int = BLOCK) -> Any:
    """Adds up a function of blocks of coordinates over the parts of a source; one pass over the data, see `Total`."""

    def total(function: Callable[[Iterable[np.ndarray]], T], size: int = 0, keep: Keep | None = None) -> T:
        def task(part: WeightSamples, _: int) -> T:
            diverged = 0

            def blocks() -> Iterator[np.ndarray]:
                nonlocal diverged
                for rows, out in ahead(usable_chunks(part, coordinates.reads.names, chunk)):
                    diverged += out
                    yield coordinates(rows)

            found = function(blocks())
            if isinstance(found, EntryMoments | Moments):
                found.excluded += diverged
            return found

        return over_parts(source, task, workers, size=size, keep=keep)

    return total


ACROSS = ("kind", "computed", "fold_norms", "precision", "device", "chunk", "file", "memory")
WITHIN = ("part", "labels", "config", "keep", "seed")


@one_thread()
def covariance(
    source: Any,
    select: str | Sequence[str] | None = "auto",
    *,
    network: int | None = None,
    exchangeable: bool = False,
    permutations: Any = None,
    workers: Workers | int | None = None,
    keep_sums: bool = True,
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
        workers: of a population of more than 4,096 networks, see `joint_covariance`.
        keep_sums: see `joint_covariance`.
        options: of a population: `kind`, `computed`, `fold_norms`, `precision`, `device`, `chunk`, `file`, `memory`,
            see `joint_covariance`; within networks: `part`, `labels`, `config`,
            `keep`, `seed`, see `weightscope.analysis.within_network.covariance_within`.

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
        select = "*" if select in ("auto", None) else select
        over: dict[str, Any] = {"workers": workers, "keep_sums": keep_sums}
        return exchangeable_covariance(samples, select, permutations=permutations, **over)
    if permutations is not None:
        raise UsageError("permutations: requires exchangeable")
    if population is not None and not within:
        return covariance_across(population, select, workers=workers, keep_sums=keep_sums, **options)
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
