"""Copies of trained weights, whole or truncated to their top singular directions, and permutations as controls."""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.checks import choice, count, number
from weightscope._util.names import listing, unwrapped
from weightscope.anatomy.matrices import Matrix, matrices
from weightscope.anatomy.places import Source, places
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.init import _trained
from weightscope.init.base import INITIALISERS, Generator, M, permutation, put

_TABLE = re.compile(r"(?:\w+\.)*(?:embeddings|embed_tokens|wte|word_embeddings)\.weight")  # of tokens


def _taken(module: nn.Module, source: Any, wanted: dict[str, Tensor], filters: str = "exact") -> dict[str, Tensor]:
    """The source's tensors of the same names and shapes; filters resized to the module's, unless "exact"."""
    there, mine = Source(_trained.tensors(source)), places(_trained.weights(module))
    own, theirs = ([name for name in names if _TABLE.fullmatch(unwrapped(name))] for names in (mine, there.places))
    at = mine | {own[0]: there.places[theirs[0]]} if len(own) == len(theirs) == 1 else mine
    missing = [name for name in wanted if not there.has(at[name])]
    if missing:
        _trained.refuse_prefix(mine, there)
        raise SpecError(f"the source has no {listing(missing)}; leave them out by select= or components=")
    kernels = _trained.layers_of(module, nn.Conv2d)
    out = {}
    for name, value in wanted.items():
        shape, found = tuple(value.shape), there.read(at[name], tuple(value.shape))
        if found.shape != shape and found.shape[:2] == shape[:2] and found.ndim == 4 and name in kernels:
            if filters == "exact":
                hint = "filters='pad' or 'resample' changes their size"
                raise SpecError(f"`{name}`: expected filters of {shape[2:]}, found {tuple(found.shape[2:])}; {hint}")
            found = resized_filters(found, shape[2:], filters)
        if found.shape != shape:
            raise SpecError(
                f"`{name}`: expected {shape}, found {tuple(found.shape)} in the source; "
                "use select_weights_ to copy from a wider network"
            )
        if not bool(found.isfinite().all()):
            raise DataError(f"`{name}`: expected finite values in the source, found NaN or infinity")
        out[name] = found
    return out


