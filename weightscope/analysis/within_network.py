"""Covariances within one network: filters, rows, columns and patches as samples, layer by layer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope import anatomy
from weightscope._util.checks import choice, count
from weightscope._util.names import joined, label_of, labels_of
from weightscope._util.results import Result, finite_or_none, row_table
from weightscope._util.threads import one_thread
from weightscope._util.torch_random import seeded
from weightscope.anatomy.convolution import strides
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.population import open_network
from weightscope.statistics.slices import KEPT, Focus, SliceMoments, centre_focus, slice_moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from weightscope.plots import Panel


Part = Literal["filters", "mlp-rows", "mlp-columns", "patch"]
Picture = Literal["maps", "depth", "samples"]
_LEADING = 32  # eigenvalues that are written to JSON


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of one network; see `covariance_within` for the definition of its n samples."""

    source: str  # label of the network
    name: str  # path of the layer
    group: str  # matrix of the layer; empty if there is one
    layer: int  # index among the layers of the same kind, from 0
    depth: int  # number of these layers
    stage: int | None = None  # of a depthwise layer
    stride: int | None = None  # of a depthwise layer of a module; files of weights do not contain it
    shape: tuple[int, ...] = ()  # (channels, kh, kw) of a filter or patch, (P,) of a row or column
    nonfinite: int = 0  # weights that are NaN or infinite
    moments: SliceMoments | None = None  # None if fewer than 2 samples are finite
    focus: Focus | None = None  # None for rows and columns
    examples: np.ndarray | None = None  # (m, channels, kh, kw), some of the samples, as they are stored
    problem: str | None = None  # why there are no moments

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
        return out

    def row(self) -> dict[str, Any]:
        """The layer as a flat record, the shape as text."""
        places = ("source", "layer", "depth", "stage", "stride", "name", "group", "nonfinite", "problem")
        out: dict[str, Any] = {key: getattr(self, key) for key in places} | {"shape": "x".join(map(str, self.shape))}
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


# Columns of the table: head, statistic with its format, and its meaning; those that no layer has are left out.
_COLUMNS = (
    ("variance", "variance:.3g", "variance: mean over the coordinates"),
    ("rank", "effective_rank:.1f", "rank: (tr S)^2 / tr S^2"),
    ("edge", "edge_ratio:.2f", "edge: largest eigenvalue in units of the largest of independent entries"),
    ("mean", "mean_ratio:.2f", "mean: n |mean|^2 / tr S, 1 for samples of mean zero"),
    ("spread", "relative_spread:.3f", "spread: mean squared distance from the centre, 1 for even variance"),
    ("± se", "relative_spread_se:.3f", ""),
    ("centre", "central_share:.3f", ""),
    ("÷ even", "central_ratio:.2f", "centre: share of the central pixel, and in units of an even share"),
    ("neighbours", "neighbours:+.2f", "neighbours: mean correlation of touching pixels"),
    ("far", "from_centre:+.2f", "far: mean correlation of the centre with pixels that do not touch it"),
)


def _series(layers: Sequence[Layer]) -> list[tuple[str, list[Layer]]]:
    """(name, layers) of every network and group of matrices; the name distinguishes them in text and pictures."""
    found: dict[tuple[str, str], list[Layer]] = {}
    for row in layers:
        found.setdefault((row.source, row.group), []).append(row)
    several = len({source for source, _ in found}) > 1
    return [(f"{source if several else ''} {group}".strip(), rows) for (source, group), rows in found.items()]


