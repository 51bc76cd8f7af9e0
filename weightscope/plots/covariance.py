"""Joint covariance matrices over tensors, with their blocks marked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from scipy.special import stdtrit

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme
from weightscope.plots.theme import SMALL, inches, number, short_names, wrap

CELLS = 600  # cells along a side: five inches at 150 dots per inch
_SIDE = 5.0  # inches of axes in a new figure
CHANCE = 1e-3  # how many cells of independent coordinates are not white
_CLEAR = 0.004  # least distance of two borders, in axes widths: 1.4 points
_LINE = 1.35 * SMALL / 72  # inches of a label's line
_ROWS = 512  # of a matrix, that are read at a time
_Diagonal = Literal["variances", "others", "all"]


@theme.themed()
def covariance_map(
    matrix: Any,
    blocks: Mapping[str, slice],
    ax: Axes | None = None,
    *,
    kind: Literal["covariance", "correlation"] = "covariance",
    title: str | None = None,
    diagonal: Literal["show", "mask"] = "show",
    groups: Mapping[str, Any] | None = None,
    cells: int = CELLS,
    within: Any = None,
) -> Axes:
    """A joint covariance or correlation matrix with its blocks marked and named (MLP paper, Fig. 1; thesis, Fig. 3.39).

    `kind` is what is drawn: correlations of a covariance matrix, too. Variances are much larger than covariances, so
    the colour scale ends at a quantile of the off-diagonal absolute values (99 %, of means 99.9 %), rounded up to two
    digits and printed at the colour bar; zero is white. A matrix with more than `cells` coordinates is averaged over
    cells that do not cross block borders (see `pool`); cells on the diagonal then show the mean variance. Where they
    do not divide the rows of a tensor, its stripes become hatching: give as many `cells` as coordinates to see them.
    All cells have one size, of at least a pixel. Coordinates without variance have no correlations and are grey.

    With `groups`, the picture is the covariance or correlation matrix of the groups' means, such as the means of a
    matrix's columns; for correlations, entries are first divided by their standard deviations. Averaging hundreds of
    entries reveals structure far below the noise of single covariances (1/sqrt(N) as correlations).

    `blocks` are the coordinates of each tensor, which together cover 0 to D without overlap, and `groups` the group of
    each coordinate of a tensor: `np.tile(np.arange(n), p)` for the columns of W (p, n), `np.repeat(np.arange(p), n)`
    for its rows; a tensor that is not listed is one group. A diagonal of `"mask"` leaves the variances of single
    coordinates out: it is white or, when averaging, the mean over pairs of different coordinates. With groups, all
    cells are then such means, and set the colours. Cells whose absolute value is below `within`, a number or one for
    each cell, are white, and so is then the diagonal (see `chance`); the title gets the share of the others.

    Example:
        >>> found = covariance(population, "*.mlp.fc?.weight")
        >>> save(covariance_map(found.matrix, found.blocks), "covariance.png")
    """
    if kind not in ("covariance", "correlation") or diagonal not in ("show", "mask"):
        raise UsageError(f"expected kind covariance or correlation and diagonal show or mask, found {kind}, {diagonal}")
    array = checked_square(matrix, f"{kind} matrix")
    names, bounds = _bounds(blocks, len(array))
    variances = np.diagonal(array)
    constant = np.isnan(variances) | (variances <= 0) if kind == "correlation" else np.zeros(len(array), dtype=bool)
    scale = np.sqrt(np.where(constant, 1.0, variances)) if kind == "correlation" else np.ones(len(array))
    own: _Diagonal = "others" if diagonal == "mask" else "variances" if groups is None else "all"
    if groups is None:
        order, (edges, factor) = np.arange(len(array)), cell_edges(bounds, cells)
    else:
        (order, edges), factor = _grouped(names, bounds, groups), 1
    pairs = groups is not None and diagonal == "mask"  # whose diagonal is one of the findings
    pooled = pool(array, order, edges, constant, own, scale)
    if groups is not None and kind == "correlation" and not pairs:
        sizes = np.sqrt(np.diagonal(pooled))
        pooled /= np.outer(sizes, sizes)
    counted = np.add.reduceat((~constant[order]).astype(int), edges[:-1])
    finite, apart = np.isfinite(pooled), np.eye(len(pooled), dtype=bool) & (not pairs)
    empty = np.eye(len(counted), dtype=bool) & (counted == 1)  # a single coordinate has no off-diagonal entries
    if not (finite | empty | (np.outer(counted, counted) == 0)).all():
        raise DataError(f"{kind} matrix: expected finite entries, found others; leave out networks that diverged")
    quantile, where = (1.0, "cells") if pairs else (0.99 if groups is None else 0.999, "off-diagonal values")
    limit = theme.colour_limit(pooled[finite & ~apart], quantile, pooled[finite])

    borders = np.searchsorted(edges, [0, *(stop for _, stop in bounds)])
    size, side = len(pooled), _SIDE
    if groups is not None:  # room for the names of most tensors
        side = float(np.clip(_LINE * size / np.median(np.diff(borders)), _SIDE, 2 * _SIDE))
    canvas, ax = theme.canvas(ax, side + 3.2, side + 1.4)
    side = side if canvas.owned else 0.82 * canvas.width
    drawn = np.ma.masked_invalid(np.where(empty & ~finite, 0.0, pooled))
    beyond = finite & ~np.eye(size, dtype=bool) & (np.abs(pooled) >= (0.0 if within is None else within))
    if within is not None:
        drawn[finite & ~beyond] = 0.0
    image = ax.imshow(drawn, **theme.colours(limit), extent=(0, size, size, 0))
    ax.set_anchor("NW")
    ax.spines[:].set_visible(True)
    unit = "correlation" if kind == "correlation" else "covariance (weight units squared)"
    label = f"{unit}\n±{number(limit)} holds {100 * quantile:g} % of the {where}"
    theme.colour_bar(ax, image, limit, label, height=side, beyond=bool((np.abs(pooled[finite]) > limit).any()))
    remark = _label_blocks(ax, side, names, borders)
    text = f"{len(array):,} coordinates"
    if groups is not None:
        text += f" in {size:,} groups; cells are "
        text += f"mean {kind}s of different coordinates" if pairs else f"{kind}s of group means"
    elif factor > 1:
        text += f"; each cell is a mean over {factor} × {factor}"
    if within is not None:
        share = beyond.sum() / max(1, finite.sum() - size)
        text += "; cells within chance are white"
        if title is not None:
            title += f": {100 * share:.2g} % beyond chance (independent: {100 * CHANCE:g} %)"
    if (many := int(constant.sum())) > 0:
        text += f"; {many:,} constant {'one is' if many == 1 else 'ones are'} grey"
    ax.set_xlabel(wrap(f"{text}; {remark}" if remark else text, side), fontsize=SMALL, color=theme.MUTED)
    canvas.finish(title)
    if canvas.owned:
        theme.resolve(ax, size)
    return ax


def chance(networks: int) -> float:
    """The correlation that one in 1,000 of two independent normal variables exceeds, by size, over N networks.

        r = t / sqrt(N - 2 + t^2),   t the quantile 1 - 0.001 / 2 of Student's distribution with N - 2 degrees.

    DataError for fewer than 3 networks, whose correlations have no error.
    """
    if networks < 3:
        raise DataError(
            f"expected at least 3 networks for the error of a correlation, found {networks}; draw single entries"
        )
    t = float(stdtrit(networks - 2, 1 - CHANCE / 2))
    return t / math.sqrt(networks - 2 + t * t)


def _grouped(
    names: Sequence[str], bounds: Sequence[tuple[int, int]], groups: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The permutation that sorts coordinates by group, and the groups' borders."""
    if unknown := sorted(set(groups) - set(names)):
        raise UsageError(f"groups: `{unknown[0]}` is not a block; blocks are {', '.join(names)}")
    order, edges = [], [0]
    for name, (start, stop) in zip(names, bounds, strict=True):
        labels = np.asarray(groups.get(name, np.zeros(stop - start, dtype=int)))
        if labels.shape != (stop - start,):
            raise UsageError(f"groups: `{name}` has {stop - start} coordinates, found groups for {labels.shape}")
        order.append(start + np.argsort(labels, kind="stable"))
        edges += list(start + np.cumsum(np.unique(labels, return_counts=True)[1]))
    return np.concatenate(order), np.array(edges)


