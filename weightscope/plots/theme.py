"""The common style of all figures, their axes, texts and files.

Drawing functions run in `themed`, which starts from matplotlib's defaults and restores the user's settings. Figures are
made without pyplot, so no window opens and no global reference to them remains. Settings that matplotlib reads only
when it draws (ticks) are fixed on the axes.
"""

import contextlib
import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from weightscope._util import atomic
from weightscope._util.threads import one_thread
from weightscope.errors import UsageError

FONT = "DejaVu Sans"  # ships with matplotlib, so figures do not depend on installed fonts
TITLE, LABEL, SMALL = 10.5, 9.0, 8.0  # points
_WIDTH = 0.56  # of a mean character, relative to the font size; bold ones are 1.13 times as wide

_LONG = 40  # characters; longer names are cut in the middle


def inches(text: str, size: float = SMALL) -> float:
    """About how wide a text is; layout engines do the rest."""
    return max(map(len, text.split("\n"))) * _WIDTH * size / 72


def wrap(text: str, width: float, size: float = SMALL) -> str:
    """Break a text into lines of about `width` inches; `size` TITLE is bold."""
    characters = int(width * 72 / (_WIDTH * size * (1.13 if size == TITLE else 1)))
    lines = [textwrap.fill(line, max(8, characters), break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join(lines)


def number(value: float, digits: int = 3) -> str:
    """A number as text: 0.0012, 1.5, 12,300, 1.2×10⁻⁷, with a typographic minus sign."""
    mantissa, _, exponent = f"{float(f'{value:.{digits}g}'):,.10g}".partition("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")) if exponent else ""
    return (mantissa + f"×10{power}" * bool(exponent)).replace("-", "−")


def signed(value: float, digits: int) -> str:
    """A difference with its sign: +2.1, −0.4, 0.0."""
    text = f"{value:+,.{digits}f}"
    return text[1:] if round(value, digits) == 0 else text.replace("-", "−")


def decimals(width: float) -> int:
    """The number of decimals that shows an interval of this width to two digits."""
    return min(6, max(0, 1 - math.floor(math.log10(width)))) if width > 0 and math.isfinite(width) else 1


def interval(low: float, high: float) -> str:
    """`+0.4 to +2.1`, to two digits of its width."""
    return f"{signed(low, decimals(high - low))} to {signed(high, decimals(high - low))}"


def p_value(p: float) -> str:
    """A p-value: `p = 0.012`, `p = 2×10⁻⁹`, `p < 10⁻³⁰⁰`."""
    if p < 1e-300:
        return "p < 10⁻³⁰⁰"
    return f"p = {p:.2g}" if p >= 1e-3 else f"p = {number(p, 1)}"


def rounded_up(limit: float) -> float:
    """The limit of a colour scale, rounded up to two digits so that the printed value is exact."""
    if limit <= 0:
        return limit
    step = 10.0 ** (math.floor(math.log10(limit)) - 1)
    return float(f"{math.ceil(limit / step * (1 - 1e-12)) * step:.2g}")


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names without the parts that they all share, with numbered words as `block 1`; distinct names stay distinct.

    `stages.0.blocks.0.mlp.fc1.weight` and `stages.0.blocks.1.mlp.fc2.weight` become `block 0 mlp.fc1` and
    `block 1 mlp.fc2`; long names are cut in the middle. Returns them, and a remark that says which is which.
    """
    parts = [re.sub(r"\b([A-Za-z_]+?)(?:(?<![aisu])s)?\.(\d+)\b", r"\1 \2", name).split(".") for name in names]
    first = last = 0
    if len(names) > 1 and not any("(" in name for name in names):
        most = min(map(len, parts)) - 1
        first = next((i for i in range(most) if len({p[i] for p in parts}) > 1), most)
        last = next((i for i in range(most - first) if len({p[-1 - i] for p in parts}) > 1), most - first)
    short = [re.sub(r"\b(\d+)\.", r"\1 ", ".".join(p[first : len(p) - last])) for p in parts]
    short = [f"module {name}" if name.isdecimal() else name for name in short]  # of a Sequential
    cut = [name if len(name) <= _LONG else f"{name[: _LONG // 2 - 1]}…{name[-_LONG // 2 :]}" for name in short]
    cut = cut if len(set(cut)) == len(set(names)) else short if len(set(short)) == len(set(names)) else list(names)
    return cut, f"{cut[0]} is {names[0]}" if first or last else ""


Drawn = Axes | Figure | SubFigure
DPI = 150
INK, MUTED = "#1f2328", "#57606a"
_PAD = 0.08  # inches around what is drawn
GREY = "#b4b9bf"  # missing values; not a colour of any map
DIVERGING = "RdBu_r"
# Seaborn's colour-blind safe palette in an order of distinct neighbours, without its pale pink and yellow.
PALETTE = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#56b4e9", "#ca9161", "#949494")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1, 1, 1, 1, 1)))


def style(index: int, *, hollow: bool = False, **more: Any) -> dict[str, Any]:
    """Keyword arguments of the i-th of several lines or groups; a hollow one has open markers and is dotted."""
    colour = PALETTE[index % len(PALETTE)]
    found: dict[str, Any] = {"color": colour, "mfc": "white" if hollow else colour, "mew": 1.2, "lw": 1.5}
    found |= {"marker": MARKERS[index % len(MARKERS)], "ls": (0, (1, 1.5)) if hollow else LINES[index % len(LINES)]}
    return found | more


# Without dates and versions a file changes only if the figure does; the name tells our figures from others.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": "weightscope"},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": "weightscope", "Producer": None},
    "svg": {"Date": None, "Creator": "weightscope"},
}

_SETTINGS: dict[str, Any] = {
    "font.family": FONT,
    "font.size": LABEL,
    "axes.labelsize": LABEL,
    "axes.titlesize": TITLE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
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
    "lines.solid_capstyle": "round",
    "patch.edgecolor": "w",
    "patch.force_edgecolor": True,
    "image.interpolation": "nearest",
    "svg.hashsalt": "weightscope",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@contextlib.contextmanager
def themed() -> Iterator[None]:
    """Apply the style within the block, or while a decorated drawing function runs, and restore the settings after."""
    with one_thread(), matplotlib.style.context(["default", _SETTINGS]):
        yield


@dataclass(frozen=True)
class Canvas:
    """Axes to draw on, and whether their figure was created here (`owned`); then the title is that of the figure."""

    ax: Axes
    owned: bool

    @property
    def width(self) -> float:
        """About the width of the axes in inches."""
        return float(self.ax.figure.figure.get_size_inches()[0]) * (0.8 if self.owned else self.ax.get_position().width)

    def legend(self, handles: Sequence[Any], title: str | None = None) -> None:
        """Place a legend above the axes, in as many columns as fit; long labels are broken.

        What a legend of another panel of the figure says is not said again.
        """
        others = [ax.get_legend() for ax in self.ax.figure.figure.axes if ax is not self.ax]
        titles = {_flat(legend.get_title()) for legend in others if legend is not None}
        shown = {
            (_flat(text), *_look(handle))
            for legend in others
            if legend is not None
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        }
        if all((str(handle.get_label()), *_look(handle)) in shown for handle in handles):
            handles = []
        title = None if title in titles else title
        if not handles and title is None:
            return
        for handle in handles:
            handle.set_label(wrap(str(handle.get_label()), self.width - 0.6))
        self.ax.legend(
            handles=handles,
            title=title and wrap(title, self.width + 0.3),
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=legend_columns(handles, self.width),
            alignment="left",
            borderaxespad=0.5,
            borderpad=0.2,
            columnspacing=1.6,
            handlelength=2.6,
        )

    def finish(self, title: str | None) -> Axes:
        """Set the wrapped title, of an owned figure, else of the axes above a legend; returns the axes."""
        if self.owned:
            head(self.ax.figure.figure, title)
        elif title is not None:
            legend, pad = self.ax.get_legend(), 8.0
            if legend is not None and legend.get_bbox_to_anchor().height == 0:  # placed above the axes by `legend`
                pad += legend.get_window_extent().height * 72 / self.ax.figure.figure.dpi
            self.ax.set_title(wrap(title, self.width, TITLE), linespacing=1.25, pad=pad)
        return self.ax


def _flat(text: Text) -> str:
    """A text that was wrapped, on one line."""
    return text.get_text().replace("\n", " ")


def _look(handle: Any) -> tuple[Any, ...]:
    """What tells the handles of a legend apart besides their labels."""
    return tuple(getattr(handle, f"get_{name}", lambda: None)() for name in ("color", "marker", "linestyle"))


def legend_columns(handles: Sequence[Any], width: float) -> int:
    """As many columns of a legend as fit into `width` inches."""
    widest = max((inches(str(handle.get_label())) for handle in handles), default=0.0) + 0.6
    return max(1, min(len(handles), int(width / widest)))


def canvas(ax: Axes | None, width: float, height: float) -> tuple[Canvas, Axes]:
    """The given axes, or those of a new figure of `width` by `height` inches."""
    on = Canvas(new_figure(width, height).add_subplot() if ax is None else ax, owned=ax is None)
    pin(on.ax)
    return on, on.ax


class _Shown(Figure):
    """A figure that notebooks show, without pyplot."""

    def _repr_png_(self) -> bytes:
        return render(self)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with constrained layout."""
    figure = _Shown(figsize=(width, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    return figure


def head(figure: Figure, title: str | None) -> None:
    """Put a wrapped title above a figure with constrained layout, which grows."""
    if title is not None:
        width, height = figure.get_size_inches()
        text = wrap(title, width - 0.2, TITLE)
        figure.set_size_inches(width, height + (text.count("\n") + 1) * 1.3 * TITLE / 72 + 0.08)
        figure.suptitle(text, x=0.012, ha="left", linespacing=1.25)


def resolve(ax: Axes, cells: int) -> None:
    """Give a figure whose axes have more cells than pixels along a side one pixel for each cell."""
    figure = ax.figure.figure
    figure.draw_without_rendering()  # lays it out
    if (pixels := ax.get_window_extent().width) < cells:
        figure.set_dpi(float(figure.dpi) * cells / pixels)


def pin(ax: Axes) -> None:
    """Write the tick settings into the axes, because ticks are created lazily, possibly outside the style."""
    for which, width, length in (("major", 0.8, 3.5), ("minor", 0.6, 2.0)):
        ax.tick_params(
            which=which, labelsize=SMALL, labelcolor=INK, color=INK, width=width, length=length, labelfontfamily=FONT
        )


@themed()
def subplots(
    rows: int = 1, columns: int = 1, *, width: float = 0.0, height: float = 0.0, title: str | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes in the common style, for the argument `ax`, and `axes[row][column]`.

    Width and height are inches, by default 5.5 per column and 3.8 per row.

    Example:
        >>> figure, ((left, right),) = subplots(1, 2)
        >>> convergence(result.arms, left)
        >>> paired_differences(result.runs, right)
        >>> save(figure, "bench.pdf")
    """
    figure = new_figure(width or 5.5 * columns, height or 3.8 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for ax in grid.flat:
        pin(ax)
    head(figure, title)
    return figure, [list(line) for line in grid]


def outside(ax: Axes, side: float, y: float, text: str, points: float, **style: Any) -> None:
    """A text at height y (data), `points` to the right of the left (0) or right (1) side of the axes."""
    style |= {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    ax.annotate(text, (side, y), (points, 0), va="center", fontsize=SMALL, **style)


def bar(ax: Axes, y: float, value: float, ends: Sequence[float], **style: Any) -> None:
    """A point with its interval along x."""
    ax.errorbar([value], [y], xerr=[[value - ends[0]], [ends[1] - value]], **{"capsize": 3, **style})


def list_axis(
    ax: Axes,
    positions: Sequence[float],
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    at: Sequence[float] | None = None,
) -> None:
    """Names at `positions` of the vertical axis, the first on top, and columns of text to the right by their headers.

    The entries of columns are at `positions`, or `at` others.
    """
    at = positions if at is None else at
    ax.set_yticks(positions, names)
    ax.tick_params(axis="y", length=0, pad=6)
    ax.set_ylim(max(*positions, *at) + 0.55, -1.3)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")
    offset = 0.12  # inches; relative distances would change when the layout makes room for the text
    for header, entries in columns.items():
        outside(ax, 1, -0.85, header, 72 * offset, color=MUTED)
        for y, text in zip(at, entries, strict=True):
            outside(ax, 1, y, text, 72 * offset, color=INK)
        offset += max(map(inches, [header, *entries])) + 0.2


def log_ticks(axis: Any, low: float, high: float) -> None:
    """A few round ticks on a logarithmic axis; 1, 2 and 5 alone may leave one tick or none on a short one."""
    spread = high / low
    locator = MaxNLocator(5) if spread < 5 else LogLocator(subs=(1.0, 2.0, 5.0) if spread < 200 else (1.0,))
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())


def reference(ax: Axes, at: float) -> None:
    """A dashed line at the value along x that others are compared with."""
    ax.axvline(at, color=INK, lw=1, ls=(0, (4, 2)), zorder=1, gid="reference")


def colour_limit(values: np.ndarray, quantile: float, everything: np.ndarray | None = None) -> float:
    """Limit of a colour scale: the quantile of the absolute values, or their maximum, or that of everything, or 1."""
    sizes, more = np.abs(values), np.abs(values if everything is None else everything)
    limit = float(np.quantile(sizes, quantile)) if sizes.size else 0.0
    return rounded_up(limit or float(sizes.max(initial=0)) or float(more.max(initial=0)) or 1.0)


def colours(limit: float) -> dict[str, Any]:
    """Colour map and a scale from -limit to limit, centred at zero, as keyword arguments of `imshow`."""
    return {"cmap": matplotlib.colormaps[DIVERGING].with_extremes(bad=GREY), "norm": CenteredNorm(0.0, limit)}


def colour_bar(ax: Axes, image: Any, limit: float, label: str, *, height: float, beyond: bool) -> None:
    """A colour bar beside axes of `height` inches, with its limits printed; pointed ends mark values beyond them."""
    place = ax.inset_axes((1.025, 0, 0.032, 1))
    bar = ax.figure.colorbar(image, cax=place, extend="both" if beyond else "neither", extendfrac=0.025)
    ticks = [-limit, -limit / 2, 0, limit / 2, limit]
    bar.set_ticks(ticks, labels=[number(t) for t in ticks])
    bar.set_label(wrap(label, height), fontsize=SMALL)
    bar.outline.set_visible(False)
    pin(bar.ax)


def root_figure(drawn: Drawn) -> Figure:
    """The whole figure that axes or a subfigure belong to."""
    return drawn.figure.figure


def finished(drawn: Drawn, path: str | Path | None) -> Figure:
    """The whole figure that something is drawn in, written to a file if there is a path."""
    if path is not None:
        save(drawn, path)
    return root_figure(drawn)


@themed()
def render(drawn: Drawn, kind: str = "png") -> bytes:
    """The whole figure as the bytes of a `png` (150 dots per inch, or those of a finer figure), `pdf` or `svg` file."""
    figure, buffer = root_figure(drawn), io.BytesIO()
    dpi = max(float(DPI), float(figure.dpi))
    figure.draw_without_rendering()  # lays it out
    box = figure.get_tightbbox().padded(_PAD)
    corners = np.array([box.min, box.max]) * dpi
    whole = Bbox([np.floor(corners[0]) / dpi, np.ceil(corners[1]) / dpi])  # pixels stay where they are
    engine = figure.get_layout_engine()
    figure.set_layout_engine("none")  # a second layout would move what was measured
    fast: dict[str, Any] = {"pil_kwargs": {"compress_level": 1}} if kind == "png" else {}  # compressed again below
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=_METADATA[kind], bbox_inches=whole, **fast)
    figure.set_layout_engine(engine)
    return _with_fewer_colours(buffer, dpi) if kind == "png" else buffer.getvalue()


def _with_fewer_colours(png: io.BytesIO, dpi: float) -> bytes:
    """A picture with the 256 colours that are nearest to its own, in less than half of the bytes."""
    about, out = PngInfo(), io.BytesIO()
    about.add_text("Software", str(_METADATA["png"]["Software"]))
    picture = Image.open(png).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(out, "png", pnginfo=about, dpi=(dpi, dpi), optimize=True)
    return out.getvalue()


def save(drawn: Drawn, path: str | Path) -> None:
    """Write what is drawn of the whole figure as .png, .pdf or .svg; the same figure gives the same bytes.

    The file appears only when it is complete. Another suffix is a UsageError.

    Example:
        >>> save(convergence(result.arms), "bench.png")
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in _METADATA:
        raise UsageError(f"{path}: expected a file name ending in {', '.join('.' + s for s in _METADATA)}")
    atomic.write(path, render(drawn, suffix))
