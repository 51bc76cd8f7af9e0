"""Scale is not structure: control arms with an initialiser's mean and variance of each tensor and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import ON_CPU
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn

from weightscope import init, plots
from weightscope.benchmarking import bench, plan_arms
from weightscope.errors import UsageError
from weightscope.init.scale_control import ScaleControl
from weightscope.networks import ConvNeXt, ViT
from weightscope.networks.sequences import Mamba, Mamba2
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.initial_weights import initial_weights


class Linear(nn.Module):
    """Pixels to logits."""

    def __init__(self, in_channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(in_channels * image_size**2, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def tripled(module: nn.Module, *, generator: torch.Generator) -> nn.Module:
    """Changes the scale of a weight and nothing else."""
    with torch.no_grad():
        module.head.weight.mul_(3)
    return module


def templates(module: nn.Module, *, generator: torch.Generator) -> nn.Module:
    """Helpful structure: rows are the mean images of the classes, with noise."""
    digits = load_digits()
    means = np.stack([digits.data[digits.target == c].mean(0) for c in range(10)]) / 16
    means = torch.from_numpy(means - means.mean(0)).float()
    with torch.no_grad():
        module.head.weight.copy_(means + 0.05 * torch.randn(means.shape, generator=generator))
    return module


RECIPE = Recipe.parse(
    {
        "network": {"type": Linear},
        "data": {"name": "digits", "train": 64, "test": 300},
        "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.001},
        "population": {"networks": 24, "tile": 24},
    }
)


@pytest.mark.slow
def test_scale_alone_shows_nothing_beyond_scale_and_planted_structure_does(tmp_path: Path) -> None:
    """False-alarm rate of the first assertion: 0.01, seed fixed."""
    result = bench(RECIPE, ["default", tripled, templates], tmp_path, control="scale", **ON_CPU)
    rows = {row["init"]: row for row in result.arms}
    assert list(rows) == ["default", "tripled", "tripled (scale only)", "templates", "templates (scale only)"]
    assert rows["tripled"]["beyond_scale_p"] > 0.01
    assert rows["templates"]["beyond_scale"] > 0.3, "more than 30 points"
    assert rows["templates"]["beyond_scale_p_holm"] < 1e-6
    assert rows["templates (scale only)"]["difference"] < 0.1, "which scale does not bring"
    assert rows["default"]["control"] is rows["default"]["beyond_scale"] is None
    accuracy = {init: np.array([r["accuracy"] for r in result.runs if r["init"] == init]) for init in rows}
    for name in ("tripled", "templates"):
        paired = accuracy[name] - accuracy[f"{name} (scale only)"]
        assert rows[name]["beyond_scale"] == pytest.approx(paired.mean())
        parts = rows[name]["beyond_scale"] + rows[f"{name} (scale only)"]["difference"]
        assert rows[name]["difference"] == pytest.approx(parts)
    assert "beyond scale" in result.text()
    written = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert written[3]["beyond_scale"] == rows["templates"]["beyond_scale"]
    result.figures()["scale"](tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 5000


Draw = Callable[[int], tuple[nn.Module, torch.Generator]]


def drawn_from(build: Callable[[], nn.Module]) -> Draw:
    """Network k and its generator."""

    def draw(k: int) -> tuple[nn.Module, torch.Generator]:
        torch.manual_seed(k)
        return build(), torch.Generator().manual_seed(1000 + k)

    return draw


def convnext() -> nn.Module:
    return ConvNeXt(8, 2, kernel_size=5, patch_size=2, in_channels=1)


def vit() -> nn.Module:
    return ViT(8, 2, width=16, depth=2, heads=2, num_classes=10, positions="learned", in_channels=1)


CONTROLLED = {
    "conv_covariance": (convnext, init.get("conv_covariance", preset="cifar-patch2")),
    "mimetic_mlp": (convnext, init.get("mimetic_mlp")),
    "fused projections": (vit, init.get("mimetic_attention")),
    "a constant": (vit, init.get("sinusoidal_positions")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTROLLED)
def test_the_control_has_the_moments_of_each_tensor_and_no_correlations(case: str) -> None:
    """Entries of 64 control draws against 64 draws of the arm; false-alarm rate below 1e-4 for each case."""
    draw, function = drawn_from(CONTROLLED[case][0]), CONTROLLED[case][1]
    control = ScaleControl.of(function, draw, draws=64)
    assert control.moments, "the initialiser changes something"
    samples: dict[str, dict[str, list[torch.Tensor]]] = {"default": {}, "arm": {}, "control": {}}
    for k in range(64):
        for kind, initialiser in (("default", init.get("default")), ("arm", function), ("control", control)):
            module, generator = draw(k)
            for tensor, value in initialiser(module, generator=generator).named_parameters():
                samples[kind].setdefault(tensor, []).append(value.detach().flatten())
    changed = {tensor for tensor, _ in control.moments}
    for tensor in samples["arm"]:
        default, arm, drawn = (torch.stack(samples[kind][tensor]).double() for kind in ("default", "arm", "control"))
        if tensor not in changed:
            assert torch.equal(default, drawn)
            assert torch.equal(default, arm)
            continue
        count = drawn.numel()
        split = 3 if "qkv.weight" in tensor else 1  # each of the three has moments of its own
        parts = list(zip(arm.chunk(split, 1), drawn.chunk(split, 1), strict=True))
        for wanted, found in parts:
            std = float(wanted.std(correction=0))
            assert abs(float(found.mean() - wanted.mean())) <= 5 * std * (len(parts) / count) ** 0.5 + 1e-9
            assert float(found.std()) == pytest.approx(std, rel=5 * (0.5 * len(parts) / count) ** 0.5, abs=1e-6)
            z = (found - found.mean()) / found.std()
            if std < 1e-6:
                continue
            neighbours = (z[:, 1:] * z[:, :-1]).mean()
            networks = (z[1:] * z[:-1]).mean()
            assert abs(float(neighbours)) < 5 / z.numel() ** 0.5
            assert abs(float(networks)) < 5 / z.numel() ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["conv_covariance", "mimetic_mlp", "fused projections"])
def test_a_paired_control_is_normal_and_independent_of_everything_but_its_default_entry(case: str) -> None:
    """False-alarm rate 1e-4 for each tensor, seeds fixed: Kolmogorov-Smirnov, and ranks against the default start."""
    draw, function = drawn_from(CONTROLLED[case][0]), CONTROLLED[case][1]
    control = ScaleControl.of(function, draw)
    assert set(control.bounds) == set(control.moments), "tensors of torch's layers"
    for k in (50, 51):
        default = dict(draw(k)[0].named_parameters())
        module, generator = draw(k)
        state = generator.get_state()
        found = dict(control(module, generator=generator).named_parameters())
        assert torch.equal(generator.get_state(), state), "nothing is drawn"
        for (name, i), (mean, std) in control.moments.items():
            parts = 3 if "qkv.weight" in name else 1
            entries, before = (v[name].detach().chunk(parts)[i].flatten().double() for v in (found, default))
            assert stats.kstest((entries - mean) / std, "norm").pvalue > 1e-4, name
            order = before.argsort()
            assert bool((entries[order].diff() >= 0).all()), "the same ranks"


def mamba(version: int) -> Draw:
    if version == 1:
        return drawn_from(lambda: Mamba(9, 16, 1, state=4))
    return drawn_from(lambda: Mamba2(9, 16, 1, state=4, head_width=8, groups=2))


def applied(function: Callable[..., nn.Module], draw: Draw, k: int) -> Any:
    module, generator = draw(k)
    return function(module, generator=generator).state_dict()


@pytest.mark.parametrize(
    ("version", "switch", "tensor", "heights", "changed"),
    [
        (2, "delta", "in_proj.weight", {"z": 32, "x": 32, "B": 8, "C": 8, "dt": 4}, "dt"),
        (2, "cb", "in_proj.weight", {"z": 32, "x": 32, "B": 8, "C": 8, "dt": 4}, "C"),
        (1, "cb", "x_proj.weight", {"dt": 1, "B": 4, "C": 4}, "C"),
    ],
)
def test_the_control_of_a_packed_projection_draws_what_the_initialiser_changes(
    version: int, switch: str, tensor: str, heights: dict[str, int], changed: str
) -> None:
    """The rows of its other matrices stay; those that change have the moments of their own."""
    switches = {"a": False, "delta": False, "cb": False, "convolution": False, switch: True}
    function = init.get("mimetic_ssm", **switches)
    control, name = ScaleControl.of(function, mamba(version)), f"backbone.layers.0.mixer.{tensor}"
    weights = [applied(f, mamba(version), 7)[name] for f in (init.get("default"), function, control)]
    default, arm, drawn = (dict(zip(heights, w.split(list(heights.values())), strict=True)) for w in weights)
    assert [name for name in heights if not torch.equal(default[name], drawn[name])] == [changed]
    assert float(drawn[changed].std(correction=0)) == pytest.approx(float(arm[changed].std(correction=0)), rel=0.4)
    assert not torch.equal(arm[changed], drawn[changed]) or switch == "delta", "a constant is its own control"


@pytest.mark.parametrize("version", [1, 2])
def test_the_control_of_rates_draws_from_those_of_the_initialiser(version: int) -> None:
    """Of exp(A_log), a Gaussian of the same variance has values thousands of times the largest."""
    function = init.get("mimetic_ssm", delta=False, cb=False, convolution=False)
    control, name = ScaleControl.of(function, mamba(version)), "backbone.layers.0.mixer.A_log"
    arm, drawn = (torch.cat([applied(f, mamba(version), k)[name] for k in range(32)]) for f in (function, control))
    assert set(drawn.flatten().tolist()) <= set(arm.flatten().tolist())
    assert stats.ks_2samp(drawn.flatten(), arm.flatten()).pvalue > 1e-4
    if version == 1:
        assert float(arm.std(0).max()) == 0, "each state has its rate in all channels"
        assert float(drawn.std(0).min()) > 1, "which the control does not know"


def test_what_is_not_uniform_by_default_is_drawn() -> None:
    """Learned positions are normal, GPSA's W_V starts from the identity, norms from ones."""
    draw = drawn_from(lambda: ViT(8, 4, 16, 1, 4, 10, positions="learned", attention="gpsa"))

    def doubled(module: nn.Module, *, generator: torch.Generator) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2).add_(0.01 * torch.randn(parameter.shape, generator=generator))
        return module

    control = ScaleControl.of(doubled, draw)
    assert ("pos_embed", 0) not in control.bounds
    assert [i for i in range(3) if ("blocks.0.attn.qkv.weight", i) in control.bounds] == [0, 1]
    assert not any("norm" in name for name, _ in control.bounds)
    module = doubled(draw(0)[0], generator=draw(0)[1])
    with pytest.raises(UsageError, match=r"expected default weights in \+-.*as its constructor made it"):
        control(module, generator=torch.Generator())


