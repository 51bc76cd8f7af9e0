"""What `covariance_within` found: a table against depth, plain data, and pictures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from weightscope._util import atomic
from weightscope.errors import UsageError
from weightscope.statistics.slices import Focus, SliceMoments

Picture = Literal["maps", "depth", "samples"]
_LEADING = 32  # eigenvalues that are written out as text


@dataclass(frozen=True)
class Layer:
    """One layer of one network; see `covariance_within` for what its n samples are.

    Attributes:
        source: label of the network.
        name: path of the layer.
        group: which matrix of the layer, or channel; empty if there is one.
        layer: number among the layers of the same kind, from 0.
        depth: how many there are.
        stage: of a depthwise layer; None elsewhere.
        stride: of a depthwise layer where it is known (files of weights do not tell); None elsewhere.
        shape: (channels, kh, kw) of a filter or patch, (P,) of a row or column.
        nonfinite: how many weights are NaN or infinite.
        moments: None where fewer than 2 samples are finite.
        focus: None for rows and columns.
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
    moments: SliceMoments | None
    focus: Focus | None
    examples: np.ndarray | None
    problem: str | None

    @property
    def relative_depth(self) -> float:
        """`layer / (depth - 1)`, 0 where there is only one."""
        return self.layer / (self.depth - 1) if self.depth > 1 else 0.0

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
        return out | (asdict(self.focus) if self.focus is not None else {})

    def to_dict(self) -> dict[str, Any]:
        """JSON types; numbers that do not exist are None. Neither the covariance nor the samples."""
        out: dict[str, Any] = {
            "source": self.source,
            "layer": self.layer,
            "depth": self.depth,
            "stage": self.stage,
            "stride": self.stride,
            "name": self.name,
            "group": self.group,
            "shape": list(self.shape),
            "nonfinite": self.nonfinite,
            "problem": self.problem,
        }
        if (m := self.moments) is not None:
            out |= {"n": m.n, "excluded": m.excluded, "dead": m.dead}
            out |= {key: _finite(value) for key, value in self.statistics.items()}
            out["eigenvalues"] = m.eigenvalues[:_LEADING].tolist()
            if self.focus is not None and len(m.mean) <= _LEADING * 4:
                out |= {"mean": m.mean.tolist(), "variances": m.variance.tolist()}
        return out


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
_LEGEND = {
    "variance": "variance: mean over the coordinates",
    "rank": "rank: (tr S)^2 / tr S^2",
    "edge": "edge: largest eigenvalue, 1 is the most that independent entries give",
    "mean": "mean: n |mean|^2 / tr S, 1 for samples of mean zero",
    "spread": "spread: mean squared distance of the variance from the centre, 1 when it is even",
    "centre": "centre: share of the variance in the central pixel, and in units of an even share",
    "neighbours": "neighbours: mean correlation of touching pixels; far: of the centre with those not touching it",
}


