import copy
import math

import pytest
import torch
from families import seeded
from references_init import impulse_adam, impulse_map
from torch import nn

from weightscope.anatomy import attention, positions
from weightscope.anatomy.embedding import TokenGrid
from weightscope.auditing import audit
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init import impulse_attention, impulse_attention_, sinusoidal_positions_
from weightscope.init.impulse_attention import (
    _Problem,
    _pseudo,
    attention_map,
    by_adam,
    coordinates,
    filter_offsets,
    impulse_matrix,
    normalised,
    solve,
)
from weightscope.networks import ViT
from weightscope.networks.layers import sinusoidal_positions

GRID = TokenGrid(16, 16)
BOUND = 4e-5  # mean squared error of a 256 x 256 map


@pytest.fixture(scope="module")
def codes():
    return normalised(sinusoidal_positions(16, 16, 192))


@pytest.fixture(scope="module")
def solved(codes):
    return solve(codes, GRID, filter_offsets(3, True), 64)


def error(codes, pair, offset, tokens=GRID):
    found = attention_map(codes, *pair, 1 / math.sqrt(pair[0].shape[1]), tokens.causal)
    return (found - impulse_matrix(tokens, offset)).square().mean().item()


@pytest.mark.parametrize("offset", [(0, 0), (0, 1), (-2, 1), (3, 0)])
def test_the_wanted_map_equals_the_naive_one(offset):
    tokens = TokenGrid(5, 7)
    assert torch.equal(impulse_matrix(tokens, offset).double(), impulse_map(5, 7, *offset))
    with_class = impulse_matrix(TokenGrid(5, 7, prefix=2), offset)
    assert torch.equal(with_class[2:, 2:], impulse_matrix(tokens, offset))
    assert not with_class[:2].any()
    assert not with_class[:, :2].any()


