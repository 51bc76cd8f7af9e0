"""Permutations derived from forward passes: those of the names where known, and never one that changes outputs."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import shims
import torch
from test_permutations import NETWORKS, images, shaken
from torch import Tensor, nn

import weightscope
from weightscope.anatomy import operations, permutation_graph
from weightscope.anatomy.permutation_groups import (
    change_of_function,
    check_permutations,
    moving_seeds,
    permutation_spec,
)
from weightscope.errors import AnatomyError, UsageError
from weightscope.networks.sequences import Mamba2
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec, bare


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_derived_is_what_the_names_say(name: str) -> None:
    """The same axes have the same group, with the same signs and heads, up to the groups' names."""
    network = NETWORKS[name]()
    by_name, derived = permutation_spec(network), permutation_spec(network, images().float())
    assert derived.notes == ()
    views = {(view.tensor, view.offset): view for view in derived.views}
    names: dict[str, str] = {}
    for view in by_name.views:
        other = views.pop((view.tensor, view.offset if any(view.offset) else ()))
        assert (view.shape, len(view.axes)) == (other.shape, len(other.axes))
        for a, b in zip(view.axes, other.axes, strict=True):
            assert (a is None, str(a)[0] == "~") == (b is None, str(b)[0] == "~"), (view.name, a, b)
            if a is not None and b is not None:
                assert names.setdefault(a.strip("~"), b.strip("~")) == b.strip("~")
    assert not views
    assert len(set(names.values())) == len(names)
    assert {names[g]: h for g, (_, h) in by_name.heads.items() if g in names} == {
        group: h for group, (_, h) in derived.heads.items()
    }


def test_heads_of_mamba_2_may_change_places_as_far_as_the_function_goes() -> None:
    """The names hold them, since they start at different rates."""
    network = Mamba2(9, 8, 2, state=6, head_width=4, groups=1)
    tokens = torch.randint(9, (2, 11), generator=torch.Generator().manual_seed(2))
    derived = permutation_spec(network, tokens)
    by_name = permutation_spec(network)
    assert {n for group, n in by_name.sizes.items() if group.startswith("inner")} <= set(derived.sizes.values())
    assert derived.heads["head of backbone.layers.0.mixer"] == ("head of backbone.layers.0.mixer", 4)
    assert check_permutations(shaken(network), tokens, derived) < 1e-12


class Applied(nn.Module):
    """A function of x."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Joined(nn.Module):
    """A function of x and what a module makes of it, by default their sum."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.inner(x))


JOINED: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    lambda x, y: x * torch.sigmoid(y),
    lambda x, y: torch.cat([y, x], 1),
]
CHUNKED: list[Callable[[Tensor], Tensor]] = [  # of channels (B, C, ...); the first two have half as many
    lambda x: nn.functional.glu(x, 1),
    lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1],
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
]


class Heads(nn.Module):
    """Attention over tokens (B, N, C), written by hand or fused, with packings as they are found in libraries."""

    def __init__(self, width: int, heads: int, packing: str, fused: bool, talking: bool, norm: bool) -> None:
        super().__init__()
        self.heads, self.packing, self.fused = heads, packing, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Linear(heads, heads) if talking else None
        self.q_norm = nn.RMSNorm(width // heads) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        k, qkv = c // self.heads, self.qkv(x)
        if self.packing == "outer":
            q, k_, v = qkv.reshape(b, n, 3, self.heads, k).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.packing == "inner":
            q, k_, v = qkv.view(b, n, self.heads, 3 * k).transpose(1, 2).chunk(3, -1)
        else:
            q, k_, v = (t.view(b, n, self.heads, k).transpose(1, 2) for t in qkv.chunk(3, -1))
        q = self.q_norm(q)
        if self.fused and self.mix is None:
            y = nn.functional.scaled_dot_product_attention(q, k_, v)
        else:
            a = q @ k_.transpose(-2, -1) * k**-0.5
            a = a if self.mix is None else self.mix(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            y = a.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, c))


