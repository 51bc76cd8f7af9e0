"""Correct initialisations pass, on every family, in every precision; and reports say what was found."""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from families import FAMILIES, seeded
from torch import nn

from weightscope import anatomy
from weightscope import init as wi
from weightscope.auditing import AuditReport, Check, audit
from weightscope.auditing.report import RATE
from weightscope.auditing.runs import SCALES, _interval, _spread
from weightscope.errors import AnatomyError, UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT

SEEDS = 4


# --- false alarms --------------------------------------------------------------------------------------------------


def made(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A function that makes a network from a seed."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


small_vit = made(lambda: ViT(32, 8, 96, 2, 3, 10))
narrow_vit = made(lambda: ViT(32, 8, 48, 1, 3, 10))
small_mixer = made(lambda: ConvMixer(32, 3, 5, 4, 10))
small_convnext = made(lambda: ConvNeXt(96, 4, kernel_size=3, expansion=2, layer_scale=None))


@functools.cache
def one_mamba(name: str) -> nn.Module:
    return FAMILIES[name].make()


def mamba(name: str, seed: int) -> nn.Module:
    return redraw(copy.deepcopy(one_mamba(name)), seed)


def redraw(model: nn.Module, seed: int) -> nn.Module:
    """New read-out and write matrices, as a new state-space model would have."""
    g = seeded(1000 + seed)
    for part in anatomy.ssms(model):
        for letter in "BC":
            part.write(letter, torch.rand(part.read(letter).shape, generator=g) - 0.5)
    return model


CASES = {
    "mimetic_attention": (small_vit, "mimetic_attention", {}),
    "mimetic_attention-language": (narrow_vit, "mimetic_attention", {"preset": "language"}),
    "mimetic_attention-numbers": (narrow_vit, "mimetic_attention", {"alpha_qk": 0.2, "beta_qk": 0.9, "beta_vo": -0.3}),
    "mimetic_attention-same": (small_vit, "mimetic_attention", {"construction": "same-random", "parts": "qk"}),
    "conv_covariance": (small_mixer, "conv_covariance", {"preset": "imagenet-thawed"}),
    "conv_covariance-clip": (small_mixer, "conv_covariance", {"preset": "cifar-patch1", "psd": "clip"}),
    "random_filters": (small_mixer, "random_filters", {"distribution": "uniform", "gain": 2.0}),
    "random_filters-absolute": (small_mixer, "random_filters", {"distribution": "absolute"}),
    "impulse_filters": (small_mixer, "impulse_filters", {}),
    "impulse_filters-signs": (small_mixer, "impulse_filters", {"sign": "random"}),
    "box_filters-signs": (small_mixer, "box_filters", {"value": -0.3, "sign": "random"}),
    "mimetic_mlp-scalar": (narrow_vit, "mimetic_mlp", {}),
    "mimetic_mlp-rows": (small_vit, "mimetic_mlp", {"mode": "rows", "sigma": 0.5}),
    "mimetic_mlp-anticorrelated": (narrow_vit, "mimetic_mlp", {"mode": "anticorrelated"}),
    "constant_mlp_bias": (small_convnext, "constant_mlp_bias", {"value": 0.05}),
    "mimetic_conv_mlp": (small_convnext, "mimetic_conv_mlp", {}),
    "mimetic_first_last_mlp": (small_convnext, "mimetic_first_last_mlp", {"correlation": -0.2}),
    "mimetic_first_last_mlp-rows": (small_convnext, "mimetic_first_last_mlp", {"mode": "rows", "correlation": 0.9}),
    "mimetic_ssm": (functools.partial(mamba, "hf-mamba"), "mimetic_ssm", {}),
    "mimetic_ssm-2": (functools.partial(mamba, "hf-mamba2"), "mimetic_ssm", {"c": 4.0}),
    "kaiming_uniform": (narrow_vit, "kaiming_uniform", {"slope": 0.0}),
    "xavier": (narrow_vit, "xavier", {"distribution": "normal", "gain": 0.5}),
    "trunc_normal": (narrow_vit, "trunc_normal", {"std": 0.1, "cut": 0.2}),
    "t_fixup": (narrow_vit, "t_fixup", {}),
    "delta_orthogonal": (small_mixer, "delta_orthogonal", {}),
    "sinusoidal_positions": (small_vit, "sinusoidal_positions", {"gamma": 2.0}),
}


def initialised(case: str, seeds: int) -> Iterator[nn.Module]:
    """Correctly initialised networks of a case."""
    make, name, parameters = CASES[case]
    model = make(0)
    start = copy.deepcopy(model.state_dict())
    for seed in range(seeds):
        model.load_state_dict(start)
        if name == "mimetic_ssm":
            redraw(model, seed)
        elif name in ("mimetic_mlp", "mimetic_conv_mlp", "mimetic_first_last_mlp"):
            wi.kaiming_uniform_(
                model, select="*mlp*,*conv_dw*" if "conv" in name else "*mlp*", generator=seeded(1000 + seed)
            )
        yield wi.get(name, **parameters)(model, generator=seeded(100 + seed))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_correct_initialisations_pass(case):
    """The audit states 0.1 % of false alarms; `tests/torture/analyses.py` counts them."""
    _, name, parameters = CASES[case]
    for model in initialised(case, SEEDS):
        report = audit(model, name, **parameters)
        assert report.passed, str(report)
        assert report.false_alarm_rate == RATE


def test_kurtosis_and_correlation_leave_the_interval_of_their_runs_as_often_as_stated():
    """300 x 100 networks, level 1e-3, after 24 draws: 30 expected, at most 75; the kurtosis' cube root gives 128."""
    rng, alarms = np.random.default_rng(0), {"kurtosis": 0, "correlation": 0}
    for _ in range(300):
        squares = rng.standard_normal((124, 144)) ** 2
        x, noise = rng.standard_normal((2, 124, 16))
        found = {
            "kurtosis": (squares**2).mean(1) / squares.mean(1) ** 2,
            "correlation": [np.corrcoef(a, -0.5 * a + 0.75**0.5 * b)[0, 1] for a, b in zip(x, noise, strict=True)],
        }
        for scale, values in found.items():
            scaled = np.array([SCALES[scale][0](float(value)) for value in values])
            low, high = _interval(24, *_spread(scaled[:24]), 1e-3)
            alarms[scale] += int(((scaled[24:] < low) | (scaled[24:] > high)).sum())
    assert all(5 <= count <= 75 for count in alarms.values()), alarms


def test_a_deep_network_of_few_channels_is_told_from_its_default_start():
    """One run has the 32 layers' draws of a statistic; of 48 or more the intervals are narrow enough."""
    model = made(lambda: ConvMixer(16, 32, 3, 4, 5))(0)
    assert not audit(model, "random_filters").passed
    assert audit(wi.random_filters_(model, generator=seeded(0)), "random_filters").outcomes == {
        "random_filters": "passed"
    }


def test_a_network_of_few_runs_is_not_expected_to_be_like_their_mean(monkeypatch):
    """With as many runs as the mean is of, as of a ViT-T, intervals would not hold 0 if the runs were the same."""
    model = made(lambda: ViT(image_size=8, patch_size=4, width=32, depth=1, heads=2, num_classes=10))(0)
    monkeypatch.setattr("weightscope.auditing.runs.ENTRIES", 8 * sum(p.numel() for p in model.parameters()) + 1)
    assert audit(wi.xavier_(model, generator=seeded(9)), "xavier").passed


# --- every precision; every family is in the contract of the initialisers -------------------------------------------


def test_the_published_numbers_at_width_192():
    """The V/proj product at alpha = beta = 0.4: diagonal -0.40 +- 0.01 with std 0.03, off-diagonal 0.40."""
    report = audit(wi.mimetic_attention_(ViT(32, 8, 192, 1, 3, 10), generator=seeded(0)), "mimetic_attention")
    found = {c.statistic: c for c in report.checks if c.part == "vo"}
    assert found["diagonal mean"].found == pytest.approx(-0.40, abs=0.01)
    assert found["diagonal std"].found == pytest.approx(0.029, abs=0.004)
    assert found["off-diagonal"].found == pytest.approx(0.40, abs=0.01)
    assert found["diagonal mean"].high - found["diagonal mean"].low < 0.03
    assert found["diagonal std"].high < 0.05 < 0.236  # what swapped factors give


@pytest.mark.slow
def test_grouped_queries_and_widths_beyond_the_simulation():
    model = FAMILIES["hf-llama"].make()
    wi.mimetic_attention_(model, alpha_qk=0.5, generator=seeded(0))
    assert audit(model, "mimetic_attention", alpha_qk=0.5).passed
    assert not audit(model, "mimetic_attention").passed
    wide = ViT(8, 4, 384, 1, 6, 10)
    wi.mimetic_attention_(wide, generator=seeded(0))
    report = audit(wide, "mimetic_attention")
    assert report.passed, str(report)
    found = {c.statistic: c for c in report.checks if c.part == "qk"}
    assert found["diagonal mean"].high - found["diagonal mean"].low < 0.04


# --- what is measured ----------------------------------------------------------------------------------------------


def test_a_correlation_that_independent_weights_could_have_is_undecidable():
    """4 x 16 channels: the start has a correlation of -0.03 or less in 2 of 5 networks, so nothing can be concluded."""
    torch.manual_seed(0)
    narrow = ConvNeXt(16, 4, kernel_size=3, expansion=2, layer_scale=None)
    report = audit(wi.mimetic_conv_mlp_(narrow), "mimetic_conv_mlp")
    assert not report.passed
    assert report.undecidable == {"mimetic_conv_mlp": ("all layers filters and MLP",)}
    assert "not told from the default start" in str(report)
    with pytest.raises(UsageError, match="expected more than 4 channels to correlate, found 4"):
        audit(ConvNeXt(4, 2, kernel_size=3, layer_scale=None), "mimetic_conv_mlp")


# --- the report ----------------------------------------------------------------------------------------------------


def test_a_report_names_layer_head_and_statistic_and_is_a_result_and_json():
    model = wi.mimetic_attention_(small_vit(0), generator=seeded(0))
    part = anatomy.attention(model)[1]
    part.write("o", -part.read("o"))
    found = audit(model, "mimetic_attention")
    assert not found.passed
    assert {(c.layer, c.head, c.part) for c in found.failures} == {(1, None, "vo")}
    text = str(found)
    assert "mimetic_attention: FAILED, 1 of 46 checks (false alarms < 0.1 % of audits)" in text
    (line,) = [line for line in text.splitlines() if line.endswith("FAILED")]
    assert line.split()[0] == "1"
    assert " !" in line
    assert "expected" in text
    assert max(map(len, text.splitlines())) < 160
    assert repr(found) == "<AuditReport: failed, 1 of 46 checks failed>"
    table = found.to_pandas()
    assert table[~table.passed].part.tolist() == ["vo"]
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["passed"] is False
    assert len(values["checks"]) == len(found.checks) == 46
    keys = {"initialiser", "part", "layer", "head", "name", "statistic", "found", "low", "high", "passed"}
    assert set(values["checks"][0]) == keys


def test_nan_fails_and_has_a_form_in_json():
    assert AuditReport(()).summary() == "nothing to audit"
    bad = Check("x", "qk", 0, 0, "n", "s", math.nan, 0.0, math.inf)
    assert not bad.passed
    json.dumps(AuditReport((bad,)).to_dict(), allow_nan=False)
    model = wi.mimetic_attention_(small_vit(0), generator=seeded(0))
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[3, 4] = math.nan
    assert {c.layer for c in audit(model, "mimetic_attention").failures} >= {0}


@pytest.mark.parametrize(
    ("init", "statistic"),
    [("impulse_attention", "largest bias"), ("zero_init", "difference"), ("xavier", "difference")],
)
def test_biases_that_an_initialiser_sets_to_zero_are_checked(init, statistic):
    model = wi.get(init)(small_vit(0), generator=seeded(0))
    assert audit(model, init).passed
    with torch.no_grad():
        model.blocks[0].attn.qkv.bias[4] = 1.0
    assert {check.statistic for check in audit(model, init).failures} == {statistic}


@pytest.mark.slow
def test_an_audit_answers_the_same_twice_and_changes_nothing():
    model = small_vit(0)
    wi.mimetic_attention_(model, generator=seeded(0))
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    first = audit(model, "mimetic_attention").to_dict()
    assert audit(model, "mimetic_attention").to_dict() == first
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


def test_a_state_dict_with_its_config():
    model = small_vit(0)
    wi.mimetic_attention_(model, generator=seeded(0))
    wi.mimetic_mlp_(model, mode="rows", sigma=0.5, generator=seeded(0))
    found = audit(model.state_dict(), "mimetic_attention+mimetic_mlp", config={"num_heads": 3}, mode="rows", sigma=0.5)
    assert found.passed
    assert found.outcomes == {"mimetic_attention": "passed", "mimetic_mlp": "passed"}
    with_code = audit(model, "mimetic_attention+mimetic_mlp", mode="rows", sigma=0.5)
    assert found.unconfirmed == ()
    assert found.to_dict() == with_code.to_dict()
    some = {name: value for name, value in model.state_dict().items() if "attn" in name}
    report = audit(some, "mimetic_attention", config={"num_heads": 3})
    assert report.unconfirmed == ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight")
    assert "a part of the names of an architecture: `blocks.0.attn.qkv.weight`" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name", "parameters"),
    [
        (small_vit, "mimetic_attention", {"preset": "language"}),
        (small_vit, "trunc_normal", {}),
        (small_mixer, "conv_covariance", {"preset": "imagenet-frozen"}),
        (functools.partial(mamba, "hf-mamba2"), "mimetic_ssm", {"c": 2.0}),
    ],
)
def test_without_a_name_the_audit_tells_which_initialiser_it_was(make, name, parameters):
    model = wi.get(name, **parameters)(make(0), generator=seeded(0))
    found = audit(model)
    assert found.passed
    assert found.outcomes[name] == "passed"
    others = {n for n, outcome in found.outcomes.items() if outcome == "passed"} - {name}
    # What else these models have: the positions of our constructor.
    assert others <= {"sinusoidal_positions"}
    assert f"{name}: passed" in str(found)
    assert "does not apply" in str(found)
    assert "teacher" in found.skipped["select_weights"]


