"""Covariances within one network: against naive versions, over families, sources, damaged weights and the command."""

import json
import math
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import references_within as naive
import torch
from programs import run, script
from safetensors.torch import save_file

from weightscope import Checkpoint, plots
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.analysis.within_network import covariance_within, skeleton
from weightscope.anatomy import depthwise, mlps, patch_embeddings
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.fits.filters import filter_distributions
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.recipe import Recipe
from weightscope.statistics import slices
from weightscope.statistics.filters import relative_depths
from weightscope.statistics.slices import centre_focus, slice_moments
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

TIGHT = {"rtol": 1e-10, "atol": 1e-14}
FILTERS = ("ours-convmixer", "ours-convnext", "timm-efficientnet", "hf-mamba")
MATRICES = ("ours-convnext", "timm-vit", "timm-vit-swiglu", "hf-gpt2", "hf-llama")
PATCHES = ("ours-vit", "ours-convmixer", "timm-convnext", "hf-vit")


def convmixer(seed: int = 0, depth: int = 3) -> torch.nn.Module:
    return families.scramble(ConvMixer(12, depth, 5, 4, 5), seed)


def agree(layer: Any, samples: np.ndarray) -> None:
    """A layer's moments and focus equal those of the naive versions."""
    mean, covariance, values = naive.moments(samples)
    found = layer.moments
    np.testing.assert_allclose(found.mean, mean, **TIGHT)
    np.testing.assert_allclose(found.variance, np.diagonal(covariance), **TIGHT)
    np.testing.assert_allclose(found.covariance, covariance, **TIGHT)
    rank = min(samples.shape)
    np.testing.assert_allclose(found.eigenvalues, values[:rank], rtol=1e-10, atol=1e-12 * values[0])
    assert found.squared == pytest.approx((values**2).sum(), rel=1e-10)
    assert found.mean.dtype == found.covariance.dtype == np.float64
    if layer.focus is not None:
        for key, value in naive.focus(samples, *layer.shape).items():
            assert layer.statistics[key] == pytest.approx(value, rel=1e-10, abs=1e-13), key
        wanted = naive.correlations(samples, *layer.shape)
        assert (layer.focus.neighbours, layer.focus.from_centre) == pytest.approx(wanted, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("family", FILTERS)
def test_filters_of_every_family_equal_numpy(family):
    model = families.FAMILIES[family].build()
    found = covariance_within(model)
    parts = depthwise(model)
    assert len(found.layers) == len(parts) == families.FAMILIES[family].parts["depthwise"]
    for layer, part in zip(found.layers, parts, strict=True):
        agree(layer, part.read().numpy().reshape(part.channels, -1))
        assert (layer.name, layer.stage, layer.shape) == (part.name, part.stage, (1, *part.kernel))
    if any(part.ndim == 1 for part in parts):
        with pytest.raises(UsageError, match=r"square filters of odd size, found .* 1-D"):
            filter_distributions(model)
        return
    for layer, part, row in zip(found.layers, parts, filter_distributions(model), strict=True):
        np.testing.assert_array_equal(row.covariance, layer.moments.covariance)
        np.testing.assert_array_equal(row.mean, layer.moments.mean.reshape(part.kernel))
        assert (row.name, row.stage, row.kernel, row.count) == (part.name, part.stage, part.kernel[0], part.channels)
        assert row.depth == layer.relative_depth


@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("part", ["mlp-rows", "mlp-columns"])
def test_rows_and_columns_of_every_family_equal_numpy(family, part):
    model = families.FAMILIES[family].build()
    found = covariance_within(model, part=part)
    wanted = [(p.layer, name, p.read(name).numpy()) for p in mlps(model) for name in p.parameters]
    assert len(found.layers) == len(wanted)
    assert {"fc1", "fc2"} <= set(found.groups) <= {"fc1", "fc2", "gate"}
    for layer, (number, name, matrix) in zip(found.layers, wanted, strict=True):
        samples = matrix if part == "mlp-rows" else matrix.T
        assert (layer.layer, layer.group, layer.shape) == (number, name, (samples.shape[1],))
        assert layer.focus is None
        agree(layer, samples)


@pytest.mark.parametrize("family", PATCHES)
def test_patches_of_every_family_equal_numpy(family):
    model = families.FAMILIES[family].build()
    (part,) = patch_embeddings(model)
    weights = part.read().numpy()
    (joint,) = covariance_within(model, part="patch").layers
    assert joint.shape == weights.shape[1:]
    agree(joint, weights.reshape(len(weights), -1))


def test_every_kind_of_source_gives_the_same_numbers(tmp_path):
    model = convmixer()
    state = model.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pth")
    paths = (tmp_path / "model.safetensors", str(tmp_path / "model.pth"))
    sources = (model, state, Checkpoint(state), *paths)
    found = covariance_within(*sources)
    folder = tmp_path.name
    assert found.labels == ("ConvMixer", "state dict", "state dict (2)", folder, f"{folder} (2)")
    first = found.of("ConvMixer")
    for label in found.labels:
        for mine, other in zip(first, found.of(label), strict=True):
            np.testing.assert_array_equal(mine.moments.covariance, other.moments.covariance)
            assert mine.focus == other.focus


def test_what_is_kept_changes_nothing_else(monkeypatch):
    x = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32) + 3
    x[:, 7] = 0.1  # constant
    whole, part = slice_moments(x, keep=300), slice_moments(x, keep=299)
    assert whole.covariance.shape == (300, 300)
    assert part.covariance is None
    np.testing.assert_allclose(part.mean, whole.mean, **TIGHT)
    np.testing.assert_allclose(part.variance, whole.variance, **TIGHT)
    assert part.variance[7] == 0
    np.testing.assert_allclose(part.eigenvalues, whole.eigenvalues, rtol=1e-9, atol=1e-10)
    assert part.squared == pytest.approx(whole.squared, rel=1e-10)
    tall = slice_moments(x.T.copy(), keep=10)
    assert tall.covariance is None
    np.testing.assert_allclose(tall.eigenvalues, naive.moments(x.T)[2], rtol=1e-9)
    monkeypatch.setattr(slices, "FULL", 30)
    leading = slice_moments(x, keep=10)
    np.testing.assert_allclose(leading.eigenvalues, whole.eigenvalues[: slices.LEADING], rtol=1e-9)
    assert leading.effective_rank == pytest.approx(whole.effective_rank, rel=1e-10)


