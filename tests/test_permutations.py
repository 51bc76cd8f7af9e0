"""Permutation specifications, proved by function: renumbering units must not change what a network computes."""

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from programs import run
from safetensors.torch import save_file
from torch import nn

from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.anatomy.permutation_groups import (
    apply_permutation,
    change_of_function,
    check_permutations,
    permutation_spec,
    permutations_of,
)
from weightscope.errors import AnatomyError, SpecError, UsageError
from weightscope.fits.fitting import fit
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.networks.building import build_for
from weightscope.networks.sequences import Mamba, Mamba2
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutation_rules import read_permutations
from weightscope.statistics.permutations import PermutationSpec, View
from weightscope.statistics.samples import WeightArray

NETWORKS = {
    "convnext": lambda: ConvNeXt(8, 2, 5, 2, 10, in_channels=1, expansion=2, layer_scale=0.1),
    "convnext of two stages": lambda: ConvNeXt((8, 12), (1, 2), 3, 2, 10, in_channels=1, expansion=2),
    "convnext, learned sum": lambda: ConvNeXt(8, 2, 5, 2, 10, in_channels=1, learned_sum=0.1),
    "convmixer": lambda: ConvMixer(12, 3, 5, 2, 10, in_channels=1),
    "convmixer, no residual": lambda: ConvMixer(12, 3, 5, 2, 10, in_channels=1, residual="none", norm="layer"),
    "vit, skip": lambda: ViT(8, 2, 24, 2, 3, 10, in_channels=1, layer_scale=0.5, layer_scale_on="skip"),
    "vit, learned sum": lambda: ViT(8, 2, 24, 1, 3, 10, in_channels=1, learned_sum=0.1, drop_path=0.5),
    "vit, averages": lambda: ViT(8, 2, 24, 2, 3, 10, in_channels=1),
    "vit, gpsa": lambda: ViT(8, 2, 16, 1, 4, 10, in_channels=1, attention="gpsa", pool="token"),
    "vit, conv-logits": lambda: ViT(8, 2, 24, 1, 3, 10, in_channels=1, attention="conv-logits"),
    "vit, conv-map": lambda: ViT(8, 2, 24, 1, 3, 10, in_channels=1, attention="conv-map", qkv_bias=False),
    "vit, conv-softmax-map": lambda: ViT(8, 2, 24, 1, 3, 10, in_channels=1, attention="conv-softmax-map"),
    "vit, token": lambda: ViT(8, 2, 24, 1, 2, 10, in_channels=1, pool="token", positions="learned", layer_scale=0.1),
}


def test_a_convmixer_with_two_residuals_is_not_taken_for_the_published_one() -> None:
    """All its blocks share their channels, so the groups of the published network would change its function."""
    with pytest.raises(AnatomyError, match=r"nearest is ConvMixer, without `?blocks\.0\.1\.fn\.0\.weight"):
        permutation_spec(ConvMixer(12, 3, 5, 2, 10, in_channels=1, residual="both"))


def check_members(network: nn.Module, tokens: torch.Tensor, known: PermutationSpec, group: str, count: int) -> None:
    """A group has this many members, whose tensors move, and leaving out any one of them changes the function."""
    moved = apply_permutation(copy.deepcopy(network), rng=np.random.default_rng(0)).state_dict()
    members = [view for view in known.views if group in view.axes]
    assert len(members) == count
    for left in members:
        assert not torch.equal(moved[left.tensor], network.state_dict()[left.tensor])
        axes = tuple(None if axis == group else axis for axis in left.axes)
        views = tuple(replace(view, axes=axes) if view is left else view for view in known.views)
        assert check_permutations(network, tokens, replace(known, views=views)) > 1e-6, left.name