def test_what_was_found_instead_is_said_once():
    text = str(audit(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))))
    assert text.count("is this the right model?") == 1
    assert "  mimetic_ssm: expected state-space layers\n" in text


def test_sawtooth_schedule_and_layer_scale():
    model = ConvNeXt((24, 48), (3, 3), kernel_size=5, patch_size=2)
    wi.conv_covariance_(model, preset="imagenet-thawed", schedule="sawtooth", generator=seeded(0))
    assert audit(model, "conv_covariance", preset="imagenet-thawed", schedule="sawtooth").passed
    assert not audit(model, "conv_covariance", preset="imagenet-thawed").passed
    wi.layer_scale_identity_(model, value=0.1)
    assert audit(model, "layer_scale_identity").passed
    assert not audit(model, "layer_scale_identity", value=1e-6).passed


# --- initialisers of one's own -------------------------------------------------------------------------------------


def scaled_identity(module, *, factor=0.5, generator=None):
    """Deterministic."""
    with torch.no_grad():
        for block in module.blocks:
            block.attn.proj.weight.copy_(factor * torch.eye(len(block.attn.proj.weight)))
    return module


def noisy_identity(module, *, factor=0.5, generator=None):
    scaled_identity(module, factor=factor)
    with torch.no_grad():
        for block in module.blocks:
            weight = block.attn.proj.weight
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return module