def test_variance_in_one_pixel_and_in_none():
    centre = np.zeros((10, 25))
    centre[:, 12] = np.arange(10)
    focus = centre_focus(centre, (5, 5), slice_moments(centre))
    assert (focus.spread, focus.central_share, focus.central_ratio) == (0, 1, 25)
    assert math.isnan(focus.neighbours)  # the others do not vary, so their correlations do not exist
    nothing = np.ones((6, 9))
    assert all(math.isnan(v) for v in vars(centre_focus(nothing, (3, 3), slice_moments(nothing))).values())


def test_standard_errors_cover_and_independent_entries_give_one():
    """About 95 % of 400 intervals hold 1; 0.92 to 0.98 fails by chance in 1 of 100."""
    rng = np.random.default_rng(0)
    covered, edges, means = [], [], []
    for _ in range(400):
        x = rng.standard_normal((200, 25))
        found = slice_moments(x)
        focus = centre_focus(x, (5, 5), found)
        covered.append(abs(focus.relative_spread - 1) < 1.96 * focus.relative_spread_se)
        edges.append(found.edge_ratio)
        means.append(found.mean_ratio)
    assert 0.92 < np.mean(covered) < 0.98
    assert 0.85 < np.mean(edges) < 1.02
    assert np.mean(means) == pytest.approx(1, abs=5 * np.sqrt(2 / 25 / 400))


@pytest.mark.parametrize(("n", "spread"), [(8, 0.0), (8, 1.0), (64, 1.0)])
def test_intervals_of_few_filters_of_unequal_scale_cover(n, spread):
    """0.91 to 0.985 of 1,000 fail by chance in 1 of 1,000; the delta method with 1.96 covers in 0.86, 0.56 and 0.78."""
    rng = np.random.default_rng(n)
    covered = []
    for _ in range(1000):
        x = rng.standard_normal((n, 9)) * np.exp(spread * rng.standard_normal((n, 1)))
        focus = centre_focus(x, (3, 3), slice_moments(x))
        covered.append(abs(focus.relative_spread - 1) < 1.96 * focus.relative_spread_se)
    assert 0.91 < np.mean(covered) < 0.985


def test_two_filters_have_no_standard_error():
    x = np.random.default_rng(0).standard_normal((2, 9))
    assert math.isnan(centre_focus(x, (3, 3), slice_moments(x)).relative_spread_se)


