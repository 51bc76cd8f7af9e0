"""`covariance`: the covariance of weights across a population, or of slices within one network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.coordinates import Coordinates
from weightscope.statistics.gram import Precision
from weightscope.statistics.moments import BLOCK, Moments
from weightscope.statistics.sources import Source, ahead, usable_chunks

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
    source: Source,
    select: str | Sequence[str] | None = "*",
    *,
    kind: Kind = "covariance",
    computed: Sequence[str] = (),
    fold_norms: bool = False,
    precision: Precision = "float64",
    device: Any = None,
    chunk: int = BLOCK,
) -> CovarianceResult:
    """The joint covariance of any selection of tensors over the networks of a population (MLP paper, Fig. 1).

    C = sum over networks of (w - mean)(w - mean)^T / (n - 1). One pass over the file; memory is one
    D' x D' matrix and a few blocks of rows, whatever N is. Diverged networks and rows that are not finite are
    left out and counted in the result: print that number.

    Args:
        source: a `Population`, an `ArraySource(weights, spec)`, or `slices_as_samples(tensor)` for the
            filters or rows within one network.
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        kind: `"covariance"` or `"correlation"`.
        computed: further coordinates, such as `"center(stages.0.blocks.{i}.conv_dw.weight)"` (thesis Fig. 3.40);
            see `weightscope.statistics.computed`.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        precision: `"float64"`, or `"float32"` for large D (see `Moments`).
        device: None for the CPU, or a torch device to accumulate on.
        chunk: rows read at once; buys speed only.

    Raises:
        UsageError: if a pattern or an expression fits nothing, or `kind` is unknown.
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
    chunks = ahead(usable_chunks(source, coordinates.reads.names, chunk))
    moments = Moments(coordinates.spec.size, device=device, precision=precision)
    diverged = 0
    for rows, out in chunks:
        diverged += out
        moments.update(coordinates(rows))
    mean, n, variance = moments.mean, moments.n, moments.variance()
    matrix = (moments.covariance if kind == "covariance" else moments.correlation)(destroy=True)
    diagnostics = {
        "precision": precision,
        "folded_norms": fold_norms,
        "constant": int((variance == 0).sum()),
        "rank_bound": min(n - 1, coordinates.spec.size),
    }
    return CovarianceResult(matrix, mean, n, diverged + moments.excluded, coordinates.spec, kind, diagnostics)
