"""Pictures, checked by what is drawn (lines, limits, labels), not by pixels; and that drawing leaves no trace."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

from weightscope import plots
from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.plots import _names, _pool, _style, _text

LONG = [f"stages.0.blocks.{b}.mlp.{fc}.weight" for b in range(2) for fc in ("fc1", "fc2")]
INIT = "mimetic_attention (alpha_qk=0.7, beta_qk=0.7)+sinusoidal_positions"


def spd(size: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((2 * size, size))
    return np.cov(x.T)


def blocks_of(names: list[str], size: int) -> dict[str, slice]:
    return {name: slice(i * size, (i + 1) * size) for i, name in enumerate(names)}


def bench_runs(inits: list[str], lengths: list[int], n: int = 8) -> list[dict[str, Any]]:
    g = np.random.default_rng(1)
    base = g.normal(0.7, 0.01, n)
    return [
        {
            "init": init,
            "epochs": e,
            "seed": k,
            "accuracy": float(base[k] + 0.02 * i + 0.01 * e / 8 + g.normal(0, 0.005)),
        }
        | {"loss": 0.5, "diverged": i == 1 and k == 2}
        for e in lengths
        for i, init in enumerate(inits)
        for k in range(n)
    ]


def bench_summary(inits: list[str], lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for e in lengths:
        for i, init in enumerate(inits):
            mean = 0.7 + 0.02 * i + 0.01 * np.log2(e + 1)
            row = {"init": init, "epochs": e, "n": 8, "mean": mean, "ci95": [mean - 0.008, mean + 0.008]}
            paired = {"difference": 0.02 * i, "difference_ci95": [0.02 * i - 0.005, 0.02 * i + 0.005], "p": 2e-9}
            rows.append(row | (paired if i else {"difference": None, "difference_ci95": None, "p": None}))
    return rows


def score_row(structure: str, difference: float | None, error: float | None, **more: Any) -> dict[str, Any]:
    row = {"group": "a", "structure": structure, "parameters": 12_345, "difference": difference, "difference_se": error}
    return row | {"log_prob": difference, "log_prob_se": error, "chosen": difference == 0, "failed": None} | more


SCORES = [
    score_row("diagonal", -130.0, 5.2),
    score_row("dense", 0.0, 0.0),
    score_row("low_rank(rank=8)", -12.3, 1.5),
    score_row("isotropic", -2411.0, 21.0),
    score_row(
        "kronecker", None, None, failed="the matrix stages.0.blocks.0.mlp.fc1.weight has one row only, so it " * 3
    ),
]
STRIPES = [
    (name, group, ratio * (1 + i / 4), ratio * (1 + i / 4) * 0.9, ratio * (1 + i / 4) * 1.1)
    for i, name in enumerate(LONG)
    for group, ratio in (("column means", 1.5), ("row means", 0.6), ("grand mean", 0.9))
]


def gallery() -> dict[str, Callable[[], Axes | Figure]]:
    """Every kind of picture with what is hard on it: long names, long titles, many rows."""
    g = np.random.default_rng(2)
    title = "A finding that takes more than one line to state, as findings do, when the picture is not very wide at all"
    whole = [f"stages.{s}.blocks.{b}.{p}" for s in (0, 1) for b in range(4)
             for p in ("conv_dw.weight", "conv_dw.bias", "mlp.fc1.weight", "mlp.fc1.bias")]  # fmt: skip
    sizes = [40, 4, 60, 6] * 8
    stops = np.cumsum(sizes)
    thin = {name: slice(int(b - a), int(b)) for name, a, b in zip(whole, sizes, stops, strict=True)}
    every, accuracies = np.abs(g.normal(0, 0.05, (40, 6))).cumsum(axis=1), g.integers(300, 360, 100) / 360
    many, one = g.normal(size=(3, 7, 40, 40)), g.normal(size=(1, 1, 3, 3))
    grey, colour = g.normal(size=(40, 7, 7)), g.normal(size=(10, 3, 4, 4))
    return {
        "covariance": lambda: plots.covariance_map(spd(80), blocks_of(LONG, 20), title=title),
        "covariance of everything": lambda: plots.covariance_map(spd(int(stops[-1])), thin, cells=200, title=title),
        "covariance of groups": lambda: plots.covariance_map(
            spd(80), blocks_of(LONG, 20), groups={n: np.tile(np.arange(5), 4) for n in LONG}, title=title
        ),
        "filter covariance": lambda: plots.filter_covariance(spd(9), 3, title=title),
        "training curves": lambda: plots.training_curves(every, label="train", title=title),
        "accuracies": lambda: plots.accuracy_distribution(accuracies, title=title),
        "stripes": lambda: plots.stripe_ratios(STRIPES, title=title),
        "held out": lambda: plots.heldout_scores(SCORES, title=title),
        "convergence": lambda: plots.convergence(
            bench_summary(["default", INIT, "default (frozen)"], [1, 2, 4, 8, 15, 16]), title=title
        ),
        "one length": lambda: plots.convergence(bench_summary(["default", INIT], [3]), title=title),
        "paired": lambda: plots.paired_differences(bench_runs(["default", INIT, "digits-mlp"], [3]), title=title),
        "paired, several lengths": lambda: plots.paired_differences(bench_runs(["default", INIT], [3, 9]), title=title),
        "grid": lambda: plots.matrix_grid(
            many,
            row_labels=["head 0", "head 1", "default initialisation"],
            column_labels=[f"layer {i}" for i in range(7)],
            clip=32,
            title=title,
        ),
        "small grid": lambda: plots.matrix_grid(one, row_labels=["before"], title=title),
        "filters": lambda: plots.filter_grid(grey, title=title),
        "colour filters": lambda: plots.filter_grid(colour, scale="each", title=title),
    }


GALLERY = gallery()


def figure_of(drawn: Axes | Figure) -> Figure:
    return drawn if isinstance(drawn, Figure) else drawn.figure


def drawn_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """What is really drawn: axes also hold ticks outside of their limits."""
    found: list[Text] = []
    draw = Text.draw

    def record(self: Text, renderer: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            found.append(self)
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", record)
    figure.draw_without_rendering()
    return found


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Whatever a test draws, the user's settings are what they were."""
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before


