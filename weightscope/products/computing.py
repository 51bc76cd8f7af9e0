"""The products of every layer and head of one or several models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from weightscope.anatomy import AttentionPart
from weightscope.errors import AnatomyError, UsageError
from weightscope.products.factored import FactoredProduct
from weightscope.products.reading import Reader, distinct, gain_before, mean_rotation, name_of
from weightscope.products.result import Key, ProductsResult, SourceInfo

Spectra = Literal["heads", "all", "none"]
AVERAGE = range(256)  # relative positions of rotary="average"


@dataclass(frozen=True)
class Options:
    """How products are made; see `products`."""

    fold_norms: bool
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
            UsageError: if one cannot be meant.
        """
        words, number = self.rotary in ("zero", "average"), type(self.rotary) is int
        if not (words or number or (isinstance(self.rotary, range) and len(self.rotary))):
            raise UsageError(
                f"rotary: expected 'zero', 'average', a relative position or a range of them, found {self.rotary!r}"
            )
        if self.spectra not in get_args(Spectra):
            raise UsageError(f"spectra: expected one of {', '.join(get_args(Spectra))}, found {self.spectra!r}")
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
    biases: bool = False,
    rotary: Any = "zero",
    spectra: Spectra = "heads",
    clip: int | None = 64,
) -> ProductsResult:
    """Statistics of `W_Q W_K^T` of every head and `W_V W_O` of every layer and head (thesis Fig. 3.17 and 3.23).

    With W_Q, W_K, W_V (d, k) and W_O (k, d) of a head and tokens as rows x of X (n, d), logits are
    `x W_Q W_K^T y^T / sqrt(k)` and the layer adds `sum_h A_h X W_V W_O` to the residual stream. Query heads that share
    keys and values (grouped queries) are each multiplied with those that they use. What the columns mean, with
    formulas, says `FactoredProduct.statistics`; numbers are computed in float64 from the factors, d x d matrices are
    made one at a time for whole layers only, and one layer is read at a time.

    Args:
        sources: models: paths, `hf://org/name[@revision]`, `Checkpoint`s, modules, mappings of tensors.
        labels: one for each source; taken from paths and classes unless given.
        config: of the model, for mappings and files without one; `{"num_attention_heads": H}` is enough.
        layers: which layers, counted from 0; None for all.
        cross: cross-attention too, where both streams have the same width; a diagonal then relates two streams.
        fold_norms: multiply the gain g of the normalisation before the attention into what reads its output:
            `diag(g) W_Q W_K^T diag(g)` and `diag(g) W_V W_O`. Its subtraction of the mean is not folded in.
        biases: add three columns on what biases contribute besides the product, which itself has none. Queries' and
            keys' biases: `bias_on_keys`, ||W_K b_Q|| / sqrt(d), a preference for some keys whatever the query;
            `bias_on_queries`, ||W_Q b_K|| / sqrt(d), and `bias_constant`, b_Q b_K^T, which the softmax ignores.
            Values' and outputs': `bias_on_output`, ||b_V W_O|| / sqrt(d), for whole layers ||b_V W_O + b_O|| / sqrt(d),
            added to every token since attention weights sum to one. With `fold_norms` the normalisation's shift is
            part of the biases.
        rotary: for models that rotate queries and keys: the product at relative position `"zero"`, or at another
            one (an integer), or averaged over a range of them, `W_Q mean(R_t) W_K^T`; `"average"` is over 0 to 255.
            Other models do not change.
        spectra: singular values of `"heads"` (from k x k matrices), of `"all"` (whole layers need an SVD of d x d,
            which takes longer than everything else), or of `"none"`.
        clip: keep the upper left so many rows and columns of each product for pictures; None for none.

    Raises:
        DataError: if a source cannot be read.
        AnatomyError: if a model has no attention, or only some between streams of different widths.
        UsageError: if an option cannot be meant.

    Example:
        >>> found = products("vit/", mimetic_attention_(ViT(224, 16, 384, 12, 6, 10)), labels=["pretrained", "mimetic"])
        >>> print(found.text())
        >>> found.plot("products.png")
    """
    options = Options(fold_norms, biases, rotary, spectra, clip).checked()
    if not sources:
        raise UsageError("products: expected at least one model, found none")
    if labels is not None and (len(labels) != len(sources) or len(set(labels)) < len(labels)):
        raise UsageError(f"labels: expected {len(sources)} different ones, found {list(labels)}")
    names = list(labels) if labels is not None else distinct([name_of(source) for source in sources])
    out = ProductsResult([], [], {}, [], {"rotary": str(rotary), "fold_norms": fold_norms, "cross": cross})
    for source, label in zip(sources, names, strict=True):
        try:
            _add(out, Reader(source, config, layers, cross), label, options)
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from error
    return out


