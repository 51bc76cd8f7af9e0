"""MLP, state-space and residual initialisers: what they do to the function a network computes."""

import copy
import math

import pytest
import torch
from families import FAMILIES, seeded
from torch import nn

from weightscope import anatomy, audit
from weightscope.errors import UsageError
from weightscope.init import (
    delta_orthogonal_,
    layer_scale_identity_,
    mimetic_first_last_mlp_,
    mimetic_mlp_,
    mimetic_ssm_,
    t_fixup_,
    xavier_,
    zero_init_,
)
from weightscope.init.baselines import zero_matrix
from weightscope.networks import ConvNeXt, ViT
from weightscope.networks.sequences import Mamba, Mamba2


def vit(**options):
    torch.manual_seed(0)
    return ViT(16, 4, 48, 2, 3, 10, **options)


def test_after_a_layer_norm_the_scalar_mean_changes_gradients_only():
    before = vit()
    after = mimetic_mlp_(copy.deepcopy(before), b=1.0)
    x = torch.randn(2, 3, 16, 16, generator=seeded(2))
    outputs = [net(x) for net in (before, after)]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)
    for out in outputs:
        out.square().mean().backward()
    one, other = (net.blocks[0].norm2.bias.grad for net in (before, after))
    assert (one - other).norm() > 0.1 * one.norm()


@pytest.mark.parametrize(("distribution", "most"), [("uniform", (1.7, 3**0.5 + 1e-6)), ("normal", (3, 6))])
def test_xavier_has_the_stated_variance_and_distribution(distribution, most):
    """Of 16,384 squares of relative variance 2 at most, within 4.9 deviations."""
    model = nn.Linear(64, 256)
    xavier_(model, distribution=distribution, gain=0.5, generator=seeded())
    scaled = model.weight / (0.5 * math.sqrt(2 / 320))
    assert scaled.square().mean().item() == pytest.approx(1, rel=4.9 * math.sqrt(2 / 16_384))
    assert most[0] < scaled.abs().max() <= most[1]


def convnext(width, depth=2):
    torch.manual_seed(0)
    return ConvNeXt(width, depth, kernel_size=3, patch_size=2, expansion=2, layer_scale=None)


def test_rows_of_the_last_mlp_move_as_a_whole():
    """And their means are mixed with the first MLP's as stated; entries are mixed one by one."""
    model = convnext(16, depth=3)
    old = [part.read("fc2").clone() for part in anatomy.mlps(model)]
    mimetic_first_last_mlp_(model, correlation=-1.0, mode="rows")
    moved = anatomy.mlps(model)[2].read("fc2")
    first, last = (w.mean(1) for w in (old[0], old[2]))
    expected = last.mean() - (first - first.mean()) / first.std() * last.std()
    torch.testing.assert_close(moved - old[2], (expected - last)[:, None].expand_as(moved), rtol=0, atol=1e-6)
    mimetic_first_last_mlp_(model, correlation=-1.0)
    both = torch.stack([old[0].flatten(), anatomy.mlps(model)[2].read("fc2").flatten()])
    assert torch.corrcoef(both)[0, 1].item() == pytest.approx(-1, abs=1e-5)


def test_the_identity_convolution_passes_the_current_token():
    model = mimetic_ssm_(FAMILIES["hf-mamba"].build(), convolution=True)
    mixer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    x = torch.randn(1, mixer.conv1d.weight.shape[0], 9, generator=seeded())
    torch.testing.assert_close(mixer.conv1d(x)[..., :9], x)


def test_some_heads_of_mamba2_decay_slowly_and_step_by_one():
    torch.manual_seed(0)
    before = Mamba2(64, 32, 2, state=16, head_width=16)
    after = mimetic_ssm_(copy.deepcopy(before), heads=[1, 3], cb=False, convolution=False)
    for old, new in zip(anatomy.ssms(before), anatomy.ssms(after), strict=True):
        wanted = old.read("A_log").double()
        wanted[[1, 3]] *= -8
        torch.testing.assert_close(new.read("A_log").double(), wanted)
        moved = torch.nn.functional.softplus(new.read("dt_bias").double()).sub(1).abs() < 1e-6
        assert moved.nonzero()[:, 0].tolist() == [1, 3]
        assert (new.read("dt_weight") == 0).all(1).nonzero()[:, 0].tolist() == [1, 3]
    options = {"cb": False, "convolution": False}
    assert audit(after, "mimetic_ssm", heads=[1, 3], **options).passed
    assert not audit(after, "mimetic_ssm", heads=[0, 1], **options).passed
    with pytest.raises(UsageError, match=r"heads of .*: expected some of .*, found 99"):
        mimetic_ssm_(after, heads=99)
    with pytest.raises(UsageError, match="is a Mamba layer and has none"):
        mimetic_ssm_(Mamba(64, 32, 1, state=4), heads=0)


