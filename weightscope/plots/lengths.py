"""Sequence networks at multiples of the length that they were trained at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from weightscope.data.metrics import ACCURACY
from weightscope.errors import UsageError
from weightscope.plots import theme, typography
from weightscope.plots.arms import draw_line, ends, handle, seeds_note, styles_of, value_axis


@theme.themed
def accuracy_by_length(
    by_length: Mapping[int, Sequence[Mapping[str, Any]]], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Test accuracy against the length of the sequences, one line for each initialiser, with paired intervals.

    Bars are the 95 % interval of the difference from the reference on the same seeds at the same length, drawn around
    the mean and not beyond 0 and 100 %; a single initialiser has the interval of its mean. An initialiser is drawn at
    the lengths that it has rows for.

    Args:
        by_length: multiple of the training length -> rows of `summarise` with that length's metric, of one cell and
            one number of epochs: `init`, `n`, `mean`, `ci95`, `difference`, `difference_ci95` (fractions), `reference`.
        ax: axes to draw on; a new figure if None.
        title: figure title.

    Raises:
        UsageError: if there is only one length, or an initialiser occurs twice at one.
        DataError: if a mean is not a fraction.

    Example:
        >>> accuracy_by_length({length: summarise(result.runs, accuracy_at(length)) for length in (1, 2, 4)})
    """
    lengths = sorted(by_length)
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for length in lengths:
        for row in by_length[length]:
            mine = found.setdefault(row["init"], {})
            if length in mine:
                raise UsageError(f"accuracy by length: `{row['init']}` occurs twice at {length}x; expected one cell")
            ACCURACY.check([row["mean"]], f"`{row['init']}` at {length}x, mean")
            mine[length] = row
    if len(lengths) < 2 or not found:
        raise UsageError(f"accuracy by length: expected rows at two lengths or more, found {len(lengths)}")
    everything = [row for length in lengths for row in by_length[length]]
    styles = styles_of(list(found))
    canvas = theme.Canvas.on(ax, 6.0, 4.4)
    ax = canvas.ax
    for order, (init, rows) in enumerate(found.items()):
        mean, between = np.array([row["mean"] for row in rows.values()]), ends([*rows.values()], everything, ACCURACY)
        draw_line(ax, np.array([*rows], dtype=float), mean, between, styles[init], label=init, zorder=3 + 0.01 * order)
    ax.set_xscale("log", base=2)
    margin = (lengths[-1] / lengths[0]) ** 0.06
    ax.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="both")
    value_axis(ax.yaxis, ax.get_ylim(), ACCURACY)
    ax.set_xlabel("length of the sequences, relative to training (log scale)")
    ax.set_ylabel(ACCURACY.title)
    room = 72 * 0.8 * canvas.size[0] - 44
    handles = [handle(style, typography.wrap(init, room)) for init, style in styles.items()]
    canvas.legend(handles, seeds_note(everything))
    canvas.finish(title)
    return ax
