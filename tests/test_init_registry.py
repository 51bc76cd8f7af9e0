import copy
import functools
import inspect

import pytest
import torch
from families import seeded
from torch import nn

import weightscope.init as wi
from weightscope.errors import UsageError
from weightscope.networks import ViT


def vit():
    torch.manual_seed(0)
    return ViT(16, 4, 32, 2, 2, 10)


def test_every_exported_initialiser_is_registered_under_its_name():
    exported = {n.removesuffix("_") for n in wi.__all__ if n.endswith("_")}
    assert exported == set(wi.INITIALISERS)
    assert all(hasattr(wi, name) for name in wi.__all__)
    assert all(wi.INITIALISERS[name] is getattr(wi, f"{name}_") for name in wi.INITIALISERS)


@pytest.mark.parametrize("name", list(wi.INITIALISERS))
def test_signatures_are_alike(name):
    """`name_(module, [source,] *, ..., generator=None)`, keyword-only numbers, a docstring with source and example."""
    found = inspect.signature(wi.INITIALISERS[name]).parameters
    assert next(iter(found)) == "module"
    assert found["generator"].default is None
    assert found["generator"].kind is inspect.Parameter.KEYWORD_ONLY
    positional = [p.name for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional in (["module"], ["module", "source"], ["module", "teacher"])
    assert "Example:" in wi.INITIALISERS[name].__doc__
    assert name == "default" or "Source:" in wi.INITIALISERS[name].__doc__
    assert wi.INITIALISERS.details[name].keys() >= {"source", "needs"}


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_parameters_lists_names_and_defaults():
    assert wi.parameters("conv_covariance")["psd"] == "abs"
    assert wi.parameters("mimetic_attention")["alpha_qk"] == 0.7
    assert wi.parameters("transfer")["source"] is inspect.Parameter.empty
    assert wi.parameters(half_) == {"factor": 0.5}
    assert "generator" not in wi.parameters("xavier")


def half_(module, *, generator, factor=0.5):
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(factor).add_(torch.randn(p.shape, generator=generator) * 1e-3)
    return module


def with_any_name_(module, **parameters):
    assert set(parameters) == {"anything", "generator"}
    return module


def returns_nothing_(module, *, generator):
    return None


def returns_another_(module, *, generator):
    return copy.deepcopy(module)


def draws_globally_(module):
    return module


HALF_OF_MLP = lambda m, g: half_(wi.mimetic_mlp_(m, b=0.1), factor=0.25, generator=g)  # noqa: E731
COMPOSED = {
    "names, with numbers shared out": (
        lambda: wi.get("sinusoidal_positions + mimetic_attention+mimetic_mlp", gamma=2.0, b=0.1, alpha_qk=0.5),
        lambda m, g: wi.mimetic_mlp_(
            wi.mimetic_attention_(wi.sinusoidal_positions_(m, gamma=2.0), alpha_qk=0.5, generator=g), b=0.1, generator=g
        ),
    ),
    "a name and a function": (
        lambda: wi.compose("trunc_normal", functools.partial(wi.mimetic_mlp_, mode="rows")),
        lambda m, g: wi.mimetic_mlp_(wi.trunc_normal_(m, generator=g), mode="rows", generator=g),
    ),
    "a function": (lambda: wi.get(half_, factor=0.25), lambda m, g: half_(m, factor=0.25, generator=g)),
    "a reference": (lambda: wi.get(f"{__name__}:half_", factor=0.25), lambda m, g: half_(m, factor=0.25, generator=g)),
    "a name and a reference": (lambda: wi.get(f"mimetic_mlp + {__name__}:half_", b=0.1, factor=0.25), HALF_OF_MLP),
    "two initialisers": (lambda: wi.compose(wi.get("mimetic_mlp", b=0.1), wi.get(half_, factor=0.25)), HALF_OF_MLP),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_initialisers_run_in_order_with_one_generator(name):
    made, by_hand = COMPOSED[name]
    one, other = vit(), vit()
    assert made()(one, generator=seeded(4)) is one
    assert equal(one, by_hand(other, seeded(4)))
    assert equal(one, made()(vit(), generator=4)), "an integer is the seed of one generator for all"
    assert not equal(one, vit())


def test_functions_may_take_any_parameter_and_be_partial():
    assert wi.get(with_any_name_, anything=3)(vit()) is not None
    bound = functools.partial(half_, factor=0.0)
    assert wi.parameters(bound) == {"factor": 0.0}
    assert wi.get(bound)(vit(), generator=seeded()).head.weight.abs().max() < 0.01


@pytest.mark.parametrize(
    ("init", "numbers", "message"),
    [
        ("mimetic", {}, r"no initialiser 'mimetic'; did you mean 'mimetic_ssm'"),
        ("mimetic_attention", {"alpha": 0.1}, r"no parameter 'alpha'; did you mean 'alpha_\w\w'\? .*alpha_qk, beta_qk"),
        (
            "impulse_attention+mimetic_attention",
            {"layers": 0},
            "is a parameter of impulse_attention and mimetic_attention",
        ),
        ("transfer", {}, "transfer: missing source"),
        (7, {}, "expected the name of an initialiser, .* found 7"),
        (draws_globally_, {}, r"draws_globally_: expected .*`f\(module, \*, generator\)`, found `f\(module\)`"),
    ],
)
def test_refusals(init, numbers, message):
    with pytest.raises(UsageError, match=message):
        wi.get(init, **numbers)


@pytest.mark.parametrize(("init", "found"), [(returns_nothing_, "None"), (returns_another_, "another module")])
def test_functions_must_return_the_module(init, found):
    with pytest.raises(UsageError, match=f"{init.__name__}: expected .* return it, found {found}"):
        wi.get(init)(vit(), generator=seeded())


def test_fused_projections_are_three_matrices():
    """Glorot's variance of a (d, d) matrix is 1/d, fused or not; of a (3d, d) matrix it would be half of that."""
    fused, apart = nn.MultiheadAttention(96, 3), nn.Linear(96, 96)
    wi.xavier_(fused, generator=seeded())
    wi.xavier_(apart, generator=seeded())
    assert abs(fused.in_proj_weight.std() * 96**0.5 - 1) < 0.02
    assert abs(apart.weight.std() * 96**0.5 - 1) < 0.04
    assert torch.equal(fused.in_proj_weight[:96], apart.weight)


def test_kaiming_with_the_default_slope_is_what_torch_draws():
    torch.manual_seed(3)
    wanted = nn.Linear(40, 50)
    found = nn.Linear(40, 50)
    torch.manual_seed(3)
    wi.kaiming_uniform_(found)
    torch.testing.assert_close(found.weight, wanted.weight, atol=1e-7, rtol=0)
    assert found.bias.abs().max() <= 40**-0.5
    wi.kaiming_uniform_(found, slope=0.0, generator=seeded())
    assert abs(found.weight.std() / (2 / 40) ** 0.5 - 1) < 0.05  # He's variance for ReLU


@pytest.mark.parametrize(("rule", "kind"), [("zero", "zero"), ("keep", "ones"), ("uniform", "spread")])
def test_bias_rules(rule, kind):
    layer = nn.Linear(16, 64)
    nn.init.ones_(layer.bias)
    wi.trunc_normal_(layer, bias=rule, generator=seeded())
    if kind == "spread":
        assert 0.2 < layer.bias.abs().max() <= 0.25
    else:
        assert torch.equal(layer.bias, torch.full((64,), float(kind == "ones")))


def test_select_limits_what_is_drawn():
    model = vit()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wi.kaiming_uniform_(model, select="*mlp.fc1*, head.weight", generator=seeded())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"head.weight", "head.bias"} | {
        f"blocks.{i}.mlp.fc1.{k}" for i in (0, 1) for k in ("weight", "bias")
    }
    with pytest.raises(UsageError, match=r"no tensor matches '\*fc9\*'"):
        wi.kaiming_uniform_(model, select="*fc9*")


def test_a_matrix_shared_with_an_embedding_is_left_alone():
    table = nn.Embedding(20, 8)
    head = nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Linear(8, 8), head)
    before = table.weight.detach().clone()
    wi.xavier_(model, generator=seeded())
    assert torch.equal(table.weight, before)