@pytest.mark.slow
@pytest.mark.parametrize("offset", filter_offsets(3, True))
def test_every_offset_meets_the_bound_with_every_peak_in_place(codes, solved, offset):
    assert error(codes, solved[offset], offset) < BOUND
    wanted = impulse_matrix(GRID, offset)
    inside = wanted.sum(1) > 0
    found = attention_map(codes, *solved[offset], 1 / 8)
    assert torch.equal(found[inside].argmax(1), wanted[inside].argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variance", "most"), [("gaussian", 0.25, 2.0), ("uniform", 1 / 3, 1.0)])
def test_random_pseudo_inputs_have_the_stated_deviation(kind, variance, most, monkeypatch):
    """Before LayerNorm; in mixtures it is the weight of the random part.

    Of 49,152 squares of relative variance <= 2, 4.9 deviations.
    """
    monkeypatch.setattr(impulse_attention, "normalised", lambda x: x)
    codes = sinusoidal_positions(16, 16, 192)
    for mixed in (False, True):
        drawn = _pseudo("positions+" * mixed + kind, codes, seeded()) - mixed * codes
        assert drawn.square().mean().item() == pytest.approx(variance, rel=4.9 * (2 / 49_152) ** 0.5)
        assert 0.95 * most < drawn.abs().max() <= most * (1 + 1e-6)


def test_class_tokens_are_not_looked_at_and_causal_sequences_look_back():
    for tokens, offset, special in ((TokenGrid(8, 8, 1), (1, 0), 1), (TokenGrid(1, 32, causal=True), (0, -1), 0)):
        grid = sinusoidal_positions(tokens.rows if special else 32, 8 if special else None, 96)
        x = normalised(torch.cat([torch.zeros(special, 96), grid]))
        found = attention_map(x, *solve(x, tokens, [offset], 8)[offset], 8**-0.5, tokens.causal)
        wanted = impulse_matrix(tokens, offset)
        inside = wanted.sum(1) > 0
        assert torch.equal(found[inside].argmax(1), wanted[inside].argmax(1))
        assert found[inside, :special].sum() < 0.05 * inside.sum()


def test_a_shared_key_serves_every_offset(codes):
    pairs = solve(codes, GRID, [(0, 0), (0, 1), (-1, -1)], 64, shared_key=True)
    assert all(torch.equal(pair[1], pairs[0, 0][1]) for pair in pairs.values())
    assert all(error(codes, pair, offset) < BOUND for offset, pair in pairs.items())


def vit(depth=3, heads=3, width=48, **options):
    return ViT(32, 4, width, depth, heads, 10, **options)


def offsets_of(model, tokens=None):
    """The offset of the nearest impulse of each head, layer by layer."""
    tokens = tokens or TokenGrid(8, 8)
    x = normalised(positions(model)[0].read())
    wanted = {o: impulse_matrix(tokens, o) for o in filter_offsets(5, True)}
    out = []
    for part in attention(model):
        found = [
            attention_map(x, q.double(), k.double(), part.scale)
            for q, k in zip(part.read("q"), part.read("k"), strict=True)
        ]
        out.append([min(wanted, key=lambda o, f=f: (f - wanted[o]).square().sum().item()) for f in found])
    return out


def test_offsets_are_dealt_without_repetition_and_differ_between_layers():
    dealt = offsets_of(impulse_attention_(vit(heads=6), generator=seeded(1)))
    assert all(len(set(layer)) == 6 and set(layer) <= set(filter_offsets(3, True)) for layer in dealt)
    assert dealt[0] != dealt[1]


def test_given_offsets_and_cycles():
    model = impulse_attention_(vit(depth=2), offsets=[(0, 1), (2, 0)], generator=seeded())
    assert offsets_of(model) == [[(0, 1), (2, 0), (0, 1)], [(2, 0), (0, 1), (2, 0)]]
    model = impulse_attention_(vit(depth=3), offsets="cycle", generator=seeded())
    assert [o for layer in offsets_of(model) for o in layer] == filter_offsets(3, True)


def test_heads_with_one_offset_have_different_weights():
    model = impulse_attention_(vit(depth=2), offsets=[(0, 1)], generator=seeded())
    heads = torch.cat([part.read("q") for part in attention(model)]).flatten(1)
    similar = torch.nn.functional.cosine_similarity(heads[:, None], heads[None], dim=-1)
    assert (similar - torch.eye(len(heads))).abs().max() < 0.6
    assert offsets_of(model) == [[(0, 1)] * 3] * 2


@pytest.mark.parametrize("steps", [None, 2])
def test_same_layers_repeat_the_first(steps):
    model = impulse_attention_(vit(), same_layers=True, adam_steps=steps, generator=seeded())
    first, *others = attention(model)
    assert all(torch.equal(first.read(name), part.read(name)) for part in others for name in "qk")


def test_queries_and_keys_outside_the_span_of_the_codes_are_kept():
    """Algorithm 1's gradients lie in the span of the codes, few of the 192 directions: heads solved alone lack rank."""
    torch.manual_seed(0)
    model = ViT(32, 2, 192, 1, 3, 10)
    before = attention(copy.deepcopy(model))[0]
    impulse_attention_(model, offsets=[(0, 1), (1, 0), (-1, -1)], generator=seeded())
    part = attention(model)[0]
    x = normalised(positions(model)[0].read())
    v = coordinates(x)[1]
    torch.testing.assert_close(v @ v.T, torch.eye(len(v), dtype=torch.float64))
    assert (x - x @ v.T @ v).norm() < 1e-3 * x.norm()
    assert len(v) < 64
    for name in "qk":
        assert torch.linalg.matrix_rank(part.read(name)).tolist() == [64] * 3
        old, new = (p.read(name).double() for p in (before, part))
        torch.testing.assert_close(new - v.T @ (v @ new), old - v.T @ (v @ old), atol=1e-6, rtol=0)
    assert offsets_of(model, GRID) == [[(0, 1), (1, 0), (-1, -1)]]
    for h, offset in enumerate([(0, 1), (1, 0), (-1, -1)]):
        assert error(x, (part.read("q")[h].double(), part.read("k")[h].double()), offset) < BOUND


def test_weights_that_are_kept_must_be_finite():
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"`blocks\.1\.attn` q: expected finite weights"):
        impulse_attention_(model)


