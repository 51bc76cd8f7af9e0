"""Products of attention weights, head by head.

`W_Q W_K^T` of a head determines which tokens attend to which, `W_V W_O` of a head or a layer what they pass on, both
as maps of the d channels of the residual stream, in the row-vector convention. In trained transformers their diagonals
differ from noise (thesis Fig. 3.17 and 3.23), which mimetic initialisation reproduces.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from weightscope._util.in_order import in_order
from weightscope._util.names import joined, label_of, labels_of
from weightscope._util.results import Result, finite_or_none, row_table
from weightscope._util.threads import one_thread
from weightscope._util.workers import Workers
from weightscope.anatomy import (
    AttentionPart,
    NamedTensors,
    Parts,
    SSMPart,
    attention,
    named_tensors,
    parts_of,
)
from weightscope.anatomy.attention_part import NO_PRODUCT, NOTES
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.checkpoint import Checkpoint
from weightscope.errors import AnatomyError, UsageError, WeightscopeError
from weightscope.population import open_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Part = Literal["qk", "vo", "cb"]
Row = dict[str, Any]
_SURE = 4.0  # |z|: a false alarm in 16,000 products


class Key(NamedTuple):
    """Identifies a product; `head` is None for a whole layer."""

    source: str
    layer: int
    part: str
    head: int | None


@dataclass(frozen=True)
class SourceInfo:
    """One of the models."""

    label: str  # of the source
    modules: int  # number of attention modules
    heads: tuple[int, ...]  # number of heads of each module
    widths: tuple[int, ...]  # d; several numbers if the modules differ
    commit: str | None  # at the hub; None elsewhere
    nonfinite: dict[str, int]  # name of a tensor -> number of its entries used that are NaN or infinite
    skipped: dict[str, str]  # name of a module, or of a tensor that cannot be read -> why it is left out
    state_spaces: int = 0  # number of state-space layers
    by_names: tuple[str, ...] = ()  # modules whose order of packed rows follows from a part of the names


@dataclass(frozen=True)
class Count:
    """Numbers of products with a positive or negative diagonal, among those with finite numbers."""

    n: int
    positive: int  # with a diagonal mean above zero
    sure: int  # of these, with z > 4
    negative: int  # with a diagonal mean below zero
    surely_negative: int  # of these, with z < -4
    beta: float | None  # mean over the products; None without products
    alpha: float | None  # mean over the products; None without products

    def text(self, what: str, counted: str) -> str:
        """One phrase on the more frequent sign, such as "QK diagonal positive in 65 of 72 heads (64 with z > 4)"."""
        if not self.n:
            return f"{what}: no finite product"
        if self.positive >= self.negative:
            return f"{what} diagonal positive in {self.positive} of {self.n} {counted} ({self.sure} with z > {_SURE:g})"
        sure = f"{self.surely_negative} with z < -{_SURE:g}"
        return f"{what} diagonal negative in {self.negative} of {self.n} {counted} ({sure})"


@dataclass(frozen=True, eq=False, repr=False)
class ProductsResult(Result):
    """Statistics of products, one record for each.

    Records are flat, with None for undefined numbers: `source`, `name` of the attention module, `layer`, `head` (None
    for a whole layer), `part` ("qk", "vo" or "cb"), `level` ("head" or "layer"; W_V W_O has both), `width` d, `rank` r,
    the columns of `FactoredProduct.statistics`, `finite`, `rotary`, `normalised` (queries and keys are normalised
    before their product, so its scale is meaningless), `layer_scale` (the model has one, folded in or not).
    """

    records: list[Row]
    corners: dict[Key, np.ndarray]  # upper left entries of each product, float32
    sources: list[SourceInfo]  # the models
    options: dict[str, Any]  # the arguments of `products`
    failed: dict[str, str] = field(default_factory=dict)  # of several models, label -> why it has no products

    def __iadd__(self, other: "ProductsResult") -> Self:
        """Take the products of others."""
        self.records.extend(other.records)
        self.corners.update(other.corners)
        self.sources.extend(other.sources)
        return self

    def rows(self) -> list[Row]:
        return self.records

    def summary(self) -> str:
        labels = [info.label for info in self.sources]
        first = f"; {labels[0]}: {self.finding(labels[0])}" if labels else ""
        return f"{len(self.records):,} products of {', '.join(labels)}{first}"

    def select(self, part: Part, source: str | None = None, *, layers: bool | None = None) -> list[Row]:
        """The rows of a part; `layers` chooses whole layers (True) or heads (False)."""
        rows = (row for row in self.records if row["part"] == part and source in (None, row["source"]))
        return [row for row in rows if layers is None or (row["head"] is None) == layers]

    def count(self, part: Part, source: str | None = None, *, layers: bool = False) -> Count:
        """How many diagonals are positive, among heads or whole layers."""
        rows = [row for row in self.select(part, source, layers=layers) if row["finite"]]
        means = [float(np.mean([row[key] for row in rows])) if rows else None for key in ("beta", "alpha")]
        z = [row["z"] or 0.0 for row in rows]
        positive, sure = sum(row["beta"] > 0 for row in rows), sum(value > _SURE for value in z)
        negative, surely_negative = sum(row["beta"] < 0 for row in rows), sum(value < -_SURE for value in z)
        return Count(len(rows), positive, sure, negative, surely_negative, *means)

    def finding(self, source: str | None = None) -> str:
        """One line: how many diagonals of a model, or of all, are positive."""
        found = []
        if self.select("qk", source):
            qk, vo = self.count("qk", source), self.count("vo", source, layers=True)
            found += [qk.text("QK", "heads"), vo.text("VO", "layers")]
        if self.select("cb", source):
            found.append(self.count("cb", source).text("CB", "groups of state-space layers"))
        return ", ".join(found)

    def notes(self) -> list[str]:
        """One line for each tensor with non-finite numbers, for skipped attention modules and for omitted factors."""
        out = [f"{label}: left out: {why}" for label, why in self.failed.items()]
        for info in self.sources:
            more = []
            for name, bad in info.nonfinite.items():
                more.append(f"`{name}` contains {bad:,} NaN or infinite numbers; its products have no statistics")
            if info.skipped:
                more.append(f"left out {joined((f'`{name}` {why}' for name, why in info.skipped.items()), 4)}")
            if not self.options["fold_scales"] and any(row["layer_scale"] for row in self.select("vo", info.label)):
                sign = "LayerScale, a number or a norm multiplies what W_V W_O adds to each channel, including its sign"
                more.append(f"{sign}; fold_scales=True (--fold-scales) includes it, or says why it cannot")
            if info.by_names:
                order = f"the order of rows of {joined((f'`{name}`' for name in info.by_names), 2)}"
                more.append(f"{order} follows from a part of the names of timm's block; --layout chooses another")
            if any(row["normalised"] for row in self.select("qk", info.label)):
                more.append("queries and keys are normalised before QK, so its scale is meaningless")
            out += [f"{info.label}: {line}" for line in more]
        return [f"warning: {line}" for line in out]

    def text(self) -> str:
        """A table and a finding for each model, and for several models a table that compares them."""
        blocks = [self._table(info) for info in self.sources]
        if len(self.sources) > 1:
            blocks.append(self._comparison())
        if notes := self.notes():
            blocks.append("\n".join(notes))
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        counts: dict[str, Any] = {}
        for info in self.sources:
            kinds: list[tuple[str, Part, bool]] = [("qk_heads", "qk", False), ("vo_layers", "vo", True)]
            kinds.append(("vo_heads", "vo", False))
            if info.state_spaces:
                kinds.append(("cb_groups", "cb", False))
            counts[info.label] = {k: asdict(self.count(part, info.label, layers=whole)) for k, part, whole in kinds}
        about = {"sources": [asdict(info) for info in self.sources], "options": self.options, "failed": self.failed}
        return {"rows": self.records, "counts": counts} | about

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Draw the products; the file (.png, .pdf, .svg) is written if there is a path.

        Of one model, the corners of the products of at most 8 heads above those of W_V W_O of whole layers, layers
        across (thesis Fig. 3.17 and 3.23); of several, alpha and beta against depth.
        """
        from weightscope import plots

        labels = [info.label for info in self.sources]
        title = title or f"{labels[0] if len(labels) == 1 else f'{len(labels)} models'}: {self.finding()}"
        if len(labels) > 1:
            figure = plots.products_by_depth(self.records, title=title)
        elif not self.corners:
            raise UsageError("no corners were kept: compute the products with clip=64")
        else:
            widths = sorted({row["width"] for row in self.records})
            figure = plots.product_grid(self.corners, widths=widths, title=title)
        return plots.finished(figure, path)

    def _table(self, info: SourceInfo) -> str:
        heads = "/".join(map(str, dict.fromkeys(info.heads)))
        kinds = [f"{info.modules} attention modules of {heads} heads"] if info.modules else []
        kinds += [f"{info.state_spaces} state-space layers"] if info.state_spaces else []
        lines = [f"{info.label}: {' and '.join(kinds)}, d = {'/'.join(map(str, info.widths))}"]
        parts: tuple[tuple[Part, str], ...] = (("qk", "heads"), ("cb", "groups"))
        for part, counted in parts:
            columns = {"layer": "{layer}", f"{part.upper()} beta": "{beta:.4g}", "lowest": "{lowest:.4g}"}
            columns |= {"highest": "{highest:.4g}", "alpha": "{alpha:.4g}", f"{counted} > 0": "{positive}"}
            columns |= {"VO beta": "{vo_beta:.4g}", "VO alpha": "{vo_alpha:.4g}"} if part == "qk" else {}
            columns |= {"rank": "{rank:.0f}", "z": "{z:+.1f}"}
            table = []
            mine, whole = self.select(part, info.label), self.select("vo", info.label, layers=True)
            for layer in dict.fromkeys(row["layer"] for row in mine):
                here, vo = (_means([r for r in rows if r["layer"] == layer]) for rows in (mine, whole))
                row = {"layer": layer} | here
                if part == "qk":  # rank and z are those of VO
                    row |= {"vo_beta": vo.get("beta"), "vo_alpha": vo.get("alpha")}
                    row |= {"rank": vo.get("rank"), "z": vo.get("z")}
                table.append(row)
            lines += [row_table(columns, table, left=())] * bool(table)
        return "\n".join([*lines, self.finding(info.label)])

    def _comparison(self) -> str:
        columns = {"mean over": "{label}", "QK beta": "{qk.beta:.4g}", "alpha": "{qk.alpha:.4g}"}
        columns |= {"heads > 0": "{qk.positive} of {qk.n}", "VO beta": "{vo.beta:.4g}", "VO alpha": "{vo.alpha:.4g}"}
        columns |= {"layers < 0": "{vo.negative} of {vo.n}"}
        labels = [info.label for info in self.sources]
        counts = [(label, self.count("qk", label), self.count("vo", label, layers=True)) for label in labels]
        return row_table(columns, [{"label": label, "qk": qk, "vo": vo} for label, qk, vo in counts])


