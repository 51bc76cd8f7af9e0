"""Statistics of attention products: rows, a table for each model, a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from weightscope._util.checks import choice
from weightscope._util.names import unverified
from weightscope._util.results import Result, finite_or_none, text_table
from weightscope.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Part = Literal["qk", "vo", "cb"]
Values = Literal["layers", "heads", "both"]
View = Literal["auto", "grid", "depth"]
Row = dict[str, Any]
_SURE = 4.0  # |z|: a false alarm in 16,000 products


class Key(NamedTuple):
    """Identifies a product; `head` is None for a whole layer."""

    source: str
    layer: int
    part: str
    head: int | None
    kind: str = "self"


@dataclass(frozen=True)
class SourceInfo:
    """One of the models.

    Attributes:
        label: of the source.
        modules: number of attention modules.
        heads: number of heads of each module.
        widths: d; several numbers if the modules differ.
        bytes_read: from disk or a hub; None for a model in memory.
        commit: at the hub; None elsewhere.
        nonfinite: name of a tensor -> number of its entries used that are NaN or infinite.
        skipped: name of an attention module -> why it is left out.
        unverified: files at a hub of which only byte ranges were read, so that their hash was not compared.
        state_spaces: number of state-space layers.
    """

    label: str
    modules: int
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    bytes_read: int | None
    commit: str | None
    nonfinite: dict[str, int]
    skipped: dict[str, str]
    unverified: tuple[str, ...] = ()
    state_spaces: int = 0


@dataclass(frozen=True)
class Count:
    """Numbers of products with a positive or negative diagonal.

    Attributes:
        n: products with finite numbers.
        positive: with a diagonal mean above zero.
        sure: of these, with z > 4.
        negative: with a diagonal mean below zero.
        surely_negative: of these, with z < -4.
        beta: mean over the products; None without products.
        alpha: mean over the products; None without products.
    """

    n: int
    positive: int
    sure: int
    negative: int
    surely_negative: int
    beta: float | None
    alpha: float | None

    def text(self, what: str, places: str) -> str:
        """One phrase on the more frequent sign, such as "QK diagonal positive in 65 of 72 heads (64 with z > 4)"."""
        if not self.n:
            return f"{what}: no finite product"
        if self.positive >= self.negative:
            return f"{what} diagonal positive in {self.positive} of {self.n} {places} ({self.sure} with z > {_SURE:g})"
        sure = f"{self.surely_negative} with z < -{_SURE:g}"
        return f"{what} diagonal negative in {self.negative} of {self.n} {places} ({sure})"


@dataclass(frozen=True, eq=False, repr=False)
class ProductsResult(Result):
    """Statistics of products, one record for each.

    Attributes:
        records: flat dictionaries, None for undefined numbers: `source`, `name` and `kind` of the attention module,
            `layer`, `head` (None for a whole layer), `part` ("qk", "vo" or "cb"), `width` d, `rank` r, the columns of
            `FactoredProduct.statistics`, `sign` of the diagonal mean, `spectral_norm`, `finite`, `rotary`,
            `normalised` (queries and keys are normalised before their product, so its scale is meaningless),
            `layer_scale` (the model has one, folded in or not).
        spectra: singular values of each record's product, (r,); None if they were not computed.
        corners: upper left entries of each product, float32.
        sources: the models.
        options: the arguments of `products`.
    """

    records: list[Row]
    spectra: list[np.ndarray | None]
    corners: dict[Key, np.ndarray]
    sources: list[SourceInfo]
    options: dict[str, Any]

    def append(
        self,
        place: Row,
        statistics: Mapping[str, float],
        about: Row,
        spectrum: np.ndarray | None,
        corner: np.ndarray | None,
        biases: Mapping[str, float] | None = None,
    ) -> None:
        """Append one product.

        Args:
            place: the columns `source` to `rank`.
            statistics: of the product; NaN if they are undefined.
            about: the columns `rotary`, `normalised` and `layer_scale`.
            spectrum: singular values (r,), if they are known.
            corner: upper left entries, if they are kept.
            biases: more columns, on the biases.
        """
        numbers = {name: finite_or_none(value) for name, value in statistics.items()}
        beta = numbers["beta"]
        sign = None if beta is None else (beta > 0) - (beta < 0)
        norm = None if spectrum is None else float(spectrum[0])
        row = place | numbers | {"sign": sign, "spectral_norm": norm, "finite": beta is not None} | about
        row |= {name: finite_or_none(value) for name, value in (biases or {}).items()}
        self.records.append(row)
        self.spectra.append(spectrum)
        if corner is not None:
            self.corners[Key(*(row[key] for key in Key._fields))] = corner

    def rows(self) -> list[Row]:
        """The records: one row for each product."""
        return self.records

    def summary(self) -> str:
        """Number of products, and the signs of the diagonals of the first model."""
        labels = [info.label for info in self.sources]
        first = f"; {labels[0]}: {self.finding(labels[0])}" if labels else ""
        return f"{len(self.records):,} products of {', '.join(labels)}{first}"

    def select(self, part: Part, source: str | None = None, *, layers: bool | None = None) -> list[Row]:
        """The rows of a part; `layers` chooses whole layers (True) or heads (False)."""
        return [
            row
            for row in self.records
            if row["part"] == part
            and source in (None, row["source"])
            and (layers is None or (row["head"] is None) == layers)
        ]

    def count(self, part: Part, source: str | None = None, *, layers: bool = False) -> Count:
        """How many diagonals are positive, among heads or whole layers."""
        rows = [row for row in self.select(part, source, layers=layers) if row["finite"]]
        means = [float(np.mean([row[key] for row in rows])) if rows else None for key in ("beta", "alpha")]
        z = [row["z"] or 0.0 for row in rows]
        return Count(
            n=len(rows),
            positive=sum(row["beta"] > 0 for row in rows),
            sure=sum(value > _SURE for value in z),
            negative=sum(row["beta"] < 0 for row in rows),
            surely_negative=sum(value < -_SURE for value in z),
            beta=means[0],
            alpha=means[1],
        )

    def finding(self, source: str) -> str:
        """One line: how many diagonals of a model are positive."""
        found = []
        if self.select("qk", source):
            qk, vo = self.count("qk", source), self.count("vo", source, layers=True)
            found += [qk.text("QK", "heads"), vo.text("VO", "layers")]
        if self.select("cb", source):
            found.append(self.count("cb", source).text("CB", "groups of state-space layers"))
        return ", ".join(found)

    @property
    def warnings(self) -> list[str]:
        """One line for each tensor with non-finite numbers, for skipped attention modules and for omitted factors."""
        out = []
        for info in self.sources:
            for name, bad in info.nonfinite.items():
                out.append(
                    f"{info.label}: `{name}` contains {bad:,} NaN or infinite numbers; its products have no statistics"
                )
            if info.unverified:
                out.append(unverified(info.label, info.unverified))
            if info.skipped:
                name, why = next(iter(info.skipped.items()))
                others = f" (and {len(info.skipped) - 1} more)" * (len(info.skipped) > 1)
                out.append(f"{info.label}: left out `{name}`{others}: {why}")
            if not self.options["fold_scales"] and any(row["layer_scale"] for row in self.select("vo", info.label)):
                out.append(
                    f"{info.label}: LayerScale multiplies what W_V W_O adds to each channel, including its sign; "
                    "fold_scales=True (--fold-scales) includes it"
                )
            if any(row["normalised"] for row in self.select("qk", info.label)):
                out.append(f"{info.label}: queries and keys are normalised before QK, so its scale is meaningless")
        return out

    def text(self) -> str:
        """A table and a finding for each model, and for several models a table that compares them."""
        blocks = [self._table(info) for info in self.sources]
        if len(self.sources) > 1:
            blocks.append(self._comparison())
        if warnings := self.warnings:
            blocks.append("\n".join(f"warning: {line}" for line in warnings))
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """JSON types: rows, spectra in the same order, sources, counts and options; without the corners."""
        counts = {
            info.label: {
                "qk_heads": asdict(self.count("qk", info.label)),
                "vo_layers": asdict(self.count("vo", info.label, layers=True)),
                "vo_heads": asdict(self.count("vo", info.label)),
            }
            | ({"cb_groups": asdict(self.count("cb", info.label))} if info.state_spaces else {})
            for info in self.sources
        }
        spectra = [None if s is None or not np.isfinite(s).all() else s.tolist() for s in self.spectra]
        return {
            "rows": self.records,
            "spectra": spectra,
            "counts": counts,
            "sources": [asdict(info) for info in self.sources],
            "options": self.options,
        }

    def plot(
        self,
        path: str | Path | None = None,
        view: View = "auto",
        *,
        heads: int = 8,
        values: Values = "layers",
        source: str | None = None,
        title: str | None = None,
    ) -> "Figure":
        """Draw the products.

        Args:
            path: a .png, .pdf or .svg file to write; None to return the figure only.
            view: `"grid"`: corners of the products, layers across and heads down (thesis Fig. 3.17 and 3.23);
                `"depth"`: alpha and beta against depth, models compared; `"auto"`: the grid for one model, else depth.
            heads: the largest number of heads in the grid, of each model.
            values: in the grid, W_V W_O of whole `"layers"`, of single `"heads"`, or `"both"`.
            source: label of a single model to draw.
            title: instead of the finding.

        Raises:
            UsageError: for an unknown view or model, or if no corners were kept (`clip=None`).
        """
        from weightscope import plots

        choice("view", view, get_args(View))
        choice("values", values, get_args(Values))
        labels = [info.label for info in self.sources]
        if source is not None:
            labels = [choice("source", source, labels)]
        if title is None:
            title = f"{labels[0]}: {self.finding(labels[0])}"
        rows = [row for row in self.records if row["source"] in labels]
        if view == "depth" or (view == "auto" and len(labels) > 1):
            figure = plots.products_by_depth(rows, title=title)
        elif not self.corners:
            raise UsageError("no corners were kept: compute the products with clip=64, or draw view='depth'")
        else:
            corners = {key: value for key, value in self.corners.items() if key.source in labels}
            widths = {row["width"] for row in rows}
            figure = plots.product_grid(corners, widths=sorted(widths), heads=heads, values=values, title=title)
        if path is not None:
            plots.save(figure, path)
        return figure

    def _table(self, info: SourceInfo) -> str:
        heads = "/".join(map(str, dict.fromkeys(info.heads)))
        kinds = [f"{info.modules} attention modules of {heads} heads"] if info.modules else []
        kinds += [f"{info.state_spaces} state-space layers"] if info.state_spaces else []
        text = f"{info.label}: {' and '.join(kinds)}, d = {'/'.join(map(str, info.widths))}"
        if info.bytes_read:
            text += f", read {info.bytes_read / 1e6:,.1f} MB"
        head = ("layer", "QK beta", "lowest", "highest", "alpha", "heads > 0", "VO beta", "alpha", "rank", "z")
        layers = dict.fromkeys((r["layer"], r["kind"]) for r in self.select("qk", info.label))
        rows = [self._cells(info.label, layer, kind) for layer, kind in layers]
        tables = [text_table(head, rows, left=())] if rows else []
        if info.state_spaces:
            tables.append(self._state_spaces(info.label))
        return "\n".join([text, *tables, self.finding(info.label)])

    def _state_spaces(self, label: str) -> str:
        head = ("layer", "CB beta", "lowest", "highest", "alpha", "groups > 0", "rank", "z")
        rows = []
        for layer in dict.fromkeys(row["layer"] for row in self.select("cb", label)):
            found = [row for row in self.select("cb", label) if row["layer"] == layer and row["finite"]]
            if not found:
                rows.append([f"{layer}", "not finite", *[""] * 6])
                continue
            beta, alpha, z, rank = ([row[key] for row in found] for key in ("beta", "alpha", "z", "effective_rank"))
            counted = f"{sum(b > 0 for b in beta)} of {len(beta)}"
            cells = map(_number, (float(np.mean(beta)), min(beta), max(beta), float(np.mean(alpha))))
            rows.append([f"{layer}", *cells, counted, f"{np.mean(rank):.0f}", f"{np.mean(z):+.1f}"])
        return text_table(head, rows, left=())

    def _cells(self, label: str, layer: int, kind: str) -> Sequence[str]:
        def rows(part: Part, layers: bool) -> list[Row]:
            found = self.select(part, label, layers=layers)
            return [row for row in found if (row["layer"], row["kind"]) == (layer, kind) and row["finite"]]

        qk, vo = rows("qk", layers=False), rows("vo", layers=True)
        name = f"{layer}" if kind == "self" else f"{layer} cross"
        beta = [row["beta"] for row in qk]
        cells = [name, *["not finite", "", "", "", ""]]
        if qk:
            alpha = float(np.mean([row["alpha"] for row in qk]))
            counted = f"{sum(b > 0 for b in beta)} of {len(qk)}"
            cells = [name, *map(_number, (float(np.mean(beta)), min(beta), max(beta), alpha)), counted]
        if not vo:
            return [*cells, "not finite", "", "", ""]
        z = "" if vo[0]["z"] is None else f"{vo[0]['z']:+.1f}"
        rank = "" if vo[0]["effective_rank"] is None else f"{vo[0]['effective_rank']:.0f}"
        return [*cells, _number(vo[0]["beta"]), _number(vo[0]["alpha"]), rank, z]

    def _comparison(self) -> str:
        head = ("mean over", "QK beta", "alpha", "heads > 0", "VO beta", "alpha", "layers < 0")
        rows = []
        for info in self.sources:
            qk, vo = self.count("qk", info.label), self.count("vo", info.label, layers=True)
            cells = [info.label, _number(qk.beta), _number(qk.alpha), f"{qk.positive} of {qk.n}"]
            rows.append([*cells, _number(vo.beta), _number(vo.alpha), f"{vo.negative} of {vo.n}"])
        return text_table(head, rows)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 or value == 0 else f"{value:.2e}"
