"""One look for all pictures, set locally: the user's matplotlib settings, backend and figures are left alone.

Figures are made without pyplot, so no window opens and nothing is kept alive. Every drawing function runs in
`theme`, which starts from matplotlib's defaults and not from what the user has set, so a picture has the same
bytes everywhere; what matplotlib looks up only when it draws (ticks) is pinned to the axes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightscope.errors import UsageError
from weightscope.plots._text import FONT, LABEL, SMALL, TITLE, number, text_width, wrap

P = ParamSpec("P")
R = TypeVar("R")

DPI = 150
INK, MUTED, FAINT = "#1f2328", "#57606a", "#d0d7de"
_PAD = 0.09  # inches around a picture
GREY = "#b4b9bf"  # for what has no value: never a colour of a map
DIVERGING = "RdBu_r"
# Seaborn's colour-blind safe palette in an order that keeps neighbours apart, without its pale pink and yellow.
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
    "text.parse_math": False,  # a name may hold a dollar sign
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
def theme() -> Iterator[None]:
    """The look, until the block ends; afterwards every setting is what it was."""
    with matplotlib.style.context(["default", _SETTINGS]):
        yield


def themed(function: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in `theme`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with theme():
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Canvas:
    """Axes to draw on, and whether they are ours: then size and title belong to the figure."""

    ax: Axes
    owned: bool

    @classmethod
    def on(cls, ax: Axes | None, width: float, height: float) -> "Canvas":
        """The given axes, or the only axes of a new figure of `width` by `height` inches."""
        if ax is not None:
            if not isinstance(ax, Axes):
                raise UsageError(f"ax: expected matplotlib Axes or None, found {type(ax).__name__}")
            return cls(ax, owned=False)
        return cls(new_figure(width, height).add_subplot(), owned=True).pinned()

    def pinned(self) -> "Canvas":
        """Fix the look of ticks that matplotlib makes only when it draws."""
        pin(self.ax)
        return self

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches that the axes may fill, roughly: the rest of their cell is for labels."""
        width, height = self.ax.figure.get_size_inches()
        if not self.owned:
            box = self.ax.get_position(original=True)
            width, height = width * box.width / 0.8, height * box.height / 0.8
        return float(width), float(height)

    def legend(self, handles: Sequence[Any], title: str | None = None) -> None:
        """A legend over the axes, where it hides no data, in as many columns as fit."""
        room = 72 * 0.8 * self.size[0]
        widest = max(text_width(handle.get_label()) for handle in handles) + 44
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
        """Give axes of ours a size in inches and their figure what labels and title need besides.

        The usual layout does the reverse, and leaves bands of white beside axes with a fixed aspect.
        """
        if not self.owned:
            self.finish(title)
            return
        figure, ax, away = self.ax.figure, self.ax, 4.0  # no label is longer than that
        figure.set_layout_engine("none")
        figure.set_size_inches(width + 2 * away, height + 2 * away)
        self._place(away, away, width, height)
        box = ax.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
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
        x, y = self.ax.figure.get_size_inches()
        self.ax.set_position((left / x, bottom / y, width / x, height / y))

    def finish(self, title: str | None) -> None:
        """Set the finding as title, wrapped: over a figure of ours, which grows, else over the axes."""
        if title is None:
            return
        if self.owned:
            width, height = self.size
            text = wrap(title, 72 * (width - 0.2), TITLE, bold=True)
            self.ax.figure.set_size_inches(width, height + (text.count("\n") + 1) * 1.3 * TITLE / 72 + 0.08)
            self.ax.figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)
            return
        pad = 8.0
        legend = self.ax.get_legend()
        if legend is not None and legend.get_bbox_to_anchor().height == 0:  # it stands over the axes, see above
            pad += legend.get_window_extent().height * 72 / self.ax.figure.dpi
        self.ax.set_title(wrap(title, 72 * 0.8 * self.size[0], TITLE, bold=True), linespacing=1.25, pad=pad)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with a layout engine that makes room for every label."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)  # type: ignore[union-attr]
    return figure


def pin(ax: Axes) -> None:
    """Write the tick settings into the axes, because ticks are made lazily, under other settings perhaps."""
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
    """A figure with a grid of axes in the common look, to be handed as `ax` to the drawing functions.

    Args:
        rows: how many.
        columns: how many.
        width: inches; 5.5 for each column unless given.
        height: inches; 3.8 for each row unless given.
        title: of the whole figure.

    Returns:
        The figure and `axes[row][column]`.

    Raises:
        UsageError: if there is no row or no column.

    Example:
        >>> figure, ((left, right),) = subplots(1, 2)
        >>> convergence(result.summary, left)
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
    """Columns of text right of the axes, with grey heads at the height `head`; first rows in data coordinates.

    Distances are points and not shares of the axes, so that making room for the text does not move it.
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
    """Names down the left side, first on top, with room for the heads of columns above the first."""
    ax.set_yticks(places, labels)
    ax.tick_params(axis="y", length=0, pad=6)
    ax.set_ylim(rows - 0.45, -1.3)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")


def centred(limit: float) -> Normalize:
    """A colour scale from -limit to limit whose middle colour is zero."""
    return TwoSlopeNorm(0.0, -limit, limit)


def colour_bar(ax: Axes, image: Any, limit: float, label: str, *, room: float, beyond: bool) -> Any:
    """A colour bar as high as the axes, with its limits printed; pointed ends say that values beyond them exist.

    `room` is that height in points, for the label.
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
    """Places as near to the wanted ones as possible, at least `gap` apart and between low and high.

    Least squares with the order kept: isotonic regression of `wanted[i] - i gap` by pooling violators. None if
    there is no room.
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
    """Tick labels in per cent for an axis that holds fractions; the axis' label carries the unit."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    span = 100 * (high - low)
    decimals = 0 if span >= 4 else 1 if span >= 0.4 else 2
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.{decimals}f}".replace("-", "−")))