def test_skeletons_have_the_shapes_and_default_weights():
    model = ConvNeXt((8, 16), (2, 1))
    before = torch.get_rng_state()
    bare = skeleton(model, "filters", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    shapes = [{p.parameters[0]: (p.channels, p.kernel) for p in depthwise(network)} for network in (bare, model)]
    assert shapes[0] == shapes[1]
    for part in depthwise(bare):
        bound = part.kernel[0] ** -1
        assert 0.9 * bound < part.read().abs().max() <= bound  # torch's: uniform within 1 / sqrt(fan in)
    assert torch.equal(depthwise(skeleton(model, seed=3))[0].read(), depthwise(bare)[0].read())
    for part in ("mlp-rows", "patch"):
        rows = covariance_within(model, skeleton(model, part), part=part)
        first, second = (rows.of(label) for label in rows.labels)
        assert [(x.name, x.group, x.shape) for x in first] == [(x.name, x.group, x.shape) for x in second]
    for network, part, error, match in (
        (model, "heads", UsageError, "expected one of 'filters', 'mlp-rows'"),
        (convmixer(), "mlp-rows", AnatomyError, "expected MLPs"),
    ):
        with pytest.raises(error, match=match):
            skeleton(network, part)


def damaged() -> torch.nn.Module:
    model = convmixer()
    first, second = depthwise(model)[:2]
    filters = first.read()
    filters[2, 0, 0], filters[5] = math.nan, math.inf
    first.write(filters)
    second.write(torch.full_like(second.read(), math.nan))
    return model


def test_weights_that_are_not_finite_are_counted_and_the_rest_is_drawn(tmp_path):
    model = damaged()
    found = covariance_within(model)
    first, second, third = found.layers
    assert (first.nonfinite, first.moments.n, first.moments.excluded) == (26, 10, 2)
    kept = np.delete(depthwise(model)[0].read().numpy().reshape(12, -1), [2, 5], axis=0)
    np.testing.assert_allclose(first.moments.covariance, np.cov(kept.astype(np.float64).T), **TIGHT)
    assert first.focus.spread == pytest.approx(naive.focus(kept, 1, 5, 5)["spread"], rel=1e-10)
    assert (second.moments, second.focus) == (None, None)
    assert third.nonfinite == 0
    text = found.text()
    assert f"`{first.name}`: 26 weights are not finite; 2 of 12 samples are left out" in text
    assert f"`{second.name}`: expected at least 2 finite samples, found 0" in text
    json.dumps(found.to_dict(), allow_nan=False)
    found.plot(tmp_path / "maps.png", "maps")
    assert (tmp_path / "maps.png").stat().st_size > 5_000
    with pytest.raises(DataError, match=r"2 of 12 filters hold NaN or infinity"):
        filter_distributions(model)
    for part in depthwise(model):
        part.write(torch.full_like(part.read(), math.nan))
    with pytest.raises(DataError, match=r"at least 2 finite samples, found 0"):
        filter_distributions(model)
    with pytest.raises(DataError, match="ConvMixer: no layer has 2 finite samples"):
        covariance_within(model)


def test_layers_are_counted_where_a_block_is_absent():
    state = ConvNeXt((8, 16), (4, 3)).state_dict()
    found = covariance_within({name: x for name, x in state.items() if not name.startswith("stages.0.blocks.1.")})
    assert [(layer.layer, layer.depth) for layer in found.layers] == [(i, 6) for i in range(6)]
    depths = relative_depths(depthwise(state)[:1] + depthwise(state)[2:], "sawtooth")
    assert depths == pytest.approx([0, 2 / 3, 1, 0, 1 / 2, 1])


@pytest.mark.parametrize(("widths", "over"), [((8,), "channels,"), ((8, 16), "channels 0 of 2,")])
def test_the_picture_of_a_whole_network_says_which_channels(widths, over):
    figure = covariance_exchangeable(ConvNeXt(widths, (1,) * len(widths))).plot().figure
    assert figure.get_suptitle().startswith(f"Correlation over {over}")


def test_dead_filters_are_counted():
    model = convmixer()
    part = depthwise(model)[1]
    filters = part.read()
    filters[:3] *= 1e-8
    part.write(filters)
    found = covariance_within(model)
    assert [layer.moments.dead for layer in found.layers] == [0, 3, 0]
    assert "3 samples are dead" in found.text()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((), {}, UsageError, "at least one network"),
        (("model",), {"keep": 0}, UsageError, "keep: expected an integer >= 1, found 0"),
        (("model",), {"labels": ["a", "b"]}, UsageError, "labels: expected a list of 1 unique"),
        (
            ("vit",),
            {"part": "filters"},
            AnatomyError,
            r"ViT: expected depthwise convolutions, found 2 attention .* 2 MLPs",
        ),
    ],
)
def test_invalid_arguments_are_errors(arguments, options, error, match):
    known = {"model": convmixer(), "vit": ViT(16, 4, 24, 2, 3, 5)}
    with pytest.raises(error, match=match):
        covariance_within(*(known.get(a, a) for a in arguments), **options)