@dataclass(frozen=True, eq=False, repr=False)
class NetworkCovariances(Result):
    """Covariances of one part of one or several networks, layer by layer."""

    part: str  # of the networks; see `covariance_within`
    labels: tuple[str, ...]  # of the networks
    layers: tuple[Layer, ...]  # network by network, in depth order
    unread: Mapping[str, dict[str, str]] = field(default_factory=dict)  # source -> tensors that cannot be read, why

    def of(self, label: str, group: str | None = None) -> list[Layer]:
        """The layers of one network (and one group of matrices)."""
        choice("label", label, self.labels)
        return [row for row in self.layers if row.source == label and group in (None, row.group)]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of matrices, in order of appearance."""
        return tuple(dict.fromkeys(row.group for row in self.layers))

    @property
    def focused(self) -> bool:
        """Whether the samples are images."""
        return any(row.focus is not None for row in self.layers)

    def summary(self) -> str:
        return f"{self.part} of {', '.join(self.labels)}, {len(self.layers)} layers"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer: place, shape, counts and statistics; None for undefined numbers."""
        records = [row.row() for row in self.layers]
        keys = dict.fromkeys(key for record in records for key in record)
        return [{key: record.get(key) for key in keys} for record in records]

    def notes(self) -> list[str]:
        out = []
        if dead := sum(row.moments.dead for row in self.layers if row.moments is not None):
            out.append(f"{dead} samples are dead: their norm is below a thousandth of the median; they are included")
        for row in self.layers:
            where = f"warning: {row.source}: `{row.name}`" + (f" {row.group}" if row.group else "")
            if (m := row.moments) is None:
                out.append(f"{where}: {row.problem}")
            elif row.nonfinite:
                counts = f"{m.excluded} of {m.n + m.excluded} samples are left out"
                out.append(f"{where}: {row.nonfinite} weights are not finite; {counts}")
        for label, names in self.unread.items():
            listed = joined((f"`{name}` {why}" for name, why in names.items()), 4)
            out.append(f"warning: {label}: {len(names)} layers cannot be read: {listed}")
        return out

    def finding(self) -> str:
        """The result in one line: medians over layers, and what independent entries would give."""
        found = _series(self.layers)
        key, what = ("relative_spread", "Spread of the variance about the centre")
        if not self.focused:
            key, what = "mean_ratio", f"Squared mean of the {'rows' if self.part == 'mlp-rows' else 'columns'}"
        elif len(found) == 1:
            known = [x.focus for x in self.layers if x.focus is not None and math.isfinite(x.focus.relative_spread)]
            near = sum(f.relative_spread + 1.96 * f.relative_spread_se < 1 for f in known)
            layers = f"{near} of {len(known)} layer{'s' * (len(known) != 1)} (95 % intervals)"
            return f"{self.labels[0]}: variance is nearer the centre than even in {layers}"
        medians = []
        for name, rows in found:
            values = [value for row in rows if math.isfinite(value := row.statistics.get(key, math.nan))]
            medians.append(f"{name} {np.median(values):.3g}" if values else f"{name} -")
        return f"{what} (independent entries: 1), median over layers: {', '.join(medians)}"

    def text(self) -> str:
        """Tables against depth, the meaning of the columns, and exclusions; several networks side by side."""
        known = {key for row in self.layers for key in row.statistics}
        columns = [column for column in _COLUMNS if column[1].partition(":")[0] in known]
        if several := len(self.labels) > 1:
            kept = ("variance", "spread", "÷ even") if self.focused else ("edge", "mean")
            columns = [column for column in columns if column[0] in kept]
        heads = {"network": "{source}"} if several else {}
        heads |= {"layer": "{layer}", "name": "{name}", "shape": "{shape}", "n": "{n}", "dead": "{dead}"}
        heads |= {head: f"{{{cell}}}" for head, cell, _ in columns}
        order = [self.groups.index(row.group) for row in self.layers]
        rows = [row for _, row in sorted(zip(order, self.layers, strict=True), key=lambda x: (x[1].layer, x[0]))]
        table = row_table(heads, [row.row() | _place(row) for row in rows], left=(0, 2, 3) if several else (1, 2))
        meanings = [legend for _, _, legend in columns if legend]
        return "\n".join([self.finding(), "", table, "", *meanings, *self.notes()])

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"part": self.part, "labels": list(self.labels), "finding": self.finding()}
        out |= {"rows": [row.to_dict() for row in self.layers]}
        out |= {"unread": {label: dict(names) for label, names in self.unread.items()}} if self.unread else {}
        return out

    def plot(
        self, path: str | Path | None = None, picture: Picture | None = None, *, title: str | None = None
    ) -> "Figure":
        """Draw the layers; the file (.png, .pdf, .svg) is written if there is a path.

        Pictures are `"maps"`, the covariances in block form (thesis Fig. 3.1); `"depth"`, the statistics against depth;
        `"samples"`, the filters (thesis Fig. 2.4-2.6). By default maps of one network and the depth of several.
        """
        from weightscope import plots

        kind = picture or ("maps" if len(self.labels) == 1 else "depth")
        choice("picture", kind, get_args(Picture))
        if kind == "samples":
            figure = _samples_page(self.layers, self.part, title or self.finding())
        else:
            figure = (_maps_page if kind == "maps" else _depth_page)(self.layers, title or self.finding())
        return plots.finished(figure, path)


