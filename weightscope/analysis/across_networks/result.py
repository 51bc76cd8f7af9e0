"""The covariance of weights over the networks of a population: matrix, stripe ratios, text and pictures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from weightscope._util import atomic
from weightscope._util.results import Result, text_table
from weightscope.errors import UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.group_means import StripeRatio, StripeResult
from weightscope.statistics.transposed_pairs import TransposedCorrelation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["covariance", "correlation"]
_MEANS = ("column", "row", "grand")


@dataclass(frozen=True, eq=False, repr=False)
class PopulationCovariance(Result):
    """A covariance or correlation matrix over networks, with the stripe ratios of the matrices in it.

    Attributes:
        matrix: (D', D'), in the precision of accumulation.
        mean: (D',) float64.
        n: number of networks used.
        excluded: networks left out because they diverged or contain a non-finite number.
        spec: names and shapes of the D' coordinates; its slices are the blocks of the matrix.
        kind: `"covariance"` (divisor n - 1) or `"correlation"`.
        diagnostics: plain numbers and texts: `precision`, `folded_norms`, `constant` (coordinates without
            variance; their correlations are NaN), `rank_bound` (an upper bound of the rank), and
            `without_stripes` (tensor -> reason) if stripe ratios could not be computed.
        stripes: name of a tensor with two axes -> its stripe ratios; empty from `joint_covariance`.
        transposed: name of an MLP of which both matrices were selected -> the mean correlation of W1[i, j] with
            W2[j, i].
    """

    matrix: np.ndarray
    mean: np.ndarray
    n: int
    excluded: int
    spec: WeightSpec
    kind: Kind
    diagnostics: dict[str, Any]
    stripes: dict[str, StripeResult] = field(default_factory=dict)
    transposed: dict[str, TransposedCorrelation] = field(default_factory=dict)

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
        """Kind, size and number of networks."""
        return f"{self.kind} of {self.spec.size:,} coordinates in {len(self.spec)} tensors over {self.n:,} networks"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each stripe ratio: tensor, kind of mean, ratio, its 95 % interval and p-value."""
        return [
            {"tensor": name, "means": kind, "ratio": ratio.value}
            | {"low": ratio.ci95[0], "high": ratio.ci95[1], "p": ratio.p}
            for name, result in self.stripes.items()
            for kind in _MEANS
            for ratio in [getattr(result, kind)]
        ]

    def text(self) -> str:
        """Counts, and a table of stripe ratios."""
        lines = [f"{self.n} networks, {self.spec.size} coordinates in {len(self.spec)} tensors"]
        if self.excluded:
            lines.append(f"{self.excluded} networks are left out: they diverged or contain non-finite numbers")
        if constant := self.diagnostics.get("constant"):
            lines.append(f"{constant} coordinates do not vary over the networks")
        if self.stripes:
            lines += ["", "variance of group means relative to independent entries (95 % interval):"]
            cells = [(name, *(_ratio(getattr(x, kind)) for kind in _MEANS)) for name, x in self.stripes.items()]
            lines.append(text_table(("", "column means", "row means", "grand mean"), cells))
            lines.append("column means: over outputs, one per input; row means: over inputs, one per output")
        if self.transposed:
            lines += ["", "mean correlation of fc1[i, j] with fc2[j, i] over networks (95 % interval):"]
            found = [(name, x.value, *x.ci95) for name, x in self.transposed.items()]
            cells = [(name, f"{value:+.4f} ({low:+.4f} to {high:+.4f})") for name, value, low, high in found]
            lines.append(text_table(("", "correlation"), cells))
        for name, why in self.diagnostics.get("without_transposed", {}).items():
            lines.append(f"no correlation of fc1 and fc2 of `{name}`: {why}")
        for name, why in self.diagnostics.get("without_stripes", {}).items():
            lines.append(f"no stripe ratios of `{name}`: {why}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the matrix."""
        return {
            "n": self.n,
            "excluded": self.excluded,
            "kind": self.kind,
            "blocks": {name: [part.start, part.stop] for name, part in self.blocks.items()},
            "diagnostics": self.diagnostics,
            "stripes": {
                name: {
                    kind: {"ratio": ratio.value, "ci95": list(ratio.ci95), "p": ratio.p}
                    for kind in _MEANS
                    for ratio in [getattr(result, kind)]
                }
                for name, result in self.stripes.items()
            },
            "transposed": {name: asdict(found) for name, found in self.transposed.items()},
        }

    def plot(self, path: str | Path | None = None, *, means: bool | None = None) -> "Figure":
        """Draw the matrix, its blocks ruled off (MLP paper, Fig. 1), or the covariance of group means.

        Args:
            path: a .png, .pdf or .svg file to write; None to return the figure only.
            means: average over hidden units, which shows stripes that the noise of single entries hides. None: where
                stripe ratios were computed, or single entries do not fit into the picture.

        Raises:
            UsageError: if the suffix of the path is another one.
        """
        from weightscope import plots

        if means is None:
            means = bool(self.stripes) or self.spec.size > plots.covariance.CELLS
        title = f"{self.kind.capitalize()} over {self.n} networks" + (", mean over hidden units" if means else "")
        groups = self.groups() if means else None
        axes = plots.covariance_map(self.matrix, self.blocks, kind=self.kind, title=title, groups=groups)
        figure = plots.root_figure(axes)
        if path is not None:
            plots.save(figure, path)
        return figure

    def groups(self) -> dict[str, np.ndarray]:
        """For `plots.covariance_map`: the entries of each matrix that differ in the hidden unit alone.

        A vector's entries are groups of their own; the filters of a convolution are one group for each output channel.
        """
        return {tensor.name: _groups(tensor.shape) for tensor in self.spec.tensors if tensor.size}

    def save_matrix(self, path: str | Path) -> None:
        """Write `matrix`, `mean`, and the blocks' `names` and `stops` as an .npz file.

        A matrix that was computed on disk (`file=...`) is already in that file, and nothing is written.

        Raises:
            UsageError: if the file's name does not end in .npz.
        """
        if isinstance(self.matrix, np.memmap):
            return
        if Path(path).suffix != ".npz":
            raise UsageError(f"expected a file name that ends in .npz, found {path}")
        stops = np.array([part.stop for part in self.blocks.values()])
        with atomic.replacing(path) as file:
            np.savez(file, matrix=self.matrix, mean=self.mean, names=np.array(list(self.blocks)), stops=stops)


def over_hidden_units(shape: Sequence[int]) -> np.ndarray:
    """The index of each entry's row or column, whichever are fewer, for a matrix flattened row by row.

    An MLP's hidden units are the longer side: fc1 (p, d) is grouped by its columns, fc2 (d, p) by its rows.
    """
    rows, columns = shape
    return np.repeat(np.arange(rows), columns) if rows < columns else np.tile(np.arange(columns), rows)


def _groups(shape: Sequence[int]) -> np.ndarray:
    axes = [n for n in shape if n != 1]
    if len(axes) == 2:
        return over_hidden_units(axes)
    first = axes[0] if len(axes) > 2 else math.prod(axes)
    return np.repeat(np.arange(first), math.prod(axes) // first)


def _ratio(found: StripeRatio) -> str:
    return f"{found.value:.2f} ({found.ci95[0]:.2f} to {found.ci95[1]:.2f})"