def _means(rows: Sequence[Row]) -> dict[str, Any]:
    """Means over the finite products, and the range of beta; empty without any."""
    finite = [row for row in rows if row["finite"]]
    if not finite:
        return {}
    beta = [row["beta"] for row in finite]
    out = {"beta": float(np.mean(beta)), "lowest": min(beta), "highest": max(beta)}
    for name, key in (("alpha", "alpha"), ("rank", "effective_rank"), ("z", "z")):
        known = [row[key] for row in finite if row[key] is not None]
        out[name] = float(np.mean(known)) if known else math.nan
    return out | {"positive": f"{sum(b > 0 for b in beta)} of {len(beta)}"}


# --- computing -------------------------------------------------------------------------------------------------------

_BATCH = 1 << 18  # entries of one factor of a batch of heads: 2 MB as float64


class _Last(NamedTensors):
    """A checkpoint's tensors; the last one is kept, since each part of a fused one asks for the whole."""

    last: tuple[str, Tensor] | None = None

    def get(self, name: str) -> Tensor:
        if self.last is None or self.last[0] != name:
            self.last = None  # before the next is read
            self.last = name, super().get(name)
        return self.last[1]


def read_once(source: Any, config: Mapping[str, Any] | None) -> NamedTensors:
    """The tensors of a model; of a checkpoint the last one is kept."""
    return _Last(source, config) if isinstance(source, Checkpoint) else named_tensors(source, config)


