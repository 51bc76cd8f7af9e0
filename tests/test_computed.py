import numpy as np
import pytest
import shims

from weightscope.analysis import covariance_across, covariance_exchangeable
from weightscope.errors import AnatomyError, DataError, SpecError, UsageError
from weightscope.plots.covariance import CHANCE, chance
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Coordinates, norm_pairs
from weightscope.statistics.permutation_rules import permutations_by_name
from weightscope.statistics.samples import WeightArray


def network_spec():
    width, hidden = 3, 4
    tensors = [TensorSpec("stem.weight", (width, 1, 2, 2))]
    for i in range(2):
        at = f"stages.0.blocks.{i}"
        tensors += [
            TensorSpec(f"{at}.conv_dw.weight", (width, 1, 3, 3)),
            TensorSpec(f"{at}.norm.weight", (width,)),
            TensorSpec(f"{at}.norm.bias", (width,)),
            TensorSpec(f"{at}.mlp.fc1.weight", (hidden, width)),
            TensorSpec(f"{at}.mlp.fc1.bias", (hidden,)),
            TensorSpec(f"{at}.mlp.fc2.weight", (width, hidden)),
            TensorSpec(f"{at}.mlp.fc2.bias", (width,)),
        ]
    return WeightSpec(tensors)


def fold_norms(vectors, spec):
    """Whole weight vectors with every norm folded."""
    return Coordinates(spec, computed={}, fold_norms=True)(np.atleast_2d(vectors)).reshape(vectors.shape)


def diagonal(tensors):
    """diag(W2 W1) of the first block."""
    w1, w2 = (tensors[f"stages.0.blocks.0.mlp.fc{i}.weight"] for i in (1, 2))
    return np.einsum("nij,nji->ni", w2, w1)


@pytest.fixture
def spec():
    return network_spec()


@pytest.fixture
def vectors(spec):
    return np.random.default_rng(0).standard_normal((7, spec.size)).astype(np.float32)


def test_a_function_that_gives_no_row_for_each_network_is_refused(spec):
    with pytest.raises(UsageError, match=r"computed total: expected numbers \(1, ...\), one row a network, found \(\)"):
        Coordinates(spec, "*", computed={"total": lambda tensors: tensors["stem.weight"].sum()})


def test_coordinates_of_a_plain_selection_are_the_rows_themselves(spec, vectors):
    plan = Coordinates(spec, "*fc1.weight", computed={})
    rows = vectors[:, spec.columns(plan.reads)]
    assert plan(rows) is rows
    assert plan.spec == spec.select("*fc1.weight")


def test_coordinates_read_only_what_they_need(spec):
    plan = Coordinates(spec, "*.fc1.bias", computed={}, fold_norms=True)
    names = ("norm.bias", "mlp.fc1.weight", "mlp.fc1.bias")
    assert set(plan.reads.names) == {f"stages.0.blocks.{i}.{name}" for i in range(2) for name in names}


def test_computed_coordinates_are_functions_of_folded_tensors(spec, vectors):
    plan = Coordinates(spec, "*.fc1.bias", computed={"diagonal": diagonal}, fold_norms=True)
    found = plan.spec.unpack(plan(vectors[:, spec.columns(plan.reads)]))
    folded = spec.unpack(fold_norms(vectors, spec))
    assert list(found) == [*spec.select("*.fc1.bias").names, "diagonal"]
    for name in spec.select("*.fc1.bias").names:
        np.testing.assert_allclose(found[name], folded[name], rtol=1e-5)
    np.testing.assert_allclose(found["diagonal"], diagonal(folded), rtol=1e-5, atol=1e-6)
    alone = Coordinates(spec, None, computed={"diagonal": diagonal})
    assert alone.spec.size == 3
    assert alone(vectors[:, spec.columns(alone.reads)]).shape == (7, 3)


