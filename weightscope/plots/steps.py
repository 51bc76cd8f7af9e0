"""Statistics of the layers of one network against the steps of its training."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from weightscope.plots import theme
from weightscope.plots.theme import LABEL, wrap


@theme.themed()
def step_curves(
    steps: Sequence[int],
    panels: Mapping[str, Any],
    *,
    even: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Figure:
    """One panel for each statistic, one line for each layer, from light (first) to dark (last).

    `panels` maps a label to values (S, L) at the S steps, of L layers; NaN are left out, and lines go on after them.
    `even` has the value for independent entries, a dashed line, for some labels.
    """
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, grid = theme.subplots(down, across, width=max(3.9 * across, 6.0), height=0.6 + 2.7 * down)
    dashed: dict[str, Any] = {"color": theme.MUTED, "lw": 1.0, "ls": (0, (4, 2)), "zorder": 1, "gid": "even"}
    most = max(np.shape(values)[1] for values in panels.values())
    colours, margin = mpl.colormaps["viridis_r"], 0.03 * (steps[-1] - steps[0]) or 1
    for ax, (label, values) in zip(chain(*grid), panels.items(), strict=False):
        values = np.asarray(values, dtype=np.float64)
        for i, column in enumerate(values.T):
            known = np.isfinite(column)
            shade = theme.INK if values.shape[1] == 1 else colours(0.08 + 0.92 * i / (values.shape[1] - 1))
            marker = "o" if known.sum() == 1 else None
            ax.plot(np.array(steps)[known], column[known], color=shade, lw=1.3, marker=marker, ms=4, gid="layer")
        if even and label in even:
            ax.axhline(even[label], **dashed)
        ax.set_title(wrap(label, 3.3, LABEL), fontsize=LABEL, fontweight="normal")
        ax.set_xlabel("optimiser step")
        ax.set_xlim(steps[0] - margin, steps[-1] + margin)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        ax.grid(axis="y")
    for ax in list(chain(*grid))[len(panels) :]:
        ax.remove()
    handles = [Line2D([], [], color=colours(x), lw=2, label=n) for x, n in ((0.08, "first layer"), (1.0, "last layer"))]
    shown = bool(even and set(even) & set(panels))
    handles = handles * (most > 1) + [Line2D([], [], label="independent entries", **dashed)] * shown
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    theme.head(figure, title)
    return figure
