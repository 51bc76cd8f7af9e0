"""Covariances within networks: a table against depth, plain data, and pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from weightscope._util import atomic
from weightscope._util.checks import choice
from weightscope._util.names import unverified
from weightscope._util.results import Result, text_table
from weightscope.analysis.within_network.layers import Layer, distinct, selected, series
from weightscope.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Literal["maps", "depth", "samples"]

# Column heads of the table, the statistic, and its format.
_MATRIX_COLUMNS = (
    ("variance", "variance", "{:.3g}"),
    ("rank", "effective_rank", "{:.1f}"),
    ("edge", "edge_ratio", "{:.2f}"),
    ("mean", "mean_ratio", "{:.2f}"),
)
_FOCUS_COLUMNS = (
    ("spread", "relative_spread", "{:.3f}"),
    ("± se", "relative_spread_se", "{:.3f}"),
    ("centre", "central_share", "{:.3f}"),
    ("÷ even", "central_ratio", "{:.2f}"),
    ("neighbours", "neighbours", "{:+.2f}"),
    ("far", "from_centre", "{:+.2f}"),
)
_KRONECKER_COLUMNS = (("A(x)B", "kronecker", "{:.2f}"), ("off-diag", "kronecker_dependence", "{:.2f}"))
_TEST_COLUMNS = (("p(A(x)B)", "separability_p", "{:.3g}"),)
_LEGEND = {
    "variance": "variance: mean over the coordinates",
    "rank": "rank: (tr S)^2 / tr S^2",
    "edge": "edge: largest eigenvalue in units of the largest of independent entries",
    "mean": "mean: n |mean|^2 / tr S, 1 for samples of mean zero",
    "spread": "spread: mean squared distance of the variance from the centre, 1 when it is even",
    "centre": "centre: share of the variance in the central pixel, and in units of an even share",
    "neighbours": "neighbours: mean correlation of touching pixels; far: of the centre with those not touching it",
    "A(x)B": "A(x)B: share of |S|^2 that one Kronecker product explains; off-diag: the same off the diagonal of S",
    "p(A(x)B)": "p(A(x)B): Monte Carlo p-value of the hypothesis that S is a Kronecker product",
}


@dataclass(frozen=True, eq=False, repr=False)
class NetworkCovariances(Result):
    """Covariances of one part of one or several networks, layer by layer.

    Attributes:
        part: the part of the networks; see `covariance_within`.
        labels: of the networks.
        layers: network by network, in depth order.
        unverified: label of a network at a hub -> its files of which only byte ranges were read.
    """

    part: str
    labels: tuple[str, ...]
    layers: tuple[Layer, ...]
    unverified: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, label: str, group: str | None = None) -> list[Layer]:
        """The layers of one network (and one group of matrices).

        Raises:
            UsageError: if there is no network of that label.
        """
        choice("label", label, self.labels)
        return selected(self.layers, label, group)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of matrices, in order of appearance."""
        return distinct(row.group for row in self.layers)

    @property
    def focused(self) -> bool:
        """Whether the samples are images."""
        return any(row.focus is not None for row in self.layers)

    def summary(self) -> str:
        """Part, number of layers and networks."""
        return f"{self.part} of {', '.join(self.labels)}, {len(self.layers)} layers"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer: place, shape, counts and statistics; None for undefined numbers."""
        records = [row.row() for row in self.layers]
        keys = dict.fromkeys(key for record in records for key in record)
        return [{key: record.get(key) for key in keys} for record in records]

    def warnings(self) -> list[str]:
        """One line for each tensor with non-finite numbers."""
        out = []
        for row in self.layers:
            where = f"{row.source}: `{row.name}`" + (f" {row.group}" if row.group else "")
            if row.moments is None:
                out.append(f"warning: {where}: {row.problem}")
            elif row.nonfinite:
                total = row.moments.n + row.moments.excluded
                out.append(
                    f"warning: {where}: {row.nonfinite} weights are not finite; {row.moments.excluded} of {total} "
                    "samples are left out"
                )
        return out

    def finding(self) -> str:
        """The result in one line: medians over layers, and what independent entries would give."""
        found = series(self.layers)
        key, what = ("relative_spread", "Spread of the variance about the centre")
        if not self.focused:
            key, what = "mean_ratio", f"Squared mean of the {'rows' if self.part == 'mlp-rows' else 'columns'}"
        elif len(found) == 1:
            known = [x.focus for x in self.layers if x.focus is not None and math.isfinite(x.focus.relative_spread)]
            near = sum(f.relative_spread + 1.96 * f.relative_spread_se < 1 for f in known)
            return (
                f"{self.labels[0]}: variance is nearer the centre than even in {near} of {len(known)} layers "
                "(95 % intervals)"
            )
        medians = [f"{name} {_text('{:.3g}', _median(rows, key))}".lstrip() for name, rows in found]
        return f"{what} (independent entries: 1), median over layers: {', '.join(medians)}"

    def text(self) -> str:
        """Tables against depth, the meaning of the columns, and exclusions; several networks side by side."""
        columns = list(_MATRIX_COLUMNS)
        for more, wanted in (
            (_FOCUS_COLUMNS, "focus"),
            (_KRONECKER_COLUMNS, "kronecker"),
            (_TEST_COLUMNS, "separability"),
        ):
            columns += more if any(getattr(row, wanted) is not None for row in self.layers) else ()
        if len(self.labels) > 1:
            kept = ("variance", "spread", "÷ even") if self.focused else ("edge", "mean")
            columns = [c for c in columns if c[0] in kept]
            table = self._side_by_side(columns)
        else:
            head = ("layer", "name", "shape", "n", "dead", *(c[0] for c in columns))
            rows = [(*_place(row), *_counts(row), *(_cell(row, c) for c in columns)) for row in self.layers]
            table = text_table(head, rows, left=(1, 2))
        heads = {head for head, _, _ in columns} | ({"centre"} if "÷ even" in {c[0] for c in columns} else set())
        lines = [self.finding(), "", table, "", *(text for head, text in _LEGEND.items() if head in heads)]
        dead = sum(row.moments.dead for row in self.layers if row.moments is not None)
        if dead:
            lines.append(f"{dead} samples are dead: their norm is below a thousandth of the median; they are included")
        said = [f"warning: {unverified(label, files)}" for label, files in self.unverified.items()]
        return "\n".join(lines + self.warnings() + said)

    def _side_by_side(self, columns: Sequence[tuple[str, str, str]]) -> str:
        """One line for each layer: index and group are shared by the networks."""
        keys = sorted({(row.layer, self.groups.index(row.group)) for row in self.layers})
        table = {(row.source, row.layer, self.groups.index(row.group)): row for row in self.layers}
        head = ["layer", "name", "shape", *(f"{c[0]} [{i + 1}]" for c in columns for i in range(len(self.labels)))]
        rows = []
        for key in keys:
            each = [table.get((label, *key)) for label in self.labels]
            first = next(row for row in each if row is not None)
            rows.append((*_place(first), *(_cell(row, c) for c in columns for row in each)))
        return "\n".join([*(f"[{i + 1}] {x}" for i, x in enumerate(self.labels)), text_table(head, rows, left=(1, 2))])

    def to_dict(self) -> dict[str, Any]:
        """JSON types: `part`, `labels`, `finding` and one row for each layer."""
        rows = [row.to_dict() for row in self.layers]
        return {"part": self.part, "labels": list(self.labels), "finding": self.finding(), "rows": rows} | (
            {"unverified": {label: list(files) for label, files in self.unverified.items()}} if self.unverified else {}
        )

    def plot(
        self, path: str | Path | None = None, picture: Picture | None = None, *, title: str | None = None
    ) -> "Figure":
        """Draw the layers.

        Args:
            path: a .png, .pdf or .svg file to write; None to return the figure only.
            picture: `"maps"`, the covariances in block form (thesis Fig. 3.1); `"depth"`, the statistics against
                depth; `"samples"`, the filters (thesis Fig. 2.4-2.6). By default maps of one network and the depth
                of several.
            title: instead of the finding.

        Raises:
            UsageError: for an unknown picture, samples that are not images, or if no covariance was kept.
        """
        from weightscope import plots
        from weightscope.analysis.within_network import pictures

        kind = picture or ("maps" if len(self.labels) == 1 else "depth")
        choice("picture", kind, get_args(Picture))
        if kind == "samples":
            figure = pictures.samples(self.layers, self.part, title or f"Filters of {', '.join(self.labels)}")
        else:
            figure = (pictures.maps if kind == "maps" else pictures.depth)(self.layers, title or self.finding())
        if path is not None:
            plots.save(figure, path)
        return figure

    def save_matrix(self, path: str | Path) -> None:
        """Write `covariance/I` and `mean/I` for row I of `to_dict()["rows"]` as an .npz file, where kept.

        Raises:
            UsageError: if the file's name does not end in .npz.
        """
        if Path(path).suffix != ".npz":
            raise UsageError(f"expected a file name that ends in .npz, found {path}")
        arrays: dict[str, Any] = {}
        for i, row in enumerate(self.layers):
            if row.moments is not None:
                arrays[f"mean/{i}"] = row.moments.mean
                if row.moments.covariance is not None:
                    arrays[f"covariance/{i}"] = row.moments.covariance
        with atomic.replacing(path) as file:
            np.savez(file, **arrays)


def _place(row: Layer) -> tuple[str, str, str]:
    sizes = row.shape[1:] if len(row.shape) == 3 and row.shape[0] == 1 else row.shape
    name = row.name if len(row.name) <= 40 else f"…{row.name[-39:]}"
    return str(row.layer), f"{name} {row.group}".rstrip(), "x".join(map(str, sizes))


def _counts(row: Layer) -> tuple[str, str]:
    return ("-", "-") if row.moments is None else (str(row.moments.n), str(row.moments.dead))


def _cell(row: Layer | None, column: tuple[str, str, str]) -> str:
    return "" if row is None else _text(column[2], row.statistics.get(column[1], math.nan))


def _text(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def _median(rows: Sequence[Layer], key: str) -> float:
    values = [value for row in rows if math.isfinite(value := row.statistics.get(key, math.nan))]
    return float(np.median(values)) if values else math.nan