def shaken(module: nn.Module) -> nn.Module:
    """In float64 with every weight and statistic random, so that no symmetry of the start hides an error."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=g))
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.add_(torch.rand(buffer.shape, generator=g))
            elif name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=g))
    return module.double().eval()


def images() -> torch.Tensor:
    return torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


MIXED = {"layers": ["default", "attention", "default"]}


@pytest.mark.parametrize(
    ("make", "sizes", "members"),  # in_proj twice, convolution, bias, x_proj, dt_proj, bias, A_log, D, out_proj: 10
    [
        (lambda: Mamba(9, 8, 3, state=3), {"inner.0": 16}, 10),
        (lambda: Mamba(9, 8, 3, state=3, layers=["default", "attention", "linear_attention"]), {"inner.0": 16}, 10),
        (lambda: Mamba2(9, 8, 3, state=6, head_width=4, groups=1, **MIXED), {"inner.0": 16, "state.0": 6}, 6),
        (lambda: Mamba2(9, 8, 3, state=6, head_width=4, groups=2, **MIXED), {"inner.0": 16, "state.0": 12}, 6),
    ],
)
def test_inner_channels_and_states_of_mamba(make: Callable, sizes: dict[str, int], members: int) -> None:
    """Together in all tensors of a block: not without one of them, and not across heads or groups of states."""
    torch.manual_seed(0)
    network = shaken(make())
    tokens = torch.randint(9, (2, 11), generator=torch.Generator().manual_seed(2))
    known = permutation_spec(network)
    assert {group: known.sizes[group] for group in known.sizes if group in ("inner.0", "state.0")} == sizes
    assert permutation_spec(WeightSpec.of(network)).views == known.views
    assert max(check_permutations(network, tokens, seed=seed) for seed in range(3)) < 1e-12
    for group in sizes:
        check_members(network, tokens, known, group, members)
        name, heads = known.heads.get(group, (None, 1))
        assert name is None  # heads start at different rates and stay
        if heads > 1:
            others = [{}, {group: ("heads.0", heads)}] if group == "inner.0" else [{}]
            for other in others:
                wrong = replace(known, heads={g: h for g, h in known.heads.items() if g != group} | other)
                assert max(check_permutations(network, tokens, wrong, seed=seed) for seed in range(3)) > 1e-3


@pytest.mark.parametrize("attention", ["gpsa", "conv-logits"])
def test_heads_with_positions_of_their_own_are_known_from_the_tensors(attention: str) -> None:
    network = shaken(ViT(8, 2, 16, 1, 4, 10, in_channels=1, attention=attention))
    known = permutation_spec(WeightSpec.of(network))
    assert known.heads == permutation_spec(network).heads
    assert known.heads["head.0"] == known.heads["vo.0"] == ("heads.0", 4)
    assert check_permutations(network, images(), known) < 1e-12
    alone = replace(known, heads=dict(known.heads) | {"head.0": ("other", 4)})  # not with their queries and values
    assert max(check_permutations(network, images(), alone, seed=seed) for seed in range(3)) > 1e-3


def test_units_of_other_heads_are_not_mixed() -> None:
    network = shaken(ViT(8, 2, 24, 1, 3, 10, in_channels=1))
    permutations = permutation_spec(network)
    assert permutations.heads["qk.0"] == ("heads.0", 3)
    assert check_permutations(network, images(), replace(permutations, heads={})) > 1e-3


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(AnatomyError, match=r"this network: `0.weight`.*PermutationSpec.from_axes"):
        permutation_spec(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 2)))


def test_groups_have_one_length_on_one_axis_and_every_axis_a_label() -> None:
    spec = WeightSpec([TensorSpec("a", (4, 4)), TensorSpec("b", (5,))])
    for axes, message in (
        ({"a": ("~h", "h"), "b": (None,)}, "expected each group on one axis, or one group, without signs, on two"),
        ({"a": ("h", None), "b": ("h",)}, "`b`: group h has 4 members elsewhere, found 5"),
        ({"a": ("h",), "b": (None,)}, "`a`: expected 2 axes"),
        ({"a": ("h", None)}, "no axes for `b`"),
    ):
        with pytest.raises(SpecError, match=message):
            PermutationSpec.from_axes(spec, axes)


def test_types_are_the_subsets_of_the_groups() -> None:
    views = (View("w", "w", (4, 3, 2), ("h", "c", None)), View("q", "q", (4, 3), ("~u", "c")))
    permutations = PermutationSpec(views)
    found = {kind.groups: (kind.dimension, kind.multiplicity) for kind in permutations.types}
    assert found == {
        (): (1, 2),
        ("h",): (3, 2),
        ("c",): (2, 2),
        ("~u",): (4, 1),
        ("h", "c"): (6, 2),
        ("c", "~u"): (8, 1),
    }


def own_axes(module: nn.Module) -> dict[str, tuple[str | None, ...]]:
    """The specification of a network's names, as a user would write it."""
    return {view.tensor: view.axes for view in permutation_spec(module).views}


