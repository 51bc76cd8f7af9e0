import copy
import json
import math

import numpy as np
import pytest
import torch
from families import FAMILIES, seeded
from programs import script
from references_init import low_rank_product, product_statistics

from weightscope.anatomy import attention
from weightscope.auditing import audit
from weightscope.errors import UsageError
from weightscope.init import impulse_attention_, mimetic_attention_, sinusoidal_positions_
from weightscope.init.attention import factors, noisy_identity, query_key, value_output
from weightscope.networks import ViT, sinusoidal_positions


def vit(width=96, depth=2, heads=3, **options):
    return ViT(16, 4, width, depth, heads, 10, **options)


def relative(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(
    ("d", "k", "group"), [(48, 16, 1), (96, 96, 1), (192, 64, 1), (24, 40, 1), (48, 16, 2), (48, 16, 4)]
)
@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.7), (0.3, -0.5)])
def test_query_key_is_the_best_approximation_of_its_rank(d, k, group, alpha, beta):
    """Eckart and Young: Q K^T is the truncated decomposition of alpha Z + beta I, stacked where heads share a key."""
    q, key = query_key(d, k, group, alpha, beta, seeded(1))
    g = seeded(1)
    stacked = torch.cat([noisy_identity(d, alpha, beta, g) for _ in range(group)])
    assert relative(torch.cat(list(q @ key.T)), low_rank_product(stacked, k)) < 2e-5
    if k > d:
        assert key.norm(dim=0).min() > 0.1  # every column is used
    else:
        gram = key.T @ key  # balanced: S on both sides
        torch.testing.assert_close((q.mT @ q).mean(0), gram, atol=1e-4, rtol=1e-4)
        assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads", "k"), [(3, 3, 16), (4, 2, 12), (4, 1, 12), (3, 3, 32)])
def test_value_output_is_the_best_approximation(heads, kv_heads, k):
    d = 48
    v, o = value_output(d, heads, kv_heads, k, 0.4, 0.4, seeded(4))
    assert v.shape == (kv_heads, d, k)
    assert o.shape == (heads, k, d)
    total = sum(v[h // (heads // kv_heads)] @ o[h] for h in range(heads))
    wanted = low_rank_product(noisy_identity(d, 0.4, -0.4, seeded(4)), kv_heads * k)
    assert relative(total, wanted) < 2e-5
    assert (v.square().sum() / o.square().sum() - 1).abs() < 1e-3
    if kv_heads == heads:  # Eq. 3.13-3.15: the square root on both sides
        left, right = v.transpose(0, 1).reshape(d, -1), o.reshape(-1, d)
        torch.testing.assert_close(left.T @ left, right @ right.T, atol=2e-4, rtol=1e-3)


def test_without_noise_heads_get_random_subspaces():
    """beta I has no preferred directions; an SVD would give every head the first k coordinates."""
    one, key = query_key(96, 32, 1, 0.0, 0.5, seeded(6))
    product = one[0] @ key.T
    torch.testing.assert_close(product @ product, 0.5 * product, atol=1e-5, rtol=0)  # beta times a projection
    assert abs(product.trace() - 16) < 1e-3
    assert product.diagonal().max() < 0.4  # not the first coordinates
    negative, key = query_key(96, 32, 1, 0.0, -0.5, seeded(6))
    torch.testing.assert_close(negative[0] @ key.T, -product)


@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.7), (1.0, 0.0)])
def test_some_eigenvectors_of_a_large_matrix_are_those_of_all(alpha, beta):
    matrix = noisy_identity(384, alpha, beta, seeded(7))
    left, right = factors(matrix, 64, None)
    assert relative(left @ right.T, low_rank_product(matrix, 64)) < 2e-5
    exact = torch.linalg.svdvals(matrix.double())[:64]
    torch.testing.assert_close((left.norm(dim=0) * right.norm(dim=0)).double(), exact, atol=0, rtol=1e-4)
    torch.testing.assert_close(left.T @ left, right.T @ right, atol=1e-4, rtol=1e-4)


