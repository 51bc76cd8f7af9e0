"""Batched networks for images, and stacked ones for sequences, against the plain modules that they stand for."""

from functools import partial

import pytest
import torch
from torch import nn

from weightscope.errors import UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT, scans
from weightscope.networks.sequences import CausalTransformer, Mamba, Mamba2, selective_scan
from weightscope.training.kernels import functions
from weightscope.training.many_networks import BatchedNetworks, StackedNetworks

NETWORKS = {
    "convnext": lambda: ConvNeXt(8, 2, 7, 2, 5, expansion=2, in_channels=1, layer_scale=0.5),
    "convnext-stages": lambda: ConvNeXt((8, 12), (1, 2), 3, 2, 5, in_channels=1, layer_scale=None),
    "convnext-large-image": lambda: ConvNeXt(4, 1, 7, 1, 5, in_channels=1, layer_scale=None),
    "convmixer": lambda: ConvMixer(8, 2, 5, 2, 5, in_channels=1),
    "convmixer-sizes-by-depth": lambda: ConvMixer(8, 3, (3, 4, 5), 1, 5, in_channels=1),
    "convmixer-none": lambda: ConvMixer(8, 2, 3, 2, 5, in_channels=1, residual="none", norm="layer"),
    "convmixer-both": lambda: ConvMixer(8, 2, 3, 2, 5, in_channels=1, residual="both"),
    "convmixer-relu": lambda: ConvMixer(8, 2, 8, 2, 5, in_channels=1, activation="relu"),
    "convmixer-even-dilated": lambda: ConvMixer(4, 4, 4, 2, 5, in_channels=1, dilations="D"),
    "convnext-even": lambda: ConvNeXt(8, 2, 4, 2, 5, expansion=2, in_channels=1, layer_scale=0.5),
    "convnext-sum": lambda: ConvNeXt((8, 12), (1, 1), 3, 2, 5, in_channels=1, layer_scale=None, learned_sum=0.2),
    "vit": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1),
    "vit-token": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, pool="token", positions="learned", layer_scale=0.3),
    "vit-gpsa-token": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, attention="gpsa", pool="token"),
    "vit-conv-logits": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, attention="conv-logits", pool="token"),
    "vit-conv-map": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, attention="conv-map", qkv_bias=False),
    "vit-conv-softmax-map": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, attention="conv-softmax-map", filter_size=1),
    "vit-layer-scale": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, layer_scale=0.3, layer_scale_on="attention"),
    "vit-skip-scale": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, layer_scale=0.3, layer_scale_on="skip"),
    "cnn": lambda: nn.Sequential(  # what a tutorial trains
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3, stride=2), nn.LeakyReLU(0.1), nn.AvgPool2d(2, padding=1), nn.Flatten()),
        *(nn.Linear(32, 12), nn.Sigmoid(), nn.Linear(12, 5)),
    ),
    "conv-variants": lambda: nn.Sequential(
        nn.Conv2d(1, 4, (3, 5), stride=2, padding=1),
        nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2, bias=False),
        nn.Conv2d(6, 6, (3, 1), groups=6, padding="same"),
        nn.Conv2d(6, 4, (2, 1), stride=(2, 1)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    ),
}


V, COUNT, BATCH, TOKENS = 11, 3, 2, 9
SCAN_IN_C = functions.scan, functions.scan_backward
SEQUENCES = {
    "mamba": lambda: Mamba(V, 8, 2, state=3),
    "mamba, not tied": lambda: Mamba(V, 8, 1, state=3, tied=False),
    "mamba2": lambda: Mamba2(V, 8, 2, state=4, head_width=4, groups=2),
    "transformer": lambda: CausalTransformer(V, 8, 2, heads=2, context=TOKENS),
    "rotary": lambda: CausalTransformer(V, 8, 1, heads=2, positions="rotary"),
    "hybrid": lambda: Mamba(V, 8, 3, state=3, layers=["default", "attention", "linear_attention"], key_width=4),
    "mamba2 hybrid": lambda: Mamba2(V, 8, 2, state=4, head_width=8, layers=["attention", "default"]),
}
every_network = pytest.mark.parametrize(
    ("name", "kernel_set"),
    [
        *(pytest.param(name, kernels, marks=pytest.mark.slow) for name in NETWORKS for kernels in ("torch", "c")),
        *((name, "torch") for name in SEQUENCES),
        *((name, "c") for name in ("mamba", "hybrid")),
    ],
    indirect=["kernel_set"],
)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(name, count=COUNT, kernels="torch"):
    """Networks as one, and the plain ones."""
    torch.manual_seed(0)
    plain = [(NETWORKS | SEQUENCES)[name]() for _ in range(count)]
    form = StackedNetworks if name in SEQUENCES else BatchedNetworks
    nets = form(plain[0], count, kernels=kernels)
    return copy_weights(nets, plain), plain


