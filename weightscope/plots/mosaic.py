"""Convolution filters side by side."""

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from weightscope.errors import DataError, UsageError
from weightscope.plots import theme, typography

_ACROSS = 5.6  # inches: width of the grid


@theme.themed
def filter_grid(
    filters: Any,
    ax: Axes | None = None,
    *,
    columns: int | None = None,
    scale: Literal["shared", "each"] = "shared",
    title: str | None = None,
) -> Axes:
    """Convolution filters side by side (thesis, Fig. 2.4-2.6), on a colour scale centred at zero.

    Args:
        filters: (n, k, l) weights, or (n, 3, k, l) of a patch embedding, drawn in colour with zero as grey.
        ax: axes to draw on; a new figure if None.
        columns: filters per row; roughly a square if None.
        scale: `"shared"` for one scale, whose limit is printed; `"each"` to normalise every filter by its maximum.
        title: figure title.

    Raises:
        DataError: if the shape is wrong or a weight is not finite.
        UsageError: if an option is invalid.

    Example:
        >>> filter_grid(convnext.state_dict()["stages.0.blocks.0.conv_dw.weight"][:, 0].numpy(), columns=16)
    """
    array = _filters(filters)
    colour = array.ndim == 4
    if scale not in ("shared", "each") or (columns is not None and columns < 1):
        raise UsageError(f"expected scale shared or each and columns >= 1, found {scale} and {columns}")
    columns = min(columns or int(np.ceil(np.sqrt(1.6 * len(array)))), len(array))
    peak = np.abs(array).reshape(len(array), -1).max(axis=1)
    limit = typography.rounded_up(float(peak.max()) or 1.0)
    if scale == "each":
        array = array / np.where(peak > 0, peak, 1).reshape(-1, *[1] * (array.ndim - 1))
        limit = 1.0
    picture = mosaic(np.moveaxis(array, 1, -1) if colour else array, columns)
    height, width = picture.shape[:2]
    inches = min(1.0, 8.0 / (_ACROSS * height / width)) * _ACROSS
    canvas = theme.Canvas.on(ax, inches, inches * height / width)
    ax = canvas.ax
    extent = (0, width, height, 0)
    if colour:
        shown = np.where(np.isnan(picture), 1.0, 0.5 + 0.5 * picture / limit)
        ax.imshow(shown, interpolation="nearest", extent=extent)
    else:
        drawn = ax.imshow(
            np.ma.masked_invalid(picture),
            **theme.colours(limit, missing="white"),
            interpolation="nearest",
            extent=extent,
        )
        unit = "weight" if scale == "shared" else "weight ÷ the filter's largest"
        theme.colour_bar(ax, drawn, limit, unit, room=max(72.0, 72 * inches * height / width), beyond=False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    k, l = array.shape[-2:]  # noqa: E741 - the papers' letter
    text = f"{len(array):,} filters of {k} × {l}"
    if colour:
        text += ", grey is 0, "
        text += "each on its own scale" if scale == "each" else f"full colour ±{typography.number(limit)}"
    ax.set_xlabel(text, fontsize=typography.SMALL, color=theme.MUTED)
    canvas.finish_sized(inches, inches * height / width, title)
    return ax


def _filters(filters: Any) -> np.ndarray:
    array = np.asarray(filters, dtype=np.float64)
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[1] == 3)) or array.size == 0:
        raise DataError(f"filter grid: expected (n, k, l) or (n, 3, k, l), found {array.shape}")
    if not (finite := np.isfinite(array)).all():
        raise DataError(f"filter grid: filter {np.argwhere(~finite)[0][0]} is not finite")
    return array


def mosaic(filters: np.ndarray, columns: int, *, fine: int = 1) -> np.ndarray:
    """Filters row by row, separated by one cell of NaN; no cells around them.

    Args:
        filters: (n, k, l), or (n, k, l, 3) in colour.
        columns: filters of a row.
        fine: cells along a side of a pixel, so that the gap is a fraction 1 / fine of it.

    Returns:
        (rows (fine k + 1) - 1, columns (fine l + 1) - 1[, 3]).
    """
    n, k, l = filters.shape[:3]  # noqa: E741 - the papers' letter
    height, width = fine * k + 1, fine * l + 1
    out = np.full((-(-n // columns) * height - 1, columns * width - 1, *filters.shape[3:]), np.nan)
    for index, tile in enumerate(filters):
        y, x = (index // columns) * height, (index % columns) * width
        out[y : y + height - 1, x : x + width - 1] = tile.repeat(fine, axis=0).repeat(fine, axis=1)
    return out