def test_pictures_that_cannot_be_drawn_are_errors(tmp_path):
    found = covariance_within(ViT(16, 4, 24, 2, 3, 5), part="mlp-rows", keep=10)
    for picture, match in (
        ("samples", "rows are not images"),
        ("maps", "no covariance was kept"),
        ("heads", "expected one of 'maps', 'depth', 'samples'"),
    ):
        with pytest.raises(UsageError, match=match):
            found.plot(tmp_path / "a.png", picture)
    with pytest.raises(UsageError, match=r"label: expected one of .*found 'b'"):
        found.of("b")


@pytest.mark.slow
def test_several_networks_stand_in_one_table_and_one_picture(tmp_path):
    found = covariance_within(convmixer(0, 2), convmixer(1, 3), ConvNeXt(8, 2), labels=["a", None, "c"])
    assert found.labels == ("a", "ConvMixer", "c")
    lines = found.text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("network"))
    shown = [line.split()[:2] for line in lines[head + 1 : lines.index("", head)]]
    assert shown[:4] == [["a", "0"], ["ConvMixer", "0"], ["c", "0"], ["a", "1"]]
    assert len(shown) == 7
    for picture in ("maps", "depth", "samples"):
        found.plot(tmp_path / f"{picture}.pdf", picture, title="A finding")
    rows = found.to_dict()["rows"]
    assert [row["source"] for row in rows] == ["a"] * 2 + ["ConvMixer"] * 3 + ["c"] * 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mixer.safetensors"
    save_file(convmixer().state_dict(), path)
    return path


def test_the_command_on_one_file(file, tmp_path, capsys):
    figure, table = tmp_path / "a.png", tmp_path / "a.json"
    code, out, _ = run("covariance", file, "-o", figure, "--json", table, capsys=capsys)
    assert code == 0
    assert "mixer: variance is nearer the centre than even" in out
    assert "neighbours" in out
    assert figure.read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(table.read_text())["rows"]
    found = covariance_within(file)
    assert [row["relative_spread"] for row in rows] == [x.focus.relative_spread for x in found.layers]


def test_the_command_compares(file, tmp_path, capsys):
    (tmp_path / "closed.toml").write_text('name = "conv_covariance"\npreset = "imagenet-thawed"\n')
    options = ("--init", "default", "--init", tmp_path / "closed.toml", "-o", tmp_path / "a.png")
    code, out, _ = run("covariance", file, file, *options, capsys=capsys)
    assert code == 0
    for line in ("\nmixer (2) ", "\nmixer ", "\ndefault ", "\nclosed "):
        assert line in out
    assert run("covariance", file, "--picture", "samples", "-o", tmp_path / "b.png", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        (("--part", "mlp-rows"), 3, "expected MLPs, found 3 depthwise"),
        (("--select", "*"), 2, "--select: does not apply within networks"),
        (("--network", "1"), 2, "--network: selects within a population's folder"),
    ],
)
def test_the_command_refuses(options, code, match, file, tmp_path, capsys):
    found, _, err = run("covariance", file, *options, "-o", tmp_path / "a.png", capsys=capsys)
    assert (found, err.count("\n")) == (code, 1)
    assert match in err
    assert not (tmp_path / "a.png").exists()


def test_the_command_looks_into_one_network_of_a_population(tmp_path, capsys, trained_here):
    small = {"network.width": 4, "network.depth": 1, "training.epochs": 1, "data.train": 64, "data.test": 40}
    small |= {"population.networks": 4, "population.tile": 4}
    folder = tmp_path / "a.pop"
    population = collect(Recipe.load("digits-convnext").replace(small), folder, workers=1, device="cpu", progress=False)
    arguments = ("covariance", folder, "-o", tmp_path / "a.png", "--json", tmp_path / "a.json")
    code, out, err = run(*arguments, "--part", "filters", "--network", 3, capsys=capsys)
    assert code == 0, err
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["labels"] == ["a.pop::3"]
    (layer,) = covariance_within(population.network(3)).layers
    assert found["rows"][0]["spread"] == layer.focus.spread
    assert run(*arguments, "--network", 8, capsys=capsys)[0] == 2
    code, out, _ = run(*arguments, capsys=capsys)
    assert (code, "column means" in out) == (0, True)  # without these options, across networks


