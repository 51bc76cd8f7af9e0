"""All figures: their texts and files, and that drawing changes no settings."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pictures import (
    INIT,
    LONG,
    STRIPES,
    bench_runs,
    bench_summary,
    blocks_of,
    drawn_texts,
    figure_of,
    spd,
)
from programs import script

from weightscope import plots
from weightscope.benchmarking import seed_differences
from weightscope.errors import UsageError, WeightscopeError
from weightscope.plots import theme


def gallery() -> dict[str, Callable[[], Axes | Figure]]:
    """Every kind of figure with difficult content: long names, long titles, many rows."""
    g = np.random.default_rng(2)
    title = "A finding that takes more than one line to state, as findings do, when the picture is not very wide at all"
    parts = ("conv_dw.weight", "conv_dw.bias", "norm.weight", "norm.bias", "mlp.fc1.weight", "mlp.fc1.bias")
    whole = [f"stages.{s}.blocks.{b}.{p}" for s in (0, 1) for b in range(4) for p in parts]
    sizes = [40, 4, 4, 4, 60, 6] * 8
    stops = np.cumsum(sizes)
    thin = {name: slice(int(b - a), int(b)) for name, a, b in zip(whole, sizes, stops, strict=True)}
    every = np.abs(g.normal(0, 0.05, (40, 6))).cumsum(axis=1)
    many, one = g.normal(size=(3, 7, 40, 40)), g.normal(size=(1, 1, 3, 3))
    runs, longer = bench_runs(["default", INIT, "digits-mlp"], [3]), bench_runs(["default", INIT], [3, 9])
    grey, colour = g.normal(size=(40, 1, 7, 7)), g.normal(size=(10, 3, 4, 4))
    return {
        "covariance": lambda: plots.covariance_map(spd(80), blocks_of(LONG, 20), title=title),
        "covariance of everything": lambda: plots.covariance_map(spd(int(stops[-1])), thin, cells=200, title=title),
        "covariance of groups": lambda: plots.covariance_map(
            spd(80), blocks_of(LONG, 20), groups={n: np.tile(np.arange(5), 4) for n in LONG}, title=title
        ),
        "training curves": lambda: plots.training_curves(every, title=title),
        "stripes": lambda: script("figures/mlp_stripes.py").stripe_ratios(STRIPES, title=title),
        "convergence": lambda: plots.convergence(
            bench_summary(["default", INIT, "default (frozen)"], [1, 2, 4, 8, 15, 16]), title=title
        ),
        "one length": lambda: plots.convergence(bench_summary(["default", INIT], [3]), title=title),
        "paired": lambda: plots.paired_differences(seed_differences(runs), title=title),
        "paired, several lengths": lambda: plots.paired_differences(seed_differences(longer), title=title),
        "grid": lambda: plots.matrix_grid(
            many,
            row_labels=["head 0", "head 1", "default initialisation"],
            column_labels=[f"layer {i}" for i in range(7)],
            title=title,
        ),
        "small grid": lambda: plots.matrix_grid(one, row_labels=["before"], title=title),
        "filters": lambda: plots.filter_page([[plots.Panel(grey), plots.Panel(colour)]], title=title),
    }


GALLERY = gallery()


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Drawing leaves the user's settings unchanged."""
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_every_text_is_large_enough_inside_the_picture_and_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_of(GALLERY[name]())
    texts = drawn_texts(figure, monkeypatch)
    assert any(t.get_text().startswith("A finding that takes") for t in texts)
    small = [t for t in texts if t.get_fontsize() < 8]
    assert not small
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [(t, b) for t, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > width or b.y1 > height]
    assert not outside
    inner = [(t, b.padded(-1.5)) for t, b in boxes]
    overlapping = [(t, u) for i, (t, b) in enumerate(inner) for u, c in inner[i + 1 :] if b.fully_overlaps(c)]
    assert not overlapping


