"""Copies of trained weights, whole or by their leading directions, and permutations as controls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightscope._util.checks import choice, count, number
from weightscope._util.names import listing, matching, unwrapped
from weightscope.errors import SpecError, UsageError
from weightscope.init import _trained
from weightscope.init._common import M, cpu_generator, matrices, put


def _wanted(module: M, select: str, components: str | Sequence[str]) -> dict[str, Tensor]:
    """The module's tensors that match the patterns and belong to the components."""
    everything = _trained.weights(module)
    kinds = _trained.components(module)
    allowed = _trained.chosen_components(components)
    names = [name for name in matching(select, everything) if kinds[name] in allowed]
    if not names:
        raise UsageError(f"nothing is both in {sorted(allowed)} and matches {select!r}")
    return {name: everything[name] for name in names}


def _taken(source: Any, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors of those names and shapes.

    Raises:
        SpecError: listing the tensors that are missing or misshapen.
    """
    there = _trained.tensors(source)
    known = {unwrapped(name): name for name in there}
    missing = [name for name in wanted if unwrapped(name) not in known]
    if missing:
        raise SpecError(f"the source has no {listing(missing)}; select what it has, or use select_weights_")
    out = {name: torch.as_tensor(there[known[unwrapped(name)]]) for name in wanted}
    for name, value in out.items():
        if value.shape != wanted[name].shape:
            raise SpecError(
                f"`{name}`: expected {tuple(wanted[name].shape)}, found {tuple(value.shape)} in the source; "
                "select_weights_ copies from wider networks"
            )
    return out


def transfer_(
    module: M,
    source: Any,
    *,
    select: str = "*",
    components: str | Sequence[str] = "all",
    generator: torch.Generator | None = None,
) -> M:
    """Copy tensors of the same name and shape from a source.

    Args:
        module: changed in place: the selected parameters and floating-point buffers.
        source: a module, a mapping of tensors, a checkpoint, or the path of one.
        select: shell patterns of tensor names, separated by commas.
        components: "all", or some of "embedding", "attention", "mlp", "convolution", "norm", "head", "other".
        generator: not used.

    Raises:
        SpecError: if the source lacks one of the tensors or has another shape; nothing is copied then.
        UsageError: if nothing is selected.

    Source: thesis 3.1.1 (direct transfer of filters), attention paper 5.1 (of attention and positions).

    Example:
        >>> transfer_(new, trained, components="attention")
    """
    wanted = _wanted(module, select, components)
    for name, value in _taken(source, wanted).items():
        put(wanted[name], value)
    return module


def transfer_singular_(
    module: M,
    source: Any,
    *,
    rank: int | None = None,
    fraction: float | None = None,
    remainder: str = "zero",
    select: str = "*",
    components: str | Sequence[str] = "all",
    generator: torch.Generator | None = None,
) -> M:
    """Copy only the top singular directions of a source's matrices.

        zero   W <- U_r S_r V_r^T
        keep   W <- U_r S_r V_r^T + (I - U_r U_r^T) W (I - V_r V_r^T)

    with U S V^T the singular value decomposition of the source's matrix. Convolutions count as matrices
    (out, in * taps), fused projections as three. Vectors (biases, norms) stay.

    Args:
        module: changed in place: the selected weights of linear and convolutional layers.
        source: a module, a mapping of tensors, a checkpoint, or the path of one.
        rank: r, cut to the matrix's smaller side.
        fraction: instead of rank: r = round(fraction * smaller side), at least 1.
        remainder: what the other directions hold: "zero", or "keep" for what the module holds there.
        select: shell patterns of weight names, separated by commas.
        components: as for `transfer_`.
        generator: not used.

    Raises:
        AnatomyError: if the module has no matrix.
        SpecError: if the source lacks one of the tensors or has another shape.
        UsageError: if not exactly one of rank and fraction is given, or nothing is selected.

    Source: thesis 4.1 (as future work, after Neyshabur et al. 2020).

    Example:
        >>> transfer_singular_(new, trained, fraction=0.1, remainder="keep", components="mlp")
    """
    if (rank is None) == (fraction is None):
        raise UsageError(f"expected one of rank and fraction, found rank={rank!r} and fraction={fraction!r}")
    if rank is not None:
        count("rank", rank)
    else:
        number("fraction", fraction, least=0, most=1)
    choice("remainder", remainder, ("zero", "keep"))
    found = {matrix.name: matrix for matrix in matrices(module)}
    wanted = {name: value for name, value in _wanted(module, select, components).items() if name in found}
    if not wanted:
        raise UsageError(f"{select!r} selects no matrix of a linear or convolutional layer")
    for name, value in _taken(source, wanted).items():
        pairs = zip(found[name].split(wanted[name]), found[name].split(value), strict=True)
        for mine, theirs in pairs:
            r = rank if rank is not None else max(1, round(fraction * min(theirs.flatten(1).shape)))
            put(mine, _leading(mine.flatten(1).float(), theirs.flatten(1).float(), r, remainder).reshape(mine.shape))
    return module


def _leading(mine: Tensor, theirs: Tensor, rank: int, remainder: str) -> Tensor:
    mine, theirs = mine.cpu(), theirs.cpu()  # the same bits whatever the device
    u, s, vh = torch.linalg.svd(theirs, full_matrices=False)
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    top = (u * s) @ vh
    if remainder == "zero":
        return top
    rest = mine - u @ (u.T @ mine)
    return top + rest - (rest @ vh.T) @ vh


def permute_(
    module: M,
    *,
    mode: str = "entries",
    select: str = "*",
    components: str | Sequence[str] = "all",
    generator: torch.Generator | None = None,
) -> M:
    """Shuffle weights at random, as a control that keeps their statistics and loses their structure.

        entries   all entries of a matrix among each other: keeps the distribution of entries
        rows      the outputs: also keeps every row, W^T W and the singular values
        columns   the inputs (for filters: the taps, alike in every filter): also keeps every column and W W^T

    Every matrix gets a permutation of its own. Convolutions count as matrices (out, in * taps), fused projections
    as three. Biases stay.

    Args:
        module: changed in place: the selected weights of linear and convolutional layers.
        mode: "entries", "rows" or "columns".
        select: shell patterns of weight names, separated by commas.
        components: as for `transfer_`.
        generator: of the CPU; None for torch's global one.

    Raises:
        AnatomyError: if the module has no matrix.
        UsageError: if an argument cannot be meant, or nothing is selected.

    Source: thesis 4.1 (random permutations that keep statistics).

    Example:
        >>> permute_(transfer_(new, trained), mode="rows", select="*mlp*")
    """
    choice("mode", mode, ("entries", "rows", "columns"))
    cpu_generator(generator)
    everything = matrices(module)
    wanted = _wanted(module, select, components)
    found = [matrix for matrix in everything if matrix.name in wanted]
    if not found:
        raise UsageError(f"{select!r} selects no matrix of a linear or convolutional layer")
    for matrix in found:
        for block in matrix.split(matrix.weight):
            flat = block.flatten(1)
            size = {"entries": flat.numel(), "rows": flat.shape[0], "columns": flat.shape[1]}[mode]
            order = torch.randperm(size, generator=generator).to(flat.device)
            shuffled = {
                "entries": lambda f=flat, o=order: f.reshape(-1)[o].reshape(f.shape),
                "rows": lambda f=flat, o=order: f[o],
                "columns": lambda f=flat, o=order: f[:, o],
            }[mode]()
            put(block, shuffled.reshape(block.shape))
    return module