def test_a_specification_of_ones_own_is_checked_by_function() -> None:
    with torch.random.fork_rng():
        module = build_for(tiny.recipe())
    source = SimpleNamespace(spec=WeightSpec.of(module), template=lambda: (module, torch.randn(4, 1, 8, 8)))
    right = own_axes(module)
    assert permutations_of(source, right).views == permutation_spec(module).views
    assert permutations_of(source).views == permutation_spec(module).views
    bias = "stages.0.blocks.0.mlp.fc1.bias"
    for wrong in (right | {bias: ("other",)}, right | {"head.norm.bias": (None,)}):
        with pytest.raises(SpecError, match="expected renumbering to leave the network's outputs unchanged"):
            permutations_of(source, wrong)
    with pytest.raises(SpecError, match=r"no axes for `head\.fc\.weight`"):
        permutations_of(source, {name: axes for name, axes in right.items() if name != "head.fc.weight"})
    array = SimpleNamespace(spec=source.spec)  # no network at hand: its names and lengths are all that can be checked
    assert permutations_of(array, right | {bias: ("other",)}).sizes["other"] == 8


def test_statistics_and_fits_take_ones_own_specification() -> None:
    spec = WeightSpec([TensorSpec("in", (6, 4)), TensorSpec("out", (4, 6))])
    axes = {"in": ("units", None), "out": (None, "units")}
    x = np.random.default_rng(0).standard_normal((40, spec.size))
    found = covariance_exchangeable(WeightArray(x, spec), permutations=axes)
    assert found.permutations == PermutationSpec.from_axes(spec, axes)
    result = fit(WeightArray(x, spec), "*", structure=["diagonal", "exchangeable"], joint="all", permutations=axes)
    assert all(row["failed"] is None for row in result.table)
    with pytest.raises(UsageError, match="not used by dense, only by exchangeable"):
        fit(WeightArray(x, spec), "*", structure="dense", permutations=axes)


def test_a_tensor_of_which_some_entries_never_vary_is_a_reason_not_a_crash() -> None:
    spec = WeightSpec([TensorSpec("in", (6, 4)), TensorSpec("out", (4, 6))])
    x = np.random.default_rng(0).standard_normal((40, spec.size))
    x[:, 3] = 1.0
    axes = {"in": ("units", None), "out": (None, "units")}
    result = fit(WeightArray(x, spec), "*", structure=["diagonal", "exchangeable"], joint="all", permutations=axes)
    reasons = {row["structure"]: row["failed"] for row in result.table}
    assert reasons == {
        "diagonal": None,
        "exchangeable": "`in`: expected all of (6, 4) to vary, found 23 entries that do; the others are equal in "
        "all networks, so the distribution is not invariant under permutations of units; leave this tensor out of the "
        "selection",
    }


def test_a_network_of_unknown_names_is_derived_from_its_recipe_or_takes_one_of_its_own() -> None:
    """The message names the architectures that are known; one's own is proved by function on tokens."""
    transformer = {"type": "transformer", "width": 8, "depth": 1, "heads": 2, "context": 32}
    recipe = tiny.recipe(network=transformer, data={"name": "copy", "length": 3, "vocabulary": 6})
    module, inputs = build_for(recipe), recipe.data.inputs(torch.Generator().manual_seed(0), 4)
    source = SimpleNamespace(spec=WeightSpec.of(module), template=lambda: (module, inputs))
    with pytest.raises(AnatomyError, match=r"there are those of ConvNeXt, ConvMixer, ViT, .*Mamba-2.*from_axes"):
        permutations_of(SimpleNamespace(spec=source.spec))
    derived = permutations_of(source)
    assert {axis for view in derived.views if "mlp.fc1" in view.tensor for axis in view.axes} > {"blocks.0.mlp.fc1"}
    assert set(derived.heads.values()) == {("head of blocks.0.attn.q_proj", 2)}
    axes: dict[str, list[str | None]] = {tensor.name: [None] * len(tensor.shape) for tensor in source.spec.tensors}
    right = axes | {
        "blocks.0.mlp.fc1.weight": ["hidden", None],
        "blocks.0.mlp.fc1.bias": ["hidden"],
        "blocks.0.mlp.fc2.weight": [None, "hidden"],
    }
    assert permutations_of(source, right).sizes == {"hidden": 32}
    with pytest.raises(SpecError, match="expected renumbering to leave the network's outputs unchanged"):
        permutations_of(source, right | {"blocks.0.mlp.fc2.weight": [None, None]})


