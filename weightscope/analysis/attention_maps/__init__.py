"""`attention_maps`: where the heads of a vision transformer look, what the weights predict, and the rank condition."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope.analysis.attention_maps.result import AttentionMaps, LayerMaps
from weightscope.analysis.attention_maps.watching import Recorder, Recorders, watch
from weightscope.anatomy import AttentionPart, attention, patch_embeddings, positions
from weightscope.anatomy.token_grid import TokenGrid
from weightscope.errors import AnatomyError, DataError, UsageError

__all__ = ["AttentionMaps", "LayerMaps", "attention_maps", "expected_map"]


def attention_maps(
    model: nn.Module,
    images: Any,
    *,
    filter_size: int = 3,
    batch_size: int = 32,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttentionMaps:
    """Mean attention maps of a vision transformer on a batch of images, per layer and head (thesis Fig. 3.18).

    For every self-attention module, from what it reads, X (n, d), on each image:

        A_h = softmax(scale (X W_Q + b_Q) (X W_K + b_K)^T),      mean over images;
        expected: softmax((beta_h d I + beta_h P P^T) / sqrt(k)),  P the positions, beta_h = tr(W_Q W_K^T) / d.

    The maps come from the weights that `weightscope.anatomy` finds, and are held against the module: its output must be
    what these maps make of the values. A module that does more (relative biases, windows, masks) is refused instead
    of drawn wrong. Modules whose queries and keys are rotated or normalised, and cross-attention, are left out by name.

    The model runs in evaluation mode without gradients; modes are put back and hooks removed whatever happens.

    Args:
        model: a network of ours, timm's, torchvision's or transformers', or any that `anatomy` knows.
        images: (B, c, height, width), scaled as the model wants them.
        filter_size: f, odd, of the neighbourhood in `statistics` and the condition D >= k f^2.
        batch_size: images at a time; buys memory only.
        forward: how to call the model, `(model, images) -> anything`; `model(images)` if None.
        config: for models whose attributes do not tell the number of heads.

    Raises:
        AnatomyError: if the model has no attention whose map can be computed; says why.
        DataError: if images do not fit the model, or an output is not finite or not explained by the map.
        UsageError: if the model is no module or an option cannot be meant.

    Source: thesis section 3.2.2, Fig. 3.18 and Eq. 3.19; impulse paper, Remark 1 and Proposition 1.

    Example:
        >>> found = attention_maps(vit, images)
        >>> found.layers[0].maps.shape, found.condition()[0]["holds"]
        ((3, 64, 64), True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"attention maps need a module that can run, found {type(model).__name__}")
    if isinstance(filter_size, bool) or not isinstance(filter_size, int) or filter_size < 1 or filter_size % 2 == 0:
        raise UsageError(f"filter_size: expected an odd number, found {filter_size!r}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size: expected at least 1, found {batch_size!r}")
    batch = _checked(images)
    parts, skipped = _usable(model, config)
    patch = _patch(model, batch)
    with watch(model, parts, patch) as recorders, torch.no_grad():
        for start in range(0, len(batch), batch_size):
            _run(model, batch[start : start + batch_size], forward, recorders)
    found = recorders.in_order()
    if not found:
        raise AnatomyError("the model ran and called none of its attention modules; say in `forward` how to call it")
    tokens = _one_layout(found)
    layers = []
    for i, recorder in enumerate(found):
        codes, origin = _codes(model, tokens, recorder.part.width)
        layers.append(_layer(i, recorder, codes))
    return AttentionMaps(tuple(layers), tokens, len(batch), filter_size, origin, skipped)


def _checked(images: Any) -> Tensor:
    batch = torch.as_tensor(images)
    if batch.ndim != 4 or 0 in batch.shape:
        raise DataError(f"expected images (B, c, height, width), found {tuple(batch.shape)}")
    if not batch.is_floating_point():
        raise DataError(f"expected images as the model wants them, scaled floats; found {batch.dtype}")
    bad = ~batch.isfinite().flatten(1).all(1)
    if bool(bad.any()):
        raise DataError(f"{int(bad.sum())} of {len(batch)} images hold numbers that are not finite")
    return batch


