"""Scale is not structure: control arms with an initialiser's mean and variance of each tensor and nothing else."""

import json
from collections.abc import Callable
from functools import cache
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
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.benchmarking import bench, plan_arms
from weightscope.errors import UsageError
from weightscope.init.controls import ScaleControl, UncorrelatedControl
from weightscope.networks import ConvNeXt, ViT
from weightscope.networks.sequences import Mamba, Mamba2
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.initial_weights import initial_weights

pytestmark = pytest.mark.usefixtures("trained_here")


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
    means = class_means()
    with torch.no_grad():
        module.head.weight.copy_(means + 0.05 * torch.randn(means.shape, generator=generator))
    return module


@cache
def class_means() -> torch.Tensor:
    digits = load_digits()
    means = np.stack([digits.data[digits.target == c].mean(0) for c in range(10)]) / 16
    return torch.from_numpy(means - means.mean(0)).float()


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
    """False-alarm rate of the assertions about p: 0.01, seed fixed."""
    controls = ("scale", "uncorrelated")
    result = bench(RECIPE, ["default", tripled, templates], tmp_path, control=controls, **ON_CPU)
    rows = {row["init"]: row for row in result.arms}
    suffixes = ("", " (scale only)", " (uncorrelated)")
    assert list(rows) == ["default", *(f"{name}{end}" for name in ("tripled", "templates") for end in suffixes)]
    assert rows["tripled"]["beyond_scale_p"] > 0.01
    assert rows["templates"]["beyond_scale"] > 0.3, "more than 30 points"
    assert rows["templates"]["beyond_scale_p_holm"] < 1e-6
    assert rows["templates (scale only)"]["difference"] < 0.1, "which scale does not bring"
    assert rows["tripled"]["correlations_p"] > 0.01
    assert rows["templates"]["correlations"] > 0.3, "pixels of the templates are correlated"
    assert rows["default"]["control"] is rows["default"]["beyond_scale"] is None
    accuracy = {init: np.array([r["accuracy"] for r in result.runs if r["init"] == init]) for init in rows}
    for name in ("tripled", "templates"):
        paired = accuracy[name] - accuracy[f"{name} (scale only)"]
        assert rows[name]["beyond_scale"] == pytest.approx(paired.mean())
        parts = rows[name]["beyond_scale"] + rows[f"{name} (scale only)"]["difference"]
        assert rows[name]["difference"] == pytest.approx(parts)
    assert "beyond scale" in result.text()
    written = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert next(row for row in written if row["init"] == "templates") == rows["templates"]
    for name in ("scale", "correlations"):
        result.figures()[name](tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


Draw = Callable[[int], tuple[nn.Module, torch.Generator]]


def drawn_from(build: Callable[[], nn.Module]) -> Draw:
    """Network k and its generator."""

    def draw(k: int) -> tuple[nn.Module, torch.Generator]:
        torch.manual_seed(k)
        return build(), torch.Generator().manual_seed(1000 + k)

    return draw


def convnext() -> nn.Module:
    return ConvNeXt(8, 1, kernel_size=5, patch_size=2, in_channels=1)


def vit() -> nn.Module:
    return ViT(8, 2, width=16, depth=1, heads=2, num_classes=10, positions="learned", in_channels=1)


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


@pytest.mark.parametrize(("mode", "kept"), [("scalar", True), ("rows", True), ("anticorrelated", False)])
def test_a_control_keeps_the_default_weights_that_the_initialiser_adds_to(mode: str, kept: bool) -> None:
    """The slope on the default weights is 1 to rounding, or that of fresh numbers; a constant is its own control."""
    build, function = CONTROLLED["mimetic_mlp"][0], init.get("mimetic_mlp", mode=mode, sigma=2.0)
    draw, name = drawn_from(build), "stages.0.blocks.0.mlp.fc1.weight"
    for control in both_controls(function, draw, permutation_spec(build()), draws=32):
        default, arm, drawn = (applied(f, draw, 70)[name].double() for f in (init.get("default"), function, control))
        base, found = (x - x.mean(0) for x in (default, drawn))  # without what "rows" gives to all hidden units
        slope = float((base * found).sum() / (base * base).sum())
        if not kept:
            assert control.added == frozenset()
            assert abs(slope) < 5 / default.numel() ** 0.5 * float(drawn.std() / default.std())
            continue
        noise = float((drawn - default).std() / default.std()) / default.numel() ** 0.5
        assert slope == pytest.approx(1, abs=5 * noise + 1e-6)
        assert torch.allclose(arm, drawn, atol=1e-6) == (mode == "scalar")
        assert float((drawn - default).std()) == pytest.approx(float((arm - default).std()), rel=0.5, abs=1e-6)


def both_controls(function: Any, draw: Draw, by_name: Any, draws: int = 48) -> tuple[ScaleControl, UncorrelatedControl]:
    return ScaleControl.of(function, draw, draws), UncorrelatedControl.of(function, draw, by_name, draws)


def test_the_uncorrelated_control_has_the_moments_of_every_part_and_no_correlations() -> None:
    """Of 64 networks pixels of filters and column means keep their variances; neighbouring pixels do not correlate.

    Variances of 64 x 8 entries have a relative standard error of 0.06 each; the largest is 30 times the smallest. Rows
    added to fc1 are column means 5 times as large as those of independent entries, which the scale control has.
    """
    build, function = CONTROLLED["conv_covariance"]
    draw, name = drawn_from(build), "stages.0.blocks.0.conv_dw.weight"
    controls = both_controls(function, draw, permutation_spec(build()))
    arm, scale, parts = (
        torch.stack([applied(f, draw, k)[name][:, 0] for k in range(100, 164)]).double() for f in (function, *controls)
    )
    wanted = arm.var((0, 1))
    assert float(wanted.max() / wanted.min()) > 3
    np.testing.assert_allclose(parts.var((0, 1)) / wanted, 1, atol=5 * 0.06 * 2**0.5)
    assert float((scale.var((0, 1)) / wanted).max()) > 2, "which pooled moments are not"

    def neighbours(filters: torch.Tensor) -> float:
        z = filters / filters.std((0, 1))
        return float((z[..., 1:] * z[..., :-1]).mean())

    assert neighbours(arm) > 0.2
    assert abs(neighbours(parts)) < 5 / arm.numel() ** 0.5
    function, name = init.get("mimetic_mlp", mode="rows", sigma=2.0), "stages.0.blocks.0.mlp.fc1.weight"
    controls = both_controls(function, draw, permutation_spec(build()))
    arm, scale, parts = (
        float(torch.stack([applied(f, draw, k)[name] for k in range(100, 164)]).mean(1).var())
        for f in (function, *controls)
    )
    assert parts == pytest.approx(arm, rel=5 * (2 / (64 * 8)) ** 0.5 * 2**0.5)
    assert scale < arm / 5


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


@pytest.mark.slow
def test_network_k_of_a_control_does_not_depend_on_the_others() -> None:
    recipe = RECIPE.replace({"init": {"name": f"{__name__}:templates", "control": "scale"}})

    def build() -> nn.Module:
        return Linear(1, 8, 10)

    whole = initial_weights(recipe, range(6), build)
    part = initial_weights(recipe.replace({"population.networks": 99}), [4, 5], build)
    np.testing.assert_array_equal(whole[4:], part)
    assert not np.array_equal(whole[0], whole[1])


def test_frozen_arms_have_frozen_controls_and_the_default_has_none() -> None:
    arms = plan_arms(RECIPE, ["default", tripled], frozen="head.bias", control="scale")
    inits = ["default", "tripled", "tripled (scale only)"]
    assert [arm.init for arm in arms] == [*inits, *(f"{init} (frozen)" for init in inits)]
    assert [arm.recipe.init[0].control for arm in arms[:3]] == [None, None, "scale"]
    artifact = plan_arms(RECIPE, [InitConfig(artifact="fit.safetensors")], control="scale")[1]
    assert (artifact.init, artifact.recipe.init[0].artifact) == ("fit (scale only)", "fit.safetensors")
    with pytest.raises(UsageError, match="control: expected one of 'scale', 'uncorrelated', found 'mean'"):
        plan_arms(RECIPE, ["default"], control="mean")
    with pytest.raises(UsageError, match="expected initialisers with controls"):
        plots.scale_and_structure([{"init": "default", "epochs": 1, "control": None}])
