"""Exchangeable structures in networks of other widths and depths, refused where they do not fit, and exported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from weightscope._util.names import block_of
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.errors import SpecError
from weightscope.fits import load_artifact, resized_fit, resizing
from weightscope.fits.exchangeable import Exchangeable
from weightscope.fits.fitting import fit
from weightscope.fits.resizing import default_stds, resized
from weightscope.init import load_init
from weightscope.init.from_artifact import PopulationInit
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.exchangeable import ExchangeableMoments
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightArray

BLOCKS = "stages.0.blocks"


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("stages.0.blocks.1.mlp.fc1.weight", "stages.0.blocks.1"),
        ("layers.1.blocks.3.mlp.fc1.weight", "layers.1.blocks.3"),  # Swin, whose `layers` are stages
        ("transformer.h.3.attn.c_attn.weight", "transformer.h.3"),  # GPT-2
        ("visual.transformer.resblocks.3.ln_1.bias", "visual.transformer.resblocks.3"),  # CLIP
        ("encoder.block.3.layer.0.SelfAttention.q.weight", "encoder.block.3"),  # T5
        ("encoder.block.3.layer.1.DenseReluDense.wi.weight", "encoder.block.3"),
        ("features.1.0.block.3.weight", ""),  # layers of one block of torchvision's ConvNeXt
        ("stem.weight", ""),
    ],
)
def test_blocks_are_found_in_the_names_of_families(name: str, block: str) -> None:
    assert block_of(name) == block


def convnext(width: int = 16, depth: int = 2, kernel: int = 3) -> nn.Module:
    return ConvNeXt(width, depth, kernel, 2, 4, expansion=2, in_channels=1, layer_scale=None)


def planted(n: int = 150) -> tuple[np.ndarray, WeightSpec]:
    """ConvNeXts (n, D) of 1.5 times the default deviation, with means, and with correlations over the channels.

    Norm's bias and the column means of fc1 in each block: -0.6. Row means of fc2 in the two blocks: -0.5.
    """
    spec, rng = WeightSpec.of(convnext()), np.random.default_rng(0)
    scale = {name: 1.5 * deviation or 0.1 for name, deviation in default_stds(spec).items()}
    drawn = {t.name: scale[t.name] * rng.standard_normal((n, *t.shape)) for t in spec.tensors}
    shared = rng.standard_normal((3, n, 16))
    for b, sign in ((0, 1.0), (1, -1.0)):
        one, two, bias = (f"{BLOCKS}.{b}.{name}" for name in ("mlp.fc1.weight", "mlp.fc2.weight", "norm.bias"))
        mixed(drawn[one].swapaxes(1, 2), np.sqrt(0.6) * shared[b], scale[one], 0.6)
        drawn[bias][:] = scale[bias] * (np.sqrt(0.4) * rng.standard_normal((n, 16)) - np.sqrt(0.6) * shared[b])
        mixed(drawn[two], sign * np.sqrt(0.5) * shared[2], scale[two], 0.5)
    for name in ("stem.1", f"{BLOCKS}.0.norm", f"{BLOCKS}.1.norm", "head.norm"):
        drawn[f"{name}.weight"] += 1.0
    return np.concatenate([drawn[t.name].reshape(n, -1) for t in spec.tensors], axis=1), spec


def mixed(matrices: np.ndarray, part: np.ndarray, scale: float, share: float) -> None:
    """Put a part (n, channels) into the row means of matrices (n, channels, units), which keep their variance."""
    own = matrices.mean(2, keepdims=True)
    matrices += (np.sqrt(1 - share) - 1) * own + scale * part[..., None] / np.sqrt(matrices.shape[2])


def whole(x: np.ndarray, spec: WeightSpec) -> Exchangeable:
    return Exchangeable.fit(x, spec, **Exchangeable.context(spec, spec))


@pytest.fixture(scope="module")
def fitted() -> Exchangeable:
    return whole(*planted())


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, spec = planted(40)
    result = fit(WeightArray(x, spec), "*", structure="exchangeable", joint="all")
    return result.save(tmp_path_factory.mktemp("fit") / "fit.safetensors")


def correlation(fitted: Exchangeable, groups: tuple[str, ...], a: str, b: str) -> float:
    kind, found = next(
        (k, c) for k, c in zip(fitted.permutations.types, fitted.correlations, strict=True) if k.groups == groups
    )
    return float(found[kind.slices[a], kind.slices[b]][0, 0])


@pytest.mark.slow
def test_another_width_has_the_same_standardised_covariance(fitted: Exchangeable) -> None:
    channels = ("channels.0",)
    pair = f"{BLOCKS}.0.mlp.fc2.weight", f"{BLOCKS}.1.mlp.fc2.weight"
    assert correlation(fitted, channels, *pair) < -0.4  # the planted correlation is there to be carried over
    assert correlation(fitted, channels, f"{BLOCKS}.1.norm.bias", f"{BLOCKS}.1.mlp.fc1.weight") < -0.5
    network = WeightSpec.of(convnext(24))
    wide = resized(fitted, network)[0]
    assert wide is not None
    assert wide.spec == network
    n = 150
    drawn = ExchangeableMoments(network, permutation_spec(network)).update(wide.sample(np.random.default_rng(1), n))
    before, now = default_stds(fitted.spec), default_stds(network)
    for found, factor, expected in zip(drawn.covariances(), fitted.factors, fitted.correlations, strict=True):
        # 2,400 correlations and deviations in all, each beyond 5.5 standard errors with probability 4e-8.
        error = np.sqrt((1 - expected**2) ** 2 / found.samples)
        assert (np.abs(found.correlation() - expected) <= 5.5 * error + 1e-12).all()
        ratio = np.concatenate(
            [np.full(v.multiplicity, now[v.tensor] / (before[v.tensor] or 1)) for v in found.kind.views]
        )
        wanted = np.sqrt(np.square(factor).sum(1)) * np.where(ratio == 0, 1, ratio)
        np.testing.assert_allclose(
            np.sqrt(found.covariance.diagonal()) / wanted, 1, atol=5.5 / np.sqrt(2 * found.samples)
        )
    means = network.unpack(wide.mean), fitted.spec.unpack(fitted.mean)
    for name, ratio in ((f"{BLOCKS}.0.norm.weight", 1.0), (f"{BLOCKS}.0.mlp.fc2.weight", np.sqrt(16 / 24))):
        np.testing.assert_allclose(means[0][name].mean(), ratio * means[1][name].mean(), rtol=1e-12)
    assert resized(fitted, fitted.spec)[0] is not None
    np.testing.assert_allclose(resized(fitted, fitted.spec)[0].covariance(), fitted.covariance(), atol=1e-12)


def test_a_matrix_on_one_group_keeps_its_parts_at_another_width() -> None:
    """Means and standard deviations of diagonal and rest, and the correlation of the diagonal with a bias."""

    def network(n: int) -> tuple[WeightSpec, PermutationSpec]:
        spec = WeightSpec([TensorSpec("mid.weight", (n, n, 1, 2)), TensorSpec("mid.bias", (n,))])
        return spec, PermutationSpec.from_axes(spec, {"mid.weight": ("c", "c", None, None), "mid.bias": ("c",)})

    (spec, permutations), rng = network(6), np.random.default_rng(0)
    x = rng.standard_normal((400, spec.size))
    tensors = spec.unpack(x)
    tensors["mid.weight"] -= 1.0
    diagonal = tensors["mid.weight"][:, range(6), range(6), 0]  # (N, 6, 2)
    tensors["mid.weight"][:, range(6), range(6), 0] = 3 * (diagonal + 2 + 0.5 * tensors["mid.bias"][..., None])
    fitted = Exchangeable.fit(x, spec, permutations=permutations)
    np.testing.assert_allclose(resized(fitted, spec)[0].covariance(), fitted.covariance(), atol=1e-12)
    wide, problems = resized(fitted, network(10)[0])
    assert problems == {}
    drawn = wide.spec.unpack(wide.sample(rng, 400))
    bias, scale = drawn["mid.bias"], np.sqrt(6 / 10)
    on, off = np.eye(10, dtype=bool), ~np.eye(10, dtype=bool)
    of = {"on": drawn["mid.weight"][:, on, 0], "off": drawn["mid.weight"][:, off, 0]}
    for name, mean, std in (("on", 3.0, 3 * np.sqrt(1.25)), ("off", -1.0, 1.0)):
        np.testing.assert_allclose(of[name].mean(), scale * mean, atol=0.1)
        np.testing.assert_allclose(of[name].std(), scale * std, rtol=0.05)
    assert abs(np.corrcoef(of["on"][..., 1].ravel(), bias.ravel())[0, 1] - 0.5 / np.sqrt(1.25)) < 0.06
    small, problems = resized(fitted, network(3)[0])
    assert problems == {}
    assert small.sample(rng, 2).shape == (2, 21)
    three = Exchangeable.fit(small.sample(rng, 50), network(3)[0], permutations=network(3)[1])
    assert "mid.weight" in resized(three, spec)[1]  # three units have no symmetric part


def test_a_deeper_network_keeps_each_block_and_the_sum_of_those_made_from_one(fitted: Exchangeable) -> None:
    deep = resized(fitted, WeightSpec.of(convnext(16, 4)))[0]
    assert deep is not None
    channels, r = ("channels.0",), correlation
    fc2 = [f"{BLOCKS}.{b}.mlp.fc2.weight" for b in range(4)]
    across = r(fitted, channels, *fc2[:2])
    for b, old in enumerate((0, 0, 1, 1)):
        within = [(f"{BLOCKS}.{i}.norm.bias", f"{BLOCKS}.{i}.mlp.fc1.weight") for i in (b, old)]
        assert r(deep, channels, *within[0]) == pytest.approx(r(fitted, channels, *within[1]))
        stem = r(fitted, channels, "stem.0.bias", f"{BLOCKS}.{old}.norm.bias") / np.sqrt(2)
        assert r(deep, channels, "stem.0.bias", f"{BLOCKS}.{b}.norm.bias") == pytest.approx(stem)
    assert r(deep, channels, fc2[0], fc2[1]) == pytest.approx(0, abs=1e-12)
    assert r(deep, channels, fc2[0], fc2[2]) == pytest.approx(across / 2)
    # So the normalised sums of the blocks that took one block's covariance are as strongly correlated as these were.
    sums = sum(r(deep, channels, fc2[i], fc2[j]) for i in (0, 1) for j in (2, 3)) / 2
    assert sums == pytest.approx(across)
    notes = "; ".join(deep.notes())
    assert f"{BLOCKS}.1 from {BLOCKS}.0, {BLOCKS}.2 from {BLOCKS}.1" in notes
    assert (
        f"taken more than once: {BLOCKS}.0 2 times, {BLOCKS}.1 2 times; covariances across blocks are divided" in notes
    )


def test_a_shallower_network_leaves_blocks_out() -> None:
    x, rng = WeightSpec.of(convnext(8, 4)), np.random.default_rng(0)
    fitted = whole(rng.standard_normal((30, x.size)) @ np.diag(rng.uniform(1, 2, x.size)), x)
    structure, problems = resized(fitted, WeightSpec.of(convnext(8, 2)))
    assert problems == {}
    assert structure is not None
    pairs = [(f"{BLOCKS}.{i}.norm.bias", f"{BLOCKS}.{j}.norm.bias") for i, j in ((0, 1), (0, 3))]
    assert correlation(structure, ("channels.0",), *pairs[0]) == correlation(fitted, ("channels.0",), *pairs[1])
    assert f"blocks left out: {BLOCKS}.1, {BLOCKS}.2" in structure.notes()


@pytest.mark.parametrize(
    "make",
    [
        lambda width, depth: ViT(8, 2, width, depth, 2, 4, in_channels=1),
        lambda width, depth: ConvMixer(width, depth, 3, 2, 4, in_channels=1),
        lambda width, depth: ConvNeXt((width, 2 * width), (1, depth), 3, 2, 4, in_channels=1, expansion=2),
    ],
)
def test_every_architecture_can_be_wider_and_deeper(make) -> None:
    spec = WeightSpec.of(make(8, 2))
    rng = np.random.default_rng(0)
    strong = rng.standard_normal((40, 1)) * rng.standard_normal((1, spec.size))  # far from independent
    fitted = whole(rng.standard_normal((40, spec.size)) + strong, spec)
    for width, depth in ((12, 3), (16, 1)):
        network = WeightSpec.of(make(width, depth))
        structure, problems = resized(fitted, network)  # Cholesky succeeds: everything is positive definite
        assert problems == {}
        assert structure is not None
        assert structure.spec == network
        assert np.isfinite(structure.log_prob(structure.sample(rng, 2))).all()


def logits(module: nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        return float(module(images).std())


@pytest.mark.slow
def test_outputs_have_the_size_that_they_had(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn networks against default ones, at the fitted width and at four times that."""
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def ratio(width: int) -> float:
        init, generator = load_init(artifact), torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        default = np.mean([logits(convnext(width), images) for _ in range(40)])
        return float(np.mean([logits(init(convnext(width), generator=generator), images) for _ in range(40)]) / default)

    # Networks differ by 40 % in the size of their logits, so a ratio of two means of 40 by 9 %, and that of two ratios
    # by 13 % (one standard error): 0.4 is 3.1 of them, and 1.8 is exceeded, if it is 2, with a probability of 0.8.
    fitted = ratio(16)
    assert ratio(64) / fitted == pytest.approx(1, abs=0.4)
    monkeypatch.setattr(resizing, "default_stds", lambda network: dict.fromkeys(network.names, 0.0))
    assert ratio(64) / fitted > 1.8  # the same stds at every width would show