def _place(row: Layer) -> dict[str, str]:
    sizes = row.shape[1:] if len(row.shape) == 3 and row.shape[0] == 1 else row.shape
    name = row.name if len(row.name) <= 40 else f"…{row.name[-39:]}"
    return {"layer": str(row.layer), "name": f"{name} {row.group}".rstrip(), "shape": "x".join(map(str, sizes))}


# --- pictures --------------------------------------------------------------------------------------------------------

ACROSS = 8  # panels in a row
# Arguments of `plots.Statistic`, for the curves against depth.
_FOCUS_CURVES = (
    ("relative_spread", "spread of the variance about the centre ÷ that of even variances", 1.0),
    ("central_ratio", "variance of the central pixel ÷ mean over pixels", 1.0, True),
    ("variance", "variance, mean over pixels", None, True),
)
_MATRIX_CURVES = (
    ("mean_ratio", "squared mean of the samples ÷ that of independent entries", 1.0, True),
    ("edge_ratio", "largest eigenvalue ÷ edge of independent entries", 1.0, True),
    ("relative_rank", "effective rank ÷ coordinates"),
)


def _maps_page(layers: Sequence[Layer], title: str) -> "Figure":
    """The covariances in block form (thesis Fig. 3.1)."""
    from weightscope import plots

    unkept = [x for x in layers if x.moments is not None and x.moments.covariance is None]
    large = ", ".join(sorted({f"{x.group or x.name} ({x.shape[-1]:,} coordinates)" for x in unkept}))
    drawn = [x for x in layers if x not in unkept]
    if not any(x.moments is not None for x in drawn):
        raise UsageError(f"picture: no covariance was kept of {large}; increase keep, or choose depth")

    def panel(x: Layer) -> "Panel":
        matrix = None if x.moments is None else x.moments.covariance
        shape: Any = x.shape if len(x.shape) == 3 else None
        return plots.Panel(matrix, _label(x), shape, reason="not finite")

    rows, labels, notes = _rows(drawn, panel)
    note = "; ".join([*notes, *[f"not kept: {large}"] * bool(large), *_excluded(layers)])
    return plots.covariance_page(rows, row_labels=labels, title=title, note=note)


def _samples_page(layers: Sequence[Layer], part: str, title: str) -> "Figure":
    """Some of the filters or patches (thesis Fig. 2.4-2.6)."""
    from weightscope import plots

    if all(x.focus is None for x in layers):
        raise UsageError(f"picture: {part} are not images; choose maps or depth")
    rows, labels, notes = _rows(layers, lambda x: plots.Panel(x.examples, _label(x), reason="not finite"))
    most = max(len(row.examples) for row in layers if row.examples is not None)
    notes += [f"at most {most} filters of a layer, drawn at random"] if part == "filters" else []
    return plots.filter_page(rows, row_labels=labels, title=title, note="; ".join([*notes, *_excluded(layers)]))