@pytest.mark.parametrize("draws", [2, 16, 32])
def test_a_constant_default_is_not_taken_for_uniform(draws: int) -> None:
    """A bias of one entry that starts from zero, with few draws; its control would be a constant as well."""

    def layer() -> nn.Module:
        layer = nn.Linear(64, 1)
        nn.init.zeros_(layer.bias)
        return layer

    def noisy(module: nn.Module, *, generator: torch.Generator) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        return module

    draw = drawn_from(layer)
    control = ScaleControl.of(noisy, draw, draws=draws)
    assert set(control.bounds) == {("weight", 0)}
    biases = [float(control(*draw(k)[:1], generator=draw(k)[1]).bias.detach()) for k in range(3)]
    assert len(set(biases)) == 3


def test_pairing_lowers_the_variance_of_what_structure_adds() -> None:
    """First losses of arm and control over 30 networks, the control with the noise of the default start or its own."""
    data = load_digits()
    images = torch.from_numpy(data.images[:200]).float()[:, None] / 8 - 1
    labels = torch.from_numpy(data.target[:200])
    draw, function = drawn_from(lambda: ConvNeXt(8, 1, 3, 4, in_channels=1, layer_scale=None)), init.get("mimetic_mlp")
    paired = ScaleControl.of(function, draw)
    alone = ScaleControl(paired.moments)
    assert paired.bounds
    assert not alone.bounds

    def loss(initialiser: Any, k: int) -> float:
        module, generator = draw(k)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(initialiser(module, generator=generator)(images), labels))

    arm = np.array([loss(function, k) for k in range(100, 130)])
    controls = [np.array([loss(c, k) for k in range(100, 130)]) for c in (paired, alone)]
    variances = [np.var(arm - control, ddof=1) for control in controls]
    assert variances[0] / variances[1] < stats.f.ppf(1e-3, 29, 29), variances
    apart = controls[0] - controls[1]
    assert abs(apart.mean()) < 4 * apart.std() / 30**0.5, "one expectation"


