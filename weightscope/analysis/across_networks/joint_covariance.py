"""`covariance`: the covariance of weights across a population, or of slices within one network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.coordinates import Coordinates
from weightscope.statistics.eigen import Eigenpairs, top_eigenpairs
from weightscope.statistics.gram import Precision
from weightscope.statistics.moments import BLOCK, Moments
from weightscope.statistics.panels import write_covariance
from weightscope.statistics.samples import WeightSamples, ahead, usable_chunks

Kind = Literal["covariance", "correlation"]


@dataclass(frozen=True)
class CovarianceResult:
    """A covariance or correlation matrix with what it is of.

    Attributes:
        matrix: (D', D'), in the precision of accumulation.
        mean: (D',) float64.
        n: networks that count.
        excluded: networks left out because they diverged or hold a number that is not finite.
        spec: what the D' coordinates are; its slices are the blocks of the matrix.
        kind: `"covariance"` (divisor n - 1) or `"correlation"`.
        diagnostics: plain numbers and texts: `precision`, `folded_norms`, `constant` (coordinates without
            variance; their correlations are NaN), `rank_bound` (a rank that the matrix cannot exceed).
    """

    matrix: np.ndarray
    mean: np.ndarray
    n: int
    excluded: int
    spec: WeightSpec
    kind: Kind
    diagnostics: dict[str, Any]

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


def covariance(
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
) -> CovarianceResult:
    """The joint covariance of any selection of tensors over the networks of a population (MLP paper, Fig. 1).

    C = sum over networks of (w - mean)(w - mean)^T / (n - 1). One pass over the file; memory is one
    D' x D' matrix and a few blocks of rows, whatever N is. Diverged networks and rows that are not finite are
    left out and counted in the result: print that number.

    Args:
        source: a `Population`, an `WeightArray(weights, spec)`, or `slices_as_samples(tensor)` for the
            filters or rows within one network.
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        kind: `"covariance"` or `"correlation"`.
        computed: further coordinates, such as `"center(stages.0.blocks.{i}.conv_dw.weight)"` (thesis Fig. 3.40);
            see `weightscope.statistics.computed`.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        precision: `"float64"`, or `"float32"` for large D (see `Moments`).
        device: None for the CPU, or a torch device to accumulate on.
        chunk: rows read at once; buys speed only.
        file: a `.npy` file on which the matrix is made, for D' beyond memory; the result's `matrix` is then a
            read-only map of it. The data are read once for every panel that fits into `memory`, and once more.
        memory: bytes to use with `file`.

    Raises:
        UsageError: if a pattern or an expression fits nothing, `kind` is unknown, `memory` is too small, or `file` and
            `device` are both given.
        DataError: if fewer than 2 networks are usable.

    Example:
        >>> result = covariance(Population("digits.pop"), "stages.0.blocks.0.mlp.fc*.weight")
        >>> result.block("stages.0.blocks.0.mlp.fc1.weight").shape
        (512, 512)
    """
    if kind not in get_args(Kind):
        raise UsageError(f"kind must be one of {get_args(Kind)}, found {kind!r}")
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    if not coordinates.spec.size:
        raise UsageError("nothing to compute: the selection is empty and there are no computed coordinates")
    if file is not None:
        if device is not None:
            raise UsageError(f"a covariance on the disk is computed on the CPU, found device {device}; leave one out")
        return _on_disk(source, coordinates, Path(file), kind=kind, dtype=precision, memory=memory)
    chunks = ahead(usable_chunks(source, coordinates.reads.names, chunk))
    moments = Moments(coordinates.spec.size, device=device, precision=precision)
    diverged = 0
    for rows, out in chunks:
        diverged += out
        moments.update(coordinates(rows))
    mean, n, variance = moments.mean, moments.n, moments.variance()
    matrix = (moments.covariance if kind == "covariance" else moments.correlation)(destroy=True)
    diagnostics = _diagnostics(precision, fold_norms, variance, n)
    return CovarianceResult(matrix, mean, n, diverged + moments.excluded, coordinates.spec, kind, diagnostics)


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
    randomised subspace iteration. See `weightscope.statistics.eigen.top_eigenpairs`.

    Args:
        source: as for `covariance`.
        rank: how many, at most min(N - 1, D').
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        computed: further coordinates, as for `covariance`.
        fold_norms: as for `covariance`.
        memory: bytes that the weight vectors may take.

    Raises:
        UsageError: if a pattern fits nothing or the rank is too high.
        DataError: if fewer than 2 networks are usable.

    Example:
        >>> eigenpairs(Population("digits.pop"), 8, "*.mlp.fc?.weight").explained
    """
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    passes = _Passes(source, coordinates)
    found = top_eigenpairs(passes, coordinates.spec.size, rank, memory=memory)
    return replace(found, excluded=found.excluded + passes.diverged)


class _Passes:
    """The coordinates of all usable networks, as often as they are asked for."""

    def __init__(self, source: WeightSamples, coordinates: Coordinates) -> None:
        self._source, self._coordinates = source, coordinates
        self.diverged = 0

    def __call__(self) -> Iterator[np.ndarray]:
        self.diverged = 0
        for rows, out in ahead(usable_chunks(self._source, self._coordinates.reads.names, BLOCK)):
            self.diverged += out
            yield self._coordinates(rows)


def _on_disk(
    source: WeightSamples, coordinates: Coordinates, file: Path, *, kind: Kind, dtype: Precision, memory: int
) -> CovarianceResult:
    if file.suffix != ".npy":
        raise UsageError(f"a covariance beyond memory is written as .npy, found {file}")
    if dtype not in get_args(Precision):
        raise UsageError(f"precision must be one of {get_args(Precision)}, found {dtype!r}")
    passes, size = _Passes(source, coordinates), coordinates.spec.size
    with atomic.replacing(file) as out:
        known = write_covariance(passes, size, out, dtype=dtype, correlation=kind == "correlation", memory=memory)
    diagnostics = _diagnostics(dtype, coordinates.folded, known.variance, known.n)
    matrix = np.load(file, mmap_mode="r")
    return CovarianceResult(
        matrix, known.mean, known.n, known.excluded + passes.diverged, coordinates.spec, kind, diagnostics
    )


def _diagnostics(precision: Precision, folded: bool, variance: np.ndarray, n: int) -> dict[str, Any]:
    return {
        "precision": precision,
        "folded_norms": folded,
        "constant": int((variance == 0).sum()),
        "rank_bound": min(n - 1, len(variance)),
    }
