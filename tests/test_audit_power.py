"""Audits catch what they claim to catch: untouched networks, and initialisers that are off by 20 %."""

import copy
import functools
import json
import math
import re

import pytest
import torch
from families import seeded
from programs import ROOT, script
from scipy import stats
from test_forward_pass import Attention, Wrapped
from torch import nn

from weightscope import anatomy
from weightscope import init as wi
from weightscope.auditing import EXPECTATIONS, audit
from weightscope.auditing.report import DECIDED, UNTOUCHED, error_in
from weightscope.errors import AnatomyError, UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT

NETWORKS = 1


study = functools.cache(lambda: script("analyses/audit_power/run.py"))


# --- power ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", list(study().CASES))
def test_the_power_that_an_audit_states(name):
    """At two widths: no right network fails, no untouched one passes, and wrong ones fail as often as is stated.

    The counts contradict a stated power if so few or fewer networks would be caught with p < 1e-4.
    """
    case = study().CASES[name]
    for width in case.widths[::2]:
        found = study().measured(case, width, range(NETWORKS))
        assert found["right"].get("failed", 0) == 0, (width, found)
        assert found["untouched"].get("passed", 0) == 0, (width, found)
        stated = found["powers"][case.error]
        caught = found["wrong"].get("failed", 0)
        assert stats.binom.cdf(caught, NETWORKS, stated) > 1e-4, (width, found)
        if UNTOUCHED in found["powers"]:
            untouched = found["powers"][UNTOUCHED]
            assert stats.binom.cdf(found["untouched"].get("failed", 0), NETWORKS, untouched) > 1e-4, (width, found)
            assert untouched >= DECIDED or found["right"].get("passed", 0) == 0, (width, found)


def test_the_stored_table_has_every_audit_no_false_alarm_and_no_untouched_network_that_passes():
    rows = json.loads((ROOT / "analyses/audit_power/results.json").read_text())["rows"]
    assert set(EXPECTATIONS) == {case.name for case in study().CASES.values()}
    known = {(row["case"], row["width"]) for row in rows}
    assert known == {(name, width) for name, case in study().CASES.items() for width in case.widths}
    for row in rows:
        assert row["right"].get("failed", 0) == 0, row
        assert row["untouched"].get("passed", 0) == 0, row
        caught = row["wrong"].get("failed", 0)
        assert stats.binom.cdf(caught, row["networks"], row["powers"][row["error"]]) > 1e-4, row


def test_an_error_of_one_product_is_not_caught_by_the_other():
    model = ViT(8, 4, 64, 2, 2, 5, in_channels=1)
    wi.mimetic_attention_(model, generator=seeded())
    powers = [(check.part, check.power) for check in audit(model, "mimetic_attention").checks if check.power]
    for part, other in (("qk", "vo"), ("vo", "qk")):
        mine, wrong = ([power[error_in(f"beta_{name}")] for p, power in powers if p == part] for name in (part, other))
        assert max(mine) > 0.5 > 1e-3 > max(wrong)


def test_the_report_prints_what_it_would_catch_and_what_not():
    model = ViT(32, 8, 96, 2, 3, 10)
    wi.mimetic_attention_(model, generator=seeded())
    sigma = math.sqrt(1e-3 * 3 * 96)  # input means of variance 1e-3
    wi.mimetic_mlp_(model, mode="rows", sigma=sigma, generator=seeded())
    text = str(audit(model, "mimetic_attention+mimetic_mlp", mode="rows", sigma=sigma))
    assert (
        "would catch, if all layers have it: an untouched network with > 99.9 %, a 20 % error in alpha_qk with > 99.9 %"
        in text
    )
    assert re.search(r"undecidable: a 20 % error in sigma \(\d+ % found\)", text)  # 44 % in variance
    report = audit(model, "mimetic_attention")
    assert report.to_dict()["powers"]["mimetic_attention"][error_in("alpha_qk")] > 0.99
    assert max(map(len, str(report).splitlines())) < 160


