"""What initialisers refuse, and that a module keeps its weights then."""

import copy
import math

import pytest
import torch
from families import state_space
from torch import nn

import weightscope.init as wi
from weightscope.errors import AnatomyError, SpecError, UsageError
from weightscope.networks import ConvNeXt, ViT
from weightscope.networks.sequences import CausalTransformer


def vit(width=48, depth=2, heads=3):
    return ViT(16, 4, width, depth, heads, 10)


def small():
    return vit(32, 2, 2)


def stack(*sizes):
    """Depthwise convolutions of some sizes of filters."""
    return nn.Sequential(*(nn.Conv2d(4, 4, k, groups=4) for k in sizes))


def stages():
    return ConvNeXt((8, 16), (2, 1), kernel_size=3, layer_scale=None)


def equal_filters():
    model = stages()
    nn.init.ones_(model.stages[0].blocks[0].conv_dw.weight)
    return model


class EvenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_dw = nn.Conv2d(8, 8, 4, groups=8, padding="same")
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.conv_dw(x).movedim(1, -1)))).movedim(-1, 1)


def cross_attention():
    return nn.ModuleDict({"multihead_attn": nn.MultiheadAttention(48, 3, kdim=20, vdim=28)})


class Tied(nn.Module):
    """Attention and an MLP, of which one weight is another's, too."""

    def __init__(self, name, other):
        super().__init__()
        self.maps = nn.ModuleDict({x: nn.Linear(24, 24) for x in ("q", "k", "v", "o", "fc1", "fc2")})
        if name != other:
            self.maps[name].weight = self.maps[other].weight
        self.turned = (name, other) == ("o", "v")

    def forward(self, x):
        q, k, v = (self.maps[name](x).unflatten(-1, (3, 8)).transpose(1, 2) for name in "qkv")
        mean = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + (mean @ self.maps["o"].weight if self.turned else self.maps["o"](mean))
        return x + self.maps["fc2"](torch.relu(self.maps["fc1"](x)))


def twice(*names, block=lambda: Tied("q", "q")):
    """Two blocks, of which some weights are one tensor."""
    model = nn.Sequential(block(), block())
    for name in names:
        model[1].maps[name].weight = model[0].maps[name].weight
    return model


def two_states():
    model = mamba()
    first, second = [one for one in model.modules() if hasattr(one, "A_log")][:2]
    second.A_log = first.A_log
    return model


def mamba():
    return state_space(1)


TEACHER = vit(64, 4, 4)


def of_teacher(given):
    return {"teacher": TEACHER} | given


def transformer(width=16, depth=2):
    return CausalTransformer(9, width, depth, heads=2)