def test_adam_is_algorithm_1_head_by_head():
    """The reference runs each head alone, from the weights that the module has."""
    torch.manual_seed(0)
    model = ViT(16, 4, 48, 2, 3, 10)
    before = [{name: part.read(name) for name in "qk"} for part in attention(copy.deepcopy(model))]
    given = [(0, 1), (1, 1), (0, 0), (-1, 0)]
    impulse_attention_(model, offsets=given, adam_steps=40, generator=seeded())
    codes = positions(model)[0].read()
    for i, part in enumerate(attention(model)):
        for h in range(3):
            offset = given[(3 * i + h) % 4]
            start = before[i]["q"][h], before[i]["k"][h]
            q, k = impulse_adam(codes, impulse_map(4, 4, *offset), 16, 40, 1e-4, start=start)
            for found, wanted, old in zip((part.read("q")[h], part.read("k")[h]), (q, k), start, strict=True):
                # Where gradients vanish, Adam amplifies rounding to a share of its step.
                assert (found - wanted).norm() < 2e-3 * (wanted - old).norm()
                assert (wanted - old).abs().max() > 3e-3  # 40 steps of 1e-4
    report = audit(model, "impulse_attention", offsets=given, adam_steps=40)
    assert "logit factor" not in {check.statistic for check in report.checks}


def test_layers_after_the_first_may_have_another_pseudo_input():
    model = vit()
    plain = copy.deepcopy(model)
    impulse_attention_(model, following="gaussian", offsets=[(0, 1)], generator=seeded())
    impulse_attention_(plain, offsets=[(0, 1)], generator=seeded())
    assert torch.equal(attention(model)[0].read("q"), attention(plain)[0].read("q"))
    assert offsets_of(model)[0] == [(0, 1)] * 3
    assert not torch.allclose(attention(model)[1].read("q"), attention(plain)[1].read("q"), atol=1e-2)


def test_the_modules_own_codes_are_used():
    """Learned positions are random vectors: the maps hold for them, and no longer for sinusoidal codes."""
    model = vit(positions="learned", depth=1)
    impulse_attention_(model, offsets=[(1, 1)], generator=seeded())
    assert offsets_of(model) == [[(1, 1)] * 3]
    sinusoidal_positions_(model)
    assert offsets_of(model) != [[(1, 1)] * 3]