@pytest.mark.parametrize("init", [scaled_identity, noisy_identity, f"{__name__}:noisy_identity"])
def test_an_own_initialiser_is_run_on_copies(init):
    """8 right networks pass (false alarms < 1e-4 in all), untouched and 20 % wrong ones fail."""
    function = noisy_identity if isinstance(init, str) else init
    untouched = audit(narrow_vit(0), init)
    assert list(untouched.outcomes.values()) == ["failed"]
    for seed in range(8):
        model = function(narrow_vit(seed), generator=seeded(100 + seed))
        before = copy.deepcopy(model.state_dict())
        report = audit(model, init)
        assert report.passed, str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (powers,) = report.powers.values()
    assert min(powers.values()) > 0.999
    assert {check.name for check in report.checks} == {"blocks.0.attn.proj.weight"}
    wrong = function(narrow_vit(0), factor=0.6, generator=seeded(0))
    assert audit(wrong, init).failures
    assert audit(wrong, init, factor=0.6).passed
    with pytest.raises(UsageError, match="expected a module, on copies of which it can be run"):
        audit(model.state_dict(), init)


# --- expectations of one's own -------------------------------------------------------------------------------------


def small_head(tensors, *, limit=0.5):
    found = float(tensors.get("head.weight").abs().max())
    return [Check("small_head", "weight", None, None, "head.weight", "largest", found, 0.0, limit)]