def random_network(seed: int) -> nn.Module:
    """Convolutions, then tokens, then a linear head; of layers drawn at random."""
    torch.manual_seed(seed)
    r = random.Random(seed)
    channels, layers = 3, []
    for _ in range(r.randint(2, 4)):
        new = r.choice([4, 8, 12])
        groups = r.choice([1, 1, 2, 4])
        kind = r.choice(["conv", "conv", "depthwise", "joined", "joined", "chunk", "transposed", "weight norm"])
        if kind in ("conv", "weight norm") or channels % 4:
            conv = nn.Conv2d(channels, new, r.choice([1, 3]), padding="same", groups=groups if channels % 4 == 0 else 1)
            layers.append(nn.utils.parametrizations.weight_norm(conv) if kind == "weight norm" else conv)
            channels = new
        elif kind == "transposed":
            layers.append(nn.ConvTranspose2d(channels, new, 1, groups=groups))
            channels = new
        elif kind == "depthwise":
            times = r.choice([1, 2])
            layers.append(nn.Conv2d(channels, times * channels, 3, padding=1, groups=channels))
            channels *= times
        elif kind == "joined":
            inner = nn.Sequential(nn.Conv2d(channels, channels, 1), r.choice([nn.ReLU, nn.Tanh, nn.Identity])())
            how = r.randrange(3)
            layers.append(Joined(inner, JOINED[how]))
            channels *= 2 if how == 2 else 1
        else:
            how = r.randrange(4)
            layers.append(Applied(CHUNKED[how]))
            channels //= 2 if how < 2 else 1
        norm = r.choice([None, nn.BatchNorm2d, lambda c: nn.GroupNorm(2 if c % 2 == 0 else 1, c), nn.InstanceNorm2d])
        layers += [norm(channels)] if norm else []
        layers += [r.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Identity, nn.Hardswish])()]
        if r.random() < 0.2:
            layers.append(r.choice([nn.AvgPool2d, nn.MaxPool2d])(2, 1))
    if r.random() < 0.5:
        size = r.choice([1, 2])
        layers += [nn.Tanh(), nn.AdaptiveAvgPool2d(size), nn.Flatten()]  # the mean of what InstanceNorm gives is zero
        channels *= size**2
    else:
        width = 8
        layers += [Applied(lambda x: x.flatten(2).transpose(1, 2)), nn.Linear(channels, width)]
        for _ in range(r.randint(1, 2)):
            heads = r.choice([1, 2, 4]), r.choice(["outer", "inner", "chunks"])
            attention = Heads(width, *heads, r.random() < 0.5, r.random() < 0.3, r.random() < 0.3)
            layers += [Joined(nn.Sequential(r.choice([nn.LayerNorm, nn.RMSNorm])(width), attention))]
        layers += [Applied(r.choice([lambda x: x.mean(1), lambda x: x[:, 0], lambda x: x.amax(1)]))]
        channels = width
    return nn.Sequential(*layers, nn.Linear(channels, 3))


def spoiled(found: PermutationSpec) -> PermutationSpec:
    """The same with one axis of a matrix or filter called fixed, the last in the network."""
    several = [(i, v) for i, v in enumerate(found.views) if v.labels and len(v.axes) > 1]
    i, j = next((i, j) for i, v in reversed(several) for j, axis in enumerate(v.axes) if axis is not None)
    view = found.views[i]
    axes = tuple(None if k == j else axis for k, axis in enumerate(view.axes))
    return replace(found, views=(*found.views[:i], replace(view, axes=axes), *found.views[i + 1 :]))


def change(seed: int) -> tuple[PermutationSpec, float, float]:
    """What is derived of a random network, how it changes the outputs, and how it does with one axis left out."""
    network = shaken(random_network(seed))
    inputs = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = permutation_graph.derive_permutations(network, inputs)
    seeds = moving_seeds(found)
    right = max(check_permutations(network, inputs, found, seed=s) for s in seeds)
    wrong = max(check_permutations(network, inputs, spoiled(found), seed=s) for s in seeds) if found.sizes else 1.0
    return found, right, wrong


