"""Initialisers and audits work on effective weights, or refuse a wrapped network by one line before the first write."""

import copy
import functools
import warnings

import pytest
import torch
import wrappings
from families import seeded
from torch import nn
from torch.nn.utils import parametrizations, prune

import weightscope.init as wi
from weightscope import anatomy
from weightscope.analysis.attention_products import products
from weightscope.analysis.within_network import covariance_within
from weightscope.auditing import audit
from weightscope.errors import DataError, UsageError
from weightscope.fits.one_network import fit_network
from weightscope.fits.pretrained import fit_pretrained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kaiming_uniform", "mimetic_attention", "conv_covariance"])
def test_columns_of_the_table_of_the_documentation_are_true(name):
    rows = [line.strip("| ").split(" | ") for line in wrappings.PAGE.read_text().splitlines() if line.startswith("|")]
    at = list(wrappings.INITIALISERS).index(name) + 1
    assert [row[at] for row in rows[2:]] == wrappings.column(name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_layers_in_random_wrappings(seed):
    assert wrappings.random_case(seed) in (wrappings.RIGHT, wrappings.REFUSED)


ADAPTERS = ("LoRA around a layer", "LoRA in a layer")


@pytest.mark.slow
@pytest.mark.parametrize("kind", wrappings.LAYERS)
def test_an_audit_reads_the_weights_that_layers_compute_with(kind):
    model = wrappings.wrapped(wi.xavier_(wrappings.vit(), generator=seeded()), kind)
    refusal = {"int8 weights": "cannot be read as weights"} | dict.fromkeys(ADAPTERS, "lora_A` changes a weight")
    if kind in refusal:
        with pytest.raises(DataError, match=refusal[kind]):
            audit(model, "xavier")
        if kind not in ADAPTERS:
            return
        fit = functools.partial(fit_network, structure="identity_product")
        for command in (products, covariance_within, fit, fit_pretrained, functools.partial(wi.transfer_, model)):
            with pytest.raises(DataError, match=refusal[kind]):
                command(model)
        for name, value in model.named_parameters():
            if name.endswith("lora_B"):
                nn.init.zeros_(value)  # as adapters start
    found, expected = (
        {
            (check.name, check.statistic): check.found
            for check in audit(one, "xavier").checks
            if check.statistic != "likeness"
        }
        for one in (model, wrappings.bare(model)[0])
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_part_of_a_network_that_is_called_as_in_an_adapter_is_none():
    """timm's DLA begins with a sequence of layers called `base_layer`."""
    network = nn.ModuleDict({"base_layer": nn.Sequential(nn.Linear(4, 4)), "level": nn.Linear(4, 4)})
    before = {name: value.clone() for name, value in network.state_dict().items()}
    wi.kaiming_uniform_(network, generator=seeded())
    audit(network, "kaiming_uniform")
    kept = [name for name, value in network.state_dict().items() if torch.equal(value, before[name])]
    assert all(name.endswith("bias") for name in kept)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrappings.wrapped(wrappings.vit(), "quantize_dynamic"), "is quantised; do this before quantising"),
        (lambda: wrappings.wrapped(wrappings.vit(), "DTensor (FSDP2)"), "is a DTensor, sharded or quantised"),
        (lambda: wrappings.vit().to("meta"), "on the meta device and holds no numbers"),
        (lambda: wrappings.wrapped(wrappings.vit(), "inference mode"), "made in inference mode and cannot be written"),
        (lambda: wrappings.wrapped(wrappings.vit(), "torch.jit.trace"), "is compiled by TorchScript"),
        (lambda: nn.Sequential(wrappings.vit(), nn.LazyLinear(3)), r"has no shape yet \(a lazy layer\)"),
        (lambda: wrappings.wrapped(wrappings.vit(), "own, without an inverse"), "is computed and cannot be set"),
        (lambda: wrappings.wrapped(wrappings.vit(), "spectral_norm"), "would not have the weights drawn"),
    ],
)
@pytest.mark.parametrize("name", ["impulse_attention", "mimetic_mlp"])
def test_refusals_say_why(make, message, name):
    with pytest.raises(DataError, match=f"{name}_: .*{message}"):
        wi.get(name)(make())