def _depth_page(layers: Sequence[Layer], title: str) -> "Figure":
    """The statistics against depth."""
    from weightscope import plots

    focused = any(x.focus is not None for x in layers)
    found = _series(layers)
    depths = {rows[0].depth for _, rows in found}
    statistics = [plots.Statistic(*curve) for curve in (_FOCUS_CURVES if focused else _MATRIX_CURVES)]
    curves = []
    for name, rows in found:
        numbers = [row.statistics for row in rows]
        values = {s.key: [n.get(s.key, np.nan) for n in numbers] for s in statistics}
        with_errors = [s.key for s in statistics if any(f"{s.key}_se" in n for n in numbers)]
        errors = {key: [n.get(f"{key}_se", np.nan) for n in numbers] for key in with_errors}
        places = [row.layer if len(depths) == 1 else row.relative_depth for row in rows]
        curves.append(plots.Curve(name or rows[0].source, places, values, errors, _kinds(rows) if focused else ()))
    axis = "layer" if len(depths) == 1 else "relative depth"
    notes = ["bars are 95 % intervals"] if any(c.errors for c in curves) else []
    return plots.depth_curves(curves, statistics, axis=axis, title=title, note="; ".join([*notes, *_excluded(layers)]))


def _excluded(layers: Sequence[Layer]) -> list[str]:
    bad = sum(row.nonfinite > 0 for row in layers)
    return [f"samples with NaN or infinite weights are left out, in {bad} of {len(layers)} layers"] if bad else []


def _rows(
    layers: Sequence[Layer], panel: Callable[[Layer], "Panel"]
) -> tuple[list[list["Panel | None"]], list[str], list[str]]:
    """Panels in rows, row labels and notes: one network fills several rows, several networks have one row each."""
    found = _series(layers)
    if len(found) == 1:
        rows: list[list[Panel | None]]
        rows = [[panel(x) for x in layers[i : i + ACROSS]] for i in range(0, len(layers), ACROSS)]
        return rows, [layers[0].group] * len(rows) if layers[0].group else [], []
    groups = list(dict.fromkeys(row.group for row in layers))
    found.sort(key=lambda item: groups.index(item[1][0].group))  # the same matrix of all networks below each other
    most = max(len(mine) for _, mine in found)
    chosen = np.unique(np.linspace(0, most - 1, min(most, ACROSS)).round().astype(int))
    rows = []
    for _, mine in found:
        here = [round(float(i) * (len(mine) - 1) / max(most - 1, 1)) for i in chosen]
        rows.append([panel(mine[i]) for i in dict.fromkeys(here)])
    return rows, [name for name, _ in found], [f"{len(chosen)} of {most} layers"] if len(chosen) < most else []


def _label(row: Layer) -> str:
    sizes = "×".join(map(str, row.shape[1:])) if len(row.shape) == 3 else str(row.shape[0])
    return f"layer {row.layer}, {sizes}"


def _kinds(layers: Sequence[Layer]) -> list[str]:
    """The kernel, and the stride where it is more than 1: filters before a smaller image look different."""
    strides = [f", stride {row.stride}" if row.stride is not None and row.stride > 1 else "" for row in layers]
    return ["×".join(map(str, row.shape[1:])) + stride for row, stride in zip(layers, strides, strict=True)]


# --- samples ---------------------------------------------------------------------------------------------------------


class _Samples(NamedTuple):
    """The samples of one matrix or layer: the layer without its numbers, its tensors, and their reader, (n, P)."""

    layer: Layer
    tensors: tuple[str, ...]
    read: Callable[[], np.ndarray]


def _filters(source: anatomy.NamedTensors) -> Iterator[_Samples]:
    for p in anatomy.depthwise(source, strict=None):
        group = "" if p.ndim == 2 else "1-D"  # each dimension counts its own layers
        stride = strides(source, p.name)
        step = max(stride) if stride else None
        layer = Layer("", p.name, group, p.layer, p.depth, p.stage, step, (1, *p.kernel))
        yield _Samples(layer, p.parameters, partial(_read, p))