class ModelProducts:
    """One model, its self-attention and its state-space layers, and the rows of their products.

    Corners are allocated before anything is read: small arrays between large tensors would fragment the memory of those
    and prevent its reuse (250 MB in place of 70 for 16 layers of 8 MB).
    """

    def __init__(
        self,
        source: Any,
        label: str = "",
        config: Mapping[str, Any] | None = None,
        clip: int | None = None,
    ) -> None:
        source = open_network(source)
        self.checkpoint = source if isinstance(source, Checkpoint) else None
        self.tensors = read_once(source, config)
        state_spaces: Parts[SSMPart] = parts_of("state-space layers", self.tensors, strict=None)
        found: Parts[AttentionPart] = parts_of("attention modules", self.tensors, strict=None)
        self.skipped = {part.name: why for part in found if (why := _unusable(part))}
        usable: list[Any] = [*(part for part in found if part.name not in self.skipped), *state_spaces]
        if not usable:
            attention(self.tensors)  # without any, it says what there is
            name, why = next(iter(self.skipped.items()))
            raise AnatomyError(f"expected self-attention, found none: `{name}`: {why}")
        self.skipped |= {unread.name: unread.why for unread in (*found.unread, *state_spaces.unread)}
        self.parts = [part for part in usable if isinstance(part, AttentionPart)]
        self.state_spaces = [part for part in usable if isinstance(part, SSMPart)]
        self.label = label
        self.nonfinite: dict[str, int] = {}
        self.rows: list[Row] = []
        square = [not part.notes & {*NO_PRODUCT} for part in self.parts]
        rows = sum(part.heads * (2 if vo else 1) + vo for part, vo in zip(self.parts, square, strict=True))
        rows += sum(part.groups for part in self.state_spaces)
        sides = [*(part.width for part in self.parts), *(part.channels for part in self.state_spaces)]
        side = min(clip or 0, max(sides))
        self.corners = np.zeros((rows, side, side), dtype=np.float32)

    def add(
        self,
        part: AttentionPart | SSMPart,
        name: Part,
        heads: Sequence[int | None],
        product: FactoredProduct,
        scaled: bool = False,
    ) -> None:
        """Rows for products of one part."""
        statistics = {column: values.tolist() for column, values in product.statistics().items()}
        facts = {key: getattr(part, key, False) for key in ("rotary", "normalised")} | {"layer_scale": scaled}
        corner = product.corner(self.corners.shape[1])
        start = len(self.rows)
        self.corners[start : start + len(heads), : corner.shape[-2], : corner.shape[-1]] = corner.numpy()
        for i, head in enumerate(heads):
            row: Row = {"source": self.label, "name": part.name, "layer": part.layer, "head": head, "part": name}
            row |= {"level": "layer" if head is None else "head", "width": product.shape[0], "rank": product.rank}
            row |= {column: finite_or_none(values[i]) for column, values in statistics.items()}
            self.rows.append(row | {"finite": row["beta"] is not None} | facts)

    def read(self, part: AttentionPart | SSMPart, name: Any) -> Tensor:
        """A factor, on the CPU; entries that are NaN or infinite are counted."""
        value = part.read(name)
        if not math.isfinite(value.sum()) and (bad := int((~value.isfinite()).sum())):
            tensor = part.parameters[name][0]
            self.nonfinite[tensor] = self.nonfinite.get(tensor, 0) + bad
        return value.cpu()


