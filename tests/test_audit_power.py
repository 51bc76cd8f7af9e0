"""Audits catch what they claim to catch: untouched networks, and initialisers that are off by 20 %."""

import copy
import functools
import json
import math

import pytest
import shims
import torch
from families import seeded
from programs import ROOT, script
from scipy import stats
from torch import nn

from weightscope import anatomy
from weightscope import init as wi
from weightscope.auditing import EXPECTATIONS, AuditReport, audit
from weightscope.auditing.intervals import DECIDED, UNTOUCHED, error_in
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.networks import ConvMixer, ConvNeXt, ViT

torch.set_num_threads(1)
NETWORKS = 3


study = functools.cache(lambda: script("analyses/audit_power/run.py"))


# --- power ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", list(study().CASES))
def test_the_power_that_an_audit_states(name):
    """At three widths: no right network fails, no untouched one passes, and wrong ones fail as often as is stated.

    The counts contradict a stated power if so few or fewer networks would be caught with p < 1e-4.
    """
    case = study().CASES[name]
    for width in case.widths:
        found = study().measured(case, width, range(NETWORKS))
        assert found["right"].get("failed", 0) == 0, (width, found)
        if case.name != "kaiming_uniform":  # the default start of our networks is that initialisation
            assert found["untouched"].get("passed", 0) == 0, (width, found)
        stated = found["powers"][case.error]
        caught = found["wrong"].get("failed", 0)
        assert stats.binom.cdf(caught, NETWORKS, stated) > 1e-4, (width, found)
        if UNTOUCHED in found["powers"]:
            untouched = found["powers"][UNTOUCHED]
            assert stats.binom.cdf(found["untouched"].get("failed", 0), NETWORKS, untouched) > 1e-4, (width, found)
            assert untouched >= DECIDED or found["right"].get("passed", 0) == 0, (width, found)


def test_every_audit_states_its_power():
    assert set(EXPECTATIONS) == {case.name for case in study().CASES.values()}
    known = {(row["case"], row["width"]) for row in stored()["rows"]}
    assert known == {(name, width) for name, case in study().CASES.items() for width in case.widths}


def stored() -> dict:
    return json.loads((ROOT / "analyses/audit_power/results.json").read_text())


def test_the_stored_table_shows_no_false_alarm_and_no_untouched_network_that_passes():
    for row in stored()["rows"]:
        assert row["right"].get("failed", 0) == 0, row
        assert row["untouched"].get("passed", 0) == 0 or row["case"] == "kaiming_uniform", row
        caught = row["wrong"].get("failed", 0)
        assert stats.binom.cdf(caught, row["networks"], row["powers"][row["error"]]) > 1e-4, row


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
    assert "undecidable: a 20 % error in sigma (19 % found)" in text  # 44 % in variance
    report = audit(model, "mimetic_attention")
    assert report.to_dict()["powers"]["mimetic_attention"][error_in("alpha_qk")] > 0.99
    assert max(map(len, str(report).splitlines())) < 160


def test_a_layer_scale_that_networks_start_from_is_undecidable():
    untouched = ConvNeXt(16, 2, 3, 2, 10, layer_scale=1e-6)
    report = audit(untouched, "layer_scale_identity", value=1e-6)
    assert report.outcomes["layer_scale_identity"] == "undecidable"
    assert not report.passed
    set_to = wi.layer_scale_identity_(untouched, value=0.1)
    assert audit(set_to, "layer_scale_identity", value=0.1).passed


@pytest.mark.slow
def test_positions_that_networks_start_from_are_undecidable():
    """Sinusoidal codes are the default of our ViT; other scales, other starts and other tables are decided."""
    torch.manual_seed(0)
    ours, learned = ViT(32, 8, 32, 2, 2, 10), ViT(32, 8, 32, 2, 2, 10, positions="learned")
    scaled = ViT(32, 8, 32, 2, 2, 10, position_scale=2.0)
    for model, gamma in ((ours, 1.0), (scaled, 2.0)):
        before = copy.deepcopy(model.state_dict())
        state = torch.get_rng_state()
        report = audit(model, "sinusoidal_positions", gamma=gamma)
        assert report.outcomes == {"sinusoidal_positions": "undecidable"}
        assert not report.passed
        assert "the network's default start may be the same: `pos_embed positions`" in str(report)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert "sinusoidal_positions" not in [n for n, fits in audit(model).verdicts.items() if fits]
    assert audit(wi.sinusoidal_positions_(scaled, gamma=1.0), "sinusoidal_positions").passed
    assert audit(wi.sinusoidal_positions_(ours, gamma=2.0), "sinusoidal_positions", gamma=2.0).passed
    assert audit(learned, "sinusoidal_positions").outcomes == {"sinusoidal_positions": "failed"}
    assert audit(wi.sinusoidal_positions_(learned), "sinusoidal_positions").passed
    report = audit(learned.state_dict(), "sinusoidal_positions")  # timm's names as well as ours
    assert report.outcomes == {"sinusoidal_positions": "undecidable"}
    learned.pos_embed.requires_grad_(False)
    assert audit(learned, "sinusoidal_positions").passed, "the module says what it starts from"
    fixed = nn.Module()
    fixed.register_buffer("pos_embed", torch.zeros(1, 12, 32))
    assert audit(wi.sinusoidal_positions_(fixed), "sinusoidal_positions").outcomes == {
        "sinusoidal_positions": "undecidable"
    }


