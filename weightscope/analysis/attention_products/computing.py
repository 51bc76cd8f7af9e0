"""The products of every layer and head of one or several models."""

from collections.abc import Mapping, Sequence
from typing import Any

from weightscope._util.names import labels_of
from weightscope.analysis.attention_products.attention import append_attention
from weightscope.analysis.attention_products.options import Options, Spectra
from weightscope.analysis.attention_products.reading import Reader, name_of
from weightscope.analysis.attention_products.result import ProductsResult, SourceInfo
from weightscope.analysis.attention_products.state_spaces import append_state_space
from weightscope.errors import AnatomyError, UsageError


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
    names = labels_of([name_of(source) for source in sources], labels)
    stated = {"rotary": str(rotary), "fold_norms": fold_norms, "fold_scales": fold_scales, "cross": cross}
    out = ProductsResult([], [], {}, [], stated)
    for source, label in zip(sources, names, strict=True):
        try:
            _add(out, Reader(source, config, layers, cross), label, options)
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from error
    return out


def _add(out: ProductsResult, reader: Reader, label: str, options: Options) -> None:
    """Append one model's products, and what is known about the model."""
    nonfinite: dict[str, int] = {}
    append_attention(out, reader, label, options, nonfinite)
    for state_space in reader.state_spaces:
        append_state_space(out, state_space, label, options, nonfinite)
        reader.forget()
    checkpoint = reader.checkpoint
    out.sources.append(
        SourceInfo(
            label,
            modules=len(reader.parts),
            heads=tuple(part.heads for part in reader.parts),
            widths=tuple(dict.fromkeys(row["width"] for row in out.records if row["source"] == label)),
            bytes_read=reader.bytes_read,
            commit=None if checkpoint is None else checkpoint.commit,
            nonfinite=nonfinite,
            skipped=reader.skipped,
            unverified=() if checkpoint is None else checkpoint.unverified,
            state_spaces=len(reader.state_spaces),
        )
    )