def returns_nothing(tensors):
    tensors.get("head.weight")


def takes_no_tensors():
    return []


@pytest.mark.parametrize("init", [small_head, f"{__name__}:small_head"])
def test_expectations_of_ones_own(init):
    model = wi.mimetic_attention_(small_vit(0), generator=seeded(0))
    assert audit(model, init).passed
    found = audit(model, init, limit=1e-3)
    (failure,) = found.failures
    assert (failure.statistic, failure.high) == ("largest", 1e-3)
    assert "small_head: FAILED, 1 of 1 checks\n" in str(found), "nothing is known of the rate of false alarms"
    assert found.false_alarm_rate is None
    assert audit(model.state_dict(), init, limit=0.6).passed
    if isinstance(init, str):
        found = audit(model, f"mimetic_attention + {init}", limit=1e-3, layers=1)
        assert found.outcomes == {"mimetic_attention": "passed", "small_head": "failed"}


BAD_INPUT = [
    (small_vit, "mimetic", {}, UsageError, "no audit 'mimetic'; did you mean 'mimetic_ssm'"),
    (small_vit, "mimetic_attention", {"gamma": 2.0}, UsageError, "mimetic_attention: no parameter 'gamma'"),
    (small_vit, "mimetic_attention+mimetic_mlp", {"layers": 0}, UsageError, "of mimetic_attention and mimetic_mlp"),
    (small_vit, None, {"alpha_qk": 0.2}, UsageError, "need the name of an initialiser"),
    (small_vit, "mimetic_attention", {"preset": "audio"}, UsageError, "preset: expected one of"),
    (small_mixer, "conv_covariance", {}, UsageError, "missing sigma0, v, a"),
    (small_mixer, "mimetic_attention", {}, AnatomyError, "expected attention modules, found 3 depthwise"),
    (small_vit, "random_filters", {}, AnatomyError, "expected depthwise convolutions"),
    (small_vit, "mimetic_ssm", {}, AnatomyError, "expected state-space layers"),
    (
        lambda _: small_vit(0).state_dict(),
        "xavier",
        {"config": {"num_heads": 3}},
        UsageError,
        "expected a module, on copies",
    ),
    (small_vit, "layer_scale_identity", {}, UsageError, "scaled matrices look like any others"),
    (lambda _: 3, "xavier", {}, AnatomyError, "expected a module, a mapping"),
    # functions with expectations
    (small_vit, small_head, {"limits": 1.0}, UsageError, "small_head: no parameter 'limits'; did you mean 'limit'"),
    (small_vit, returns_nothing, {}, UsageError, "returns_nothing: expected a list of .*Check back, found None"),
    (small_vit, takes_no_tensors, {}, UsageError, r"expected a function `f\(tensors, \*\*parameters\)"),
    (small_vit, 3, {}, UsageError, "found 3"),
    (small_vit, f"{__name__}:small_hat", {}, UsageError, "did you mean 'small_head'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "init", "parameters", "error", "message"), BAD_INPUT)
def test_bad_input(make, init, parameters, error, message):
    with pytest.raises(error, match=message):
        audit(make(0), init, **parameters)