OF_LAYER_SCALE = {
    "convnext": lambda value: ConvNeXt(16, 2, 3, 2, 10, layer_scale=value),
    "vit": lambda value: ViT(16, 4, 16, 2, 2, 10, layer_scale=value),
}


@pytest.mark.parametrize("make", OF_LAYER_SCALE.values(), ids=OF_LAYER_SCALE)
def test_any_layer_scale_may_be_the_networks_own(make):
    untouched = make(0.1)
    assert audit(untouched, "layer_scale_identity").outcomes == {"layer_scale_identity": "undecidable"}
    assert audit(untouched, "layer_scale_identity", value=0.2).outcomes == {"layer_scale_identity": "failed"}
    assert audit(wi.layer_scale_identity_(untouched, value=0.2), "layer_scale_identity", value=0.2).passed
    assert audit(wi.layer_scale_identity_(make(0.5)), "layer_scale_identity").passed
    alone = audit(untouched.state_dict(), "layer_scale_identity", value=0.2)
    assert alone.outcomes == {"layer_scale_identity": "undecidable"}


def test_default_entries_that_an_initialiser_gives_are_named():
    torch.manual_seed(0)
    model, default = ViT(32, 8, 32, 2, 2, 10), "the default start of torch's layers"
    report = audit(model, "kaiming_uniform")
    assert report.powers["kaiming_uniform"][default] < 1e-3
    assert f"{default} (< 1 % found)" in str(report)
    for name, given, caught in (("xavier", {"gain": 3**-0.5}, False), ("xavier", {}, True), ("trunc_normal", {}, True)):
        wi.get(name, select="*attn.proj*", **given)(model, generator=seeded())
        report = audit(model, name, select="*attn.proj*", **given)  # d inputs and outputs
        assert report.passed
        assert (report.powers[name][default] > 0.99) == caught


# --- undecidable ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: ConvNeXt(16, 4, 7, 2, 10, expansion=2), {"b": 0.07}),
        (lambda: ViT(32, 8, 16, 2, 2, 10), {"b": 0.07}),
        (lambda: ViT(32, 8, 16, 2, 2, 10), {"mode": "rows", "sigma": 0.07}),
        (lambda: ViT(32, 8, 32, 2, 2, 10), {"mode": "rows", "sigma": 0.1}),
    ],
)
def test_untouched_networks_do_not_pass_where_the_default_start_is_inside_the_interval(make, parameters):
    torch.manual_seed(0)
    report = audit(make(), "mimetic_mlp", **parameters)
    assert not report.passed
    if not report.failures:
        assert report.outcomes == {"mimetic_mlp": "undecidable"}
        assert "UNDECIDABLE" in str(report)
        assert "too small to tell from the default start" in str(report)
        assert "undecidable" in report.summary()


def test_untouched_layers_beside_initialised_ones_are_found_where_that_is_possible():
    torch.manual_seed(0)
    model = ViT(32, 8, 96, 4, 3, 10)
    wi.mimetic_mlp_(model, layers=[0, 1, 3])
    report = audit(model, "mimetic_mlp")
    assert {check.layer for check in report.failures} >= {2}


# --- impulses ------------------------------------------------------------------------------------------------------


@functools.cache
def solved() -> nn.Module:
    torch.manual_seed(0)
    return wi.impulse_attention_(ViT(32, 4, 96, 2, 3, 10), generator=seeded())


@pytest.mark.parametrize(("factor", "passes"), [(0.5, False), (1.0, True), (2.8, False)])
def test_logits_of_the_wrong_size(factor, passes):
    model = copy.deepcopy(solved())
    for part in anatomy.attention(model):
        part.write("q", part.read("q") * factor)
    report = audit(model, "impulse_attention")
    assert report.passed == passes
    assert {check.statistic for check in report.failures} <= {"logit factor"}