@pytest.mark.slow
@pytest.mark.parametrize("name", ["covariance", "convergence", "paired", "small grid", "filters"])
def test_the_users_settings_do_not_change_the_picture(name: str) -> None:
    def saved() -> bytes:
        buffer = io.BytesIO()
        figure_of(GALLERY[name]()).savefig(buffer, format="png", dpi=theme.DPI, metadata={"Software": None})
        return buffer.getvalue()

    plain, whole = plots.render(figure_of(GALLERY[name]())), saved()
    hostile = {
        "font.size": 30, "axes.facecolor": "black", "xtick.labelsize": 40, "ytick.major.width": 9, "lines.linewidth": 9,
        "axes.grid": True, "image.cmap": "jet", "text.color": "red", "axes.formatter.limits": (0, 0),
        "font.family": "serif",
    }  # fmt: skip
    with matplotlib.rc_context(hostile):
        figure = figure_of(GALLERY[name]())
        assert plots.render(figure) == plain
    # Users call `savefig` themselves, under their settings.
    with matplotlib.rc_context({k: v for k, v in hostile.items() if "tick" in k or k == "font.size"}):
        assert saved() == whole


@pytest.mark.slow
def test_no_pyplot_figure_and_no_backend_are_left_behind(tmp_path: Path) -> None:
    code = """
import numpy as np
import matplotlib
untouched = dict.__getitem__(matplotlib.rcParams, "backend")
from weightscope import plots
ax = plots.training_curves(np.random.default_rng(0).random((5, 4)))
plots.save(ax, "curves.png")
assert dict.__getitem__(matplotlib.rcParams, "backend") is untouched
from matplotlib import pyplot
assert pyplot.get_fignums() == []
"""
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path, env=environment)


def test_given_axes_are_drawn_on_and_keep_their_figure() -> None:
    figure, ((a, b), (c, d)) = plots.subplots(2, 2, title="Four")
    size = tuple(figure.get_size_inches())
    assert plots.covariance_map(spd(8), {"w": slice(0, 8)}, a, title="finding") is a
    assert plots.convergence(bench_summary(["default", "x"], [1, 8]), b, title="finding") is b
    assert plots.training_curves(np.ones((2, 3)), c) is c
    assert plots.root_figure(c)._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"
    assert plots.rank_condition([np.ones(2)], 9, d) is d
    assert a.get_title(loc="left") == b.get_title(loc="left") == "finding"
    assert tuple(figure.get_size_inches()) == size
    assert figure.get_suptitle() == "Four"
    figure.draw_without_rendering()
    legend, title = b.get_legend().get_window_extent(), b.title
    assert title.get_text() == "" or not legend.overlaps(title.get_window_extent())


def test_a_legend_is_said_once_in_a_figure_and_ticks_have_the_same_decimals() -> None:
    figure, ((a, b, c),) = plots.subplots(1, 3)
    for ax in (a, b):
        plots.convergence(bench_summary(["default", "x"], [1, 8]), ax, title="panel")
    plots.convergence(bench_summary(["default", "y"], [1, 8]), c)
    assert [text.get_text() for text in a.get_legend().get_texts()] == ["default", "x"]
    assert b.get_legend() is None
    assert [text.get_text() for text in c.get_legend().get_texts()] == ["default", "y"]
    a.set_ylim(0.21, 0.236)
    figure.draw_without_rendering()
    decimals = {len(label.get_text().partition(".")[2]) for label in a.get_yticklabels()}
    assert decimals == {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_saving_twice_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file in files:
        plots.save(GALLERY["convergence"](), file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
    for stamp in (b"CreationDate", b"dc:date", b"Matplotlib v"):
        assert stamp not in first


def test_other_suffixes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    figure = plots.subplots()[0]
    with pytest.raises(UsageError, match=r"fig\.jpg: expected a file name ending in \.png, \.pdf, \.svg"):
        plots.save(figure, tmp_path / "fig.jpg")
    with pytest.raises(WeightscopeError, match="cannot write"):
        plots.save(figure, tmp_path / "none" / "fig.png")
    assert list(tmp_path.iterdir()) == []