@pytest.mark.slow
def test_positions_that_networks_start_from_are_undecidable():
    """Sinusoidal codes are the default of our ViT; other scales, other starts and other tables are decided."""
    torch.manual_seed(0)
    ours, learned = ViT(32, 8, 32, 2, 2, 10), ViT(32, 8, 32, 2, 2, 10, positions="learned")
    before, state = copy.deepcopy(ours.state_dict()), torch.get_rng_state()

    def outcome(model: nn.Module | dict, **parameters: float) -> str:
        return audit(model, "sinusoidal_positions", **parameters).outcomes["sinusoidal_positions"]

    report = audit(ours, "sinusoidal_positions")
    assert not report.passed
    assert "not told from the default start: `pos_embed positions`" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert outcome(ViT(32, 8, 32, 2, 2, 10, position_scale=2.0), gamma=2.0) == "undecidable"
    assert outcome(wi.sinusoidal_positions_(ours, gamma=2.0), gamma=2.0) == "passed"
    assert outcome(learned) == "failed"
    assert outcome(wi.sinusoidal_positions_(learned)) == "passed"
    assert outcome(learned.state_dict()) == "undecidable"  # timm's names as well as ours
    learned.pos_embed.requires_grad_(False)
    assert outcome(learned) == "passed", "the module says what it starts from"
    fixed = nn.Module()
    fixed.register_buffer("pos_embed", torch.zeros(1, 12, 32))
    assert outcome(wi.sinusoidal_positions_(fixed)) == "undecidable"


@pytest.mark.parametrize(
    "make",
    [
        lambda value: ConvNeXt(16, 2, 3, 2, 10, layer_scale=value),
        lambda value: ViT(16, 4, 16, 2, 2, 10, layer_scale=value),
    ],
)
def test_any_layer_scale_may_be_the_networks_own(make):
    def outcome(model: nn.Module | dict, **parameters: float) -> str:
        return audit(model, "layer_scale_identity", **parameters).outcomes["layer_scale_identity"]

    untouched = make(0.1)
    assert outcome(untouched) == "undecidable"
    assert outcome(untouched, value=0.2) == "failed"
    assert outcome(wi.layer_scale_identity_(untouched, value=0.2), value=0.2) == "passed"
    assert outcome(wi.layer_scale_identity_(make(0.5))) == "passed"
    assert outcome(untouched.state_dict(), value=0.2) == "undecidable"


def test_the_default_start_of_torch_is_undecidable_as_kaiming_uniform():
    torch.manual_seed(0)
    model = ViT(32, 8, 32, 2, 2, 10)
    report = audit(model, "kaiming_uniform")
    assert report.outcomes == {"kaiming_uniform": "undecidable"}
    assert "not told from the default start: `all weights`" in str(report)
    for name, given, outcome in (
        ("xavier", {"gain": 3**-0.5, "bias": "keep"}, "undecidable"),
        ("xavier", {}, "passed"),
        ("trunc_normal", {}, "passed"),
    ):
        wi.get(name, select="*attn.proj*", **given)(model, generator=seeded())
        report = audit(model, name, select="*attn.proj*", **given)  # d inputs and outputs
        assert report.outcomes == {name: outcome}
    normal = wi.xavier_(model, distribution="normal", generator=seeded())
    assert {check.statistic for check in audit(normal, "xavier").failures} == {"kurtosis"}


# --- undecidable ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "parameters"),
    # Not sigma 0.1: with the stated rate of 1e-3 per audit half of these fail, with 1e-6 per check few did.
    [(16, {"b": 0.07}), (16, {"mode": "rows", "sigma": 0.07}), (32, {"mode": "rows", "sigma": 0.07})],
)
def test_untouched_networks_do_not_pass_where_the_default_start_is_inside_the_interval(width, parameters):
    torch.manual_seed(0)
    report = audit(ViT(32, 8, width, 2, 2, 10), "mimetic_mlp", **parameters)
    assert report.outcomes == {"mimetic_mlp": "undecidable"}
    assert not report.passed
    assert "UNDECIDABLE" in str(report)
    assert "not told from the default start" in str(report)
    assert "undecidable" in report.summary()
    model = wi.mimetic_mlp_(ViT(32, 8, 96, 4, 3, 10), layers=[0, 1, 3])
    assert {check.layer for check in audit(model, "mimetic_mlp").failures} >= {2}