def test_impulses_may_be_drawn_independently():
    """Two of three heads with one offset, and filters whose pixels are drawn one by one, are legitimate."""
    model = wi.impulse_attention_(ViT(32, 4, 96, 1, 3, 10), offsets=[(0, 1), (0, 1), (1, 0)], generator=seeded())
    assert audit(model, "impulse_attention").passed
    mixer = ConvMixer(64, 2, 3, 4, 5)
    for i, part in enumerate(anatomy.depthwise(mixer)):
        pixels = torch.randint(9, (64,), generator=seeded(i))
        part.write(torch.eye(9)[pixels].reshape(64, 3, 3))
    assert audit(mixer, "impulse_filters").passed
    for part in anatomy.depthwise(mixer):
        part.write(torch.eye(9)[torch.zeros(64, dtype=torch.long)].reshape(64, 3, 3))
    assert "uses of a pixel" in {check.statistic for check in audit(mixer, "impulse_filters").failures}


# --- weight selection ----------------------------------------------------------------------------------------------


def teacher_and_student(elements: str = "uniform") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    teacher, student = ViT(16, 4, 64, 3, 4, 5), ViT(16, 4, 32, 2, 2, 5)
    wi.select_weights_(student, teacher, elements=elements, generator=seeded())
    return teacher, student


@pytest.mark.slow
@pytest.mark.parametrize(
    "elements", ["uniform", "linspace", "consecutive", "random", "random-inconsistent", "l1", "magnitude"]
)
def test_every_rule_of_selection_passes_its_own_audit(elements):
    teacher, student = teacher_and_student(elements)
    for model in (student, student.state_dict(), copy.deepcopy(student).half()):
        report = audit(model, "select_weights", config={"num_heads": 2}, teacher=teacher, elements=elements)
        assert report.passed, str(report)
    for other in {"uniform", "linspace", "consecutive"} - {elements}:
        assert not audit(student, "select_weights", teacher=teacher, elements=other).passed
    consistent = elements in ("uniform", "linspace", "consecutive", "random")
    assert audit(student, "select_weights", teacher=teacher, elements="random").passed == consistent


def test_one_changed_bit_and_one_tensor_with_other_indices_are_named():
    teacher, student = teacher_and_student()
    fc1 = student.blocks[1].mlp.fc1
    with torch.no_grad():
        fc1.weight[3, 5] = torch.nextafter(fc1.weight[3, 5], torch.tensor(9.0))
    (failure,) = audit(student, "select_weights", teacher=teacher).failures
    assert (failure.name, failure.statistic) == ("blocks.1.mlp.fc1.weight", "entries")
    _, student = teacher_and_student()
    with torch.no_grad():  # reads the channels 1, 3, 5, ... of the stream in place of 0, 2, 4, ...
        student.blocks[0].mlp.fc1.weight.copy_(teacher.blocks[0].mlp.fc1.weight[::2, 1::2])
    for elements in ("uniform", "random"):
        (failure,) = audit(student, "select_weights", teacher=teacher, elements=elements).failures
        assert (failure.name, failure.statistic) == ("blocks.0.mlp.fc1.weight", "entries")


def test_selection_needs_a_teacher():
    assert "teacher" in audit(ViT(16, 4, 32, 2, 2, 5)).skipped["select_weights"]


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
    if not math.isfinite(value) and name in ("conv_covariance", "random_filters"):
        assert "NaN or infinite" in {check.statistic for check in report.failures}


def test_empty_kernels_are_named():
    state = {"a.weight": torch.zeros(8, 1, 0, 0), "b.weight": torch.randn(8, 1, 3, 3)}
    with pytest.raises(AnatomyError, match=r"random_filters: .*`a.weight` \(8, 1, 0, 0\); strict=False"):
        audit(state, "random_filters")
    assert audit(state, "random_filters", strict=False).unparsed == ("a.weight",)
    with pytest.raises(AnatomyError, match=r"`a.weight` \(8, 1, 0, 0\); none can be used"):
        audit({"a.weight": state["a.weight"]}, "box_filters")
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 2, 3))
    model[1].weight = nn.Parameter(torch.zeros(0, 2, 3))
    with pytest.raises(DataError, match="expected a weight with entries"):
        audit(model, "xavier")