def test_the_structure_that_the_control_lacks_is_there_in_the_arm() -> None:
    """The test above can fail: neighbouring entries of the arm's filters are correlated."""
    build, function = CONTROLLED["conv_covariance"]
    z = applied(function, drawn_from(build), 0)["stages.0.blocks.1.conv_dw.weight"]
    z = (z - z.mean()) / z.std()
    assert float((z[..., 1:] * z[..., :-1]).mean()) > 0.2


@pytest.mark.usefixtures("trusted")
@pytest.mark.slow
def test_network_k_of_a_control_does_not_depend_on_the_others() -> None:
    recipe = RECIPE.replace({"init": {"name": f"{__name__}:templates", "control": "scale"}})

    def build() -> nn.Module:
        return Linear(1, 8, 10)

    whole, _ = initial_weights(recipe, range(6), build)
    part, _ = initial_weights(recipe.replace({"population.networks": 99}), [4, 5], build)
    np.testing.assert_array_equal(whole[4:], part)
    assert not np.array_equal(whole[0], whole[1])


def test_frozen_arms_have_frozen_controls_and_the_default_has_none() -> None:
    arms = plan_arms(RECIPE, ["default", tripled], frozen="head.bias", control="scale")
    inits = ["default", "tripled", "tripled (scale only)"]
    assert [arm.init for arm in arms] == [*inits, *(f"{init} (frozen)" for init in inits)]
    assert [arm.recipe.init[0].control for arm in arms[:3]] == [None, None, "scale"]
    artifact = plan_arms(RECIPE, [InitConfig(artifact="fit.safetensors")], control="scale")[1]
    assert (artifact.init, artifact.recipe.init[0].artifact) == ("fit (scale only)", "fit.safetensors")
    with pytest.raises(UsageError, match="control: expected one of 'scale', found 'mean'"):
        plan_arms(RECIPE, ["default"], control="mean")
    with pytest.raises(UsageError, match="expected initialisers with controls"):
        plots.scale_and_structure([{"init": "default", "epochs": 1, "control": None}])