CURVE = {"sigma0": 0.15, "v": 0.25, "a": 1.0}
POSITIONS = {"source": {"pos_embed": torch.zeros(1, 16, 32)}}
REFUSED = {
    UsageError: [
        (wi.mimetic_attention_, vit, {"alpha_qk": -0.1}, "alpha_qk: expected a number >= 0"),
        (wi.mimetic_attention_, vit, {"preset": "language", "beta_qk": 0.1}, "leave them out"),
        (wi.mimetic_attention_, vit, {"construction": "same-random", "alpha_vo": 0.2}, "leave out the alphas"),
        (wi.mimetic_attention_, vit, {"layers": 5}, r"layers: expected some of \[0, 1\], found 5"),
        (wi.mimetic_attention_, vit, {"heads": 3}, r"heads of `blocks.0.attn`: expected some of \[0, 1, 2\], found 3"),
        (wi.mimetic_attention_, cross_attention, {}, "cross-attention only"),
        (
            wi.mimetic_attention_,
            lambda: Tied("k", "q"),
            {},
            "found `maps.q.weight` as q of `maps` and k of `maps`",
        ),
        (wi.mimetic_attention_, lambda: Tied("v", "k"), {}, "found `maps.k.weight` as k of `maps` and v of `maps`"),
        (wi.mimetic_attention_, lambda: Tied("o", "v"), {"parts": "vo"}, "as v of `maps` and o of `maps`"),
        (wi.mimetic_attention_, lambda: twice("q"), {}, "found `0.maps.q.weight` as q of `0.maps` and q of the module"),
        (wi.impulse_attention_, lambda: Tied("k", "q"), {"grid": (4, 4)}, "as q of `maps` and k of `maps`"),
        (wi.zero_init_, lambda: Tied("v", "k"), {}, "as k of `maps` and v of `maps`"),
        (wi.t_fixup_, lambda: twice("fc2"), {}, "found `0.maps.fc2.weight` as fc2"),
        (wi.layer_scale_identity_, lambda: twice("o"), {}, "found `0.maps.o.weight` as o"),
        (wi.mimetic_mlp_, lambda: twice("fc1"), {}, "found `0.maps.fc1.weight` as fc1"),
        (wi.mimetic_mlp_, lambda: Tied("fc2", "fc1"), {"mode": "anticorrelated"}, "as fc1 of `maps` and fc2 of `maps`"),
        (wi.mimetic_first_last_mlp_, lambda: twice("fc2"), {}, "found `0.maps.fc2.weight` as fc2"),
        (wi.mimetic_ssm_, two_states, {}, "A_log` as A_log"),
        (wi.impulse_attention_, vit, {"filter_size": 4}, "odd"),
        (wi.impulse_attention_, vit, {"offsets": [(0, 9)]}, "outside the 4 x 4 tokens"),
        (wi.impulse_attention_, vit, {"offsets": [(0, 0.5)]}, "pairs of integers"),
        (wi.impulse_attention_, vit, {"pseudo_input": "images"}, "positions"),
        (wi.impulse_attention_, vit, {"grid": (8, 8)}, "leave it out"),
        (wi.xavier_, vit, {"distribution": "cauchy"}, "'uniform', 'normal'"),
        (wi.trunc_normal_, vit, {"std": 1.0, "cut": 0.5}, "cut"),
        (wi.mimetic_mlp_, vit, {"sigma": -1}, "sigma"),
        (wi.constant_mlp_bias_, vit, {"value": math.nan}, "value: expected a finite number"),
        (wi.mimetic_first_last_mlp_, stages, {"layers": [0, 0]}, r"expected two different layers, found \[0, 0\]"),
        (wi.mimetic_conv_mlp_, stages, {"correlation": -1.5}, r"correlation: .* in \[-1, 1\], found -1.5"),
        (wi.mimetic_conv_mlp_, equal_filters, {}, "expected entries that vary"),
        (wi.mimetic_conv_mlp_, EvenBlock, {}, "expected filters of odd side, found 4 x 4"),
        (wi.conv_covariance_, lambda: stack(4), CURVE, "odd size, found `0` 4 x 4"),
        (wi.conv_covariance_, lambda: nn.Conv1d(4, 4, 3, groups=4), CURVE, r"square filters .* found .* 1-D 1 x 3"),
        (wi.conv_covariance_, lambda: stack(7), {"sigma0": 0.1}, "missing v, a"),
        (wi.conv_covariance_, lambda: stack(7), {"preset": "cifar-patch2", "a": 1.0}, "leave out a"),
        (wi.conv_covariance_, lambda: stack(7, 7), CURVE | {"v": -0.5, "a": 0.0}, "expected > 0 at every depth"),
        (wi.conv_covariance_, lambda: stack(7), {**CURVE, "schedule": "linear"}, "sawtooth"),
        (wi.covariance_transfer_, lambda: stack(7), {"source": stack(7), "means": "yes"}, "means: expected"),
        (wi.impulse_filters_, lambda: stack(7), {"filter_size": 9}, "no central 9 x 9"),
        (wi.select_weights_, small, of_teacher({"layers": "last"}), "'first', 'spaced', 'linspace'"),
        (wi.select_weights_, small, of_teacher({"components": "attn"}), "'all' or some of embedding, attention"),
        (wi.select_weights_, small, of_teacher({"components": "head", "exclude": "head*"}), "of head after exclude="),
        (wi.select_weights_, small, of_teacher({"exclude": "posembed"}), "exclude: no tensor matches 'posembed'"),
        (wi.select_weights_, small, {"teacher": 7}, "expected a module, a mapping of tensors, or a path"),
        (wi.transfer_singular_, vit, {"source": vit()}, "one of rank and fraction"),
        (wi.transfer_singular_, vit, {"source": vit(), "rank": 1, "select": "*norm*"}, "matches no weight of a linear"),
        (wi.transfer_, vit, {"source": vit(), "select": "head*", "components": "mlp"}, "that matches select="),
        (wi.mimetic_ssm_, mamba, {"c": 0}, "c: "),
        (wi.repeat_layer_, mamba, {"source": mamba(), "layer": 3}, "layer: expected 0 to 2 of the source, found 3"),
    ],
    AnatomyError: [
        (wi.conv_covariance_, lambda: nn.Linear(2, 2), CURVE, "depthwise"),
        (
            wi.mimetic_first_last_mlp_,
            stages,
            {},
            r"`stages.0.blocks.0.mlp`, \(8, 32\), found \(16, 64\); choose",
        ),
        (wi.mimetic_first_last_mlp_, lambda: vit(depth=1), {}, "at least two MLPs"),
        (wi.ssm_from_attention_, mamba, {"source": state_space(2)}, "expected attention modules"),
        (wi.repeat_layer_, lambda: nn.Linear(2, 2), {"source": mamba()}, "expected attention modules"),
    ],
    SpecError: [
        (wi.select_weights_, small, {"teacher": vit(16, 4, 2)}, "is the student larger"),
        (wi.select_weights_, small, {"teacher": vit(64, 1, 4)}, "the student has 2 layers in `blocks`, the teacher 1"),
        (wi.select_weights_, small, {"teacher": {}, "components": "embedding"}, "no counterpart of `pos_embed`"),
        (wi.select_weights_, lambda: ConvNeXt((8,), (1,), 5), {"teacher": ConvNeXt((8,), (1,))}, r"from \(7, 7\)"),
        (wi.transfer_, small, {"source": vit(64, 2, 4)}, r"expected \(1, 16, 32\), found \(1, 16, 64\)"),
        (wi.transfer_, small, POSITIONS, "the source has no"),
        (wi.ssm_from_attention_, mamba, {"source": transformer(8)}, "expected attention of width 16, found 8"),
        (wi.ssm_from_attention_, mamba, {"source": transformer(depth=1)}, "layer 1 in the source, which has 1"),
        (wi.ssm_from_attention_, lambda: state_space(2), {"source": transformer(), "head": 1}, "need heads 1 to 2"),
        (
            wi.repeat_layer_,
            mamba,
            {"source": state_space(2)},
            r"found \(32, 4\), and \(4,\) in the source's layer 0",
        ),
        (wi.repeat_layer_, mamba, {"source": vit()}, "found None, and .* in the source's layer 0"),
    ],
}


@pytest.mark.parametrize(
    ("init", "make", "arguments", "message", "error"),
    [pytest.param(*row, error, id=f"{row[0].__name__}-{row[3]}") for error, rows in REFUSED.items() for row in rows],
)
def test_refusals_change_nothing(init, make, arguments, message, error):
    module = make()
    before = copy.deepcopy(module)
    with pytest.raises(error, match=message):
        init(module, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize(
    ("init", "make", "arguments"),
    [
        (wi.mimetic_attention_, lambda: Tied("v", "k"), {"parts": "qk"}),
        (wi.mimetic_attention_, lambda: twice("q"), {"layers": 1}),
        (wi.mimetic_attention_, lambda: twice("fc1"), {}),
        (wi.mimetic_mlp_, lambda: twice("fc2"), {}),
        (wi.mimetic_attention_, lambda: twice("q", "k", "v", "o"), {}),  # one layer, twice
    ],
)
def test_what_shares_nothing_that_is_set_is_initialised(init, make, arguments):
    module = make()
    before = copy.deepcopy(module.state_dict())
    init(module, **arguments, generator=0)
    assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