# --- impulses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "wrong"), [(0.5, {"logit factor"}), (1.0, set()), (2.8, {"logit factor"})])
def test_logits_of_the_wrong_size(factor, wrong):
    torch.manual_seed(0)
    model = wi.impulse_attention_(ViT(32, 4, 48, 1, 3, 10), generator=seeded())
    for part in anatomy.attention(model):
        part.write("q", part.read("q") * factor)
    assert {check.statistic for check in audit(model, "impulse_attention").failures} == wrong


def test_impulses_may_be_drawn_independently():
    """Two of three heads with one offset, and filters whose pixels are drawn one by one, are legitimate."""
    model = wi.impulse_attention_(ViT(32, 4, 96, 1, 3, 10), offsets=[(0, 1), (0, 1), (1, 0)], generator=seeded())
    assert audit(model, "impulse_attention").passed
    mixer = ConvMixer(64, 2, 3, 4, 5)
    for pixels, wrong in ((torch.randint(9, (64,), generator=seeded()), set()), ([0] * 64, {"uses of a pixel"})):
        for part in anatomy.depthwise(mixer):
            part.write(torch.eye(9)[pixels].reshape(64, 3, 3))
        assert {check.statistic for check in audit(mixer, "impulse_filters").failures} == wrong


# --- weight selection ----------------------------------------------------------------------------------------------


def teacher_and_student(elements: str = "uniform") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    teacher, student = ViT(16, 4, 64, 3, 4, 5), ViT(16, 4, 32, 2, 2, 5)
    wi.select_weights_(student, teacher, elements=elements, generator=seeded())
    return teacher, student


RULES = ["uniform", "linspace", "consecutive", "random", "random-inconsistent", "l1", "magnitude"]


@pytest.mark.slow
@pytest.mark.parametrize("elements", RULES)
def test_every_rule_of_selection_passes_its_own_audit(elements):
    teacher, student = teacher_and_student(elements)
    for model in (student, student.state_dict(), copy.deepcopy(student).half()):
        report = audit(model, "select_weights", config={"num_heads": 2}, teacher=teacher, elements=elements)
        assert report.passed, str(report)
    for other in ("uniform", "linspace", "consecutive", "random"):
        right = other == elements or (other == "random" and elements in RULES[:4])
        assert audit(student, "select_weights", teacher=teacher, elements=other).passed == right


@pytest.mark.parametrize("elements", ["uniform", "random"])
@pytest.mark.parametrize("error", ["one bit", "other indices"])
def test_one_changed_bit_and_one_tensor_with_other_indices_are_named(error, elements):
    teacher, student = teacher_and_student()
    fc1 = student.blocks[0].mlp.fc1.weight.data
    if error == "one bit":
        fc1[3, 5] = torch.nextafter(fc1[3, 5], torch.tensor(9.0))
    else:  # reads the channels 1, 3, 5, ... of the stream in place of 0, 2, 4, ...
        fc1.copy_(teacher.blocks[0].mlp.fc1.weight[::2, 1::2])
    (failure,) = audit(student, "select_weights", teacher=teacher, elements=elements).failures
    assert (failure.name, failure.statistic) == ("blocks.0.mlp.fc1.weight", "entries")


# --- bad numbers and other conventions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv_covariance", "random_filters", "impulse_filters", "box_filters"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_bad_number_in_a_filter_fails_the_audit(name, value):
    model = ConvMixer(16, 2, 5, 4, 10)
    parameters = {"preset": "imagenet-thawed"} if name == "conv_covariance" else {}
    wi.get(name, **parameters)(model, generator=seeded())
    part = anatomy.depthwise(model)[0]
    filters = part.read()
    filters[0, 0, 0] = value
    part.write(filters)
    report = audit(model, name, **parameters)
    assert {check.name for check in report.failures} == {part.name}
    assert isinstance(str(report), str)


def test_empty_kernels_are_named():
    state = {"a.weight": torch.zeros(8, 1, 0, 0), "b.dwconv.weight": torch.randn(8, 1, 3, 3)}
    with pytest.raises(AnatomyError, match=r"random_filters: .*`a.weight` \(8, 1, 0, 0\); strict=False"):
        audit(state, "random_filters")
    assert audit(state, "random_filters", strict=False).unparsed == ("a.weight (8, 1, 0, 0)",)
    with pytest.raises(AnatomyError, match=r"`a.weight` \(8, 1, 0, 0\); none can be used"):
        audit({"a.weight": state["a.weight"]}, "box_filters")
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 2, 3))
    model[1].weight = nn.Parameter(torch.zeros(0, 2, 3))


