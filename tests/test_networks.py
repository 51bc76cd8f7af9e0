"""The networks against timm, the thesis' formulas, and the rules that let many of them run as one."""

import inspect
import math
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import shims
import torch
from costs import multiply_adds
from torch import nn

from weightscope import networks
from weightscope._util.plugins import member, reference_to
from weightscope.errors import RecipeError, UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT, build_for, sinusoidal_positions
from weightscope.networks.convmixer import dilation_schedule
from weightscope.networks.layers import Mlp
from weightscope.networks.vit import KINDS, GatedAttention, attention_layer
from weightscope.recipe import ConvNeXtConfig, OwnNetworkConfig, Recipe
from weightscope.recipe.networks import SECTIONS


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
def _randomise(module: nn.Module) -> nn.Module:
    """Give every parameter and statistic a value that matters, so that no tensor can be overlooked."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return module.eval()


def _timm_convmixer(**options):
    shims.timm()
    from timm.models.convmixer import ConvMixer as Theirs

    return Theirs(16, 3, kernel_size=5, patch_size=2, num_classes=7, **options)


def _timm_isotropic(patch_size: int, layer_scale: float | None):
    """timm has four stages always: the first of them, with no halving of the side before it."""
    shims.timm()
    from timm.models.convnext import ConvNeXt as Theirs

    theirs = Theirs(
        depths=(4, 1, 1, 1), dims=(16,) * 4, kernel_sizes=5, patch_size=patch_size, num_classes=7,
        ls_init_value=layer_scale,
    )  # fmt: skip
    theirs.stages = theirs.stages[:1]
    theirs.stages[0].downsample = nn.Identity()
    return theirs


def _timm_hierarchical():
    shims.timm()
    from timm.models.convnext import ConvNeXt as Theirs

    return Theirs(depths=(1, 2, 1, 1), dims=(8, 12, 16, 20), patch_size=4, num_classes=7)


def _timm_vit(**options):
    shims.timm()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=7, **options)


PAIRS = {
    "convmixer": (lambda: ConvMixer(16, 3, 5, 2, 7), _timm_convmixer, 16),
    "convnext, patch 4": (lambda: ConvNeXt(16, 4, 5, 4, 7), lambda: _timm_isotropic(4, 1e-6), 32),
    "convnext, patch 2, no gamma": (
        lambda: ConvNeXt(16, 4, 5, 2, 7, layer_scale=None), lambda: _timm_isotropic(2, None), 16,
    ),
    "convnext, hierarchical": (lambda: ConvNeXt((8, 12, 16, 20), (1, 2, 1, 1), num_classes=7), _timm_hierarchical, 64),
    "vit, average": (
        lambda: ViT(16, 4, 24, 2, 3, 7), lambda: _timm_vit(global_pool="avg", class_token=False), 16,
    ),
    "vit, token, learned": (
        lambda: ViT(16, 4, 24, 2, 3, 7, positions="learned", pool="token"), _timm_vit, 16,
    ),
    "vit, token, layer scale": (
        lambda: ViT(16, 4, 24, 2, 3, 7, pool="token", layer_scale=1e-4), lambda: _timm_vit(init_values=1e-4), 16,
    ),
    "vit, expansion": (
        lambda: ViT(16, 4, 24, 2, 3, 7, expansion=2),
        lambda: _timm_vit(global_pool="avg", class_token=False, mlp_ratio=2),
        16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_travel_both_ways_with_timm(name: str) -> None:
    ours, theirs, size = PAIRS[name]
    ours, theirs = ours().double(), theirs().double()
    mine, yours = ours.state_dict(), theirs.state_dict()
    assert {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in yours.items()}
    image = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for source, target in ((ours, theirs), (theirs, ours)):
        _randomise(source)
        target.eval().load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(target(image), source(image), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("h", "d", "k", "p", "c", "n"),
    [(256, 8, 9, 1, 3, 10), (16, 3, 5, 2, 1, 7), (8, 1, 3, 4, 3, 2), (128, 4, 8, 1, 3, 10)],
)
def test_convmixer_has_the_parameters_of_thesis_equation_2_4(h: int, d: int, k: int, p: int, c: int, n: int) -> None:
    """With c p^2 where the thesis prints c^2."""
    model = ConvMixer(h, d, k, p, n, in_channels=c)
    assert _parameters(model) == h * (d * (k**2 + h + 6) + c * p**2 + n + 3) + n


def test_a_convmixer_may_have_filters_of_another_size_in_each_layer() -> None:
    """Thesis 3.1.4 proposes it; the parameters are those of Eq. 2.4 with the mean of k^2."""
    section = {"type": "convmixer", "width": 8, "depth": 3, "kernel_size": [3, 5, 9], "patch_size": 2}
    recipe = Recipe.parse({"network": section, "data": {"name": "digits"}, "training": {"epochs": 1}})
    for model in (ConvMixer(8, 3, (3, 5, 9), 2, 10, in_channels=1), build_for(recipe)):
        sizes = [m.kernel_size for m in model.blocks.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
        assert sizes == [(3, 3), (5, 5), (9, 9)]
        assert _parameters(model) == 8 * (9 + 25 + 81 + 3 * (8 + 6) + 4 + 10 + 3) + 10
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    equal, one = ConvMixer(8, 3, (5, 5, 5), 2, 10), ConvMixer(8, 3, 5, 2, 10)
    equal.load_state_dict(one.state_dict(), strict=True)
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(equal.eval()(images), one.eval()(images))
    with pytest.raises(RecipeError, match="expected a number or one for each of 3 layers, found 2"):
        recipe.replace({"network.kernel_size": [3, 5]})


@pytest.mark.parametrize("kernel_size", [2, 8])
def test_even_kernels_have_torchs_padding(kernel_size: int) -> None:
    """A filter with one pixel at (k - 1) // 2 changes nothing, as in the odd kernel before it."""
    for model in (ConvMixer(4, 1, kernel_size, 1, 10), ConvNeXt(4, 1, kernel_size, 1, 10)):
        filters = next(m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1)
        assert filters.padding == "same"
        with torch.no_grad():
            filters.weight.zero_()[:, :, (kernel_size - 1) // 2, (kernel_size - 1) // 2] = 1
            filters.bias.zero_()
            x = torch.randn(2, 4, 9, 9)
            torch.testing.assert_close(filters(x), x)


@pytest.mark.parametrize(
    ("residual", "norm", "activation"),
    [("none", "batch", "gelu"), ("first", "layer", "gelu"), ("both", "batch", "relu")],
)
def test_the_ablations_of_thesis_table_2_3_by_hand(residual: str, norm: str, activation: str) -> None:
    torch.manual_seed(0)
    model = ConvMixer(6, 2, 3, 2, 5, residual=residual, norm=norm, activation=activation).double()
    act = torch.relu if activation == "relu" else torch.nn.functional.gelu

    def normalised(x: torch.Tensor) -> torch.Tensor:
        x = act(x)
        axes = (0, 2, 3) if norm == "batch" else (1,)
        mean, variance = x.mean(axes, keepdim=True), x.var(axes, keepdim=True, correction=0)
        return (x - mean) / torch.sqrt(variance + (1e-5 if norm == "batch" else 1e-6))

    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    x = normalised(model.stem[0](images))
    for block in model.blocks:
        convolutions = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
        for layer, added in zip(convolutions, (residual != "none", residual == "both"), strict=True):
            x = normalised(layer(x)) + (x if added else 0)
    torch.testing.assert_close(model(images), model.head(x.mean((2, 3))), rtol=1e-10, atol=1e-12)


def test_stochastic_depth_has_the_rates_and_names_of_timms_vit() -> None:
    theirs = _timm_vit(drop_path_rate=0.3)
    ours = ViT(16, 4, 16, len(theirs.blocks), 2, 7, drop_path=0.3)
    for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
        for name in ("drop_path1", "drop_path2"):
            rates = [getattr(block, name) for block in (mine, other)]
            assert getattr(rates[0], "rate", 0.0) == pytest.approx(getattr(rates[1], "drop_prob", 0.0))


@pytest.mark.parametrize("make", [
    lambda **options: ConvNeXt(8, 2, 3, 4, 10, **options), lambda **options: ViT(8, 4, 8, 2, 2, 10, **options)
], ids=["convnext", "vit"])  # fmt: skip
def test_a_learned_sum_is_the_mlp_papers_baseline(make) -> None:
    """Section 3: W1 x + b 1_p 1_n^T x, one parameter per MLP."""
    plain, summed = make(), make(learned_sum=0.25)
    assert _parameters(summed) == _parameters(plain) + 2
    fc1 = next(module.fc1 for module in summed.modules() if isinstance(module, Mlp))
    x = torch.randn(5, 8)
    matrix = fc1.weight + 0.25 * torch.ones(32, 1) @ torch.ones(1, 8)
    torch.testing.assert_close(fc1(x), x @ matrix.T + fc1.bias)
    with torch.no_grad():
        fc1.sum_weight.zero_()
    fc1.reset_parameters()
    assert fc1.sum_weight.item() == 0.25


TABLE_3_2 = {
    "A": "1 1 1 1 1 1 1 1",
    "B": "2 2 2 2 2 2 2 2",
    "C": "3 3 3 3 3 3 3 3",
    "D": "1 1 2 2 3 3 3 3",
    "E": "1 1 1 1 2 2 3 3",
    "F": "1 1 2 2 2 2 2 2",
    "G": "1 1 1 1 2 2 2 2",
    "H": "1 1 1 1 1 1 2 2",
}


@pytest.mark.parametrize("name", TABLE_3_2)
def test_dilations_are_those_of_thesis_table_3_2(name: str) -> None:
    schedule = [int(number) for number in TABLE_3_2[name].split()]
    model = ConvMixer(8, 8, 3, 2, 10, dilations=name)
    assert [block[0].fn[0].dilation for block in model.blocks] == [(d, d) for d in schedule]
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    assert dilation_schedule(name, 32) == tuple(np.repeat(schedule, 4))
    assert dilation_schedule(name, 3) == tuple(schedule[2 * (4 * i // 3)] for i in range(3))


def test_sinusoidal_positions_equal_a_plain_loop() -> None:
    rows, columns, width = 3, 5, 12
    code = sinusoidal_positions(rows, columns, width).double().reshape(rows, columns, width)
    for y in range(rows):
        for x in range(columns):
            for i in range(width // 4):
                w = 10_000 ** (-i / (width // 4))
                expected = [math.sin(x * w), math.cos(x * w), math.sin(y * w), math.cos(y * w)]
                np.testing.assert_allclose(code[y, x, i :: width // 4], expected, atol=1e-7)


@pytest.mark.parametrize("pool", ["average", "token"])
def test_vit_starts_from_scaled_sinusoidal_positions(pool: str) -> None:
    model = ViT(16, 4, 24, 1, 3, 7, pool=pool, position_scale=2.0)
    assert isinstance(model.pos_embed, nn.Parameter)
    assert torch.equal(model.pos_embed[0, -16:], 2 * sinusoidal_positions(4, 4, 24))
    if pool == "token":
        assert torch.equal(model.pos_embed[0, 0], torch.zeros(24))


def _maps_by_loops(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The attention maps (B, H, N, N) of a layer with positional terms, entry by entry from their formulas."""
    (_, n, d), heads, prefix, g = x.shape, layer.heads, layer.prefix, layer.grid
    k = d // heads
    qkv = x @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
    q, key = (qkv[..., i * d : (i + 1) * d].unflatten(-1, (heads, k)).transpose(1, 2) for i in (0, 1))
    logits = q @ key.transpose(2, 3) / math.sqrt(k)
    position = torch.full((heads, n, n), -math.inf, dtype=x.dtype)
    matrix = torch.zeros(heads, n, n, dtype=x.dtype)
    for h in range(heads):
        for i in range(g * g):
            for j in range(g * g):
                dy, dx = j // g - i // g, j % g - i % g
                if isinstance(layer, GatedAttention):
                    v = layer.position_vectors[h]
                    position[h, prefix + i, prefix + j] = v[0] * (dy**2 + dx**2) + v[1] * dx + v[2] * dy
                else:
                    r = layer.filter_size // 2
                    for u in range(-r, r + 1):
                        for w in range(-r, r + 1):
                            if (dy - u) % g == 0 and (dx - w) % g == 0:
                                matrix[h, prefix + i, prefix + j] += layer.filters[h, u + r, w + r]
    if isinstance(layer, GatedAttention):
        gate = torch.sigmoid(layer.gating_param)[:, None, None].expand(-1, n, n).clone()
        gate[:, :prefix] = 0
        position[:, :prefix] = 0
        return (1 - gate) * logits.softmax(-1) + gate * position.softmax(-1)
    matrix = layer.filter_scale * matrix
    return {
        "conv-logits": lambda: (logits + matrix).softmax(-1),
        "conv-map": lambda: logits.softmax(-1) + matrix,
        "conv-softmax-map": lambda: logits.softmax(-1) + matrix.softmax(-1),
    }[layer.kind]()


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_positional_attention_follows_its_formula(kind: str, prefix: int) -> None:
    """ConViT Eq. 7; attention paper Eq. 14 and 15. A filter of 3 on a grid of 3 wraps around every edge."""
    layer = attention_layer(kind, 12, 3, 3, prefix=prefix, qkv_bias=bool(prefix), filter_size=None).double()
    _randomise(layer)
    x = torch.randn(2, 9 + prefix, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = x @ layer.qkv.weight[24:].T + (0 if layer.qkv.bias is None else layer.qkv.bias[24:])
    y = _maps_by_loops(layer, x) @ value.unflatten(-1, (3, 4)).transpose(1, 2)
    torch.testing.assert_close(layer(x), layer.proj(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("kind", ["conv-logits", "conv-map", "conv-softmax-map"])
def test_the_last_filters_of_a_network_that_reads_the_class_token_get_no_gradient(kind: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    for pool, trained in (("token", [True, False]), ("average", [True, True])):
        vit = ViT(8, 2, 8, 2, 2, 5, pool=pool, attention=kind)
        vit(images).square().sum().backward()
        assert [bool(block.attn.filters.grad.any()) for block in vit.blocks] == trained


@pytest.mark.parametrize("heads", [4, 8])
def test_gated_attention_starts_as_a_local_filter(heads: int) -> None:
    """Heads look around the pixels of a 2 x 2 or 3 x 3 filter; of 8 heads the first four are local, as in ConViT."""
    torch.manual_seed(0)
    layer = GatedAttention(72, heads, 6)
    side = math.isqrt(heads)
    maps = layer.terms(dict(layer.named_parameters(recurse=False))).added.detach() / torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(maps.sum(-1), torch.ones(heads, 36))
    centre = 2 * 6 + 2
    offsets = [(a - (side - 1) / 2, b - (side - 1) / 2) for a in range(side) for b in range(side)]
    for head, (dy, dx) in enumerate(offsets):
        weight = maps[head, centre].view(6, 6)
        found = [float((weight.sum(1 - axis) * (torch.arange(6) - 2)).sum()) for axis in (0, 1)]
        assert abs(found[0] - dy) < 0.1, (head, found)
        assert abs(found[1] - dx) < 0.1, (head, found)
    assert torch.equal(layer.position_vectors[: side * side, 0], -torch.ones(side * side))
    rest = layer.position_vectors[side * side :]
    assert len(rest) == heads - side * side
    assert bool((rest.abs() <= 1 / math.sqrt(3)).all())
    assert torch.equal(layer.qkv.weight[144:], torch.eye(72))
    assert not layer.qkv.bias[144:].any()
    assert torch.equal(layer.gating_param, torch.ones(heads))


def test_layer_scale_is_on_attention_alone_or_on_its_skip_connection() -> None:
    """X + D SA(X), and D X + SA(X), with the MLP's branch as it is (attention paper, section 6)."""
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    for on in ("both", "attention", "skip"):
        block = ViT(16, 4, 8, 1, 2, 5, layer_scale=0.3, layer_scale_on=on).blocks[0]
        attended = block.attn(block.norm1(x))
        middle = 0.3 * x + attended if on == "skip" else x + 0.3 * attended
        wanted = middle + (0.3 if on == "both" else 1.0) * block.mlp(block.norm2(middle))
        torch.testing.assert_close(block(x), wanted)
        assert [n for n, _ in block.named_parameters() if "gamma" in n or "skip" in n] == {
            "both": ["ls1.gamma", "ls2.gamma"], "attention": ["ls1.gamma"], "skip": ["skip_scale"],
        }[on]  # fmt: skip


SMALL = {
    "convmixer": lambda: ConvMixer(8, 2, 3, 4, 5),
    "convnext": lambda: ConvNeXt(8, 2, 3, 4, 5, layer_scale=1e-6),
    "convnext, stages": lambda: ConvNeXt((8, 12), (1, 2), 3, 2, 5, layer_scale=None),
    "vit": lambda: ViT(16, 4, 8, 2, 2, 5, positions="learned", pool="token", layer_scale=0.1),
    "vit, average": lambda: ViT(16, 4, 8, 2, 2, 5),
    "vit, skip": lambda: ViT(16, 4, 8, 2, 2, 5, layer_scale=0.5, layer_scale_on="skip"),
    "vit, convolutions": lambda: ViT(16, 4, 8, 2, 2, 5, attention="conv-map"),
}


@pytest.mark.parametrize("name", SMALL)
def test_weights_start_from_torchs_defaults(name: str) -> None:
    """Uniform on +-1/sqrt(fan in), biases too: nothing is beyond the bound, and something is near it."""
    torch.manual_seed(0)
    model = SMALL[name]()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            assert 0.8 * bound < layer.weight.abs().max() <= bound
            assert 0 < layer.bias.abs().max() <= bound


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_reset_parameters_of_all_layers_leaves_no_old_value(name: str) -> None:
    """Each layer resets what is its own, as torch's layers do, and nothing is without a layer that resets it."""
    model = SMALL[name]()
    fresh = {n: t.clone() for n, t in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.fill_(99)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    for n, tensor in model.state_dict().items():
        assert tensor.abs().max() <= 1, n
        if fresh[n].numel() > 1 and fresh[n].unique().numel() == 1:  # a constant start: norms, layer scales
            assert torch.equal(tensor, fresh[n]), n


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ConvMixer(8, 2, 4, 2, 10, residual="second"), "residual: expected one of .*found 'second'"),
        (lambda: ConvNeXt(8, 2, drop_path=1.0), r"drop_path: expected a rate in \[0, 1\), found 1.0"),
        (lambda: ConvNeXt((8, 8), 2), "both be numbers or both be sequences"),
        (lambda: ViT(16, 3, 8, 1, 2, 10), "patch_size must divide the image's 16 pixels, found 3"),
        (lambda: ViT(16, 4, 8, 1, 3, 10), "heads must divide width, found width 8 and heads 3"),
        (lambda: ViT(16, 4, 6, 1, 3, 10), "multiple of 4, found 6"),
        (lambda: ViT(16, 4, 8, 1, 2, 10, attention="linear"), "'conv-softmax-map', found 'linear'"),
        (lambda: ViT(16, 4, 8, 1, 2, 10, filter_size=3), "leave it out for 'softmax'"),
        (lambda: ViT(16, 4, 8, 1, 2, 10, attention="conv-map", filter_size=5), "at most 4, .*found 5"),
        (lambda: ViT(16, 4, 8, 1, 2, 10, attention="conv-map", filter_size=2), "odd number.*found 2"),
        (
            lambda: networks.build(
                ConvNeXtConfig(type="convnext", width=(8, 8, 8), depth=(1, 1, 1)),
                in_channels=1, image_size=28, num_classes=10,
            ),
            "reduces the image by a factor of 8, which must divide its 28 pixels",
        ),
    ],
)  # fmt: skip
def test_impossible_networks_are_refused(make, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make()


def test_multiply_adds_by_hand() -> None:
    d, layers, n, tokens, images = 8, 2, 5, 16, torch.zeros(1, 3, 16, 16, device="meta")
    per_block = tokens * (4 * d * d + 8 * d * d) + 2 * tokens**2 * d
    assert multiply_adds(ViT(16, 4, d, layers, 2, n), images) == tokens * 48 * d + layers * per_block + d * n
    h, d, k, p, c, n, size = 8, 2, 3, 4, 3, 5, 16
    pixels = (size // p) ** 2
    expected = pixels * (c * p**2 * h + d * (k**2 * h + h * h)) + h * n
    model = ConvMixer(h, d, k, p, n).train()
    assert multiply_adds(model, images) == expected
    assert model.training
    assert all(not layer._forward_hooks for layer in model.modules())
    assert torch.equal(model.stem[2].running_mean, torch.zeros(h))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_of_recipes_has_arguments_of_its_class(name: str) -> None:
    """Every key is an argument, and takes the same words."""
    section = SECTIONS[name]
    network = member(section.network)
    arguments, hints = inspect.signature(network).parameters, get_type_hints(network.__init__)
    for key, field in section.model_fields.items():
        if key == "type":
            assert get_args(field.annotation) == (name,)
            continue
        assert key in arguments
        if get_origin(hints[key]) is Literal:
            assert get_args(field.annotation) == get_args(hints[key])
    required = {key for key, argument in arguments.items() if argument.default is argument.empty}
    sizes = {"in_channels", "image_size", "num_classes", "vocabulary"}
    assert required <= {*section.model_fields, *sizes}


def _sizes_as_given(*sizes: int) -> nn.Module:
    return nn.Linear(*sizes[:2])


def test_sizes_of_a_network_are_all_named_and_in_any_order():
    config = ConvNeXtConfig(type="convnext", width=8, depth=1, kernel_size=3, patch_size=2)
    for sizes in ({}, {"in_channels": 1, "image_size": 8, "classes": 10}, {"image_size": 8, "vocabulary": 3}):
        with pytest.raises(UsageError, match="sizes of a network: expected in_channels, image_size, num_classes or"):
            networks.build(config, **sizes)
    own = OwnNetworkConfig(type=reference_to(_sizes_as_given))
    assert networks.build(own, num_classes=10, image_size=8, in_channels=1).weight.shape == (8, 1)