def test_other_layers_of_a_wrapped_network_can_be_set():
    model = wrappings.vit()
    parametrizations.spectral_norm(model.head)
    wi.xavier_(model, select="blocks*", generator=seeded())
    assert audit(model, "xavier", select="blocks*").passed


def test_a_parametrised_layer_has_its_place_in_a_fit():
    """Parts are found by the layer's own names, and written by initialisers only."""
    model = wrappings.wrapped(wrappings.vit(), "own parametrisation")
    bare = wrappings.bare(model)[0]
    for part, same in zip(anatomy.attention(model), anatomy.attention(bare), strict=True):
        assert (part.name, part.parameters) == (same.name, same.parameters)
        assert torch.equal(part.read("q"), same.read("q"))
        with pytest.raises(DataError, match=r"`blocks.0.attn.qkv.weight` is computed from other tensors"):
            part.write("q", part.read("q"))
        break
    source = copy.deepcopy(bare)
    assert torch.equal(wi.transfer_(wrappings.vit(), model).head.weight, source.head.weight)


def test_what_sets_nothing_says_so():
    @wi.INITIALISERS.register("idle_for_a_test", source="none", needs="anything")
    def idle_(module, *, generator=None):
        return module

    try:
        with pytest.raises(UsageError, match="idle_: no tensor of ViT was set"):
            wi.get("idle_for_a_test")(wrappings.vit())
    finally:
        wi.INITIALISERS.pop("idle_for_a_test")
    assert wi.default_(wrappings.vit().to("meta")) is not None


def test_overwriting_is_seen_in_parametrised_layers():
    from weightscope.auditing import track

    model = wrappings.wrapped(wrappings.vit(), "weight_norm, hook")
    with track(model) as changes, warnings.catch_warnings():
        wi.xavier_(model, generator=seeded())
        with torch.no_grad():
            model.head.weight_v.zero_()
    assert {one.name: one.initialiser for one in changes.overwritten} == {"head.weight_v": "xavier_"}


def test_a_mask_that_leaves_filters_at_zero_is_refused():
    """Filters that are pruned as a whole stay so; of the others, each keeps its impulse."""
    model = nn.Sequential(nn.Conv2d(9, 9, 3, groups=9))
    mask = torch.ones(9, 1, 3, 3)
    mask[8], mask[4, 0, 1, 1] = 0, 0  # the impulse of channel c is at pixel c
    prune.custom_from_mask(model[0], "weight", mask)
    before = model[0].weight.detach().clone()
    with pytest.raises(DataError, match=r"`0.weight` .* its mask leaves 1 of 9 units at zero, number 4 first"):
        wi.impulse_filters_(model, order="given")
    assert torch.equal(model[0].weight, before)
    model[0].weight_mask[4, 0, 1, 1] = 1
    wi.impulse_filters_(model, order="given")
    assert model[0].weight.flatten(1).sum(1).tolist() == [1.0] * 8 + [0.0]


class Standardised(nn.Conv2d):
    def forward(self, x):
        flat = self.weight.flatten(1)
        weight = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
        return self._conv_forward(x, weight.view_as(self.weight), self.bias)


class Scaled(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight, self.bias)


class Same(nn.Conv2d):
    """With padding of its own, which changes no weight."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 1, 2)))


@pytest.mark.parametrize(
    "layer", [Standardised(3, 6, 3, padding=1), Standardised(4, 8, 2, stride=2, groups=2), Scaled(5, 7)]
)
def test_layers_that_scale_their_weight_in_the_forward_pass_are_refused(layer):
    model = nn.Sequential(Same(3, 4, (3, 5), stride=2, dilation=2), layer)
    before = copy.deepcopy(model.state_dict())
    message = rf"`1` \({type(layer).__name__}\) computes with other numbers than its weight"
    for use in (wi.xavier_, lambda m: audit(m, "xavier")):
        with pytest.raises(DataError, match=message):
            use(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert audit(wi.xavier_(model[:1]), "xavier").checks


def test_a_layer_that_cannot_be_called_is_refused():
    """Its own forward pass may compute with other numbers."""

    class Where(nn.Linear):
        def forward(self, x, where):
            return super().forward(x[where])

    model = nn.Sequential(Where(4, 4))
    before = model[0].weight.detach().clone()
    with pytest.raises(DataError, match=r"`0` \(Where\) could not be called on one input"):
        wi.xavier_(model)
    assert torch.equal(model[0].weight, before)
