"""Stacked networks against the plain modules that they stand for."""

import pytest
import torch
from torch import nn

from weightscope.errors import UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.spec import WeightSpec
from weightscope.training.batched_networks import StackedNetworks

NETWORKS = {
    "convnext": lambda: ConvNeXt(8, 2, 7, 2, 5, expansion=2, in_channels=1, layer_scale=0.5),
    "convnext-stages": lambda: ConvNeXt((8, 12), (1, 2), 3, 2, 5, in_channels=1, layer_scale=None),
    "convnext-large-image": lambda: ConvNeXt(4, 1, 7, 1, 5, in_channels=1, layer_scale=None),
    "convmixer": lambda: ConvMixer(8, 2, 5, 2, 5, in_channels=1),
    "convmixer-dilated": lambda: ConvMixer(8, 4, 3, 1, 5, in_channels=1, dilations="D"),
    "vit": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1),
    "vit-token": lambda: ViT(16, 4, 8, 2, 2, 5, in_channels=1, pool="token", positions="learned", layer_scale=0.3),
}


def make(name: str, count: int = 3, kernels: str = "torch") -> tuple[StackedNetworks, list[nn.Module]]:
    torch.manual_seed(0)
    plain = [NETWORKS[name]().double() for _ in range(count)]
    for network in plain:  # running statistics and scales away from their defaults
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.add_(0.1 * torch.rand_like(value))
    return stack_in_float64(plain, kernels), plain


def stack_in_float64(plain: list[nn.Module], kernels: str) -> StackedNetworks:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        stacked = StackedNetworks(plain[0], len(plain), kernels=kernels)
    finally:
        torch.set_default_dtype(before)
    for row, network in zip(stacked.weights, plain, strict=True):
        values = {name: network.state_dict()[name].numpy() for name in stacked.spec.names}
        row.copy_(torch.from_numpy(stacked.spec.pack(values, "float64")))
    return stacked


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_logits_and_gradients_equal_the_plain_networks(name: str, mode: str, kernel_set: str) -> None:
    check_against_plain(*make(name, kernels=kernel_set), mode, batch=6)


def check_against_plain(stacked: StackedNetworks, plain: list[nn.Module], mode: str, batch: int) -> None:
    images = torch.randn(len(plain), batch, 1, 16, 16, dtype=torch.float64)
    direction = torch.randn(len(plain), batch, 5, dtype=torch.float64)
    getattr(stacked, mode)()
    logits = stacked(images)
    stacked.backward((logits * direction).sum())
    for t, network in enumerate(plain):
        getattr(network, mode)()
        expected = network(images[t])
        torch.testing.assert_close(logits[t], expected, rtol=1e-10, atol=1e-12)
        (expected * direction[t]).sum().backward()
        gradient = stacked.spec.unpack(stacked.gradient[t])
        for parameter_name, parameter in network.named_parameters():
            torch.testing.assert_close(gradient[parameter_name], parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["convnext", "convmixer", "vit-token"])
def test_a_network_that_diverges_does_not_disturb_its_neighbours(name: str, kernel_set: str) -> None:
    results = []
    for poison in (False, True):
        stacked, _ = make(name, kernels=kernel_set)
        if poison:
            stacked.weights[1] = float("nan")
        logits = stacked(torch.linspace(-1, 1, 4 * 256, dtype=torch.float64).view(4, 1, 16, 16))
        stacked.backward(logits.sum())
        results.append((logits.detach(), stacked.gradient.clone()))
    (clean, clean_gradient), (poisoned, poisoned_gradient) = results
    assert poisoned[1].isnan().all()
    assert torch.equal(clean[[0, 2]], poisoned[[0, 2]])
    assert torch.equal(clean_gradient[[0, 2]], poisoned_gradient[[0, 2]])


def test_batch_norm_statistics_are_the_mean_over_the_calibration_batches() -> None:
    stacked, plain = make("convmixer", count=2)
    batches = [torch.randn(5, 1, 16, 16, dtype=torch.float64) + shift for shift in range(3)]
    stacked.calibrate(batches)
    for t, network in enumerate(plain):
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # a cumulative, equally weighted average
        network.train()
        for batch in batches:
            network(batch)
        found = stacked.spec.unpack(stacked.weights[t])
        for name, buffer in network.named_buffers():
            if "running" in name:
                torch.testing.assert_close(found[name], buffer)


def test_frozen_tensors_get_no_gradient(kernel_set: str) -> None:
    stacked, _ = make("convnext", kernels=kernel_set)
    stacked.freeze(("stages.0.blocks.0.conv_dw.weight",))
    stacked.backward(stacked(torch.randn(2, 1, 16, 16, dtype=torch.float64)).sum())
    gradient = stacked.spec.unpack(stacked.gradient)
    assert not gradient["stages.0.blocks.0.conv_dw.weight"].any()
    assert gradient["stages.0.blocks.1.conv_dw.weight"].any()


def test_a_layer_without_a_twin_is_named() -> None:
    with pytest.raises(UsageError, match="`1`, a LSTM"):
        StackedNetworks(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), 2)
    with pytest.raises(UsageError, match="cannot stack Conv2d"):
        StackedNetworks(nn.Sequential(nn.Conv2d(2, 4, 3)), 2)


def test_the_rows_are_in_spec_order() -> None:
    network = NETWORKS["convnext"]()
    assert StackedNetworks(network, 2).spec == WeightSpec.of(network)