def test_the_initialiser_says_what_it_rescaled(artifact: Path) -> None:
    init = load_init(artifact)
    same = init(convnext(), generator=torch.Generator().manual_seed(0))
    assert init.report.notes == ()
    module = init(convnext(32, 3), generator=torch.Generator().manual_seed(0))
    assert set(init.report.touched) == set(WeightSpec.of(module).names)
    text = str(init.report)
    assert "resized: `channels.0 16 -> 32`" in text
    assert "stds x 0.707 (fan-in): `stages.0.blocks.0.mlp.fc1.weight`" in text
    assert f"{BLOCKS}.1 from {BLOCKS}.1" in text
    again = PopulationInit(load_artifact(artifact))(convnext(32, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.stages[0].blocks[2].mlp.fc2.weight, module.stages[0].blocks[2].mlp.fc2.weight)
    repeated = init(convnext(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(repeated.head.fc.weight, same.head.fc.weight)


def test_other_fixed_entries_are_refused_by_name(artifact: Path) -> None:
    init, module = load_init(artifact), convnext(32, 2, kernel=5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(SpecError, match=r"0.conv_dw.weight` expected axes that are not renumbered of .*, likewise "):
        init(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    init(module, generator=torch.Generator().manual_seed(0), strict=False)
    filters = {f"{BLOCKS}.{b}.conv_dw.weight" for b in (0, 1)}
    assert set(init.report.absent) == filters
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(before) - filters
    headless = convnext(32)
    headless.head = nn.Identity()
    with pytest.raises(SpecError, match=r"`head.norm.weight` is missing, likewise `head.norm.bias`, `head.fc.weight`"):
        init(headless)


def test_ones_own_permutations_can_be_wider_but_not_deeper() -> None:
    def spec(width: int, blocks: int = 1) -> WeightSpec:
        rows = [(f"blocks.{b}.up.weight", (2 * width, width)) for b in range(blocks)]
        return WeightSpec(TensorSpec(*row) for row in [("read.weight", (width, 5)), *rows])

    axes = {"read.weight": ("c", None), "blocks.0.up.weight": ("h", "c")}
    x = np.random.default_rng(0).standard_normal((30, spec(4).size))
    result = fit(WeightArray(x, spec(4)), "*", structure="exchangeable", joint="all", permutations=axes)
    wide = resized_fit(result, spec(6))
    assert wide.spec == spec(6)
    assert wide.sample(np.random.default_rng(0), 2).shape == (2, spec(6).size)
    with pytest.raises(SpecError, match="another depth needs the permutation specification of a known architecture"):
        resized_fit(result, spec(4, 3))


class Concatenated(nn.Module):
    """Channels twice in the columns of a linear layer, each over nine pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(2, 4, 1), nn.Linear(72, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).relu()
        return self.head(self.fc(torch.cat([y, 2 * y], 1).flatten(1)).relu())


def test_parts_of_columns_that_were_derived_are_stored(tmp_path: Path) -> None:
    spec = WeightSpec.of(Concatenated())
    permutations = permutation_spec(Concatenated(), torch.randn(2, 2, 3, 3))
    assert {view.name: view.shape for view in permutations.views}["fc.weight[1]"] == (5, 4, 9)
    rows = np.random.default_rng(0).standard_normal((30, spec.size)) + 1
    source = WeightArray(rows, spec)
    result = fit(source, "*", structure="exchangeable", joint="all", permutations=permutations)
    result.save(tmp_path / "net.safetensors")
    again = load_artifact(tmp_path / "net.safetensors")
    ours, theirs = (one.sample(np.random.default_rng(1), 2) for one in (result, again))
    np.testing.assert_array_equal(ours, theirs)


def test_the_spec_of_the_whole_network_is_stored_where_only_some_tensors_were_fitted(fitted: Exchangeable) -> None:
    part = fitted.spec.select("*.mlp.fc?.weight")
    part_fit = Exchangeable.fit(
        planted(40)[0][:, fitted.spec.columns(part)], part, **Exchangeable.context(fitted.spec, part)
    )
    assert Exchangeable.from_tensors(part_fit.to_tensors(), part).network == fitted.spec


def test_default_stds_are_those_of_torch() -> None:
    torch.manual_seed(0)
    networks = [convnext(32) for _ in range(60)]
    for name, expected in default_stds(WeightSpec.of(networks[0])).items():
        values = torch.stack([network.state_dict()[name] for network in networks])
        # The deviation of a uniform sample of m has a relative standard error of 0.45 / sqrt(m).
        assert float(values.std()) == pytest.approx(expected, rel=5.5 * 0.45 / np.sqrt(values.numel()))