RULES = """
[axes]
"enter@" = "units ."
"layers.<i>.up@" = "a:~left.{i}+b:right.{i} units"
"layers.<i>.left" = "~left.{i}"
"leave.weight" = ". units"
"leave.bias" = "."

[heads]
"right.1" = ["heads", 2]
"""
RULED = WeightSpec(
    TensorSpec(name, shape)
    for name, shape in {
        "enter.weight": (6, 2, 1),
        "enter.bias": (6,),
        "layers.0.up.weight": (7, 6),
        "layers.0.left": (3,),
        "layers.1.up.weight": (8, 6),
        "layers.1.up.bias": (8,),
        "layers.1.left": (4,),
        "leave.weight": (5, 6),
        "leave.bias": (5,),
    }.items()
)


def test_a_file_of_rules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Parts take the length that their group has elsewhere; what is left is the others'."""
    (tmp_path / "own.toml").write_text(RULES)
    found = read_permutations(tmp_path / "own.toml", RULED)
    assert found.sizes == {"units": 6, "left.0": 3, "right.0": 4, "left.1": 4, "right.1": 4}
    assert found.heads == {"right.1": ("heads", 2)}
    axes = {view.name: (view.offset, view.shape, view.axes) for view in found.views}
    assert axes["enter.weight"] == ((), (6, 2, 1), ("units", None, None))
    assert axes["layers.0.up.weight[b]"] == ((3, 0), (4, 6), ("right.0", "units"))
    assert axes["layers.1.up.bias[a]"] == ((0,), (4,), ("~left.1",))
    array = SimpleNamespace(spec=RULED)
    assert permutations_of(array, tmp_path / "own.toml") == found
    assert "not checked by function" in caplog.text


def test_the_check_by_function_moves_every_group() -> None:
    """One draw leaves a wrong group of 2 units as it is in half of all cases, as the first one here does."""
    missed = []
    for units, label in itertools.product(range(2, 6), ("out", "~out")):
        network = torch.nn.Linear(3, units)
        axes = {"weight": (label, None), "bias": (label,)}
        wrong = PermutationSpec.from_axes(WeightSpec.of(network), axes)
        missed.append(check_permutations(network, torch.ones(5, 3), wrong) == 0)
        change, tolerance = change_of_function(network, torch.ones(5, 3), wrong)
        assert change > 1e-3 > tolerance
    assert any(missed)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[axes]", "[axis]", r"own\.toml: unknown table 'axis'"),
        ('"leave.bias" = "."', "", r"no axes that fit `leave\.bias \(5,\)`; add a rule for each"),
        ('"leave.bias" = "."', '"leave.bias" = 3', "expected a text such as"),
        ('"leave.bias" = "."', '"leave.bias" = "{last[0]}"', r"'last\[0\]' in .* is not a number of the name"),
        ('"leave.bias" = "."', '"leave.bias" = "."\n"left" = "."', "no tensor matches `left`"),
        ('". units"', '"units ."', r"group units has 6 members elsewhere, found 5"),
        ('["heads", 2]', '["heads", 3]', r"heads: right\.1: expected .* of 4 units"),
        ("[heads]", "[heads", r"own\.toml: "),
    ],
)
def test_a_damaged_file_of_rules_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RULES
    (tmp_path / "own.toml").write_text(RULES.replace(old, new, 1))
    with pytest.raises(SpecError, match=message) as raised:
        read_permutations(tmp_path / "own.toml", RULED)
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "own.toml") in str(raised.value)


def test_the_command_takes_a_file_of_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, own, json_file = (tmp_path / name for name in ("net.safetensors", "own.toml", "a.json"))
    generator = torch.Generator().manual_seed(0)
    save_file({t.name: torch.randn(t.shape, generator=generator) for t in RULED.tensors}, network)
    own.write_text(RULES)
    source = ["covariance", network, "-o", tmp_path / "a.png", "--json", json_file]
    for options, code in (
        (["--exchangeable"], 3),  # the names are not known
        (["--permutations", own], 2),
        (["--exchangeable", "--permutations", tmp_path / "none.toml"], 3),
        (["--exchangeable", "--permutations", own], 0),
    ):
        assert run(*source, *options, capsys=capsys)[0] == code
        assert json_file.exists() == (code == 0)
    assert ["units"] in [kind["groups"] for kind in json.loads(json_file.read_text())["covariances"]]
    assert "permutations are not known from these names" in run("inspect", network, capsys=capsys)[1]
