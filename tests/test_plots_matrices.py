"""Covariance maps, grids of matrices and filters, checked by what is drawn and not by pixels."""

import struct
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from pictures import LONG, spd

from weightscope import plots
from weightscope.errors import DataError, UsageError
from weightscope.plots import covariance, theme


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
    assert f"±{theme.number(norm.vmax)} holds 99 % of the off-diagonal values" in bar.get_ylabel().replace("\n", " ")
    assert [float(t.get_text().replace("−", "-")) for t in bar.get_yticklabels()] == pytest.approx(
        [-norm.vmax, -norm.vmax / 2, 0, norm.vmax / 2, norm.vmax]
    )


def borders_of(ax: Axes) -> list[float]:
    lines = [line for line in ax.lines if line.get_gid() == "border" and line.get_xdata()[0] == 0]
    return sorted(line.get_ydata()[0] for line in lines)


def test_blocks_are_ruled_off_at_their_borders_and_named() -> None:
    blocks = dict(zip(LONG, (slice(0, 20), slice(20, 50), slice(50, 60), slice(60, 100)), strict=True))
    reordered = {name: blocks[name] for name in reversed(LONG)}  # by name, not by order
    ax = plots.covariance_map(spd(100), reordered)
    assert borders_of(ax) == [20, 50, 60]
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        "block 0 mlp.fc1", "block 0 mlp.fc2", "block 1 mlp.fc1", "block 1 mlp.fc2",
    ]  # fmt: skip
    assert "block 0 mlp.fc1 is stages.0.blocks.0.mlp.fc1.weight" in label_of(ax)
    assert list(ax.get_yticks()) == [10, 35, 55, 80]
    assert ax.get_ylim() == (100, 0), "the first row is on top"


def test_as_many_cells_as_coordinates_have_a_pixel_each() -> None:
    """Stripes of period 32 in 1,200 coordinates, averaged over 2 x 2 and as they are."""
    stripes = np.equal.outer(np.arange(1200) % 32, np.arange(1200) % 32) + np.eye(1200)
    blocks = {"fc1": slice(0, 1200)}
    axes = [plots.covariance_map(stripes, blocks, cells=cells) for cells in (600, 1200)]
    for ax, cells in zip(axes, (600, 1200), strict=True):
        assert ax.images[0].get_array().shape == (cells, cells)
    coarse, fine = (ax.get_window_extent().width for ax in axes)
    assert 600 < coarse < 1000, "other pictures have the usual size"
    assert fine == pytest.approx(1200, abs=0.01)
    width = struct.unpack(">I", plots.render(axes[1])[16:20])[0]
    assert width > 1200, "the file has the figure's pixels"


def test_borders_leave_room_for_the_values_between_them() -> None:
    """A line at each of 200 tensors with one coordinate would cover all of their values, and so would their names."""
    blocks = {"w": slice(0, 1000), **{f"blocks.{i}.bias": slice(1000 + i, 1001 + i) for i in range(200)}}
    ax = plots.covariance_map(np.eye(1200), blocks)
    cells = 334 + 200  # 3 x 3 coordinates of `w` are a cell, and each bias is one
    assert 334 in borders_of(ax)
    assert np.diff(borders_of(ax)).min() >= 0.004 * cells
    named = ax.get_yticks()
    assert named[0] == 334 / 2
    assert np.diff(named).min() >= 0.02 * cells
    assert f"small blocks without a label: {201 - len(named)}" in label_of(ax)


def test_the_picture_shows_the_matrix_itself_when_it_fits() -> None:
    matrix = spd(30)
    shown = plots.covariance_map(matrix, {"w": slice(0, 30)}).images[0].get_array()
    np.testing.assert_allclose(shown, matrix)
    masked = plots.covariance_map(matrix, {"w": slice(0, 30)}, diagonal="mask").images[0].get_array()
    np.testing.assert_allclose(masked, matrix - np.diag(np.diagonal(matrix)))


def label_of(ax: Axes) -> str:
    return ax.get_xlabel().replace("\n", " ")


