import numpy as np
import pytest
import shims

from weightscope.errors import SpecError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Computed, Coordinates, norm_pairs, parse


def network_spec(blocks=2, width=3, hidden=4):
    tensors = [TensorSpec("stem.weight", (width, 1, 2, 2))]
    for i in range(blocks):
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
    return Coordinates(spec, fold_norms=True)(np.atleast_2d(vectors)).reshape(vectors.shape)


DIAGONAL = "diag(stages.0.blocks.{i}.mlp.fc2.weight @ stages.0.blocks.{i}.mlp.fc1.weight)"


@pytest.fixture
def spec():
    return network_spec()


@pytest.fixture
def vectors(spec):
    return np.random.default_rng(0).standard_normal((7, spec.size)).astype(np.float32)


def test_placeholders_expand_to_every_block(spec):
    found = parse(DIAGONAL, spec)
    assert found == tuple(
        Computed("diag", (f"stages.0.blocks.{i}.mlp.fc2.weight", f"stages.0.blocks.{i}.mlp.fc1.weight"))
        for i in range(2)
    )
    assert found[1].name == "diag(stages.0.blocks.1.mlp.fc2.weight @ stages.0.blocks.1.mlp.fc1.weight)"
    assert parse(found[1].name, spec) == (found[1],)  # a name is an expression for itself
    across = parse("center(stages.{s}.blocks.{i}.conv_dw.weight)", spec)
    assert [c.tensors[0] for c in across] == [f"stages.0.blocks.{i}.conv_dw.weight" for i in range(2)]


def test_values_equal_the_definition(spec, vectors):
    tensors = spec.unpack(vectors)
    at = "stages.0.blocks.1"
    w1, w2, filters = (tensors[f"{at}.{name}.weight"] for name in ("mlp.fc1", "mlp.fc2", "conv_dw"))

    def value(expression):
        (found,) = parse(expression.replace("AT", at), spec)
        assert found.tensor_spec(spec).shape == found(tensors).shape[1:]
        return found(tensors)

    for k in range(len(vectors)):
        product = w2[k] @ w1[k]
        np.testing.assert_allclose(value("product(AT.mlp.fc2.weight @ AT.mlp.fc1.weight)")[k], product, rtol=1e-5)
        np.testing.assert_allclose(value("diag(AT.mlp.fc2.weight @ AT.mlp.fc1.weight)")[k], np.diag(product), rtol=1e-5)
        np.testing.assert_allclose(value("trace(AT.mlp.fc2.weight@AT.mlp.fc1.weight)")[k], np.trace(product), rtol=1e-5)
        np.testing.assert_array_equal(value("center(AT.conv_dw.weight)")[k], filters[k, :, 0, 1, 1])
        np.testing.assert_allclose(value("column_means(AT.mlp.fc1.weight)")[k], w1[k].mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(value("row_means(AT.mlp.fc1.weight)")[k], w1[k].mean(axis=1), rtol=1e-5)
        np.testing.assert_allclose(value("mean(AT.mlp.fc1.weight)")[k], w1[k].mean(), rtol=1e-5)
    three = value("diag(AT.mlp.fc2.weight @ AT.mlp.fc1.weight @ AT.mlp.fc2.weight @ AT.mlp.fc1.weight)")
    np.testing.assert_allclose(three[0], np.diag(w2[0] @ w1[0] @ w2[0] @ w1[0]), rtol=1e-4)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("diag", "expected FUNCTION"),
        ("invert(stem.weight)", "one of product, diag"),
        ("diag(nothing.weight)", "matches no tensors; there are `stem.weight`"),
        ("diag(stages.0.blocks.{i}.mlp.fc2.weight @ stages.{s}.blocks.0.mlp.fc1.weight)", "placeholder {s}"),
        ("diag(stages.0.blocks.0.mlp.fc1.weight)", r"diag: expected a square matrix, found \(4, 3\)"),
        ("product(stages.0.blocks.0.mlp.fc1.weight @ stem.weight @ stem.weight)", "cannot be multiplied"),
        ("center(stem.weight)", "filters of odd side"),
        ("center(stages.0.blocks.0.mlp.fc1.weight)", "filters of odd side"),
    ],
)
def test_bad_expressions_and_shapes(spec, expression, message):
    with pytest.raises(UsageError, match=message):
        Coordinates(spec, "*", computed=[expression])


def test_coordinates_of_a_plain_selection_are_the_rows_themselves(spec, vectors):
    plan = Coordinates(spec, "*fc1.weight")
    rows = vectors[:, spec.columns(plan.reads)]
    assert plan(rows) is rows
    assert plan.spec == spec.select("*fc1.weight")


def test_coordinates_read_only_what_they_need(spec, vectors):
    plan = Coordinates(spec, "*.fc1.bias", computed=[DIAGONAL], fold_norms=True)
    assert set(plan.reads.names) == {
        f"stages.0.blocks.{i}.{name}"
        for i in range(2)
        for name in ("norm.weight", "norm.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight")
    }
    found = plan.spec.unpack(plan(vectors[:, spec.columns(plan.reads)]))
    folded = spec.unpack(fold_norms(vectors, spec))
    assert list(found) == [*spec.select("*.fc1.bias").names, *(c.name for c in parse(DIAGONAL, spec))]
    for name in spec.select("*.fc1.bias").names:
        np.testing.assert_allclose(found[name], folded[name], rtol=1e-5)
    for computed in parse(DIAGONAL, spec):
        np.testing.assert_allclose(found[computed.name], computed(folded), rtol=1e-5, atol=1e-6)


def test_only_computed_coordinates(spec, vectors):
    plan = Coordinates(spec, None, computed=[DIAGONAL])
    assert plan.spec.size == 6
    assert plan(vectors[:, spec.columns(plan.reads)]).shape == (7, 6)


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
