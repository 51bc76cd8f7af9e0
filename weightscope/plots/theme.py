"""The common style of all figures, applied locally: the user's matplotlib settings and backend stay unchanged.

Figures are made without pyplot, so no window opens and no global reference to them remains. Drawing functions run in
`context`, which starts from matplotlib's defaults rather than the user's settings, so that a figure has the same bytes
everywhere; settings that matplotlib reads only when it draws (ticks) are fixed on the axes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightscope.errors import UsageError
from weightscope.plots.typography import FONT, LABEL, SMALL, TITLE, number, rounded_up, text_width, wrap

P = ParamSpec("P")
R = TypeVar("R")

DPI = 150
INK, MUTED, FAINT = "#1f2328", "#57606a", "#d0d7de"
_PAD = 0.09  # inches around owned axes
GREY = "#b4b9bf"  # missing values; not a colour of any map
DIVERGING = "RdBu_r"
# Seaborn's colour-blind safe palette in an order of distinct neighbours, without its pale pink and yellow.
PALETTE = tuple(sns.color_palette("colorblind").as_hex()[i] for i in (0, 1, 2, 3, 4, 9, 5, 7))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1, 1, 1, 1, 1)))

_SETTINGS: dict[str, Any] = {
    **sns.axes_style("ticks"),
    "font.family": FONT,
    "font.size": LABEL,
    "axes.labelsize": LABEL,
    "axes.titlesize": TITLE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "legend.frameon": False,
    "figure.titlesize": TITLE,
    "figure.titleweight": "bold",
    "grid.color": "#e7eaee",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "svg.hashsalt": "weightscope",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@contextlib.contextmanager
def context() -> Iterator[None]:
    """Apply the style within the block and restore the settings afterwards."""
    with matplotlib.style.context(["default", _SETTINGS]):
        yield


def themed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: apply the style while a drawing function runs."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Canvas:
    """Axes to draw on, and whether their figure was created here (`owned`); then its size and title are set as well."""

    ax: Axes
    owned: bool

    @classmethod
    def on(cls, ax: Axes | None, width: float, height: float) -> "Canvas":
        """The given axes, or those of a new figure of `width` by `height` inches."""
        if ax is not None:
            if not isinstance(ax, Axes):
                raise UsageError(f"ax: expected matplotlib Axes or None, found {type(ax).__name__}")
            return cls(ax, owned=False)
        return cls(new_figure(width, height).add_subplot(), owned=True).pinned()

    def pinned(self) -> "Canvas":
        """Fix the style of ticks, which matplotlib creates when it draws."""
        pin(self.ax)
        return self

    @property
    def size(self) -> tuple[float, float]:
        """Approximate width and height in inches available to the axes and their labels."""
        width, height = self.ax.figure.figure.get_size_inches()
        if not self.owned:
            box = self.ax.get_position(original=True)
            width, height = width * box.width / 0.8, height * box.height / 0.8
        return float(width), float(height)

    def legend(self, handles: Sequence[Any], title: str | None = None) -> None:
        """Place a legend above the axes, in as many columns as fit."""
        room = 72 * 0.8 * self.size[0]
        lines = [line for handle in handles for line in str(handle.get_label()).split("\n")]
        widest = max(map(text_width, lines)) + 44
        self.ax.legend(
            handles=handles,
            title=title,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=max(1, min(len(handles), int(room / widest))),
            alignment="left",
            borderaxespad=0.5,
            borderpad=0.2,
            columnspacing=1.6,
            handlelength=2.6,
        )

    def finish_sized(self, width: float, height: float, title: str | None) -> None:
        """Set the size of owned axes in inches, and add the room that labels and title need to the figure.

        matplotlib's layout engines keep the figure's size, which leaves white bands beside axes of fixed aspect.
        """
        if not self.owned:
            self.finish(title)
            return
        figure, ax, away = self.ax.figure.figure, self.ax, 4.0  # inches; no label is longer
        figure.set_layout_engine("none")
        figure.set_size_inches(width + 2 * away, height + 2 * away)
        self._place(away, away, width, height)
        tight = ax.get_tightbbox()
        assert tight is not None  # only of invisible axes
        box = tight.transformed(figure.dpi_scale_trans.inverted())
        left, bottom = away - box.x0 + _PAD, away - box.y0 + _PAD
        right, top = box.x1 - away - width + _PAD, box.y1 - away - height + _PAD
        text = "" if title is None else wrap(title, 72 * (left + width + right - 0.2), TITLE, bold=True)
        if text:
            top += (text.count("\n") + 1) * 1.3 * TITLE / 72 + 0.06
        figure.set_size_inches(left + width + right, bottom + height + top)
        self._place(left, bottom, width, height)
        if text:
            figure.suptitle(text, x=0.012, y=1 - _PAD / (bottom + height + top), ha="left", va="top", linespacing=1.25)

    def _place(self, left: float, bottom: float, width: float, height: float) -> None:
        x, y = self.ax.figure.figure.get_size_inches()
        self.ax.set_position((left / x, bottom / y, width / x, height / y))

    def finish(self, title: str | None) -> None:
        """Set the wrapped title: of an owned figure, which grows, else of the axes."""
        if title is None:
            return
        if self.owned:
            width, height = self.size
            text = wrap(title, 72 * (width - 0.2), TITLE, bold=True)
            figure = self.ax.figure.figure
            figure.set_size_inches(width, height + (text.count("\n") + 1) * 1.3 * TITLE / 72 + 0.08)
            figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)
            return
        pad = 8.0
        legend = self.ax.get_legend()
        if legend is not None and legend.get_bbox_to_anchor().height == 0:  # placed above the axes by `legend`
            pad += legend.get_window_extent().height * 72 / self.ax.figure.figure.dpi
        self.ax.set_title(wrap(title, 72 * 0.8 * self.size[0], TITLE, bold=True), linespacing=1.25, pad=pad)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with constrained layout."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    return figure


def pin(ax: Axes) -> None:
    """Write the tick settings into the axes, because ticks are created lazily, possibly outside the style."""
    ax.tick_params(
        which="major", labelsize=SMALL, labelcolor=INK, color=INK, width=0.8, length=3.5, labelfontfamily=FONT
    )
    ax.tick_params(
        which="minor", labelsize=SMALL, labelcolor=INK, color=INK, width=0.6, length=2.0, labelfontfamily=FONT
    )


@themed
def subplots(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float | None = None,
    height: float | None = None,
    title: str | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes in the common style, for the `ax` argument of the drawing functions.

    Args:
        rows: number of rows.
        columns: number of columns.
        width: inches; 5.5 per column if None.
        height: inches; 3.8 per row if None.
        title: of the whole figure.

    Returns:
        The figure and `axes[row][column]`.

    Raises:
        UsageError: if rows or columns is less than 1.

    Example:
        >>> figure, ((left, right),) = subplots(1, 2)
        >>> convergence(result.arms, left)
        >>> paired_differences(result.runs, right)
        >>> save(figure, "bench.pdf")
    """
    if rows < 1 or columns < 1:
        raise UsageError(f"subplots: expected at least 1 row and 1 column, found {rows} and {columns}")
    figure = new_figure(width or 5.5 * columns, height or 3.8 * rows)
    grid = [list(line) for line in figure.subplots(rows, columns, squeeze=False)]
    for ax in (ax for line in grid for ax in line):
        pin(ax)
    if title is not None:
        text = wrap(title, 72 * (figure.get_size_inches()[0] - 0.2), TITLE, bold=True)
        figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)
    return figure, grid


