"""What `products` found: rows, a table for people, a figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from weightscope.errors import UsageError

Part = Literal["qk", "vo"]
View = Literal["auto", "grid", "depth"]
Row = dict[str, Any]
_SURE = 4.0  # |z|: a false alarm in 16,000 products
_WHAT = {"qk": "W_Q W_K^T", "vo": "W_V W_O"}


class Key(NamedTuple):
    """Names a product; `head` is None for a whole layer."""

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
        modules: how many attention modules.
        heads: of each of them.
        widths: d; one number unless towers differ.
        bytes_read: from disk or a hub; None for a model in memory.
        commit: at the hub; None elsewhere.
        nonfinite: name of a tensor -> how many of the entries that were used are NaN or infinite.
        skipped: name of an attention module -> why it is left out.
    """

    label: str
    modules: int
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    bytes_read: int | None
    commit: str | None
    nonfinite: dict[str, int]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Count:
    """How many products have a positive diagonal.

    Attributes:
        n: products with finite numbers.
        positive: with a diagonal mean above zero.
        sure: of these, with z > 4.
        negative: with a diagonal mean below zero.
        surely_negative: of these, with z < -4.
        beta: mean of their betas; None if there is none.
        alpha: mean of their alphas.
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


@dataclass(frozen=True)
class ProductsResult:
    """Statistics of products, one row for each.

    Attributes:
        rows: flat dictionaries, None where there is no number: `source`, `name` and `kind` of the attention module,
            `layer`, `head` (None for a whole layer), `part` ("qk" or "vo"), `width` d, `rank` r, the columns of
            `FactoredProduct.statistics`, `sign` of the diagonal mean, `spectral_norm`, `finite`, `rotary`,
            `normalised` (queries and keys are normalised before their product, so its scale means nothing),
            `layer_scale` (the model has one, folded in or not).
        spectra: singular values of each row's product, (r,); None where they were not asked for.
        corners: upper left entries of each product, float32.
        sources: the models.
        options: what was asked for.
    """

    rows: list[Row]
    spectra: list[np.ndarray | None]
    corners: dict[Key, np.ndarray]
    sources: list[SourceInfo]
    options: dict[str, Any]

    def select(self, part: Part, source: str | None = None, *, layers: bool | None = None) -> list[Row]:
        """The rows of a part; `layers` chooses whole layers (True) or heads (False)."""
        return [
            row
            for row in self.rows
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
        qk, vo = self.count("qk", source), self.count("vo", source, layers=True)
        return f"{qk.text('QK', 'heads')}, {vo.text('VO', 'layers')}"

    @property
    def warnings(self) -> list[str]:
        """What must not be overlooked: numbers that are not finite, attention that is left out."""
        out = []
        for info in self.sources:
            for name, bad in info.nonfinite.items():
                out.append(
                    f"{info.label}: `{name}` holds {bad:,} numbers that are NaN or infinite; its products have none"
                )
            if info.skipped:
                name, why = next(iter(info.skipped.items()))
                others = f" (and {len(info.skipped) - 1} more)" * (len(info.skipped) > 1)
                out.append(f"{info.label}: left out `{name}`{others}: {why}")
            if not self.options["fold_scales"] and any(row["layer_scale"] for row in self.select("vo", info.label)):
                out.append(
                    f"{info.label}: LayerScale multiplies what W_V W_O adds to each channel, its sign too; "
                    "fold_scales=True (--fold-scales) includes it"
                )
            if any(row["normalised"] for row in self.select("qk", info.label)):
                out.append(f"{info.label}: queries and keys are normalised before QK, whose scale means nothing")
        return out

    def text(self) -> str:
        """A table for each model, what was found in it, and for several models a table that compares them."""
        blocks = [self._table(info) for info in self.sources]
        if len(self.sources) > 1:
            blocks.append(self._comparison())
        if warnings := self.warnings:
            blocks.append("\n".join(f"warning: {line}" for line in warnings))
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: rows, spectra in their order, sources, counts and options; without the corners."""
        counts = {
            info.label: {
                "qk_heads": asdict(self.count("qk", info.label)),
                "vo_layers": asdict(self.count("vo", info.label, layers=True)),
                "vo_heads": asdict(self.count("vo", info.label)),
            }
            for info in self.sources
        }
        spectra = [None if s is None or not np.isfinite(s).all() else s.tolist() for s in self.spectra]
        return {
            "rows": self.rows,
            "spectra": spectra,
            "counts": counts,
            "sources": [asdict(info) for info in self.sources],
            "options": self.options,
        }

    def figure(
        self, view: View = "auto", *, heads: int = 8, source: str | None = None, title: str | None = None
    ) -> Any:
        """A matplotlib figure.

        Args:
            view: `"grid"`: corners of the products, layers across and heads down (thesis Fig. 3.17 and 3.23);
                `"depth"`: alpha and beta against depth, models compared; `"auto"`: the grid for one model, else depth.
            heads: at most so many heads in the grid, of each model.
            source: one model alone.
            title: instead of the finding.

        Raises:
            UsageError: if there is no such view or model, or nothing was kept to be drawn (`clip=None`).
        """
        from weightscope import plots

        if view not in get_args(View):
            raise UsageError(f"view: expected one of {', '.join(get_args(View))}, found {view!r}")
        labels = [info.label for info in self.sources]
        if source is not None and source not in labels:
            raise UsageError(f"source: expected one of {', '.join(labels)}, found {source!r}")
        labels = labels if source is None else [source]
        if title is None:
            title = "; ".join(f"{label}: {self.finding(label)}" for label in labels[:1])
        if view == "depth" or (view == "auto" and len(labels) > 1):
            rows = [row for row in self.rows if row["source"] in labels]
            return plots.products_by_depth(rows, title=title)
        if not self.corners:
            raise UsageError("nothing was kept to be drawn: compute the products with clip=64, or draw view='depth'")
        corners = {key: value for key, value in self.corners.items() if key.source in labels}
        widths = {row["width"] for row in self.rows if row["source"] in labels}
        return plots.product_grid(corners, widths=sorted(widths), heads=heads, title=title)

    def plot(self, path: str | Path, view: View = "auto", **options: Any) -> None:
        """Write `figure` as a .png, .pdf or .svg file."""
        from weightscope import plots

        plots.save(self.figure(view, **options), path)

    def _table(self, info: SourceInfo) -> str:
        heads = "/".join(map(str, dict.fromkeys(info.heads)))
        text = f"{info.label}: {info.modules} attention modules of {heads} heads, d = {'/'.join(map(str, info.widths))}"
        if info.bytes_read:
            text += f", read {info.bytes_read / 1e6:,.1f} MB"
        head = ("layer", "QK beta", "lowest", "highest", "alpha", "heads > 0", "VO beta", "alpha", "rank", "z")
        lines = [_line(head)]
        for layer, kind in dict.fromkeys((r["layer"], r["kind"]) for r in self.select("qk", info.label)):
            lines.append(_line(self._cells(info.label, layer, kind)))
        return "\n".join([text, *lines, self.finding(info.label)])

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
        width = max(len(info.label) for info in self.sources)
        head = ("QK beta", "alpha", "heads > 0", "VO beta", "alpha", "layers < 0")
        lines = [f"{'mean over':{width}} " + _line(head)]
        for info in self.sources:
            qk, vo = self.count("qk", info.label), self.count("vo", info.label, layers=True)
            cells = [_number(qk.beta), _number(qk.alpha), f"{qk.positive} of {qk.n}"]
            cells += [_number(vo.beta), _number(vo.alpha), f"{vo.negative} of {vo.n}"]
            lines.append(f"{info.label:{width}} " + _line(cells))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>10}" for cell in cells).rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 or value == 0 else f"{value:.2e}"