def _usable(model: nn.Module, config: Mapping[str, Any] | None) -> tuple[list[AttentionPart], dict[str, str]]:
    reasons = {}
    parts = attention(model, config)
    for part in parts:
        if part.kind != "self":
            reasons[part.name] = "it is cross-attention"
        elif part.rotary or part.normalised:
            reasons[part.name] = f"queries and keys are {'rotated by position' if part.rotary else 'normalised'}"
    usable = [part for part in parts if part.name not in reasons]
    if not usable:
        name, why = next(iter(reasons.items()))
        raise AnatomyError(f"no attention map can be computed from weights: `{name}`: {why}")
    return usable, reasons


def _patch(model: nn.Module, batch: Tensor) -> tuple[int, int] | None:
    """Patches (rows, columns) of these images; None where the model tells no patch embedding."""
    try:
        found = patch_embeddings(model)
    except AnatomyError:
        return None
    height, width = batch.shape[2:]
    fitting = [part for part in found if part.channels == batch.shape[1]]
    if not fitting:
        raise DataError(f"`{found[0].name}` takes images with {found[0].channels} channels, found {batch.shape[1]}")
    rows, columns = fitting[0].patch
    if height % rows or width % columns:
        raise DataError(
            f"`{fitting[0].name}` cuts {rows} x {columns} patches, which do not fill images of {height} x {width}"
        )
    return height // rows, width // columns


def _run(
    model: nn.Module, batch: Tensor, forward: Callable[[nn.Module, Tensor], Any] | None, recorders: Recorders
) -> None:
    """One forward pass; the hooks do the work."""
    reference = next((p for p in model.parameters() if p.is_floating_point()), batch)
    recorders.begin(len(batch))
    inputs = batch.to(device=reference.device, dtype=reference.dtype)
    try:
        model(inputs) if forward is None else forward(model, inputs)
    except (RuntimeError, ValueError, AssertionError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"the model does not take images {tuple(batch.shape)}: {reason}") from error


def _one_layout(found: list[Recorder]) -> TokenGrid:
    """Where tokens lie, the same for all layers: special ones first, then the grid; a sequence where there is none."""
    layouts = {recorder.tokens for recorder in found}
    if len(layouts) != 1:
        counts = sorted({layout.total for layout in layouts})
        raise DataError(f"expected one number of tokens in all layers, found {counts}: the model merges tokens")
    return layouts.pop()


def _codes(model: nn.Module, tokens: TokenGrid, width: int) -> tuple[np.ndarray | None, str]:
    """P (n, d) of Eq. 3.19 and where it is from; zero for special tokens that have no position."""
    try:
        tables = [table for table in positions(model) if table.width == width and table.grid is not None]
    except AnatomyError:
        tables = []
    if not tables or tokens.rows == 1:
        return None, "none"
    table, origin = tables[0], tables[0].name
    value, prefix = table.read().cpu().double(), min(table.prefix, tokens.prefix)
    special, grid = value[:prefix], value[table.prefix :]
    if table.grid != (tokens.rows, tokens.columns):
        image = grid.T.reshape(1, width, *table.grid)
        image = F.interpolate(image, (tokens.rows, tokens.columns), mode="bicubic", align_corners=False)
        grid, origin = image[0].flatten(1).T, f"{origin}, resampled from {table.grid[0]} x {table.grid[1]}"
    missing = torch.zeros(tokens.prefix - prefix, width, dtype=torch.float64)
    return torch.cat([special, missing, grid]).numpy(), origin


def expected_map(codes: np.ndarray, beta: np.ndarray, scale: float) -> np.ndarray:
    """`softmax(scale (beta d I + beta P P^T))` for each beta (H,) and codes P (n, d): (H, n, n).

    What attention is expected to be like for inputs X + P with X ~ N(0, I) and `W_Q W_K^T = alpha Z + beta I`: the
    only products with a mean are X X^T, which is d I, and P P^T. The softmax of a mean is not the mean of the softmax,
    so it holds roughly.

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
    part, count = recorder.part, recorder.images
    q, k = part.read("q").double().cpu(), part.read("k").double().cpu()
    beta = torch.stack([(q[h] * k[part.kv_head(h)]).sum() for h in range(part.heads)]).numpy() / part.width
    return LayerMaps(
        layer=number,
        name=part.name,
        maps=(recorder.maps / count).numpy(),
        entropy=(recorder.entropy / count).numpy(),
        beta=beta,
        expected=None if codes is None else expected_map(codes, beta, part.scale),
        stable_ranks=torch.cat(recorder.ranks).numpy(),
        width=part.width,
    )