@pytest.mark.parametrize("rows", [512, 4])
@pytest.mark.parametrize("diagonal", ["variances", "others", "all"])
def test_pooling_equals_the_mean_over_each_pair_of_groups(
    diagonal: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covariance, "_ROWS", rows)
    missing, scale = np.isin(np.arange(23), [3, 20, 21, 22]), np.linspace(0.5, 2, 23)
    matrix = spd(23)
    matrix[missing] = matrix[:, missing] = np.nan
    edges, factor = covariance.cell_edges([(0, 8), (8, 9), (9, 23)], 9)
    assert factor == 3
    assert list(edges) == [0, 3, 6, 8, 9, 12, 15, 18, 21, 23], "cells do not cross the borders at 8 and 9"
    labels = np.arange(23) % 7
    for order, ends in (
        (np.arange(23), edges),
        (np.argsort(labels, kind="stable"), np.append(0, np.cumsum(np.bincount(labels)))),
    ):
        found = covariance.pool(matrix, order, ends, missing, diagonal, scale)
        for a, b in np.ndindex(found.shape):
            values = [
                matrix[i, j] / scale[i] / scale[j]
                for i in order[ends[a] : ends[a + 1]]
                for j in order[ends[b] : ends[b + 1]]
                if not (missing[i] or missing[j])
                and (a != b or diagonal == "all" or (i == j) == (diagonal == "variances"))
            ]
            assert found[a, b] == pytest.approx(np.mean(values) if values else np.nan, abs=1e-15, nan_ok=True)


def test_correlations_of_group_means_are_those_of_the_means_whatever_the_scales() -> None:
    """Of a covariance matrix as of a correlation matrix; the colours are those off the diagonal."""
    g = np.random.default_rng(6)
    shared = g.standard_normal((500, 1, 2))
    w = np.concatenate([(shared + g.standard_normal((500, 30, 2))).reshape(500, -1), 100 * -shared[:, 0]], axis=1)
    blocks = {"fc1": slice(0, 60), "bias": slice(60, 62)}
    groups = {"fc1": np.tile(np.arange(2), 30), "bias": np.arange(2)}
    z = w / w.std(axis=0)
    expected = np.corrcoef(np.column_stack([z[:, 0:60:2].mean(1), z[:, 1:60:2].mean(1), z[:, 60:]]).T)
    for matrix in (np.cov(w.T), np.corrcoef(w.T)):
        ax = plots.covariance_map(matrix, blocks, kind="correlation", groups=groups)
        np.testing.assert_allclose(ax.images[0].get_array(), expected, atol=1e-9)
        assert expected[0, 2] < -0.95
    single = plots.covariance_map(np.array([[4, 0.2], [0.2, 1]]), {"b": slice(0, 2)}, groups={"b": np.arange(2)})
    assert single.images[0].norm.vmax == 0.2, "variances do not set the scale"


@pytest.mark.parametrize("diagonal", ["show", "mask"])
def test_groups_are_the_covariance_of_group_means(diagonal: str) -> None:
    """Columns whose entries cancel: different entries are correlated negatively, the mean's variance is positive."""
    g = np.random.default_rng(5)
    n, p, d = 400, 8, 6
    w = g.standard_normal((n, p, d))
    w -= 0.9 * w.mean(axis=1, keepdims=True)
    matrix = np.cov(w.reshape(n, -1).T)
    groups, blocks = {"fc2": np.tile(np.arange(d), p)}, {"fc2": slice(0, p * d)}
    ax = plots.covariance_map(matrix, blocks, groups=groups, diagonal=diagonal)
    cells, norm = np.asarray(ax.images[0].get_array()), ax.images[0].norm
    by_column = matrix.reshape(p, d, p, d)
    different = np.array([by_column[:, j, :, j][~np.eye(p, dtype=bool)].mean() for j in range(d)])
    if diagonal == "show":
        np.testing.assert_allclose(cells, np.cov(w.mean(axis=1).T), atol=1e-12)
        assert np.diagonal(cells).min() > 0 > different.max()
        assert norm.vmax < np.diagonal(cells).min(), "the variances of means do not set the scale"
        assert "covariances of group means" in label_of(ax)
    else:
        np.testing.assert_allclose(np.diagonal(cells), different, atol=1e-12)
        assert "mean covariances of different coordinates" in label_of(ax)
    for wrong, message in (({"fc1": [0]}, "`fc1` is not a block"), ({"fc2": [0]}, "`fc2` has 48 coordinates")):
        with pytest.raises(UsageError, match=message):
            plots.covariance_map(matrix, blocks, groups=wrong)


def test_constant_coordinates_of_a_correlation_are_grey() -> None:
    matrix = np.eye(6)
    matrix[2] = matrix[:, 2] = np.nan
    ax = plots.covariance_map(matrix, {"w": slice(0, 6)}, kind="correlation")
    image = ax.images[0]
    assert np.ma.getmaskarray(image.get_array()).sum() == 11
    assert to_hex(image.cmap.get_bad()) == theme.GREY
    assert "1 constant one is grey" in ax.get_xlabel()