def _matrices(source: anatomy.NamedTensors, *, columns: bool) -> Iterator[_Samples]:
    parts = anatomy.mlps(source, strict=None)
    for p in parts:
        for matrix, names in p.parameters.items():
            read = partial(_read, p, matrix, columns=columns)
            yield _Samples(Layer("", p.name, matrix, p.layer, parts.layers), names, read)


def _patches(source: anatomy.NamedTensors) -> Iterator[_Samples]:
    parts = anatomy.patch_embeddings(source, strict=None)
    for i, p in enumerate(parts):
        layer = Layer("", p.name, "", i, len(parts), shape=(p.channels, *p.patch))
        yield _Samples(layer, p.parameters, partial(_read, p))


def _read(part: Any, *matrix: str, columns: bool = False) -> np.ndarray:
    """The samples (n, P), in the precision in which they are stored."""
    values = part.read(*matrix).cpu().numpy()
    values = values.reshape(len(values), -1)
    return values.T if columns else values


PARTS: Mapping[str, Callable[[anatomy.NamedTensors], Iterator[_Samples]]] = {
    "filters": _filters,
    "mlp-rows": partial(_matrices, columns=False),
    "mlp-columns": partial(_matrices, columns=True),
    "patch": _patches,
}


_KINDS = {"filters": "depthwise convolutions", "mlp": "MLPs", "patch": "patch embeddings"}


def _first_part(source: anatomy.NamedTensors) -> Part:
    """The first of `PARTS` that a network has; an AnatomyError lists what it has."""
    missing = None
    for part in PARTS:
        try:
            next(PARTS[part](source))
        except AnatomyError as error:
            missing = missing or error
        else:
            return cast(Part, part)
    raise missing or AnatomyError("expected a network with parts, found none")


@one_thread()
def skeleton(
    source: Any, part: Part | None = None, *, seed: int = 0, config: Mapping[str, Any] | None = None
) -> nn.Module:
    """Layers of the same names and shapes as those of one part of a network, with torch's default initialisation.

    A baseline to compare trained weights with, and a module for initialisers: `conv_covariance_(skeleton(path), ...)`.
    Only its MLPs have a forward pass, which tells initialisers what they are. Torch's global generator does not change.
    Sources and errors are those of `covariance_within`.

    Example:
        >>> covariance_within(path, skeleton(path), labels=["trained", "default"])
    """
    where = anatomy.named_tensors(source, config)
    part = _first_part(where) if part is None else part
    root = nn.Module()
    with seeded(seed):
        found = PARTS[choice("part", part, PARTS)](where)
        for name, home in {name: piece.layer.name for piece in found for name in piece.tensors}.items():
            holder, path = root, ""
            *above, last = name.rpartition(".")[0].split(".")
            for word in above:
                path = f"{path}.{word}".removeprefix(".")
                if word not in holder._modules:
                    holder.add_module(word, _MLP() if path == home else nn.Module())
                holder = holder.get_submodule(word)
            holder.add_module(last, _module(where.shape(name), filters=part == "filters"))
    return root