def test_same_random_has_its_noise_from_the_widths():
    """W_Q = W_K = N(0, I/k): mean of the diagonal beta, noise beta sqrt(d/k); W_proj = -W_V^T."""
    model = vit(width=192, depth=2)
    mimetic_attention_(model, construction="same-random", beta_qk=0.6, generator=seeded(11))
    for part in attention(model):
        q, k, v, o = (part.read(name) for name in "qkvo")
        assert torch.equal(q, k)
        torch.testing.assert_close(v.transpose(0, 1).reshape(192, 192), -o.reshape(192, 192).T)
        mean, _, noise = product_statistics((v @ o).sum(0))
        assert abs(mean + 0.4) < 0.02
        assert abs(noise - 0.4) < 0.03
        for h in range(3):
            mean, _, noise = product_statistics(q[h] @ k[h].T)
            assert abs(mean - 0.6) < 0.04
            assert abs(noise - 0.6 * math.sqrt(192 / 64)) < 0.1


def test_presets_parts_layers_and_the_sign_ablation():
    base, model = vit(), vit()
    model.load_state_dict(base.state_dict())
    mimetic_attention_(model, preset="language", parts="vo", layers=-1, generator=seeded(12))
    first, last = attention(model)
    assert torch.equal(first.read("v"), attention(base)[0].read("v"))
    assert torch.equal(last.read("q"), attention(base)[1].read("q"))
    mean, _, noise = product_statistics((last.read("v") @ last.read("o")).sum(0))
    assert abs(mean + 0.2) < 0.01
    assert abs(noise - 0.2) < 0.02
    mimetic_attention_(model, beta_vo=-0.4, generator=seeded(12))
    assert product_statistics((last.read("v") @ last.read("o")).sum(0))[0] > 0.38


def test_chosen_heads_alone_are_set():
    """heads=[0, 2] of 3: their products are those of the scheme, the others keep their bits; the audit knows which."""
    torch.manual_seed(0)
    base = vit(width=96)
    model = mimetic_attention_(copy.deepcopy(base), heads=[0, np.int64(-1)], generator=seeded(15))
    for old, new in zip(attention(base), attention(model), strict=True):
        for name in "qkvo":
            same = [torch.equal(a, b) for a, b in zip(old.read(name), new.read(name), strict=True)]
            assert same == [False, True, False], name
        g = seeded(15) if new.layer == 0 else None
        if g is not None:
            for h in (0, 2):
                wanted = low_rank_product(noisy_identity(96, 0.7, 0.7, g), 32)
                assert relative(new.read("q")[h] @ new.read("k")[h].T, wanted) < 2e-5
            chosen = sum(new.read("v")[h] @ new.read("o")[h] for h in (0, 2))
            assert relative(chosen, low_rank_product(noisy_identity(96, 0.4, -0.4, g), 64)) < 2e-5
    report = audit(model, "mimetic_attention", heads=[0, 2])
    assert report.passed, str(report)
    assert {check.head for check in report.checks if check.part == "qk"} == {0, 2}
    assert not audit(model, "mimetic_attention").passed
    assert not audit(model, "mimetic_attention", heads=1).passed


@pytest.mark.parametrize("heads", [0, [1, 2]])
def test_impulses_in_chosen_heads(heads):
    torch.manual_seed(0)
    base = ViT(32, 4, 48, 2, 3, 10)
    model = impulse_attention_(copy.deepcopy(base), heads=heads, generator=seeded())
    wanted = [h in ([heads] if heads == 0 else heads) for h in range(3)]
    for old, new in zip(attention(base), attention(model), strict=True):
        for name in "qk":
            changed = [not torch.equal(a, b) for a, b in zip(old.read(name), new.read(name), strict=True)]
            assert changed == wanted
            zero = [not b.any() for b in new.read_bias(name)]
            assert zero == wanted
    assert audit(model, "impulse_attention", heads=heads).passed
    assert not audit(model, "impulse_attention").passed