def _bounds(blocks: Mapping[str, slice], size: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Names and (start, stop) in order; every coordinate belongs to one block."""
    placed = sorted((*block.indices(size), name) for name, block in blocks.items())
    borders = [0, *(stop for _, stop, _, _ in placed)]
    if borders[-1] != size or [(start, step) for start, _, step, _ in placed] != [(at, 1) for at in borders[:-1]]:
        found = ", ".join(f"{name} {start}:{stop}" for start, stop, _, name in placed) or "none"
        raise UsageError(f"blocks: expected them to cover {size} coordinates without overlap, found {found}")
    kept = [(name, (start, stop)) for start, stop, _, name in placed if stop > start]
    return [name for name, _ in kept], [bound for _, bound in kept]


def _label_blocks(ax: Axes, side: float, names: list[str], borders: np.ndarray) -> str:
    """Draw borders between blocks and name those that have room, the largest first, on both axes of `side` inches."""
    size, drawn, named = borders[-1], 0, list[int]()
    for at in borders[1:-1]:
        if at - drawn >= _CLEAR * size:  # lines next to one another would cover what is between
            for line in (ax.axhline, ax.axvline):
                line(at, color=theme.INK, lw=0.5 if len(names) <= 20 else 0.2, gid="border")
            drawn = at
    centres, gap = (borders[1:] + borders[:-1]) / 2, size * _LINE / side
    for i in np.argsort(-np.diff(borders), kind="stable"):
        if all(abs(centres[i] - centres[other]) >= gap for other in named):
            named.append(i)
    short, remark = short_names([names[i] for i in sorted(named)])
    places = centres[sorted(named)]
    level = max(map(inches, short)) + 0.08 <= np.diff(places).min(initial=np.inf) * side / size
    ax.set_yticks(places, short)
    ax.set_xticks(places, short, rotation=0 if level else 90)
    left = f"small blocks without a label: {len(names) - len(named)}" if len(named) < len(names) else ""
    return "; ".join(filter(None, [remark, left]))


def cell_edges(bounds: Sequence[tuple[int, int]], most: int) -> tuple[np.ndarray, int]:
    """Cell borders that respect the blocks' borders, with at most `most` cells (or one for each block).

    All cells of a block but the last have one size: uneven sizes would cause moire patterns in regular stripes.
    """
    size = bounds[-1][1]
    factor = max(1, -(-size // most))
    while True:
        starts = np.concatenate([np.arange(a, b, factor) for a, b in bounds])
        if len(starts) <= max(most, len(bounds)):
            return np.append(starts, size), factor
        factor += 1


def pool(
    matrix: np.ndarray,
    order: np.ndarray,
    edges: np.ndarray,
    missing: np.ndarray,
    diagonal: _Diagonal,
    scale: np.ndarray,
) -> np.ndarray:
    """Average a symmetric matrix (D, D) over pairs of groups of coordinates; NaN where a pair has no valid entry.

    The mean rather than the entry of largest magnitude: a mean of f x f covariances is the covariance of two means,
    hence unbiased, while the maximum of f x f noisy entries grows with f and suggests structure in pure noise.

    `order` (D,) are the coordinates sorted by group, `edges` (c + 1,) the groups' first places in it and D, `missing`
    (D,) coordinates to ignore, `diagonal` what the cell of a group with itself averages, and `scale` (D,) the units in
    which coordinates are averaged.
    """
    starts, index = edges[:-1], np.arange(len(edges) - 1)
    group = np.empty(len(order), dtype=np.intp)
    group[order] = np.repeat(index, np.diff(edges))
    sums = np.zeros((len(starts), len(starts)))
    for first in range(0, len(matrix), _ROWS):
        rows = np.take(matrix[first : first + _ROWS], order, axis=1).astype(np.float64, copy=False)
        rows[missing[first : first + _ROWS]] = 0.0
        rows[:, missing[order]] = 0.0
        rows /= scale[order]
        rows /= scale[first : first + _ROWS, None]
        # np.add.at takes as long as all the rest.
        by = np.argsort(group[first : first + _ROWS], kind="stable")
        here = group[first : first + _ROWS][by]
        at = np.flatnonzero(np.diff(here, prepend=-1))
        sums[here[at]] += np.add.reduceat(np.add.reduceat(rows, starts, axis=1)[by], at)
    counted = np.add.reduceat((~missing[order]).astype(np.float64), starts)
    counts = np.outer(counted, counted)
    own = np.add.reduceat(np.where(missing, 0.0, np.diagonal(matrix) / scale**2)[order], starts)
    if diagonal == "variances":
        sums[index, index], counts[index, index] = own, counted
    elif diagonal == "others":
        sums[index, index] -= own
        counts[index, index] -= counted
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def checked_square(matrix: np.ndarray, what: str) -> np.ndarray:
    """The matrix as a float array (D, D), checked to be square."""
    array = np.asarray(matrix)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise DataError(f"{what}: expected a square matrix (D, D), found {array.shape}")
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)