@one_thread()
def products(
    *sources: Any,
    labels: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    fold_norms: bool = False,
    fold_scales: bool = False,
    clip: int | None = 64,
    workers: Workers | int | None = 1,
) -> ProductsResult:
    """Statistics of `W_Q W_K^T` of every head and `W_V W_O` of every layer and head (thesis Fig. 3.17 and 3.23).

    Of state-space layers, of `W_C^T W_B` of every group (part "cb"; Mamba has one group, and p inner channels for d).

    With W_Q, W_K, W_V (d, k) and W_O (k, d) of a head and tokens as rows x of X (n, d), logits are
    `x W_Q W_K^T y^T / sqrt(k)` and the layer adds `sum_h A_h X W_V W_O` to the residual stream; of models that rotate
    queries and keys, logits of tokens at the same position. Biases are no part of the products, and cross-attention is
    left out. Query heads that share keys and values (grouped queries) are each multiplied with those that they use.
    `FactoredProduct.statistics` defines the columns. Numbers are computed in float64 from the factors; d x d matrices
    are formed for whole layers only, one at a time; and one layer is read at a time.

    Args:
        sources: models: paths, `hf://org/name[@revision]`, `Checkpoint`s, modules, mappings of tensors.
        labels: one for each source; by default taken from paths and classes.
        config: of the model, for mappings and files without one; `{"num_attention_heads": H}` is enough.
        fold_norms: multiply the gain g of the normalisation before the attention into what reads its output:
            `diag(g) W_Q W_K^T diag(g)` and `diag(g) W_V W_O`. Its subtraction of the mean is not folded in.
        fold_scales: multiply LayerScale's factors s (d,), half of which may be negative, into what the attention adds
            to the residual stream: `W_V W_O diag(s)`.
        clip: number of rows and columns at the upper left of each product to keep for pictures; None for none.
        workers: processes that read several models, each of them one at a time; as of `covariance`.

    DataError if a source cannot be read; AnatomyError if a model has neither state-space layers nor self-attention;
    UsageError for an invalid option. Of several models those with an error are in `failed`, unless all have one.

    Example:
        >>> found = products("vit/", mimetic_attention_(ViT(224, 16, 384, 12, 6, 10)), labels=["pretrained", "mimetic"])
        >>> print(found.text())
        >>> found.plot("products.png")
    """
    if clip is not None and clip < 1:
        raise UsageError(f"clip: expected at least 1 or None, found {clip}")
    if not sources:
        raise UsageError("products: expected at least one model, found none")
    names = labels_of([label_of(source) for source in sources], labels)
    folded = {"fold_norms": fold_norms, "fold_scales": fold_scales}
    out = ProductsResult([], {}, [], folded)
    one: Any = partial(_products_of, config=config, clip=clip, folded=folded)
    items = list(zip(sources, names, strict=True))
    if len(items) == 1:
        out += one(items[0])
        return out
    errors: dict[str, WeightscopeError] = {}
    for label, found in zip(names, in_order(one, items, names, workers), strict=True):
        if isinstance(found, WeightscopeError):
            errors[label] = found
        else:
            out += found
    if len(errors) == len(items):
        raise errors[names[0]]
    out.failed.update({label: str(error).removeprefix(f"{label}: ") for label, error in errors.items()})
    return out