def copy_weights(nets, plain):
    """Running statistics and scales are moved away from their defaults."""
    for row, network in zip(nets.weights, plain, strict=True):
        state = network.state_dict()
        for tensor, view in nets.spec.unpack(row).items():
            view.copy_(state[tensor].add_(0.1 * torch.rand_like(state[tensor])))
    return nets


def draw_inputs(name, batch):
    sequences = name in SEQUENCES
    return torch.randint(V, (COUNT, batch, TOKENS)) if sequences else torch.randn(COUNT, batch, 1, 16, 16)


@pytest.mark.parametrize("mode", ["train", "eval"])
@every_network
def test_logits_and_gradients_equal_the_plain_networks(name, kernel_set, mode):
    nets, plain = make(name, kernels=kernel_set)
    check_against_plain(nets, plain, mode, draw_inputs(name, batch=6))
    if name in SEQUENCES:
        assert all(parameter.grad.any() for network in plain for parameter in network.parameters())


def check_against_plain(nets, plain, mode, inputs):
    """With inputs of each network in training, and the same for all in evaluation."""
    logits = getattr(nets, mode)()(inputs if mode == "train" else inputs[0])
    direction = torch.randn_like(logits)
    nets.backward((logits * direction).sum())
    for t, network in enumerate(plain):
        getattr(network, mode)().zero_grad()
        expected = network(inputs[t if mode == "train" else 0])
        torch.testing.assert_close(logits[t], expected, rtol=1e-10, atol=1e-12)
        (expected * direction[t]).sum().backward()
        gradient = nets.spec.unpack(nets.gradient[t])
        for parameter_name, parameter in network.named_parameters():
            torch.testing.assert_close(gradient[parameter_name], parameter.grad, rtol=1e-9, atol=1e-11)


def test_batch_norm_statistics_are_the_mean_over_the_calibration_batches():
    batched, plain = make("convmixer", count=2)
    batches = [torch.randn(5, 1, 16, 16) + shift for shift in range(3)]
    batched.calibrate(batches)
    for t, network in enumerate(plain):
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # a cumulative, equally weighted average
        network.train()
        for batch in batches:
            network(batch)
        found = batched.spec.unpack(batched.weights[t])
        for name, buffer in network.named_buffers():
            if "running" in name:
                torch.testing.assert_close(found[name], buffer)


class _MyLinear(nn.Linear):
    """May compute anything."""


class _Scaled(nn.Module):
    def __init__(self, shape, buffer):
        super().__init__()
        value = torch.ones(shape)
        self.register_buffer("scale", value) if buffer else self.register_parameter("scale", nn.Parameter(value))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LSTM(2, 2), r"`1` \(LSTM\) has no batched version"),
        (_MyLinear(2, 2), r"`1` \(_MyLinear\) has no batched version"),
        (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), "`1`: Conv2d.* pads with zeros"),
        (nn.BatchNorm2d(2, affine=False), "`1`: BatchNorm2d.* needs a weight and a bias"),
        (nn.LayerNorm((2, 2)), "`1`: LayerNorm.* one axis"),
        (_Scaled((2,), buffer=True), r"`1.scale`, a buffer of _Scaled, cannot be batched"),
        (_Scaled((), buffer=False), "`1.scale` is a scalar"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_without_a_batched_version_is_named(layer, message):
    with pytest.raises(UsageError, match=message + '.*use training.engine = "loop"'):
        BatchedNetworks(nn.Sequential(nn.Linear(2, 2), layer), 2)


def test_running_statistics_of_networks_for_sequences_are_refused():
    with pytest.raises(UsageError, match=r"`1.running_mean`, a buffer.*engine = \"loop\""):
        StackedNetworks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), 2)


@pytest.mark.parametrize(("at_once", "kernel", "width"), [(1, None, 4), (100, None, 4), (100, SCAN_IN_C, 19)])
@pytest.mark.parametrize("rates_too", [False, True])
def test_scans_of_many_networks_run_in_any_parts(at_once, kernel, width, rates_too, monkeypatch):
    """`vmap` of the scan against one scan after the other, with cuts of any size, and in C; gradients too."""
    torch.manual_seed(1)
    shape = COUNT, BATCH, TOKENS, width
    values = [torch.randn(shape), torch.rand(shape), -torch.rand(COUNT, width, 3)]
    values += [torch.randn(COUNT, BATCH, TOKENS, 3) for _ in range(2)]
    if not rates_too:
        values[2] = values[2][0]
    values = [value.requires_grad_() for value in values]
    dims = (0, 0, 0 if rates_too else None, 0, 0)
    expected = torch.stack(
        [selective_scan(*(v if d is None else v[t] for v, d in zip(values, dims, strict=True))) for t in range(COUNT)]
    )
    direction = torch.randn_like(expected)
    there = torch.autograd.grad((expected * direction).sum(), values)
    monkeypatch.setattr(scans, "_AT_ONCE", at_once)
    found = torch.vmap(partial(selective_scan, kernel=kernel), dims)(*values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad((found * direction).sum(), values), there, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
