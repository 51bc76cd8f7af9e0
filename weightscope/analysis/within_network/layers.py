"""`Layer`: moments and statistics of the samples of one layer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from weightscope._util.results import finite_or_none
from weightscope.statistics.kronecker.separability import SeparabilityTest
from weightscope.statistics.slices import Focus, SliceMoments

_LEADING = 32  # eigenvalues that are written to JSON


class KroneckerShare(NamedTuple):
    """How well one Kronecker product A (x) B fits a covariance of filters; see `kronecker_sum`.

    Attributes:
        explained: `1 - |S - A (x) B|_F^2 / |S|_F^2`.
        dependence: the same over the entries off the diagonal; NaN where all of them are zero.
    """

    explained: float
    dependence: float


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of one network; see `covariance_within` for the definition of its n samples.

    Attributes:
        source: label of the network.
        name: path of the layer.
        group: matrix of the layer, or channel; empty if there is one.
        layer: index among the layers of the same kind, from 0.
        depth: number of these layers.
        stage: of a depthwise layer; None elsewhere.
        stride: of a depthwise layer of a module (files of weights do not contain it); None elsewhere.
        shape: (channels, kh, kw) of a filter or patch, (P,) of a row or column.
        nonfinite: number of weights that are NaN or infinite.
        moments: None if fewer than 2 samples are finite.
        focus: None for rows and columns.
        kronecker: for filters and patches of one channel whose covariance is kept; None elsewhere.
        separability: Monte Carlo test, if asked for; None elsewhere.
        examples: (m, channels, kh, kw), some of the samples, in the precision in which they are stored.
        problem: why there are no moments.
    """

    source: str
    name: str
    group: str
    layer: int
    depth: int
    stage: int | None
    stride: int | None
    shape: tuple[int, ...]
    nonfinite: int
    moments: SliceMoments | None = None
    focus: Focus | None = None
    kronecker: KroneckerShare | None = None
    separability: SeparabilityTest | None = None
    examples: np.ndarray | None = None
    problem: str | None = None

    @property
    def relative_depth(self) -> float:
        """`layer / (depth - 1)`, 0 if there is only one layer."""
        return self.layer / max(1, self.depth - 1)

    @property
    def statistics(self) -> dict[str, float]:
        """The numbers of the table: those of `SliceMoments` and `Focus`; empty without moments."""
        if (m := self.moments) is None:
            return {}
        size, energy = len(m.mean), float(m.mean @ m.mean)
        out = {
            "variance": m.total / size,
            "effective_rank": m.effective_rank,
            "relative_rank": m.effective_rank / size,
            "edge_ratio": m.edge_ratio,
            "mean_ratio": m.mean_ratio,
            "mean_share": energy / (energy + m.total) if energy + m.total > 0 else math.nan,
        }
        if self.focus is not None:
            out |= asdict(self.focus)
        if self.kronecker is not None:
            out |= {"kronecker": self.kronecker.explained, "kronecker_dependence": self.kronecker.dependence}
        if self.separability is not None:
            out |= {"separability_ratio": self.separability.ratio, "separability_p": self.separability.p_value}
        return out

    def row(self) -> dict[str, Any]:
        """The layer as a flat record, the shape as text."""
        out: dict[str, Any] = {
            "source": self.source,
            "layer": self.layer,
            "depth": self.depth,
            "stage": self.stage,
            "stride": self.stride,
            "name": self.name,
            "group": self.group,
            "shape": "x".join(map(str, self.shape)),
            "nonfinite": self.nonfinite,
            "problem": self.problem,
        }
        if (m := self.moments) is not None:
            out |= {"n": m.n, "excluded": m.excluded, "dead": m.dead}
            out |= {key: finite_or_none(value) for key, value in self.statistics.items()}
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON types; undefined numbers are None. Neither the covariance nor the samples."""
        out = self.row() | {"shape": list(self.shape)}
        if (m := self.moments) is not None:
            out["eigenvalues"] = m.eigenvalues[:_LEADING].tolist()
            if self.focus is not None and len(m.mean) <= _LEADING * 4:
                out |= {"mean": m.mean.tolist(), "variances": m.variance.tolist()}
        return out


def distinct(values: Iterable[str]) -> tuple[str, ...]:
    """The different values, in order of appearance."""
    return tuple(dict.fromkeys(values))


def selected(layers: Sequence[Layer], source: str, group: str | None = None) -> list[Layer]:
    """The layers of one network (and one group of matrices)."""
    return [row for row in layers if row.source == source and group in (None, row.group)]


def series(layers: Sequence[Layer]) -> list[tuple[str, list[Layer]]]:
    """(name, layers) of every network and group of matrices; the name distinguishes them in text and pictures."""
    sources, groups = distinct(row.source for row in layers), distinct(row.group for row in layers)
    out = []
    for source in sources:
        for group in groups:
            if found := selected(layers, source, group):
                out.append((" ".join(filter(None, (source if len(sources) > 1 else "", group))), found))
    return out