def _products_of(item: tuple[Any, str], *, config: Any, clip: int | None, folded: Mapping[str, bool]) -> ProductsResult:
    """The products of one model, with its label, and what is known about the model."""
    source, label = item
    try:
        model = ModelProducts(source, label, config, clip)
        compute(model, **folded)
    except AnatomyError as error:
        raise AnatomyError(f"{label}: {error}") from error
    checkpoint = model.checkpoint
    info = SourceInfo(
        label,
        modules=len(model.parts),
        heads=tuple(part.heads for part in model.parts),
        widths=tuple(dict.fromkeys(row["width"] for row in model.rows)),
        commit=None if checkpoint is None else checkpoint.commit,
        nonfinite=model.nonfinite,
        skipped=model.skipped,
        state_spaces=len(model.state_spaces),
        by_names=tuple(part.name for part in model.parts if part.by_names),
    )
    corners = {}
    for row, corner in zip(model.rows, model.corners, strict=True):
        corners[Key(*(row[key] for key in Key._fields))] = corner[: row["width"], : row["width"]]
    return ProductsResult(model.rows, corners if clip else {}, [info], {})


def compute(
    model: ModelProducts, fold_norms: bool = False, fold_scales: bool = False, *, value_heads: bool = True
) -> None:
    """Compute the products of one model anew: `rows`, those of W_V W_O of single heads only if `value_heads`."""
    model.rows = []
    if fold_scales and model.parts and not any(part.layer_scale for part in model.parts):
        raise AnatomyError(f"`{model.parts[0].name}`: no LayerScale to fold has a known name, here or in another layer")
    for part in model.parts:
        gain = part.norm_gain() if fold_norms else None
        scaled = part.layer_scale is not None
        scale = part.layer_scale_factors() if fold_scales else None
        q, k = model.read(part, "q"), model.read(part, "k")  # (H, d, k), (kv, d, k)
        for heads in _batches(part, part.head_width):
            groups = [part.kv_head(head) for head in heads]
            product = FactoredProduct(_scaled(q[heads], gain), _scaled(k[groups], gain))
            model.add(part, "qk", heads, product, scaled)
            del product
        del q, k
        if notes := [NOTES[note] for note in NO_PRODUCT if note in part.notes]:
            model.skipped[part.name] = f"(W_V W_O alone: {notes[0]}, so that it is no map of the stream to itself)"
        else:
            _values_outputs(model, part, gain, scale, scaled, value_heads)
    for layer in model.state_spaces:
        # W_C^T W_B of each group, (G, d, d) of rank N: a map of what C and B read, the residual stream in Mamba-2, the
        # p inner channels in Mamba. Where states do not decay, token i adds C_i^T B_j of token j (thesis Eq. 3.38).
        c, b = (model.read(layer, name).unflatten(0, (layer.groups, layer.state)).mT for name in ("C", "B"))
        model.add(layer, "cb", range(layer.groups), FactoredProduct(c, b))


