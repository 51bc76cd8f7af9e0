"""Products of queries and keys, and of values and outputs, of attention modules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightscope.analysis.attention_products.options import Options
from weightscope.analysis.attention_products.reading import Reader, gain_before, mean_rotation
from weightscope.analysis.attention_products.result import ProductsResult
from weightscope.anatomy import AttentionPart
from weightscope.anatomy.attention_modules import layer_scale
from weightscope.anatomy.factored_products import STATISTICS, FactoredProduct

_BATCH = 1 << 18  # entries of one factor of a batch of heads: 2 MB as float64
_BIASES = {"qk": ("bias_on_keys", "bias_on_queries", "bias_constant"), "vo": ("bias_on_output",)}
_COLUMNS = (*STATISTICS, *_BIASES["qk"], *_BIASES["vo"])
_Found = tuple[FactoredProduct, dict[str, Tensor]]
_Norm = tuple[Tensor | None, Tensor | None]  # gain and shift


def append_attention(
    out: ProductsResult, reader: Reader, label: str, options: Options, nonfinite: dict[str, int]
) -> None:
    """Append the products of a model's attention modules to a result.

    Args:
        out: the result.
        reader: of the model.
        label: of the model.
        options: of `products`.
        nonfinite: number of entries of each tensor that are NaN or infinite; counted here.
    """
    table = _Table.for_parts(reader.parts, options)
    scaled: dict[str, bool] = {}
    for part in reader.parts:
        norm = gain_before(reader.source, part) if options.fold_norms else (None, None)
        _queries_keys(table, reader, part, options, norm, nonfinite)
        name = layer_scale(reader.source, part)
        scale = reader.source.get(name).double().flatten().cpu() if name and options.fold_scales else None
        scaled[part.name] = name is not None
        _values_outputs(table, part, options, norm, scale, nonfinite)
        reader.forget()
    for i, (part, name, head, rank) in enumerate(table.keys):
        place = {"source": label, "name": part.name, "kind": part.kind, "layer": part.layer, "head": head, "part": name}
        numbers = dict(zip(_COLUMNS, table.numbers[i].tolist(), strict=True))
        spectrum = table.spectra[i, :rank]
        known = bool(len(spectrum)) and not np.isnan(spectrum).any()
        side = None if options.clip is None else min(options.clip, part.width)
        out.append(
            place | {"width": part.width, "rank": rank},
            {column: numbers[column] for column in STATISTICS},
            {"rotary": part.rotary, "normalised": part.normalised, "layer_scale": scaled[part.name]},
            spectrum if known else None,
            None if side is None else table.corners[i, :side, :side],
            {column: numbers[column] for column in _BIASES[name]} if options.biases else {},
        )


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

    def add(self, part: AttentionPart, name: str, heads: Sequence[int | None], found: _Found, spectra: str) -> None:
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