@pytest.mark.parametrize("kind", ["covariance", "correlation"])
def test_what_is_no_matrix_or_not_finite_is_no_picture(kind: Any) -> None:
    for shape in ((3, 4), (0, 0)):
        with pytest.raises(DataError, match=r"expected a square matrix \(D, D\), found"):
            plots.covariance_map(np.zeros(shape), {"w": slice(0, 3)}, kind=kind)
    matrix = np.corrcoef(spd(6))
    matrix[1, 4] = matrix[4, 1] = np.nan
    with pytest.raises(DataError, match="expected finite entries, found others; leave out networks that diverged"):
        plots.covariance_map(matrix, {"w": slice(0, 6)}, kind=kind)


@pytest.mark.parametrize("ends", [[(0, 3)], [(0, 3), (4, 6)], [(0, 4), (3, 6)], [(0, 6, 2)], []])
def test_blocks_must_cover_the_matrix(ends: list[tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="expected them to cover 6 coordinates without overlap, found"):
        plots.covariance_map(np.eye(6), {str(i): slice(*end) for i, end in enumerate(ends)})


def test_diagonal_and_zero_matrices_have_a_scale() -> None:
    blocks = {"w": slice(0, 4), "empty": slice(4, 4), "b": slice(4, 5)}
    assert plots.covariance_map(3 * np.eye(5), blocks).images[0].norm.vmax == 3
    assert plots.covariance_map(np.zeros((5, 5)), blocks).images[0].norm.vmax == 1
    assert plots.covariance_map(np.ones((1, 1)), {"w": slice(0, 1)}).images[0].norm.vmax == 1


def test_short_names_stay_different_and_explain_themselves() -> None:
    assert theme.short_names(["fc1.weight", "fc2.weight"]) == (["fc1", "fc2"], "fc1 is fc1.weight")
    assert theme.short_names(["only.one.weight"]) == (["only.one.weight"], "")
    assert theme.short_names(["a.weight", "a.bias"]) == (["weight", "bias"], "weight is a.weight")
    assert theme.short_names(["a.weight", "b.bias"]) == (["a.weight", "b.bias"], "")
    names = ["stem.0.weight", "stages.0.blocks.0.conv_dw.weight", "center(stages.0.blocks.0.conv_dw.weight)"]
    short, remark = theme.short_names(names)
    assert short == ["stem 0 weight", "stage 0 block 0 conv_dw.weight", "center(stage 0 block 0 conv_dw.weight)"]
    assert remark == ""
    assert theme.short_names(["bn0.weight", "layer1.0.fc.bias"])[0] == ["bn0.weight", "layer1.0 fc.bias"]
    endless = [f"{'x' * 60}{c}{'y' * 60}" for c in "ab"]
    assert theme.short_names(endless)[0] == endless, "what a cut would make equal is not cut"
    assert len(set(theme.short_names([f"{c}{'y' * 60}" for c in "ab"])[0])) == 2


def panels_of(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.images]


def test_a_row_of_the_grid_shares_one_printed_colour_scale() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 20, 20)) * np.array([1, 50])[:, None, None, None]
    figure = plots.matrix_grid(values, row_labels=["a", "b"], column_labels=["0", "1", "2"])
    panels = panels_of(figure)
    assert len(panels) == 6
    printed = [[t.get_text() for t in ax.get_yticklabels()] for ax in figure.axes if not ax.images]
    for i in range(2):
        norms = [panel.images[0].norm for panel in panels[3 * i : 3 * i + 3]]
        ((low, centre, high),) = {(norm.vmin, norm.vcenter, norm.vmax) for norm in norms}
        assert (low, centre) == (-high, 0)
        assert printed[i] == [theme.number(-high), "0", theme.number(high)]
        typical = np.median([np.quantile(np.abs(m), 0.995) for m in values[i]])
        assert typical <= high <= 1.1 * typical
    np.testing.assert_array_equal(panels[4].images[0].get_array(), values[1, 1])


def test_products_of_one_layer_are_in_a_row_in_units_of_their_std() -> None:
    Key = namedtuple("Key", "source layer part head")
    rng, keys = np.random.default_rng(0), [("qk", 0), ("qk", 1), ("vo", None)]
    corners = {Key("m", 3, *key): 10.0**i * rng.standard_normal((8, 8)) for i, key in enumerate(keys)}
    panels = panels_of(plots.product_grid(corners))
    assert [ax.get_title() for ax in panels] == ["QK head 0", "QK head 1", "VO layer"]
    for ax, corner in zip(panels, corners.values(), strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), corner / corner.std())
    corners |= {key._replace(layer=4): corner for key, corner in corners.items()}
    assert len({ax.get_position().y0 for ax in panels_of(plots.product_grid(corners))}) == 3, "several layers: down"


def test_large_matrices_of_a_grid_are_averaged() -> None:
    matrix = np.arange(600.0 * 600).reshape(600, 600)
    figure = plots.matrix_grid(matrix[None, None])
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
