"""The covariance of weights over the networks of a population, in memory or on disk, and its leading eigenpairs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import numpy as np

from weightscope._util import atomic
from weightscope._util.checks import choice
from weightscope.analysis.across_networks.result import Kind, PopulationCovariance
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.coordinates import Coordinates
from weightscope.statistics.eigen import Eigenpairs, top_eigenpairs
from weightscope.statistics.gram import Precision
from weightscope.statistics.group_means import StripeResult, stripes
from weightscope.statistics.moments import BLOCK, Moments
from weightscope.statistics.panels import write_covariance
from weightscope.statistics.samples import WeightSamples, ahead, usable_chunks
from weightscope.statistics.transposed_pairs import TransposedCorrelation, transposed_correlation

_MLP = "*.mlp.fc?.weight"


def covariance_across(
    source: WeightSamples, select: str | Sequence[str] | None = "auto", **options: Any
) -> PopulationCovariance:
    """The joint covariance of the selected tensors, and the stripe ratios of those with two axes.

    Args:
        source: a `Population`, or a `WeightArray(weights, spec)`.
        select: patterns of tensor names; "auto" for the MLP matrices (`*.mlp.fc?.weight`) of a network that has them
            and all tensors of another one; None for computed coordinates only.
        options: see `joint_covariance`.

    Raises:
        UsageError: see `joint_covariance`.
        DataError: if fewer than 2 networks are usable.

    Source: MLP paper, Fig. 1 and section 3.

    Example:
        >>> covariance_across(Population("digits.pop")).plot("covariance.png")
    """
    if select == "auto":
        select = _MLP if any(fnmatchcase(name, _MLP) for name in source.spec.names) else "*"
    found = joint_covariance(source, select, **options)
    ratios: dict[str, StripeResult] = {}
    problems: dict[str, str] = {}
    for tensor in found.spec.tensors:
        if len(tensor.shape) == 2 and tensor.name in source.spec.slices:
            try:
                ratios[tensor.name] = stripes(_tensor(source, tensor.name))
            except DataError as error:  # too few networks, or a tensor that does not vary
                problems[tensor.name] = str(error)
    pairs, apart = _transposed(source, found.spec)
    diagnostics = found.diagnostics | ({"without_stripes": problems} if problems else {})
    diagnostics |= {"without_transposed": apart} if apart else {}
    return replace(found, stripes=ratios, transposed=pairs, diagnostics=diagnostics)


def _transposed(source: WeightSamples, spec: WeightSpec) -> tuple[dict[str, TransposedCorrelation], dict[str, str]]:
    """The correlation of W1[i, j] with W2[j, i] for the MLPs of which both matrices are selected, and problems."""
    out, problems = {}, {}
    for name in spec.names:
        mlp, other = name.removesuffix(".fc1.weight"), name.replace(".fc1.weight", ".fc2.weight")
        if mlp == name or other not in spec.names or spec[name].shape != spec[other].shape[::-1]:
            continue
        try:
            out[mlp] = transposed_correlation(_tensor(source, name), _tensor(source, other))
        except DataError as error:  # too few networks, or weights that do not vary
            problems[mlp] = str(error)
    return out, problems


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
            see `weightscope.statistics.computed`.
        fold_norms: fold each normalisation layer's gain and bias into the next linear map first.
        precision: `"float64"`, or `"float32"` for large D (see `Moments`).
        device: None for the CPU, or a torch device to accumulate on.
        chunk: rows read at once; affects speed only.
        file: a `.npy` file in which the matrix is computed, for D' beyond memory; the result's `matrix` is then a
            read-only memory map of it. The data are read once, and once more for every panel that fits into `memory`.
        memory: bytes to use with `file`.

    Raises:
        UsageError: if a pattern or an expression matches nothing, `kind` is unknown, `memory` is too small, or both
            `file` and `device` are given.
        DataError: if fewer than 2 networks are usable.

    Example:
        >>> result = joint_covariance(Population("digits.pop"), "stages.0.blocks.0.mlp.fc*.weight")
        >>> result.block("stages.0.blocks.0.mlp.fc1.weight").shape
        (512, 512)
    """
    choice("kind", kind, get_args(Kind))
    coordinates = Coordinates(source.spec, select, computed=computed, fold_norms=fold_norms)
    if not coordinates.spec.size:
        raise UsageError("select: nothing to compute; expected tensors or computed coordinates, found neither")
    if file is not None:
        if device is not None:
            raise UsageError(
                f"file: a covariance on disk is computed on the CPU, found device {device}; omit one of them"
            )
        return _on_disk(source, coordinates, Path(file), kind=kind, dtype=precision, memory=memory)
    moments = Moments(coordinates.spec.size, device=device, precision=precision)
    passes = _Passes(source, coordinates, chunk)
    for rows in passes():
        moments.update(rows)
    mean, n, excluded = moments.mean, moments.n, passes.diverged + moments.excluded
    diagnostics = _diagnostics(precision, fold_norms, moments.variance(), n)
    matrix = (moments.covariance if kind == "covariance" else moments.correlation)(destroy=True)
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
    randomised subspace iteration. See `weightscope.statistics.eigen.top_eigenpairs`.

    Args:
        source: as for `joint_covariance`.
        rank: number of pairs, at most min(N - 1, D').
        select: patterns as in `WeightSpec.select`; None for computed coordinates only.
        computed: further coordinates, as for `joint_covariance`.
        fold_norms: as for `joint_covariance`.
        memory: bytes that the weight vectors may take.

    Raises:
        UsageError: if a pattern matches nothing or the rank is too high.
        DataError: if fewer than 2 networks are usable.

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


def _on_disk(
    source: WeightSamples, coordinates: Coordinates, file: Path, *, kind: Kind, dtype: Precision, memory: int
) -> PopulationCovariance:
    if file.suffix != ".npy":
        raise UsageError(f"file: expected a name that ends in .npy, found {file}")
    choice("precision", dtype, get_args(Precision))
    passes, size = _Passes(source, coordinates), coordinates.spec.size
    with atomic.replacing(file) as out:
        known = write_covariance(passes, size, out, dtype=dtype, correlation=kind == "correlation", memory=memory)
    diagnostics = _diagnostics(dtype, coordinates.folded, known.variance, known.n)
    matrix = np.load(file, mmap_mode="r")
    return PopulationCovariance(
        matrix, known.mean, known.n, known.excluded + passes.diverged, coordinates.spec, kind, diagnostics
    )


def _diagnostics(precision: Precision, folded: bool, variance: np.ndarray, n: int) -> dict[str, Any]:
    return {
        "precision": precision,
        "folded_norms": folded,
        "constant": int((variance == 0).sum()),
        "rank_bound": min(int(n) - 1, len(variance)),
    }