def _unusable(part: AttentionPart) -> str | None:
    """Why the products of an attention module are left out; None if they are not."""
    if part.width != part.kv_width:
        widths = f"queries read {part.width} channels and keys {part.kv_width}"
        return f"{widths}, so the products are not square and have no diagonal"
    return "cross-attention: queries and keys read two different streams" if part.kind == "cross" else None


def _batches(part: AttentionPart, width: int) -> list[list[int]]:
    """Heads in batches: small enough for little memory, large enough for speed."""
    size = max(1, _BATCH // (part.width * width))
    return [list(range(i, min(part.heads, i + size))) for i in range(0, part.heads, size)]


def _values_outputs(
    model: ModelProducts, part: AttentionPart, gain: Tensor | None, scale: Tensor | None, scaled: bool, by_head: bool
) -> None:
    v, o = model.read(part, "v"), model.read(part, "o")  # (kv, d, k), (H, k, d)
    for heads in _batches(part, part.value_width) if by_head else ():
        groups = [part.kv_head(head) for head in heads]
        product = FactoredProduct(_scaled(v[groups], gain), _scaled(o[heads].mT, scale))
        model.add(part, "vo", heads, product, scaled)
        del product
    values = v.mT.reshape(-1, part.width).T  # (d, kv k), a view
    outputs = o.reshape(part.kv_heads, -1, part.value_width, part.width)
    # Query heads of one group add up behind the value head that they share.
    outputs = outputs[:, 0] if outputs.shape[1] == 1 else outputs.sum(1, dtype=torch.float64)
    product = FactoredProduct(_scaled(values, gain)[None], _scaled(outputs.reshape(-1, part.width).T, scale)[None])
    model.add(part, "vo", [None], product, scaled)


def _scaled(value: Tensor, gain: Tensor | None) -> Tensor:
    return value if gain is None else value.double() * gain.cpu()[:, None]