def test_zero_matrices_are_zeros_and_ones_up_to_a_factor():
    assert torch.equal(zero_matrix(3, 3), torch.eye(3))
    assert torch.equal(zero_matrix(2, 4), torch.eye(4)[:2])
    tall = zero_matrix(12, 5)  # m = 4, c = 2^(-3/2)
    assert torch.equal(tall.abs(), torch.full((12, 5), 2**-1.5))
    square = zero_matrix(16, 8) / 2**-1.5  # whole columns of a Hadamard matrix are orthogonal
    assert torch.equal(square.T @ square, 16 * torch.eye(8))


def test_with_zero_init_every_branch_adds_nothing():
    model = zero_init_(vit(), parts="both")
    x = torch.randn(2, 16, 48, generator=seeded())
    assert torch.equal(model.blocks(x), x)
    assert torch.equal(zero_init_(vit()).blocks[0].mlp.fc2.weight, vit().blocks[0].mlp.fc2.weight)
    for part in anatomy.attention(model):  # attention paper, section 2: zero and the identity, whose product is zero
        assert not part.read("q").any()
        keys = part.read("k").double()  # (heads, d, k)
        torch.testing.assert_close(keys.transpose(0, 1).flatten(1), torch.eye(part.width, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "scale"), [("encoder", 0.67 * 2**-0.25), ("decoder", 18**-0.25)])
def test_t_fixup_scales_by_depth(kind, scale):
    model = t_fixup_(vit(), kind=kind, generator=seeded())
    part = anatomy.attention(model)[0]
    bound = math.sqrt(6 / 96)
    assert 0.95 * bound < part.read("q").abs().max() <= bound
    assert 0.95 * bound * scale < part.read("v").abs().max() <= bound * scale
    mlp = anatomy.mlps(model)[1]
    assert 0.95 < mlp.read("fc2").abs().max() / (math.sqrt(6 / (5 * 48)) * scale) <= 1 + 1e-6


def test_t_fixup_embeddings():
    model = t_fixup_(FAMILIES["hf-gpt2"].build(), kind="decoder", embeddings=True, generator=seeded())
    table = model.transformer.wte.weight.detach()
    assert abs(table.std() / (18**-0.25 / math.sqrt(48)) - 1) < 6 / math.sqrt(2 * table.numel())


@pytest.mark.parametrize("groups", [1, 4])
def test_delta_orthogonal_convolutions_are_isometries(groups):
    layer = delta_orthogonal_(nn.Conv2d(12, 24, 5, padding=2, groups=groups), generator=seeded())
    x = torch.randn(2, 12, 9, 9, generator=seeded(1))
    torch.testing.assert_close(layer(x).square().sum(), x.square().sum())
    narrow = delta_orthogonal_(nn.Conv2d(24, 12, 3, padding=1, bias=False), gain=2.0, generator=seeded())
    centre = narrow.weight.detach()[:, :, 1, 1]
    torch.testing.assert_close(centre @ centre.T, 4 * torch.eye(12), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"layer_scale": 1.0}])
def test_layer_scale_multiplies_each_branch(options):
    """With factors or folded into the matrices, a block computes x + value f(x)."""
    before, after = vit(**options), layer_scale_identity_(vit(**options), value=0.01)
    block, scaled = before.blocks[0], after.blocks[0]
    x = torch.randn(2, 16, 48, generator=seeded())
    branch = block.ls1(block.attn(block.norm1(x)))
    torch.testing.assert_close(scaled.ls1(scaled.attn(scaled.norm1(x))), 0.01 * branch, atol=1e-6, rtol=1e-4)
    branch = block.ls2(block.mlp(block.norm2(x)))
    torch.testing.assert_close(scaled.ls2(scaled.mlp(scaled.norm2(x))), 0.01 * branch, atol=1e-6, rtol=1e-4)