class _MLP(nn.Module):
    """Runs the layers that it holds: the first, the second and perhaps the gate of an MLP."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, *gate = (one for one in self.modules() if isinstance(one, nn.Linear))
        return second(F.gelu(gate[0](x)) * first(x) if gate else F.gelu(first(x)))


def _module(shape: tuple[int, ...], *, filters: bool) -> nn.Module:
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    out, inner, *kernel = shape
    # Anatomy recognises a patch embedding by its stride.
    groups, stride = (out, [1] * len(kernel)) if filters else (1, kernel)
    kind: Any = nn.Conv1d if len(kernel) == 1 else nn.Conv2d
    return kind(inner * groups, out, tuple(kernel), tuple(stride), groups=groups, bias=False)


# --- computing -------------------------------------------------------------------------------------------------------

SAMPLES = 64  # filters of a layer that are kept for pictures, as in thesis Fig. 2.6
_PATCHES = 2048  # a patch embedding is drawn whole (thesis Fig. 2.4) up to this number of filters


@one_thread()
def covariance_within(
    *sources: Any,
    part: Part | None = None,
    labels: Sequence[str | None] | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = KEPT,
) -> NetworkCovariances:
    """Covariances of the filters, rows, columns or patches of networks, layer by layer (thesis Eq. 3.3, Fig. 3.1).

    The samples x_1, ..., x_n are, in every layer,

        filters          the n = C filters of a depthwise convolution, P = kh kw pixels
        mlp-rows         the rows of each MLP matrix in (out, in) layout: P inputs
        mlp-columns      its columns: P outputs
        patch            the filters of a patch embedding, P = channels kh kw, all channels together

    and S = sum_i (x_i - mean)(x_i - mean)^T / (n - 1), in float64. Where samples are images, `Focus` describes
    how their variance is distributed about the centre. Layers are read one after the other: memory is that of the
    largest tensor, its Gram matrix, and the covariances that are kept.

    Args:
        sources: each a path (.safetensors, .pt, .pth, a model folder), `hf://org/name[@revision]`, a `Checkpoint`,
            an `nn.Module` or a state dict.
        part: defines the samples, see above; None for the first of them that the first network has.
        labels: a name for each source; None for its own name.
        config: hints for state dicts, as in `weightscope.anatomy`.
        keep: the largest P for which the covariance matrix is kept; above it, only the spectrum and the statistics.

    AnatomyError, with what there is, if a network has no such part; DataError if a source cannot be read, or no
    layer of it has 2 finite samples. Source: thesis 3.1.1; MLP paper 3 (rows and columns).

    Example:
        >>> found = covariance_within("efficientnet-lite0.pth")
        >>> found.layers[3].shape, round(found.layers[3].focus.central_share, 2)
        ((1, 5, 5), 0.09)
    """
    if not sources:
        raise UsageError("expected at least one network, found none")
    count("keep", keep)
    names = labels_of([label_of(source) for source in sources], labels)
    layers: list[Layer] = []
    unread: dict[str, dict[str, str]] = {}
    for source, label in zip(sources, names, strict=True):
        network = open_network(source)
        try:
            tensors = anatomy.named_tensors(network, config)
            part = _first_part(tensors) if part is None else part
            slices = list(PARTS[choice("part", part, PARTS)](tensors))
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from None
        mine = [_layer(label, piece, keep) for piece in slices]
        if all(layer.moments is None for layer in mine):
            raise DataError(f"{label}: no layer has 2 finite samples; `{mine[0].name}`: {mine[0].problem}")
        layers += mine
        if lost := anatomy.parts_of(_KINDS[part.partition("-")[0]], tensors, strict=None).unread:
            unread[label] = {one.name: one.why for one in lost}
    assert part is not None
    return NetworkCovariances(part, tuple(names), tuple(layers), unread)


def _layer(label: str, piece: _Samples, keep: int) -> Layer:
    samples = piece.read()
    shape = piece.layer.shape or (samples.shape[1],)
    nonfinite = int(samples.size - np.isfinite(samples).sum())
    layer = replace(piece.layer, source=label, shape=shape, nonfinite=nonfinite)
    try:
        moments = slice_moments(samples, keep=keep)
    except DataError as error:
        return replace(layer, problem=str(error))
    if len(shape) == 1:
        return replace(layer, moments=moments)
    most = SAMPLES if layer.stage is not None else _PATCHES
    shown = samples
    if len(samples) > most:
        shown = samples[np.sort(np.random.default_rng(0).choice(len(samples), most, replace=False))]
    focus = centre_focus(samples, (shape[1], shape[2]), moments)
    return replace(layer, moments=moments, focus=focus, examples=shown.reshape(-1, *shape))