def test_maps_are_in_block_form_with_limits_printed():
    found = filter_distributions(convmixer())
    panels = [plots.Panel(row.covariance, row.name, (1, row.kernel, row.kernel)) for row in found]
    figure = plots.covariance_page([panels, [None, plots.Panel(None, "damaged", reason="not finite")]])
    shown = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(shown) == 3
    for image, row in zip(shown, found, strict=True):
        np.testing.assert_array_equal(
            image.get_array(), row.covariance.reshape(5, 5, 5, 5).swapaxes(1, 2).reshape(25, 25)
        )
        assert image.norm(0.0) == 0.5  # zero is in the middle of the colours
        assert -image.norm.vmin == image.norm.vmax >= np.quantile(np.abs(row.covariance), 0.98)
    limits = [ax.get_xlabel() * ax.xaxis.get_visible() for ax in figure.axes[:3]]
    assert limits == [f"±{plots.theme.number(image.norm.vmax)}" for image in shown]
    assert "not\nfinite" in [t.get_text().replace(" ", "\n") for ax in figure.axes for t in ax.texts]


def test_blocks_of_channels_and_of_rectangles():
    c, h, w = 2, 3, 4
    x = np.random.default_rng(0).standard_normal((50, c * h * w))
    matrix = np.cov(x.T)
    figure = plots.covariance_page([[plots.Panel(matrix, "a", (c, h, w))]])
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (c * h * h, c * w * w)
    full = matrix.reshape(c, h, w, c, h, w)
    for a, i, j, b, y, x in np.ndindex(full.shape):
        assert shown[a * h * h + i * h + y, b * w * w + j * w + x] == full[a, i, j, b, y, x]
    line = plots.covariance_page([[plots.Panel(matrix[:4, :4], "a", (1, 1, 4))]])
    np.testing.assert_array_equal(line.axes[0].images[0].get_array(), matrix[:4, :4])


def test_filters_are_drawn_at_their_places():
    filters = np.arange(3 * 4, dtype=float).reshape(3, 1, 2, 2) - 5
    image = plots.filter_page([[plots.Panel(filters, "a")]]).axes[0].images[0].get_array()
    assert image.shape == (2 * 9 + 1, 2 * 9 + 1)
    for index, (y, x) in enumerate(((0, 0), (0, 1), (1, 0))):
        tile = image[9 * y + 1 : 9 * y + 9, 9 * x + 1 : 9 * x + 9]
        np.testing.assert_array_equal(tile[::4, ::4], filters[index, 0])
    assert image.mask[:, 9].all()


@pytest.mark.parametrize("top", [1.1, 5e4])
def test_a_logarithmic_axis_has_ticks_for_every_spread(top):
    curve = plots.Curve("a", np.arange(3), {"y": np.array([1.0, 1.05, top])}, {})
    ax = plots.depth_curves([curve], [plots.Statistic("y", "y", log=True)]).axes[0]
    low, high = ax.get_ylim()
    assert sum(low <= tick <= high for tick in ax.get_yticks()) >= 2


def test_curves_show_the_numbers_with_their_intervals():
    found = covariance_within(ConvNeXt((8, 16), (2, 1)), labels=["a"])
    values, errors = ([getattr(x.focus, f"relative_spread{s}") for x in found.layers] for s in ("", "_se"))
    curve = plots.Curve("a", [0, 1, 2], {"y": values}, {"y": errors}, ["7×7"] * 3)
    (ax,) = plots.depth_curves([curve], [plots.Statistic("y", "spread", 1.0)]).axes
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), values)
    low, high = ax.containers[0].lines[2][0].get_paths()[0].vertices[[0, -1], 1]
    assert (high - low) / 2 == pytest.approx(1.96 * errors[0])


def test_the_study_s_p_values_are_exact():
    study = script("analyses/filter_covariances/run.py")
    assert study.rank_correlation([1.0, 2.0, 3.0, 4.0]) == pytest.approx({"rank_correlation": 1, "p": 2 / 24})
    from scipy.stats import spearmanr

    values = list(np.random.default_rng(0).standard_normal(6))
    assert study.rank_correlation(values)["rank_correlation"] == pytest.approx(spearmanr(range(6), values).statistic)