def test_folding_is_idempotent_and_leaves_unit_norms(spec, vectors):
    assert norm_pairs(spec) == tuple((f"stages.0.blocks.{i}.norm", f"stages.0.blocks.{i}.mlp.fc1") for i in (0, 1))
    folded = fold_norms(vectors, spec)
    assert folded.dtype == np.float32
    tensors = spec.unpack(folded)
    np.testing.assert_array_equal(tensors["stages.0.blocks.0.norm.weight"], 1)
    np.testing.assert_array_equal(tensors["stages.0.blocks.0.norm.bias"], 0)
    np.testing.assert_array_equal(fold_norms(folded, spec), folded)
    np.testing.assert_array_equal(fold_norms(vectors[0], spec), folded[0])


def test_a_shift_without_a_bias_to_take_it_is_refused():
    spec = WeightSpec(
        [TensorSpec("b.norm1.weight", (3,)), TensorSpec("b.norm1.bias", (3,)), TensorSpec("b.attn.qkv.weight", (9, 3))]
    )
    with pytest.raises(SpecError, match=r"`b.attn.qkv` has no bias"):
        norm_pairs(spec)
    without = WeightSpec([spec.tensors[0], spec.tensors[2]])
    folded = without.unpack(fold_norms(np.arange(30.0), without))
    np.testing.assert_array_equal(folded["b.attn.qkv.weight"], np.arange(3.0, 30.0).reshape(9, 3) * [0, 1, 2])


def _folded_module_differs_by(module, inputs):
    torch = pytest.importorskip("torch")
    module = module.eval()
    spec = WeightSpec.of(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        expected = module(inputs)
        state = {name: value.numpy() for name, value in module.state_dict().items()}
        folded = fold_norms(spec.pack(state, dtype=np.float64), spec)
        module.load_state_dict({n: torch.from_numpy(v) for n, v in spec.unpack(folded).items()}, strict=False)
        return len(norm_pairs(spec)), float((module(inputs) - expected).abs().max())


def test_folding_does_not_change_what_timm_networks_compute():
    torch = pytest.importorskip("torch")
    timm = shims.timm()
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vit = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=5
    ).double()
    pairs, difference = _folded_module_differs_by(vit, image)
    assert pairs == 5
    assert difference < 1e-12
    convnext = timm.models.convnext.ConvNeXt(
        depths=(1, 1, 1, 1), dims=(4, 6, 8, 10), patch_size=2, num_classes=5
    ).double()
    pairs, difference = _folded_module_differs_by(convnext, image)
    assert pairs == 4 + 4 + 1  # with patches of 2, timm also halves before the first stage
    assert difference < 1e-12


# --- named coordinates, and those of one's own, under permutations ---------------------------------------------------

C, P = 6, 8
BLOCKS = [f"stages.0.blocks.{i}" for i in range(2)]
CONVNEXT = WeightSpec(
    TensorSpec(f"{at}.{name}", shape)
    for at in BLOCKS
    for name, shape in (
        ("conv_dw.weight", (C, 1, 3, 3)), ("norm.weight", (C,)), ("mlp.fc1.weight", (P, C)), ("mlp.fc2.weight", (C, P)),
    )
)  # fmt: skip
VIT = WeightSpec([TensorSpec("blocks.0.attn.qkv.weight", (3 * C, C)), TensorSpec("blocks.0.attn.proj.weight", (C, C))])
NAMED = ["centre-pixel", "mlp-diagonal", "abs:mlp-diagonal"]


def rows_of(spec, n=40, seed=0):
    return np.random.default_rng(seed).standard_normal((n, spec.size)) + 0.1


def by_loops(rows, at):
    """The central pixels (N, C) and diag(W2 W1) (N, C) of a block."""
    filters, fc1, fc2 = (
        rows[:, CONVNEXT.slices[f"{at}.{name}.weight"]].reshape(-1, *CONVNEXT[f"{at}.{name}.weight"].shape)
        for name in ("conv_dw", "mlp.fc1", "mlp.fc2")
    )
    diagonal = np.array([[b[c] @ a[:, c] for c in range(C)] for a, b in zip(fc1, fc2, strict=True)])
    return filters[:, :, 0, 1, 1], diagonal