def columns(ax: Axes, places: Sequence[float], head: float, texts: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Columns of text to the right of the axes, with grey headers at y = `head`; `places` are in data coordinates.

    Horizontal distances are in points, so that they do not change when the layout makes room for the text.
    """
    offset = 9.0
    for name, entries in texts:
        for y, text in zip([head, *places], [name, *entries], strict=True):
            ax.annotate(
                text,
                (1, y),
                (offset, 0),
                xycoords=ax.get_yaxis_transform(),
                textcoords="offset points",
                va="center",
                fontsize=SMALL,
                color=MUTED if y == head else INK,
                annotation_clip=False,
            )
        offset += max(map(text_width, [name, *entries])) + 16


def list_axis(ax: Axes, places: Sequence[float], labels: Sequence[str], rows: float) -> None:
    """Names along the vertical axis, the first on top, with room for column headers above it."""
    ax.set_yticks(places, labels)
    ax.tick_params(axis="y", length=0, pad=6)
    ax.set_ylim(rows - 0.45, -1.3)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")


def colour_map(missing: str = GREY) -> Colormap:
    """The diverging colour map, with a colour for missing values."""
    return matplotlib.colormaps[DIVERGING].with_extremes(bad=missing)


def colour_limit(values: np.ndarray, quantile: float) -> float:
    """Limit of a colour scale: the quantile of the absolute values, or their maximum, or 1 if all are zero."""
    sizes = np.abs(values)
    return rounded_up(float(np.quantile(sizes, quantile)) or float(sizes.max()) or 1.0)


def centred(limit: float) -> Normalize:
    """A colour scale from -limit to limit, centred at zero."""
    return TwoSlopeNorm(0.0, -limit, limit)


def colours(limit: float, missing: str = GREY) -> dict[str, Any]:
    """Colour map and scale, as keyword arguments of `imshow`."""
    return {"cmap": colour_map(missing), "norm": centred(limit)}


def colour_bar(ax: Axes, image: Any, limit: float, label: str, *, room: float, beyond: bool) -> Any:
    """A colour bar as high as the axes, with its limits printed; pointed ends mark values beyond them.

    `room` is the height in points, for wrapping the label.
    """
    place = ax.inset_axes((1.025, 0, 0.032, 1))
    ends = "both" if beyond else "neither"
    bar = ax.figure.colorbar(image, cax=place, extend=ends, extendfrac=0.025)
    ticks = [-limit, -limit / 2, 0, limit / 2, limit]
    bar.set_ticks(ticks, labels=[number(t) for t in ticks])
    bar.set_label(wrap(label, room), fontsize=SMALL)
    bar.outline.set_visible(False)
    pin(bar.ax)
    return bar


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float] | None:
    """Positions closest to the wanted ones in least squares, at least `gap` apart and between low and high.

    Isotonic regression of `wanted[i] - i gap` by pooling adjacent violators. None if there is not enough room.
    """
    n = len(wanted)
    if (n - 1) * gap > (high - low) * (1 + 1e-9):
        return None
    pools: list[tuple[float, int]] = []  # (mean, members)
    for i, value in enumerate(wanted):
        mean, members = value - i * gap, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, members = (mean * members + other * count) / (members + count), members + count
        pools.append((mean, members))
    flat = [mean for mean, members in pools for _ in range(members)]
    top = high - (n - 1) * gap
    return [min(max(value, low), top) + i * gap for i, value in enumerate(flat)]


def percent(axis: Any, low: float, high: float) -> None:
    """Tick labels in per cent for an axis of fractions; the unit is in the axis label."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    span = 100 * (high - low)
    decimals = 0 if span >= 4 else 1 if span >= 0.4 else 2
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.{decimals}f}".replace("-", "−")))