@dataclass(frozen=True)
class Within:
    """Layers of one or several networks.

    Attributes:
        part: what the samples are.
        labels: of the networks.
        layers: network by network, in depth order.
    """

    part: str
    labels: tuple[str, ...]
    layers: tuple[Layer, ...]

    def of(self, label: str, group: str | None = None) -> list[Layer]:
        """The layers of one network (and one group of matrices).

        Raises:
            UsageError: if there is no such network.
        """
        if label not in self.labels:
            raise UsageError(f"no network {label!r}; there are {', '.join(self.labels)}")
        return [row for row in self.layers if row.source == label and group in (None, row.group)]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of matrices, in order of appearance."""
        return tuple(dict.fromkeys(row.group for row in self.layers))

    @property
    def focused(self) -> bool:
        """Whether the samples are images."""
        return any(row.focus is not None for row in self.layers)

    def warnings(self) -> list[str]:
        """One line for each tensor with numbers that are not finite."""
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
        """What the numbers say, in one line: medians over layers, and what independent entries would give."""
        groups = [(label, group) for label in self.labels for group in self.groups if self.of(label, group)]
        key, what = ("relative_spread", "Spread of the variance about the centre")
        if not self.focused:
            key, what = "mean_ratio", f"Squared mean of the {'rows' if self.part == 'mlp-rows' else 'columns'}"
        elif len(groups) == 1:
            known = [x.focus for x in self.layers if x.focus is not None and math.isfinite(x.focus.relative_spread)]
            near = sum(f.relative_spread + 1.96 * f.relative_spread_se < 1 for f in known)
            return (
                f"{self.labels[0]}: variance is nearer the centre than even in {near} of {len(known)} layers "
                "(95 % intervals)"
            )
        medians = []
        for label, group in groups:
            name = " ".join(filter(None, (label if len(self.labels) > 1 else "", group)))
            medians.append(f"{name} {_text('{:.3g}', self._median(label, group, key))}")
        return f"{what} (independent entries: 1), median over layers: {', '.join(medians)}"

    def _median(self, label: str, group: str, key: str) -> float:
        values = [row.statistics.get(key, math.nan) for row in self.of(label, group)]
        values = [v for v in values if math.isfinite(v)]
        return float(np.median(values)) if values else math.nan

    def text(self) -> str:
        """Tables against depth, what the columns mean, and what was left out; several networks side by side."""
        columns = (*_MATRIX_COLUMNS, *(_FOCUS_COLUMNS if self.focused else ()))
        lines = [self.finding(), ""]
        if len(self.labels) > 1:
            chosen = [
                c for c in columns if c[0] in (("variance", "spread", "÷ even") if self.focused else ("edge", "mean"))
            ]
            lines += self._side_by_side(chosen)
        else:
            lines += self._table(columns)
            chosen = list(columns)
        heads = {head for head, _, _ in chosen} | ({"centre"} if "÷ even" in {c[0] for c in chosen} else set())
        lines += ["", *(text for head, text in _LEGEND.items() if head in heads)]
        dead = sum(row.moments.dead for row in self.layers if row.moments is not None)
        if dead:
            lines.append(f"{dead} samples are dead: their norm is below a thousandth of the median; they count")
        return "\n".join(lines + self.warnings())

    def _table(self, columns: Sequence[tuple[str, str, str]]) -> list[str]:
        head = ("layer", "name", "shape", "n", "dead", *(c[0] for c in columns))
        rows = [(*_place(row), *_counts(row), *(_cell(row, c) for c in columns)) for row in self.layers]
        return _aligned(head, rows)

    def _side_by_side(self, columns: Sequence[tuple[str, str, str]]) -> list[str]:
        """One line for each layer, its number and group shared by the networks."""
        keys = sorted({(row.layer, self.groups.index(row.group)) for row in self.layers})
        table = {(row.source, row.layer, self.groups.index(row.group)): row for row in self.layers}
        head = ["layer", "name", "shape", *(f"{c[0]} [{i + 1}]" for c in columns for i in range(len(self.labels)))]
        rows = []
        for key in keys:
            each = [table.get((label, *key)) for label in self.labels]
            first = next(row for row in each if row is not None)
            rows.append((*_place(first), *(_cell(row, c) for c in columns for row in each)))
        return [f"[{i + 1}] {label}" for i, label in enumerate(self.labels)] + _aligned(head, rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON types: `part`, `labels`, `finding` and one row for each layer."""
        rows = [row.to_dict() for row in self.layers]
        return {"part": self.part, "labels": list(self.labels), "finding": self.finding(), "rows": rows}

    def plot(self, path: str | Path, picture: Picture | None = None, *, title: str | None = None) -> None:
        """Write a picture.

        Args:
            path: a .png, .pdf or .svg file.
            picture: `"maps"`, the covariances in block form (thesis Fig. 3.1); `"depth"`, the statistics against
                depth; `"samples"`, filters themselves (thesis Fig. 2.4-2.6). Maps of one network and the depth of
                several unless given.
            title: instead of the finding, or of what the samples are of.

        Raises:
            UsageError: for another picture, samples that are no images, or covariances of which none was kept.
        """
        from weightscope import plots
        from weightscope.analysis.within_network import pictures

        kind = picture or ("maps" if len(self.labels) == 1 else "depth")
        if kind not in get_args(Picture):
            raise UsageError(f"picture: expected one of {', '.join(get_args(Picture))}, found {picture!r}")
        plots.save(pictures.draw(self, kind, title), path)

    def save_matrix(self, path: str | Path) -> None:
        """Write `covariance/I` and `mean/I` for row I of `to_dict()["rows"]` as an .npz file, where kept.

        Raises:
            UsageError: if the file's name does not end in .npz.
        """
        if Path(path).suffix != ".npz":
            raise UsageError(f"matrices are written as .npz, found {path}")
        arrays = {}
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [c.ljust(w) if i in (1, 2) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