def test_named_coordinates_equal_plain_numpy():
    rows = rows_of(CONVNEXT)
    found = covariance_across(WeightArray(rows, CONVNEXT), computed=NAMED)
    expected = {}
    for at in BLOCKS:
        pixels, diagonal = by_loops(rows, at)
        expected[f"{at}.centre-pixel"] = pixels
        expected[f"{at}.mlp-diagonal"], expected[f"{at}.|mlp-diagonal|"] = diagonal, abs(diagonal)
    assert set(found.spec.names) == set(expected), "no tensor of the network beside them"
    stacked = np.concatenate([expected[name] for name in found.spec.names], axis=1)
    np.testing.assert_allclose(found.matrix, np.cov(stacked.T), atol=1e-12)
    for name, values in expected.items():
        of = found.computed[name]
        half = 2.0226909 * values.mean(axis=1).std(ddof=1) / np.sqrt(40)  # Student's t of 39 degrees
        assert of["ci95"] == pytest.approx([values.mean() - half, values.mean() + half], abs=1e-7)
        assert of["std"] == pytest.approx(values.std(), rel=0.02)


def test_diagonals_of_attention_are_added_up_over_heads():
    rows = rows_of(VIT)
    found = covariance_across(WeightArray(rows, VIT), computed=["qk-diagonal", "vo-diagonal"], kind="correlation")
    qkv, proj = rows[:, : 3 * C * C].reshape(-1, 3, 2, C // 2, C), rows[:, 3 * C * C :].reshape(-1, C, 2, C // 2)
    q, k, v = qkv.transpose(1, 0, 2, 3, 4)
    qk = np.array([[sum(q[n, h, :, c] @ k[n, h, :, c] for h in range(2)) for c in range(C)] for n in range(40)])
    vo = np.array([[sum(v[n, h, :, c] @ proj[n, c, h] for h in range(2)) for c in range(C)] for n in range(40)])
    np.testing.assert_allclose(found.matrix, np.corrcoef(np.hstack([qk, vo]).T), atol=1e-12)
    assert found.computed["blocks.0.qk-diagonal"]["mean"] == pytest.approx(qk.mean(), abs=1e-12)


def test_computed_coordinates_are_averaged_over_permutations():
    """The correlation of channel c with channel c, about channel means, by loops; norms folded by a plain product."""
    rows = rows_of(CONVNEXT)
    folded = rows.copy()
    for at in BLOCKS:
        fc1 = folded[:, CONVNEXT.slices[f"{at}.mlp.fc1.weight"]].reshape(-1, P, C)
        fc1 *= rows[:, None, CONVNEXT.slices[f"{at}.norm.weight"]]
    for fold_norms, weights in ((False, rows), (True, folded)):
        found = covariance_exchangeable(WeightArray(rows, CONVNEXT), computed=NAMED, fold_norms=fold_norms)
        (of_channels,) = [t for t in found.types if t.kind.groups == ("channels.0",)]
        for at in BLOCKS:
            sides = [x - x.mean(axis=0) for x in by_loops(weights, at)]
            f, d = (x - x.mean(axis=1, keepdims=True) for x in sides)
            i, j = (of_channels.kind.slices[f"{at}.{name}"].start for name in NAMED[:2])
            assert of_channels.correlation()[i, j] == pytest.approx(
                (f * d).sum() / np.sqrt((f**2).sum() * (d**2).sum())
            )


def test_axes_of_functions_are_found_by_renumbering():
    whole = permutations_by_name(CONVNEXT)
    of_block = {name: f"{BLOCKS[0]}.mlp.{name}.weight" for name in ("fc1", "fc2")}

    def several(tensors):
        one, other = tensors[of_block["fc1"]], tensors[of_block["fc2"]]
        both = {"product": np.einsum("ncp,npd->ncd", other, one), "hidden": one.sum(axis=2)}
        return both | {"sorted": np.sort(one.sum(axis=1), axis=1), "total": one.sum(axis=(1, 2))}

    found = Coordinates(CONVNEXT, None, computed={"several": several}).permutations(whole)
    axes = {view.name: view.axes for view in found.views}
    assert axes["product"] == ("channels.0", "channels.0")
    assert axes["hidden"] == ("hidden.0.0",)
    assert axes["sorted"] == (None,)
    assert axes["total"] == ()
    gated = Coordinates(VIT, None, computed={"queries": lambda t: t["blocks.0.attn.qkv.weight"][:, :C].sum(axis=2)})
    assert gated.permutations(permutations_by_name(VIT)).views[0].axes == ("~qk.0",)
    first = Coordinates(CONVNEXT, None, computed={"first": lambda t: t[of_block["fc1"]][:, 0]})
    with pytest.raises(UsageError, match=r"computed first: renumbering the units of hidden.0.0 changes it otherwise"):
        first.permutations(whole)


def test_a_filter_that_follows_the_magnitude_is_found_by_that_alone():
    """f = -0.5 |d| + noise, with d symmetric about zero; false alarms 0.05 for all pairs of untouched networks."""
    rows = rows_of(CONVNEXT, 300) - 0.1
    source = WeightArray(rows, CONVNEXT)
    computed = [*NAMED, "abs:centre-pixel"]
    assert not [pair for pair in covariance_exchangeable(source, computed=computed).pairs() if pair.p < 0.05]
    for at in BLOCKS:
        pixels, diagonal = by_loops(rows, at)
        pixels -= 0.5 * abs(diagonal)
    found = {(p.a, p.b): p for p in covariance_exchangeable(source, computed=computed).pairs() if p.p < 0.05}
    for at in BLOCKS:
        assert found[f"{at}.centre-pixel", f"{at}.|mlp-diagonal|"].correlation < -0.3
        assert (f"{at}.centre-pixel", f"{at}.mlp-diagonal") not in found


def test_bad_computed_coordinates():
    source = WeightArray(rows_of(CONVNEXT), CONVNEXT)
    for computed, error, message in (
        (["centre-pixl"], UsageError, "no computed coordinate 'centre-pixl'; did you mean 'centre-pixel'"),
        (["abs:abs:centre-pixel"], UsageError, "computed abs:abs:centre-pixel: expected abs: once"),
        (["qk-diagonal"], UsageError, "computed qk-diagonal: expected two matrices between channels and units"),
        ({"x": lambda t: t[f"{BLOCKS[0]}.norm.weight"][0]}, UsageError, r"computed x: expected numbers \(1, ...\)"),
        (
            {"x": lambda t: np.log(-abs(t[f"{BLOCKS[0]}.norm.weight"]))},
            DataError,
            "computed x: expected finite numbers",
        ),
    ):
        for function in (covariance_across, covariance_exchangeable):
            with pytest.raises(error, match=message):
                function(source, computed=computed)
    with pytest.raises(UsageError, match="select: nothing to compute; expected tensors or computed coordinates"):
        covariance_across(source, None)
    with pytest.raises(AnatomyError, match="expected depthwise convolutions"):
        covariance_across(WeightArray(rows_of(VIT), VIT), computed=["centre-pixel"])


# --- the picture of a whole network -----------------------------------------------------------------------------------


def test_cells_of_a_whole_network_are_correlations_of_channels_and_white_within_chance():
    """Each cell by plain numpy; one in 1,000 of untouched networks is coloured (false-alarm rate 1e-3, fixed seeds)."""
    coloured = cells = 0
    for seed in range(13):
        rows = rows_of(CONVNEXT, 48, seed)
        found = covariance_across(WeightArray(rows, CONVNEXT), "*")
        drawn = np.asarray(found.plot(means=True).axes[0].images[0].get_array())
        z, means = rows / rows.std(axis=0), []
        for tensor in CONVNEXT.tensors:
            one = z[:, CONVNEXT.slices[tensor.name]].reshape(48, *tensor.shape)
            away = 1 if tensor.name.endswith("fc1.weight") else tuple(range(2, one.ndim))
            means.append(one.mean(axis=away))
        expected = np.corrcoef(np.hstack(means).T)
        inside = (abs(expected) < chance(48)) | np.eye(len(expected), dtype=bool)
        np.testing.assert_allclose(drawn, np.where(inside, 0, expected), atol=1e-9)
        coloured, cells = coloured + np.count_nonzero(drawn) // 2, cells + len(drawn) * (len(drawn) - 1) // 2
    assert abs(coloured - CHANCE * cells) < 3.3 * np.sqrt(CHANCE * cells)
    with pytest.raises(DataError, match="the error of a correlation, found 2; draw single entries"):
        covariance_across(WeightArray(rows[:2], CONVNEXT), "*").plot(means=True)


def test_correlations_of_computed_coordinates_are_white_within_chance():
    """One in 1,000 cells of independent entries is coloured (false-alarm rate 1e-3, fixed seeds); planted ones are."""
    coloured = cells = 0
    for seed in range(13):
        rows = rows_of(CONVNEXT, 48, seed)
        found = covariance_across(WeightArray(rows, CONVNEXT), computed=["centre-pixel", "mlp-diagonal"])
        drawn = np.asarray(found.plot().axes[0].images[0].get_array())
        coloured, cells = coloured + np.count_nonzero(drawn) // 2, cells + len(drawn) * (len(drawn) - 1) // 2
    assert coloured < CHANCE * cells + 3.3 * np.sqrt(CHANCE * cells)
    pixels, diagonal = by_loops(rows, BLOCKS[0])
    pixels += diagonal
    found = covariance_across(WeightArray(rows, CONVNEXT), computed=["centre-pixel", "mlp-diagonal"])
    assert np.count_nonzero(found.plot().axes[0].images[0].get_array()) >= 2 * C


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_pixels_of_filters_are_white_within_chance_also_where_filters_differ_in_scale(spread):
    """One in 1,000 cells of independent entries is coloured (false-alarm rate 1e-3, fixed seeds)."""
    coloured = cells = 0
    for seed in range(8):
        rows, rng = rows_of(CONVNEXT, 48, seed), np.random.default_rng(seed)
        for values in CONVNEXT.unpack(rows).values():
            values *= np.exp(spread * rng.standard_normal(values.shape[:2] + (1,) * (values.ndim - 2)))
        found = covariance_exchangeable(WeightArray(rows, CONVNEXT), "*conv_dw.weight")
        drawn = np.asarray(found.plot().axes[0].images[0].get_array())
        coloured, cells = coloured + np.count_nonzero(drawn) // 2, cells + len(drawn) * (len(drawn) - 1) // 2
    assert coloured < CHANCE * cells + 3.3 * np.sqrt(CHANCE * cells)


def test_channels_are_those_of_the_residual_stream_also_where_shapes_do_not_tell():
    """Of a square matrix the rows; queries, keys and values apart; tensors without channels are one cell."""
    spec = WeightSpec([*VIT.tensors, TensorSpec("blocks.0.attn.qkv.bias", (3 * C,))])
    groups = covariance_across(WeightArray(rows_of(spec), spec), "*").groups()
    np.testing.assert_array_equal(
        groups["blocks.0.attn.proj.weight"].reshape(C, C), np.arange(C)[:, None] + np.zeros(C)
    )
    qkv = groups["blocks.0.attn.qkv.weight"].reshape(3, C, C)
    np.testing.assert_array_equal(qkv[:, 0], np.arange(3 * C).reshape(3, C))
    assert (qkv == qkv[:, :1]).all()
    np.testing.assert_array_equal(groups["blocks.0.attn.qkv.bias"], np.repeat(np.arange(3), C))
