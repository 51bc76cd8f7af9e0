"""The products of every layer and head of one or several models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope._util.names import numbered
from weightscope.analysis.attention_products.factored import STATISTICS, FactoredProduct
from weightscope.analysis.attention_products.reading import Reader, gain_before, mean_rotation, name_of
from weightscope.analysis.attention_products.result import Key, ProductsResult, SourceInfo
from weightscope.analysis.attention_products.state_spaces import output_input_product
from weightscope.anatomy import AttentionPart, SSMPart
from weightscope.anatomy.layer_scale import layer_scale
from weightscope.errors import AnatomyError, UsageError

Spectra = Literal["heads", "all", "none"]
AVERAGE = range(256)  # relative positions of rotary="average"
_BATCH = 1 << 18  # entries of one factor of a batch of heads: 2 MB as float64
_BIASES = {"qk": ("bias_on_keys", "bias_on_queries", "bias_constant"), "vo": ("bias_on_output",)}
_COLUMNS = (*STATISTICS, *_BIASES["qk"], *_BIASES["vo"])
_Found = tuple[FactoredProduct, dict[str, Tensor]]
_Norm = tuple[Tensor | None, Tensor | None]  # gain and shift


@dataclass(frozen=True)
class Options:
    """Options of `products`."""

    fold_norms: bool
    fold_scales: bool
    biases: bool
    rotary: Any
    spectra: Spectra
    clip: int | None

    @property
    def positions(self) -> range | None:
        """Relative positions that the rotation is averaged over; None for position 0."""
        if self.rotary == "zero" or self.rotary == 0:
            return None
        if self.rotary == "average":
            return AVERAGE
        return range(self.rotary, self.rotary + 1) if isinstance(self.rotary, int) else self.rotary

    def checked(self) -> "Options":
        """These options.

        Raises:
            UsageError: if one is invalid.
        """
        words, number = self.rotary in ("zero", "average"), type(self.rotary) is int
        if not (words or number or (isinstance(self.rotary, range) and len(self.rotary))):
            raise UsageError(
                f"rotary: expected 'zero', 'average', a relative position or a range of them, found {self.rotary!r}"
            )
        choice("spectra", self.spectra, get_args(Spectra))
        if self.clip is not None and self.clip < 1:
            raise UsageError(f"clip: expected at least 1 or None, found {self.clip}")
        return self


def products(
    *sources: Any,
    labels: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    layers: int | Sequence[int] | None = None,
    cross: bool = False,
    fold_norms: bool = False,
    fold_scales: bool = False,
    biases: bool = False,
    rotary: Any = "zero",
    spectra: Spectra = "heads",
    clip: int | None = 64,
) -> ProductsResult:
    """Statistics of `W_Q W_K^T` of every head and `W_V W_O` of every layer and head (thesis Fig. 3.17 and 3.23).

    Of state-space layers, of `W_C^T W_B` of every group (part "cb"; Mamba has one group, and p inner channels for d).

    With W_Q, W_K, W_V (d, k) and W_O (k, d) of a head and tokens as rows x of X (n, d), logits are
    `x W_Q W_K^T y^T / sqrt(k)` and the layer adds `sum_h A_h X W_V W_O` to the residual stream. Query heads that share
    keys and values (grouped queries) are each multiplied with those that they use. `FactoredProduct.statistics` defines
    the columns. Numbers are computed in float64 from the factors; d x d matrices are formed for whole layers only, one
    at a time; and one layer is read at a time.

    Args:
        sources: models: paths, `hf://org/name[@revision]`, `Checkpoint`s, modules, mappings of tensors.
        labels: one for each source; by default taken from paths and classes.
        config: of the model, for mappings and files without one; `{"num_attention_heads": H}` is enough.
        layers: indices of layers, from 0; None for all.
        cross: include cross-attention if both streams have the same width; a diagonal then relates two streams.
        fold_norms: multiply the gain g of the normalisation before the attention into what reads its output:
            `diag(g) W_Q W_K^T diag(g)` and `diag(g) W_V W_O`. Its subtraction of the mean is not folded in.
        fold_scales: multiply LayerScale's factors s (d,), if the model has them, into what the attention adds to the
            residual stream: `W_V W_O diag(s)`. Without it such models cause a warning: half of s may be negative.
        biases: add columns on the contribution of biases, which is not part of the product. Of queries and keys:
            `bias_on_keys`, ||W_K b_Q|| / sqrt(d), a preference for some keys independent of the query;
            `bias_on_queries`, ||W_Q b_K|| / sqrt(d), and `bias_constant`, b_Q b_K^T, which the softmax ignores.
            Of values and outputs: `bias_on_output`, ||b_V W_O|| / sqrt(d), for whole layers
            ||b_V W_O + b_O|| / sqrt(d), added to every token since attention weights sum to one. With `fold_norms`
            the normalisation's shift is part of the biases.
        rotary: for models that rotate queries and keys: the product at relative position `"zero"`, at another one (an
            integer), or averaged over a range, `W_Q mean(R_t) W_K^T`; `"average"` is over 0 to 255. No effect on other
            models.
        spectra: compute singular values of `"heads"` (from k x k matrices), of `"all"` (whole layers need an SVD of
            d x d, which takes longer than everything else), or of `"none"`.
        clip: number of rows and columns at the upper left of each product to keep for pictures; None for none.

    Raises:
        DataError: if a source cannot be read.
        AnatomyError: if a model has neither state-space layers nor attention, or only some between streams of different
            widths.
        UsageError: if an option is invalid.

    Example:
        >>> found = products("vit/", mimetic_attention_(ViT(224, 16, 384, 12, 6, 10)), labels=["pretrained", "mimetic"])
        >>> print(found.text())
        >>> found.plot("products.png")
    """
    options = Options(fold_norms, fold_scales, biases, rotary, spectra, clip).checked()
    if not sources:
        raise UsageError("products: expected at least one model, found none")
    if labels is not None and (len(labels) != len(sources) or len(set(labels)) < len(labels)):
        raise UsageError(f"labels: expected {len(sources)} unique names, found {list(labels)}")
    names: list[str] = list(labels or ())
    for source in sources if labels is None else ():
        names.append(numbered(name_of(source), names))
    stated = {"rotary": str(rotary), "fold_norms": fold_norms, "fold_scales": fold_scales, "cross": cross}
    out = ProductsResult([], [], {}, [], stated)
    for source, label in zip(sources, names, strict=True):
        try:
            _add(out, Reader(source, config, layers, cross), label, options)
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from error
    return out


@dataclass
class _Table:
    """One model's numbers, in arrays that are allocated before anything is read.

    Small results allocated between large tensors would fragment the memory of those and prevent its reuse.
    """

    keys: list[tuple[AttentionPart, str, int | None, int]]
    numbers: np.ndarray  # (rows, columns)
    spectra: np.ndarray  # (rows, largest rank)
    corners: np.ndarray  # (rows, n, n)

    @classmethod
    def for_parts(cls, parts: Sequence[AttentionPart], options: Options) -> "_Table":
        rows = sum(2 * part.heads + 1 for part in parts)
        rank: Any = {"heads": _head_rank, "all": lambda part: part.width, "none": lambda part: 0}[options.spectra]
        side = min(options.clip or 0, max((part.width for part in parts), default=0))
        return cls(
            [],
            np.full((rows, len(_COLUMNS)), np.nan),
            np.full((rows, max(map(rank, parts), default=0)), np.nan),
            np.full((rows, side, side), np.nan, dtype=np.float32),
        )

    def add(self, part: AttentionPart, name: str, heads: Sequence[int | None], found: "_Found", spectra: str) -> None:
        """Rows for products of one part."""
        product, more = found
        start = len(self.keys)
        rows = slice(start, start + len(heads))
        self.keys += [(part, name, head, product.rank) for head in heads]
        for column, values in {**product.statistics(), **more}.items():
            self.numbers[rows, _COLUMNS.index(column)] = values.numpy()
        if spectra == "all" or (spectra == "heads" and heads[0] is not None and product.small):
            spectrum = product.singular_values().numpy()
            self.spectra[rows, : spectrum.shape[1]] = spectrum
        if self.corners.size:
            corner = product.corner(self.corners.shape[1])
            self.corners[rows, : corner.shape[1], : corner.shape[2]] = corner.numpy()


def _head_rank(part: AttentionPart) -> int:
    return max(part.head_width, part.value_width)


def _add(out: ProductsResult, reader: Reader, label: str, options: Options) -> None:
    """Append one model's rows."""
    nonfinite: dict[str, int] = {}
    scaled: dict[str, bool] = {}
    table = _Table.for_parts(reader.parts, options)
    for part in reader.parts:
        gain, shift = gain_before(reader.source, part) if options.fold_norms else (None, None)
        _queries_keys(table, reader, part, options, (gain, shift), nonfinite)
        name = layer_scale(reader.source, part)
        scale = reader.source.get(name).double().flatten().cpu() if name and options.fold_scales else None
        scaled[part.name] = name is not None
        _values_outputs(table, part, options, (gain, shift), scale, nonfinite)
        reader.forget()
    for i, (part, name, head, rank) in enumerate(table.keys):
        row = {"source": label, "name": part.name, "kind": part.kind, "layer": part.layer, "head": head, "part": name}
        row |= {"width": part.width, "rank": rank}
        numbers = {column: _plain(value) for column, value in zip(_COLUMNS, table.numbers[i].tolist(), strict=True)}
        beta, spectrum = numbers["beta"], table.spectra[i, :rank]
        known = bool(len(spectrum)) and not np.isnan(spectrum).any()
        row |= {column: numbers[column] for column in STATISTICS}
        row["sign"] = None if beta is None else (beta > 0) - (beta < 0)
        row["spectral_norm"] = float(spectrum[0]) if known else None
        row |= {"finite": beta is not None, "rotary": part.rotary, "normalised": part.normalised}
        row["layer_scale"] = scaled[part.name]
        if options.biases:
            row |= {column: numbers[column] for column in _BIASES[name]}
        out.records.append(row)
        out.spectra.append(spectrum if known else None)
        if options.clip is not None:
            side = min(options.clip, part.width)
            out.corners[Key(label, part.layer, name, head, part.kind)] = table.corners[i, :side, :side]
    for state_space in reader.state_spaces:
        _outputs_inputs(out, state_space, label, options, nonfinite)
        reader.forget()
    heads = tuple(part.heads for part in reader.parts)
    commit = None if reader.checkpoint is None else reader.checkpoint.commit
    widths = tuple(dict.fromkeys(row["width"] for row in out.records if row["source"] == label))
    unverified = () if reader.checkpoint is None else reader.checkpoint.unverified
    facts = reader.bytes_read, commit, nonfinite, reader.skipped, unverified
    info = SourceInfo(label, len(reader.parts), heads, widths, *facts, state_spaces=len(reader.state_spaces))
    out.sources.append(info)


