"""Networks for sequences that run stacked give the values and gradients of plain ones, in float64."""

import pytest
import torch

from weightscope.errors import UsageError
from weightscope.networks import scans
from weightscope.networks.sequences import CausalTransformer, Mamba, Mamba2, selective_scan
from weightscope.training.many_networks import StackedNetworks

V, COUNT, BATCH, TOKENS = 11, 3, 2, 9
NETWORKS = {
    "mamba": lambda: Mamba(V, 8, 2, state=3),
    "mamba, not tied": lambda: Mamba(V, 8, 1, state=3, tied=False),
    "mamba2": lambda: Mamba2(V, 8, 2, state=4, head_width=4, groups=2),
    "transformer": lambda: CausalTransformer(V, 8, 2, heads=2, context=TOKENS),
    "rotary": lambda: CausalTransformer(V, 8, 1, heads=2, positions="rotary"),
    "hybrid": lambda: Mamba(V, 8, 3, state=3, layers=["default", "attention", "linear_attention"], key_width=4),
    "mamba2 hybrid": lambda: Mamba2(V, 8, 2, state=4, head_width=8, layers=["attention", "default"]),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(name):
    """Plain networks with random weights, and the same ones stacked."""
    torch.manual_seed(0)
    plain = [NETWORKS[name]().double() for _ in range(COUNT)]
    stacked = StackedNetworks(plain[0], COUNT)
    for network, row in zip(plain, stacked.weights, strict=True):
        parameters = dict(network.named_parameters())
        for tensor, view in stacked.spec.unpack(row).items():
            view.copy_(parameters[tensor].data.add_(0.1 * torch.randn_like(parameters[tensor])))
    return plain, stacked, torch.randint(V, (COUNT, BATCH, TOKENS))


def relative(found, expected):
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_are_those_of_plain_networks(name):
    plain, stacked, tokens = made(name)
    logits = stacked(tokens)
    direction = torch.randn(BATCH, TOKENS, V)
    stacked.backward((logits * direction).sum())
    for t, network in enumerate(plain):
        expected = network(tokens[t])
        assert relative(logits[t], expected) < 1e-10
        parameters = dict(network.named_parameters())
        gradients = torch.autograd.grad((expected * direction).sum(), list(parameters.values()))
        found = stacked.spec.unpack(stacked.gradient[t])
        for tensor, gradient in zip(parameters, gradients, strict=True):
            assert relative(found[tensor], gradient) < 1e-10, tensor
        assert sum(g.abs().sum() > 0 for g in gradients) == len(gradients)


@pytest.mark.parametrize("name", NETWORKS)
def test_shared_tokens_and_evaluation(name):
    plain, stacked, tokens = made(name)
    with torch.no_grad():
        found = stacked.eval()(tokens[0])
        assert relative(found, torch.stack([network.eval()(tokens[0]) for network in plain])) < 1e-10


@pytest.mark.parametrize("name", NETWORKS)
def test_a_diverged_network_does_not_touch_the_others(name):
    plain, stacked, tokens = made(name)
    stacked.weights[0] = float("nan")
    logits = stacked(tokens)
    stacked.backward(logits.square().sum())
    assert logits[0].isnan().all()
    for t, network in list(enumerate(plain))[1:]:
        expected = network(tokens[t])
        assert relative(logits[t], expected) < 1e-10
        parameters = list(network.parameters())
        for gradient, view in zip(
            torch.autograd.grad(expected.square().sum(), parameters),
            [stacked.spec.unpack(stacked.gradient[t])[name] for name, _ in network.named_parameters()],
            strict=True,
        ):
            assert relative(view, gradient) < 1e-10


def test_frozen_tensors_have_no_gradient():
    _, stacked, tokens = made("mamba")
    stacked.freeze(("backbone.norm_f.weight",))
    stacked.backward(stacked(tokens).square().sum())
    views = stacked.spec.unpack(stacked.gradient)
    assert views["backbone.norm_f.weight"].abs().max() == 0
    assert views["backbone.embeddings.weight"].abs().max() > 0


def test_wrong_tokens_and_running_statistics_are_refused():
    _, stacked, tokens = made("mamba2")
    tokens[1, 0, 3] = V
    with pytest.raises(UsageError, match=f"tokens: expected numbers from 0 to {V - 1}, found {V}"):
        stacked(tokens)
    with pytest.raises(UsageError, match=r"`1.running_mean`, a buffer.*engine = \"loop\""):
        StackedNetworks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), 2)


@pytest.mark.parametrize("at_once", [1, 100, 10_000])
@pytest.mark.parametrize("rates_too", [False, True])
def test_scans_of_many_networks_run_in_any_parts(at_once, rates_too, monkeypatch):
    """`vmap` of the scan against one scan after the other, with cuts of any size; gradients too."""
    torch.manual_seed(1)
    values = [torch.randn(COUNT, BATCH, TOKENS, 4), torch.rand(COUNT, BATCH, TOKENS, 4), -torch.rand(COUNT, 4, 3)]
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
    found = torch.vmap(selective_scan, dims)(*values)
    assert relative(found, expected) < 1e-12
    for mine, theirs in zip(torch.autograd.grad((found * direction).sum(), values), there, strict=True):
        assert relative(mine, theirs) < 1e-10
