import numpy as np
import pytest
import shims

from weightscope.errors import SpecError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.coordinates import Coordinates, norm_pairs


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