def _outputs_inputs(
    out: ProductsResult, part: SSMPart, label: str, options: Options, nonfinite: dict[str, int]
) -> None:
    """Append the rows of one state-space layer, one for each group."""
    product = output_input_product(part)
    spectra = (
        product.singular_values().numpy()
        if options.spectra == "all" or (options.spectra == "heads" and product.small)
        else None
    )
    numbers = {name: values.tolist() for name, values in product.statistics().items()}
    if not bool(product.finite.all()):
        for letter in ("B", "C"):
            bad = int((~part.read(letter).isfinite()).sum())
            name = part.parameters[letter][0]
            nonfinite |= {name: nonfinite.get(name, 0) + bad} if bad else {}
    for group in range(part.groups):
        beta = _plain(numbers["beta"][group])
        row = {"source": label, "name": part.name, "kind": "self", "layer": part.layer, "head": group, "part": "cb"}
        row |= {"width": product.shape[0], "rank": product.rank}
        row |= {name: _plain(values[group]) for name, values in numbers.items()}
        row["sign"] = None if beta is None else (beta > 0) - (beta < 0)
        row["spectral_norm"] = None if spectra is None else _plain(float(spectra[group, 0]))
        row |= {"finite": beta is not None, "rotary": False, "normalised": False, "layer_scale": False}
        out.records.append(row)
        out.spectra.append(None if spectra is None or beta is None else spectra[group])
        if options.clip is not None:
            key = Key(label, part.layer, "cb", group)
            out.corners[key] = product.corner(options.clip)[group].float().numpy()