@pytest.mark.parametrize("start", range(0, 1000 if os.environ.get("TORTURE") else 40, 40))
@pytest.mark.slow
def test_no_wrong_group_among_networks_composed_at_random(start: int) -> None:
    found = [(seed, *change(seed)) for seed in range(start, start + 40)]
    assert [(seed, right) for seed, _, right, _ in found if not right < 1e-9] == []
    assert [(seed, wrong) for seed, *_, wrong in found if not wrong > 1e-6] == []
    assert sum(len(spec.sizes) > 1 for _, spec, *_ in found) > 0.6 * len(found)


def _image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))}


def _pairs() -> dict[str, Tensor]:
    return _tokens() | {"decoder_input_ids": torch.randint(0, 50, (2, 5))}


_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "hidden_size": 32}
_TEXT = _SIZES | {"vocab_size": 60, "pad_token_id": 0}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60}


def _timm(name: str, **given: Any) -> Callable[[], nn.Module]:
    return lambda: shims.timm().create_model(name, **given)


def _transformers(kind: str, head: str, **given: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        package = shims.transformers()
        return getattr(package, kind + head)(getattr(package, kind + "Config")(**given))

    return make


# make, inputs, how many groups are derived and are known by name, 0 where that was not counted
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int, int]] = {
    "resnet18": (_timm("resnet18"), lambda: _image(64), 12, 12),
    "densenet121": (_timm("densenet121"), lambda: _image(64), 120, 0),
    "regnet": (_timm("regnety_002"), lambda: _image(64), 0, 0),
    "mobilenetv3": (_timm("mobilenetv3_small_050"), lambda: _image(64), 0, 0),
    "swin": (_timm("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 2, 1)), lambda: _image(56), 0, 0),
    "mixer": (_timm("mixer_s32_224", img_size=64), lambda: _image(64), 17, 0),
    "cait": (_timm("cait_xxs24_224", img_size=32, depth=2), lambda: _image(32), 0, 0),
    "vit": (_timm("vit_tiny_patch16_224", img_size=32, depth=2), lambda: _image(32), 7, 7),
    "transformers' vit": (
        _transformers("ViT", "ForImageClassification", image_size=32, patch_size=8, **_SIZES), _image, 7, 7
    ),
    "bert": (_transformers("Bert", "ForMaskedLM", **_TEXT), _tokens, 7, 7),
    "roberta": (_transformers("Roberta", "ForMaskedLM", **_TEXT), _tokens, 7, 7),
    "gpt2": (_transformers("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=60), _tokens, 7, 7),
    "gptneox": (_transformers("GPTNeoX", "ForCausalLM", **_TEXT), _tokens, 9, 3),
    "llama": (_transformers("Llama", "ForCausalLM", **_TEXT, num_key_value_heads=2), _tokens, 9, 3),
    "t5": (_transformers("T5", "ForConditionalGeneration", **_T5), _pairs, 18, 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_others(name: str) -> None:
    """What is derived is checked by function before it is returned; the number of groups is as counted by hand.

    By shapes and names alone the function stays as well, and all axes of a group are of one group that is derived.
    """
    make, inputs, groups, named = MODELS[name]
    network = make().eval()
    found = permutation_spec(network, inputs())
    assert {view.tensor for view in found.views} == set(WeightSpec.of(network).names)
    assert len(found.sizes) == groups or not groups
    assert len(found.sizes) > 4
    if not named:
        return
    by_name, with_heads = permutation_spec(WeightSpec.of(network)), permutation_spec(network)
    assert len(by_name.sizes) == named
    assert with_heads.views == by_name.views
    for spec in (by_name, with_heads):
        changed, tolerance = change_of_function(network, inputs(), spec)
        assert changed < tolerance
    if "bert" in name or "vit" in name:
        assert with_heads.heads["vo.1"] == ("heads.1", 3 if name == "vit" else 4)
    axes = {view.tensor: view.axes for view in found.views if not any(view.offset)}
    partners: dict[str, set] = {}
    for view in by_name.views:
        for a, b in zip(view.axes, axes[view.tensor], strict=False):
            if a is not None and not any(view.offset) and len(view.axes) == len(axes[view.tensor]):
                partners.setdefault(bare(a), set()).add(b)
    assert all(len(labels) <= 2 and None not in labels for labels in partners.values()), partners


def test_backbones_and_larger_models_are_known_by_name() -> None:
    """Grouped convolutions and another stem are not: there is no wrong specification."""
    vision = shims.timm() and pytest.importorskip("torchvision").models
    backbones = (_transformers("Bert", "Model", **_TEXT), _transformers("Dinov2", "Model", **_SIZES), vision.resnet50)
    assert [len(permutation_spec(WeightSpec.of(make())).sizes) for make in backbones] == [7, 7, 37]
    for make in (_timm("resnet26d"), vision.resnext50_32x4d):
        with pytest.raises(AnatomyError, match="nearest is ResNet"):
            permutation_spec(WeightSpec.of(make()))


class Square(nn.Module):
    """Units on three axes of a tensor, and two sets of units each on two."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.cube = nn.Linear(3, 5), nn.Parameter(torch.randn(5, 5, 5))
        self.rows, self.maps = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        h = h + torch.einsum("bi,bj,ijk->bk", h, h, self.cube).sigmoid()
        rows = self.rows + torch.einsum("ij,klij->kl", self.rows, self.maps).sigmoid()
        return h.sigmoid().sum(-1, keepdim=True) + rows.sigmoid().sum()


def test_units_on_two_axes_keep_their_group_and_others_are_fixed_and_named() -> None:
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        Joined(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())),
        nn.Conv2d(8, 6, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(6, 2),
    )
    found = permutation_spec(convolutions, torch.randn(2, 3, 9, 9))
    assert found.sizes == {"0": 8, "2": 6}
    assert next(v.axes for v in found.views if v.name == "1.inner.0.weight") == ("0", "0", None, None)
    assert found.notes == ()
    odd = Joined(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)))
    found = permutation_spec(nn.Sequential(nn.Linear(3, 8), odd, nn.RMSNorm(8), nn.Linear(8, 2)), torch.randn(2, 3))
    assert {label for view in found.views for label in view.labels} == {"0"}
    assert found.notes == ("units on two axes, whose signs are left as they are: `1.inner.1.weight`",)
    found = permutation_spec(Square(), torch.randn(2, 3))
    assert found.sizes == {}
    assert found.notes == ("units on three axes, or two sets of units each on two, so fixed: `cube`, `maps`",)


def test_an_operation_without_a_rule_fixes_what_it_meets_and_is_named() -> None:
    network = nn.Sequential(
        nn.Linear(4, 6), Applied(lambda x: x.sort(-1).values), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)
    )
    found = permutation_spec(network, torch.randn(2, 4))
    assert found.sizes == {"2": 5}
    assert found.notes == ("sort: no rule for this operation, so the axes that it meets are fixed",)


def test_a_wrong_rule_is_caught_by_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operations.RULES, "sort", lambda p, a, step: [a["self"]] * 2)
    network = nn.Sequential(nn.Linear(4, 6), Applied(lambda x: x.sort(-1).values), nn.Linear(6, 2))
    with pytest.raises(AnatomyError, match="found them to change by"):
        permutation_spec(network, torch.randn(2, 4))


def test_writes_into_a_buffer_are_seen() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = x.new_zeros(len(x), 4)
            y[:, :2] = self.a(x)[:, 2:]
            y[:, 2:] = self.b(x)[:, :2]
            return self.out(y)

    found = permutation_spec(Written(), torch.randn(2, 3))
    assert found.sizes.keys() == {"a[0]", "b[1]"}  # the halves that are not used
    assert "out.weight" not in {view.tensor for view in found.views if view.labels}


def test_it_leaves_the_module_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    weightscope.permutation_spec(network, torch.randn(4, 4))
    assert network.training
    assert network[2].training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_inputs_are_for_modules() -> None:
    with pytest.raises(UsageError, match="expected a module to run on them, found a WeightSpec"):
        permutation_spec(WeightSpec.of(nn.Linear(2, 2)), torch.randn(2, 2))
    with pytest.raises(UsageError, match=r"Bilinear cannot be run on them: .*missing 1 required"):
        permutation_spec(nn.Bilinear(2, 2, 2), torch.randn(2, 2))