def resized_filters(filters: Tensor, size: Sequence[int], how: str) -> Tensor:
    """Filters (o, i, k, l) as filters (o, i, *size).

        pad        zeros around the filter, or its central pixels; where the difference is odd, one more at the end
        resample   bilinear interpolation, corner pixels on corner pixels, times k l / (K L), which keeps the response
                   to a constant image about the same

    Source: thesis 4.1 ("upsampled, downsampled, or padded"), which gives no formulas; corners as in
    `weightscope.statistics.filters`.
    """
    if how == "resample":
        scale = filters.shape[2] * filters.shape[3] / (size[0] * size[1])
        return scale * F.interpolate(filters.float(), size=tuple(size), mode="bilinear", align_corners=True)
    before = [(large - small) // 2 for large, small in zip(size, filters.shape[2:], strict=True)]
    after = [n - k - b for n, k, b in zip(size, filters.shape[2:], before, strict=True)]
    return F.pad(filters, (before[1], after[1], before[0], after[0]))  # a negative width crops


@INITIALISERS.register(
    "transfer", source="thesis 3.1.1, 4.1; attention paper 5.1", needs="a network of the same shapes"
)
def transfer_(
    module: M,
    source: Any,
    *,
    select: str = "*",
    components: str | Sequence[str] = "all",
    filters: str = "exact",
    generator: Generator = None,
) -> M:
    """Copy tensors of the same name and shape from a source.

    Names and layers are matched as by `select_weights_`: those of Hugging Face's transformers to timm's (and ours),
    1 x 1 convolutions to linear layers, and the embedding of tokens across families.

    Args:
        filters: of another size than the module's: "exact" refuses them, "pad" surrounds them by zeros or takes their
            centres, "resample" interpolates; see `resized_filters`.

    Raises:
        SpecError: if a tensor is missing in the source or has another shape there.

    Source: thesis 3.1.1 (direct transfer of filters), 4.1 (of other sizes); attention paper 5.1 (attention, positions).

    Example:
        >>> transfer_(new, trained, components="attention")
        >>> transfer_(mamba, transformer, select="*embeddings.weight")
    """
    choice("filters", filters, ("exact", "pad", "resample"))
    wanted = _trained.chosen(module, components, select)
    for name, value in _taken(module, source, wanted, filters).items():
        put(wanted[name], value)
    return module


@INITIALISERS.register("transfer_singular", source="thesis 4.1", needs="a network of the same shapes")
def transfer_singular_(
    module: M,
    source: Any,
    *,
    rank: int | None = None,
    fraction: float | None = None,
    remainder: str = "zero",
    select: str = "*",
    components: str | Sequence[str] = "all",
    generator: Generator = None,
) -> M:
    """Copy the top singular directions of a source's matrices.

        zero   W <- U_r S_r V_r^T
        keep   W <- U_r S_r V_r^T + (I - U_r U_r^T) W (I - V_r V_r^T)

    with U S V^T the singular value decomposition of the source's matrix. Convolutions are matrices (out, in * taps),
    fused projections three matrices. Vectors (biases, norms) are not changed.

    Args:
        rank: r, at most the matrix's smaller side.
        fraction: instead of rank: r = round(fraction * smaller side), at least 1.
        remainder: of the other directions: "zero", or "keep" the module's own weights.

    Raises:
        SpecError: if a tensor is missing in the source or has another shape there.

    Source: thesis 4.1 (as future work, after Neyshabur et al. 2020).

    Example:
        >>> transfer_singular_(new, trained, fraction=0.1, remainder="keep", components="mlp")
    """
    if (rank is None) == (fraction is None):
        raise UsageError(f"expected one of rank and fraction, found rank={rank!r} and fraction={fraction!r}")
    if rank is not None:
        count("rank", rank)
    share = number("fraction", fraction, least=0, most=1) if rank is None else 0.0
    choice("remainder", remainder, ("zero", "keep"))
    found = _matrices(module, select, components)
    taken = _taken(module, source, {matrix.name: matrix.weight for matrix in found})
    for matrix in found:
        for mine, theirs in zip(matrix.split(matrix.weight), matrix.split(taken[matrix.name]), strict=True):
            r = max(1, round(share * min(theirs.flatten(1).shape))) if rank is None else rank
            u, s, vh = torch.linalg.svd(theirs.flatten(1).float().cpu(), full_matrices=False)  # the same on any device
            u, s, vh = u[:, :r], s[:r], vh[:r]
            new = (u * s) @ vh
            if remainder == "keep":
                rest = mine.flatten(1).float().cpu()
                rest = rest - u @ (u.T @ rest)
                new = new + rest - (rest @ vh.T) @ vh
            put(mine, new.reshape(mine.shape))
    return module


def _matrices(module: nn.Module, select: str, components: str | Sequence[str]) -> list[Matrix]:
    """The selected weights of linear and convolutional layers."""
    everything, wanted = matrices(module), _trained.chosen(module, components, select)
    found = [matrix for matrix in everything if matrix.name in wanted]
    if not found:
        raise UsageError(f"select: {select!r} matches no weight of a linear or convolutional layer")
    return found


@INITIALISERS.register("permute", source="thesis 4.1", needs="linear or convolutional layers")
def permute_(
    module: M,
    *,
    mode: str = "entries",
    select: str = "*",
    components: str | Sequence[str] = "all",
    generator: Generator = None,
) -> M:
    """Permute weights at random: a control that keeps statistics of a matrix and destroys its structure.

        entries   all entries of the matrix        keeps the distribution of the entries
        rows      the rows (outputs)               keeps every row, hence W^T W and the singular values
        columns   the columns (inputs)             keeps every column, hence W W^T and the singular values

    Every matrix has its own permutation. Convolutions are matrices (out, in * taps), so that "columns" permutes the
    taps of depthwise filters alike; fused projections are three matrices. Biases are not changed.

    Args:
        mode: "entries", "rows" or "columns".

    Source: thesis 4.1 (random permutations that keep statistics).

    Example:
        >>> permute_(transfer_(new, trained), mode="rows", select="*mlp*")
    """
    choice("mode", mode, ("entries", "rows", "columns"))
    for matrix in _matrices(module, select, components):
        for block in matrix.split(matrix.weight):
            flat = block.flatten(1)
            rows = flat.reshape(-1, 1) if mode == "entries" else flat.T if mode == "columns" else flat
            rows = rows[permutation(len(rows), generator).to(rows.device)]
            put(block, (rows.T if mode == "columns" else rows).reshape(block.shape))
    return module