def _batches(part: AttentionPart, width: int) -> list[list[int]]:
    """Heads in batches: small enough for little memory, large enough for speed."""
    size = max(1, _BATCH // (part.width * width))
    return [list(range(i, min(part.heads, i + size))) for i in range(0, part.heads, size)]


def _queries_keys(
    table: _Table, reader: Reader, part: AttentionPart, options: Options, norm: _Norm, nonfinite: dict[str, int]
) -> None:
    q, k = _read(part, "q", nonfinite), _read(part, "k", nonfinite)  # (H, d, k), (kv, d, k)
    bias_q = _bias(part, "q", q, norm[1]) if options.biases else None
    bias_k = _bias(part, "k", k, norm[1]) if options.biases else None
    turn = None
    if options.positions is not None and part.rotary:
        turn = mean_rotation(reader.source, part, options.positions)
    for heads in _batches(part, part.head_width):
        groups = [part.kv_head(head) for head in heads]
        left, right = _scaled(q[heads], norm[0]), _scaled(k[groups], norm[0])
        left = left if turn is None else left.double() @ turn
        more = {}
        if bias_q is not None and bias_k is not None:
            b, c = bias_q[heads] if turn is None else bias_q[heads] @ turn, bias_k[groups]
            more = {
                "bias_on_keys": _per_channel(torch.einsum("hdk,hk->hd", right.double(), b)),
                "bias_on_queries": _per_channel(torch.einsum("hdk,hk->hd", left.double(), c)),
                "bias_constant": (b * c).sum(-1),
            }
        table.add(part, "qk", heads, (FactoredProduct(left, right), more), options.spectra)


def _values_outputs(
    table: _Table,
    part: AttentionPart,
    options: Options,
    norm: _Norm,
    scale: Tensor | None,
    nonfinite: dict[str, int],
) -> None:
    v, o = _read(part, "v", nonfinite), _read(part, "o", nonfinite)  # (kv, d, k), (H, k, d)
    bias = _bias(part, "v", v, norm[1]) if options.biases else None
    total = torch.zeros(part.width, dtype=torch.float64)
    for heads in _batches(part, part.value_width):
        groups = [part.kv_head(head) for head in heads]
        more = {}
        if bias is not None:
            added = torch.einsum("hk,hkd->hd", bias[groups], o[heads].double())
            added = added if scale is None else added * scale
            total += added.sum(0)
            more = {"bias_on_output": _per_channel(added)}
        product = FactoredProduct(_scaled(v[groups], norm[0]), _scaled(o[heads].mT, scale))
        table.add(part, "vo", heads, (product, more), options.spectra)
        del product
    more = {}
    if bias is not None:
        own = part.read_bias("o")
        if own is not None:
            total += own.double().cpu() if scale is None else own.double().cpu() * scale
        more = {"bias_on_output": _per_channel(total)[None]}
    values = v.mT.reshape(-1, part.width).T  # (d, kv k), a view
    outputs = o.reshape(part.kv_heads, -1, part.value_width, part.width)
    # Query heads of one group add up behind the value head that they share.
    outputs = outputs[:, 0] if outputs.shape[1] == 1 else outputs.sum(1, dtype=torch.float64)
    product = FactoredProduct(_scaled(values, norm[0])[None], _scaled(outputs.reshape(-1, part.width).T, scale)[None])
    table.add(part, "vo", [None], (product, more), options.spectra)


def _read(part: AttentionPart, name: Any, nonfinite: dict[str, int]) -> Tensor:
    value = part.read(name)
    if not math.isfinite(value.sum()) and (bad := int((~value.isfinite()).sum())):
        tensor = part.parameters[name][0]
        nonfinite[tensor] = nonfinite.get(tensor, 0) + bad
    return value.cpu()


def _scaled(value: Tensor, gain: Tensor | None) -> Tensor:
    return value if gain is None else value.double() * gain.cpu()[:, None]


def _bias(part: AttentionPart, name: Any, weight: Tensor, shift: Tensor | None) -> Tensor:
    """(heads, k) float64: the bias, plus the contribution of the shift of the normalisation before."""
    own = part.read_bias(name)
    bias = torch.zeros(len(weight), weight.shape[2], dtype=torch.float64) if own is None else own.double().cpu()
    return bias if shift is None else bias + torch.einsum("hdk,d->hk", weight.double(), shift.cpu())


def _per_channel(vectors: Tensor) -> Tensor:
    """||x|| / sqrt(d) along the last axis."""
    return vectors.norm(dim=-1) / math.sqrt(vectors.shape[-1])


def _plain(value: float) -> float | None:
    """A finite number, or None, for JSON."""
    return value if math.isfinite(value) else None