def test_heads_that_share_a_key_are_chosen_together():
    part = attention(FAMILIES["hf-llama"].build())[0]
    assert part.heads > part.kv_heads > 1
    group = part.heads // part.kv_heads
    whole = {name: part.read(name) for name in "qkvo"}
    some = part.only(range(group, 2 * group))
    assert (some.heads, some.kv_heads, some.numbers) == (group, 1, tuple(range(group, 2 * group)))
    for name in "qkvo":
        rows = slice(group, 2 * group) if name in "qo" else slice(1, 2)
        assert torch.equal(some.read(name), whole[name][rows])
        some.write(name, whole[name][rows] + 1)
        after = whole[name].clone()
        after[rows] += 1
        assert torch.equal(part.read(name), after)
    with pytest.raises(UsageError, match=f"a key for every {group} heads"):
        part.only([0])


@pytest.mark.parametrize("numbers", [{"preset": "language"}, {"construction": "same-random"}])
def test_heads_that_start_with_equal_queries_learn_apart(numbers):
    """Query heads of one key and value head have equal queries here; equal outputs would give them equal gradients."""
    family = FAMILIES["hf-llama"]
    model = mimetic_attention_(family.build(), generator=seeded(16), **numbers)
    family.call(model).logits.square().sum().backward()
    for part in attention(model):
        q, name = part.read("q"), part.parameters["q"][0]
        assert torch.equal(q[0], q[1])
        gradient = dict(model.named_parameters())[name].grad.reshape(part.heads, -1)
        assert relative(gradient[0], gradient[1]) > 0.1


@pytest.mark.parametrize("kind", ["gpsa", "conv-logits", "conv-map", "conv-softmax-map"])
def test_impulses_are_refused_where_positions_enter_the_map(kind):
    with pytest.raises(UsageError, match="gates, convolutions or biases of positions enter"):
        impulse_attention_(ViT(16, 4, 48, 1, 4, 10, attention=kind))


def test_class_tokens_are_kept():
    model = vit(pool="token", positions="learned")
    before = model.pos_embed.detach().clone()
    sinusoidal_positions_(model, gamma=3.0)
    torch.testing.assert_close(model.pos_embed.detach()[0, 1:], 3 * sinusoidal_positions(4, 4, 96))
    assert torch.equal(model.pos_embed.detach()[0, 0], before[0, 0])


@pytest.mark.slow
def test_constructions_differ_in_the_alpha_and_beta_that_they_reach(monkeypatch, tmp_path):
    """Attention paper, Fig. 3: equal random matrices give lines, the SVD an area, also of low rank."""
    study = script("analyses/attention_frontier/run.py")
    by_name = {}
    for row in study.frontier(96, 24, grid=[0.0, 0.5, 1.0], seed=3):
        by_name.setdefault(row["construction"], []).append(row)
    for name, slope in (("equal random, full rank", 1.0), ("equal random, rank 24", 0.5)):  # sqrt(k / d)
        for row in by_name[name]:
            assert row["beta"] / row["alpha"] == pytest.approx(slope, rel=0.05)
    for row in by_name["SVD, full rank"]:
        assert (row["alpha"], row["beta"]) == pytest.approx((row["asked_alpha"], row["asked_beta"]), abs=0.03)
    low = by_name["SVD, rank 24"]
    ratios = [row["beta"] / row["alpha"] for row in low if row["alpha"] > 0]
    assert max(ratios) > 0.55, "above the line of equal random matrices"
    assert min(ratios) < 0.1
    assert max(row["beta"] for row in low) < 0.6, "a product of rank k cannot reach beta = 1"
    monkeypatch.setattr("sys.argv", ["run.py", "--width", "24", "--head-width", "8", "--out", str(tmp_path)])
    study.main()
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    assert "SVD, rank 8" in study.table(json.loads((tmp_path / "results.json").read_text())["points"])