def _add(out: ProductsResult, reader: Reader, label: str, options: Options) -> None:
    """Append one model's rows."""
    nonfinite: dict[str, int] = {}
    for part in reader.parts:
        about = {"source": label, "name": part.name, "kind": part.kind, "layer": part.layer}
        for name, head, product, more in _of_layer(reader, part, options, nonfinite):
            row = {**about, "head": head, "part": name, "width": part.width, "rank": product.rank}
            row |= {key: _plain(value) for key, value in product.statistics().items()}
            row["sign"] = None if row["beta"] is None else (row["beta"] > 0) - (row["beta"] < 0)
            wanted = options.spectra == "all" or (options.spectra == "heads" and product.small)
            spectrum = product.singular_values() if wanted else None
            row["spectral_norm"] = None if spectrum is None else _plain(float(spectrum[0]))
            row |= {"finite": product.finite, "rotary": part.rotary, "normalised": part.normalised}
            out.rows.append(row | {key: _plain(value) for key, value in more.items()})
            out.spectra.append(None if spectrum is None else spectrum.numpy())
            if options.clip is not None:
                crop = product.corner(options.clip).float().numpy()
                out.corners[Key(label, part.layer, name, head, part.kind)] = crop
        reader.forget()
    heads = tuple(part.heads for part in reader.parts)
    commit = None if reader.checkpoint is None else reader.checkpoint.commit
    widths = tuple(dict.fromkeys(part.width for part in reader.parts))
    info = SourceInfo(label, len(reader.parts), heads, widths, reader.bytes_read, commit, nonfinite, reader.skipped)
    out.sources.append(info)


_Item = tuple[str, int | None, FactoredProduct, dict[str, float]]


def _of_layer(reader: Reader, part: AttentionPart, options: Options, nonfinite: dict[str, int]) -> Iterator[_Item]:
    """(part, head or None, product, further columns): first the heads' queries and keys, then values and outputs."""
    gain, shift = gain_before(reader.source, part) if options.fold_norms else (None, None)
    yield from _queries_keys(reader, part, options, (gain, shift), nonfinite)
    yield from _values_outputs(part, options, (gain, shift), nonfinite)


_Norm = tuple[Tensor | None, Tensor | None]


def _queries_keys(
    reader: Reader, part: AttentionPart, options: Options, norm: _Norm, nonfinite: dict[str, int]
) -> Iterator[_Item]:
    q, k = _read(part, "q", nonfinite), _read(part, "k", nonfinite)  # (H, d, k), (kv, d, k)
    bias_q, bias_k = (_bias(part, name, x, norm[1]) if options.biases else None for name, x in (("q", q), ("k", k)))
    turn = None
    if options.positions is not None and part.rotary:
        turn = mean_rotation(reader.source, part, options.positions)
    for head in range(part.heads):
        group = part.kv_head(head)
        left, right = _scaled(q[head], norm[0]), _scaled(k[group], norm[0])
        left = left if turn is None else left.double() @ turn
        more = {}
        if bias_q is not None and bias_k is not None:
            b = bias_q[head] if turn is None else bias_q[head] @ turn
            more = {
                "bias_on_keys": _per_channel(right.double() @ b),
                "bias_on_queries": _per_channel(left.double() @ bias_k[group]),
                "bias_constant": float(b @ bias_k[group]),
            }
        yield "qk", head, FactoredProduct(left, right), more


def _values_outputs(part: AttentionPart, options: Options, norm: _Norm, nonfinite: dict[str, int]) -> Iterator[_Item]:
    v, o = _read(part, "v", nonfinite), _read(part, "o", nonfinite)  # (kv, d, k), (H, k, d)
    bias = _bias(part, "v", v, norm[1]) if options.biases else None
    total = torch.zeros(part.width, dtype=torch.float64)
    for head in range(part.heads):
        group = part.kv_head(head)
        more = {}
        if bias is not None:
            added = bias[group] @ o[head].double()
            total += added
            more = {"bias_on_output": _per_channel(added)}
        yield "vo", head, FactoredProduct(_scaled(v[group], norm[0]), o[head].T), more
    more = {}
    if bias is not None:
        own = part.read_bias("o")
        more = {"bias_on_output": _per_channel(total if own is None else total + own.double())}
    values = v.mT.reshape(-1, part.width).T  # (d, kv k), a view
    outputs = o.reshape(part.kv_heads, -1, part.value_width, part.width)
    # Query heads of one group add up behind the value head that they share.
    outputs = outputs[:, 0] if outputs.shape[1] == 1 else outputs.sum(1, dtype=torch.float64)
    del v, o
    yield "vo", None, FactoredProduct(_scaled(values, norm[0]), outputs.reshape(-1, part.width).T), more


def _read(part: AttentionPart, name: Any, nonfinite: dict[str, int]) -> Tensor:
    value = part.read(name)
    if not math.isfinite(value.sum()) and (bad := int((~value.isfinite()).sum())):
        tensor = part.parameters[name][0]
        nonfinite[tensor] = nonfinite.get(tensor, 0) + bad
    return value.cpu()


def _scaled(value: Tensor, gain: Tensor | None) -> Tensor:
    return value if gain is None else value.double() * gain.cpu()[:, None]


def _bias(part: AttentionPart, name: Any, weight: Tensor, shift: Tensor | None) -> Tensor:
    """(heads, k) float64: the bias, with what a shift of the normalisation before adds to it."""
    own = part.read_bias(name)
    bias = torch.zeros(len(weight), weight.shape[2], dtype=torch.float64) if own is None else own.double().cpu()
    return bias if shift is None else bias + torch.einsum("hdk,d->hk", weight.double(), shift.cpu())


def _per_channel(vector: Tensor) -> float:
    return float(vector.norm()) / math.sqrt(len(vector))


def _plain(value: float) -> float | None:
    """A number as JSON takes it: None where there is none."""
    return value if math.isfinite(value) else None
