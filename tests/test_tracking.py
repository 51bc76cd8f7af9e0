"""`track` tells which initialised parameters were overwritten, by whom, and is silent about the rest."""

import numpy as np
import pytest
import shims
import torch
from families import FAMILIES, seeded
from torch import nn

from weightscope import init as wi
from weightscope.auditing.overwritten import track
from weightscope.errors import DataError, UsageError
from weightscope.networks import ConvMixer, ViT

QKV, PROJ = "blocks.{}.attn.qkv.weight", "blocks.{}.attn.proj.weight"
ATTENTION = {name.format(i) for name in (QKV, PROJ) for i in (0, 1)}
SPARE = torch.zeros(72, 24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ViT(32, 8, 24, 2, 3, 10)


def tracked(model, *then):
    """`mimetic_attention_`, and what happens after it, under `track`."""
    with track(model) as t:
        wi.mimetic_attention_(model, generator=seeded())
        for step in then:
            step(model)
    return t


def test_nothing_overwritten(model):
    t = tracked(model, lambda m: nn.init.zeros_(m.head.weight), lambda m: m(torch.zeros(1, 3, 32, 32)))
    assert set(t.initialised) == ATTENTION  # not the head, which nobody initialised
    assert set(t.initialised.values()) == {"mimetic_attention_"}
    assert t.overwritten == ()
    t.check()


def qkv(model):
    return model.blocks[1].attn.qkv


def data_normal(model):
    qkv(model).weight.data.normal_(generator=seeded(1))


def one_entry(model):
    with torch.no_grad():
        qkv(model).weight[5, 7] += 1.0


WAYS = {  # a way to overwrite, and whether the code that does it is known
    "data_normal": (data_normal, True),
    "one_entry": (one_entry, True),
    "by_init": (lambda m: nn.init.trunc_normal_(qkv(m).weight, std=0.02, generator=seeded(1)), True),
    "reset": (lambda m: qkv(m).reset_parameters(), True),
    "many_at_once": (lambda m: torch._foreach_zero_([qkv(m).weight.data]), True),
    "data_assigned": (lambda m: setattr(qkv(m).weight, "data", torch.zeros(72, 24)), False),
    "numpy_memory": (lambda m: qkv(m).weight.detach().numpy().fill(3), False),
    "new_module": (lambda m: setattr(m.blocks[1].attn, "qkv", nn.Linear(24, 72)), False),
    "old_memory": (lambda m: setattr(qkv(m).weight, "data", SPARE), False),
}


@pytest.mark.parametrize("within", [True, False], ids=["within", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_overwrite_is_reported(way, within, model):
    overwrite, seen = WAYS[way]
    t = tracked(model, *[overwrite] * within)
    if not within:
        assert t.overwritten == ()
        overwrite(model)
    (found,) = t.overwritten
    assert (found.name, found.initialiser) == (QKV.format(1), "mimetic_attention_")
    assert 0 < found.changed <= 1
    if within and seen:
        assert f"{__file__}:" in found.by
        assert f"in {overwrite.__name__}, called from" in found.by
    message = r"1 of 4: `blocks.1.attn.qkv.weight`, set by mimetic_attention_, was overwritten by .* % changed\)"
    with pytest.raises(DataError, match=message):
        t.check()


def test_the_same_numbers_again_are_no_overwriting(model):
    with track(model) as t:
        wi.mimetic_attention_(model, generator=seeded())
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
        assert t.overwritten == ()
        data_normal(model)
        wi.mimetic_attention_(model, generator=seeded())
    assert t.overwritten == ()


def halved(module, *, generator):
    with torch.no_grad():
        module.head.weight.mul_(0.5)
    return module


def zeroed(module, *, generator):
    nn.init.zeros_(module.head.bias)
    return module


def test_later_joined_and_own_initialisers_are_no_culprits(model):
    with track(model) as t:
        wi.trunc_normal_(model, generator=seeded())
        wi.compose("mimetic_attention", halved)(model, generator=seeded())
        wi.get(zeroed)(model)
    assert t.overwritten == ()
    named = dict.fromkeys(ATTENTION, "mimetic_attention_") | {"head.weight": "halved", "head.bias": "zeroed"}
    assert t.initialised.items() >= named.items()
    assert t.initialised["blocks.0.mlp.fc2.weight"] == "trunc_normal_"
    nn.init.ones_(model.head.bias)
    assert [(o.name, o.initialiser, o.changed) for o in t.overwritten] == [("head.bias", "zeroed", 1.0)]


@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.bfloat16, nn.Module.half], ids=lambda f: f.__name__)
def test_a_cast_is_no_overwriting(cast, model):
    t = tracked(model, cast)
    assert t.overwritten == ()
    model.blocks[0].attn.proj.weight.data.normal_(generator=seeded(3))
    assert [o.name for o in t.overwritten] == [PROJ.format(0)]


def test_a_large_language_model_library_overwrites_mamba():
    """The bug that went unnoticed for months: `init_weights` after the initialiser resets A_log, dt and the rest."""
    shims.transformers()
    model = FAMILIES["hf-mamba2"].make()
    with track(model) as t:
        wi.mimetic_ssm_(model)
        model.apply(model._init_weights)
    names = {o.name for o in t.overwritten}
    assert {"backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.dt_bias"} <= names
    assert all("transformers" in o.by for o in t.overwritten)
    assert any("in init_mamba2_weights" in o.by or "in _init_weights" in o.by for o in t.overwritten)
    with track(model) as t:  # the other order is right
        model.apply(model._init_weights)
        wi.mimetic_ssm_(model)
    assert t.overwritten == ()


def test_training_counts_as_overwriting_and_names_the_optimiser_call(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    t = tracked(model, lambda m: m(torch.ones(2, 3, 32, 32)).square().mean().backward(), lambda _: optimiser.step())
    assert {o.name for o in t.overwritten} == ATTENTION
    assert all("test_tracking.py" in o.by for o in t.overwritten)


def test_buffers_and_ties():
    model = ConvMixer(8, 2, 3, 4, 10)
    model.again = model.blocks[0][0].fn[0]  # tied
    with track(model) as t:
        wi.conv_covariance_(model, preset="cifar-patch2", generator=seeded())
        model(torch.randn(4, 3, 8, 8, generator=seeded()))  # batch statistics move, which nobody initialised
    assert len(t.initialised) == 2
    assert t.overwritten == ()
    model.again.weight.data.zero_()
    assert len(t.overwritten) == 1


def test_bad_input_and_an_error_inside_leave_torch_as_it_was(model):
    with pytest.raises(UsageError, match="expected a module, found ndarray"):
        track(np.zeros(3))
    with pytest.raises(ZeroDivisionError):
        tracked(model, lambda _: 1 / 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
