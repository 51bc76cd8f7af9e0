"""Attention maps of a Transformer: measured maps, maps expected from the weights, and the rank condition."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.checks import count
from weightscope.analysis.attention_maps.result import AttentionMaps, LayerMaps
from weightscope.analysis.attention_maps.watching import Recorder, Recorders, rotation_of, watch
from weightscope.anatomy import AttentionPart, attention, patch_embeddings, positions
from weightscope.anatomy.embedding import TokenGrid
from weightscope.errors import AnatomyError, DataError, UsageError

__all__ = ["AttentionMaps", "LayerMaps", "attention_maps", "expected_map"]


def attention_maps(
    model: nn.Module,
    inputs: Any,
    *,
    filter_size: int = 3,
    batch_size: int = 32,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttentionMaps:
    """Mean attention maps of a Transformer on a batch of images or of sequences, per layer and head (thesis Fig. 3.18).

    For every self-attention module with input X (n, d) on each image or sequence:

        A_h = softmax(mask(scale (X W_Q + b_Q) (X W_K + b_K)^T)),      mean over images or sequences;
        expected: softmax((beta_h d I + beta_h P P^T) / sqrt(k)),  P the positions, beta_h = tr(W_Q W_K^T) / d.

    The maps are computed from the weights that `weightscope.anatomy` finds, and checked: applied to the values they
    must reproduce the module's output. Causal attention is masked, and the rotary positions of weightscope's own
    networks are applied. A module that does more (relative biases, windows, other masks) is an error. Modules whose
    queries and keys are normalised, or rotated in another library, or whose maps have gates or convolutions of their
    own, and cross-attention, are skipped and listed.

    The model runs in evaluation mode without gradients; modes are restored and hooks removed even after an error.

    Args:
        model: a network of weightscope, timm, torchvision or transformers, or any that `anatomy` supports.
        inputs: images (B, c, height, width), normalised as the model expects; or tokens (B, n) of an integer type.
        filter_size: f, odd, of the neighbourhood in `statistics` and the condition D >= k f^2.
        batch_size: images or sequences at a time; affects memory only.
        forward: how to call the model, `(model, inputs) -> anything`; `model(inputs)` if None.
        config: for models whose attributes do not contain the number of heads.

    Raises:
        AnatomyError: if the model has no attention whose map can be computed; names the reason.
        DataError: if inputs do not fit the model, or an output is not finite or not reproduced by the map.
        UsageError: if the model is not a module or an option is invalid.

    Source: thesis section 3.2.2, Fig. 3.18 and Eq. 3.19; impulse paper, Remark 1 and Proposition 1.

    Example:
        >>> found = attention_maps(vit, images)
        >>> found.layers[0].maps.shape, found.condition()[0]["holds"]
        ((3, 64, 64), True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected an nn.Module, found {type(model).__name__}")
    if isinstance(filter_size, bool) or not isinstance(filter_size, int) or filter_size < 1 or filter_size % 2 == 0:
        raise UsageError(f"filter_size: expected an odd number, found {filter_size!r}")
    count("batch_size", batch_size)
    batch = _checked(inputs)
    sequences = batch.ndim == 2
    parts, skipped = _usable(model, config)
    patch = None if sequences else _patch(model, batch)
    with watch(model, parts, patch) as recorders, torch.no_grad():
        for start in range(0, len(batch), batch_size):
            _run(model, batch[start : start + batch_size], forward, recorders)
    found = recorders.in_order()
    if not found:
        raise AnatomyError("the model called none of its attention modules; pass `forward` to call it differently")
    tokens = _one_layout(found)
    layers = []
    for i, recorder in enumerate(found):
        codes, origin = _codes(model, tokens, recorder.part.width)
        layers.append(_layer(i, recorder, codes))
    kind: Literal["images", "sequences"] = "sequences" if sequences else "images"
    return AttentionMaps(tuple(layers), tokens, len(batch), filter_size, origin, skipped, kind)


def _checked(inputs: Any) -> Tensor:
    batch = torch.as_tensor(inputs)
    if batch.ndim == 2 and 0 not in batch.shape and not batch.is_floating_point():
        return batch.long()
    if batch.ndim != 4 or 0 in batch.shape:
        raise DataError(
            f"expected images (B, c, height, width) or tokens (B, n) of an integer type, found {tuple(batch.shape)}"
        )
    if not batch.is_floating_point():
        raise DataError(f"expected images as floats, normalised as the model expects, found {batch.dtype}")
    bad = ~batch.isfinite().flatten(1).all(1)
    if bool(bad.any()):
        raise DataError(f"{int(bad.sum())} of {len(batch)} images contain non-finite numbers")
    return batch


def _usable(model: nn.Module, config: Mapping[str, Any] | None) -> tuple[list[AttentionPart], dict[str, str]]:
    reasons, modules = {}, dict(model.named_modules(remove_duplicate=False))
    parts = attention(model, config)
    for part in parts:
        if part.kind != "self":
            reasons[part.name] = "it is cross-attention"
        elif part.normalised:
            reasons[part.name] = "queries and keys are normalised"
        elif part.rotary and rotation_of(modules[part.name]) is None:
            reasons[part.name] = "queries and keys are rotated by position"
        elif part.positional:
            reasons[part.name] = "gates or convolutions enter its map"
    usable = [part for part in parts if part.name not in reasons]
    if not usable:
        name, why = next(iter(reasons.items()))
        raise AnatomyError(f"no attention map can be computed from weights: `{name}`: {why}")
    return usable, reasons


def _patch(model: nn.Module, batch: Tensor) -> tuple[int, int] | None:
    """Patches (rows, columns) of these images; None for a model without a known patch embedding."""
    try:
        found = patch_embeddings(model)
    except AnatomyError:
        return None
    height, width = batch.shape[2:]
    fitting = [part for part in found if part.channels == batch.shape[1]]
    if not fitting:
        raise DataError(f"`{found[0].name}`: expected images of {found[0].channels} channels, found {batch.shape[1]}")
    rows, columns = fitting[0].patch
    if height % rows or width % columns:
        raise DataError(
            f"`{fitting[0].name}`: expected images divisible into {rows} x {columns} patches, found {height} x {width}"
        )
    return height // rows, width // columns


def _run(
    model: nn.Module, batch: Tensor, forward: Callable[[nn.Module, Tensor], Any] | None, recorders: Recorders
) -> None:
    """One forward pass; the hooks record the maps."""
    reference = next((p for p in model.parameters() if p.is_floating_point()), batch)
    recorders.begin(len(batch))
    sequences = batch.ndim == 2
    inputs = batch.to(device=reference.device, dtype=batch.dtype if sequences else reference.dtype)
    try:
        model(inputs) if forward is None else forward(model, inputs)
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        what = "sequences" if sequences else "images"
        raise DataError(f"the model failed on {what} {tuple(batch.shape)}: {reason}") from error


def _one_layout(found: list[Recorder]) -> TokenGrid:
    """The arrangement of tokens, equal in all layers: special ones first, then the grid (or a sequence)."""
    layouts = {recorder.tokens for recorder in found}
    if len(layouts) != 1:
        counts = sorted({layout.total for layout in layouts})
        raise DataError(f"expected the same number of tokens in all layers, found {counts}: the model merges tokens")
    return layouts.pop()


def _codes(model: nn.Module, tokens: TokenGrid, width: int) -> tuple[np.ndarray | None, str]:
    """P (n, d) of Eq. 3.19 and its origin; zero for special tokens without a position."""
    try:
        tables = [table for table in positions(model) if table.width == width and table.grid is not None]
    except AnatomyError:
        tables = []
    if not tables or tokens.rows == 1:
        return None, "none"
    table, origin = tables[0], tables[0].name
    value, prefix = table.read().cpu().double(), min(table.prefix, tokens.prefix)
    special, grid = value[:prefix], value[table.prefix :]
    if table.grid is not None and table.grid != (tokens.rows, tokens.columns):
        image = grid.T.reshape(1, width, *table.grid)
        image = F.interpolate(image, (tokens.rows, tokens.columns), mode="bicubic", align_corners=False)
        grid, origin = image[0].flatten(1).T, f"{origin}, resampled from {table.grid[0]} x {table.grid[1]}"
    missing = torch.zeros(tokens.prefix - prefix, width, dtype=torch.float64)
    return torch.cat([special, missing, grid]).numpy(), origin


def expected_map(codes: np.ndarray, beta: np.ndarray, scale: float) -> np.ndarray:
    """`softmax(scale (beta d I + beta P P^T))` for each beta (H,) and codes P (n, d): (H, n, n).

    The approximate expectation of attention for inputs X + P with X ~ N(0, I) and `W_Q W_K^T = alpha Z + beta I`: of
    the products in the logits only X X^T, with mean d I, and P P^T have a mean. The softmax of a mean is not the mean
    of the softmax, so the result is approximate.

    Source: thesis Eq. 3.19, where the scale is 1 / sqrt(k).

    Example:
        >>> expected_map(codes, np.array([0.7]), 1 / 8).sum(axis=-1)    # rows sum to one
    """
    n, d = codes.shape
    logits = scale * np.asarray(beta, dtype=np.float64)[:, None, None] * (codes @ codes.T + d * np.eye(n))
    logits -= logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def _layer(number: int, recorder: Recorder, codes: np.ndarray | None) -> LayerMaps:
    part, images = recorder.part, recorder.images
    q, k = part.read("q").double().cpu(), part.read("k").double().cpu()
    beta = torch.stack([(q[h] * k[part.kv_head(h)]).sum() for h in range(part.heads)]).numpy() / part.width
    return LayerMaps(
        layer=number,
        name=part.name,
        maps=(recorder.maps / images).numpy(),
        entropy=(recorder.entropy / images).numpy(),
        beta=beta,
        expected=None if codes is None else expected_map(codes, beta, part.scale),
        stable_ranks=torch.cat(recorder.ranks).numpy(),
        width=part.width,
    )