@pytest.mark.parametrize("mode", ["scalar", "rows", "anticorrelated"])
def test_empty_first_layers_of_mlps_are_named(mode):
    state = {f"h.{i}.mlp.fc1.weight": torch.zeros(8, 0) for i in range(2)}
    state |= {f"h.{i}.mlp.fc2.weight": torch.zeros(0, 8) for i in range(2)}
    with pytest.raises(AnatomyError, match=r"`h.0.mlp`: expected fc1 with entries, found the shape \(8, 0\)"):
        audit(state, "mimetic_mlp", mode=mode)
    assert "expected fc1 with entries" in audit(state).skipped["mimetic_mlp"]
    if mode != "anticorrelated":
        model = nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": nn.Linear(3, 4), "fc2": nn.Linear(4, 3)})})
        model["mlp"]["fc1"].weight = nn.Parameter(torch.zeros(4, 0))
        model["mlp"]["fc2"].weight, model["mlp"]["fc2"].bias = nn.Parameter(torch.zeros(0, 4)), None
        with pytest.raises(AnatomyError, match=r"expected a weight with inputs, found the shape \(4, 0\)"):
            wi.mimetic_mlp_(model, mode=mode)


@pytest.mark.parametrize("fc1", [torch.ones(8, 4), torch.linspace(-1, 1, 8)[:, None]], ids=["constant", "one input"])
def test_first_layers_without_noise_fail(fc1):
    state = {f"h.{i}.mlp.{n}.weight": w for i in range(2) for n, w in {"fc1": fc1, "fc2": fc1.T}.items()}
    report = audit(state, "mimetic_mlp", mode="rows")
    assert report.outcomes == {"mimetic_mlp": "failed"}
    assert fc1.shape[1] == 1 or all(math.isfinite(p) for check in report.checks for p in check.power.values())


# --- what was not read ---------------------------------------------------------------------------------------------


def convit() -> nn.Module:
    torch.manual_seed(0)
    return shims.timm().create_model(
        "convit_tiny", img_size=32, patch_size=8, num_classes=4, local_up_to_layer=2, depth=3
    )


@pytest.mark.slow
def test_attention_that_cannot_be_read_makes_initialiser_and_audit_fail():
    model = convit()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AnatomyError, match=r"mimetic_attention_: .*`blocks.0.attn.qk.weight`.*strict"):
        wi.mimetic_attention_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(AnatomyError, match=r"mimetic_attention: expected attention modules that can be read"):
        audit(model, "mimetic_attention")
    with pytest.warns(UserWarning, match=r"mimetic_attention_: 8 tensors look like .*`blocks.0.attn.qk.weight"):
        wi.mimetic_attention_(model, strict=False, generator=seeded())
    report = audit(model, "mimetic_attention", strict=False)
    assert report.passed
    assert len(report.unparsed) == 8  # four matrices in each of two layers
    assert "NOT AUDITED, look like parts and were not read: blocks.0.attn.qk.weight" in str(report).splitlines()[0]
    assert "mimetic_attention: passed, all 40 checks of what was read" in str(report)
    assert report.summary() == "passed, 0 of 40 checks failed, 8 tensors not audited"
    assert "does not apply, expected attention modules that can be read, found 8" in str(audit(model))


def test_mlps_and_filters_that_cannot_be_read():
    state = {
        **{f"h.{i}.mlp.{n}.weight": torch.randn(8, 8) for i in range(2) for n in ("fc1", "fc2")},
        "h.2.mlp.expand.weight": torch.randn(8, 4),
        "h.2.mlp.contract.weight": torch.randn(4, 8),
    }
    with pytest.raises(AnatomyError, match=r"MLPs that can be read, found 2 .*`h.2.mlp.expand.weight` \(8, 4\)"):
        audit(state, "mimetic_mlp")
    with pytest.raises(AnatomyError, match="none can be used"):
        wi.mimetic_mlp_(nn.ModuleDict({"mlp": nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3)})}))


def test_strict_is_checked_and_joins_a_list_of_initialisers():
    vit = ViT(32, 8, 48, 1, 3, 10)
    with pytest.raises(UsageError, match="strict: expected true or false, found 1"):
        wi.mimetic_attention_(vit, strict=1)
    assert wi.parameters("mimetic_attention")["strict"] is True
    assert wi.get("mimetic_attention", strict=False)(vit) is vit
    report = audit(vit, "mimetic_attention+zero_init", strict=False)
    assert isinstance(report, AuditReport)
    assert report.unparsed == ()


def test_filters_that_are_not_square_in_a_module():
    model = nn.Sequential(*(nn.Conv2d(64, 64, k, groups=64) for k in (3, (1, 7), 3)))
    numbers = {"sigma0": 0.2, "v": 0.2, "a": 0.0}
    with pytest.raises(UsageError, match=r"`1`: .*found 1 x 7.*strict=False uses the 2 other layers"):
        wi.conv_covariance_(model, **numbers)
    with pytest.warns(UserWarning, match="not square: `1` 1 x 7"):
        wi.conv_covariance_(model, **numbers, strict=False, generator=seeded())
    report = audit(model, "conv_covariance", **numbers, strict=False)
    assert report.passed, str(report)
    assert report.unparsed == ("1.weight",)