# All pictures


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


@pytest.mark.parametrize("name", ["covariance", "convergence", "held out", "small grid", "colour filters"])
def test_the_same_picture_whatever_the_user_has_set(name: str) -> None:
    plain = plots.render(figure_of(GALLERY[name]()))
    hostile = {
        "font.size": 30, "axes.facecolor": "black", "xtick.labelsize": 40, "ytick.major.width": 9, "lines.linewidth": 9,
        "axes.grid": True, "image.cmap": "jet", "text.color": "red", "axes.formatter.limits": (0, 0),
        "font.family": "serif",
    }  # fmt: skip
    with matplotlib.rc_context(hostile):
        figure = figure_of(GALLERY[name]())
        assert plots.render(figure) == plain
    # A report knows nothing of matplotlib and calls savefig itself, under the user's settings.
    with matplotlib.rc_context({k: v for k, v in hostile.items() if "tick" in k or k == "font.size"}):
        buffer = io.BytesIO()
        figure_of(GALLERY[name]()).savefig(buffer, format="png", dpi=_style.DPI, metadata={"Software": None})
        assert buffer.getvalue() == plain


def test_no_pyplot_figure_and_no_backend_are_left_behind(tmp_path: Path) -> None:
    code = """
import numpy as np
import matplotlib
untouched = dict.__getitem__(matplotlib.rcParams, "backend")
from weightscope import plots
ax = plots.training_curves(np.random.default_rng(0).random((5, 4)))
plots.save(ax.figure, "curves.png")
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
    assert plots.heldout_scores(SCORES, c) is c
    assert plots.filter_grid(np.eye(3)[None], d) is d
    assert a.get_title(loc="left") == b.get_title(loc="left") == "finding"
    assert tuple(figure.get_size_inches()) == size
    assert figure.get_suptitle() == "Four"
    figure.draw_without_rendering()
    legend, title = b.get_legend().get_window_extent(), b.title
    assert title.get_text() == "" or not legend.overlaps(title.get_window_extent())
    with pytest.raises(UsageError, match="expected matplotlib Axes or None, found Figure"):
        plots.filter_grid(np.eye(3)[None], figure)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1 row"):
        plots.subplots(0)


# Files


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_saving_twice_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file in files:
        plots.save(GALLERY["convergence"]().figure, file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
    for stamp in (b"CreationDate", b"dc:date", b"Matplotlib v"):
        assert stamp not in first


def test_other_suffixes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    figure = plots.subplots()[0]
    with pytest.raises(UsageError, match=r"fig\.jpg: a figure's name must end in \.png, \.pdf, \.svg"):
        plots.save(figure, tmp_path / "fig.jpg")
    with pytest.raises(UsageError, match="written as png, pdf, svg, found 'gif'"):
        plots.render(figure, "gif")
    with pytest.raises(WeightscopeError, match="cannot write"):
        plots.save(figure, tmp_path / "none" / "fig.png")
    assert list(tmp_path.iterdir()) == []


# Covariance


def test_colours_are_symmetric_about_zero_and_the_limit_is_printed() -> None:
    matrix = spd(40)
    ax = plots.covariance_map(matrix, {"a": slice(0, 25), "b": slice(25, 40)})
    norm = ax.images[0].norm
    assert norm.vcenter == 0
    assert norm.vmin == -norm.vmax
    beside = np.abs(matrix[~np.eye(40, dtype=bool)])
    assert np.quantile(beside, 0.99) <= norm.vmax <= 1.1 * np.quantile(beside, 0.99)
    assert norm.vmax < np.diagonal(matrix).min(), "the diagonal does not set the scale"
    bar = ax.child_axes[0]
    assert f"±{_text.number(norm.vmax)} holds 99 % of the values beside the diagonal" in bar.get_ylabel().replace(
        "\n", " "
    )
    assert [float(t.get_text().replace("−", "-")) for t in bar.get_yticklabels()] == pytest.approx(
        [-norm.vmax, -norm.vmax / 2, 0, norm.vmax / 2, norm.vmax]
    )


def test_blocks_are_ruled_off_at_their_borders_and_named() -> None:
    blocks = dict(zip(LONG, (slice(0, 20), slice(20, 50), slice(50, 60), slice(60, 100)), strict=True))
    reordered = {name: blocks[name] for name in reversed(LONG)}  # by name, not by order
    ax = plots.covariance_map(spd(100), reordered)
    borders = [line for line in ax.lines if line.get_gid() == "border"]
    assert sorted(line.get_ydata()[0] for line in borders if line.get_xdata()[0] == 0) == [20, 50, 60]
    assert len(borders) == 6
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2",
    ]  # fmt: skip
    assert "blocks.0.mlp.fc1 is stages.0.blocks.0.mlp.fc1.weight" in ax.get_xlabel().replace("\n", " ")
    assert list(ax.get_yticks()) == [10, 35, 55, 80]
    assert ax.get_ylim() == (100, 0), "the first row is on top"


def test_the_picture_shows_the_matrix_itself_when_it_fits() -> None:
    matrix = spd(30)
    shown = plots.covariance_map(matrix, {"w": slice(0, 30)}).images[0].get_array()
    np.testing.assert_allclose(shown, matrix)
    masked = plots.covariance_map(matrix, {"w": slice(0, 30)}, diagonal="mask").images[0].get_array()
    np.testing.assert_allclose(masked, matrix - np.diag(np.diagonal(matrix)))


def naive_pool(matrix: np.ndarray, edges: np.ndarray, missing: np.ndarray, *, diagonal: bool) -> np.ndarray:
    out = np.full((len(edges) - 1,) * 2, np.nan)
    for a in range(len(out)):
        for b in range(len(out)):
            values = [
                matrix[i, j]
                for i in range(edges[a], edges[a + 1])
                for j in range(edges[b], edges[b + 1])
                if not missing[i] and not missing[j] and (a != b or (i == j) == diagonal)
            ]
            out[a, b] = np.mean(values) if values else np.nan
    return out


@pytest.mark.parametrize("diagonal", [True, False])
def test_pooling_equals_the_mean_over_each_cell(diagonal: bool) -> None:
    matrix = spd(23)
    missing = np.zeros(23, dtype=bool)
    missing[[3, 20, 21, 22]] = True
    matrix[missing] = matrix[:, missing] = np.nan
    edges, factor = _pool.cell_edges([(0, 8), (8, 9), (9, 23)], 9)
    assert factor == 3
    assert list(edges) == [0, 3, 6, 8, 9, 12, 15, 18, 21, 23], "cells do not cross the borders at 8 and 9"
    pooled = _pool.pool(matrix, edges, factor, missing, diagonal=diagonal)
    np.testing.assert_allclose(pooled.cells, naive_pool(matrix, edges, missing, diagonal=diagonal), atol=1e-15)


def test_a_large_matrix_is_pooled_and_the_picture_says_so() -> None:
    ax = plots.covariance_map(spd(90).astype(np.float32), {"a": slice(0, 41), "b": slice(41, 90)}, cells=30)
    assert ax.images[0].get_array().shape <= (30, 30)
    assert "each cell is a mean over 4 × 4" in ax.get_xlabel()
    border = next(line.get_ydata()[0] for line in ax.lines if line.get_gid() == "border" and line.get_xdata()[0] == 0)
    assert border == 41


def test_pooling_by_the_mean_keeps_stripes_above_noise_and_adds_none() -> None:
    """The mean of f x f entries is a covariance of means: unbiased, whereas the largest entry grows with f."""
    noise = np.cov(np.random.default_rng(0).standard_normal((500, 240)).T)
    edges, factor = _pool.cell_edges([(0, 240)], 40)
    cells = _pool.pool(noise, edges, factor, np.zeros(240, dtype=bool), diagonal=False)
    assert np.abs(cells.off_diagonal).max() < np.abs(noise[~np.eye(240, dtype=bool)]).max() / 3
    assert abs(cells.off_diagonal.mean()) < 1e-3


def test_groups_make_stripes_visible_that_single_covariances_hide() -> None:
    """W1 = noise + one random mean per column (MLP paper, Eq. 1): pairs within a column are positive, others not."""
    g = np.random.default_rng(3)
    n, p, d = 150, 24, 10
    w = g.standard_normal((n, p, d)) + 0.2 * g.standard_normal((n, 1, d))
    matrix = np.corrcoef(w.reshape(n, -1).T)
    ax = plots.covariance_map(
        matrix, {"w1": slice(0, p * d)}, kind="correlation", groups={"w1": np.tile(np.arange(d), p)}
    )
    cells = np.asarray(ax.images[0].get_array())
    assert cells.shape == (d, d)
    diagonal, others = np.diagonal(cells), cells[~np.eye(d, dtype=bool)]
    assert diagonal.min() > 3 * others.std()
    column = matrix.reshape(p, d, p, d)[:, 4, :, 4]
    assert diagonal[4] == pytest.approx(column[~np.eye(p, dtype=bool)].mean())
    assert "240 coordinates in 10 groups" in ax.get_xlabel().replace("\n", " ")
    with pytest.raises(UsageError, match="`w2` is no block"):
        plots.covariance_map(matrix, {"w1": slice(0, p * d)}, groups={"w2": [0]})
    with pytest.raises(UsageError, match="`w1` has 240 coordinates"):
        plots.covariance_map(matrix, {"w1": slice(0, p * d)}, groups={"w1": [0]})


def test_constant_coordinates_of_a_correlation_are_grey() -> None:
    matrix = np.eye(6)
    matrix[2] = matrix[:, 2] = np.nan
    ax = plots.covariance_map(matrix, {"w": slice(0, 6)}, kind="correlation")
    image = ax.images[0]
    assert np.ma.getmaskarray(image.get_array()).sum() == 11
    assert to_hex(image.cmap.get_bad()) == _style.GREY
    assert "1 constant ones are grey" in ax.get_xlabel()


def broken(change: Callable[[np.ndarray], None]) -> np.ndarray:
    matrix = np.corrcoef(spd(6))
    change(matrix)
    return matrix


def put(value: float, *at: tuple[int, int]) -> Callable[[np.ndarray], None]:
    def change(matrix: np.ndarray) -> None:
        for index in at:
            matrix[index] = value

    return change


@pytest.mark.parametrize(
    ("matrix", "kind", "message"),
    [
        (np.zeros((3, 4)), "covariance", r"expected a square matrix \(D, D\), found \(3, 4\)"),
        (np.zeros((0, 0)), "covariance", "expected a square matrix"),
        (broken(put(np.nan, (1, 4), (4, 1))), "covariance", r"entry \(1, 4\) is nan"),
        (broken(put(np.nan, (1, 4), (4, 1))), "correlation", r"entry \(1, 4\) is nan"),
        (broken(put(np.inf, (2, 2))), "covariance", r"entry \(2, 2\) is inf"),
        (broken(put(np.nan, (2, 2))), "covariance", r"entry \(2, 2\) is nan"),
        (broken(put(5.0, (0, 5))), "covariance", "expected a symmetric matrix"),
        (broken(put(-1.0, (2, 2))), "covariance", "expected variances on the diagonal"),
        (2 * np.eye(6), "correlation", "expected ones on the diagonal, found 2; is it a covariance"),
        (np.full((6, 6), np.nan), "correlation", "every coordinate is constant"),
    ],
)
def test_a_wrong_matrix_is_no_picture(matrix: np.ndarray, kind: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        plots.covariance_map(matrix, {"w": slice(0, len(matrix))}, kind=kind)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"a": slice(0, 3)}, "expected to cover 6 coordinates, found 3"),
        ({"a": slice(0, 3), "b": slice(4, 6)}, "expected `b` to begin at coordinate 3"),
        ({"a": slice(0, 4), "b": slice(3, 6)}, "expected `b` to begin at coordinate 4"),
        ({"a": slice(0, 6, 2)}, "expected `a` to begin"),
        ({}, "expected to cover 6 coordinates, found 0"),
    ],
)
def test_blocks_must_cover_the_matrix(blocks: dict[str, slice], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plots.covariance_map(np.eye(6), blocks)


def test_diagonal_and_zero_matrices_have_a_scale() -> None:
    blocks = {"w": slice(0, 4), "empty": slice(4, 4), "b": slice(4, 5)}
    assert plots.covariance_map(3 * np.eye(5), blocks).images[0].norm.vmax == 3
    assert plots.covariance_map(np.zeros((5, 5)), blocks).images[0].norm.vmax == 1
    assert plots.covariance_map(np.ones((1, 1)), {"w": slice(0, 1)}).images[0].norm.vmax == 1


def test_the_block_form_shows_each_pixel_with_all_others() -> None:
    k = 3
    matrix = spd(k * k)
    blocks = plots.block_form(matrix, k)
    for i, j, row, column in np.ndindex(k, k, k, k):
        assert blocks[i * k + row, j * k + column] == matrix[k * i + j, k * row + column]
    np.testing.assert_array_equal(plots.block_form(blocks, k), matrix)
    np.testing.assert_array_equal(plots.block_form(np.stack([matrix, 2 * matrix]), k)[1], 2 * blocks)
    ax = plots.filter_covariance(matrix, k)
    np.testing.assert_allclose(ax.images[0].get_array(), blocks)
    borders = [line for line in ax.lines if line.get_gid() == "border"]
    assert sorted(line.get_ydata()[0] for line in borders if line.get_xdata()[0] == 0) == [3, 6]
    with pytest.raises(DataError, match=r"9, 9\) for k = 3, found \(8, 8\)"):
        plots.filter_covariance(spd(8), 3)


# Names


def test_short_names_stay_different_and_explain_themselves() -> None:
    assert _names.short_names(["fc1.weight", "fc2.weight"]) == (["fc1", "fc2"], "fc1 is fc1.weight")
    assert _names.short_names(["only.one.weight"]) == (["only.one.weight"], "")
    assert _names.short_names(["a.weight", "a.bias"]) == (["weight", "bias"], "weight is a.weight")
    assert _names.short_names(["a.weight", "b.bias"]) == (["a.weight", "b.bias"], "")
    names = ["stem.0.weight", "stages.0.blocks.0.conv_dw.weight", "center(stages.0.blocks.0.conv_dw.weight)"]
    short, remark = _names.short_names(names)
    assert short == ["ste0.weight", "sta0.b0.conv_dw.weight", "center(sta0.b0.conv_dw.weight)"]
    assert remark == "b = blocks, sta = stages, ste = stem"
    endless = [f"{'x' * 60}{c}{'y' * 60}" for c in "ab"]
    assert _names.short_names(endless)[0] == endless, "what a cut would make equal is not cut"
    assert len(set(_names.short_names([f"{c}{'y' * 60}" for c in "ab"])[0])) == 2


def test_neighbours_merge_until_labels_fit() -> None:
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("w", "b")]
    assert _names.merged(names, 6) == [(name, i, i + 1) for i, name in enumerate(names)]
    assert _names.merged(names, 3) == [(f"layers.{i} (2)", 2 * i, 2 * i + 2) for i in range(3)]
    assert _names.merged(names, 1) == [("layers (6)", 0, 6)]


def test_labels_are_moved_apart_and_no_further_than_needed() -> None:
    assert _style.spread([1, 5, 9], 2, 0, 10) == [1, 5, 9]
    assert _style.spread([5, 5, 5], 2, 0, 10) == pytest.approx([3, 5, 7])
    assert _style.spread([0, 0, 9.5], 2, 0, 10) == pytest.approx([0, 2, 9.5])
    assert _style.spread([9, 10], 4, 0, 10) == pytest.approx([6, 10])
    assert _style.spread([1, 2, 3], 6, 0, 10) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00123, "0.00123"), (-1.5, "−1.5"), (12345.0, "12,345"), (1.2e-7, "1.2×10⁻⁷"), (2e9, "2×10⁹")],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert _text.number(value) == text


def test_a_rounded_limit_is_never_smaller() -> None:
    for value in 10 ** np.random.default_rng(0).uniform(-9, 9, 500):
        assert value <= _text.rounded_up(value) * (1 + 1e-9) <= value * 1.11


# Training


def test_training_curves_are_medians_with_bands() -> None:
    values = np.random.default_rng(0).random((50, 7))
    values[3, 2] = np.nan
    ax = plots.training_curves(values, label="train", band=(0.1, 0.9))
    assert plots.training_curves(values[:, :5], ax, "test") is ax
    kept = np.delete(values, 3, axis=0)
    first, second = (line for line in ax.lines if line.get_gid() == "curve")
    np.testing.assert_allclose(first.get_ydata(), np.median(kept, axis=0))
    np.testing.assert_array_equal(first.get_xdata(), np.arange(1, 8))
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(np.quantile(kept, 0.9, axis=0).max())
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "train: median of 49, 10 to 90 % shaded, 1 diverged",
        "test: median of 49, 5 to 95 % shaded, 1 diverged",
    ]
    assert ax.get_ylabel() == "accuracy (%)"
    assert ax.get_xlim()[0] < 1
    assert ax.get_xlim()[1] > 7


def test_one_network_and_one_epoch_are_drawn_without_a_band() -> None:
    ax = plots.training_curves(np.array([[2.5]]), quantity="loss")
    assert not ax.collections
    assert ax.lines[0].get_marker() == "o"
    assert ax.get_ylabel() == "loss"


def test_accuracies_are_counted_in_whole_steps_of_the_test_set() -> None:
    counts = np.random.default_rng(0).binomial(360, 0.96, 300)
    accuracies = np.append(counts / 360, [np.nan, np.nan])
    ax = plots.accuracy_distribution(accuracies)
    edges = np.array([p.get_x() for p in ax.containers[0]])
    steps = np.diff(edges) * 360
    np.testing.assert_allclose(steps, np.round(steps[0]), atol=1e-4)
    np.testing.assert_allclose(edges * 360 % 1, 0.5, atol=1e-4, err_msg="borders lie between accuracies")
    assert sum(p.get_height() for p in ax.containers[0]) == 300
    median = next(line for line in ax.lines if line.get_gid() == "median")
    assert median.get_xdata()[0] == np.median(counts / 360)
    assert ax.get_legend().get_title().get_text() == "300 networks, 2 diverged and left out"


def test_equal_accuracies_are_one_bar() -> None:
    ax = plots.accuracy_distribution([0.5, 0.5, 0.5])
    assert [p.get_height() for p in ax.containers[0]] == [3]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.training_curves(np.full((3, 2), np.nan)), "none of 3 networks is finite"),
        (lambda: plots.training_curves(np.zeros(3)), r"expected \(networks, epochs\)"),
        (lambda: plots.training_curves(np.full((3, 2), 97.0)), "expected fractions between 0 and 1, found 97"),
        (lambda: plots.accuracy_distribution([np.nan]), "none of 1 is finite"),
        (lambda: plots.accuracy_distribution([98.2]), "expected fractions"),
        (lambda: plots.accuracy_distribution(np.zeros((2, 2))), r"expected \(networks,\)"),
    ],
)
def test_what_are_no_accuracies_is_refused(draw: Callable[[], Axes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw()


# Evidence


def bars_of(ax: Axes) -> list[ErrorbarContainer]:
    return [c for c in ax.containers if isinstance(c, ErrorbarContainer)]


def ends_of(bar: ErrorbarContainer) -> list[tuple[float, float]]:
    return [(path.vertices[0, 0], path.vertices[-1, 0]) for path in bar.lines[2][0].get_paths()]


def test_the_forest_of_stripe_ratios_has_intervals_and_the_reference() -> None:
    ax = plots.stripe_ratios(STRIPES)
    assert ax.get_xscale() == "log"
    assert next(line for line in ax.lines if line.get_gid() == "reference").get_xdata()[0] == 1
    bars = {bar.get_label(): bar for bar in bars_of(ax)}
    assert list(bars) == ["column means", "row means", "grand mean"]
    for group, bar in bars.items():
        rows = [row for row in STRIPES if row[1] == group]
        np.testing.assert_allclose(bar.lines[0].get_xdata(), [row[2] for row in rows])
        np.testing.assert_allclose(ends_of(bar), [row[3:] for row in rows])
    assert len({to_hex(bar.lines[0].get_color()) for bar in bars.values()}) == 3
    assert len({bar.lines[0].get_marker() for bar in bars.values()}) == 3
    assert [t.get_text() for t in ax.get_legend().get_texts()] == list(bars)
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"blocks.{b}.mlp.fc{f}" for b in (0, 1) for f in (1, 2)]
    assert 1.0 in ax.get_xticks()
    assert "1.50 (1.35–1.65)" in [t.get_text() for t in ax.texts]


def test_a_ratio_of_zero_is_an_arrow_at_the_edge() -> None:
    ax = plots.stripe_ratios([("w", "rows", 0.0, 0.0, 0.0), ("w", "columns", 80.0, 60.0, 100.0)])
    arrow = next(line for line in ax.lines if line.get_gid() == "zero")
    assert arrow.get_xdata()[0] == pytest.approx(ax.get_xlim()[0])
    assert "0 exactly" in [t.get_text() for t in ax.texts]
    assert ax.get_xlim()[1] > 100


@pytest.mark.parametrize("row", [(np.nan, 1, 2), (1, 2, 3), (-1, -2, 1), (1, 0.5, np.inf)])
def test_ratios_outside_their_interval_are_refused(row: tuple[float, float, float]) -> None:
    with pytest.raises(DataError, match="`w`, columns: expected 0 <= low <= ratio <= high"):
        plots.stripe_ratios([("w", "columns", *row)])


def test_stripes_need_rows_that_differ() -> None:
    for rows in ([], [STRIPES[0], STRIPES[0]]):
        with pytest.raises(UsageError, match="expected rows that differ"):
            plots.stripe_ratios(rows)


def test_ratio_ticks_are_round_and_include_one() -> None:
    for low, high in ((0.9, 1.1), (0.4, 2), (0.01, 3), (0.5, 1e5), (1e-4, 1e4)):
        ticks = plots.evidence._ratio_ticks(low, high)
        assert 1.0 in ticks
        assert len(ticks) <= 9
        assert ticks == sorted(ticks)


def test_held_out_scores_are_ordered_with_their_errors_and_failures() -> None:
    ax = plots.heldout_scores(SCORES)
    names = ["dense", "low_rank(rank=8)", "diagonal", "isotropic", "kronecker"]
    assert [t.get_text() for t in ax.get_yticklabels()] == names
    points = [bar.lines[0].get_xdata()[0] for bar in bars_of(ax)]
    assert points == [0, -12.3, -130, -2411]
    assert ends_of(bars_of(ax)[1]) == [pytest.approx((-13.8, -10.8))]
    texts = [t.get_text() for t in ax.texts]
    assert "best" in texts
    assert "−12.3 ± 1.5" in texts
    assert "12,345" in texts
    failed = next(t for t in ax.texts if t.get_gid() == "failed")
    assert failed.get_text().startswith("not fitted: the matrix")
    assert ax.get_xscale() == "symlog"
    assert "logarithmic beyond ±10" in ax.get_xlabel()
    near = plots.heldout_scores([score_row("a", 0.0, 0.0), score_row("b", -3.0, 1.0)])
    assert near.get_xscale() == "linear"


def test_the_sum_over_groups_is_drawn_unless_one_is_named() -> None:
    table = [score_row("dense", 0.0, 0.0, group=g) for g in ("a", "b")] + [score_row("sum", 0.0, 0.0, group="(all)")]
    assert [t.get_text() for t in plots.heldout_scores(table).get_yticklabels()] == ["sum"]
    assert [t.get_text() for t in plots.heldout_scores(table, group="b").get_yticklabels()] == ["dense"]
    with pytest.raises(UsageError, match="expected group to be one of a, b, found None"):
        plots.heldout_scores(table[:2])
    with pytest.raises(UsageError, match="found c"):
        plots.heldout_scores(table, group="c")
    with pytest.raises(UsageError, match="table is empty"):
        plots.heldout_scores([])
    with pytest.raises(DataError, match=r"`dense`: nan ± 1\.0 is no result"):
        plots.heldout_scores([score_row("dense", np.nan, 1.0)])


# Benchmarks


def test_convergence_has_one_look_for_each_initialiser_and_ticks_where_it_ran() -> None:
    inits = ["default", INIT, "artifact", "default (frozen)", "artifact (frozen)"]
    lengths = [1, 2, 4, 8, 16]
    ax = plots.convergence(bench_summary(inits, lengths))
    bars = {bar.get_label(): bar for bar in bars_of(ax)}
    assert list(bars) == inits
    lines = {name: bar.lines[0] for name, bar in bars.items()}
    np.testing.assert_allclose(lines["default"].get_ydata(), [0.7 + 0.01 * np.log2(e + 1) for e in lengths])
    looks = {(to_hex(line.get_color()), line.get_marker(), line.get_markerfacecolor()) for line in lines.values()}
    assert len(looks) == 5
    assert len({lines[name].get_marker() for name in inits[:3]}) == 3
    assert len({str(lines[name]._dash_pattern) for name in inits[:3]}) == 3
    assert lines["default"].get_color() == lines["default (frozen)"].get_color()
    assert lines["default (frozen)"].get_markerfacecolor() == "white"
    assert list(ax.get_xticks()) == lengths
    assert ax.get_xscale() == "log"
    intervals = [path.vertices[:, 1] for path in bars["default"].lines[2][0].get_paths()]
    np.testing.assert_allclose([v.max() - v.min() for v in intervals], 0.016)
    assert [t.get_text().replace("\n", " ") for t in ax.get_legend().get_texts()] == inits
    assert ax.get_legend().get_title().get_text() == "mean of 8 seeds with 95 % CI"
    assert plots.convergence(bench_summary(inits, [2, 3])).get_xscale() == "linear"


def test_a_single_length_is_drawn_as_rows_with_differences() -> None:
    ax = plots.convergence(bench_summary(["default", "artifact"], [3]))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["default", "artifact"]
    assert [bar.lines[0].get_xdata()[0] for bar in bars_of(ax)] == pytest.approx([0.72, 0.74])
    assert ends_of(bars_of(ax)[0]) == [pytest.approx((0.712, 0.728))]
    reference = [line for line in ax.lines if line.get_gid() == "reference"]
    assert [line.get_xdata()[0] for line in reference] == pytest.approx([0.72])
    texts = [t.get_text() for t in ax.texts]
    assert "reference" in texts
    assert "+2.0, p = 2×10⁻⁹" in texts
    assert "after 3 epochs; mean of 8 seeds with 95 % CI" in ax.get_xlabel()


def test_the_adjusted_p_value_is_preferred() -> None:
    rows = bench_summary(["default", "artifact"], [3])
    rows[1]["p_holm"] = 0.25
    assert "+2.0, p = 0.25" in [t.get_text() for t in plots.convergence(rows).texts]


@pytest.mark.parametrize("lengths", [[3], [3, 6]])
@pytest.mark.parametrize("ends", [None, [-np.inf, np.inf], [None, None]])
def test_one_seed_is_a_point_without_an_interval(lengths: list[int], ends: Any) -> None:
    rows = [row | {"n": 1, "ci95": ends} for row in bench_summary(["default"], lengths)]
    ax = plots.convergence(rows)
    for path in bars_of(ax)[0].lines[2][0].get_paths():
        assert np.ptp(path.vertices) >= 0
        assert np.ptp(path.vertices[:, 1 if len(lengths) > 1 else 0]) == 0
    text = ax.get_xlabel() if len(lengths) == 1 else ax.get_legend().get_title().get_text()
    assert "1 seed, so no interval" in text


def test_summaries_that_make_no_sense_are_refused() -> None:
    rows = bench_summary(["default"], [3])
    for bad in ([], rows + rows):
        with pytest.raises(UsageError, match="expected rows that differ"):
            plots.convergence(bad)
    with pytest.raises(DataError, match="after 3 epochs: expected a fraction between 0 and 1 as mean"):
        plots.convergence([rows[0] | {"mean": 97.0}])


def test_paired_differences_are_paired_by_seed() -> None:
    runs = bench_runs(["default", "artifact", "default (frozen)", "artifact (frozen)"], [3])
    np.random.default_rng(0).shuffle(runs[8:16])
    ax = plots.paired_differences(runs)
    accuracy = {(r["init"], r["seed"]): r["accuracy"] for r in runs}
    for name, reference, bar in zip(
        ("artifact", "artifact (frozen)"), ("default", "default (frozen)"), bars_of(ax), strict=True
    ):
        values = np.array([100 * (accuracy[name, k] - accuracy[reference, k]) for k in range(8)])
        assert bar.lines[0].get_xdata()[0] == pytest.approx(values.mean())
        interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert ends_of(bar) == [pytest.approx(tuple(interval))]
    seeds = [line for line in ax.lines if line.get_gid() in ("seeds", "diverged")]
    drawn = np.sort(np.concatenate([line.get_xdata() for line in seeds[:2]]))
    expected = np.sort([100 * (accuracy["artifact", k] - accuracy["default", k]) for k in range(8)])
    np.testing.assert_allclose(drawn, expected)
    assert [len(line.get_xdata()) for line in seeds if line.get_gid() == "diverged"] == [1]
    assert "× diverged" in ax.get_xlabel()
    assert "default or default (frozen)" in ax.get_xlabel().replace("\n", " ")
    assert "8 of 8" in [t.get_text() for t in ax.texts]


def test_lengths_have_headings_and_missing_seeds_are_left_out() -> None:
    runs = [r for r in bench_runs(["default", "artifact"], [9, 3]) if not (r["init"] == "artifact" and r["seed"] > 4)]
    ax = plots.paired_differences(runs)
    texts = [t.get_text() for t in ax.texts]
    assert texts.index("3 epochs") < texts.index("9 epochs")
    assert "5 of 5" in texts
    with pytest.raises(UsageError, match="expected a second initialiser"):
        plots.paired_differences([r for r in runs if r["init"] == "default"])
    with pytest.raises(DataError, match="not finite"):
        plots.paired_differences([r | {"accuracy": np.nan} for r in runs])


# Grids


def panels_of(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.images and ax.images[0].get_array().shape[0] > 1]


def test_a_row_of_the_grid_shares_one_printed_colour_scale() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 20, 20)) * np.array([1, 50])[:, None, None, None]
    figure = plots.matrix_grid(values, row_labels=["a", "b"], column_labels=["0", "1", "2"], clip=16)
    panels = panels_of(figure)
    assert len(panels) == 6
    printed = [t.get_text() for t in figure.texts if t.get_gid() == "limit"]
    for i in range(2):
        norms = {
            (p.images[0].norm.vmin, p.images[0].norm.vcenter, p.images[0].norm.vmax) for p in panels[3 * i : 3 * i + 3]
        }
        ((low, centre, high),) = norms
        assert (low, centre) == (-high, 0)
        assert printed[i] == f"±{_text.number(high)}"
        typical = np.median([np.quantile(np.abs(m[:16, :16]), 0.995) for m in values[i]])
        assert typical <= high <= 1.1 * typical
    np.testing.assert_array_equal(panels[4].images[0].get_array(), values[1, 1, :16, :16])
    together = plots.matrix_grid(values, share="all")
    assert len({p.images[0].norm.vmax for p in panels_of(together)}) == 1
    texts = " ".join(t.get_text() for t in figure.texts).replace("\n", " ")
    assert "upper left 16 × 16 of 20 × 20" in texts


def test_every_entry_of_a_grid_is_a_whole_number_of_pixels() -> None:
    figure = plots.matrix_grid(np.zeros((2, 5, 32, 24)))
    figure.draw_without_rendering()
    for panel in panels_of(figure):
        box = panel.get_window_extent()
        for pixels, entries in ((box.height, 32), (box.width, 24)):
            assert pixels / entries == pytest.approx(round(pixels / entries))
            assert pixels >= entries


def test_large_matrices_of_a_grid_are_averaged() -> None:
    matrix = np.arange(600.0 * 600).reshape(600, 600)
    figure = plots.matrix_grid(matrix[None, None], clip=None)
    shown = panels_of(figure)[0].images[0].get_array()
    assert shown.shape == (200, 200)
    assert shown[1, 2] == pytest.approx(matrix[3:6, 6:9].mean())
    assert "cells are means over 3 × 3" in " ".join(t.get_text() for t in figure.texts).replace("\n", " ")


def test_missing_and_broken_matrices_of_a_grid() -> None:
    good, bad = np.eye(4), np.full((4, 4), np.nan)
    figure = plots.matrix_grid([[good, None], [bad, 3 * good]])
    assert len(panels_of(figure)) == 2
    assert [t.get_text() for ax in figure.axes for t in ax.texts] == ["not\nfinite"]
    for matrices in ([[None]], [[np.eye(3), np.eye(4)]], np.zeros((2, 2, 3)), [[good], [good, good]]):
        with pytest.raises(DataError, match=r"expected \(R, C, m, n\)"):
            plots.matrix_grid(matrices)
    with pytest.raises(UsageError, match="row_labels: expected 2 or none, found 1"):
        plots.matrix_grid(np.zeros((2, 2, 3, 3)), row_labels=["a"])
    with pytest.raises(UsageError, match="clip"):
        plots.matrix_grid(np.zeros((2, 2, 3, 3)), clip=0)


def test_filters_lie_side_by_side_with_gaps() -> None:
    filters = np.random.default_rng(0).normal(size=(7, 3, 4))
    ax = plots.filter_grid(filters, columns=3)
    mosaic = ax.images[0].get_array()
    assert mosaic.shape == (3 * 4 - 1, 3 * 5 - 1)
    np.testing.assert_array_equal(mosaic[4:7, 5:9], filters[4])
    assert np.ma.getmaskarray(mosaic)[3].all()
    norm = ax.images[0].norm
    assert norm.vmin == -norm.vmax
    assert norm.vmax >= np.abs(filters).max()
    each = plots.filter_grid(filters, columns=3, scale="each").images[0].get_array()
    assert np.abs(each[4:7, 5:9]).max() == pytest.approx(1)


def test_colour_filters_show_zero_as_grey() -> None:
    filters = np.zeros((2, 3, 2, 2))
    filters[1, 0] = 1.0
    image = plots.filter_grid(filters, columns=2).images[0].get_array()
    np.testing.assert_allclose(image[:2, :2], 0.5)
    np.testing.assert_allclose(image[0, 3], [1.0, 0.5, 0.5])
    for wrong in (np.zeros((2, 2)), np.zeros((2, 2, 2, 2)), np.zeros((0, 2, 2))):
        with pytest.raises(DataError, match="expected"):
            plots.filter_grid(wrong)
    filters[1, 1, 0, 0] = np.nan
    with pytest.raises(DataError, match="filter 1 is not finite"):
        plots.filter_grid(filters)
