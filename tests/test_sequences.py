"""Networks for sequences: scans against the step-by-step recurrence, Mamba against transformers, hybrids."""

import re

import pytest
import references_sequences as reference
import shims
import torch
from torch import Tensor, nn

from weightscope.anatomy import ssms
from weightscope.errors import UsageError
from weightscope.networks.sequences import (
    CausalTransformer,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba2Mixer,
    MambaMixer,
    block_scan,
    rotated,
    selective_scan,
)


def _scan_inputs(tokens: int, *, batch: int = 2, channels: int = 6, states: int = 4) -> list[Tensor]:
    """Inputs whose decays range from none to 1e-16 within a few tokens, where inverse decays would overflow."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rates = -torch.cat([torch.zeros(channels, 1), torch.rand(channels, states - 1, generator=g) * 40], 1).double()
    values = [normal(batch, tokens, channels), normal(batch, tokens, channels).abs(), rates]
    values += [normal(batch, tokens, states), normal(batch, tokens, states)]
    return [value.requires_grad_() for value in values]


def _block_inputs(tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rates = -torch.tensor([0.0, 1e-3, 1.0, 60.0], dtype=torch.float64)
    values = [normal(2, tokens, 4, 3), normal(2, tokens, 4).abs(), rates]
    values += [normal(2, tokens, 2, 5), normal(2, tokens, 2, 5)]
    return [value.requires_grad_() for value in values]


def _with_gradients(function, inputs: list[Tensor], **options) -> list[Tensor]:
    y = function(*inputs, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


SCANS = [(selective_scan, reference.selective_scan, _scan_inputs, {"segments": n}) for n in (None, 3, 100)]
SCANS += [(block_scan, reference.heads_scan, _block_inputs, {"block": n}) for n in (4, 64)]


@pytest.mark.parametrize(("scan", "recurrence", "make", "option"), SCANS)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_scans_and_their_gradients_are_those_of_the_recurrence(tokens, scan, recurrence, make, option):
    inputs = make(tokens)
    for mine, theirs in zip(_with_gradients(scan, inputs, **option), _with_gradients(recurrence, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("scan", "place", "shape"),
    [
        (selective_scan, 3, (2, 6, 1)),
        (block_scan, 1, (2, 6, 1)),
        (block_scan, 3, (2, 6, 1, 5)),
    ],
)
def test_shapes_that_do_not_fit_are_refused_and_not_broadcast(scan, place, shape):
    inputs = [value.detach() for value in (_scan_inputs(6) if scan is selective_scan else _block_inputs(6))]
    inputs[place] = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(UsageError, match=rf"expected the shapes \(B, n, .*found .*{re.escape(str(shape))}"):
        scan(*inputs)


def test_groups_of_a_scan_divide_the_heads():
    x, delta, a, b, _ = _block_inputs(6)
    with pytest.raises(UsageError, match="groups must divide heads, found heads 4 and groups 3"):
        block_scan(x, delta, a, b[:, :, [0, 1, 1]], b[:, :, [0, 1, 1]])


def _theirs(version: int) -> nn.Module:
    transformers = shims.transformers()
    common = {"vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, "expand": 2}
    if version == 1:
        return transformers.MambaForCausalLM(transformers.MambaConfig(**common)).eval()
    sizes = {"num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**common, **sizes)).eval()


def _ours(version: int) -> nn.Module:
    if version == 1:
        return Mamba(11, 24, 2, state=5)
    return Mamba2(11, 24, 2, state=5, head_width=8, groups=2)


@pytest.mark.parametrize("version", [1, 2])
def test_mamba_exchanges_state_dicts_with_transformers(version):
    theirs, ours = _theirs(version), _ours(version)
    tokens = torch.randint(11, (3, 21), generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in theirs.parameters():  # so that no tensor can be overlooked
            value.copy_(0.5 * torch.randn(value.shape, generator=g))
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    before = ours(tokens).detach()
    ours.load_state_dict(theirs.state_dict())
    expected = theirs(tokens).logits.detach()
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(before, expected, atol=1e-2)
    back = _theirs(version)
    back.load_state_dict(_ours(version).state_dict())
    ours.load_state_dict(back.state_dict())
    torch.testing.assert_close(back(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


def _networks() -> dict[str, nn.Module]:
    hybrid = ["default", "attention", "linear_attention"]
    return {
        "mamba": Mamba(9, 16, 2, state=3),
        "mamba2": Mamba2(9, 16, 2, state=3, head_width=8, groups=2),
        "hybrid": Mamba(9, 16, 3, state=3, layers=hybrid, key_width=8),
        "hybrid of Mamba-2": Mamba2(9, 16, 3, state=3, head_width=8, layers=hybrid),
        "sinusoidal": CausalTransformer(9, 16, 2, heads=2),
        "rotary": CausalTransformer(9, 16, 2, heads=2, positions="rotary"),
    }


@pytest.mark.parametrize("name", list(_networks()))
def test_outputs_depend_on_past_and_present_tokens_only(name):
    torch.manual_seed(0)
    network = _networks()[name].double()
    tokens = torch.randint(9, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 9
    difference = (network(tokens) - network(changed)).abs().amax((0, 2))
    assert difference[:7].max() == 0
    assert difference[7] > 1e-3
    assert difference[-1] > 1e-9  # and reach the last token


def test_layers_of_a_hybrid_are_those_listed():
    network = Mamba2(9, 16, 4, state=3, head_width=8, layers=["default", "attention", "linear_attention", "default"])
    assert [part.name for part in ssms(network)] == ["backbone.layers.0.mixer", "backbone.layers.3.mixer"]
    assert isinstance(network.backbone.layers[2].mixer, LinearAttention)
    grouped = ssms(Mamba2(9, 16, 1, state=3, head_width=8, groups=2))[0]
    assert (grouped.groups, grouped.state, grouped.heads) == (2, 3, 4)
    with pytest.raises(UsageError, match="expected 4 names"):
        Mamba(9, 16, 4, layers=["attention"])
    with pytest.raises(UsageError, match="'linear_attention', found 'hyena'"):
        Mamba(9, 16, 1, layers=["hyena"])


@pytest.mark.parametrize("key_width", [2, 8, 40])
def test_linear_attention_is_the_masked_product(key_width):
    torch.manual_seed(0)
    layer, x = LinearAttention(8, key_width).double(), torch.randn(2, 70, 8, dtype=torch.float64)
    scores = (layer.q_proj(x) @ layer.k_proj(x).mT).tril() / key_width**0.5
    torch.testing.assert_close(layer(x), layer.o_proj(scores @ layer.v_proj(x)))


def test_rotated_products_depend_on_relative_positions():
    q, k = torch.randn(2, 1, 6, dtype=torch.float64).expand(2, 9, 6)
    products = rotated(q) @ rotated(k).T
    torch.testing.assert_close(products[3:, 3:], products[:-3, :-3])
    assert (products[0] - products[0, 0]).abs().max() > 0.1


def test_mamba_starts_from_s4d_rates_and_log_uniform_steps():
    """Bounds of the mean of 2,048 logarithms, log-uniform in [0.001, 0.1]: 5 standard errors, false alarm 6e-7."""
    torch.manual_seed(0)
    mixer = MambaMixer(1024, state=3)
    assert torch.equal(mixer.A_log, torch.tensor([1.0, 2.0, 3.0]).log().expand(2048, 3))
    steps = nn.functional.softplus(mixer.dt_proj.bias.detach().double()).log10()
    assert steps.min() >= -3.0001
    assert steps.max() <= -0.9999
    assert abs(float(steps.mean()) + 2) < 5 * (2 / 12**0.5) / 2048**0.5
    heads = Mamba2Mixer(16, state=3, head_width=8)
    torch.testing.assert_close(heads.A_log.detach().exp(), torch.arange(1.0, 5.0))


def test_wrong_tokens_are_one_line_errors():
    for network in _networks().values():
        for wrong in (9, -1):
            with pytest.raises(UsageError, match=f"expected numbers from 0 to 8, found {wrong}"):
                network(torch.tensor([[0, wrong]]))
    with pytest.raises(UsageError, match=r"expected at most 4 in a sequence.*found 5"):
        CausalTransformer(9, 16, 1, heads=2, context=4)(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"head_width must divide expansion \* width, found expansion \* width 32"):
        Mamba2(9, 16, 1, head_width=7)