def test_biases_that_would_bend_the_map_become_zero():
    layer = nn.TransformerEncoderLayer(48, 3, 96, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_bias.fill_(1)
    impulse_attention_(layer, grid=(4, 4), generator=seeded())
    assert layer.self_attn.in_proj_bias.tolist() == [0.0] * 96 + [1.0] * 48


def test_no_positions_need_a_grid_and_codes_must_fit():
    layer = nn.TransformerEncoderLayer(48, 3, 96, batch_first=True)
    with pytest.raises(AnatomyError, match=r"give grid="):
        impulse_attention_(layer)
    with pytest.raises(
        UsageError, match="whether later tokens are masked, found that its caller decides; give causal="
    ):
        impulse_attention_(layer, grid=16, generator=seeded())
    for causal in (True, False):
        impulse_attention_(layer, grid=16, causal=causal, generator=seeded())
        (part,) = attention(layer)
        codes = normalised(sinusoidal_positions(16, None, 48))
        maps = attention_map(codes, part.read("q")[0].double(), part.read("k")[0].double(), part.scale, causal)
        hits = {offset: (maps.diagonal(offset) > 0.5).sum() for offset in (-1, 0, 1)}
        assert max(hits.values()) >= 15
        assert not causal or hits[1] == 0
    layer.self_attn.sliding_window = 8
    for grid in (16, (2, 16)):
        with pytest.raises(UsageError, match="state a window of 8, fewer than the 16 positions in a row"):
            impulse_attention_(layer, grid=grid, causal=False)
    with pytest.raises(UsageError, match="grid"):
        impulse_attention_(layer, grid=(1, 2, 3))
    for codes, message in ((torch.ones(5, 8), "one row for each of 4 tokens"), (torch.zeros(4, 8), "found zeros")):
        with pytest.raises(UsageError, match=message):
            solve(codes, TokenGrid(2, 2), [(0, 0)], 4)


@pytest.mark.parametrize("causal", [False, True])
def test_the_objective_and_its_gradients_equal_those_of_autograd_in_double_precision(causal):
    tokens = TokenGrid(1, 24, causal=True) if causal else TokenGrid(4, 6)
    y = torch.randn(24, 7, generator=seeded(), dtype=torch.float64)
    a, b = (torch.randn(7, 5, generator=seeded(i), dtype=torch.float64).requires_grad_() for i in (1, 2))
    offset = (0, -1)
    maps = attention_map(y, a, b, 0.3, causal)
    penalty = 1e-7 * 24 * (a.square().sum() + b.square().sum())
    loss = (maps - impulse_matrix(tokens, offset)).square().sum() / 24 + penalty
    loss.backward()
    found = _Problem(y, tokens, 0.3)._evaluate(tokens.targets(offset), a.detach(), b.detach())
    assert found[0] == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(found[1:], (a.grad, b.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shared_key", [False, True])
def test_the_best_map_of_a_norm_is_better_than_the_best_map_scaled_to_it(codes, shared_key):
    """Scaled, the free solution of norm 10 has a quarter of its logits; descent from it finds nothing much better."""
    offset = (0, 1)
    free = solve(codes, GRID, [offset], 64, shared_key=shared_key)[offset]
    kept = solve(codes, GRID, [offset], 64, shared_key=shared_key, norm=5.0)[offset]
    scaled = tuple(value * 5 / value.norm() for value in free)
    index = GRID.targets(offset)
    inside = (index >= 0).nonzero()[:, 0]
    weights = [attention_map(codes, *pair, 1 / 8)[inside, index[inside]].mean().item() for pair in (kept, scaled)]
    assert [value.norm().item() for value in kept] == pytest.approx([5, 5], rel=0.02)
    assert error(codes, kept, offset) < 0.75 * error(codes, scaled, offset)
    assert weights[0] > weights[1] + 0.1
    x = [value.clone().requires_grad_() for value in kept]
    adam = torch.optim.Adam(x[: 1 if shared_key else 2], lr=1e-3)
    least = error(codes, kept, offset)
    for _ in range(30):
        adam.zero_grad()
        (attention_map(codes, *x, 1 / 8) - impulse_matrix(GRID, offset)).square().mean().backward()
        adam.step()
        with torch.no_grad():
            for value, start in zip(x, kept, strict=True):
                value *= start.norm() / value.norm()
        least = min(least, error(codes, [value.detach() for value in x], offset))
    assert least > 0.97 * error(codes, kept, offset)


def test_heads_that_keep_their_norms_give_blunter_maps_of_the_same_offsets():
    """Q and K of each head have the norm before, in the span of the codes; also where heads' norms differ."""
    model, free = vit(), vit()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:16] *= 1.5
    before = [{name: part.read(name) for name in "qk"} for part in attention(copy.deepcopy(model))]
    impulse_attention_(model, norm="start", generator=seeded())
    impulse_attention_(free, generator=seeded())
    x = normalised(positions(model)[0].read())
    v = coordinates(x)[1]
    for part, old in zip(attention(model), before, strict=True):
        for name in "qk":
            new = part.read(name)
            torch.testing.assert_close(new.norm(dim=(1, 2)), old[name].norm(dim=(1, 2)), rtol=1e-5, atol=0)
            torch.testing.assert_close(v.T @ (v @ new.double()), new.double(), rtol=0, atol=1e-6)
    for one, other in zip(attention(model), attention(free), strict=True):
        logits = [x @ part.read("q").double() @ (x @ part.read("k").double()).mT for part in (one, other)]
        assert (logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean() > 0.7  # others have no target
        assert (logits[0].std() < 0.9 * logits[1].std()).all()
    assert audit(model, "impulse_attention", norm="start").passed
    assert not audit(model, "impulse_attention").passed
    assert not audit(vit(), "impulse_attention", norm="start").passed
    small = impulse_attention_(ViT(16, 4, 24, 2, 3, 10), norm="start", generator=seeded())
    assert audit(small, "impulse_attention", norm="start").passed


def test_layers_of_unequal_norms_have_solutions_of_their_own():
    """Solved for the mean norm of all layers, the first one's weight on its targets was a third of what it can be."""
    weights = []
    for factor in (1.0, 8.0):
        model = ViT(16, 4, 48, 2, 3, 10)
        with torch.no_grad():
            for block, size in zip(model.blocks, (1.0, factor), strict=True):
                block.attn.qkv.weight.copy_(size * torch.randn(144, 48, generator=seeded()) / 48**0.5)
        impulse_attention_(model, norm="start", offsets=[(0, 1)], generator=seeded())
        x, first = normalised(positions(model)[0].read()).float(), attention(model)[0]
        maps = attention_map(x, first.read("q"), first.read("k"), first.scale)
        weights.append((maps * impulse_matrix(TokenGrid(4, 4), (0, 1))).sum().item())
    assert weights[1] == pytest.approx(weights[0], rel=0.01)


@pytest.mark.parametrize(("zeros", "steps"), [(slice(0, 16), None), (slice(48 + 32, 48 + 48), 5)])
def test_a_norm_of_zero_is_not_kept(zeros, steps):
    """All tokens had the same weight, without a word."""
    model = ViT(16, 4, 48, 2, 3, 10)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[zeros] = 0
    with pytest.raises(DataError, match=r"blocks\.1\.attn.*a norm of 0 cannot be kept"):
        impulse_attention_(model, norm="start", adam_steps=steps, generator=seeded())
    impulse_attention_(model, generator=seeded())


@pytest.mark.parametrize(("keys", "steps", "norm"), [(1, 5, "free"), (2, 150, "start")])
def test_adam_descends_the_sum_of_the_errors_and_resets_the_norms(keys, steps, norm):
    """A loop in float64; two heads share a key, or the norms are reset after step 100 and the last."""
    torch.manual_seed(0)
    start, codes = (torch.randn(2, 48, 8), torch.randn(keys, 48, 8)), normalised(sinusoidal_positions(4, 4, 48))
    targets = torch.stack([impulse_matrix(TokenGrid(4, 4), offset) for offset in ((0, 1), (1, 0))])
    found = by_adam(codes, targets, *start, steps=steps, scale=0.35, norm=norm)
    wanted = [value.double().clone().requires_grad_() for value in start]
    adam = torch.optim.Adam(wanted, lr=1e-4)
    for step in range(steps):
        maps = [torch.softmax(codes @ wanted[0][h] @ wanted[1][h % keys].T @ codes.T * 0.35, -1) for h in range(2)]
        adam.zero_grad()
        (torch.stack(maps) - targets).square().mean((1, 2)).sum().backward()
        adam.step()
        if norm == "start" and step in (99, 149):
            for value, first in zip(wanted, start, strict=True):
                value.data *= first.double().norm(dim=1, keepdim=True) / value.data.norm(dim=1, keepdim=True)
    for one, other, first in zip(found, wanted, start, strict=True):
        assert (one - other.detach()).norm() < 2e-3 * (other.detach() - first).norm()
        if norm == "start":
            torch.testing.assert_close(one.norm(dim=1), first.norm(dim=1), rtol=1e-5, atol=0)