@pytest.mark.parametrize("mode", ["scalar", "rows", "anticorrelated"])
def test_first_layers_of_mlps_without_entries_or_noise(mode):
    def state(fc1: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"h.{i}.mlp.{n}.weight": w for i in range(2) for n, w in {"fc1": fc1, "fc2": fc1.T}.items()}

    empty = state(torch.zeros(8, 0))
    with pytest.raises(AnatomyError, match=r"`h.0.mlp` \(a matrix without entries\)"):
        audit(empty, "mimetic_mlp", mode=mode)
    assert "a matrix without entries" in audit(empty).skipped["mimetic_mlp"]
    for fc1 in (torch.ones(8, 4), torch.linspace(-1, 1, 8)[:, None]):
        report = audit(state(fc1), "mimetic_mlp", mode=mode)
        assert report.outcomes == {"mimetic_mlp": "failed"}
        assert fc1.shape[1] == 1 or all(math.isfinite(x) for check in report.checks for x in check.power.values())


# --- what was not read ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attention_that_cannot_be_read_makes_initialiser_and_audit_fail():
    torch.manual_seed(0)
    model = Wrapped(Attention(3, 24, 8), Attention(3, 24, 8, "no softmax"), Attention(3, 24, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AnatomyError, match=r"mimetic_attention_: .*`blocks.1.attn.*strict"):
        wi.mimetic_attention_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(AnatomyError, match=r"mimetic_attention: expected attention modules that can be read"):
        audit(model, "mimetic_attention")
    with pytest.warns(UserWarning, match=r"mimetic_attention_: 1 tensors look like .*`blocks.1.attn"):
        wi.mimetic_attention_(model, strict=False, generator=seeded())
    report = audit(model, "mimetic_attention", strict=False)
    assert report.passed
    assert "NOT AUDITED, look like parts and were not read: blocks.1.attn" in str(report).splitlines()[0]
    assert "1 tensors not audited" in report.summary()
    text = str(audit(model))
    assert text.count("does not apply, expected attention modules that can be read, found one tensor") == 1


def test_mlps_that_cannot_be_read():
    names = {"h.0.mlp.fc1": (8, 8), "h.0.mlp.fc2": (8, 8), "h.2.mlp.expand": (8, 4), "h.2.mlp.contract": (4, 8)}
    state = {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}
    with pytest.raises(AnatomyError, match=r"MLPs that can be read, found 2 .*`h.2.mlp.expand.weight` \(8, 4\)"):
        audit(state, "mimetic_mlp")
    with pytest.raises(AnatomyError, match="none can be used"):
        wi.mimetic_mlp_(nn.ModuleDict({"mlp": nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3)})}))


def test_strict_is_checked_and_joins_a_list_of_initialisers():
    vit = ViT(32, 8, 48, 1, 3, 10)
    with pytest.raises(UsageError, match="strict: expected true or false, found 1"):
        wi.mimetic_attention_(vit, strict=1)
    assert wi.get("mimetic_attention", strict=False)(vit) is vit
    assert audit(vit, "mimetic_attention+zero_init", strict=False).unparsed == ()


def test_filters_that_are_not_square_in_a_module():
    model = nn.Sequential(*(nn.Conv2d(64, 64, k, groups=64) for k in (3, (1, 7), 3)))
    numbers = {"sigma0": 0.2, "v": 0.2, "a": 0.0}
    with pytest.raises(UsageError, match=r"found `1` 1 x 7.*strict=False uses the 2 other layers"):
        wi.conv_covariance_(model, **numbers)
    with pytest.warns(UserWarning, match="not square: `1` 1 x 7"):
        wi.conv_covariance_(model, **numbers, strict=False, generator=seeded())
    report = audit(model, "conv_covariance", **numbers, strict=False)
    assert report.passed, str(report)
    assert report.unparsed == ("1.weight",)
